"""What the coordinator decides, without I/O: who takes part from which step on, and what becomes of an exchange that
someone who is gone was to take part in.

    epochs      ask all who are alive how far they are; the new epoch governs from one step after the furthest, so
                nobody has launched anything that it governs
    exchanges   that somebody gone was to take part in: who is out, and whether what it contributed counts (`settling`)
    rounds      are noted as the islands tell of them; digests that differ are said loudly

Whatever is decided is in the ledger before it is told, and is told again to whoever asks: a coordinator that was killed
goes on from there. Who is gone stays out until it says hello again, and fetches a state: so nothing that it may have
used on its own can live on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.peers.wide.account import Account
from atoll.peers.wide.admission import latecomers, too_late, unfit
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
    Welcome,
)
from atoll.peers.wide.settling import Settling
from atoll.peers.wide.units import Units

LATE = 16
"""Epochs that a worker may have missed, at most."""


@dataclass
class Island:
    """What is known of one: when it was heard last, how it said hello since it was last gone, and what it said then:
    `done` is the step at which it came to the end."""

    heard: float
    hello: Hello | None = None
    beat: Beat | None = None
    ready: bool = False
    leaving: bool = False
    done: int | None = None


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
    _settling: Settling = field(init=False)
    _lost: dict[int, int] = field(init=False)
    units: Units = field(init=False)
    _promises: dict[int, int] | None = None
    _proposed: float = 0.0
    _began: float | None = None
    _ended: bool = False
    _ticked: float = -math.inf
    _listened: float = -math.inf

    def __post_init__(self) -> None:
        self._epochs, self._lost = self.ledger.epochs(), self.ledger.lost()
        self._settling = Settling(self.ledger, self.send, self.say, self.lease, self._gone)
        self.units = Units(self.ledger, self.send, self.say)

    @property
    def epoch(self) -> Epoch | None:
        """The newest."""
        return self._epochs[-1] if self._epochs else None

    def present(self) -> list[int]:
        """Who takes part and is not gone."""
        return [worker for worker in self.epoch.workers if not self._gone(worker)] if self.epoch else []

    def _joining(self) -> list[int]:
        """Who fetches a state and is not gone."""
        return [worker for worker in self.epoch.joining if not self._gone(worker)] if self.epoch else []

    def _gone(self, worker: int, epoch: int | None = None) -> bool:
        """Whether a worker has been gone since an epoch was agreed on, the newest if it is not named. It may have come
        again, but not to what began in that epoch."""
        number = self.epoch.number if self.epoch else 0
        return self._lost.get(worker, -1) >= (number if epoch is None else epoch)

    # what it hears

    def heard(self, sender: int, message: Message, now: float) -> None:
        """A message of worker `sender`."""
        quiet, self._listened = now - self._listened > self.lease / 2, now
        if self._began is None or quiet:
            self._began = now
        hails = isinstance(message, Hello) and not self._refusal(sender, message)
        if hails or (self.epoch and sender in {*self.epoch.workers, *self.epoch.joining}):
            self.known.setdefault(sender, Island(now))
        # what others say is answered, but nothing is kept of them
        island = self.known.get(sender, Island(now))
        island.heard = now
        match message:
            case Hello():
                self._hello(sender, message, now)
            case Beat():
                self._beat(sender, message)
            case Promise():
                self._promise(sender, message, now)
            case Report() if sender in message.to:
                self._report(sender, message, now)
            case Committed() if sender in message.to:
                self._settling.committed(sender, message)
            case Leave():
                if not island.leaving:
                    island.leaving = True
                    self.say(f"worker {sender} leaves: {message.why}")
                    self._change(now)
            case Account():
                self.units.account(sender, message, self.present(), self._there())
            case Done():
                island.done = message.step
                self._over(message.step)
            case Ready():
                if not island.ready:
                    island.ready = True
                    self._change(now)
            case _:
                pass

    def seen(self, worker: int, alive: bool, now: float) -> None:
        """A link came, or went. If nobody else has been heard for a while either, this side may have lost its own."""
        others = set[int]() if self._ended else self._there() - {worker}
        if not alive and worker in self.known and any(now - self._heard(other) < self.lease / 2 for other in others):
            self._lose([worker], "its link closed", now)

    def _there(self) -> set[int]:
        """Who is to be heard."""
        hailed = (worker for worker, island in self.known.items() if island.hello)
        return {*self.present(), *self._joining(), *hailed}

    def _heard(self, worker: int) -> float:
        """When a worker was heard last, or could have been."""
        assert self._began is not None
        return max(self._began, self.known[worker].heard if worker in self.known else 0.0)

    def tick(self, now: float) -> None:
        """What time alone brings about."""
        # whoever stood still, or hears nobody at all, cannot tell who is gone
        stood_still, self._ticked = now - self._ticked > self.lease / 2, now
        if self._began is None or stood_still:
            self._began = now
        if now - self._began < self.lease:
            return  # nobody has had the time to be heard
        late = sorted(worker for worker in self._there() if now - self._heard(worker) > self.lease)
        if set(late) != self._there() and not self._ended:
            self._lose(late, f"nothing was heard of it for {self.lease:g} s", now)
        if (furthest := self._furthest()) > (self.ledger.fact("trained") or 0):
            self.ledger.note("trained", furthest)
        if self.epoch and not self.present():
            self._begin(now)
        if stalled := self._settling.stalled(now):
            self._lose([stalled[0]], stalled[1], now)
        if self._promises is None:
            self._change(now)
        else:
            self._ask()

    def _furthest(self) -> int:
        """The inner step that anybody has come to."""
        beats = [island.beat.step for island in self.known.values() if island.beat]
        return max([self.ledger.fact("trained") or 0, *beats])

    # who takes part

    def _refusal(self, sender: int, hello: Hello) -> str | None:
        ended = self.ledger.fact("ended") or 0
        late = hello.step < ended and not self.present()
        why = unfit(sender, hello, self.run, self.version, self.ledger.fact("fingerprint"))
        return why or (too_late(ended) if late else None)

    def _hello(self, sender: int, hello: Hello, now: float) -> None:
        if why := self._refusal(sender, hello):
            self.say(why)
            self.send(sender, Refused(why))
            return
        known, life = self.known[sender], f"life of {sender}"
        again = self.ledger.fact(life) == hello.life
        self.ledger.note("fingerprint", hello.fingerprint)
        self.ledger.note(life, hello.life)
        takes_part = sender in {*self.present(), *self._joining()}
        if takes_part and not again:
            self._lose([sender], "it was started again", now)
        unit = self.units.came(sender, hello.life, self._furthest())
        self.send(sender, Welcome(hello.life, self._lost.get(sender, -1) + 1, unit))
        if again and (takes_part or known.hello == hello):
            # it has not heard the answer, or this side had forgotten
            known.hello = hello
            self._tell_epochs(sender, -1)
            return
        self.known[sender], self._ended = Island(now, hello), False
        self.say(f"worker {sender} is here" + (f", with a state of step {hello.step}" if hello.step else ""))
        if self.epoch and self.present():
            self._change(now)
        else:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin, or begin again where all had stopped: with those who have the newest state."""
        here = {worker: island.hello.step for worker, island in self.known.items() if island.hello}
        if len(here) < self.islands:
            return
        newest = max(here.values())
        trained = self.ledger.fact("trained") or 0
        if trained and not newest:
            # first weights never win over trained ones
            why = (
                f"this run has been trained to step {trained}, but nobody who is here has a checkpoint of it; start "
                "the islands again with --resume in their directories, or begin another run"
            )
            self.say(why)
            for worker in here:
                self.known[worker] = Island(self.known[worker].heard)
                self.send(worker, Refused(why))
            return
        workers = tuple(sorted(worker for worker, step in here.items() if step == newest))
        joining = tuple(sorted(here.keys() - set(workers)))
        number = self.epoch.number + 1 if self.epoch else 0
        self._promises = None
        # what was decided of rounds after that state is not what will become of them now
        self._settling.forget()
        self.units.begins(newest, workers)
        self._govern(Epoch(number, newest + 1, workers, joining, workers if joining else ()), now)

    def _change(self, now: float) -> None:
        """Ask for promises, if someone is to come or to go."""
        epoch = self.epoch
        if epoch is None or self._promises is not None:
            return
        workers, joining = self._wanted()
        # who is lost and comes again is meant by a later epoch than before
        again = any(self._gone(worker) for worker in (*epoch.workers, *epoch.joining))
        if workers and (again or (workers, joining) != (epoch.workers, epoch.joining)):
            self._promises, self._proposed = {}, now
            self._ask()

    def _wanted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Who is to take part, and who to fetch a state for it."""
        assert self.epoch is not None
        leaving = {worker for worker, island in self.known.items() if island.leaving}
        stay, enter = set(self.present()) - leaving, set(self._joining()) - leaving
        here = {worker for worker, island in self.known.items() if island.hello} - leaving
        if not stay:
            return (), ()  # nobody has what the others would enter by
        come = {worker for worker in enter if worker in self.known and self.known[worker].ready}
        return tuple(sorted(stay | come)), tuple(sorted((here | enter) - stay - come))

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

    def _promise(self, sender: int, promise: Promise, now: float) -> None:
        if self.epoch is None or promise.epoch <= self.epoch.number or self._gone(sender):
            return  # what it has not heard is told at its next beat
        if self._promises is None:
            # one before this one had asked: whoever has promised waits for an answer
            self._promises, self._proposed = {}, now
            self._ask()
        else:
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
            self.units.governed(epoch.step, {*epoch.workers, *epoch.joining})
        self._epochs.append(epoch)
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
        if not workers:
            return
        self._lost |= dict.fromkeys(workers, self.epoch.number if self.epoch else -1)
        with self.ledger.together():
            self.ledger.lose(self._lost)
            self.units.lost(workers)
        for worker in workers:
            if worker in self.known:
                self.known[worker] = Island(self.known[worker].heard)
            self.say(f"worker {worker} is gone: {why}")
        for worker in sorted({*self.known, *present, *workers}):
            self.send(worker, Gone(tuple(workers)))
        self._settling.decide()
        self._over()
        if self.epoch and not self.present():
            self.say("nobody is left: the run stands until islands come back with their checkpoints")
        if self._promises is None:
            self._change(now)
        else:
            self._ask()

    def _over(self, step: int | None = None) -> None:
        """Once all who are left have come to the end (`step`, if one says so), nobody is needed any more."""
        left = [worker for worker in self.present() if not (worker in self.known and self.known[worker].leaving)]
        done = {worker: self.known[worker].done if worker in self.known else None for worker in left}
        late = latecomers(self._epochs, done)
        left = [worker for worker in left if worker not in late]
        if left and all(done[worker] is not None for worker in left):
            if not self._ended:
                self.say(f"workers {left} have come to the end of the run")
            self._ended = True
            if step is not None and step != self.ledger.fact("ended"):
                self.ledger.note("ended", step)
            for worker in left:
                self.send(worker, Done(0))
            for worker in {*self._joining(), *late} - {*left}:
                self.send(worker, Refused(too_late(self.ledger.fact("ended"))))

    def _beat(self, sender: int, beat: Beat) -> None:
        if island := self.known.get(sender):
            island.beat = beat
        if self.epoch and sender not in {*self.present(), *self._joining()}:
            if not (island and (island.leaving or island.hello)):
                self.send(sender, Gone((sender,)))
        else:
            self._tell_epochs(sender, beat.epoch)

    def _tell_epochs(self, worker: int, known: int) -> None:
        """What has been decided since an epoch that a worker knows, and since it was gone."""
        known = max(known, self._lost.get(worker, -1))
        for epoch in self._epochs[-LATE:]:
            if epoch.number > known:
                self.send(worker, epoch)

    def _report(self, sender: int, report: Report, now: float) -> None:
        epochs, members = [epoch for epoch in self._epochs if epoch.number == report.epoch], set(report.to)
        if not epochs or not {*report.silent} <= members <= {*epochs[0].workers} or len(members) != len(report.to):
            return  # no exchange of this run has such members
        if not self._settling.report(sender, report, now):
            self.send(sender, Gone((sender,)))
