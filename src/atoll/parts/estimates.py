"""Estimates: which outer gradient is made of what came back and of what the worker knows itself.

An estimate works on one chunk. `fresh` is the worker's delta at the moment of landing; `MEAN` what came back, or None
where nothing did; `mine` the delta that this worker sent.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Estimate(Protocol):
    """An outer gradient, or None where there is nothing to step by."""

    @property
    def agrees(self) -> bool:
        """Whether all who get the same mean take the same step."""
        ...

    def __call__(self, fresh: Tensor, MEAN: Tensor | None, mine: Tensor | None, members: int) -> Tensor | None: ...


@dataclass(frozen=True)
class as_landed:
    """g = the mean that came back; without one the round does not count."""

    @property
    def agrees(self) -> bool:
        """The mean is the same for all."""
        return True

    def __call__(self, fresh: Tensor, MEAN: Tensor | None, mine: Tensor | None, members: int) -> Tensor | None:
        return MEAN


@dataclass(frozen=True)
class own:
    """g = the mean that came back, or the worker's own delta where a meeting failed.

    In a gossip of pairs or groups the rows of those who did not meet become the identity, which keeps the mean over all
    workers (Factored Gossip, section 1.13). Directed meetings do not fail as a whole, and lose a little of it.
    """

    @property
    def agrees(self) -> bool:
        """Those who heard nobody go their own way."""
        return False

    def __call__(self, fresh: Tensor, MEAN: Tensor | None, mine: Tensor | None, members: int) -> Tensor | None:
        return fresh.clone() if MEAN is None else MEAN


@dataclass(frozen=True)
class eager:
    """g_m = mean[r-1] + (fresh_m[r] - mine_m[r-1]) / M: one's own part is fresh, the others' are a round old (Eager
    updates, section 4.1).

    Without a mean, as in the first round, the others count as zero: g_m = fresh_m / M. The sum of all g_m up to a round
    then holds every delta once, so that anchors drift apart by the newest own part only. What is not finite in `fresh`
    is left to the group, which refuses it.
    """

    @property
    def agrees(self) -> bool:
        """Each worker adds its own fresh part."""
        return False

    def __call__(self, fresh: Tensor, MEAN: Tensor | None, mine: Tensor | None, members: int) -> Tensor | None:
        fresh = torch.where(fresh.isfinite(), fresh, 0.0 if mine is None else mine)
        if MEAN is None:
            return fresh.div_(members)
        return MEAN if mine is None else MEAN.add_((fresh - mine).div_(members))
