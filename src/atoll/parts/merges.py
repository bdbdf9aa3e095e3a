"""Merges: what a landing does to live. Each works on matching views: `LIVE` of the model's tensor, `step` and `anchor`
of the fragment.

`anchor` is the new anchor and `step` what was subtracted from the old one, both in the anchor's dtype; live rounds on
the way in.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.errors import CompositionError


class Merge(Protocol):
    """What becomes of live."""

    def __call__(self, LIVE: Tensor, step: Tensor, anchor: Tensor) -> None: ...


@dataclass(frozen=True)
class leave:
    """live stays: the landing only moves the anchor."""

    def __call__(self, LIVE: Tensor, step: Tensor, anchor: Tensor) -> None:
        pass


@dataclass(frozen=True)
class adopt:
    """live = anchor: the round starts again from the shared point (DiLoCo)."""

    def __call__(self, LIVE: Tensor, step: Tensor, anchor: Tensor) -> None:
        LIVE.copy_(anchor)


@dataclass(frozen=True)
class blend:
    """live = alpha live + (1 - alpha) anchor (Streaming DiLoCo, section 3.1).

    alpha weighs the local copy: 1 ignores the others, 0 throws away the steps taken while the exchange was in flight.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise CompositionError(
                f"blend was given alpha = {self.alpha}, but it weighs live against the anchor; give 0 <= alpha <= 1"
            )

    def __call__(self, LIVE: Tensor, step: Tensor, anchor: Tensor) -> None:
        LIVE.copy_((LIVE.to(anchor.dtype) * self.alpha).add_(anchor * (1 - self.alpha)))


@dataclass(frozen=True)
class carry_on:
    """live = live - step: live moves by what the anchor moved, and keeps the steps taken meanwhile."""

    def __call__(self, LIVE: Tensor, step: Tensor, anchor: Tensor) -> None:
        LIVE.copy_(LIVE.to(anchor.dtype).sub_(step) if LIVE.dtype != anchor.dtype else LIVE.sub_(step))
