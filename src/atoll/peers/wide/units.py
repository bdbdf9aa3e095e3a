"""Which units of the data each worker has trained, so that each counts once though islands come and go.

    unit     the batches of one inner step of a worker that is no faster than others: (shard, index). Shard m is worker
             m's own
    load     units that a worker trains in an inner step
    run      what a worker says that it trained: from one of its units on, one unit of a shard after another
    counts   the inner step through which a worker's work is in what others hold: of each fragment the last step at
             which a message of its left that landed with somebody else, and of these the smallest
    lease    a few units of a shard that nobody owns now, or that were left behind in one, for one worker

A worker says what it trained before the message that holds it leaves, and all say whose messages landed. So of a worker
that is lost it is known what counts, once the others have ended all that began with it, and the rest is handed out
again. Who comes back goes on behind everything of its shard that anybody has or had.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from atoll.peers.wide.account import Account, Lease
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.messages import Message
from atoll.peers.wide.stays import Book, Run, Stay

LEASE = 16
"""Units that are handed out at once."""
_FAR = 1 << 53


@dataclass
class Units:
    """The account of a run.

    Args: ledger: where it is kept: what is told is written before. send: hands a message to the link. say: tells a
    person.
    """

    ledger: Ledger
    send: Callable[[int, Message], None]
    say: Callable[[str], None]
    stays: defaultdict[int, list[Stay]] = field(init=False)

    def __post_init__(self) -> None:
        self.book = Book(self.ledger)
        self.stays = defaultdict(list)
        self._loads: list[int] = self.ledger.fact("loads") or []
        for stay in self.book.stays():
            stay.load = self._load(stay.worker)
            self.stays[stay.worker].append(stay)
        self._accounts: dict[int, Account] = {}

    # who comes and goes

    def came(self, worker: int, life: str, step: int) -> int:
        """A worker says hello. `step`: the inner step that anybody has come to. Returns the unit from which its own
        shard goes on."""
        stays = self.stays[worker]
        if not stays or stays[-1].life != life:
            first = max((end for stay in self._all() for _, end in stay.holds(worker)), default=0)
            # what one before this one trained may not have been heard of yet
            pending = [stay for stay in stays if not stay.closed and stay.since is not None]
            unheard = max((stay.load * (step - stay.last) for stay in pending), default=0)
            with self.book.together():
                self.lost([worker])
                number, first = len(stays), first + max(0, unheard)
                stays.append(Stay(worker, number, life, first, load=self._load(worker)))
                self.book.write(stays[-1])
        return stays[-1].first

    def lost(self, workers: Iterable[int]) -> None:
        """Workers are gone."""
        for worker in workers:
            self._accounts.pop(worker, None)
            if (stays := self.stays[worker]) and not stays[-1].lost:
                stays[-1].lost = True
                self.book.write(stays[-1])

    def governed(self, step: int, workers: Collection[int]) -> None:
        """From this step on `workers` take part, or are about to; who is lost by now does not."""
        for stay in self._all():
            before = stay.since, stay.until
            if stay.lost:
                stay.until = step if stay.until is None else stay.until
            elif stay.worker in workers:
                stay.since = step if stay.since is None else stay.since
            if (stay.since, stay.until) != before:
                self.book.write(stay)

    def begins(self, step: int, workers: Iterable[int]) -> None:
        """All go back to the state of a step. Those of `workers` have it, and so what they had in hand then; what was
        trained later is nothing any more."""
        self._accounts.clear()
        for stay in self._all():
            stay.keep(step)
            stay.lease, stay.parts = None, ()
            if stay.counts > step:
                # the checkpoints will tell what counted then
                stay.counts, stay.closed = 0, False
            if stay.until is not None:
                stay.until = min(stay.until, step + 1)
        for worker in workers:
            stays = self.stays[worker]
            for at, stay in reversed(list(enumerate(stays[:-1]))):
                if stay.runs:
                    stay.life, stay.lost, stay.closed, stay.until = stays[-1].life, False, False, None
                    del stays[at + 1 :]
                    break
        with self.book.together():
            self.book.clear()
            for stay in self._all():
                self.book.write(stay, stay.runs.values())

    # what they say

    def account(self, sender: int, account: Account, present: Sequence[int], here: Collection[int]) -> None:
        """A worker's account. `present`: who takes part; `here`: who does, or is about to."""
        stay = self.stays[sender][-1] if sender in self.stays else None
        if stay is None or stay.life != account.life or stay.closed:
            return
        with self.book.together():
            self._learn(stay, account)
            if stay.lost:
                return
            self._accounts[sender] = account
            if any(worker not in self._accounts for worker in present):
                return  # what they have in hand is not known
            self._close(min((self._accounts[worker].over for worker in present), default=-1))
            if stay.lease is None and sender in present and (lease := self._free(account.shards, here)):
                stay.lease = lease
                self.book.write(stay)
        if stay.lease and stay.lease not in account.leases:
            self.send(sender, Lease(stay.life, *stay.lease))

    def _load(self, worker: int) -> int:
        """Units that a worker trains in an inner step."""
        return self._loads[worker] if worker < len(self._loads) else 1

    def _learn(self, stay: Stay, account: Account) -> None:
        if self._loads != [*account.loads]:  # the same of all, from their options
            self._loads = [*account.loads]
            self.ledger.note("loads", self._loads)
            for each in self._all():
                each.load = self._load(each.worker)
        before, fresh = (stay.lease, stay.counts), list[Run]()
        for run in (Run(*each) for each in account.runs):
            if stay.runs.get(run.key) != run:
                self._compare(stay, run)
                stay.runs[run.key] = run
                fresh.append(run)
        if stay.lease and stay.rest() is None:
            stay.lease = None
        for worker, parts in account.counts:
            self._count(worker, parts)
        if fresh or (stay.lease, stay.counts) != before:
            self.book.write(stay, fresh)

    def _compare(self, stay: Stay, run: Run) -> None:
        """Nobody else may have what a worker trained."""
        known = stay.runs.get(run.key)
        start = known.end if known else run.first
        for other in self._all():
            for first, end in other.holds(run.shard) if other is not stay else ():
                if (first := max(first, start)) < (end := min(end, run.end)):
                    self.book.overlap(run.shard, first, end, stay.worker, other.worker)
                    self.say(
                        f"units {first} to {end - 1} of shard {run.shard} were trained by worker {stay.worker}, though "
                        f"worker {other.worker} had them"
                    )

    def _count(self, worker: int, parts: tuple[int, ...]) -> None:
        """Messages of a worker that left at these steps have landed, one of each fragment."""
        for stay in self.stays.get(worker, ()):
            if not stay.closed and len(stay.parts or parts) == len(parts):
                # what left later is of a later life
                mine = [step if stay.until is None or step < stay.until else 0 for step in parts]
                known, stay.parts = stay.parts, tuple(max(pair) for pair in zip(stay.parts or mine, mine, strict=True))
                stay.counts = max(stay.counts, min(stay.parts, default=0))
                if stay.parts != known:
                    self.book.write(stay)

    def _close(self, over: int) -> None:
        """Give back what does not count of those who are lost, once what began with them has ended."""
        for stay in self._all():
            if stay.lost and not stay.closed and stay.until is not None and over >= stay.until - 1:
                self._doubt(stay)
                stay.keep(stay.counts)
                stay.lease, stay.closed = None, True
                self.book.forget(stay)
                self.book.write(stay, stay.runs.values())

    def _doubt(self, stay: Stay) -> None:
        """Where more counts than was said, all counts that it can have been."""
        last = stay.last
        if stay.counts <= last:
            return
        own = max((run.end for run in stay.runs.values() if run.shard == stay.worker), default=stay.first)
        ordinal, units = stay.load * last + 1, stay.load * (stay.counts - last)
        doubtful = [Run(ordinal, stay.worker, own, units)]
        if rest := stay.rest():
            shard, first, end = rest
            doubtful.append(Run(ordinal, shard, first, min(units, end - first)))
        for run in doubtful:
            self._compare(stay, run)
            stay.runs[run.key] = run
        named = ", ".join(f"{run.first} to {run.end - 1} of shard {run.shard}" for run in doubtful)
        self.say(
            f"worker {stay.worker} was lost before it could say what it trained at steps {last + 1} to {stay.counts}; "
            f"nobody trains units {named} again, some of which it may not have come to"
        )

    def _free(self, shards: int, here: Collection[int]) -> tuple[int, int, int] | None:
        """Units that nobody has, and whose owner is not there or has passed them by: first those before which and after
        which others were trained, then those of the shard of which fewest were handed out."""
        taken, given = defaultdict[int, list[tuple[int, int]]](list), defaultdict[int, int](int)
        for stay in self._all():
            for shard, first, end in stay.all():
                taken[shard].append((first, end))
                given[shard] += (end - first) * (shard != stay.worker)
        found: list[tuple[bool, int, int, int, int]] = []
        for shard in range(shards):
            settled = all(stay.closed or not stay.lost for stay in self.stays.get(shard, ()))
            owner = self._accounts.get(shard)
            if settled and (owner or shard not in here):
                first, end = _gap(taken[shard], owner.next if owner else _FAR)
                if first < end:
                    found.append((end == _FAR, given[shard], shard, first, min(first + LEASE, end)))
        return min(found)[2:] if found else None

    def _all(self) -> Iterator[Stay]:
        return (stay for stays in self.stays.values() for stay in stays)


def _gap(taken: list[tuple[int, int]], limit: int) -> tuple[int, int]:
    """The first units that are not taken, below those that the owner is still to come to."""
    first = 0
    for start, end in sorted(taken):
        if start > first:
            return first, min(start, limit)
        first = max(first, end)
    return first, limit
