"""What happened in a simulated run, and what it adds up to."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.wire import Key

KINDS = ("launched", "landed", "late", "lost", "idle", "joined", "left", "step")
"""launched: an exchange left. landed: its result was used; late: training had to wait for it. lost: it did not count.
idle: an island waits (for `seconds`). joined, left: an island came or went."""


@dataclass(frozen=True)
class Moment:
    """One thing that happened to one island, at `time` seconds; `seconds` it lasted, for what lasts."""

    time: float
    island: int
    kind: str
    key: Key | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        what = f" rule {self.key.rule} fragment {self.key.fragment} round {self.key.round}" if self.key else ""
        lasted = f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"{self.time:12.3f} s  island {self.island}  {self.kind}{what}{lasted}"


@dataclass
class Trace:
    """Moments in order of time, and totals by island.

    Attributes: compute, blocked: seconds of each island spent training, and waiting. finished: when each ended. ages:
    inner steps from launch to landing, counted.
    """

    islands: int
    keeps: bool = True
    moments: list[Moment] = field(default_factory=list[Moment])
    compute: list[float] = field(init=False)
    blocked: list[float] = field(init=False)
    finished: list[float] = field(init=False)
    sent: list[float] = field(init=False)
    ages: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.compute, self.blocked, self.finished, self.sent = ([0.0] * self.islands for _ in range(4))

    def add(self, time: float, island: int, kind: str, key: Key | None = None, seconds: float = 0.0) -> None:
        """Note a moment, if moments are kept."""
        if self.keeps:
            self.moments.append(Moment(time, island, kind, key, seconds))

    @property
    def seconds(self) -> float:
        """How long the run took, until its last island ended."""
        return max(self.finished)

    @property
    def utilisation(self) -> float:
        """The part of all islands' time that was spent training."""
        return sum(self.compute) / sum(self.finished)

    def lines(self) -> Iterator[str]:
        """The moments as text, one on a line."""
        yield from map(str, self.moments)

    def as_json(self) -> dict[str, Any]:
        """Totals as a JSON-able object."""
        return {
            "islands": self.islands,
            "seconds": self.seconds,
            "utilisation": self.utilisation,
            "compute_s": self.compute,
            "blocked_s": self.blocked,
            "finished_s": self.finished,
            "bytes_sent": self.sent,
            "ages": {str(age): count for age, count in sorted(self.ages.items())},
        }
