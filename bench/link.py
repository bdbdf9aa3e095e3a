"""An emulated wide-area network on one Linux machine: every process that joins it is a host with an access link.

    host --up--> queue, bits per second --latency--> queue, bits per second --down--> host

A process that joins moves into a network namespace of its own, in which there is one interface besides the loopback: a
TUN device, whose packets a thread of the process that holds the network passes on when their time has come. A packet
that would wait longer than `QUEUE_S` for its turn on a link is dropped, as a router does. Congestion is the business of
the machine's own TCP. Namespaces and devices have no names: they end with the processes and descriptors that hold them,
however those end.
"""

import ctypes
import fcntl
import heapq
import itertools
import math
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

DEVICE = "wide0"
MTU = 1500
FRAMING = 24
"""Bytes that Ethernet takes beside what a TUN device shows: header, check sum, and most of preamble and gap."""
QUEUE_S = 0.1
BURST = 64
"""Packets read from one host before the next has its turn."""

# From linux/sched.h, linux/if_tun.h, linux/if.h and linux/sockios.h.
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI, IFF_UP = 0x400454CA, 0x0001, 0x1000, 0x1
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922


@dataclass(frozen=True)
class Access:
    """The link of each host.

    Args: bandwidth: bits per second in each direction. latency: seconds from one host to another, one way.
    """

    bandwidth: float = math.inf
    latency: float = 0.0


def missing() -> str | None:
    """Why no network can be emulated here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    try:
        # A namespace belongs to a thread: this one ends, and its namespace with it.
        with ThreadPoolExecutor(1) as pool:
            os.close(pool.submit(_move, 0).result())
    except OSError as error:
        return f"it takes root, network namespaces and /dev/net/tun ({error})"
    return None


@contextmanager
def network(hosts: int, access: Access) -> Generator[str]:
    """A network that waits for so many hosts; yields the door by which they `join`."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        path = str(Path(folder) / "door")
        door.bind(path)
        door.listen(hosts)
        stop, stopped = socket.socketpair()
        with stop, stopped:
            thread = threading.Thread(target=_carry, args=(door, stopped, hosts, access))
            thread.start()
            try:
                yield path
            finally:
                stop.close()
                thread.join()


def join(door: str, host: int) -> None:
    """Make the calling process host number `host`, at 10.0.0.(host + 1); threads that it has already stay outside."""
    tun = _move(host)
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(door)
        socket.send_fds(way, [bytes([host])], [tun])
        way.recv(1)
    os.close(tun)


def _move(host: int) -> int:
    """Put the calling thread into a namespace with a device; returns the device's other end."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, _request(DEVICE, struct.pack("H", IFF_TUN | IFF_NO_PI)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFADDR, _request(DEVICE, _address(10, 0, 0, host + 1)))
        fcntl.ioctl(control, SIOCSIFNETMASK, _request(DEVICE, _address(255, 255, 255, 0)))
        fcntl.ioctl(control, SIOCSIFMTU, _request(DEVICE, struct.pack("i", MTU)))
        for name in ("lo", DEVICE):
            fcntl.ioctl(control, SIOCSIFFLAGS, _request(name, struct.pack("H", IFF_UP)))
    return tun


def _request(name: str, value: bytes) -> bytes:
    """struct ifreq."""
    return struct.pack("16s24s", name.encode(), value)


def _address(*parts: int) -> bytes:
    """struct sockaddr_in."""
    return struct.pack("HH4s", socket.AF_INET, 0, bytes(parts))


def _carry(door: socket.socket, stopped: socket.socket, hosts: int, access: Access) -> None:
    """The thread: let all hosts in, then pass on packets until told to stop."""
    devices: dict[int, int] = {}
    try:
        while len(devices) < hosts:
            if stopped in select.select([door, stopped], [], [])[0]:
                return
            way, _ = door.accept()
            with way:
                host, (device,), _, _ = socket.recv_fds(way, 1, 1)
                devices[host[0]] = device
                way.send(b"!")
        _Router([devices[host] for host in range(hosts)], access).run(stopped)
    finally:
        for device in devices.values():
            os.close(device)


@dataclass
class _Line:
    """One direction of an access link: when it has sent all that it was given."""

    per_byte: float
    free: float = 0.0

    def sent(self, now: float, packet: bytes) -> float | None:
        """When a packet that comes now will have been sent; None if the queue is full."""
        begins = max(now, self.free)
        if begins - now > QUEUE_S:
            return None
        self.free = begins + (len(packet) + FRAMING) * self.per_byte
        return self.free


@dataclass
class _Router:
    """All links. Times are those at which packets are due, not those at which the thread got to them."""

    devices: list[int]
    access: Access
    _moving: list[tuple[float, int, bool, int, bytes]] = field(default_factory=list)
    """heap of (when, order, whether it goes out then, to whom, packet)"""
    _order: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._up, self._down = ([_Line(8 / self.access.bandwidth) for _ in self.devices] for _ in range(2))

    def run(self, stopped: socket.socket) -> None:
        while True:
            wait = max(0.0, self._moving[0][0] - time.monotonic()) if self._moving else None
            ready, _, _ = select.select([*self.devices, stopped], [], [], wait)
            if stopped in ready:
                return
            for teller, device in enumerate(self.devices):
                with suppress(BlockingIOError):
                    for _ in range(BURST if device in ready else 0):
                        self._comes_in(teller, os.read(device, 1 << 16))
            now = time.monotonic()
            while self._moving and self._moving[0][0] <= now:
                self._moves_on(*heapq.heappop(self._moving))

    def _comes_in(self, teller: int, packet: bytes) -> None:
        hearer = packet[19] - 1  # IPv4's destination ends there
        if packet[0] >> 4 != 4 or not 0 <= hearer < len(self.devices):
            return  # what the kernel announces over IPv6
        sent = self._up[teller].sent(time.monotonic(), packet)
        if sent is not None:
            heapq.heappush(self._moving, (sent + self.access.latency, next(self._order), False, hearer, packet))

    def _moves_on(self, when: float, order: int, out: bool, hearer: int, packet: bytes) -> None:
        if out:
            with suppress(OSError):  # the host has gone
                os.write(self.devices[hearer], packet)
            return
        sent = self._down[hearer].sent(when, packet)
        if sent is not None:
            heapq.heappush(self._moving, (sent, order, True, hearer, packet))
