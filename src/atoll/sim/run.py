"""Simulate a strategy: every island's own flow on one virtual clock."""

import gc
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from atoll.errors import GroupError, UsageError
from atoll.faults import Death, Faults, Slowness
from atoll.sim.arrivals import Arrivals, Calendar, Caller, foreseen
from atoll.sim.faults import Restarts
from atoll.sim.hollow import Hollow
from atoll.sim.kept import Formless, KeeperRunner
from atoll.sim.network import Network, Resource, Traffic
from atoll.sim.numerics import Numerics, Shapes
from atoll.sim.outages import Outages, touched
from atoll.sim.pace import Pace
from atoll.sim.runner import NONE, STEADY, Course, Runner
from atoll.sim.script import Script, Scripted, alike
from atoll.sim.trace import Trace
from atoll.sim.trainee import Steps, Trainee
from atoll.sim.world import HOST, World
from atoll.sync.carry import Carry
from atoll.sync.keeping import Keeping
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState
from atoll.trees import Spec
from atoll.wire import Membership


@dataclass(frozen=True)
class Job:
    """What is simulated: a strategy for a model with these parameters.

    Args: specs: of the parameters. steps: inner steps of each island. warm: those whose time does not count in the
    utilisation, at the start: a whole number of rounds.
    """

    strategy: Strategy
    specs: tuple[Spec, ...]
    steps: int
    warm: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warm < self.steps:
            raise UsageError(
                f"a run of {self.steps} inner steps, of which {self.warm} do not count, has nothing to tell; give "
                "steps >= 1 and 0 <= warm < steps"
            )


def simulate(
    job: Job,
    network: Network,
    *,
    pace: Pace = STEADY,
    faults: Faults = NONE,
    restarts: Restarts | None = None,
    keeps: bool = False,
) -> Trace:
    """Run a strategy's flows on a network, with shapes in place of tensors (TIMING).

    Args: pace: how long inner steps take. faults: what goes wrong, and when. restarts: how whole collectives fail, if
    they do. keeps: whether the trace keeps moments beside totals.
    Raises: CompositionError if strategy and model do not fit; UsageError if faults and network do not.

    Example:
        >>> from atoll.parts.outers import nesterov
        >>> from atoll.parts.schedules import every
        >>> from atoll.sim.network import Island
        >>> from atoll.sync.rule import Rule
        >>> network = Network(tuple(Island(up=1e9, down=1e9, step_s=0.1) for _ in range(4)))
        >>> job = Job(Strategy((Rule(every(10), outer=nesterov(0.7, 0.9)),)), (spec(1e7),), steps=100)
        >>> round(simulate(job, network).utilisation, 3)
        0.676
    """
    check(job.strategy, network, faults)
    hollow, count = Hollow.of(job.strategy, job.specs), len(network.islands)
    model, workers = hollow.model(), tuple(range(count))
    states = (SyncState(model, hollow.strategy, Membership(workers, me)) for me in workers)
    if alike(job.strategy, faults):
        script = Script(next(states), job.steps)
        trainees: Sequence[Steps] = [Scripted(script, me) for me in workers]
    elif foreseen(job.strategy, faults):
        calendar = Calendar(next(states), job.steps)
        trainees = [Arrivals(calendar) for _ in workers]
    else:
        trainees = [Trainee(state) for state in states]
    keeping = Keeping(model, hollow.strategy, count, Formless) if job.strategy.kept else None
    course = Course(job.steps, job.warm, pace, faults, restarts)
    with _seldom_collected():
        return run(trainees, network, Shapes(hollow, faults), course, keeping, keeps=keeps).trace


def check(strategy: Strategy, network: Network, faults: Faults) -> None:
    """Raises: UsageError if a strategy cannot be simulated on a network under these faults."""
    faults.check(len(network.islands), sorted({island.site for island in network.islands}))
    if strategy.kept and any(isinstance(event, Death) and event.island == HOST for event in faults.events):
        raise UsageError(
            f"island {HOST} was to die, but the keeper stands beside it and nobody else has the anchors; let another "
            "one die, or take a method without a keeper"
        )
    unfit = [event for event in faults.events if not isinstance(event, Slowness)]
    if unfit and any(rule.carry is Carry.GRADIENT for rule in strategy.rules):
        raise UsageError(
            f"the strategy averages gradients within every step, and nobody could take part again after {unfit[0]}; "
            "leave it out, or take a method with anchors"
        )


class Simulation:
    """Islands under way. Attributes: trace; runners, in order of worker numbers."""

    def __init__(self, world: World, runners: list[Runner], outages: Outages | None) -> None:
        self.world, self.trace, self.runners, self._outages = world, world.trace, runners, outages

    @property
    def current(self) -> list[int]:
        """Islands that run, and that the others have not gone on without."""
        behind = self._outages.behind if self._outages else set[int]()
        return [me for me, runner in enumerate(self.runners) if runner.alive and me not in behind]


def run(
    trainees: Sequence[Steps],
    network: Network,
    numerics: Numerics,
    course: Course,
    keeping: Keeping | None,
    *,
    keeps: bool = False,
    watch: Callable[[float, Simulation], None] = lambda now, simulation: None,
) -> Simulation:
    """Drive every island's flow on one virtual clock.

    Args: trainees: of the islands, in order. numerics: what exchanges come to. course: how far, how fast, and what goes
    wrong. keeping: what a keeper holds, if there is one. watch: is told when an island is at a step that the course
    stops at. keeps: whether the trace keeps moments beside totals.
    Raises: GroupError if islands wait for something that never comes, or nobody who is up to date is left.
    """
    faults = course.faults
    traffic = Traffic(network, limited=touched(faults, network))
    world = World(traffic, numerics, Trace(len(trainees), keeps), course.restarts)
    runners = list[Runner]()
    outages = None

    def seen(now: float) -> None:
        watch(now, simulation)

    for me, trainee in enumerate(trainees):
        if isinstance(trainee, Arrivals):
            runners.append(Caller(me, world, trainee, course, seen))
        else:
            runners.append(Runner(me, world, trainee, course, seen))
    if faults.events:
        outages = Outages(world, faults, runners, keeping)
        outages.begin()
    simulation = Simulation(world, runners, outages)
    if keeping:
        KeeperRunner(world, keeping, tick_s=min(island.step_s for island in network.islands))
    for runner in runners:
        runner.start()
    world.run()
    world.trace.links = {_name(resource): bits / 8 for resource, bits in sorted(traffic.sent.items(), key=str)}
    if stuck := [runner.number for runner in runners if runner.alive and not runner.done]:
        raise GroupError(
            f"islands {stuck} wait for something that never comes, after {world.clock.now:g} simulated seconds"
        )
    return simulation


@contextmanager
def _seldom_collected() -> Generator[None]:
    """Look for garbage a hundred times less often: the millions of small objects that come and go are in no cycles,
    and looking for some takes an eighth of the time."""
    first, *others = gc.get_threshold()
    gc.set_threshold(100 * first, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


def _name(resource: Resource) -> str:
    kind, first, second = resource
    return f"{first} > {second}" if kind == "between" else f"{kind} {first}"


def spec(parameters: float, name: str = "weight") -> Spec:
    """A tensor of so many fp32 parameters, for models of which only the size is known."""
    return Spec(name, (math.ceil(parameters),), (1,), torch.float32)
