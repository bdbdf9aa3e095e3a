"""Landings: when the result of an exchange is used. Frozen records, matched and never subclassed."""

from dataclasses import dataclass

from atoll.errors import CompositionError


@dataclass(frozen=True)
class Blocking:
    """At once: training waits, live stands still, and nothing is copied."""


@dataclass(frozen=True)
class After:
    """`steps` inner steps after launch, whenever it arrived, so that numbers do not depend on the network. If it is
    late, training waits."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise CompositionError(
                f"After({self.steps}) would land before it left; write After(n) with n >= 1, or Blocking()"
            )


@dataclass(frozen=True)
class OnArrival:
    """As soon as a step boundary sees that it has come. Numbers depend on the network: outside the promise of bits."""


Landing = Blocking | After | OnArrival
