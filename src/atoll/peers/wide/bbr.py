"""BBR, where the system's connections are under it, kept from stopping in the middle of an exchange.

When the shortest round trip that it knows is ten seconds old, it sends next to nothing for 0.3 s to measure it anew,
and the members for whom a connection waits stop with it. Pacing keeps queues short, so there is nothing to learn.

After a silence the first answer tells the round trip, and BBR does not stop, unless that answers a single small packet:
it may have been held back. So more than one goes out first (`STIR`). From then on a connection is begun anew in time,
by taking it out of BBR and putting it back: it keeps its window, and pacing bounds its search.
"""

import socket
import time
from pathlib import Path

SILENCE_S, STIR = 0.5, bytes(3000)
"""What goes along with the first words to an island after so many seconds, and is not heard."""
OLD_S, PAUSE_S = 8.0, 2.0
"""How old the shortest round trip may become; after how long without much to send nobody knows how old it is."""


class Trips:
    """When the connections of this process were begun anew."""

    def __init__(self) -> None:
        self._possible = may_come_back()
        self._told: dict[tuple[int, int], tuple[float, float]] = {}

    def sends(self, ends: tuple[int, int], way: socket.socket) -> None:
        """The connection between these ports has sent much: it is begun anew if its round trip is old."""
        now = time.monotonic()
        last, begun = self._told.get(ends, (0.0, 0.0))
        if self._possible and (now - last > PAUSE_S or now - begun > OLD_S):
            begin_anew(way)
            begun = now
        self._told[ends] = now, begun

    def closed(self, ends: tuple[int, int]) -> None:
        """The connection between these ports is no more."""
        self._told.pop(ends, None)


def may_come_back() -> bool:
    """Whether a connection that has left BBR is allowed to be under it again."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    return allowed.exists() and "bbr" in allowed.read_text().split()


def begin_anew(way: socket.socket) -> None:
    """Begin BBR anew, if that is what decides how fast a connection sends."""
    if way.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr":
        for name in (b"reno", b"bbr"):
            way.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
