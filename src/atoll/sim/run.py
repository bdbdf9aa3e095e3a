"""Simulate a strategy on a network: every island's own flow on one virtual clock, with or without arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from atoll.parts.schedules import NEVER
from atoll.sim.faults import Restarts
from atoll.sim.hollow import Hollow
from atoll.sim.network import Island, Network
from atoll.sim.trace import Trace
from atoll.sim.world import World
from atoll.sync.flow import Answer, Flow, before, boundary, drain
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState
from atoll.trees import Spec
from atoll.wire import Key, Landed, Launched, Lost, Membership, Post, Take


class Trainee(Protocol):
    """What trains on one island."""

    @property
    def state(self) -> SyncState: ...

    def train(self, steps: int) -> None:
        """Take inner steps, whose time passes elsewhere, and count them."""
        ...


class Shapes:
    """An island that counts its steps and does nothing else (TIMING)."""

    def __init__(self, state: SyncState, tokens: int) -> None:
        self.state, self._tokens = state, tokens

    def train(self, steps: int) -> None:
        """Count."""
        work = self.state.work
        self.state.work = work._replace(steps=work.steps + steps, tokens=work.tokens + steps * self._tokens)


class Landing:
    """Answers without values: everything that has come has landed (TIMING)."""

    def __init__(self) -> None:
        self._posts: dict[tuple[int, Key], Post] = {}
        self.pushes: list[tuple[int, Post]] = []

    def post(self, me: int, post: Post) -> None:
        """Remember who meets."""
        self._posts[me, post.key] = post

    def take(self, me: int, take: Take) -> Landed | Lost | None:
        """It has landed."""
        post = self._posts.pop((me, take.ticket))
        peers = post.edges.hears if post.edges else post.to
        return Landed(take.ticket, peers, 1.0)


@dataclass(frozen=True)
class Pace:
    """How long inner steps take: a step's mean, times 1 + jitter z with z standard normal, a tenth at least.

    Drawn per island and step from the seed, so that it does not depend on what else happens.
    """

    seed: int = 0

    def seconds(self, island: Island, number: int, first: int, steps: int) -> float:
        """Of `steps` inner steps from number `first` on."""
        if not island.jitter:
            return steps * island.step_s
        draws = np.random.Generator(np.random.Philox(key=(self.seed << 32) + number, counter=first))
        return island.step_s * float(np.maximum(0.1, 1 + island.jitter * draws.standard_normal(steps)).sum())


class Runner:
    """One island: trains to its next due step, carries out its boundary, waits where the flow waits."""

    def __init__(self, number: int, world: World, trainee: Trainee, *, steps: int, pace: Pace) -> None:
        self.number, self.world, self.trainee = number, world, trainee
        self._steps, self._pace = steps, pace
        self._island = world.traffic.network.islands[number]
        self._flow: Flow | None = None
        self._waiting: Take | None = None
        self._since = 0.0
        self._drained = False

    def start(self) -> None:
        """Begin with the first inner steps."""
        self._train(0.0)

    def _train(self, now: float) -> None:
        state = self.trainee.state
        left = self._steps - state.step
        if left == 0:
            self._finish(now)
            return
        count = 1 if state.gradient_tracks() else min(left, max(1, min(state.due, NEVER) - state.step))
        seconds = self._pace.seconds(self._island, self.number, state.step, count)
        self.world.trace.compute[self.number] += seconds
        self.world.trace.add(now, self.number, "step", None, seconds)
        self.world.clock.at(now + seconds, lambda then: self._stepped(then, count))

    def _stepped(self, now: float, count: int) -> None:
        state = self.trainee.state
        if state.gradient_tracks():
            self._go(now, before(state), lambda then: self._counted(then, count))
        else:
            self._counted(now, count)

    def _counted(self, now: float, count: int) -> None:
        self.trainee.train(count)
        state = self.trainee.state
        if state.step >= state.due:
            self._go(now, boundary(state), self._train)
        else:
            self._train(now)

    def _finish(self, now: float) -> None:
        if not self._drained:
            self._drained = True
            self._go(now, drain(self.trainee.state), self._finish)
            return
        self.world.trace.finished[self.number] = now

    def _go(self, now: float, flow: Flow, then: "Act") -> None:
        self._flow, self._then = flow, then
        self._advance(now, None)

    def _advance(self, now: float, answer: Answer) -> None:
        assert self._flow is not None
        while True:
            try:
                effect = self._flow.send(answer)
            except StopIteration as done:
                self._note(now, done.value)
                self._then(now)
                return
            if isinstance(effect, Post):
                answer = self.world.post(self.number, effect)
                continue
            take = cast(Take, effect)
            answer = self.world.take(self.number, take)
            if answer is None and not take.poll:
                self._since = now
                self.world.wake(self.number, take.ticket, lambda then, take=take: self._woken(then, take))
                return

    def _woken(self, now: float, take: Take) -> None:
        answer = self.world.take(self.number, take)
        if answer is None:
            # values are formed when the last member comes for them, which is now, but not this one
            self.world.clock.at(now, lambda then: self._woken(then, take))
            return
        waited = now - self._since
        self.world.trace.blocked[self.number] += waited
        if waited:
            self.world.trace.add(self._since, self.number, "idle", take.ticket, waited)
        self._advance(now, answer)

    def _note(self, now: float, events: Sequence[object]) -> None:
        trace = self.world.trace
        for event in events:
            match event:
                case Launched():
                    trace.add(now, self.number, "launched", event.key)
                case Landed():
                    trace.ages[event.age] += 1
                    trace.add(now, self.number, "landed", event.key)
                case Lost():
                    trace.add(now, self.number, "lost", event.key)
                case _:
                    pass


def simulate_timing(
    strategy: Strategy,
    specs: tuple[Spec, ...],
    network: Network,
    *,
    steps: int,
    tokens: int = 1,
    pace: Pace = Pace(),
    restarts: Restarts | None = None,
    keeps: bool = False,
) -> Trace:
    """Run a strategy's flows on a network without arithmetic (TIMING).

    Args: specs: of the model's parameters. steps: inner steps of each island. tokens: of an inner step. pace: how long
    steps take. restarts: how collectives fail. keeps: whether the trace keeps moments, beside totals.
    """
    hollow = Hollow.of(strategy, specs)
    count = len(network.islands)
    trace = Trace(count, keeps)
    landing = Landing()
    world = World(
        network,
        landing,
        lambda post: hollow.sent(post.key.rule, post.key.fragment, post.fold, len(post.to)),
        trace,
        restarts=restarts,
    )
    workers = tuple(range(count))
    model = hollow.model()
    states = [SyncState(model, hollow.strategy, Membership(workers, me)) for me in workers]
    runners = [Runner(me, world, Shapes(states[me], tokens), steps=steps, pace=pace) for me in workers]
    for runner in runners:
        runner.start()
    world.run()
    return trace
