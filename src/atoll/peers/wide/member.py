"""One island's side of a run, without I/O: its exchanges, the epochs it knows of, and what it owes the coordinator.

    epochs      the coordinator asks how far everyone is (`Propose`); whoever has answered (`Promise`) launches nothing
                before it has heard the answer (`Epoch`), which governs from a step on that nobody has come to yet
    exchanges   commit by the votes of all who are left in them; if someone is gone, or silent, everyone left tells the
                coordinator how things stand (`Report`) and hears who is out (`Settle`)

So the coordinator is needed when something goes wrong, and not to train.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from atoll.peers.wide.early import Early
from atoll.peers.wide.exchange import Exchange
from atoll.peers.wide.link import Priority
from atoll.peers.wide.messages import (
    COORDINATOR,
    Beat,
    Bulk,
    Committed,
    Done,
    Epoch,
    Gone,
    Have,
    Head,
    Message,
    Promise,
    Propose,
    Refused,
    Settle,
    Tell,
    Want,
    Welcome,
)
from atoll.peers.wide.offers import KEPT
from atoll.wire import Key, Landed, Lost, Membership, Post, Take

REMEMBERED = 4096
"""Exchanges that are over, and of which this worker still knows how it voted."""
AGAIN_S = 2.0
"""Without anything new for so long, what is missing in an exchange is asked for again: of those who have sent nothing
for as long, for whoever sends something else has it in its queue."""


@dataclass
class _Open:
    """An exchange under way. `epoch`: in which it began; `touched`: when anything came of it last; `told`: whom it
    waited for and how it stood, in the last report on it; `states`: what each member says that all should hold."""

    exchange: Exchange
    epoch: int
    touched: float
    asked: float
    told: tuple[int, bool, tuple[int, ...]] | None = None
    states: dict[int, str] = field(default_factory=dict[int, str])


@dataclass
class Member:
    """Worker `me` of a run.

    Args: send: hands a message to the link. patience: seconds without anything new after which a silent member is
    reported.
    Attributes: out: why this island is no longer part of the run, if so; refused: why it never was; error: why it
    cannot go on; over: all have come to the end; home: whether the coordinator is there; life: of this process, as it
    said hello; new: it has not been asked to take part yet; step: at which it last looked who takes part; epochs:
    known, one after another; answers: of exchanges that are over.
    """

    me: int
    send: Callable[[int, Message, Priority], None]
    patience: float = 10.0
    out: str | None = None
    refused: str | None = None
    error: str | None = None
    step: int = 0
    new: bool = True
    witness: str = ""
    over: bool = False
    home: bool = False
    life: str = ""
    epochs: list[Epoch] = field(default_factory=list[Epoch])
    answers: dict[Key, Landed | Lost] = field(default_factory=dict[Key, Landed | Lost])
    _open: dict[Key, _Open] = field(default_factory=dict[Key, _Open])
    _over: dict[Key, Have] = field(default_factory=dict[Key, Have])
    _early: Early = field(default_factory=Early)
    _lost: dict[int, int] = field(default_factory=dict[int, int])
    _came: dict[int, float] = field(default_factory=dict[int, float])
    _under: int = -1
    _promised: int = -1
    _welcome: int | None = None

    # what this island does

    def post(self, post: Post, take: Take | None, now: float) -> None:
        """Begin an exchange."""
        priority = Priority.OVERLAPPED if take is None else Priority.BLOCKING

        state = self.witness

        def send(to: int, message: Message) -> None:
            if isinstance(message, Head):
                message = replace(message, state=state)
            self.send(to, message, priority if isinstance(message, Bulk) else Priority.CONTROL)

        exchange = Exchange(self.me, post, take, send)
        self._open[post.key] = each = _Open(exchange, self._under, now, now, states={self.me: state})
        exchange.start()
        for sender, message in self._early.take(post.key):
            self._of_exchange(sender, message, now)
        self._look(each)

    def wants(self, mean: Bulk) -> bool:
        """Whether a mean that waits to be sent is one still; asked from any thread."""
        each = self._open.get(mean.key)
        return each is not None and each.exchange.version == mean.version

    def work(self) -> bool:
        """Do a little of what is to be done; whether there was anything. What blocks training comes first."""
        waiting = sorted(self._open.values(), key=lambda each: each.exchange.overlapped)
        for each in waiting:
            if each.exchange.work():
                self._look(each)
                return True
        return False

    def meet(self, step: int) -> Membership | None:
        """Who takes part in what is launched at inner step `step`; None as long as that is being decided. A joiner, who
        does not, gets the membership of the donor in whose place it stands."""
        if not self.epochs or self.promised:
            return None
        self.step = max(self.step, step)
        epoch = [epoch for epoch in self.epochs if epoch.step <= step][-1:]
        if not epoch:
            return None
        workers, number = epoch[0].workers, epoch[0].number
        self._under = number
        if self.me in workers:
            return Membership(workers, self.me, number)
        if self.me in epoch[0].joining:
            return Membership(workers, epoch[0].donors[0], number)
        self.out = self.out or f"worker {self.me} is not in epoch {number}, which governs step {step}"
        return None

    @property
    def exchanges(self) -> list[Exchange]:
        """Those under way."""
        return [each.exchange for each in self._open.values()]

    @property
    def promised(self) -> bool:
        """Whether the next epoch is being agreed on."""
        return bool(self.epochs) and self._promised > self.epochs[-1].number

    @property
    def newest(self) -> Epoch | None:
        """The newest epoch that is known."""
        return self.epochs[-1] if self.epochs else None

    def beat(self, beat: Beat) -> None:
        """Say how it goes, and again what may have been lost on the way."""
        self.send(COORDINATOR, beat, Priority.CONTROL)
        if self.promised:
            self.send(COORDINATOR, Promise(self._promised, self.step), Priority.CONTROL)

    def tick(self, now: float) -> None:
        """What time alone brings about: ask again, and report who is silent."""
        for each in list(self._open.values()):
            if now - max(each.touched, each.asked) >= AGAIN_S:
                each.asked = now
                each.exchange.ask_again([worker for worker in each.exchange.left if self._quiet(worker, AGAIN_S, now)])
            silent = self.home and now - each.touched >= self.patience
            waits_for = each.exchange.stands()[2] if silent else ()
            silent = silent and all(self._quiet(worker, self.patience, now) for worker in waits_for)
            self._concern(each, silent=silent, again=True)

    def _quiet(self, worker: int, seconds: float, now: float) -> bool:
        """Whether nothing has come from a worker for so long, of any exchange: as long as something does, what comes
        later on the same way has to wait."""
        return now - self._came.get(worker, -math.inf) >= seconds

    # what it hears

    def heard(self, sender: int, message: Message, now: float) -> None:
        """A message. What only the coordinator may say counts from nobody else."""
        if sender == COORDINATOR:
            self._of_coordinator(message, now)
        elif isinstance(message, Head | Bulk | Have | Want):
            if isinstance(message, Bulk):
                self._came[sender] = now
            self._of_exchange(sender, message, now)

    def seen(self, address: int, alive: bool) -> None:
        """Someone came or went. Only the coordinator says who is gone: who went may have lost a link, and come back."""
        if address == COORDINATOR:
            self.home = alive

    def _of_coordinator(self, message: Message, now: float) -> None:
        match message:
            case Settle():
                self._of_exchange(COORDINATOR, message, now)
            case Welcome():
                if message.life == self.life:
                    self._welcome = message.epoch
            case Propose() if not self.new:
                self._promised = max(self._promised, message.epoch)
                self.send(COORDINATOR, Promise(message.epoch, self.step), Priority.CONTROL)
            case Epoch():
                self._epoch(message)
            case Gone():
                if self.me in message.workers and not self.new:
                    self.out = f"worker {self.me} was not heard by the coordinator in time, and the others went on"
                # gone for all that began by now: whoever comes again takes part from a later epoch on
                self._lost |= dict.fromkeys(message.workers, self.epochs[-1].number if self.epochs else -1)
                for each in list(self._open.values()):
                    self._concern(each)
            case Refused():
                self.refused = message.why
            case Done():
                self.over = True
            case Tell() if self.newest:
                self.send(COORDINATOR, self.newest, Priority.CONTROL)
            case _:
                pass

    def _epoch(self, epoch: Epoch) -> None:
        """One after another: each may govern a step that this island has yet to come to."""
        if not self.new:
            if epoch.number == self.epochs[-1].number + 1:
                self.epochs = [*(each for each in self.epochs if each.number >= self._under - KEPT), epoch]
        elif (
            self._welcome is not None and self._welcome <= epoch.number and self.me in {*epoch.workers, *epoch.joining}
        ):
            # an island is new until it is asked to take part, or to fetch a state: what went before is not its own
            self.new, self.epochs, self._under = False, [epoch], epoch.number

    def _of_exchange(self, sender: int, message: Message, now: float) -> None:
        assert isinstance(message, Head | Bulk | Have | Want | Settle)
        key = message.key
        each = self._open.get(key)
        if each is None:
            if over := self._over.get(key):
                if isinstance(message, Head | Want):
                    self.send(sender, over, Priority.CONTROL)
            elif isinstance(message, Head | Have | Settle):
                self._early.put(sender, key, message)
            return
        exchange = each.exchange
        match message:
            case Head():
                each.states[sender] = message.state
                if not self._differs(each):
                    exchange.head(sender, message)
            case Bulk():
                each.touched = now if exchange.bulk(sender, message) else each.touched
            case Have():
                each.touched = now if exchange.have(sender, message) else each.touched
            case Want():
                exchange.want(sender, message)
            case Settle() if message.to == exchange.post.to:
                if any(self.me in workers for workers, _ in message.out):
                    self.out = f"{key} went on without worker {self.me}, which was not heard in time"
                    return
                each.touched = now
                exchange.settle(message)
            case _:
                pass
        self._look(each)

    def _differs(self, each: _Open) -> bool:
        """Whether this island holds other bits than most, so that it has to fetch theirs; an error where there are no
        most."""
        states = {worker: state for worker, state in each.states.items() if state and worker in each.exchange.left}
        mine, found = states.get(self.me), Counter(states.values()).most_common()
        if mine is None or len(found) == 1 or not each.states.keys() >= {*each.exchange.left}:
            return False
        most, count = found[0]
        told = ", ".join(f"worker {worker} {state[:12]}" for worker, state in sorted(states.items()))
        if 2 * count <= len(states):
            self.error = f"the islands do not hold the same any more ({told}); go on from the last checkpoint"
        elif mine != most:
            self.out = f"worker {self.me} holds other bits than most ({told})"
        return mine != most

    def _look(self, each: _Open) -> None:
        """Whether an exchange is over, or has to be reported."""
        exchange, key = each.exchange, each.exchange.post.key
        if key not in self._open:
            return
        self.error = self.error or exchange.error
        outcome = exchange.outcome
        if outcome is None:
            self._concern(each)
            return
        del self._open[key]
        self.answers[key] = outcome
        self._over[key] = Have(key, exchange.version, exchange.digest, all=True)
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
        peers = outcome.peers if isinstance(outcome, Landed) else ()
        told = Committed(key, exchange.post.to, peers, exchange.digest, isinstance(outcome, Lost))
        self.send(COORDINATOR, told, Priority.CONTROL)

    def _concern(self, each: _Open, *, silent: bool = False, again: bool = False) -> None:
        """Tell the coordinator of an exchange that cannot end as it began."""
        exchange = each.exchange
        if not (silent or any(self._lost.get(worker, -1) >= each.epoch for worker in exchange.left)):
            return
        if again or each.told != exchange.stands():
            each.told = exchange.stands()
            self.send(COORDINATOR, exchange.report(each.epoch), Priority.CONTROL)
