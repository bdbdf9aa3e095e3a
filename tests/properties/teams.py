"""Several workers of one process, trained side by side by moves that a test chooses; plain means to compare with."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor, nn

from atoll.peers.faults import Dropping
from atoll.peers.memory import Hub, MemoryKeeper
from atoll.sync.drive import Turns, take_turns
from atoll.sync.flow import Flow, drain, settle
from atoll.sync.keeping import Keeping, keep
from atoll.sync.rule import Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing import toys
from atoll.testing.toys import MakeOptimizer, draws
from atoll.wire import Event, Landed, Launched, Lost

Move = Callable[[int, int, nn.Module], None]
"""(worker, step, model): one inner step, in place."""


def examples(count: int) -> Any:
    """The same `count` examples at every run."""
    return settings(derandomize=True, deadline=None, max_examples=count)


WIDTH = 86


class Numbers(nn.Module):
    """A model that is one vector of parameters, `w`."""

    def __init__(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))


class Blocks(toys.Mlp):
    """`Mlp` with the names of a transformer, so that every published method finds its embedding, blocks and head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        first, *blocks, head = super().children()
        for name in ("first", "middle", "last", "head"):
            delattr(self, name)
        self.embed, self.layers, self.lm_head = first, nn.ModuleList(blocks), head

    def children(self) -> Any:
        return iter([self.embed, *self.layers, self.lm_head])


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained parameters by name."""
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if tensor.requires_grad}


def shared(sync: Synchronizer) -> dict[str, Tensor]:
    """Copies of the shared model by name, frozen parameters and buffers included."""
    return {name: tensor.detach().clone() for name, tensor in sync.state.shared()}


def push(worker: int, step: int, model: nn.Module, scale: float = 0.01) -> None:
    """θ ← θ - scale * draws(worker, step): blind to the parameters, so that deltas are known beforehand."""
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    with torch.no_grad():
        for tensor, displacement in zip(trained, draws(0, worker, step, trained), strict=True):
            tensor.sub_(displacement, alpha=scale)


def numbers() -> Numbers:
    """86 of them, from -1 to 1."""
    return Numbers(torch.linspace(-1, 1, WIDTH, dtype=torch.float64).tolist())


def pushed(worker: int, step: int) -> Tensor:
    """What `push` adds to `numbers()`."""
    return -0.01 * draws(0, worker, step, [torch.zeros(WIDTH, dtype=torch.float64)])[0]


def still(worker: int, step: int, model: nn.Module) -> None:
    """No training at all."""


def mean(tensors: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """The plain (weighted) mean, in float64."""
    by = torch.tensor([1.0] * len(tensors) if weights is None else list(weights), dtype=torch.float64)
    stacked = torch.stack([tensor.double() for tensor in tensors])
    return (stacked * by.view(-1, *[1] * (stacked.dim() - 1))).sum(0) / by.sum()


def close(got: Mapping[str, Tensor] | Tensor, want: Mapping[str, Tensor] | Tensor, tolerance: float = 1e-10) -> bool:
    """|got - want| <= tolerance |want|, norms over everything."""
    pairs = [(got, want)] if isinstance(got, Tensor) else [(got[name], want[name]) for name in got]
    assert isinstance(got, Tensor) or got.keys() == want.keys()
    error = sum((g.detach().double() - w.detach().double()).square().sum().item() for g, w in pairs)
    return error**0.5 <= tolerance * sum(w.detach().double().square().sum().item() for _, w in pairs) ** 0.5


def bits(tensor: Tensor) -> bytes:
    """The values of a tensor in logical order, as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes and all bits agree."""
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype and bits(got[name]) == bits(want[name]) for name in got
    )


class Team:
    """`workers` copies of a model (or each its own) under one strategy, in turns. `events[worker]` lists what happened,
    boundary by boundary."""

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        strategy: Strategy,
        workers: int,
        *,
        shares: Sequence[float] | None = None,
        faults: Dropping | None = None,
    ) -> None:
        hub = Hub(workers, faults)
        self.groups = [hub.group(worker) for worker in range(workers)]
        each = [module] * workers if isinstance(module, nn.Module) else module
        self.models = [copy.deepcopy(each[worker]) for worker in range(workers)]
        self.syncs = [
            Synchronizer(model, strategy, group, share=shares[worker] if shares else 1.0)
            for worker, (model, group) in enumerate(zip(self.models, self.groups, strict=True))
        ]
        self.events: list[list[Event]] = [[] for _ in range(workers)]

    @property
    def step(self) -> int:
        return self.syncs[0].state.step

    def run(
        self,
        steps: int,
        move: Move = push,
        *,
        backward: Move = still,
        tokens: Callable[[int, int], int] = lambda worker, step: 1,
        signals: Callable[[int, int], Mapping[str, float]] = lambda worker, step: {},
    ) -> "Team":
        """`steps` inner steps more: `backward` before gradients are averaged, `move` after."""
        for step in range(self.step + 1, self.step + steps + 1):
            for worker, model in enumerate(self.models):
                backward(worker, step, model)
            self._advance([sync.before() for sync in self.syncs])
            for worker, model in enumerate(self.models):
                move(worker, step, model)
            self._advance(
                [sync.after(tokens(worker, step), signals(worker, step)) for worker, sync in enumerate(self.syncs)]
            )
        return self

    def drain(self) -> "Team":
        self._advance([drain(sync.state) for sync in self.syncs])
        return self

    def settle(self) -> None:
        self._advance([settle(sync.state) for sync in self.syncs])

    def _advance(self, flows: Sequence[Flow | None]) -> None:
        if all(flows):
            for record, events in zip(self.events, take_turns([f for f in flows if f], self.groups), strict=True):
                record += events
        else:
            assert not any(flows), "some workers are due and others are not"

    def anchors(self, fragment: int = 0) -> list[Tensor]:
        """Copies of every worker's anchor of a fragment, flat."""
        return [anchor_of(sync, fragment) for sync in self.syncs]

    def landed(self, worker: int = 0) -> list[Landed]:
        return [event for event in self.events[worker] if isinstance(event, Landed)]

    def lost(self, worker: int = 0) -> list[Lost]:
        return [event for event in self.events[worker] if isinstance(event, Lost)]

    def launched(self, worker: int = 0) -> list[tuple[int, int]]:
        """(step, fragment) of each launch."""
        return [(event.step, event.key.fragment) for event in self.events[worker] if isinstance(event, Launched)]


class KeptTeam:
    """The same with a keeper and workers of unequal speed: in tick t worker m takes an inner step if
    floor(t pace_m) > floor((t - 1) pace_m) and it does not wait for the keeper. `closed` lists the keeper's events."""

    def __init__(
        self, module: nn.Module, strategy: Strategy, paces: Sequence[Fraction], faults: Dropping | None = None
    ) -> None:
        hub = Hub(len(paces), faults)
        self.paces, self.tick = paces, 0
        self.groups = [hub.group(worker) for worker in range(len(paces))]
        self.models = [copy.deepcopy(module) for _ in paces]
        self.syncs = [
            Synchronizer(model, strategy, group) for model, group in zip(self.models, self.groups, strict=True)
        ]
        for sync, pace in zip(self.syncs, paces, strict=True):
            sync.state.note({"speed": float(pace)})
        self.keeping = Keeping(copy.deepcopy(module), strategy, len(paces))
        self.turns = Turns([*self.groups, MemoryKeeper(hub)])
        self.events: list[list[Event]] = [[] for _ in paces]
        self.closed: list[Event] = []

    def run(self, ticks: int, move: Move = push) -> "KeptTeam":
        """`ticks` ticks more."""
        keeper = len(self.paces)
        for tick in range(self.tick + 1, self.tick + ticks + 1):
            flows: dict[int, Flow] = {}
            for worker, (sync, pace) in enumerate(zip(self.syncs, self.paces, strict=True)):
                if math.floor(tick * pace) > math.floor((tick - 1) * pace) and worker not in self.turns.pending:
                    move(worker, sync.state.step + 1, sync.state.model)
                    flow = sync.after(tokens=8)
                    flows |= {worker: flow} if flow else {}
            self.advance(flows | {keeper: keep(self.keeping)})
            self.tick = tick
        return self

    def advance(self, flows: Mapping[int, Flow]) -> None:
        self.turns.begin(flows)
        self.turns.advance()
        for worker, events in self.turns.ended.items():
            (self.events[worker] if worker < len(self.paces) else self.closed).extend(events)


def anchor_of(sync: Synchronizer, fragment: int = 0) -> Tensor:
    """A copy of a worker's anchor of one fragment, flat."""
    anchor = sync.state.fragments[fragment].anchor
    assert anchor is not None
    return anchor.flat.clone()


def live_anchor_outer(sync: Synchronizer) -> list[bytes]:
    """The bits of live, anchors and outer states: what a lost round leaves alone."""
    state = sync.state
    kept = [tensor for name, tensor in state.tensors() if name.startswith(("anchor", "outer"))]
    return [bits(tensor) for tensor in [*kept, *state.model.parameters(), *state.model.buffers()]]


def training(make: MakeOptimizer, seed: int = 0) -> dict[str, Move]:
    """Moves that train a toy by each worker's own optimizer, for `Team.run(steps, **training(adamw))`."""
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def backward(worker: int, step: int, model: nn.Module) -> None:
        toys.backward(model, seed, worker, step)

    def move(worker: int, step: int, model: nn.Module) -> None:
        trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
        toys.move(trained, optimizers.setdefault(worker, make(trained)))

    return {"backward": backward, "move": move}
