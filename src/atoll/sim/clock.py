"""A virtual clock: it jumps from one thing to the next."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeVar

from atoll.sim.network import Traffic

T = TypeVar("T")
Act = Callable[[float], None]
Told = Callable[[Any, float], None]
"""Is told of something, and of the time."""
Tell = Callable[[float, Told, Any], None]
"""Tells somebody of something at a time, as `Clock.tell` does."""


class Clock:
    """What is due at one time happens in the order in which it was asked for, and before anything that moves ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: dict[float, list[tuple[Told, Any]]] = {}
        self._times: list[float] = []

    def at(self, time: float, act: Act) -> None:
        """Do `act(time)` then; never, if that is for ever away."""
        self.tell(time, do, act)

    def tell(self, time: float, act: Callable[[T, float], None], what: T) -> None:
        """Do `act(what, time)` then; never, if that is for ever away.

        As `at` with a closure that holds `what`, which would take several times as long to make and to call.
        """
        acts = self._due.get(time)
        if acts is not None:
            acts.append((act, what))
        elif time < inf:
            self._due[time] = [(act, what)]
            heappush(self._times, time)

    def run(self, traffic: Traffic, ends: dict[int, tuple[float, Tell, Told, Any]]) -> None:
        """Go on until nothing is due and nothing moves.

        Args: ends: by number of what moves: for how long the last bits are still on their way when all have left, and
        by whom is told, and who, and of what, when that time comes.
        """
        due, times, first = self._due, self._times, traffic.next
        while True:
            moving = first()
            if times and (moving is None or times[0] <= moving[0]):
                self.now = now = heappop(times)
                for act, what in due[now]:  # also those that are asked for meanwhile
                    act(what, now)
                del due[now]
            elif moving:
                self.now = moving[0]
                traffic.end(self.now, moving[1])
                latency, tell, act, what = ends.pop(moving[1])
                tell(self.now + latency, act, what)
            else:
                return


def do(act: Act, now: float) -> None:
    """Do it: what a clock is told for an act that needs no more than the time."""
    act(now)
