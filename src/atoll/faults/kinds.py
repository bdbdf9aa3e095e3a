"""What can happen to islands and links. Times are seconds from the start of the run; what happens at t holds from t on,
and what ends at t holds no more at t."""

from dataclasses import dataclass

from atoll.units import duration


class Lasting:
    """For faults that end by themselves, `seconds` after they began."""

    at: float
    seconds: float

    @property
    def until(self) -> float:
        """When it ends."""
        return self.at + self.seconds

    def holds(self, now: float) -> bool:
        """Whether it holds at a time."""
        return self.at <= now < self.until


@dataclass(frozen=True)
class Death:
    """An island is gone, with all that it has not sent."""

    island: int
    at: float

    def __str__(self) -> str:
        return f"the death of island {self.island} at {duration(self.at)}"


@dataclass(frozen=True)
class Rejoin:
    """An island that died is back."""

    island: int
    at: float

    def __str__(self) -> str:
        return f"the rejoin of island {self.island} at {duration(self.at)}"


@dataclass(frozen=True)
class Freeze(Lasting):
    """An island neither trains nor sends, and then goes on as if nothing had been."""

    island: int
    at: float
    seconds: float

    def __str__(self) -> str:
        return f"the freeze of island {self.island} at {duration(self.at)}"


@dataclass(frozen=True)
class Slowness(Lasting):
    """An island's inner steps take `factor` times as long, which is more than 1."""

    island: int
    at: float
    seconds: float
    factor: float

    def __str__(self) -> str:
        return f"the slowness of island {self.island} at {duration(self.at)}"


@dataclass(frozen=True)
class Cut(Lasting):
    """Of the capacity of the link between two sites (or within one, named twice), only the part `left` is left."""

    sites: tuple[str, str]
    at: float
    seconds: float
    left: float = 0.0

    def __str__(self) -> str:
        return f"the cut between {' and '.join(self.sites)} at {duration(self.at)}"

    def leaves(self, a: str, b: str) -> float:
        """The part of the capacity of the link between sites a and b that is left while it holds."""
        return self.left if (a, b) in (self.sites, self.sites[::-1]) else 1.0


@dataclass(frozen=True)
class Partition(Lasting):
    """These sites hear each other, and none of the others."""

    sites: tuple[str, ...]
    at: float
    seconds: float

    def __str__(self) -> str:
        return f"the partition of {', '.join(self.sites)} at {duration(self.at)}"

    def leaves(self, a: str, b: str) -> float:
        """The part of the capacity of the link between sites a and b that is left while it holds."""
        return 0.0 if (a in self.sites) != (b in self.sites) else 1.0


Fault = Death | Rejoin | Freeze | Slowness | Cut | Partition
