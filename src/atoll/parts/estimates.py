"""Estimates: which outer gradient is made of what came back and of what the worker knows itself.

Frozen records, matched and never subclassed. `agrees`: whether all who get the same mean take the same step.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class as_landed:
    """g = the mean that came back; without one the round does not count."""

    @property
    def agrees(self) -> bool:
        """The mean is the same for all."""
        return True


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


@dataclass(frozen=True)
class eager:
    """g_m = mean[r-1] + (fresh_m[r] - sent_m[r-1]) / M: one's own part is fresh, the others' are a round old (Eager
    updates, section 4.1).

    Without a mean, as in the first round, the others count as zero: g_m = fresh_m / M. The sum of all g_m up to a round
    then holds every delta once, so that anchors drift apart by the newest own part only.
    """

    @property
    def agrees(self) -> bool:
        """Each worker adds its own fresh part."""
        return False

    def gradient(self, FRESH: Tensor, MEAN: Tensor | None, sent: Tensor | None, members: int) -> Tensor:
        """One chunk of g_m.

        Args: FRESH: the delta of the round that closes; MEAN: what came back of the round before, `sent`: what this
        worker sent in it; None for both in a first round. members: M.
        """
        if MEAN is None or sent is None:
            return FRESH.div_(members)
        return MEAN.add_(FRESH.sub_(sent).div_(members))


Estimate = as_landed | own | eager
