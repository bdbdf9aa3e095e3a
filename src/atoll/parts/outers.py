"""Outer optimizers: turn an outer gradient into a step that is subtracted from the anchor.

`update(GRADIENT, STATE, anchor, landed)` works on one chunk: flat tensors of one dtype. `GRADIENT` is given away and
returned as the step. Multiplication and addition are separate operations on purpose: a fused multiply-add rounds once
in vectorised code and may round twice in its tail, and then bits would depend on where a chunk ends.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.trees import Layout, State
from atoll.wire import Landed


class Outer(Protocol):
    """How the anchor moves."""

    def init(self, layout: Layout) -> State:
        """State of one fragment before its first update: flat tensors, one entry per element."""
        ...

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """The step to subtract from `anchor`, in the memory of `GRADIENT`; `STATE` moves on in place."""
        ...


def check_rate(lr: float) -> None:
    """Refuse an outer learning rate that is not positive and finite."""
    if not 0 < lr < math.inf:
        raise CompositionError(
            f"the outer learning rate was {lr}, but the anchor must move against its gradient; give lr > 0"
        )


def check_momentum(name: str, value: float) -> None:
    """Refuse a decay, called `name`, outside of [0, 1)."""
    if not 0 <= value < 1:
        raise CompositionError(f"{name} was {value}, but momentum only decays below 1; give 0 <= {name} < 1")


@dataclass(frozen=True)
class sgd:
    """step = lr * g. With lr = 1 the anchor becomes the mean of the workers: local SGD, FedAvg."""

    lr: float

    def __post_init__(self) -> None:
        check_rate(self.lr)

    def init(self, layout: Layout) -> State:
        """No state."""
        return {}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """Scale in place."""
        return GRADIENT.mul_(self.lr)


@dataclass(frozen=True)
class nesterov:
    """u = mu u + g; step = lr (g + mu u): PyTorch's SGD(nesterov=True) with the gradient g (DiLoCo, section 1.1).

    The first step from u = 0 is lr (1 + mu) g: 1.33 times the mean delta for DiLoCo's (0.7, 0.9).
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        check_rate(self.lr)
        check_momentum("momentum", self.momentum)

    def init(self, layout: Layout) -> State:
        """u = 0."""
        return {"momentum": torch.zeros(layout.numel, dtype=layout.dtype)}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """One Nesterov step; the only scratch is one chunk."""
        momentum = STATE["momentum"].mul_(self.momentum).add_(GRADIENT)
        return GRADIENT.add_(momentum * self.momentum).mul_(self.lr)


@dataclass(frozen=True)
class adam:
    """Adam with bias correction (FedOpt): step = lr m^ / (sqrt(v^) + eps).

    DiLoCo's sweep (section 1.2) found it poor and unstable until eps = 0.1. The bias correction counts this fragment's
    landings.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.lr)
        check_momentum("beta1", self.beta1)
        check_momentum("beta2", self.beta2)
        if not 0 < self.eps < math.inf:
            raise CompositionError(f"eps was {self.eps}, so an element that never moved would be 0 / 0; give eps > 0")

    def init(self, layout: Layout) -> State:
        """m = v = 0."""
        return {name: torch.zeros(layout.numel, dtype=layout.dtype) for name in ("mean", "square")}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        """One Adam step."""
        mean = STATE["mean"].mul_(self.beta1).add_(GRADIENT * (1 - self.beta1))
        square = STATE["square"].mul_(self.beta2).add_(GRADIENT.square_().mul_(1 - self.beta2))
        correction1 = 1 - self.beta1**landed.update
        correction2 = 1 - self.beta2**landed.update
        scale = torch.sqrt(square, out=GRADIENT).div_(correction2**0.5).add_(self.eps)
        return torch.div(mean, scale, out=GRADIENT).mul_(self.lr / correction1)
