"""All faults of a run, and what a simulator asks of them."""

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from random import Random

from atoll.errors import UsageError
from atoll.faults import checks, files
from atoll.faults.kinds import Cut, Death, Fault, Freeze, Lasting, Partition, Rejoin, Slowness
from atoll.wire import Key


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a run, and when. `events` are kept in order of time, whatever order they are given in.

    Args: loss: probability with which a message of a rule is lost, independently of others. seed: of that draw. lease:
    seconds after which whoever is not heard counts as gone.

    Example:
        >>> faults = Faults((Rejoin(1, at=90.0), Death(1, at=60.0), Slowness(0, at=10.0, seconds=20.0, factor=2.0)))
        >>> faults.changes(), faults.dead(1, 60.0), faults.worked(0, start=5.0, work=10.0)
        ([10.0, 30.0, 60.0, 90.0], True, 20.0)
    """

    events: tuple[Fault, ...] = ()
    loss: float = 0.0
    seed: int = 0
    lease: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise UsageError(
                f"loss was {self.loss}, but some messages must arrive; give a probability from 0 up to, but not "
                "including, 1"
            )
        if not 0 < self.lease < math.inf:
            raise UsageError(
                f"lease was {self.lease}, but after it whoever is not heard counts as gone; give a finite number of "
                "seconds above 0"
            )
        order = list(files.KINDS)
        ordered = sorted(self.events, key=lambda event: (event.at, order.index(type(event)), repr(event)))
        object.__setattr__(self, "events", tuple(ordered))

    @classmethod
    def drawn(cls, islands: int, seconds: float, *, every: float, away: float, seed: int) -> "Faults":
        """Deaths that come from a seed: to each island as a Poisson process, and it rejoins after an exponential time.

        The last one alive is spared. But for that, what an island goes through does not depend on how many there are.

        Args: seconds: during which islands die. every, away: mean seconds from being there to death, and from death to
        being back.
        Raises: UsageError for a number of these that is not above 0.
        """
        for name, value in (("islands", islands), ("seconds", seconds), ("every", every), ("away", away)):
            if not 0 < value < math.inf:
                raise UsageError(f"faults were to be drawn with {name} {value}; give a finite number above 0")
        draws = [Random(f"{seed}:{island}") for island in range(islands)]
        due = [(draw.expovariate(1 / every), island) for island, draw in enumerate(draws)]
        heapq.heapify(due)
        back: dict[int, float] = {}
        events: list[Fault] = []
        while due and due[0][0] < seconds:
            at, island = heapq.heappop(due)
            back = {other: rejoins for other, rejoins in back.items() if rejoins > at}
            begins = at
            if len(back) < islands - 1:
                begins = back[island] = at + draws[island].expovariate(1 / away)
                events += [Death(island, at), Rejoin(island, begins)]
            heapq.heappush(due, (begins + draws[island].expovariate(1 / every), island))
        return cls(tuple(events), seed=seed)

    @classmethod
    def read(cls, path: Path) -> "Faults":
        """The faults of a TOML file, such as `text` gives.

        Raises: UsageError if it is missing or not TOML, or for a field that is unknown, missing, of another kind or
        of no use.
        """
        events, settings = files.read(path)
        try:
            return cls(events, **settings)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def text(self) -> str:
        """A TOML file of these faults, which `read` gives back exactly.

        Example:
            >>> print(Faults((Death(2, at=120.0),)).text(), end="")
            seed = 0
            loss = 0.0
            lease = "10s"
            <BLANKLINE>
            [[death]]
            island = 2
            at = "120s"
        """
        return files.write(self.events, {name: getattr(self, name) for name in files.SETTINGS})

    def check(self, islands: int, sites: Sequence[str]) -> None:
        """Refuse what cannot happen to so many islands that stand at these sites.

        Raises: UsageError.
        """
        checks.check(self.events, islands, sites)

    def alone(self) -> "Faults":
        """What one worker that meets nobody has of them: freezes and slow steps of island 0."""
        own = (event for event in self.events if isinstance(event, Freeze | Slowness) and event.island == 0)
        return replace(self, events=tuple(own), loss=0.0)

    def lost(self, key: Key, workers: Collection[int]) -> frozenset[int]:
        """Whose message of this exchange is lost. What is not a rule's (reports, evaluation) always arrives."""
        if not self.loss or key.rule < 0:
            return frozenset()
        return frozenset(worker for worker in workers if self._draw(key, worker) < self.loss)

    def _draw(self, key: Key, worker: int) -> float:
        text = f"{self.seed}:{'.'.join(map(str, key))}:{worker}"
        return int.from_bytes(sha256(text.encode()).digest()[:8]) / 2**64

    def worked(self, island: int, start: float, work: float) -> float:
        """When `work` seconds of undisturbed training that begin at `start` are done; inf if the island dies before.

        Training advances at rate 0 while the island is frozen, else at 1 / (product of its slownesses' factors); no
        work is done at once, or when a freeze ends. A rejoin begins anew.
        """
        if self.dead(island, start):
            return math.inf
        windows = [window for window in self._disturbed.get(island, ()) if window.until > start]
        edges = {edge for window in windows for edge in (window.at, window.until) if start < edge < math.inf}
        now, left, slow = start, work, _slow(windows, start)
        for edge in sorted(edges):
            if slow < math.inf and now + left * slow <= edge:
                break
            left = max(0.0, left - (edge - now) / slow)
            now, slow = edge, _slow(windows, edge)
        done = now + left * slow if slow < math.inf else math.inf
        turns = self._turns.get(island, ())
        death = next((at for at, dies in turns[bisect_right(turns, (start, True)) :] if dies), math.inf)
        return done if done <= death else math.inf

    def changes(self) -> list[float]:
        """The times at which anything begins or ends, each once, in ascending order."""
        ends = [event.until for event in self.events if isinstance(event, Lasting)]
        return sorted({*(event.at for event in self.events), *ends})

    def dead(self, island: int, now: float) -> bool:
        """Whether an island is dead."""
        turns = self._turns.get(island, ())
        past = bisect_right(turns, (now, True))
        return bool(past) and turns[past - 1][1]

    def frozen(self, island: int, now: float) -> bool:
        """Whether an island is frozen."""
        windows = self._disturbed.get(island, ())
        return any(isinstance(window, Freeze) and window.holds(now) for window in windows)

    def left(self, a: str, b: str, now: float) -> float:
        """The part of the capacity between sites a and b that is left: what all cuts and partitions leave."""
        return math.prod(event.leaves(a, b) for event in self._barriers if event.holds(now))

    @cached_property
    def _turns(self) -> Mapping[int, Sequence[tuple[float, bool]]]:
        """By island: when it dies (True) and rejoins (False)."""
        found = defaultdict[int, list[tuple[float, bool]]](list)
        for event in self.events:
            if isinstance(event, Death | Rejoin):
                found[event.island].append((event.at, isinstance(event, Death)))
        return found

    @cached_property
    def _disturbed(self) -> Mapping[int, Sequence[Freeze | Slowness]]:
        found = defaultdict[int, list[Freeze | Slowness]](list)
        for event in self.events:
            if isinstance(event, Freeze | Slowness):
                found[event.island].append(event)
        return found

    @cached_property
    def _barriers(self) -> Sequence[Cut | Partition]:
        return [event for event in self.events if isinstance(event, Cut | Partition)]


def _slow(windows: Sequence[Freeze | Slowness], now: float) -> float:
    """How many times as long training takes now; inf while frozen."""
    return math.prod(
        window.factor if isinstance(window, Slowness) else math.inf for window in windows if window.holds(now)
    )
