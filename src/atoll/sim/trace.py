"""What happened in a simulated run, and what it adds up to: moments, and totals that hold without them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from atoll.files import finite
from atoll.wire import Event, Key, Landed, Launched


@dataclass(frozen=True)
class Moment:
    """One thing that happened to one island at `time` seconds; `seconds` it lasted, for what lasts.

    Kinds: trained, idle (it waited for an exchange), launched, landed, lost, late (its contribution came after its
    round had closed), died, joined, froze, woke. note: what else is to be said, as who was not heard.
    """

    time: float
    island: int
    kind: str
    key: Key | None = None
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        what = f" rule {self.key.rule} fragment {self.key.fragment} round {self.key.round}" if self.key else ""
        lasted = f" for {self.seconds:.3f} s" if self.seconds else ""
        note = f": {self.note}" if self.note else ""
        return f"{self.time:12.3f} s  island {self.island}  {self.kind}{what}{lasted}{note}"

    def as_json(self) -> dict[str, Any]:
        """As a JSON-able object, without what says nothing."""
        said = {"key": self.key and list(self.key), "seconds": self.seconds, "note": self.note}
        told = {name: value for name, value in said.items() if value}
        return {"time": self.time, "island": self.island, "kind": self.kind, **told}


@dataclass
class Trace:
    """Moments where they are kept, and totals by island.

    Args: islands: how many. keeps: whether moments are kept; they take memory. moments: as they were noted, which is
    not quite in order of time: what lasts is noted at its end or at its start.
    Attributes: compute, blocked: seconds spent training, and waiting. overlapped: seconds of training while one
    exchange or more was in flight, from its launch to its landing or loss. sent: bytes handed to links. ended: seconds
    at which the last inner step was done and its boundary over, or at which it died. landed, lost, late: exchanges.
    links: bytes that crossed each link, by a name for people.

    Example:
        >>> trace = Trace(islands=1)
        >>> trace.trained(0, 0.0, seconds=3.0)
        >>> trace.waited(0, 3.0, 4.0, Key(0, 0, 0))
        >>> trace.done(0, 4.0)
        >>> trace.utilisation, trace.blocked
        (0.75, [1.0])
        >>> for line in trace.lines():
        ...     print(line)
               0.000 s  island 0  trained for 3.000 s
               3.000 s  island 0  idle rule 0 fragment 0 round 0 for 1.000 s
    """

    islands: int
    keeps: bool = True
    moments: list[Moment] = field(default_factory=list[Moment])

    def __post_init__(self) -> None:
        self.compute, self.blocked, self.overlapped, self.sent, self.ended = ([0.0] * self.islands for _ in range(5))
        self.landed, self.lost, self.late, self._ages = ([0] * self.islands for _ in range(4))
        self.links: dict[str, float] = {}
        self._finished = [0.0] * self.islands
        self._warm = [(0.0, 0.0)] * self.islands
        self._flying: list[set[Key]] = [set() for _ in range(self.islands)]
        self._span = [(0.0, 0.0)] * self.islands  # from when to when it trains, as was noted last
        self._last = [0] * self.islands  # where among the moments that is
        self._froze: dict[int, float] = {}  # since when it stands frozen
        self._away = [0.0] * self.islands  # seconds before it joined, or between death and return
        self._gone: list[float | None] = [0.0] * self.islands  # since when it is away, if it is

    def add(
        self, time: float, island: int, kind: str, key: Key | None = None, seconds: float = 0.0, note: str = ""
    ) -> None:
        """Note a moment, if moments are kept.

        An island that died is away until it joined: that time does not count as its own. One that fetches is there, and
        trains no more until it joined. What they had begun to train then, and what an island stood frozen while it
        trained, is no training.
        """
        match kind:
            case "late":
                self.late[island] += 1
            case "froze":
                self._froze[island] = time
            case "woke":
                self._thaw(island, time)
            case "fetches":
                self._stop(island, time)
                self.ended[island] = time
            case "died" | "joined":
                self._stop(island, time)
                if kind == "died":
                    self._gone[island] = self.ended[island] = time
                else:
                    self._come(island, time)
            case _:
                pass
        if self.keeps:
            self.moments.append(Moment(time, island, kind, key, seconds, note))

    def launched(self, now: float, island: int, key: Key) -> None:
        """An exchange of an island left."""
        flying = self._flying[island]
        if not flying:
            self.overlapped[island] += self._ahead(island, now)
        flying.add(key)
        if self.keeps:
            self.moments.append(Moment(now, island, "launched", key))

    def happened(self, now: float, island: int, event: Event) -> None:
        """Count what a flow tells of: an exchange of an island left, came back, or was lost."""
        if isinstance(event, Launched):
            self.launched(now, island, event.key)
        elif isinstance(event, Landed):
            self.came(now, island, event.key, event, event.age)
        else:
            self._back(now, island, event.key)
            self.lost[island] += 1
            if self.keeps:
                self.moments.append(Moment(now, island, "lost", event.key, note=event.why))

    def came(self, now: float, island: int, key: Key, landed: Landed, age: int) -> None:
        """Count an exchange that came back, so many inner steps after it had left."""
        self._back(now, island, key)
        self.landed[island] += 1
        self._ages[island] += age
        if self.keeps:
            self.moments.append(Moment(now, island, "landed", key, note=_said(landed, age)))

    def trained(self, island: int, now: float, seconds: float) -> None:
        """An island trains from now on; for inf seconds if it is to die before it is done."""
        self._span[island], self._gone[island] = (now, now + seconds), None
        if seconds < math.inf:
            self.compute[island] += seconds
            if self._flying[island]:
                self.overlapped[island] += seconds
        if self.keeps:
            self._last[island] = len(self.moments)
            self.moments.append(Moment(now, island, "trained", None, seconds))

    def shortened(self, island: int, end: float) -> None:
        """What an island trains now ends earlier than was said: something came that it looks at."""
        start, stop = self._span[island]
        before = stop - start if stop < math.inf else 0.0
        after = end - start if end < math.inf else 0.0
        self._train(island, after - before)
        self._span[island] = start, end
        if self.keeps:
            self.moments[self._last[island]] = replace(self.moments[self._last[island]], seconds=end - start)

    def waited(self, island: int, since: float, now: float, key: Key) -> None:
        """An island waited until now."""
        self.blocked[island] += now - since
        if now > since:
            self.add(since, island, "idle", key, now - since)

    def warm(self, island: int, now: float) -> None:
        """From now on an island's time counts in `utilisation`."""
        self._warm[island] = now - self._away[island], self.compute[island]

    def done(self, island: int, now: float) -> None:
        """An island has trained all its steps."""
        self.ended[island] = now

    def finished(self, island: int, now: float) -> None:
        """An island has used what was still in flight then."""
        self._finished[island] = now

    def _back(self, now: float, island: int, key: Key) -> None:
        """An exchange is not in flight any more."""
        flying = self._flying[island]
        if flying:
            flying.discard(key)
            if not flying:
                self.overlapped[island] -= self._ahead(island, now)

    def _ahead(self, island: int, now: float) -> float:
        """Seconds of training that are counted already and come after now."""
        stop = self._span[island][1]
        return stop - now if now < stop < math.inf else 0.0

    def _train(self, island: int, seconds: float) -> None:
        self.compute[island] += seconds
        if self._flying[island]:
            self.overlapped[island] += seconds

    def _thaw(self, island: int, now: float) -> None:
        since, (start, stop) = self._froze.pop(island, now), self._span[island]
        self._train(island, -max(0.0, min(stop, now) - max(start, since)))

    def _stop(self, island: int, now: float) -> None:
        """What was under way on an island is no more."""
        self._thaw(island, now)
        start, stop = self._span[island]
        if stop > now:
            self._train(island, now - (stop if stop < math.inf else start))
            if self.keeps:
                self.moments[self._last[island]] = replace(self.moments[self._last[island]], seconds=now - start)
        self._flying[island].clear()
        self._span[island] = now, now

    def _come(self, island: int, now: float) -> None:
        gone = self._gone[island]
        if gone is not None:
            self._away[island] += now - gone
            self._gone[island] = None

    @property
    def seconds(self) -> float:
        """How long the run took, until the last island had used what was still in flight after its last step."""
        return max(*self.ended, *self._finished)

    @property
    def utilisation(self) -> float:
        """The part of all islands' time that was spent training, from the warm step to the last."""
        each = [self._counted(island) for island in range(self.islands)]
        return _ratio(sum(trained for trained, _ in each), sum(present for _, present in each))

    def used(self, island: int) -> float:
        """The utilisation of one island; nan if it never took part."""
        return _ratio(*self._counted(island))

    def _counted(self, island: int) -> tuple[float, float]:
        since, before = self._warm[island]
        return self.compute[island] - before, self.ended[island] - self._away[island] - since

    @property
    def age(self) -> float:
        """Mean inner steps from launch to landing, over all that landed; nan if nothing did."""
        return _ratio(sum(self._ages), sum(self.landed))

    def ordered(self) -> list[Moment]:
        """The moments in order of time; those of one time in the order in which they were noted."""
        return sorted(self.moments, key=attrgetter("time"))

    def lines(self) -> Iterator[str]:
        """The moments in order of time as text, one on a line."""
        return map(str, self.ordered())

    def totals(self) -> Iterator[str]:
        """What the run adds up to as text: one line for all islands, one for each, one for each link."""
        yield f"{self.seconds:12.3f} s  {self.islands} islands  utilisation {self.utilisation:.4f}  age {self.age:.2f}"
        for island, total in enumerate(self._totals()):
            parts = (f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in total)
            yield f"island {island}  {'  '.join(parts)}"
        for name, nbytes in self.links.items():
            yield f"link {name}  bytes {nbytes:.0f}"

    def _totals(self) -> Iterator[list[tuple[str, float | int]]]:
        for island in range(self.islands):
            yield [
                ("utilisation", self.used(island)),
                ("compute_s", self.compute[island]),
                ("blocked_s", self.blocked[island]),
                ("overlapped_s", self.overlapped[island]),
                ("bytes_sent", round(self.sent[island])),
                ("age", _ratio(self._ages[island], self.landed[island])),
                ("landed", self.landed[island]),
                ("lost", self.lost[island]),
                ("late", self.late[island]),
            ]

    def as_json(self) -> dict[str, Any]:
        """Totals, and moments where they are kept, as a JSON-able object: seconds, bytes, and parts of 1; None for a
        mean of nothing. A moment's key is [rule, fragment, round, lane]."""
        whole: dict[str, Any] = {
            "seconds": self.seconds,
            "utilisation": self.utilisation,
            "age": self.age,
            "islands": [dict(total) for total in self._totals()],
            "links": self.links,
        }
        if self.keeps:
            whole["moments"] = [moment.as_json() for moment in self.ordered()]
        return finite(whole)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _said(landed: Landed, age: int) -> str:
    """How old it is, and who was not heard."""
    said = [f"age {age}"] if age else []
    if landed.share < 1:
        said.append(f"share {landed.share:.3g}, of {', '.join(map(str, landed.peers))}")
    if landed.dropped:
        said.append(f"not heard {', '.join(map(str, landed.dropped))}")
    return "; ".join([*said, *landed.refused])
