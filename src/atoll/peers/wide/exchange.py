"""One exchange on one island, without I/O: it is told what came, and says what to send.

    heads        from everyone to everyone: `rounds.admit` decides alike on every island
    bulk         Reduce: chunk by chunk to the owner of each part, who sums in worker order and tells everyone the mean
                 Keep: chunk by chunk to all who hear this one
    votes        whoever has all of it says so, with a digest; when all have said the same, the round counts

Everything that came, and what was sent, is kept until the round counts, so that any of it can be asked for again, and
so that survivors can go on without someone who is gone: the coordinator says who is out (`settle`), what those had to
sum is split among those left, their contributions are left out everywhere, and votes are cast anew. Nothing is used
before all who are left have it: what is used is the same everywhere, whatever happens in between.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from hashlib import sha256

import torch

from atoll.parts.codecs import exact
from atoll.peers.rounds import Header, admit, header_of, heard
from atoll.peers.wide.messages import CONTRIBUTION, LONG, MEAN, Bulk, Have, Head, Report, Settle, Want
from atoll.peers.wide.offers import view
from atoll.peers.wide.pieces import WHOLE, Pieces, taken
from atoll.peers.wide.segments import Part
from atoll.trees import CHUNK, cut
from atoll.wire import Fold, Keep, Landed, Lost, Post, Reduce, Snapshot, Sum, Take

Send = Callable[[int, Head | Bulk | Have | Want], None]


class Exchange:
    """One worker's side of one meeting.

    Args: me: this worker. post: its contribution. take: as it will be taken, if it reads live tensors. send: hands a
    message to the link.
    Attributes: outcome: the answer, once it is there; error: why there cannot be one; version: how often the
    membership has shrunk; digest: of what everyone agreed on; held: the newest report to the coordinator that something
    is missing here, as long as it is not answered: meanwhile this worker votes on nothing.
    """

    def __init__(self, me: int, post: Post, take: Take | None, send: Send) -> None:
        self.me, self.post, self.version, self.digest = me, post, 0, ""
        self._take, self._send = take, send
        self.fold: Fold = Reduce(exact()) if isinstance(post.fold, Sum) else post.fold
        layout = post.source.layout
        # what all members' messages must have in common
        self.form = f"{layout.numel} elements of {layout.dtype}, {post.codec!r}, {post.fold!r}"
        self._out: list[tuple[tuple[int, ...], bool]] = []
        self._heads: dict[int, Head] = {}
        self._pieces = Pieces(me, post, self.fold)
        self._votes: dict[int, str] = {}
        self._verdict: Landed | Lost | None = None
        self._work: Iterator[None] | None = None
        self._told: set[tuple[Part, int]] = set()
        self._early: list[tuple[int, Bulk | Have]] = []
        self._room = self._most
        self._lacking = 0
        self._hashes: dict[int, bytes] = {}
        self._reports = 0
        self.held: int | None = None
        self.outcome: Landed | Lost | None = None
        self.error: str | None = None
        self.sent = 0

    # what a round is made of

    @property
    def left(self) -> tuple[int, ...]:
        """The members that are not gone."""
        gone = {worker for workers, _ in self._out for worker in workers}
        return tuple(worker for worker in self.post.to if worker not in gone)

    @property
    def overlapped(self) -> bool:
        """Whether training goes on meanwhile."""
        return self._take is None

    @property
    def _most(self) -> int:
        """Bytes of messages of a later version that are put by: about all that comes in one."""
        return 2 * self.post.source.layout.numel * self._pieces.dtype.itemsize + CHUNK

    def _hearers(self) -> tuple[int, ...]:
        """Who gets this worker's wire under `Keep`."""
        edges = self.post.edges
        return tuple(worker for worker in self.left if worker != self.me and (edges is None or worker in edges.tells))

    def _hears(self) -> tuple[int, ...]:
        """Whose contributions this worker needs."""
        assert isinstance(self._verdict, Landed)
        return heard(self._verdict, self.post.edges).peers

    # what happens

    def start(self) -> None:
        """Measure what is sent, and say so."""
        header = header_of(self.post)
        signals = tuple(sorted(header.signals.items()))
        mine = Head(self.post.key, self.post.to, header.weight, header.norm, signals, self.form)
        self._heads[self.me] = mine
        for worker in self.left:
            if worker != self.me:
                self._send(worker, mine)
        self._decide()

    def head(self, sender: int, head: Head) -> None:
        """A member's head; an error if it trains something else."""
        if head.to != self.post.to or sender not in self.left:
            return  # of another epoch, whose own members will be told
        if head.form != self.form:
            self.error = (
                f"worker {self.me} sends {self.form} for {self.post.key} but worker {sender} {head.form}; they must "
                "train the same model with the same method"
            )
        elif tuple(name for name, _ in head.signals) != tuple(sorted(self.post.signals)):
            self.error = (
                f"worker {sender} has other signals than worker {self.me} in {self.post.key}; give all the same"
            )
        elif sender not in self._heads:
            self._heads[sender] = head
            self._decide()

    def bulk(self, sender: int, bulk: Bulk) -> bool:
        """Bytes; those that fit nowhere are dropped. Whether they were of use."""
        if self._later(sender, bulk) or bulk.chunk >= len(self._pieces.chunks) or sender not in self.left:
            return False
        where = self._pieces.place(sender, bulk, self.version)
        if where is None or bulk.chunk in where or len(bulk.payload) != self._pieces.length(bulk):
            return False
        where[bulk.chunk] = taken(bulk.payload)
        self._lacking -= bulk.phase == MEAN or (isinstance(self.fold, Keep) and self._counts(sender))
        if bulk.phase == CONTRIBUTION and isinstance(self.fold, Reduce):
            self._sum(bulk.part, bulk.chunk)
        else:
            self._hash(bulk.chunk)
        self._finished()
        return True

    def _counts(self, sender: int) -> bool:
        """Whether a contribution is needed here, as far as is known."""
        return isinstance(self._verdict, Landed) and sender in heard(self._verdict, self.post.edges).peers

    def _later(self, sender: int, message: Bulk | Have) -> bool:
        """Whether a message is of a version that this worker has not been told of yet: it is put by, if there is room;
        what is not is asked for again."""
        if message.version <= self.version or sender not in self.left:
            return False
        size = len(message.payload) if isinstance(message, Bulk) else 0
        if len(self._early) < 4 * len(self._pieces.chunks) + LONG and size <= self._room:
            self._early.append((sender, message))
            self._room -= size
        return True

    def have(self, sender: int, have: Have) -> bool:
        """A vote, or what all others have voted; an error if members came to different bits. Whether it is news."""
        if self._later(sender, have) or have.version != self.version or sender not in self.left:
            return False
        voted = [worker for worker in self.left if worker != self.me] if have.all else [sender]
        news = any(self._votes.get(worker) != have.digest for worker in voted)
        self._votes |= dict.fromkeys(voted, have.digest)
        self._count()
        return news

    def want(self, sender: int, want: Want) -> None:
        """Send again what did not come."""
        if sender not in self.left:
            return
        owner, asked = self._pieces.segments.owners.get(want.part), sorted(set(want.chunks))
        if want.phase == CONTRIBUTION and (want.part == WHOLE if isinstance(self.fold, Keep) else owner == sender):
            for chunk in asked:
                if chunk < len(self._pieces.wires):
                    self._tell(sender, want.part, chunk)
        elif want.phase == MEAN and owner == self.me:
            held = self._pieces.means.get(want.part, {})
            for chunk in asked:
                if chunk in held:
                    self._send(sender, self._mean(want.part, chunk))

    def settle(self, settle: Settle) -> None:
        """The coordinator's word on who is out, from the first version on; what is known already changes nothing."""
        if self.held and (settle.answers >= self.held or len(settle.out) > len(self._out)):
            self.held = None
        for workers, counts in settle.out[len(self._out) :]:
            before = self.left
            self._out.append((workers, counts))
            if counts:
                continue
            self.version += 1
            if isinstance(self.fold, Reduce):
                self._pieces.segments.hand_over(workers, tuple(worker for worker in before if worker not in workers))
            self._pieces.means.clear()
            self._hashes.clear()
            self._votes.clear()
            self._verdict = None
        if self.outcome is None:
            self._decide()
            early, self._early, self._room = self._early, [], self._most
            for sender, message in early:
                (self.bulk if isinstance(message, Bulk) else self.have)(sender, message)  # pyright: ignore[reportArgumentType]
            self._finished()
            self._count()

    def work(self) -> bool:
        """Encode and send one chunk; whether there is more to do."""
        if self._work is None:
            return False
        work = self._work
        if next(work, True) and self._work is work:
            self._work = None
            self._finished()
        return True

    def stands(self) -> tuple[int, bool, tuple[int, ...]]:
        """The version, whether this worker has voted on it, and whom it waits for: not for who has yet to come."""
        silent = set[int]()
        if all(worker in self._heads for worker in self.left):
            silent = {origin for origin, _, _, _ in self._missing()} - {self.me}
            if not silent and self._complete():
                silent = {worker for worker in self.left if worker not in self._votes}
        return self.version, self.me in self._votes, tuple(sorted(silent - {self.me}))

    def report(self, epoch: int) -> Report:
        """How things stand, for the coordinator: if not all is here, nothing is voted on before it has answered."""
        version, complete, silent = self.stands()
        self._reports += 1
        self.held = None if complete else self._reports
        return Report(self.post.key, self.post.to, epoch, version, self._reports, complete, silent)

    def ask_again(self, of: Collection[int]) -> None:
        """Ask these for everything of theirs that is missing, and say again what any may have missed."""
        mine = self._heads.get(self.me)
        for worker in self.left:
            if worker != self.me and mine:
                self._send(worker, mine)
        for origin, phase, part, chunks in self._missing():
            for first in range(0, len(chunks) if origin in of else 0, LONG):
                self._send(origin, Want(self.post.key, phase, self.version, part, tuple(chunks[first : first + LONG])))
        self._vote()

    # how it goes on

    def _decide(self) -> None:
        """Once all heads are there: whose contributions count; then the bulk leaves."""
        dropped = [worker for workers, counts in self._out if not counts for worker in workers]
        asked = {*self.post.to} - {*dropped}
        if self._verdict is not None or not asked <= self._heads.keys():
            return
        nothing = Header(0.0, 0.0, {})
        headers = [
            Header(head.weight, head.norm, dict(head.signals)) if (head := self._heads.get(worker)) else nothing
            for worker in self.post.to
        ]
        self._verdict = admit(self.post.key, self.post.to, headers, self.post.quorum, dropped)
        if isinstance(self._verdict, Landed):
            # with all here of what comes last, all is here
            last = CONTRIBUTION if isinstance(self.fold, Keep) else MEAN
            self._lacking = sum(len(chunks) for _, phase, _, chunks in self._missing() if phase == last)
            if isinstance(self.fold, Reduce):
                # one's own means are still to be formed
                mine = [part for part, owner in self._pieces.segments.owners.items() if owner == self.me]
                held = [chunk for part in mine for chunk in self._pieces.means.get(part, {})]
                self._lacking += sum(len(self._pieces.filled(part)) for part in mine) - len(held)
            self._work = self._bulk()
        else:
            self._finished()

    def _bulk(self) -> Iterator[None]:
        """Encode what counts, once, and send each chunk where it belongs at this version."""
        assert isinstance(self._verdict, Landed)
        scratch = torch.empty(min(CHUNK, self.post.source.layout.numel), dtype=self._pieces.dtype)
        counts, version = self.me in self._verdict.peers, self.version
        for chunk, (start, stop) in enumerate(self._pieces.chunks):
            if counts and chunk == len(self._pieces.wires):
                self._pieces.encode(start, stop, scratch)
            if version != self.version:
                return
            self._distribute(chunk)
            yield

    def _distribute(self, chunk: int) -> None:
        """This worker's part in one chunk."""
        if isinstance(self.fold, Keep):
            if self._pieces.wires and (WHOLE, chunk) not in self._told:
                self._told.add((WHOLE, chunk))
                for worker in self._hearers():
                    self._tell(worker, WHOLE, chunk)
            return
        for part, owner in self._pieces.segments.owners.items():
            if owner == self.me:
                self._sum(part, chunk)
            elif self._pieces.wires and (part, chunk) not in self._told:
                self._told.add((part, chunk))
                self._tell(owner, part, chunk)

    def _tell(self, worker: int, part: Part, chunk: int) -> None:
        first, last = self._pieces.span(part, chunk)
        if first < last:
            piece = view(self._pieces.cut(self._pieces.wires[chunk], self.post.codec, chunk, first, last))
            self.sent += len(piece)
            self._send(worker, Bulk(self.post.key, CONTRIBUTION, self.version, part, chunk, piece))

    def _sum(self, part: Part, chunk: int) -> None:
        """If all contributions to a chunk are here: their mean, and everyone is told."""
        verdict, means = self._verdict, self._pieces.means.setdefault(part, {})
        if not isinstance(verdict, Landed):
            return  # heads are missing: summed when they are here
        if chunk in means or not self._pieces.summable(verdict.peers, part, chunk):
            return
        means[chunk] = self._pieces.add(verdict, part, chunk)
        self._lacking -= 1
        self._hash(chunk)
        message = self._mean(part, chunk)
        for worker in self.left:
            if worker != self.me:
                self.sent += len(message.payload)
                self._send(worker, message)

    def _mean(self, part: Part, chunk: int) -> Bulk:
        return Bulk(self.post.key, MEAN, self.version, part, chunk, view(self._pieces.means[part][chunk]))

    def _missing(self) -> list[tuple[int, int, Part, list[int]]]:
        """(from whom, phase, part, chunks) of what has not come."""
        return self._pieces.missing(self._hears()) if isinstance(self._verdict, Landed) else []

    def _complete(self) -> bool:
        """Whether all that the round comes to is here."""
        if isinstance(self._verdict, Lost):
            return True
        return self._verdict is not None and self._work is None and self._lacking == 0

    def _finished(self) -> None:
        """Vote, once all is here."""
        if self.outcome is None and not self.held and self.me not in self._votes and self._complete():
            self.digest = self._votes[self.me] = self._digest()
            self._vote()
            self._count()

    def _vote(self) -> None:
        for worker in self.left if self.me in self._votes else ():
            if worker != self.me:
                self._send(worker, Have(self.post.key, self.version, self._votes[self.me], all=False))

    def _digest(self) -> str:
        """Of everything that the round comes to; of who counts only, where not all hear the same."""
        assert self._verdict is not None
        if isinstance(self._verdict, Lost):
            return "lost"
        hashed = sha256(repr((self._verdict.peers, self._verdict.weights)).encode())
        if self.post.edges is None:
            for chunk in range(len(self._pieces.chunks)):
                self._hash(chunk)
                hashed.update(self._hashes[chunk])
        return hashed.hexdigest()

    def _hash(self, chunk: int) -> None:
        """The digest of a chunk as soon as all of it is here: only little is left to be done at the end."""
        if chunk in self._hashes or self.post.edges is not None or not isinstance(self._verdict, Landed):
            return
        if self._pieces.here(chunk, self._hears()):
            self._hashes[chunk] = self._pieces.digest(chunk, self._hears())

    def _count(self) -> None:
        """If all who are left have voted: the outcome, or an error if they came to different bits."""
        if self.outcome is not None or self.me not in self._votes or any(each not in self._votes for each in self.left):
            return
        if different := [worker for worker in self.left if self._votes[worker] != self._votes[self.me]]:
            self.error = (
                f"{self.post.key} came to {self._votes[self.me][:16]} on worker {self.me} but to "
                f"{self._votes[different[0]][:16]} on worker {different[0]}; they do not hold the same any more, so go "
                "on from the last checkpoint"
            )
            return
        assert self._verdict is not None
        self.outcome = self._verdict if isinstance(self._verdict, Lost) else self._deliver(self._verdict)
        if not (isinstance(self.outcome, Landed) and self.me in self.outcome.peers):
            self._take_back()

    def _take_back(self) -> None:
        """What was encoded and does not count: a codec with a memory puts it aside."""
        for (start, stop), wire in zip(self._pieces.chunks, self._pieces.wires, strict=False):
            self.post.codec.restore(wire, cut(self.post.codec_state, start, stop))

    def _deliver(self, verdict: Landed) -> Landed | Lost:
        """Hand out the mean, chunk by chunk."""
        landed = heard(verdict, self.post.edges)
        if not sum(landed.weights) > 0:
            return Lost(self.post.key, "; ".join([f"nothing that worker {self.me} hears counts", *landed.refused]))
        wide = torch.empty(min(CHUNK, self.post.source.layout.numel), dtype=self._pieces.dtype)
        squares = 0.0
        for chunk, (start, stop) in enumerate(self._pieces.chunks):
            mean = self._pieces.mean(landed, chunk, wide[: stop - start])
            norm = torch.linalg.vector_norm(mean).item()
            squares += norm * norm
            if isinstance(self.post.source, Snapshot):
                self.post.source.write(start, mean)
            elif self._take and self._take.sink:
                self._take.sink(landed, start, mean)
        return replace(landed, mean_norm=math.sqrt(squares), sent=self.sent)
