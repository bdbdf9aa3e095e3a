"""Simulate a strategy without arithmetic: every island's own flow on one virtual clock."""

import math
from dataclasses import dataclass

import torch

from atoll.sim.faults import Restarts
from atoll.sim.hollow import Hollow
from atoll.sim.kept import KeeperRunner
from atoll.sim.network import Network
from atoll.sim.runner import STEADY, Pace, Runner
from atoll.sim.trace import Trace
from atoll.sim.world import World
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


def simulate(
    job: Job, network: Network, *, pace: Pace = STEADY, restarts: Restarts | None = None, keeps: bool = False
) -> Trace:
    """Run a strategy's flows on a network, with shapes in place of tensors.

    Args: pace: how long inner steps take. restarts: how whole collectives fail, if they do. keeps: whether the trace
    keeps moments beside totals.
    Raises: CompositionError if strategy and model do not fit.

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
    hollow, count = Hollow.of(job.strategy, job.specs), len(network.islands)
    trace = Trace(count, keeps)
    world = World(network, hollow.sizes, trace, restarts)
    model, workers = hollow.model(), tuple(range(count))
    states = [SyncState(model, hollow.strategy, Membership(workers, me)) for me in workers]
    if job.strategy.kept:
        fastest = min(island.step_s for island in network.islands)
        KeeperRunner(world, Keeping(model, hollow.strategy, count), tick_s=fastest)
    for me, state in enumerate(states):
        Runner(me, world, state, steps=job.steps, warm=job.warm, pace=pace).start()
    world.run()
    return trace


def spec(parameters: float, name: str = "weight") -> Spec:
    """A tensor of so many fp32 parameters, for models of which only the size is known."""
    return Spec(name, (math.ceil(parameters),), (1,), torch.float32)
