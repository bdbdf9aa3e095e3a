"""One island in virtual time: it trains to its next due step, and waits at its boundary where the flow waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from atoll.sim.network import Island
from atoll.sim.world import World
from atoll.sync.flow import Answer, Flow, before, boundary, drain
from atoll.sync.state import SyncState
from atoll.wire import Event, Landed, Launched, Lost, Post, Take


@dataclass(frozen=True)
class Pace:
    """How long inner steps take: each the island's mean times 1 + jitter z, z standard normal, and a tenth at least.

    Drawn from the seed by island and step, so that it does not depend on what else happens.
    """

    seed: int = 0

    def seconds(self, island: Island, number: int, first: int, steps: int) -> float:
        """Of `steps` inner steps after number `first`."""
        if not island.jitter:
            return steps * island.step_s
        draws = np.random.Generator(np.random.Philox(key=[self.seed, number], counter=[0, 0, 0, first]))
        return island.step_s * float(np.maximum(0.1, 1 + island.jitter * draws.standard_normal(steps)).sum())


STEADY = Pace()


class Runner:
    """Island `number` of a world, until it has taken `steps` inner steps and used what was in flight.

    Args: warm: the step from which its time counts in the trace's utilisation.
    """

    def __init__(self, number: int, world: World, state: SyncState, *, steps: int, warm: int, pace: Pace) -> None:
        self.number, self.world, self.state = number, world, state
        self._steps, self._warm, self._pace = steps, warm, pace
        self._island = world.traffic.network.islands[number]
        self._flow: Flow | None = None
        self._then: Callable[[float], None] = self._train
        self._since = 0.0

    def start(self) -> None:
        """Begin with the first inner steps."""
        self._train(0.0)

    def _train(self, now: float) -> None:
        state, trace = self.state, self.world.trace
        if state.step == self._warm:
            trace.warm(self.number, now)
        left = self._steps - state.step
        if not left:
            trace.done(self.number, now)
            self._go(now, drain(state), lambda end: None)
            return
        steps = 1 if state.gradient_tracks() else min(left, state.due - state.step)
        if state.step < self._warm:
            steps = min(steps, self._warm - state.step)
        seconds = self._pace.seconds(self._island, self.number, state.step, steps)
        trace.trained(self.number, now, seconds)
        self.world.clock.at(now + seconds, lambda then: self._trained(then, steps))

    def _trained(self, now: float, steps: int) -> None:
        if self.state.gradient_tracks():
            self._go(now, before(self.state), lambda then: self._counted(then, steps))
        else:
            self._counted(now, steps)

    def _counted(self, now: float, steps: int) -> None:
        state, work = self.state, self.state.work
        state.work = work._replace(steps=work.steps + steps, tokens=work.tokens + steps)
        if state.step >= state.due:
            self._go(now, boundary(state), self._train)
        else:
            self._train(now)

    def _go(self, now: float, flow: Flow, then: Callable[[float], None]) -> None:
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
            answer = self.world.take(self.number, take.ticket)
            if answer is None and not take.poll:
                self._since = now
                self.world.wake(self.number, take.ticket, lambda then, take=take: self._woken(then, take))
                return

    def _woken(self, now: float, take: Take) -> None:
        self.world.trace.waited(self.number, self._since, now, take.ticket)
        self._advance(now, self.world.take(self.number, take.ticket))

    def _note(self, now: float, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Launched():
                    self.world.trace.add(now, self.number, "launched", event.key)
                case Landed():
                    self.world.trace.add(now, self.number, "landed", event.key)
                case Lost():
                    self.world.trace.add(now, self.number, "lost", event.key)
