"""What the coordinator decides, without I/O: who takes part from which step on, and what becomes of an exchange that
someone who is gone was to take part in.

    epochs      ask all who are alive how far they are; the new epoch governs from one step after the furthest, so
                nobody has launched anything that it governs
    exchanges   once all who are left have told how things stand: if all of them have everything, only the vote of who
                is gone is not waited for; else who is gone is out, everywhere
    rounds      are noted as the islands tell of them; digests that differ are said loudly

Whatever is decided is in the ledger before it is told, and is told again to whoever asks: a coordinator that was killed
goes on from there. Who is gone stays out until it says hello again, and fetches a state: so nothing that it may have
used on its own can live on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.messages import (
    Beat,
    Committed,
    Done,
    Epoch,
    Gone,
    Hello,
    Leave,
    Message,
    Promise,
    Propose,
    Ready,
    Refused,
    Report,
    Settle,
)
from atoll.wire import Key


@dataclass
class Island:
    """What is known of one: when it was heard last, how it said hello since it was last gone, and what it said then."""

    heard: float
    hello: Hello | None = None
    beat: Beat | None = None
    ready: bool = False
    leaving: bool = False
    done: bool = False


@dataclass
class Coordinator:
    """Decides for one run.

    Args: run: its id. version: of the code. ledger: what was decided. send: hands a message to the link. say: tells a
    person. islands: how many must be there before the run begins. lease: seconds after which who is not heard is gone.
    """

    run: str
    version: str
    ledger: Ledger
    send: Callable[[int, Message], None]
    say: Callable[[str], None]
    islands: int = 1
    lease: float = 10.0
    known: dict[int, Island] = field(default_factory=dict[int, Island])
    _epochs: list[Epoch] = field(init=False)
    _settled: dict[tuple[Key, tuple[int, ...]], Settle] = field(init=False)
    _reports: dict[tuple[Key, tuple[int, ...]], dict[int, tuple[float, Report]]] = field(init=False)
    _gone: set[int] = field(default_factory=set[int])
    _promises: dict[int, int] | None = None
    _proposed: float = 0.0
    _began: float | None = None

    def __post_init__(self) -> None:
        self._epochs, self._reports = self.ledger.epochs(), {}
        self._settled = {(settle.key, settle.to): settle for settle in self.ledger.settled()}

    @property
    def epoch(self) -> Epoch | None:
        """The newest."""
        return self._epochs[-1] if self._epochs else None

    def present(self) -> list[int]:
        """Who takes part and is not gone."""
        workers = self.epoch.workers if self.epoch else ()
        return [worker for worker in workers if worker not in self._gone]

    # what it hears

    def heard(self, sender: int, message: Message, now: float) -> None:
        """A message of worker `sender`."""
        self._began = now if self._began is None else self._began
        island = self.known.setdefault(sender, Island(now))
        island.heard = now
        match message:
            case Hello():
                self._hello(sender, message, now)
            case Beat():
                self._beat(sender, message)
            case Promise():
                self._promise(sender, message)
            case Report():
                self._report(sender, message, now)
            case Committed():
                if different := self.ledger.commit(sender, message):
                    self.say(f"{different}; they do not hold the same any more")
                self._reports.pop((message.key, message.to), None)
            case Leave():
                if not island.leaving:
                    island.leaving = True
                    self.say(f"worker {sender} leaves: {message.why}")
                    self._change(now)
            case Done():
                island.done = True
                self._over()
            case Ready():
                if not island.ready:
                    island.ready = True
                    self._change(now)
            case _:
                pass

    def seen(self, worker: int, alive: bool, now: float) -> None:
        """A link came, or went."""
        if alive:
            if self.epoch:
                self.send(worker, self.epoch)
        elif worker in self.known:
            self._lose([worker], "its link closed", now)

    def tick(self, now: float) -> None:
        """What time alone brings about."""
        self._began = now if self._began is None else self._began
        if now - self._began < self.lease:
            return  # after a start nobody has had the time to be heard
        there = {*self.present(), *(worker for worker, island in self.known.items() if island.hello)}
        heard = {worker: self.known[worker].heard if worker in self.known else self._began for worker in there}
        late = sorted(worker for worker, at in heard.items() if now - at > self.lease)
        self._lose(late, f"nothing was heard of it for {self.lease:g} s", now)
        furthest = max((island.beat.step for island in self.known.values() if island.beat), default=0)
        if furthest > (self.ledger.fact("trained") or 0):
            self.ledger.note("trained", furthest)
        if self.epoch and not self.present():
            self._begin(now)
        for where, reports in list(self._reports.items()):
            self._stalled(where, reports, now)
        if self._promises is None:
            self._change(now)
        else:
            self._ask()

    # who takes part

    def _hello(self, sender: int, hello: Hello, now: float) -> None:
        if why := self._unfit(sender, hello):
            self.say(why)
            self.send(sender, Refused(why))
            return
        known, life = self.known[sender], f"life of {sender}"
        again = self.ledger.fact(life) == hello.life
        self.ledger.note("fingerprint", hello.fingerprint)
        self.ledger.note(life, hello.life)
        if again and (known.hello == hello or sender in self.present()):
            known.hello = hello
            if self.epoch:
                self.send(
                    sender, self.epoch
                )  # it says hello again, because it has not heard, or this side had forgotten
            return
        if sender in self.present():
            self._lose([sender], "it was started again", now)
        self.known[sender] = Island(now, hello)
        self.say(f"worker {sender} is here" + (f", with a state of step {hello.step}" if hello.step else ""))
        if self.epoch and self.present():
            self._change(now)
        else:
            self._begin(now)

    def _unfit(self, sender: int, hello: Hello) -> str | None:
        fingerprint = self.ledger.fact("fingerprint")
        if hello.run != self.run:
            return (
                f"worker {sender} asked for run {hello.run}, but this is {self.run}; give it an invitation of this one"
            )
        if hello.version != self.version:
            return (
                f"worker {sender} runs atoll {hello.version}, the coordinator {self.version}; install the same on all"
            )
        if fingerprint is not None and hello.fingerprint != fingerprint:
            return (
                f"worker {sender} trains {hello.fingerprint}, but this run {fingerprint}: method, model, data or "
                "options differ; start it with the command of the others"
            )
        return None

    def _begin(self, now: float) -> None:
        """Begin, or begin again where all had stopped: with those who have the newest state."""
        here = {worker: island.hello.step for worker, island in self.known.items() if island.hello}
        if len(here) < self.islands:
            return
        newest = max(here.values())
        trained = self.ledger.fact("trained") or 0
        if trained and not newest:
            self.say(
                f"this run has been trained to step {trained}, but nobody who is here has a checkpoint of it; start an "
                "island with the directory of one, or begin another run"
            )
            return
        workers = tuple(sorted(worker for worker, step in here.items() if step == newest))
        joining = tuple(sorted(here.keys() - set(workers)))
        number = self.epoch.number + 1 if self.epoch else 0
        # what was decided of rounds after that state is not what will become of them now
        self.ledger.forget_rounds()
        self._settled.clear()
        self._reports.clear()
        self._govern(Epoch(number, newest + 1, workers, joining, workers if joining else ()), now)

    def _change(self, now: float) -> None:
        """Ask for promises, if someone is to come or to go."""
        epoch = self.epoch
        if epoch is None or self._promises is not None:
            return
        workers, joining = self._wanted()
        if (workers, joining) != (epoch.workers, epoch.joining) and workers:
            self._promises, self._proposed = {}, now
            self._ask()

    def _wanted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Who is to take part, and who to fetch a state for it."""
        assert self.epoch is not None
        leaving = {worker for worker, island in self.known.items() if island.leaving}
        here = {worker for worker, island in self.known.items() if island.hello} - leaving
        stay = set(self.present()) - leaving
        come = {worker for worker in here.intersection(self.epoch.joining) if self.known[worker].ready}
        return tuple(sorted(stay | come)), tuple(sorted(here - stay - come))

    def _asked(self) -> list[int]:
        """Who must promise: those who launch under the newest epoch, or are to under the next."""
        assert self.epoch is not None
        workers, _ = self._wanted()
        return sorted({*self.present(), *workers})

    def _ask(self) -> None:
        assert self.epoch is not None
        assert self._promises is not None
        for worker in self._asked():
            if worker not in self._promises:
                self.send(worker, Propose(self.epoch.number + 1))
        self._agreed()

    def _promise(self, sender: int, promise: Promise) -> None:
        if self.epoch and promise.epoch <= self.epoch.number:
            self.send(sender, self.epoch)  # it has not heard
        elif self._promises is not None:
            self._promises[sender] = promise.step
            self._agreed()

    def _agreed(self) -> None:
        assert self.epoch is not None
        if self._promises is None or any(worker not in self._promises for worker in self._asked()):
            return
        workers, joining = self._wanted()
        if not workers:
            self._promises = None
            return
        step = max([self.epoch.step - 1, *(self._promises[worker] for worker in self._asked())]) + 1
        self._promises = None
        donors = tuple(worker for worker in workers if worker in self.epoch.workers)
        self._govern(Epoch(self.epoch.number + 1, step, workers, joining, donors if joining else ()), self._proposed)

    def _govern(self, epoch: Epoch, now: float) -> None:
        before = self.epoch.workers if self.epoch else ()
        with self.ledger.together():
            self.ledger.govern(epoch)
            self.ledger.note("trained", epoch.step - 1)
        self._epochs.append(epoch)
        self._gone &= set(epoch.workers)
        for worker in {*epoch.joining} - {*(self._epochs[-2].joining if before else ())}:
            self.known[worker].ready = False
        for worker in {*before, *epoch.workers, *epoch.joining}:
            self.send(worker, epoch)
        fetching = f"; workers {list(epoch.joining)} fetch a state" if epoch.joining else ""
        self.say(f"epoch {epoch.number} from step {epoch.step} on: workers {list(epoch.workers)}{fetching}")
        if len(epoch.workers) == 1 and len(before) > 1:
            self.say(f"worker {epoch.workers[0]} trains ALONE: nobody else is left, and every step is its own")
        self._change(now)

    def _lose(self, workers: list[int], why: str, now: float) -> None:
        """Count workers as gone, and let the others say what that means for what is under way."""
        present = self.present()
        for worker in workers:
            if worker in self.known:
                self.known[worker] = Island(self.known[worker].heard)
        lost = [worker for worker in workers if worker in present]
        self._gone.update(lost)
        for worker in workers:
            self.say(f"worker {worker} is gone: {why}")
        if not workers:
            return
        for worker in self.present() if lost else ():
            self.send(worker, Gone(tuple(sorted(self._gone))))
        for worker in lost:
            self.send(worker, Gone((worker,)))
        for where in list(self._reports):
            self._decide(where)
        self._over()
        if self.epoch and not self.present():
            self.say("nobody is left: the run stands until islands come back with their checkpoints")
        if self._promises is None:
            self._change(now)
        else:
            self._ask()

    def _over(self) -> None:
        """Once all who are left have come to the end, nobody is needed any more."""
        left = [worker for worker in self.present() if not (worker in self.known and self.known[worker].leaving)]
        if left and all(worker in self.known and self.known[worker].done for worker in left):
            for worker in left:
                self.send(worker, Done(0))

    def _beat(self, sender: int, beat: Beat) -> None:
        if island := self.known.get(sender):
            island.beat = beat
        if sender in self._gone or (self.epoch and sender not in {*self.epoch.workers, *self.epoch.joining}):
            if not (island and (island.leaving or island.hello)):
                self.send(sender, Gone((sender,)))
        elif self.epoch and beat.epoch < self.epoch.number:
            self.send(sender, self.epoch)

    # what becomes of exchanges

    def _report(self, sender: int, report: Report, now: float) -> None:
        where = (report.key, report.to)
        settled = self._settled.get(where, Settle(report.key, report.to, ()))
        if sender in self._gone or any(sender in workers for workers, _ in settled.out):
            self.send(sender, Gone((sender,)))
            return
        if report.version != _version(settled):
            self.send(sender, settled)
            return
        reports = self._reports.setdefault(where, {})
        first = reports[sender][0] if sender in reports else now
        reports[sender] = (first, report)
        self._decide(where)

    def _decide(self, where: tuple[Key, tuple[int, ...]]) -> None:
        key, to = where
        settled = self._settled.get(where, Settle(key, to, ()))
        out = {worker for workers, _ in settled.out for worker in workers}
        gone = tuple(worker for worker in to if worker in self._gone and worker not in out)
        left = [worker for worker in to if worker not in self._gone and worker not in out]
        reports = {worker: report for worker, (_, report) in self._reports[where].items()}
        if not gone:
            # whoever it waited for is there: let it go on, and listen to who still has a reason to complain
            for worker, report in reports.items():
                if not report.complete:
                    self.send(worker, settled)
            return
        if any(worker not in reports or reports[worker].version != _version(settled) for worker in left):
            return
        counts = all(reports[worker].complete for worker in left)
        decided = Settle(key, to, (*settled.out, (gone, counts)))
        self.ledger.settle(decided)
        self._settled[where] = decided
        self._reports[where] = {}
        for worker in to:
            self.send(worker, decided)
        self.say(f"{key} goes on without {list(gone)}" + (", whose contributions are in it" if counts and left else ""))

    def _stalled(
        self, where: tuple[Key, tuple[int, ...]], reports: dict[int, tuple[float, Report]], now: float
    ) -> None:
        """Who keeps others waiting though it is alive, and cannot be reached by them, is gone for them."""
        blamed: dict[int, int] = {}
        for worker, (first, report) in reports.items():
            if now - first >= self.lease:
                for other in report.silent:
                    blamed[other] = blamed.get(other, 0) + 1
                    blamed[worker] = blamed.get(worker, 0)
        if blamed and max(blamed.values()):
            worst = max(blamed, key=lambda worker: (blamed[worker], worker))
            del self._reports[where]
            self._lose([worst], f"{where[0]} waits for it, and it does not reach the others", now)


def _version(settled: Settle) -> int:
    return sum(not counts for _, counts in settled.out)
