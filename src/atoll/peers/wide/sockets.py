"""What zenoh does not do with the sockets of its links, done to them from outside.

TCP takes megabytes that it cannot send yet: at 10 Mbit/s that is a second for which the next frame waits, however
urgent. They should wait in zenoh's queues, where an earlier priority passes. zenoh can set the size of a socket's
buffer, but that bounds what is on the way, too, and so the throughput of a long link. TCP_NOTSENT_LOWAT bounds only
what has not been sent. It must not be too little either: whenever a socket runs dry before zenoh gets to it, BBR takes
what it measures for the application's speed and stays in its first phase, in which it sends three times too fast and
loses what the link does not take. So each socket may hold what it sends in `HELD_S`.

While a frame waits for a member that does not read, zenoh can neither give that member up when its lease is over nor
close the session: all stands still until the frame is given up. It goes on once the connection is broken, so a
connection that takes in nothing breaks before the lease is over (TCP_USER_TIMEOUT).
"""

import os
import socket
import stat
import struct
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import NamedTuple

import zenoh

from atoll.peers.wide.sessions import follow

HELD_S = 0.1
"""For so long a frame may wait for those that the kernel has and has not sent."""
AGAIN_S = 1.0
"""Seconds between two looks at how fast sockets send."""
FIRST, LEAST, MOST = 1 << 20, 128 << 10, 4 << 20
"""Bytes that a socket may hold before its speed is known, and at least and at most after that."""
KNOWN = 4 << 20
"""Bytes that a connection has sent when its speed is taken to be known: TCP begins slowly."""
PROBES_S = 0.4
"""What Linux takes beyond TCP_USER_TIMEOUT, because it begins to count at its first probe."""
TOLD = struct.Struct("=120x Q 16x I 12x Q")
"""Where Linux's tcp_info has tcpi_bytes_acked, tcpi_notsent_bytes and tcpi_delivery_rate."""


class Tuning:
    """Two threads that tune each socket that the session has or will have, as far as the system can.

    Args: silence_s: how long the other side may take in nothing; 0.5 is the least.
    """

    def __init__(self, session: zenoh.Session, silence_s: float) -> None:
        self._session, self._over = session, threading.Event()
        self._timeout_ms = round(1000 * max(silence_s - PROBES_S, 0.1))
        again = threading.Thread(target=self._follow_speed, name="atoll-tunes", daemon=True)
        again.start()
        self.threads = [follow(session.info.declare_link_events_listener(history=True), self._changed), again]

    def stop(self) -> None:
        """Before the session is closed."""
        self._over.set()

    def _changed(self, event: zenoh.LinkEvent) -> None:
        for way in _sockets([event.link] if event.kind == zenoh.SampleKind.PUT else []):
            _set(way, "TCP_NOTSENT_LOWAT", FIRST)
            _set(way, "TCP_USER_TIMEOUT", self._timeout_ms)

    def _follow_speed(self) -> None:
        fastest: dict[tuple[object, object], int] = {}
        with suppress(zenoh.ZError):
            while hasattr(socket, "TCP_INFO") and not self._over.wait(AGAIN_S):
                for way in _sockets(self._session.info.links()):
                    told, ends = _told(way), (way.getsockname(), way.getpeername())
                    if told and told.unsent:
                        fastest[ends] = max(told.speed, fastest.get(ends, 0))
                        if told.acked >= KNOWN:
                            _set(way, "TCP_NOTSENT_LOWAT", min(max(round(HELD_S * fastest[ends]), LEAST), MOST))


class _Told(NamedTuple):
    """Of Linux's tcp_info. Args: acked, unsent: bytes. speed: bytes per second that have arrived lately."""

    acked: int
    unsent: int
    speed: int


def _told(way: socket.socket) -> _Told | None:
    """What the kernel says of a connection, if it is new enough to."""
    info = way.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TOLD.size)
    return _Told(*TOLD.unpack(info)) if len(info) == TOLD.size else None


def _set(way: socket.socket, name: str, value: int) -> None:
    if hasattr(socket, name):
        way.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cut(links: list[zenoh.Link]) -> None:
    """Break the connections of these links."""
    for way in _sockets(links):
        way.shutdown(socket.SHUT_RDWR)


def _sockets(links: list[zenoh.Link]) -> Generator[socket.socket]:
    """This process's sockets between the ports of the links."""
    ends = [(_port(link.src), _port(link.dst)) for link in links]
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, or a socket that is not connected
            if stat.S_ISSOCK(os.stat(int(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as way:
                    here, there = way.getsockname(), way.getpeername()
                    if isinstance(here, tuple) and (here[1], there[1]) in ends:
                        yield way


def _port(endpoint: str) -> int:
    """Of "tls/host:port", with or without options behind."""
    return int(endpoint.partition("?")[0].partition("#")[0].rpartition(":")[2])
