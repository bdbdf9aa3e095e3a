"""The arithmetic of meetings that share links: who is held up by what, and which ends next, without a walk over all.

A link's share is its capacity over the flows that cross it; a meeting moves at the least share of its links. Each begin
and end changes the rates of many, so what follows from a rate is not kept for each meeting, but once for all of those
that have it in common:

    time
     └ load            a link: its share
        └ bundle       meetings that cross the same busy loads: the least share of these
           └ pace      those of a bundle whose quiet loads have the same least share: no more than this cap
              └ meeting

Each counts the bits per flow that have passed, and a meeting ends at a reading of its pace that never changes: a pace
counts by its bundle, or by time if its cap holds it up, and a bundle by that one of its loads that holds it up. So a
new share of a busy load costs a look at the bundles on it, and only those paces that are held up by something else from
now on are touched; a new share of a quiet load can put each of its few meetings in another pace.
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence

BUSY = 16
"""A load that more meetings than this cross is busy, until no more than half as many do. A quiet load's meetings are
touched one by one, but each busy load of an island divides the meetings of its neighbours into more bundles."""


class Queue:
    """Numbers with a key each: least key first, then least number. Attributes: key: by number."""

    __slots__ = ("_heap", "key")

    def __init__(self) -> None:
        self.key: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def put(self, number: int, key: float) -> None:
        """Add a number, or give it another key."""
        if self.key.get(number) == key:
            return
        self.key[number] = key
        heapq.heappush(self._heap, (key, number))
        if len(self._heap) > 2 * len(self.key) + 16:  # entries that no longer hold leave only once they come first
            self._heap = [(at, known) for known, at in self.key.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, int] | None:
        """The least key and its number."""
        heap, key = self._heap, self.key
        while heap:
            first = heap[0]
            if key.get(first[1]) == first[0]:
                return first
            heapq.heappop(heap)
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


class Load:
    """What crosses one link.

    Args: index: its own number. capacity: bits per second that are left of it.
    Attributes: flows: that cross it. share: bits per second of each. crossing: meetings by number. busy: what counts
    for it while it is busy. sent: bits that have crossed it, in meetings that are over.
    """

    __slots__ = ("busy", "capacity", "crossing", "flows", "index", "sent", "share")

    def __init__(self, index: int, capacity: float) -> None:
        self.index, self.capacity, self.share = index, capacity, capacity
        self.flows, self.sent = 0, 0.0
        self.crossing: dict[int, Moving] = {}
        self.busy: Busy | None = None


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


class Moving:
    """A meeting under way.

    Args: number. crosses: loads, and how many of its flows cross each. bits: of each flow.
    Attributes: left: of the bits, while it is in no pace. quiet: shares of its quiet loads, since one of them changed.
    """

    __slots__ = ("bits", "crosses", "left", "number", "pace", "quiet")

    def __init__(self, number: int, crosses: Mapping[Load, int], bits: float) -> None:
        self.number, self.crosses, self.bits, self.left = number, crosses, bits, bits
        self.pace: Pace | None = None
        self.quiet: Queue | None = None


class Fluid:
    """All that moves, and what it crosses."""

    def __init__(self) -> None:
        self._time, self._now, self._loads = Time(), 0.0, 0
        self._free = Busy(0.0, self._time, math.inf)
        self._moving: dict[int, Moving] = {}
        self._bundles: dict[frozenset[Busy], Bundle] = {}
        self._changed: dict[Pace, None] = {}

    def load(self, capacity: float) -> Load:
        """A new link."""
        self._loads += 1
        return Load(self._loads, capacity)

    def begin(self, now: float, number: int, crosses: Mapping[Load, int], bits: float) -> None:
        """Start a meeting whose flows have `bits` each."""
        moving = self._moving[number] = Moving(number, crosses, bits)
        for load, flows in crosses.items():
            load.flows += flows
            load.crossing[number] = moving
        self._settle(now, crosses, {number: moving})

    def next(self) -> tuple[float, int] | None:
        """When the next meeting ends, and which."""
        first = self._time.due.first()
        return (max(first[0], self._now), first[1]) if first else None

    def end(self, now: float, number: int) -> None:
        """Take a meeting off its links."""
        moving = self._moving.pop(number)
        over = self._time.due.key.get(number, math.inf) <= now
        self._lift(now, moving)
        bits = moving.bits if over else moving.bits - moving.left
        for load, flows in moving.crosses.items():
            load.flows -= flows
            load.sent += bits * flows
            del load.crossing[number]
        self._settle(now, moving.crosses, {})

    def limit(self, now: float, load: Load, capacity: float) -> None:
        """Give a link another capacity."""
        if load.capacity != capacity:
            load.capacity = capacity
            self._settle(now, (load,), {})

    def _settle(self, now: float, loads: Iterable[Load], sort: dict[int, Moving]) -> None:
        """What follows from new flows or capacities of loads. Args: sort: meetings that need another bundle."""
        self._now = now
        busy, quiet = dict[Busy, None](), list[Load]()
        for load in loads:
            crossing = len(load.crossing)
            load.share = load.capacity / load.flows if crossing else load.capacity
            if load.busy is None:
                if crossing > BUSY:
                    load.busy = Busy(now, self._time, load.share)
                    sort.update(load.crossing)
                elif crossing:
                    quiet.append(load)
            elif crossing > BUSY // 2:
                busy[load.busy] = None
                load.busy.turn(now, self._time, load.share)
            else:
                load.busy = None
                sort.update(load.crossing)
        for moving in sort.values():
            self._lift(now, moving)
            moving.quiet = None
        bundles: dict[Bundle, None] = {}
        for load in busy:
            for bundle in load.bundles:
                if bundle.least is load or load.rate < bundle.share:
                    bundles[bundle] = None
        for bundle in bundles:
            busy[bundle.least] = None
            bundle.look(now)
        self._cap(now, quiet)
        for moving in sort.values():
            self._sort(now, moving)
        self._enter(bundles, busy)

    def _cap(self, now: float, changed: Iterable[Load]) -> None:
        """Put meetings in other paces that shares of quiet loads call for."""
        capped: dict[Moving, Queue] = {}
        for load in changed:
            for moving in load.crossing.values():
                if moving.pace is None:
                    continue
                if moving.quiet is None:
                    moving.quiet = Queue()
                    for other in moving.crosses:
                        if other.busy is None:
                            moving.quiet.put(other.index, other.share)
                moving.quiet.put(load.index, load.share)
                capped[moving] = moving.quiet
        for moving, quiet in capped.items():
            pace, least = moving.pace, quiet.first()
            if pace and least and least[0] != pace.cap:
                self._lift(now, moving)
                self._lay(now, moving, pace.bundle, least[0])

    def _sort(self, now: float, moving: Moving) -> None:
        """Put a meeting in its bundle."""
        busy, cap = list[Busy](), math.inf
        for load in moving.crosses:
            if load.busy:
                busy.append(load.busy)
            elif load.share < cap:
                cap = load.share
        busy = busy or [self._free]
        place = frozenset(busy)
        bundle = self._bundles.get(place)
        if bundle is None:
            bundle = self._bundles[place] = Bundle(now, busy)
            for load in busy:
                load.bundles[bundle] = None
        self._lay(now, moving, bundle, cap)

    def _lay(self, now: float, moving: Moving, bundle: Bundle, cap: float) -> None:
        pace = bundle.paces.get(cap)
        if pace is None:
            pace = bundle.paces[cap] = Pace(now, self._time, bundle, cap)
            insort(bundle.caps, cap)
            pace.due.put(moving.number, moving.left)
        else:
            pace.due.put(moving.number, pace.read(now) + moving.left)
        moving.pace = pace
        self._changed[pace] = None

    def _lift(self, now: float, moving: Moving) -> None:
        pace = moving.pace
        if pace:
            moving.left = max(0.0, pace.due.key[moving.number] - pace.read(now))
            pace.remove(moving.number)
            moving.pace = None
            self._changed[pace] = None

    def _enter(self, bundles: dict[Bundle, None], loads: dict[Busy, None]) -> None:
        """Let clocks know what is due next on all that has changed, and forget what has become empty."""
        for pace in self._changed:
            bundle = pace.bundle
            bundles[bundle] = None
            if pace.due.key:
                pace.enter()
            else:
                del bundle.paces[pace.cap]
                del bundle.caps[bisect_left(bundle.caps, pace.cap)]
        self._changed.clear()
        for bundle in bundles:
            loads[bundle.least] = None
            bundle.enter()
            if not bundle.paces:
                del self._bundles[frozenset(bundle.loads)]
                for load in bundle.loads:
                    del load.bundles[bundle]
        for load in loads:
            if load.due.key:
                load.enter()
