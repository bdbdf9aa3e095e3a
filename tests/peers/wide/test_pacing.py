"""`Pace` before a link of known speed: what is sent faster waits in a queue."""

import math
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from atoll.peers.wide.pacing import KNOWN, LOOK_S, Pace, Sent

TICKS = 4


class Emulated:
    """A link that takes `speed` bytes per second, and TCP, which alone would send as fast as `tcp` says of the second.

    Args: others_s: what packets of others add to every wait. before: the part of what TCP says of waits that is what it
    said before.
    """

    def __init__(self, speed: float, tcp: Callable[[int], float], others_s: float = 0.0, before: float = 0.0) -> None:
        self.pace, self.speed, self.others_s, self.before, self._tcp = Pace(), speed, others_s, before, tcp
        self._ticks, self._queue, self._again, self._taken = 0, 0.0, 0.0, 0.0
        self._all = float(KNOWN)
        self.sent: list[float] = []
        self.queue_s: list[float] = []
        self._waits_s = 0.0

    def go(self, seconds: float) -> None:
        """There is always more to send."""
        for _ in range(round(seconds / LOOK_S) * TICKS):
            self._tick(math.inf)

    def exchange(self, size: float) -> float:
        """Send so many bytes; the seconds until they have arrived, after which nothing is sent for some time."""
        left, took = size, 0
        while left + self._again + self._queue > 1e-6 * size:
            left = max(left - self._tick(left), 0.0)
            took += 1
        for _ in range(10 * TICKS):
            self._tick(0.0)
        return took * LOOK_S / TICKS

    def _tick(self, left: float) -> float:
        """Bytes of those that are left that TCP has sent for the first time: then they wait in no buffer any more."""
        tick_s = LOOK_S / TICKS
        sent = min(self._tcp(self._ticks * tick_s) * tick_s, (self.pace.most or math.inf) * tick_s, self._again + left)
        fresh = max(sent - self._again, 0.0)
        taken = min(self.speed * tick_s, sent + self._queue)
        lost = max(self._queue + sent - taken - 0.1 * self.speed, 0.0)
        self._queue += sent - taken - lost
        self._again += fresh - sent + lost
        self._taken += taken
        self._ticks += 1
        if self._ticks % TICKS == 0:
            self.sent.append(self._taken / LOOK_S)
            self.queue_s.append(self._queue / self.speed)
            if self._taken:
                self._waits_s += (self.queue_s[-1] - self._waits_s) * (1 - self.before)
            self._all += self._taken
            self._taken = 0.0
            sent = Sent(round(self._all), self._waits_s + self.others_s, left > fresh)
            self.pace.look(self._ticks * tick_s, {"a connection": sent}, 1, 0)
        return fresh

    def of_link(self, seconds: float) -> float:
        """The part of it that has been used lately."""
        looks = self.sent[-round(seconds / LOOK_S) :]
        return sum(looks) / len(looks) / self.speed


@pytest.mark.parametrize("speed", [5e5, 12.5e6, 1e9])
def test_it_fills_the_link_and_no_queue(speed: float) -> None:
    link = Emulated(speed, lambda t: 1.5 * speed)
    link.go(1)
    assert link.queue_s[-1] == pytest.approx(0.1), "TCP alone fills the queue, which this emulates"
    link.go(20)
    assert link.of_link(10) > 0.95
    assert max(link.queue_s[-40:]) < 0.05


def test_tcp_is_not_held_up_while_it_becomes_faster() -> None:
    link, alone = (Emulated(12.5e6, lambda t: 1e5 * 1.2 ** (4 * t)) for _ in range(2))
    alone.pace = Mock(most=None)
    for each in (link, alone):
        each.go(8)
    assert link.sent == alone.sent
    assert link.sent[-1] == pytest.approx(12.5e6)


def test_it_follows_a_link_that_becomes_faster() -> None:
    link = Emulated(5e6, lambda t: 20e6)
    link.go(10)
    link.speed = 15e6
    link.go(20)
    assert link.of_link(10) > 0.9


def test_the_queue_of_others_does_not_take_the_link_away() -> None:
    link = Emulated(10e6, lambda t: 15e6)
    link.go(10)
    link.others_s = 0.1
    link.go(60)
    assert link.of_link(10) > 0.8


def test_where_others_fill_the_other_ends_link_nothing_is_learned() -> None:
    link = Emulated(10e6, lambda t: 15e6 if t < 20 else 3e6)
    link.go(20)
    link.others_s = 0.1
    link.go(1)
    before = link.pace.most
    link.go(20)
    assert link.pace.most == before


def test_a_slow_application_is_not_taken_for_a_slow_link() -> None:
    link = Emulated(10e6, lambda t: 15e6 if t % 25 < 10 else 1e6)
    link.go(60)
    link.go(5)
    assert link.pace.most is not None
    assert link.pace.most > 0.9 * link.speed


def test_exchanges_of_less_than_a_second_are_paced_too() -> None:
    """TCP has three connections that were each alone last, and sends three times as fast as the link takes."""
    link = Emulated(10e6, lambda t: 30e6)
    for _ in range(20):
        link.exchange(4.5e6)
    looks = len(link.sent)
    assert link.exchange(4.5e6) < 0.55
    assert max(link.queue_s[looks:]) < 0.07


@pytest.mark.parametrize("size", [2e6, 3e6])
def test_a_pace_that_is_too_low_rises_in_exchanges_of_few_looks(size: float) -> None:
    link = Emulated(10e6, lambda t: 30e6)
    link.pace = Pace(most=7e6, _fastest=5.6e6)
    took = [link.exchange(size) for _ in range(60)]
    assert took[0] > 0.95 * size / 7e6
    assert took[-1] < 1.1 * size / link.speed


@pytest.mark.parametrize("size", [0.7e6, 1e6, 1.3e6, 2e6])
def test_what_is_learned_first_of_exchanges_of_few_looks_is_not_too_low(size: float) -> None:
    """All is sent at once, so nobody has more to send at any look; and when all has arrived TCP still says that packets
    wait."""
    link = Emulated(6.25e6, lambda t: 40e6, before=0.5)
    for _ in range(40):
        link.exchange(size)
        assert link.pace.most is None or link.pace.most > link.speed


def test_the_ends_of_exchanges_are_not_taken_for_the_speed_of_the_link() -> None:
    link = Emulated(10e6, lambda t: 9e6)
    for size in [1e6, 3e6] * 20:
        link.exchange(size)
    assert link.exchange(1e6) == pytest.approx(1 / 9, abs=0.03)
    assert link.exchange(3e6) == pytest.approx(1 / 3, abs=0.03)


def test_what_tcp_sends_while_it_searches_is_not_taken_for_the_speed_of_the_link() -> None:
    """In exchanges of a fifth of a second, in none of which packets wait."""
    link = Emulated(6.25e6, lambda t: 3e6 if t < 20 else 20e6)
    for _ in range(20):
        link.exchange(1e6)
    assert link.exchange(1e6) < 0.2


def test_packets_that_always_wait_are_not_taken_for_a_queue() -> None:
    link = Emulated(10e6, lambda t: 5e6 if t < 2 else 20e6, others_s=0.04)
    link.go(60)
    assert link.of_link(10) > 0.95
