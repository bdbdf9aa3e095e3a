"""Schedules: at which inner steps a fragment's round closes.

A schedule is pure: `next(step, fragment, signals)` is the first due step after `step`, so all workers agree on it
without a message. `signals` are the agreed means that the group keeps; these schedules do without.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from atoll.errors import CompositionError

NEVER = 1 << 62
"""A step that no run reaches."""


class Schedule(Protocol):
    """When the rounds of a fragment close."""

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        """The first due inner step after `step` (steps count from 1)."""
        ...


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise CompositionError(f"{name} was {value}, but a round needs at least one inner step; give {name} >= 1")


@dataclass(frozen=True)
class every:
    """All fragments after every `period` inner steps: t mod H = 0.

    Example:
        >>> every(50).next(0, 0, {}), every(50).next(50, 0, {})
        (50, 100)
    """

    period: int

    def __post_init__(self) -> None:
        _positive("period", self.period)

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        """The next multiple of the period."""
        return (step // self.period + 1) * self.period


@dataclass(frozen=True)
class matched:
    """`every`, with a period that matches this worker's speed: floor(v H) of its own steps, one at least, for v = the
    signal "speed", its part of the fastest worker's (DyLU: Asynchronous Local-SGD, section 6.3).

    All workers then close their rounds at about the same time. For rules with a keeper: others need all workers to
    count alike.

    Example:
        >>> matched(50).next(0, 0, {"speed": 0.5}), matched(50).next(0, 0, {})
        (25, 50)
    """

    period: int

    def __post_init__(self) -> None:
        _positive("period", self.period)

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        """The next multiple of the matched period."""
        period = max(1, math.floor(signals.get("speed", 1.0) * self.period))
        return (step // period + 1) * period


@dataclass(frozen=True)
class staggered:
    """Fragment p of P after every `period` steps from offset t_p = floor(p H / P): (t - t_p) mod H = 0 and t >= H +
    t_p.

    The first exchange of a fragment waits until at least H steps are done (Streaming DiLoCo, section 3.1, by its
    example). Two papers disagree with themselves on the sign of t_p; we use t - t_p, as in the algorithm.

    Args: period: H, in inner steps; fragments: P, at most H.
    """

    period: int
    fragments: int

    def __post_init__(self) -> None:
        _positive("period", self.period)
        _positive("fragments", self.fragments)
        if self.fragments > self.period:
            raise CompositionError(
                f"{self.fragments} fragments were to take turns within a period of {self.period} inner steps, so "
                "several would leave at once; "
                f"use every({self.period}), at most {self.period} fragments, or a longer period"
            )

    def offset(self, fragment: int) -> int:
        """t_p, in inner steps."""
        return fragment * self.period // self.fragments

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        """The next step that is a whole number of periods (one at least) after the fragment's offset."""
        offset = self.offset(fragment)
        return offset + max((step - offset) // self.period + 1, 1) * self.period


@dataclass(frozen=True)
class at:
    """All fragments at the listed inner steps, and never again: for experiments and tests.

    Example:
        >>> at(10, 30).next(10, 0, {})
        30
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if any(step < 1 for step in steps) or list(steps) != sorted(set(steps)):
            raise CompositionError(f"at{steps} must list inner steps from 1 upwards, each once and in order")
        object.__setattr__(self, "steps", steps)

    def __repr__(self) -> str:
        return f"at({', '.join(map(str, self.steps))})"

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        """The next listed step."""
        return next((due for due in self.steps if due > step), NEVER)
