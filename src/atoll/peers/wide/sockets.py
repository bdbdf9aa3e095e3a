"""What zenoh does not do with the sockets of its links, done to them from outside.

TCP takes megabytes that it cannot send yet: at 10 Mbit/s that is a second for which the next frame waits, however
urgent. They should wait in zenoh's queues, where an earlier priority passes. zenoh can set the size of a socket's
buffer, but that bounds what is on the way, too, and so the throughput of a long link. TCP_NOTSENT_LOWAT bounds only
what has not been sent. It must not be too little either: whenever a socket runs dry before zenoh gets to it, BBR takes
what it measures for the application's speed and stays in its first phase, in which it sends three times too fast and
loses what the link does not take. So each socket may hold what it sends in `HELD_S`.

Each connection may send its share of what all of this member's may send together (`pacing`). Then BBR need not stop to
measure, and is begun anew before it does; also where it has found too little (`bbr`).

While a frame waits for a member that does not read, zenoh can neither give that member up when its lease is over nor
close the session: all stands still until the frame is given up. It goes on once the connection is broken, so a
connection that takes in nothing breaks before the lease is over (TCP_USER_TIMEOUT).
"""

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Generator, Hashable
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import zenoh

from atoll.peers.wide.bbr import STARVED, Trips
from atoll.peers.wide.pacing import KNOWN, LOOK_S, MUCH, OVER, Pace, Sent
from atoll.peers.wide.sessions import follow

HELD_S = 0.1
"""For so long a frame may wait for those that the kernel has and has not sent."""
HELD, LEAST_HELD, MOST_HELD = 1 << 20, 128 << 10, 4 << 20
"""Bytes that a socket may hold before its speed is known, and at least and at most after that."""
PROBES_S = 0.4
"""What Linux takes beyond TCP_USER_TIMEOUT, because it begins to count at its first probe."""
SO_MAX_PACING_RATE = 47
"""Linux's, which Python does not name."""
TOLD = struct.Struct("=16x I 48x I 48x Q 16x I I 8x Q 24x I")
"""Where its tcp_info has tcpi_snd_mss, tcpi_rtt, tcpi_bytes_acked, tcpi_notsent_bytes, tcpi_min_rtt, tcpi_delivery_rate
and tcpi_delivered."""


Ends = tuple[int, int]
"""Ports of a connection, this side's first."""


class Tuning:
    """Two threads that tune each socket that the session has or will have, as far as the system can.

    Args: silence_s: how long the other side may take in nothing; 0.5 is the least. hearers: to how many members more
    than a few bytes have been on their way lately, and for how many more are waiting now.
    """

    def __init__(self, session: zenoh.Session, silence_s: float, hearers: Callable[[], tuple[int, int]]) -> None:
        self._hearers, self._over = hearers, threading.Event()
        self._timeout_ms = round(1000 * max(silence_s - PROBES_S, 0.1))
        self._known: dict[int, Ends] = {}
        self._pace, self._trips = Pace(), Trips()
        again = threading.Thread(target=self._follow_speed, name="atoll-tunes", daemon=True)
        again.start()
        self.threads = [follow(session.info.declare_link_events_listener(history=True), self._changed), again]

    def stop(self) -> None:
        """Before the session is closed."""
        self._over.set()

    def unsent(self) -> bool:
        """Whether the system holds anything for anyone that it has not sent yet; False if it does not say."""
        return any(told.unsent for _, _, told in self._look())

    def share(self) -> None:
        """Let each connection send its part of what all may: also when sending to a member begins."""
        if share := self._share():
            most = struct.pack("Q", round(share))
            for _, way, _ in self._look():
                way.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, most)

    def _share(self) -> float | None:
        """Bytes per second that a connection may send, if that is known."""
        return self._pace.most and self._pace.most / max(self._hearers()[0], 1)

    def _changed(self, event: zenoh.LinkEvent) -> None:
        if event.kind == zenoh.SampleKind.DELETE:
            gone = _ends(event.link)
            self._known = {descriptor: ends for descriptor, ends in self._known.items() if ends != gone}
            self._trips.closed(gone)
            return
        for descriptor, way in _sockets([event.link]):
            self._known = {**self._known, descriptor: _ends(event.link)}
            _set(way, "TCP_NOTSENT_LOWAT", HELD)
            _set(way, "TCP_USER_TIMEOUT", self._timeout_ms)

    def _look(self) -> Generator[tuple[Ends, socket.socket, "_Told"]]:
        """What the system tells of each connection."""
        for descriptor, ends in list(self._known.items()):
            with _socket(descriptor, [ends]) as way:
                if way and (told := _told(way)):
                    yield ends, way, told

    def _follow_speed(self) -> None:
        fastest: dict[Ends, int] = {}
        while not self._over.wait(LOOK_S):
            found: dict[Hashable, Sent] = {}
            for ends, way, told in self._look():
                with suppress(OSError):  # it has been broken meanwhile
                    if way.getsockname()[0] != way.getpeername()[0]:  # within a machine no link is shared
                        waits_s = (told.rtt - told.least_rtt) / 1e6
                        found[ends] = Sent(told.delivered * told.piece, waits_s, told.unsent > 0)
                if told.unsent:
                    fastest[ends] = max(told.speed, fastest.get(ends, 0))
                    if told.acked >= KNOWN:
                        held = min(max(round(HELD_S * fastest[ends]), LEAST_HELD), MOST_HELD)
                        _set(way, "TCP_NOTSENT_LOWAT", held)
            sending = self._pace.look(time.monotonic(), found, *self._hearers())
            self.share()
            share = self._share()
            hardly = STARVED * share if share else MUCH / (OVER * LOOK_S)
            for ends, way, told in self._look():
                with suppress(OSError):
                    if ends in found:
                        starves = told.unsent > 0 and told.speed < hardly
                        self._trips.look(ends, way, may=share if ends in sending else None, starves=starves)


class _Told(NamedTuple):
    """Of Linux's tcp_info.

    Args: piece: bytes of a packet. rtt, least_rtt: lately and ever, in microseconds. acked, unsent: bytes. speed: bytes
    per second that have arrived lately. delivered: packets that have arrived, in whatever order.
    """

    piece: int
    rtt: int
    acked: int
    unsent: int
    least_rtt: int
    speed: int
    delivered: int


def _told(way: socket.socket) -> _Told | None:
    """What the kernel says of a connection, if it is one that does."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    info = way.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TOLD.size)
    return _Told(*TOLD.unpack(info)) if len(info) == TOLD.size else None


def _set(way: socket.socket, name: str, value: int) -> None:
    if hasattr(socket, name):
        way.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cut(links: list[zenoh.Link]) -> None:
    """Break the connections of these links."""
    for _, way in _sockets(links):
        way.shutdown(socket.SHUT_RDWR)


def _sockets(links: list[zenoh.Link]) -> Generator[tuple[int, socket.socket]]:
    """This process's sockets between the ports of the links, with their descriptors."""
    ends = [_ends(link) for link in links]
    descriptors = list[int]()
    with suppress(OSError):  # none is left to look with: a link that cannot be tuned is one all the same
        descriptors += map(int, os.listdir("/dev/fd"))
    for descriptor in descriptors:
        with suppress(OSError), _socket(descriptor, ends) as way:  # one that was closed meanwhile
            if way:
                yield descriptor, way


@contextmanager
def _socket(descriptor: int, ends: Collection[Ends]) -> Generator[socket.socket | None]:
    """The socket that has the descriptor, if it is connected between one of these pairs of ports: the number may have
    become another file's."""
    with ExitStack() as stack:
        way = None
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(descriptor).st_mode):
                found = stack.enter_context(socket.socket(fileno=os.dup(descriptor)))
                here, there = found.getsockname(), found.getpeername()
                if isinstance(here, tuple) and (here[1], there[1]) in ends:
                    way = found
        yield way


def _ends(link: zenoh.Link) -> Ends:
    return _port(link.src), _port(link.dst)


def _port(endpoint: str) -> int:
    """Of "tls/host:port", with or without options behind."""
    return int(endpoint.partition("?")[0].partition("#")[0].rpartition(":")[2])
