"""What zenoh does not do with the sockets of its links, done to them from outside.

TCP takes megabytes that it cannot send yet: at 10 Mbit/s that is a second for which the next frame waits, however
urgent. They should wait in zenoh's queues, where an earlier priority passes. zenoh can set the size of a socket's
buffer, but that bounds what is on the way, too, and so the throughput of a long link. TCP_NOTSENT_LOWAT bounds only
what has not been sent.

While a frame waits for a member that does not read, zenoh can neither give that member up when its lease is over nor
close the session: all stands still until the frame is given up. It goes on once the connection is broken, so a
connection that takes in nothing breaks before the lease is over (TCP_USER_TIMEOUT).
"""

import os
import socket
import stat
import threading
from collections.abc import Generator
from contextlib import suppress

import zenoh

from atoll.peers.wide.sessions import follow

UNSENT = 128 << 10
"""Bytes in the kernel that have not been sent."""
PROBES_S = 0.4
"""What Linux takes beyond TCP_USER_TIMEOUT, because it begins to count at its first probe."""


def tune(session: zenoh.Session, silence_s: float) -> threading.Thread:
    """A thread that does so for each link that the session has or will have, as far as the system can.

    Args: silence_s: how long the other side may take in nothing; 0.5 is the least.
    """
    options = {"TCP_NOTSENT_LOWAT": UNSENT, "TCP_USER_TIMEOUT": round(1000 * max(silence_s - PROBES_S, 0.1))}

    def changed(event: zenoh.LinkEvent) -> None:
        for way in _sockets([event.link] if event.kind == zenoh.SampleKind.PUT else []):
            for name, value in options.items():
                if hasattr(socket, name):
                    way.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    return follow(session.info.declare_link_events_listener(history=True), changed)


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
