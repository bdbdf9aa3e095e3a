"""`Pace` before a link of known speed: what is sent faster waits in a queue."""

import math
from collections.abc import Callable

import pytest

from atoll.peers.wide.pacing import Pace

LOOK_S, TICKS = 0.25, 10


class Emulated:
    """A link that takes `speed` bytes per second, and TCP, which alone would send as fast as `tcp` says of the look.

    Args: others_s: what packets of others add to every wait.
    """

    def __init__(self, speed: float, tcp: Callable[[int], float], others_s: float = 0.0) -> None:
        self.pace, self.speed, self.others_s, self._tcp = Pace(), speed, others_s, tcp
        self._ticks, self._queue, self._taken, self._more = 0, 0.0, 0.0, False
        self.sent: list[float] = []
        self.queue_s: list[float] = []

    def go(self, seconds: float) -> None:
        """There is always more to send."""
        for _ in range(round(seconds / LOOK_S) * TICKS):
            self._tick(math.inf)

    def exchange(self, size: float) -> float:
        """Send so many bytes; the seconds until they have arrived, after which nothing is sent for some time."""
        left, took = size, 0
        while left + self._queue > 1e-6 * size:
            left = max(left - self._tick(left), 0.0)
            took += 1
        for _ in range(33):
            self._tick(0.0)
        return took * LOOK_S / TICKS

    def _tick(self, left: float) -> float:
        """Bytes that TCP has sent of those that are left."""
        tick_s = LOOK_S / TICKS
        sent = min(self._tcp(self._ticks // TICKS) * tick_s, (self.pace.most or math.inf) * tick_s, left)
        taken = min(self.speed * tick_s, sent + self._queue)
        self._queue = min(self._queue + sent - taken, 0.1 * self.speed)
        self._taken += taken
        self._ticks += 1
        if self._ticks % TICKS == 0:
            had_more, self._more = self._more, left > sent
            self.sent.append(self._taken / LOOK_S)
            self.queue_s.append(self._queue / self.speed)
            if self._taken:
                self.pace.seen(self.sent[-1], self.queue_s[-1] + self.others_s, had_more and self._more)
            self._taken = 0.0
        return sent

    def of_link(self, seconds: float) -> float:
        """The part of it that has been used lately."""
        looks = self.sent[-round(seconds / LOOK_S) :]
        return sum(looks) / len(looks) / self.speed


@pytest.mark.parametrize("speed", [1e5, 12.5e6, 1e9])
def test_it_fills_the_link_and_no_queue(speed: float) -> None:
    link = Emulated(speed, lambda look: 1.5 * speed)
    link.go(1)
    assert link.queue_s[-1] == pytest.approx(0.1), "TCP alone fills the queue, which this emulates"
    link.go(20)
    assert link.of_link(10) > 0.95
    assert max(link.queue_s[-40:]) < 0.05


def test_tcp_is_not_held_up_while_it_becomes_faster() -> None:
    link = Emulated(12.5e6, lambda look: 1e5 * 1.2**look)
    link.go(6)
    assert link.sent == pytest.approx([min(1e5 * 1.2**look, 12.5e6) for look in range(24)])


def test_it_follows_a_link_that_becomes_faster() -> None:
    link = Emulated(5e6, lambda look: 20e6)
    link.go(10)
    link.speed = 15e6
    link.go(20)
    assert link.of_link(10) > 0.9


def test_the_queue_of_others_does_not_take_the_link_away() -> None:
    link = Emulated(10e6, lambda look: 15e6)
    link.go(10)
    link.others_s = 0.1
    link.go(60)
    assert link.of_link(10) > 0.8


def test_where_others_fill_the_other_ends_link_nothing_is_learned() -> None:
    link = Emulated(10e6, lambda look: 15e6 if look < 80 else 3e6)
    link.go(20)
    before = link.pace.most
    link.others_s = 0.1
    link.go(20)
    assert link.pace.most == before


def test_a_slow_application_is_not_taken_for_a_slow_link() -> None:
    link = Emulated(10e6, lambda look: 15e6 if look % 100 < 40 else 1e6)
    link.go(60)
    link.go(5)
    assert link.pace.most is not None
    assert link.pace.most > 0.9 * link.speed


def test_exchanges_of_less_than_a_second_are_paced_too() -> None:
    """TCP has three connections that were each alone last, and sends three times as fast as the link takes."""
    link = Emulated(10e6, lambda look: 30e6)
    for _ in range(20):
        link.exchange(7e6)
    looks = len(link.sent)
    assert link.exchange(7e6) < 0.85
    assert max(link.queue_s[looks:]) < 0.07


@pytest.mark.parametrize("others_s", [0.0, 0.04])
def test_the_ends_of_exchanges_are_not_taken_for_the_speed_of_the_link(others_s: float) -> None:
    link = Emulated(10e6, lambda look: 9e6, others_s)
    for size in [1e6, 3e6] * 20:
        link.exchange(size)
    assert link.exchange(1e6) == pytest.approx(1 / 9, abs=0.03)
    assert link.exchange(3e6) == pytest.approx(1 / 3, abs=0.03)


def test_packets_that_always_wait_are_not_taken_for_a_queue() -> None:
    link = Emulated(10e6, lambda look: 5e6 if look < 8 else 20e6, others_s=0.04)
    link.go(60)
    assert link.of_link(10) > 0.95
