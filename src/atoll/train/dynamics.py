"""How workers come, go, differ and fail in an experiment of one process. Everything is drawn from the run's seed."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from atoll.errors import UsageError


class Pool(Protocol):
    """How many of the workers take part."""

    def size(self, progress: float, workers: int) -> int:
        """From 1 to `workers`, after a part `progress` in [0, 1) of the run."""
        ...


@dataclass(frozen=True)
class constant:
    """All of them, all the time."""

    def size(self, progress: float, workers: int) -> int:
        """All."""
        return workers


@dataclass(frozen=True)
class doubling:
    """Half of them in the first half of the run."""

    def size(self, progress: float, workers: int) -> int:
        """Half, then all."""
        return workers if progress >= 0.5 else max(1, workers // 2)


@dataclass(frozen=True)
class halving:
    """Half of them in the second half of the run."""

    def size(self, progress: float, workers: int) -> int:
        """All, then half."""
        return workers if progress < 0.5 else max(1, workers // 2)


@dataclass(frozen=True)
class ramp_up:
    """One at first, then one more at equal distances until all are there."""

    def size(self, progress: float, workers: int) -> int:
        """1, 2, ..., all."""
        return 1 + math.floor(progress * workers)


@dataclass(frozen=True)
class ramp_down:
    """All at first, then one less at equal distances until one is left."""

    def size(self, progress: float, workers: int) -> int:
        """All, ..., 2, 1."""
        return workers - math.floor(progress * workers)


POOLS: dict[str, Pool] = {
    "constant": constant(),
    "doubling": doubling(),
    "halving": halving(),
    "ramp-up": ramp_up(),
    "ramp-down": ramp_down(),
}
"""DiLoCo's schedules of compute (section 1.3), by name."""


@dataclass(frozen=True)
class Dynamics:
    """What is not ideal about the workers of a run.

    Args:
        pool: how many take part, changed between rounds. Who joins starts from the anchors and outer state of worker 0.
        speeds: of each worker, as a part of the fastest one's: 1 and 0.5 means that worker 1 takes a step every second
        tick. All alike if empty. There is no checkpoint while a worker has begun an exchange that a slower one has not.
    """

    pool: Pool = constant()
    speeds: tuple[float, ...] = ()

    def check(self, workers: int) -> None:
        """Raises: UsageError if they do not fit this many workers."""
        if self.speeds and len(self.speeds) != workers:
            raise UsageError(
                f"--speeds gave {len(self.speeds)} speeds, but there are {workers} workers; give one for each, such as "
                f"{','.join(['1'] * (workers - 1) + ['0.5'])}"
            )
        if self.speeds and (max(self.speeds) != 1 or not all(speed > 0 for speed in self.speeds)):
            raise UsageError(
                f"--speeds was {','.join(map(str, self.speeds))}, but they are parts of the fastest worker's; give 1 "
                "to that one, and more than 0 to all"
            )
        if self.speeds and self.pool != constant():
            raise UsageError(
                "--pool and --speeds were both given, but a pool changes between rounds, and the rounds of workers of "
                "unequal speeds end at different times; leave one of them out"
            )

    def pace(self, worker: int) -> Fraction:
        """The speed of a worker, exactly as it was written."""
        return Fraction(str(self.speeds[worker])) if self.speeds else Fraction(1)

    def moves(self, worker: int, tick: int) -> bool:
        """Whether a worker takes an inner step in a tick, if it does not wait."""
        pace = self.pace(worker)
        return math.floor(tick * pace) > math.floor((tick - 1) * pace)
