"""Run a strategy on a toy, all workers in one thread: what the tests compare with the reference loops."""

import copy
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from torch import Tensor, nn

from atoll.peers.memory import Hub, MemoryKeeper
from atoll.sync.drive import Turns, take_turns
from atoll.sync.flow import Flow
from atoll.sync.keeping import Keeping, keep
from atoll.sync.rule import Strategy
from atoll.sync.shared import Sharing
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.toys import MakeOptimizer, adamw, backward, move
from atoll.trees import Tree
from atoll.wire import Event, PeerGroup

BeforeStep = Callable[[Synchronizer, int], None]


def run_turns(  # noqa: PLR0913 (one argument for each thing that a test varies)
    module: nn.Module,
    strategy: Strategy,
    *,
    workers: int,
    steps: int,
    make: MakeOptimizer = adamw,
    seed: int = 0,
    max_norm: float = float("inf"),
    change: BeforeStep = lambda sync, step: None,
) -> tuple[list[Synchronizer], list[list[Event]]]:
    """Train `workers` copies of a toy by `strategy`; what is in flight at the end stays there.

    Args: make: builds each worker's inner optimizer. change: called before each worker's sync with the step, to inject
    faults.
    Returns: the workers' synchronizers, and the events of worker 0 by boundary.
    """
    replicas = [copy.deepcopy(module) for _ in range(workers)]
    optimizers = [make(replica.parameters()) for replica in replicas]
    hub = Hub(workers)
    groups: list[PeerGroup] = [hub.group(worker) for worker in range(workers)]
    syncs = [Synchronizer(replica, strategy, group) for replica, group in zip(replicas, groups, strict=True)]
    record: list[list[Event]] = []

    def advance(flows: Sequence[Flow | None]) -> None:
        ready = [flow for flow in flows if flow]
        if ready:
            record.append(take_turns(ready, groups)[0])

    for step in range(1, steps + 1):
        for worker, replica in enumerate(replicas):
            backward(replica, seed, worker, step)
        advance([sync.before() for sync in syncs])
        for replica, optimizer, sync in zip(replicas, optimizers, syncs, strict=True):
            move([parameter for parameter in replica.parameters() if parameter.requires_grad], optimizer, max_norm)
            change(sync, step)
        advance([sync.after(tokens=8) for sync in syncs])
    return syncs, record


def run_kept(
    module: nn.Module,
    strategy: Strategy,
    *,
    workers: int,
    ticks: int,
    paces: Sequence[Fraction],
    make: MakeOptimizer = adamw,
    seed: int = 0,
) -> tuple[list[Synchronizer], Keeping, list[list[Event]]]:
    """The same with a keeper, and workers of unequal speed: in tick t worker m takes an inner step if
    floor(t pace_m) > floor((t - 1) pace_m) and it does not wait.

    Returns: the workers' synchronizers, the keeper, and its events by tick.
    """
    replicas = [copy.deepcopy(module) for _ in range(workers)]
    optimizers = [make(replica.parameters()) for replica in replicas]
    hub, keeping = Hub(workers), Keeping(copy.deepcopy(module), strategy, workers)
    ends = [hub.group(worker) for worker in range(workers)]
    syncs = [Synchronizer(replica, strategy, end) for replica, end in zip(replicas, ends, strict=True)]
    for sync, pace in zip(syncs, paces, strict=True):
        sync.state.note({"speed": float(pace)})
    turns, record = Turns([*ends, MemoryKeeper(hub)]), list[list[Event]]()
    for tick in range(1, ticks + 1):
        flows: dict[int, Flow] = {}
        for worker, (replica, optimizer, sync) in enumerate(zip(replicas, optimizers, syncs, strict=True)):
            moves = math.floor(tick * paces[worker]) > math.floor((tick - 1) * paces[worker])
            if moves and worker not in turns.pending:
                backward(replica, seed, worker, sync.state.step + 1)
                move(replica.parameters(), optimizer)
                flow = sync.after(tokens=8)
                flows |= {worker: flow} if flow else {}
        turns.begin(flows | {workers: keep(keeping)})
        turns.advance()
        record.append(turns.ended[workers])
    return syncs, keeping, record


def shared(sync: Synchronizer, anchors: Sequence[Tree | None] | None = None) -> list[Tensor]:
    """Copies of the shared model's trained parameters, in model order."""
    by_name = dict(sync.state.shared(anchors))
    return [
        by_name[name].detach().clone()
        for name, parameter in sync.state.model.named_parameters()
        if parameter.requires_grad
    ]


def mean_anchors(syncs: Sequence[Synchronizer]) -> list[Tree | None]:
    """The anchors of the shared model of workers that ran in turns."""
    sharings = [Sharing(sync.state, 0) for sync in syncs]
    take_turns([sharing.flow() for sharing in sharings], [sync.group for sync in syncs])
    return sharings[0].anchors


def live(sync: Synchronizer) -> list[Tensor]:
    """Copies of the live trained parameters, in model order."""
    return [parameter.detach().clone() for parameter in sync.state.model.parameters() if parameter.requires_grad]
