"""Plain TCP: the bytes of an exchange in its pattern, and nothing else. What an engine could reach."""

import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor

from bench.engines import PORT, TIMEOUT_S, Exchange, Seat, address

AT_ONCE = 1 << 20
"""Bytes received by one call at most."""


@contextmanager
def connect(seat: Seat) -> Generator[Callable[[Tensor], Exchange]]:
    """One connection with each other member, used in both directions at the same time by a thread for each."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address(seat.rank), PORT), backlog=len(seat.members)))
        peers: list[socket.socket] = []
        for other in seat.others:
            peers.append(stack.enter_context(server.accept()[0] if other < seat.rank else _called(other)))
        threads = stack.enter_context(ThreadPoolExecutor(2 * len(peers)))
        share = bytes(2 * 4 * seat.elements // len(seat.members))
        yield lambda _: partial(_exchange, threads, peers, share)


def _called(other: int) -> socket.socket:
    """A connection with a peer that may not listen yet."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address(other), PORT))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _exchange(threads: ThreadPoolExecutor, peers: Sequence[socket.socket], share: bytes) -> None:
    """Send the share to each peer, and receive as much from each, all at once."""
    sending = [threads.submit(peer.sendall, share) for peer in peers]
    hearing = [threads.submit(_hear, peer, len(share)) for peer in peers]
    for each in (*sending, *hearing):
        each.result()


def _hear(peer: socket.socket, count: int) -> None:
    room = memoryview(bytearray(AT_ONCE))
    while count:
        heard = peer.recv_into(room[:count], flags=socket.MSG_WAITALL)
        if not heard:
            raise ConnectionError("a peer has gone")
        count -= heard
