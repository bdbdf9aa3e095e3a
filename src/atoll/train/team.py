"""The local workers of a run: who trains in a tick, their boundaries in turns, a keeper if there is one, a pool that
changes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from atoll.errors import UsageError
from atoll.sync.drive import Turns, drive, take_turns
from atoll.sync.flow import Flow, drain, resume, settle
from atoll.sync.keeping import Keeping, keep
from atoll.sync.shared import Sharing
from atoll.train.run import Run
from atoll.train.worker import Worker
from atoll.trees import Tree
from atoll.wire import Event, KeeperGroup, Key, Landed, Lost, Membership, PeerGroup


class _HasKeeper(Protocol):
    def keeper(self) -> KeeperGroup: ...


def trouble(ended: Mapping[int, Sequence[Event]], told: set[Key]) -> list[Event]:
    """What is said of refused contributions and lost rounds: each round once, and those in `told` not again."""
    found: list[Event] = []
    for _, events in sorted(ended.items()):
        for event in events:
            refused = isinstance(event, Landed) and event.refused
            if event.key not in told and (refused or isinstance(event, Lost)):
                told.add(event.key)
                found.append(event)
    return found


class Team:
    """Workers in order of their numbers: all of a run, or this process's one.

    A tick is an inner step of the fastest worker. A slower one takes part in some of the ticks; one whose boundary
    waits for others trains on when they have come.

    Attributes: active: those that take part now. sent: bytes handed to links, by worker.
    """

    def __init__(self, run: Run, workers: Sequence[Worker], groups: Sequence[PeerGroup]) -> None:
        self.run, self.workers, self.groups = run, workers, groups
        self.sent = {worker.number: 0 for worker in workers}
        self.active = list(workers)
        self.keeping: Keeping | None = None
        self._shared = self._epoch = 0
        ends: list[PeerGroup | KeeperGroup] = list(groups)
        if run.method.strategy.kept:
            if len(workers) < run.workers or not hasattr(groups[0], "keeper"):
                raise UsageError(
                    f"{run.method.name} has a keeper, which here needs all workers in one process; start it without "
                    "torchrun"
                )
            self.keeping = Keeping(workers[0].model, run.method.strategy, run.workers)
            ends.append(cast(_HasKeeper, groups[0]).keeper())
        self._turns = Turns(ends)
        for worker in workers:
            worker.sync.state.note({"speed": float(run.dynamics.pace(worker.number))})

    @property
    def together(self) -> bool:
        """Whether a checkpoint can hold all: no worker waits, or has begun an exchange that a slower one has not."""
        flying = [[entry.key for entry in worker.sync.state.queue] for worker in self.active]
        return not self._turns.pending and (self.keeping is not None or all(keys == flying[0] for keys in flying))

    @property
    def size(self) -> int:
        """How many take part now, wherever they are."""
        return len(self.active[0].sync.state.membership.workers)

    @property
    def rounds(self) -> int:
        """Most landings of any fragment: on the first worker, or at the keeper."""
        if self.keeping:
            return max(track.updates for track in self.keeping.tracks)
        # an eager rule takes its first step before anything has landed
        return max((min(each.updates, each.round) for each in self.active[0].sync.state.tracks), default=0)

    def movers(self, tick: int) -> list[Worker]:
        """Who takes an inner step in this tick."""
        return [
            worker
            for worker in self.active
            if self.run.dynamics.moves(worker.number, tick) and worker.number not in self._turns.pending
        ]

    def before(self, movers: Sequence[Worker]) -> list[Event]:
        """Average gradients, where the strategy carries them; what went wrong with it."""
        return trouble({0: self._carry_out({worker.number: worker.sync.before() for worker in movers})}, set())

    def after(self, movers: Sequence[Worker], tokens: Sequence[int]) -> list[Event]:
        """Count the step, start and collect what is due; the events of worker 0, or of this process's one."""
        flows = {worker.number: worker.sync.after(count) for worker, count in zip(movers, tokens, strict=True)}
        if self.keeping:
            flows[len(self.workers)] = keep(self.keeping)
        return self._carry_out(flows)

    def drain(self) -> list[Event]:
        """Use what is in flight: the run ends here. Who waits for a worker that is slower waits no longer."""
        self._turns.pending.clear()
        events = self._carry_out({worker.number: drain(worker.sync.state) for worker in self.active}, ends=True)
        for number in self._turns.pending:
            self.workers[number].sync.state.queue.clear()
        self._turns.pending.clear()
        return events

    def _carry_out(self, flows: Mapping[int, Flow | None], *, ends: bool = False) -> list[Event]:
        ready = {number: flow for number, flow in flows.items() if flow}
        if len(self.workers) < self.run.workers:
            # one worker in this process: it waits for the others where they are
            ended = {number: drive(flow, self.groups[0]) for number, flow in ready.items()}
        elif ready or self._turns.pending:
            self._turns.begin(ready)
            self._turns.advance()
            ended = self._turns.ended
            waiting = [worker for worker in self.active if worker.number in self._turns.pending]
            if waiting and not ends and (not self.run.dynamics.speeds or len(waiting) == len(self.active)):
                raise self._turns.stuck()
        else:
            return []
        for number in ended.keys() & self.sent.keys():
            self.sent[number] += sum(event.sent for event in ended[number] if isinstance(event, Landed))
        lead = ended.get(self.active[0].number, [])
        return lead + trouble(ended, {event.key for event in lead})

    def shared(self) -> Sequence[Tree | None]:
        """The anchors of the shared model, by fragment. All processes must come for it."""
        if self.keeping:
            return self.keeping.anchors
        self._shared += 1
        here = len(self.workers) == self.run.workers
        among = tuple(worker.number for worker in self.active) if here else self.active[0].sync.state.membership.workers
        sharings = [Sharing(worker.sync.state, self._shared, among) for worker in self.active]
        take_turns([each.flow() for each in sharings], [self.groups[self._place(each)] for each in self.active])
        return sharings[0].anchors

    def settle(self) -> None:
        """Collect what is in flight, so that a checkpoint can hold it."""
        flows = [settle(worker.sync.state) for worker in self.active]
        take_turns(flows, [self.groups[self._place(worker)] for worker in self.active])

    def regroup(self, tick: int) -> int | None:
        """Change who takes part, if the pool does after this tick; returns how many do then."""
        size = self._planned(tick)
        if size == self.size:
            return None
        self.settle()
        before, self.active = self.active, list(self.workers[:size])
        self._enrol()
        lead = self.active[0]
        for worker in self.active:
            if worker not in before:
                worker.join(lead)
        return size

    def _planned(self, tick: int) -> int:
        """How many take part after a tick: it changes between rounds only, and not after the last step."""
        run, period = self.run, self.run.method.period or 1
        return run.dynamics.pool.size(min(tick, run.steps - 1) // period * period / run.steps, run.workers)

    def _enrol(self) -> None:
        self._epoch += 1
        numbers = tuple(worker.number for worker in self.active)
        for worker in self.active:
            state = worker.sync.state
            state.membership = Membership(numbers, worker.number, self._epoch)
        if self.keeping:
            self.keeping.workers = len(numbers)

    def start(self) -> None:
        """Begin with those who take part at first."""
        if self._planned(0) < self.size:
            self.active = list(self.workers[: self._planned(0)])
            self._enrol()

    def _place(self, worker: Worker) -> int:
        return self.workers.index(worker)

    def save(self) -> tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]:
        """What the team knows beyond its workers: the keeper, and who takes part."""
        meta: dict[str, Any] = {"active": self.size, "epoch": self._epoch, "shared": self._shared}
        if self.keeping is None:
            return meta, []
        return meta | {"keeper": self.keeping.meta()}, self.keeping.tensors()

    def load(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up where a saved team stopped, its workers loaded already."""
        self._shared = meta["shared"]
        if meta["active"] < len(self.workers) or meta["epoch"]:
            self.active, self._epoch = list(self.workers[: meta["active"]]), meta["epoch"] - 1
            self._enrol()
        if self.keeping:
            self.keeping.load(meta["keeper"], tensors)
            take_turns([resume(worker.sync.state) for worker in self.active], self.groups)
