"""Simulate a strategy without arithmetic: every island's own flow on one virtual clock (TIMING)."""

import math
from dataclasses import dataclass, field

from atoll.sim.faults import Restarts
from atoll.sim.hollow import Hollow
from atoll.sim.kept import Desk, KeeperRunner
from atoll.sim.network import Network
from atoll.sim.runner import STEADY, Pace, Runner
from atoll.sim.trace import Trace
from atoll.sim.world import World
from atoll.sync.keeping import Keeping
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState
from atoll.trees import Spec
from atoll.wire import KEEPER, Key, Landed, Lost, Membership, Post, Take


class Counting:
    """An island that counts its steps, and does nothing else."""

    def __init__(self, state: SyncState) -> None:
        self.state = state

    def train(self, steps: int) -> None:
        """Count, a token for each step."""
        work = self.state.work
        self.state.work = work._replace(steps=work.steps + steps, tokens=work.tokens + steps)


@dataclass
class Arrivals:
    """Answers without values: what has come has landed."""

    desk: Desk
    _posts: dict[tuple[int, Key], Post] = field(default_factory=dict[tuple[int, Key], Post])

    def post(self, me: int, post: Post) -> None:
        """Remember who meets."""
        if post.to == (KEEPER,):
            self.desk.hand_in(me, post)
        else:
            self._posts[me, post.key] = post

    def take(self, me: int, take: Take) -> Landed | Lost | None:
        """It has landed; or what the keeper answered."""
        post = self._posts.pop((me, take.ticket), None)
        if post is None:
            return self.desk.answer(me, take.ticket)
        return Landed(take.ticket, post.edges.hears if post.edges else post.to, 1.0)


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
        >>> import torch
        >>> network = Network(tuple(Island(up=1e9, down=1e9, step_s=0.1) for _ in range(4)))
        >>> job = Job(Strategy((Rule(every(10), outer=nesterov(0.7, 0.9)),)), (spec(1e7),), steps=100)
        >>> round(simulate(job, network).utilisation, 3)
        0.676
    """
    hollow, count = Hollow.of(job.strategy, job.specs), len(network.islands)
    trace, desk = Trace(count, keeps), Desk()
    world = World(network, Arrivals(desk), hollow.sizes, trace, restarts=restarts)
    model, workers = hollow.model(), tuple(range(count))
    states = [SyncState(model, hollow.strategy, Membership(workers, me)) for me in workers]
    if job.strategy.kept:
        fastest = min(island.step_s for island in network.islands)
        KeeperRunner(world, Keeping(model, hollow.strategy, count), desk, tick_s=fastest)
    for me, state in enumerate(states):
        Runner(me, world, Counting(state), steps=job.steps, warm=job.warm, pace=pace).start()
    world.run()
    return trace


def spec(parameters: float, name: str = "weight") -> Spec:
    """A tensor of so many fp32 parameters, for models of which only the size is known."""
    import torch

    return Spec(name, (math.ceil(parameters),), (1,), torch.float32)
