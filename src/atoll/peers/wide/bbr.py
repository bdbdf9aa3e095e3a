"""BBR, where the system's connections are under it, kept from stopping in the middle of an exchange.

When the shortest round trip that it knows is ten seconds old, it sends next to nothing for 0.3 s to measure it anew,
and the members for whom a connection waits stop with it. Pacing keeps queues short, so there is nothing to learn.

After a silence the first answer tells the round trip, and BBR does not stop, unless that answers a single small packet:
it may have been held back. So more than one goes out first (`STIR`). From then on a connection is begun anew in time,
by taking it out of BBR and putting it back: it keeps its window, and pacing bounds its search. So it is when it was one
of several and has the link to itself now: BBR asks for a quarter more once in eight round trips.

A connection that comes to a link which others fill loses what it begins with, and takes what is left for the link's
speed. Whoever has more to send and hardly gets anything through is begun anew too; ever later, for the link may be as
slow as that.
"""

import socket
import time
from functools import cache
from pathlib import Path

SILENCE_S, STIR = 0.5, bytes(3000)
"""What goes along with the first words to an island after so many seconds, and is not heard."""
OLD_S, PAUSE_S = 8.0, 2.0
"""How old the shortest round trip may become; after how long without much to send nobody knows how old it is."""
RISEN, RISEN_S = 1.5, 0.3
"""Whoever may send so many times what it might, and has for so long, does not find out by itself before it is done."""
STARVED, STARVED_S = 0.1, 0.5
"""A connection starves that has more to send and sends no more than this part of what it may: for so long, and for
twice as long after each time."""


class Trips:
    """When the connections of this process were begun anew."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._starved: dict[tuple[int, int], tuple[float, float]] = {}

    def look(self, ends: tuple[int, int], way: socket.socket, *, may: float | None, starves: bool) -> None:
        """See how the connection between these ports does.

        Args: may: bytes per second that bound its search for more, if it sends much. starves: it has more to send, and
        sends hardly anything.
        """
        now = time.monotonic()
        if may:
            last, begun, least, since = self._told.get(ends, (0.0, 0.0, may, now))
            if may <= RISEN * least or now - last > RISEN_S:  # a silence is no time in which it could have found out
                least, since = min(may, least), now
            if now - last > PAUSE_S or now - begun > OLD_S or now - since > RISEN_S:
                begin_anew(way)
                begun, least, since = now, may, now
            self._told[ends] = now, begun, least, since
        if not starves:
            self._starved.pop(ends, None)
            return
        since, patience = self._starved.setdefault(ends, (now, STARVED_S))
        if now - since > patience:
            begin_anew(way)
            self._starved[ends] = now, 2 * patience

    def closed(self, ends: tuple[int, int]) -> None:
        """The connection between these ports is no more."""
        self._told.pop(ends, None)
        self._starved.pop(ends, None)


@cache
def may_come_back() -> bool:
    """Whether a connection that has left BBR is allowed to be under it again."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    return allowed.exists() and "bbr" in allowed.read_text().split()


def begin_anew(way: socket.socket) -> None:
    """Begin BBR anew, if that is what decides how fast a connection sends, and may again."""
    if may_come_back() and way.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr":
        for name in (b"reno", b"bbr"):
            way.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
