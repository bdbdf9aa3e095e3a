"""A virtual clock: it jumps from one thing to the next."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

from atoll.sim.network import Traffic

Act = Callable[[float], None]


class Clock:
    """What is due at one time happens in the order in which it was asked for, and before anything that moves ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: dict[float, list[Act]] = {}
        self._times: list[float] = []

    def at(self, time: float, act: Act) -> None:
        """Do `act(time)` then; never, if that is for ever away."""
        acts = self._due.get(time)
        if acts is not None:
            acts.append(act)
        elif time < math.inf:
            self._due[time] = [act]
            heappush(self._times, time)

    def run(self, traffic: Traffic, ended: Callable[[float, int], None]) -> None:
        """Go on until nothing is due and nothing moves."""
        due, times, ends = self._due, self._times, traffic.next
        while True:
            moving = ends()
            if times and (moving is None or times[0] <= moving[0]):
                self.now = now = heappop(times)
                for act in due[now]:  # also those that are asked for meanwhile
                    act(now)
                del due[now]
            elif moving:
                self.now = moving[0]
                traffic.end(self.now, moving[1])
                ended(self.now, moving[1])
            else:
                return
