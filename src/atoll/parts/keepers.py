"""Keepers: one who holds the anchor for others, and steps when it has heard enough of them.

Contributions come when they come: there is no meeting. How they are made one outer gradient is an `Average`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.mixers import Exchange, Situation, Work
from atoll.parts.outers import Outer
from atoll.trees import Layout
from atoll.wire import KEEPER, Keep


class Average(Protocol):
    """One outer gradient from the deltas D_m of a round, all of them flat, in worker order."""

    def __call__(self, deltas: Sequence[Tensor], weights: Sequence[float], layout: Layout) -> Tensor: ...


@dataclass(frozen=True)
class weighted_mean:
    """sum_m w_m D_m / sum_m w_m."""

    def __call__(self, deltas: Sequence[Tensor], weights: Sequence[float], layout: Layout) -> Tensor:
        return _mean(deltas, weights)


@dataclass(frozen=True)
class radial_directional:
    """Per tensor the mean length in the mean direction (Decoupled DiLoCo, section 2.2):
    (sum w |D| / sum w) phi(sum w phi(D) / sum w) with phi(a) = a / |a|, phi(0) = 0.

    Deltas of different workers are close to orthogonal, so a plain mean of M of them is shorter by sqrt(M), and the
    outer learning rate would have to follow M. Printed without the norm bars in the radial factor; we take norms.

    Args: except_for: shell patterns of parameters that are averaged plainly; the paper does so with embeddings.
    """

    except_for: tuple[str, ...] = ("*embed*",)

    def __call__(self, deltas: Sequence[Tensor], weights: Sequence[float], layout: Layout) -> Tensor:
        out = torch.empty_like(deltas[0])
        for spec, lo, hi in zip(layout.specs, layout.offsets, layout.offsets[1:], strict=False):
            pieces = [delta[lo:hi] for delta in deltas]
            if any(fnmatchcase(spec.name, pattern) for pattern in self.except_for):
                out[lo:hi] = _mean(pieces, weights)
                continue
            lengths = [_length(piece) for piece in pieces]
            radius = _mean(lengths, weights)
            units = [_unit(piece, length) for piece, length in zip(pieces, lengths, strict=True)]
            direction = _mean(units, weights)
            out[lo:hi] = _unit(direction, _length(direction)) * radius
        return out


def _length(values: Tensor) -> Tensor:
    return (values * values).sum().sqrt()


def _unit(values: Tensor, length: Tensor) -> Tensor:
    return values / length if length > 0 else torch.zeros_like(values)


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value * weight)
    return total.div_(sum(weights))


@dataclass(frozen=True)
class evenly:
    """Every contribution weighs the same."""

    def __call__(self, work: Work) -> float:
        return 1.0


@dataclass(frozen=True)
class by_throughput:
    """Weight = tokens x (tokens / step) since the worker last received the fragment: how much it learned from, times
    the batch it learned with (Decoupled DiLoCo, section 2.2)."""

    def __call__(self, work: Work) -> float:
        return work.tokens * work.tokens / max(work.steps, 1)


@dataclass(frozen=True)
class keeper:
    """Hand in to the keeper, who steps once `quorum` workers have joined a round and `grace` has passed since.

    Args:
        quorum: contributions that a round needs.
        grace: inner steps of the fastest worker to go on waiting for others after that. 0 closes at once, so that
            keeper(1, 0, ...) steps once for each contribution; those of one tick are answered alike, after the last. A
            round that all workers have joined closes at once.
        weigh: the weight of a contribution. outer: the keeper's outer optimizer. average: how a round becomes one outer
            gradient.
    """

    quorum: int
    grace: int
    weigh: Callable[[Work], float]
    outer: Outer
    average: Average = weighted_mean()

    def __post_init__(self) -> None:
        if self.quorum < 1 or self.grace < 0:
            raise CompositionError(
                f"keeper(quorum={self.quorum}, grace={self.grace}) would step on nothing, or before it has heard "
                "anyone; give quorum >= 1 and grace >= 0"
            )

    @property
    def agrees(self) -> bool:
        """Workers hold what they were last given."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """The keeper alone."""
        weight = float(self.weigh(at.work))
        return Exchange((KEEPER,), Keep(), weight if math.isfinite(weight) else 0.0)
