"""`Pace` before a link of known speed: what is sent faster waits in a queue."""

from collections.abc import Callable

import pytest

from atoll.peers.wide.pacing import Pace

LOOK_S = 0.25


class Emulated:
    """A link that takes `speed` bytes per second, and TCP, which alone would send as fast as `tcp` says of the look."""

    def __init__(self, speed: float, tcp: Callable[[int], float]) -> None:
        self.pace, self.speed, self._tcp = Pace(), speed, tcp
        self._looks, self._waits = 0, 0.0
        self.sent: list[float] = []
        self.queue_s: list[float] = []

    def go(self, seconds: float, others_s: float = 0.0) -> None:
        """Args: others_s: what packets of others add to every wait."""
        for _ in range(round(seconds / LOOK_S)):
            offered = min(self._tcp(self._looks), self.pace.most or float("inf"))
            taken = min(self.speed, offered + self._waits / LOOK_S)
            self._waits = min(max(self._waits + (offered - taken) * LOOK_S, 0.0), 0.1 * self.speed)
            self._looks += 1
            self.sent.append(taken)
            self.queue_s.append(self._waits / self.speed)
            self.pace.seen(taken, self._waits / self.speed + others_s)

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
    link.go(60, others_s=0.1)
    assert link.of_link(10) > 0.8


def test_where_others_fill_the_other_ends_link_nothing_is_learned() -> None:
    link = Emulated(10e6, lambda look: 15e6 if look < 80 else 3e6)
    link.go(20)
    before = link.pace.most
    link.go(20, others_s=0.1)
    assert link.pace.most == before


def test_a_slow_application_is_not_taken_for_a_slow_link() -> None:
    link = Emulated(10e6, lambda look: 15e6 if look % 100 < 40 else 1e6)
    link.go(60)
    link.go(5)
    assert link.pace.most is not None
    assert link.pace.most > 0.9 * link.speed
