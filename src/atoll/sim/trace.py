"""What happened in a simulated run, and what it adds up to."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.wire import Key


@dataclass(frozen=True)
class Moment:
    """One thing that happened to one island at `time` seconds; `seconds` it lasted, for what lasts.

    Kinds: trained, idle (it waited for an exchange), launched, landed, lost.
    """

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
    """Moments in order of time where they are kept, and totals by island.

    Args: islands: how many. keeps: whether moments are kept; they take memory.
    Attributes: compute, blocked: seconds spent training, and waiting. sent: bytes handed to links. ended: seconds at
    which the last inner step was done and its boundary over.
    """

    islands: int
    keeps: bool = True
    moments: list[Moment] = field(default_factory=list[Moment])

    def __post_init__(self) -> None:
        self.compute, self.blocked, self.sent, self.ended = ([0.0] * self.islands for _ in range(4))
        self._warm = [(0.0, 0.0)] * self.islands

    def add(self, time: float, island: int, kind: str, key: Key | None = None, seconds: float = 0.0) -> None:
        """Note a moment, if moments are kept."""
        if self.keeps:
            self.moments.append(Moment(time, island, kind, key, seconds))

    def trained(self, island: int, now: float, seconds: float) -> None:
        """An island trains from now on."""
        self.compute[island] += seconds
        self.add(now, island, "trained", None, seconds)

    def waited(self, island: int, since: float, now: float, key: Key) -> None:
        """An island waited until now."""
        self.blocked[island] += now - since
        if now > since:
            self.add(since, island, "idle", key, now - since)

    def warm(self, island: int, now: float) -> None:
        """From now on an island's time counts in `utilisation`."""
        self._warm[island] = now, self.compute[island]

    def done(self, island: int, now: float) -> None:
        """An island has trained all its steps."""
        self.ended[island] = now

    @property
    def seconds(self) -> float:
        """How long training took, until the last island was done."""
        return max(self.ended)

    @property
    def utilisation(self) -> float:
        """The part of all islands' time that was spent training, from the warm step to the last."""
        trained = sum(compute - before for compute, (_, before) in zip(self.compute, self._warm, strict=True))
        return trained / sum(end - start for end, (start, _) in zip(self.ended, self._warm, strict=True))

    def lines(self) -> Iterator[str]:
        """The moments as text, one on a line."""
        return map(str, self.moments)
