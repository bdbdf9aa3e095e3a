"""Measure actions in turns, and print what they came to.

Actions are interleaved (A B A B ...), so whatever else the machine does falls on all of them alike, and a ratio is
taken within each turn. A figure is the median of its turns, with the quartiles as its spread.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass(frozen=True)
class Figure:
    """One line of a bench.

    Args: what was measured; values: of all turns; unit: what they count, or are a ratio of; most, least: the goal.
    """

    what: str
    values: Sequence[float]
    unit: str
    most: float | None = None
    least: float | None = None
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def median(self) -> float:
        """What the figure is quoted as."""
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile."""
        if len(self.values) == 1:
            return self.median, self.median
        low, _, high = quantiles(self.values, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        low, high = self.spread
        line = f"{self.what:<34} {self.median:6.3g} [{low:.3g}, {high:.3g}] {self.unit}"
        if self.most is not None:
            line += f"; at most {self.most:g}: {'met' if self.median <= self.most else 'MISSED'}"
        if self.least is not None:
            line += f"; at least {self.least:g}: {'met' if self.median >= self.least else 'MISSED'}"
        return f"{line}  ({len(self.values)} turns, load {self.load:.1f})"


def in_turns(
    actions: Sequence[Callable[[], object]], turns: int, prepare: Callable[[], object] = lambda: None
) -> list[list[float]]:
    """Seconds of each action in each turn; `prepare` runs before each turn and is not timed."""
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(turns):
        prepare()
        for action, taken in zip(actions, seconds, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each turn."""
    return [a / b for a, b in zip(above, below, strict=True)]
