"""The arithmetic of meetings that share links: who is held up by what, and which ends next, without a walk over all.

A link's share is its capacity over the flows that cross it; a meeting moves at the least share of its links. Each begin
and end changes the rates of many, so what follows from a rate is not kept for each meeting, but once for all of those
that have it in common:

    time
     ├ load            a busy link: its share
     │  └ bundle       meetings that cross the same busy loads: the least share of these
     │     └ pace      those of a bundle whose quiet loads have the same least share: no more than this cap
     │        └ meeting
     └ meeting         one that crosses no busy load: the least share of its quiet ones

Each counts the bits per flow that have passed (`atoll.sim.meters`), and a meeting ends at a reading of its pace that
never changes: a pace counts by its bundle, or by time if its cap holds it up, and a bundle by that one of its loads
that holds it up. So a new share of a busy load costs a look at the bundles on it, and only those paces that are held up
by something else from now on are touched; a new share of a quiet load is looked at for each of its few meetings.

A keeper answers hundreds at one time, and equal answers end at one time. So shares are worked out once for all that
begins and ends at a time (`Fluid`), and what is over at that time is handed out one by one before the clock is asked
again.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from atoll.sim.meters import Bundle, Busy, Pace, Time

BUSY = 16
"""A load that more meetings than this cross is busy, until no more than half as many do. A quiet load's meetings are
touched one by one, but each busy load of an island divides the meetings of its neighbours into more bundles."""


class Load:
    """What crosses one link.

    Args: capacity: bits per second that are left of it.
    Attributes: flows: that cross it. share: bits per second of each. crossing: meetings by number. busy: what counts
    for it while it is busy. sent: bits that have crossed it, in meetings that are over.
    """

    __slots__ = ("busy", "capacity", "crossing", "flows", "sent", "share")

    def __init__(self, capacity: float) -> None:
        self.capacity = self.share = capacity
        self.flows, self.sent = 0, 0.0
        self.crossing: dict[int, Moving] = {}
        self.busy: Busy | None = None


class Moving:
    """A meeting under way; `Fluid.begin` fills it in, since a call of `__init__` takes longer than all it would do.

    Attributes: number. crosses: loads, and how many of its flows cross each. bits: of each flow. cap: the least share
    of its quiet loads. left: of the bits, at `since`, while it is in no pace.
    """

    __slots__ = ("bits", "cap", "crosses", "left", "number", "pace", "since")
    number: int
    crosses: Mapping[Load, int]
    bits: float
    cap: float
    left: float
    since: float
    pace: Pace | None


class Fluid:
    """All that moves, and what it crosses. What begins and ends at one time is settled together, when the next end is
    asked for or time goes on."""

    def __init__(self) -> None:
        self._time, self._now, self._number = Time(), 0.0, 0
        self._next: tuple[float, int] | None = None
        self._stale = False  # whether something has begun or ended since that was found
        self._moving: dict[int, Moving] = {}
        self._bundles: dict[frozenset[Busy], Bundle] = {}
        self._over: dict[int, Moving] = {}  # all of their bits have come, but nobody has ended them yet
        self._begun: dict[int, Moving] = {}
        self._touched: dict[Load, int] = {}
        self._paces: dict[Pace, float | None] = {}  # those that have changed, and what they read now, if that is known

    def begin(self, now: float, crosses: Mapping[Load, int], bits: float) -> int:
        """Start a meeting whose flows have `bits` each; returns its number."""
        if now > self._now:
            self._go(now)
        self._stale = True
        number = self._number = self._number + 1
        moving = self._moving[number] = self._begun[number] = Moving()
        moving.number, moving.crosses = number, crosses
        moving.bits = moving.left = bits
        moving.cap, moving.since, moving.pace = 0.0, now, None
        for load, flows in crosses.items():
            load.flows += flows
            load.crossing[number] = moving
        self._touched.update(crosses)
        return number

    def next(self) -> tuple[float, int] | None:
        """When the next meeting ends, and which."""
        if self._over:
            return self._now, next(iter(self._over))
        if self._stale:
            self._settle()
        return self._next

    def end(self, now: float, number: int) -> None:
        """Take a meeting off its links."""
        if now > self._now:
            self._go(now)
        over = self._over
        if number not in over:
            if self._stale:
                self._settle()
            over = self._find_over()
        self._stale = True
        moving = self._moving.pop(number)
        bits = moving.bits
        if not over.pop(number, None):
            self._lift(moving)
            bits -= moving.left
        for load, flows in moving.crosses.items():
            load.flows -= flows
            load.sent += bits * flows
            del load.crossing[number]
        self._touched.update(moving.crosses)

    def limit(self, now: float, load: Load, capacity: float) -> None:
        """Give a link another capacity."""
        if now > self._now:
            self._go(now)
        if load.capacity != capacity:
            load.capacity = capacity
            self._touched[load] = 0
            self._settle()

    def _go(self, now: float) -> None:
        if self._stale:
            self._settle()
        self._now = now

    def _find_over(self) -> dict[int, Moving]:
        """Lift all that are over by now."""
        now, due, over, first = self._now, self._time.due, self._over, self._next
        while first and first[0] <= now:
            number = first[1]
            moving = over[number] = self._moving[number]
            pace = moving.pace
            if pace is None:
                del due.key[number]
                heappop(due.heap)  # it was the first there
                moving.left, moving.since = 0.0, now
            else:
                reading, key, heap = pace.read(now), pace.due.key, pace.due.heap
                last = max(reading, key[number])
                while heap and heap[0][0] <= last:
                    end, number = heappop(heap)
                    if key.get(number) == end:
                        moving = over[number] = self._moving[number]
                        self._leave(moving, pace, reading)
                self._tell({}, {})
            first = due.first()
        if len(over) > 1:
            over = self._over = dict(sorted(over.items()))
        return over

    def _settle(self) -> None:
        """What follows from all that began and ended now, and from new capacities."""
        now, touched, sort = self._now, self._touched, self._begun
        if self._over:
            sort |= self._over
        self._touched, self._begun, self._over = {}, {}, {}
        # not `dict[Busy, None]()` and the like: that takes several times as long, and this is done at every change
        busy: dict[Busy, None] = {}
        quiet: list[tuple[Load, float]] = []
        moved: dict[int, Moving] = {}
        for load in touched:
            flows, before = load.flows, load.share
            share = load.share = load.capacity / flows if flows else load.capacity
            if load.busy is None:
                if flows > BUSY and len(load.crossing) > BUSY:
                    load.busy = Busy(now, self._time, share)
                    moved |= load.crossing
                elif share != before and flows:
                    quiet.append((load, before))
            elif len(load.crossing) > BUSY // 2:
                busy[load.busy] = None
                load.busy.turn(now, self._time, share)
            else:
                load.busy = None
                moved |= load.crossing
        for moving in moved.values():
            self._lift(moving)
        held = self._look(busy) if busy else {}
        if moved:
            sort |= moved
        for moving in sort.values():
            self._sort(moving)
        if quiet:
            self._follow(quiet)
        if busy or self._paces:
            self._tell(held, busy)
        first = self._time.due.first()
        self._next = (now, first[1]) if first and first[0] < now else first
        self._stale = False

    def _look(self, busy: dict[Busy, None]) -> dict[Bundle, None]:
        """Find the bundles that loads with new shares hold up, or did until now; adds the loads that did instead."""
        held: dict[Bundle, None] = {}
        for load in busy:
            for bundle in load.bundles:
                if bundle.least is load or load.rate < bundle.share:
                    held[bundle] = None
        for bundle in held:
            busy[bundle.least] = None
            bundle.look(self._now)
        return held

    def _follow(self, quiet: Sequence[tuple[Load, float]]) -> None:
        """Give another cap to those for whom a quiet load's new share is the least, or the one before was: `quiet` has
        that of each."""
        now, due = self._now, self._time.due
        key, heap = due.key, due.heap
        for load, before in quiet:
            share = load.share
            for moving in load.crossing.values():
                cap, least = moving.cap, share
                if cap <= share:
                    if cap != before:
                        continue
                    for other in moving.crosses:
                        if other.share < least and other.busy is None:
                            least = other.share
                    if cap == least:
                        continue
                moving.cap, pace, number = least, moving.pace, moving.number
                if pace:
                    self._leave(moving, pace, pace.read(now))
                    self._lay(moving, pace.bundle)
                    continue
                # `_lift` and `_sort` for one that moves alone, written out: there are several for each begin and end
                if cap < inf:
                    left = moving.left - cap * (now - moving.since)
                    moving.left = left if left > 0 and key.get(number, inf) > now else 0.0
                moving.since = now
                if least > 0:
                    end = key[number] = now + moving.left / least
                    heappush(heap, (end, number))
                else:
                    key.pop(number, None)

    def _sort(self, moving: Moving) -> None:
        """Put a meeting in its bundle, or let it move alone."""
        busy: list[Busy] = []
        cap = inf
        for load in moving.crosses:
            if load.busy:
                busy.append(load.busy)
            elif load.share < cap:
                cap = load.share
        moving.cap = cap
        if not busy:
            if cap > 0:
                due, number = self._time.due, moving.number
                end = due.key[number] = self._now + moving.left / cap
                heappush(due.heap, (end, number))
            return
        place = frozenset(busy)
        bundle = self._bundles.get(place)
        if bundle is None:
            bundle = self._bundles[place] = Bundle(self._now, busy)
            for load in busy:
                load.bundles[bundle] = None
        self._lay(moving, bundle)

    def _lay(self, moving: Moving, bundle: Bundle) -> None:
        """Put a meeting among those of its bundle with the same cap."""
        now, cap = self._now, moving.cap
        pace = bundle.paces.get(cap)
        if pace is None:
            pace = bundle.paces[cap] = Pace(now, self._time, bundle, cap)
            insort(bundle.caps, cap)
            reading = 0.0
        else:
            reading = self._paces.get(pace)
            if reading is None:
                reading = pace.read(now)
        pace.due.put(moving.number, reading + moving.left)
        moving.pace = pace
        self._paces[pace] = reading

    def _lift(self, moving: Moving) -> None:
        """Take a meeting from where it moves, with what is left of it."""
        now, pace = self._now, moving.pace
        if pace:
            self._leave(moving, pace, pace.read(now))
            return
        end = self._time.due.key.pop(moving.number, inf)
        if moving.cap < inf:
            moving.left = max(0.0, moving.left - moving.cap * (now - moving.since)) if end > now else 0.0
        moving.since = now

    def _leave(self, moving: Moving, pace: Pace, reading: float) -> None:
        """Take a meeting from its pace, which reads that now."""
        left = pace.due.key[moving.number] - reading
        pace.remove(moving.number)
        moving.left, moving.pace, moving.since = left if left > 0 else 0.0, None, self._now
        self._paces[pace] = None

    def _tell(self, bundles: dict[Bundle, None], loads: dict[Busy, None]) -> None:
        """Let clocks know what is due next on all that has changed, and forget what has become empty."""
        for pace in self._paces:
            bundle = pace.bundle
            bundles[bundle] = None
            if pace.due.key:
                pace.enter()
            else:
                del bundle.paces[pace.cap]
                del bundle.caps[bisect_left(bundle.caps, pace.cap)]
        self._paces.clear()
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
