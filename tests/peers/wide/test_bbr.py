"""BBR: what goes out first after a silence, and when it is begun anew."""

import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from atoll.peers.wide import bbr
from atoll.peers.wide.bbr import OLD_S, PAUSE_S, Trips, begin_anew
from atoll.peers.wide.link import COORDINATOR, Priority, ZenohLink
from tests.peers.wide.links import Ears

TCP_CC_INFO = 26
"""Linux's, which Python does not name."""
SPEED = struct.Struct("=Q")
"""What its tcp_bbr_info begins with: bytes per second."""


@pytest.fixture
def under_bbr() -> Iterator[socket.socket]:
    """A connection that has sent something."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as way:
        try:
            way.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except (AttributeError, OSError):
            pytest.skip("BBR is not here, or may not be chosen")
        way.connect(server.getsockname())
        other, _ = server.accept()
        with other:
            for _ in range(64):
                way.sendall(bytes(1 << 14))
                other.recv(1 << 14, socket.MSG_WAITALL)
            yield way


def test_bbr_is_begun_anew(under_bbr: socket.socket) -> None:
    assert speed(under_bbr) > 0
    begin_anew(under_bbr)
    assert (control(under_bbr), speed(under_bbr)) == (b"bbr", 0)


def test_another_congestion_control_is_left_as_it_is(under_bbr: socket.socket) -> None:
    under_bbr.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    begin_anew(under_bbr)
    assert control(under_bbr) == b"reno"


class Watched:
    """`Trips` on a clock of its own, and when it began a connection anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.begun, self.trips = 0.0, list[float](), Trips()
        monkeypatch.setattr(bbr.time, "monotonic", lambda: 1000.0 + self.now)
        monkeypatch.setattr(bbr, "begin_anew", lambda way: self.begun.append(self.now))

    def look(self, port: int = 1, *, may: float | None = None, starves: bool = False, after: float = 0.25) -> None:
        with socket.socket() as way:
            self.trips.look((port, 2), way, may=may, starves=starves)
        self.now += after


def test_it_is_begun_anew_when_its_round_trip_is_old_or_of_unknown_age(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for _ in range(100):  # all the time, then after each of two pauses
        watched.look(may=1e6)
    for pause in (PAUSE_S / 2, 2 * PAUSE_S):
        watched.now += pause
        watched.look(may=1e6)
    watched.look(port=3, may=1e6)
    again, pauses = OLD_S + 0.25, 25.0 + 2.5 * PAUSE_S
    assert watched.begun == [0.0, again, 2 * again, 3 * again, pauses + 0.25, pauses + 0.5]


def test_it_is_begun_anew_when_it_may_send_much_more_than_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for share in (3e6, 1e6, 1.2e6, 1.4e6, 1.6e6, 1.6e6, 2.3e6, 2.5e6, 1.7e6, 3e6):
        watched.look(may=share)
    assert watched.begun == [0.0, 1.25], "first of all, and at the second 1.6; 2.5 and 3 of 1.6 do not last"


def test_a_silence_is_not_taken_for_time_in_which_it_might_have_sent_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges of half a second with three others, of which one is over last."""
    watched = Watched(monkeypatch)
    for _ in range(6):
        for share in (3e6, 1e6, 1e6, 1e6, 3e6):
            watched.look(may=share, after=0.1)
        watched.now += 0.6
    assert watched.begun == [0.0]


def test_whoever_gets_hardly_anything_through_is_begun_anew_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for _ in range(40):
        watched.look(starves=True)
    assert watched.begun == [0.75, 2.0, 4.25, 8.5], "after 0.5, 1, 2 and 4 s, at the next look"


def test_whoever_gets_something_through_starves_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for _ in range(8):
        watched.look(after=0.4, starves=True)
        watched.look(after=0.0)
    assert not watched.begun
    for _ in range(3):
        watched.look(after=0.4, starves=True)
    assert watched.begun, "without that it would be"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells what a connection has sent")
def test_the_first_words_after_a_silence_are_more_than_one_packet(open_link: Callable[..., ZenohLink]) -> None:
    coordinator, island = open_link(COORDINATOR), open_link(0)
    coordinator.start(lambda sender, frame: None, lambda address, alive: None)
    ears, other = Ears(island), Ears(open_link(1))
    ears.until(lambda: ears.alive() == {COORDINATOR, 1})
    other.until(lambda: other.alive() == {COORDINATOR, 0})

    def sent(word: bytes) -> int:
        before = sum(told.acked for _, _, told in island._tuning._look())
        island.send(1, [word], Priority.CONTROL)
        other.until(lambda: (0, word) in other.frames)
        time.sleep(0.1)
        return sum(told.acked for _, _, told in island._tuning._look()) - before

    assert sent(b"first") > 2 * 1448
    assert sent(b"second") < 1448
    time.sleep(0.6)
    assert sent(b"third") > 2 * 1448
    assert other.frames == [(0, b"first"), (0, b"second"), (0, b"third")], "and nothing else is heard"


def control(way: socket.socket) -> bytes:
    return way.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def speed(way: socket.socket) -> int:
    return SPEED.unpack(way.getsockopt(socket.IPPROTO_TCP, TCP_CC_INFO, SPEED.size))[0]
