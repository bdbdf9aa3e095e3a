"""A virtual clock: it jumps from one thing to the next."""

import heapq
import itertools
import math
from collections.abc import Callable

from atoll.sim.network import Traffic

Act = Callable[[float], None]


class Clock:
    """What is due at one time happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._order = itertools.count()

    def at(self, time: float, act: Act) -> None:
        """Do `act(time)` then; never, if that is for ever away."""
        if time < math.inf:
            heapq.heappush(self._due, (time, next(self._order), act))

    def run(self, traffic: Traffic, ended: Callable[[float, int], None]) -> None:
        """Go on until nothing is due and nothing moves."""
        while True:
            moving = traffic.next()
            if self._due and (moving is None or self._due[0][0] <= moving[0]):
                self.now, _, act = heapq.heappop(self._due)
                act(self.now)
            elif moving:
                self.now = moving[0]
                traffic.end(self.now, moving[1])
                ended(self.now, moving[1])
            else:
                return
