"""What is counted while meetings move, so that it is known what ends next (`atoll.sim.traffic`): time, and by it, or by
one another, the bits per flow that have passed on a busy link, in a bundle of meetings, and at a pace."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class Queue:
    """Numbers with a key each: least key first, then least number.

    Attributes: key: by number. heap: of keys and numbers, with entries that no longer hold.
    """

    __slots__ = ("_most", "heap", "key")

    def __init__(self) -> None:
        self.key: dict[int, float] = {}
        self.heap: list[tuple[float, int]] = []
        self._most = 16

    def put(self, number: int, key: float) -> None:
        """Add a number, or give it another key."""
        if self.key.get(number) != key:
            self.key[number] = key
            heappush(self.heap, (key, number))

    def first(self) -> tuple[float, int] | None:
        """The least key and its number."""
        heap, key = self.heap, self.key
        if len(heap) > self._most:  # entries that no longer hold leave only once they come first
            heap[:] = [(at, number) for number, at in key.items()]
            heapify(heap)
            self._most = 2 * len(heap) + 16
        while heap:
            first = heap[0]
            if key.get(first[1]) == first[0]:
                return first
            heappop(heap)
        return None


class Time:
    """What all else is measured by. Attributes: due: numbers of meetings, by the reading at which they end."""

    __slots__ = ("due",)

    def __init__(self) -> None:
        self.due = Queue()

    def read(self, now: float) -> float:
        """The reading now."""
        return now

    def remove(self, number: int) -> None:
        """A meeting is no longer due."""
        del self.due.key[number]


class Meter(Time):
    """Bits per flow that have passed, at a rate: bits per unit of the clock that it goes by, time or another meter.

    Attributes: first: the meeting that is due on that clock for this meter.
    """

    __slots__ = ("_at", "_base", "_reading", "_since", "clock", "first", "rate")

    def __init__(self, now: float, clock: Time, rate: float) -> None:
        self.due = Queue()
        self.clock, self.rate = clock, rate
        self.first: int | None = None
        self._base, self._since = 0.0, clock.read(now)
        self._at, self._reading = math.nan, 0.0

    def read(self, now: float) -> float:
        """Bits per flow until now."""
        at = self.clock.read(now)
        if at == self._at:  # where one is over, equal ones are over, too, whatever rounding says
            return self._reading
        return self._base + self.rate * (at - self._since) if self.rate < math.inf else self._base

    def turn(self, now: float, clock: Time, rate: float) -> None:
        """Go on from here by another clock, at another rate."""
        self._base = self.read(now)
        if clock is not self.clock:
            self._withdraw()
            self.clock = clock
        self._since, self._at, self.rate = clock.read(now), math.nan, rate

    def enter(self) -> None:
        """Let the clock know when the first is due."""
        first, rate = self.due.first(), self.rate
        if first is None or rate == 0:
            self._withdraw()
            return
        reading, number = first
        if number != self.first:
            self._withdraw()
            self.first = number
        left = reading - self._base
        at = self._since + left / rate if left > 0 else self._since
        if rate < math.inf:
            self._at, self._reading = at, reading
        self.clock.due.put(number, at)

    def remove(self, number: int) -> None:
        """A meeting is no longer due, neither here nor on the clock."""
        del self.due.key[number]
        if self.first == number:
            self._withdraw()

    def _withdraw(self) -> None:
        if self.first is not None:
            self.clock.remove(self.first)
            self.first = None


class Busy(Meter):
    """The bits per flow that have crossed a busy load; its rate is the load's share.

    Attributes: bundles: that it can hold up; a dictionary for its order.
    """

    __slots__ = ("bundles",)

    def __init__(self, now: float, clock: Time, rate: float) -> None:
        super().__init__(now, clock, rate)
        self.bundles: dict[Bundle, None] = {}


class Bundle(Meter):
    """Meetings that cross the same busy loads, or none. Its clock is the load that holds it up.

    Attributes: least: that load. share: of that load. paces: by cap. caps: of them, in order.
    """

    __slots__ = ("caps", "least", "loads", "paces", "share")

    def __init__(self, now: float, loads: Sequence[Busy]) -> None:
        self.loads, self.least = loads, min(loads, key=lambda load: load.rate)
        self.share = self.least.rate
        self.paces: dict[float, Pace] = {}
        self.caps: list[float] = []
        super().__init__(now, self.least, 1.0)

    def look(self, now: float) -> None:
        """See which load holds it up, and at which share; among equals, the same as before."""
        least, share, caps = self.least, self.least.rate, self.caps
        for load in self.loads:
            if load.rate < share:
                least, share = load, load.rate
        if least is not self.least:
            self.least = least
            self.turn(now, least, 1.0)
        before, after = bisect_right(caps, self.share), bisect_right(caps, share)
        self.share = share
        for cap in caps[min(before, after) : max(before, after)] if before != after else ():
            self.paces[cap].look(now)


class Pace(Meter):
    """Meetings of a bundle that move as it does, but no faster than a cap, which holds them up if it is not more."""

    __slots__ = ("bundle", "cap", "time")

    def __init__(self, now: float, time: Time, bundle: Bundle, cap: float) -> None:
        self.time, self.bundle, self.cap = time, bundle, cap
        if cap > bundle.share:
            super().__init__(now, bundle, 1.0)
        else:
            super().__init__(now, time, cap)

    def look(self, now: float) -> None:
        """See what holds it up."""
        if self.cap > self.bundle.share:
            self.turn(now, self.bundle, 1.0)
        else:
            self.turn(now, self.time, self.cap)
        self.enter()
