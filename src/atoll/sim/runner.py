"""One island in virtual time: it trains to its next due step, and waits at its boundary where the flow waits."""

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import cast

from atoll.faults import Faults
from atoll.sim.clock import Act
from atoll.sim.faults import Restarts
from atoll.sim.pace import Pace
from atoll.sim.trainee import Flows, Steps, Trainee
from atoll.sim.world import World
from atoll.sync.flow import Answer, Flow
from atoll.sync.state import SyncState
from atoll.wire import Key, Landed, Launched, Lost, Post, Take

STEADY, NONE = Pace(), Faults()


@dataclass(frozen=True)
class Course:
    """How far islands run: `steps` inner steps, of which the first `warm` do not count in the trace's utilisation, at
    a `pace`, under `faults`, with `restarts` of whole collectives; `every` so many steps they stop for whoever
    watches."""

    steps: int
    warm: int = 0
    pace: Pace = STEADY
    faults: Faults = NONE
    restarts: Restarts | None = None
    every: int | None = None


Stretch = tuple[float, int, int, float]
"""Inner steps under way: since when, after which step, and up to which; and what all up to there take. There are two
for each message, and a dataclass takes ten times as long to make."""


class Runner:
    """Island `number` of a world, until it has taken its inner steps and used what was in flight.

    Args: watch: is told the time after each boundary of a course's `every` steps, and at the end.
    Attributes: after: what is to be done when the boundary under way is over.
    """

    def __init__(self, number: int, world: World, trainee: Steps, course: Course, watch: Act) -> None:
        self.number, self.world, self.trainee, self.course = number, world, trainee, course
        self._flows = cast(Flows, trainee)
        self.alive, self.done = True, False
        self.after: list[Act] = []
        self._faults = course.faults if course.faults.events else None
        self._walk = course.pace.of(world.traffic.network.islands[number], number)
        self._watch = watch
        self._stretch: Stretch | None = None
        self._came = False
        self._worked = 0.0  # what all steps took that are done
        self._flow: Flow | None = None
        self._then: Act = self._train
        self._since, self._life = 0.0, 0
        self._waits: Key | None = None

    @property
    def state(self) -> SyncState:
        """Of an island with a flow of its own."""
        return cast(Trainee, self.trainee).state

    @property
    def between(self) -> bool:
        """Whether no boundary is under way, so that another island can take up where this one stands."""
        return self.alive and not self.done and self._flow is None

    def start(self) -> None:
        """Begin with the first inner steps."""
        self._train(0.0)

    def stop(self) -> None:
        """Forget what was under way on this island."""
        if self._waits:
            self.world.trace.waited(self.number, self._since, self.world.clock.now, self._waits)
        self.alive, self._flow, self._waits, self._stretch = False, None, None, None
        self._life += 1

    def enter(self, now: float, other: "Runner") -> None:
        """Take up where another island stands, and train on."""
        self.stop()
        cast(Trainee, self.trainee).join(other.trainee)
        for entry in self.state.queue:
            if entry.outcome is None and entry.snapshot:
                self.world.follow(self.number, entry.key, other.number, entry.snapshot)
                self.world.trace.launched(now, self.number, entry.key)
        self.alive = True
        self._worked = self._walk.until(self.trainee.step)
        self._train(now)

    def _train(self, now: float) -> None:
        trainee, trace, course = self.trainee, self.world.trace, self.course
        step = trainee.step
        if step == course.warm:
            trace.warm(self.number, now)
        if step == course.steps or self.world.closing:
            # a keeper's run is over for all when the fastest has come to its end: nobody waits for the others
            self.world.closing |= trainee.kept
            trace.done(self.number, now)
            self._drain(now)
            return
        until = course.steps
        if trainee.gradients or self._came:
            until = step + 1
        elif (awaited := trainee.awaited) < until:
            until = awaited
        if step < course.warm:
            until = min(until, course.warm)
        if course.every:
            until = min(until, step + course.every - step % course.every)
        worked = self._walk.until(until)
        stretch = self._stretch = now, step, until, worked
        end = self._end(now, worked)
        trace.trained(self.number, now, end - now)
        self.world.clock.tell(end, self._trained, stretch)

    def _end(self, since: float, worked: float) -> float:
        """When all steps are done that take so long from the first of the run on, if those under way began then."""
        work = worked - self._worked
        return self._faults.worked(self.number, since, work) if self._faults else since + work

    def _looks(self, now: float) -> None:
        """Something has come that nobody waited for: the flow looks at the end of the step under way."""
        self._came, stretch = True, self._stretch
        if stretch is None or not self.alive:
            return
        since, first, until, _ = stretch
        low, high, end, worked = first + 1, until, inf, inf
        while low < high:
            middle = (low + high) // 2
            work = self._walk.until(middle)
            reached = self._end(since, work)
            if reached >= now:
                high, end, worked = middle, reached, work
            else:
                low = middle + 1
        if low < until:
            stretch = self._stretch = since, first, low, worked
            self.world.trace.shortened(self.number, end)
            self.world.clock.tell(end, self._trained, stretch)

    def _trained(self, stretch: Stretch, now: float) -> None:
        if self._stretch is not stretch:
            return
        self._stretch = None
        trainee = self.trainee
        since, first, until, self._worked = stretch
        if trainee.gradients:
            trainee = cast(Trainee, trainee)
            trainee.backward()
            self._go(now, trainee.average(), self._updated)
        else:
            trainee.train(until - first, since, now)
            self._counted(now)

    def _updated(self, now: float) -> None:
        cast(Trainee, self.trainee).update()
        self._counted(now)

    def _counted(self, now: float) -> None:
        trainee = self.trainee
        if self._came or trainee.step >= trainee.awaited:
            self._came = False
            self._bound(now)
        else:
            self._over(now)

    def _bound(self, now: float) -> None:
        """Do what is due at the end of this step, then `_over`."""
        self._go(now, self._flows.boundary(), self._over)

    def _drain(self, now: float) -> None:
        """Use what is still in flight at the end of the run, then `_drained`."""
        self._go(now, self._flows.drain(), self._drained)

    def _over(self, now: float) -> None:
        if self.after:
            self._tell(now)
        if self.course.every and self.trainee.step % self.course.every == 0:
            self._watch(now)
        self._train(now)

    def _drained(self, now: float) -> None:
        self.done = True
        self.world.trace.finished(self.number, now)
        self._tell(now)
        self._watch(now)

    def _tell(self, now: float) -> None:
        after, self.after = self.after, []
        for act in after:
            act(now)

    def _go(self, now: float, flow: Flow, then: Act) -> None:
        self._flow, self._then = flow, then
        self._advance(now, None)

    def _advance(self, now: float, answer: Answer) -> None:
        flow, world = self._flow, self.world
        assert flow is not None
        while True:
            try:
                effect = flow.send(answer)
            except StopIteration as done:
                for event in done.value:
                    if not isinstance(event, Launched):  # noted as it left
                        world.trace.happened(now, self.number, event)
                self._flows.told(now, done.value)
                self._flow = None
                self._then(now)
                return
            if isinstance(effect, Post):
                world.trace.launched(now, self.number, effect.key)
                answer = world.post(self.number, effect, self._looks)
                continue
            take = cast(Take, effect)
            answer = world.take(self.number, take)
            if answer is None and not take.poll:
                self._since, self._waits = now, take.ticket
                world.wake(self.number, take.ticket, partial(self._woken, self._life, Take(take.ticket)))
                return

    def _woken(self, life: int, take: Take, now: float) -> None:
        if self._life != life:
            return
        if self._faults and (thawed := self._faults.worked(self.number, now, 0.0)) > now:
            self.world.clock.at(thawed, partial(self._woken, life, take))
            return
        self._waits = None
        answer = cast("Landed | Lost", self.world.take(self.number, take))
        self.world.trace.waited(self.number, self._since, now, take.ticket)
        self._advance(now, answer)
