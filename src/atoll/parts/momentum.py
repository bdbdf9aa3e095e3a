"""Outer optimizers for workers that disagree, arrive late or one by one, and wrappers that tame their momentum.

The protocol and the rules of arithmetic are those of `atoll.parts.outers`.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.outers import Outer, check_momentum, check_rate
from atoll.trees import Layout, State
from atoll.wire import Landed


@dataclass(frozen=True)
class consensus_momentum:
    """NoLoCo's heavy ball: u = mu u + lr g + y (a - mean a); step = u, with g the meeting's mean delta, a this worker's
    anchor and mean a that of the meeting (2506.10911).

    The pull y sits inside the momentum, so disagreement overshoots where both are large: with random pairs of 8 workers
    its square shrinks to 0.668 per update at (mu, y) = (0.5, 0.7), but grows by 1.072 at DiLoCo's (0.9, 0.7). Without a
    meeting there is no pull. The sign of u is the opposite of the paper's, because a step is subtracted.

    Args: pull: y; the authors' code uses y = lr, and 0 leaves the anchors to drift apart.
    """

    lr: float
    momentum: float
    pull: float

    def __post_init__(self) -> None:
        check_rate(self.lr)
        check_momentum("momentum", self.momentum)
        if not 0 <= self.pull < math.inf:
            raise CompositionError(
                f"pull was {self.pull}, but it draws a worker's anchor towards that of those it met; give pull >= 0"
            )

    def init(self, layout: Layout) -> State:
        """u = 0."""
        return {"momentum": torch.zeros(layout.numel, dtype=layout.dtype)}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """One step of the heavy ball; the only scratch is one chunk."""
        momentum = STATE["momentum"].mul_(self.momentum).add_(GRADIENT.mul_(self.lr))
        if landed.anchor is not None:
            momentum.add_((anchor - landed.anchor).mul_(self.pull))
        return GRADIENT.copy_(momentum)


@dataclass(frozen=True)
class delayed_nesterov:
    """Nesterov whose momentum moves at every N-th update, for gradients that arrive one by one (2401.09135).

        B += g
        each N-th update:  u = mu u + B / N;  step = lr ((1 - c N + c) mu u + g / N);  B = 0
        else:              step = lr (c mu u + g / N)

    Updates are the landings of the fragment, counted from 1. With c = 0, N gradients that were
    measured at one anchor move it as one update of `nesterov` with their mean does.

    Args: delay: N, in landings; the number of workers is the natural choice. c: the part of the momentum applied at
    each of the updates between, from 0 to 1 / N.
    """

    lr: float
    momentum: float
    delay: int
    c: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.lr)
        check_momentum("momentum", self.momentum)
        if self.delay < 1:
            raise CompositionError(
                f"delay was {self.delay}, but the momentum moves once in a number of updates; give delay >= 1"
            )
        if not 0 <= self.c <= 1 / self.delay:
            raise CompositionError(
                f"c was {self.c}, but {self.delay} updates share one application of the momentum; "
                f"give 0 <= c <= 1 / {self.delay}"
            )

    def init(self, layout: Layout) -> State:
        """u = B = 0."""
        return {name: torch.zeros(layout.numel, dtype=layout.dtype) for name in ("momentum", "buffer")}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """One delayed step; the only scratch is one chunk."""
        momentum, buffer = STATE["momentum"], STATE["buffer"].add_(GRADIENT)
        part = self.c
        if landed.update % self.delay == 0:
            momentum.mul_(self.momentum).add_(buffer.div_(self.delay))
            buffer.zero_()
            part = 1 - self.c * self.delay + self.c
        return GRADIENT.div_(self.delay).add_((momentum * self.momentum).mul_(part)).mul_(self.lr)


@dataclass(frozen=True)
class restarted:
    """`outer`, its state set to zero after every `every` updates (outer momentum restarting, 2605.28585).

    Updates `every` + 1, 2 `every` + 1, ... start from zero; `outer` counts from 1 again, so that what it corrects by
    its count (Adam's bias) fits. Short memory widens the range of stable rates, and forgets a worker's own noise
    sooner.

    Args: every: in landings of the fragment.
    """

    outer: Outer
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise CompositionError(
                f"every was {self.every}, but a restart comes after a number of updates; give every >= 1"
            )

    def init(self, layout: Layout) -> State:
        """The inner state."""
        return self.outer.init(layout)

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """One inner step, from a state of zeros where a new run of updates begins."""
        update = (landed.update - 1) % self.every + 1
        if update == 1 and landed.update > 1:
            for tensor in STATE.values():
                tensor.zero_()
        return self.outer.update(GRADIENT, STATE, anchor, replace(landed, update=update))


@dataclass(frozen=True)
class age_decay:
    """`outer` on g / (1 + age)^power: the older a gradient, the less it counts (polynomial discount, 2401.09135).

    `age` counts this worker's inner steps from launch to landing: 0 for a blocking exchange, n for one that is awaited
    n steps later. The paper counts the outer updates that others made meanwhile.

    Args: power: 0.5 in the paper.
    """

    outer: Outer
    power: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.power < math.inf:
            raise CompositionError(
                f"power was {self.power}, but an older gradient must count less; give power > 0, or leave age_decay out"
            )

    def init(self, layout: Layout) -> State:
        """The inner state."""
        return self.outer.init(layout)

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """One inner step on the gradient scaled in place."""
        return self.outer.update(GRADIENT.mul_((1 + landed.age) ** -self.power), STATE, anchor, landed)
