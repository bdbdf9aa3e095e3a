"""What is done to the sockets of a link from outside: how much they may hold, how fast they may send."""

import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from atoll.peers.wide.link import COORDINATOR, Priority, ZenohLink
from atoll.peers.wide.sockets import HELD, MOST_HELD, SO_MAX_PACING_RATE
from tests.peers.wide.links import Between, Ears, child


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
        assert HELD in _unsent_at_most(between.place)
        for _ in range(256):
            island.send(COORDINATOR, [frame], Priority.OVERLAPPED)
        until = time.monotonic() + 10.0
        while MOST_HELD not in _unsent_at_most(between.place) and time.monotonic() < until:
            time.sleep(0.1)
        assert MOST_HELD in _unsent_at_most(between.place), "within a machine pieces arrive at gigabytes per second"


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


def _connections(place: str) -> Generator[socket.socket]:
    """This process's connections to or at a place."""
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as way:
                    if int(place.rpartition(":")[2]) in (way.getsockname()[1], way.getpeername()[1]):
                        yield way
