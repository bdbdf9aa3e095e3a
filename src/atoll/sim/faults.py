"""Faults of a simulated run, drawn from a seed."""

import random
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.wire import Key


@dataclass(frozen=True)
class Restarts:
    """Whole collectives fail, and begin again: each of M links fails with `probability` in each attempt, at a time that
    is uniform over the attempt (Factored Gossip, section 1.13).

    Meetings of two, and directed ones, are not whole collectives: who is not heard there is left out.
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise UsageError(
                f"links were to fail with probability {self.probability}, so no collective would ever end; give 0 <= "
                "probability < 1"
            )

    def attempts(self, key: Key, links: int) -> float:
        """How many times over the bytes of a collective move until it succeeds."""
        draw, whole = random.Random(f"{self.seed}:{key}"), 1.0
        while draw.random() > (1 - self.probability) ** links:
            whole += draw.random()
        return whole
