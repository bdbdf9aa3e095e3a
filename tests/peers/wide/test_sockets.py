"""What is done to the sockets of a link from outside: how much they may hold, how fast they may send, BBR."""

import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from atoll.peers.wide import sockets
from atoll.peers.wide.link import COORDINATOR, Priority, ZenohLink
from atoll.peers.wide.sockets import AGAIN_S, FIRST, MOST, SO_MAX_PACING_RATE
from tests.peers.wide.links import Between, Ears, child

TCP_CC_INFO = 26
"""Linux's, which Python does not name."""
BBR = struct.Struct("=12x I 4x")
"""Where its tcp_bbr_info has bbr_pacing_gain, in parts of 256."""
FIRST_GAIN = 739
"""2 / ln 2, with which BBR searches for the speed of a link."""


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells how fast a connection sends")
def test_a_socket_may_hold_more_once_its_connection_has_shown_to_be_fast(folder: Path, place: str) -> None:
    """Through one who reads slowly, so that there is always something that has not been sent."""
    between = Between(place)
    with (
        closing(ZenohLink("r1", COORDINATOR, folder / str(COORDINATOR), listen=[place])) as coordinator,
        closing(ZenohLink("r1", 0, folder / "0", connect=[between.place])) as island,
    ):
        coordinator.start(lambda sender, frame: None, lambda address, alive: None)
        ears, frame = Ears(island), bytes(1 << 20)
        ears.until(lambda: ears.alive() == {COORDINATOR})
        assert FIRST in _unsent_at_most(between.place)
        for _ in range(256):
            island.send(COORDINATOR, [frame], Priority.OVERLAPPED)
        until = time.monotonic() + 10.0
        while MOST not in _unsent_at_most(between.place) and time.monotonic() < until:
            time.sleep(0.1)
        assert MOST in _unsent_at_most(between.place), "within a machine pieces arrive at gigabytes per second"


@pytest.mark.skipif(not sockets.may_renew(), reason="BBR is not here, or may not be chosen")
def test_bbr_is_begun_anew_before_it_stops_to_measure_the_round_trip(
    monkeypatch: pytest.MonkeyPatch, folder: Path, place: str
) -> None:
    monkeypatch.setattr(sockets, "RENEWED_S", 1e9)
    between = Between(place)
    with (
        closing(ZenohLink("r1", COORDINATOR, folder / str(COORDINATOR), listen=[place])) as coordinator,
        closing(ZenohLink("r1", 0, folder / "0", connect=[between.place])) as island,
    ):
        coordinator.start(lambda sender, frame: None, lambda address, alive: None)
        ears = Ears(island)
        ears.until(lambda: ears.alive() == {COORDINATOR})
        _use(between.place, b"bbr")
        for _ in range(64):
            island.send(COORDINATOR, [bytes(1 << 20)], Priority.OVERLAPPED)
        _wait(lambda: _searches(between.place) == [False])
        island._tuning._pace.most = 1e9
        time.sleep(2 * AGAIN_S)
        assert _searches(between.place) == [False]
        monkeypatch.setattr(sockets, "RENEWED_S", 0.0)
        _wait(lambda: _searches(between.place) == [True])
        _use(between.place, b"reno")
        time.sleep(2 * AGAIN_S)
        assert _searches(between.place) == [], "and nobody's choice is changed"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells how fast a connection sends")
def test_connections_that_begin_together_share_what_all_have_been_seen_to_send(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    with child(folder, 0, place) as one, child(folder, 1, place) as other:
        ears.until(lambda: ears.alive() == {0, 1})
        assert set(_at_most(place, socket.SOL_SOCKET, SO_MAX_PACING_RATE)) == {-1}, "as fast as they like"
        link._tuning._pace.most = 8e6
        for island, to in ((one, 0), (other, 1)):
            island.send_signal(signal.SIGSTOP)
            for _ in range(32):
                link.send(to, [bytes(1 << 20)], Priority.OVERLAPPED)
        assert set(_at_most(place, socket.SOL_SOCKET, SO_MAX_PACING_RATE)) == {4_000_000}, "a half"
        for island in (one, other):
            island.send_signal(signal.SIGCONT)


def _unsent_at_most(place: str) -> list[int]:
    """What this process's connections to a place may hold each."""
    return _at_most(place, socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def _at_most(place: str, level: int, option: int) -> list[int]:
    """An option of this process's connections to or at a place."""
    return [way.getsockopt(level, option) for way in _connections(place)]


def _use(place: str, control: bytes) -> None:
    """Have this congestion control decide how fast is sent to a place."""
    for way in _ways_to(place):
        way.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)


def _searches(place: str) -> list[bool]:
    """Of each connection to a place that BBR decides about, whether it is in its first phase."""
    told = [
        way.getsockopt(socket.IPPROTO_TCP, TCP_CC_INFO, BBR.size)
        for way in _ways_to(place)
        if way.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
    ]
    return [BBR.unpack(one)[0] == FIRST_GAIN for one in told]


def _ways_to(place: str) -> Generator[socket.socket]:
    return (way for way in _connections(place) if way.getpeername()[1] == int(place.rpartition(":")[2]))


def _connections(place: str) -> Generator[socket.socket]:
    """This process's connections to or at a place."""
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as way:
                    if int(place.rpartition(":")[2]) in (way.getsockname()[1], way.getpeername()[1]):
                        yield way


def _wait(held: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not held() and time.monotonic() < until:
        time.sleep(0.02)
    assert held()
