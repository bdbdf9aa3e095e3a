"""An emulated wide-area network on one Linux machine: every process that joins it is a host with an access link.

    host --up--> queue, bits per second --latency--> queue, bits per second --down--> host

A process that joins moves into a network namespace of its own, in which there is one interface besides the loopback: a
TUN device, whose packets a thread of the process that holds the network passes on when their time has come. That
thread runs `switch.c`, compiled when it is first needed: Python is too slow for a few hundred Mbit/s in all. A packet
that would wait longer than `QUEUE_S` for its turn on a link is dropped, as a router does. Congestion is the business of
the machine's own TCP. Namespaces, devices and the door have no names in the file system: they end with the processes
and descriptors that hold them, however those end.
"""

import ctypes
import fcntl
import functools
import math
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DEVICE = "wide0"
MTU = 1500
FRAMING = 24
"""Bytes that Ethernet takes beside what a TUN device shows: header, check sum, and most of preamble and gap."""
QUEUE_S = 0.1
WAITING = 10_000
"""Packets that a device holds until the switch comes for them, so that it drops none that its link would take."""

# From linux/sched.h, linux/if_tun.h, linux/if.h and linux/sockios.h.
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI, IFF_VNET_HDR, IFF_UP = 0x400454CA, 0x0001, 0x1000, 0x4000, 0x1
TUNSETOFFLOAD, TUN_F_CSUM, TUN_F_TSO4 = 0x400454D0, 0x1, 0x2
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943


@dataclass(frozen=True)
class Access:
    """The link of each host.

    Args: bandwidth: bits per second in each direction. latency: seconds from one host to another, one way.
    """

    bandwidth: float = math.inf
    latency: float = 0.0


@dataclass
class Traffic:
    """What a network has done, in packets: `late` ones were delivered over a millisecond after they were due.

    Many late ones mean that this machine is too slow for the network.
    """

    delivered: int = 0
    dropped: int = 0
    late: int = 0


class _Access(ctypes.Structure):
    """`struct access` of switch.c."""

    _fields_ = (
        ("ns_per_byte", ctypes.c_double),
        ("latency_ns", ctypes.c_int64),
        ("queue_ns", ctypes.c_int64),
        ("framing", ctypes.c_int64),
    )


class _Traffic(ctypes.Structure):
    """`struct traffic` of switch.c."""

    _fields_ = (("delivered", ctypes.c_int64), ("dropped", ctypes.c_int64), ("late", ctypes.c_int64))


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
    try:
        _switch()
    except FileNotFoundError:
        return "it takes a C compiler called cc"
    except subprocess.CalledProcessError as error:
        return f"cc does not compile bench/switch.c: {error.stderr.strip()}"
    return None


@functools.cache
def _switch() -> ctypes.CDLL:
    """switch.c, as a library of this process; its file is gone once it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "switch.so")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, str(Path(__file__).with_name("switch.c"))]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ctypes.CDLL(library)


@contextmanager
def network(hosts: int, access: Access, traffic: Traffic | None = None) -> Generator[str]:
    """A network that waits for so many hosts; yields the door by which they `join`, and counts `traffic` at its end."""
    switch = _switch()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("")  # the kernel finds a name that is in no file system
        door.listen(hosts)
        stop, stopped = socket.socketpair()
        with stop, stopped:
            arguments = (switch, door, stopped, hosts, access, traffic or Traffic())
            thread = threading.Thread(target=_carry, args=arguments)
            thread.start()
            try:
                yield door.getsockname()[1:].decode()
            finally:
                stop.close()
                thread.join()


def join(door: str, host: int) -> None:
    """Make the calling process host number `host`, at 10.0.0.(host + 1); threads that it has already stay outside."""
    with socket.socket(socket.AF_UNIX) as way:
        way.connect("\0" + door)  # which is known in the namespace that the process leaves
        tun = _move(host)
        socket.send_fds(way, [bytes([host])], [tun])
        way.recv(1)
    os.close(tun)


def _move(host: int) -> int:
    """Put the calling thread into a namespace with a device; returns the device's other end."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, _request(DEVICE, struct.pack("H", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFADDR, _request(DEVICE, _address(10, 0, 0, host + 1)))
        fcntl.ioctl(control, SIOCSIFNETMASK, _request(DEVICE, _address(255, 255, 255, 0)))
        fcntl.ioctl(control, SIOCSIFMTU, _request(DEVICE, struct.pack("i", MTU)))
        fcntl.ioctl(control, SIOCSIFTXQLEN, _request(DEVICE, struct.pack("i", WAITING)))
        for name in ("lo", DEVICE):
            fcntl.ioctl(control, SIOCSIFFLAGS, _request(name, struct.pack("H", IFF_UP)))
    return tun


def _request(name: str, value: bytes) -> bytes:
    """struct ifreq."""
    return struct.pack("16s24s", name.encode(), value)


def _address(*parts: int) -> bytes:
    """struct sockaddr_in."""
    return struct.pack("HH4s", socket.AF_INET, 0, bytes(parts))


def _carry(
    switch: ctypes.CDLL, door: socket.socket, stopped: socket.socket, hosts: int, access: Access, traffic: Traffic
) -> None:
    """The thread: let all hosts in, then pass on packets until told to stop."""
    devices: dict[int, int] = {}
    try:
        while len(devices) < hosts:
            if stopped in select.select([door, stopped], [], [])[0]:
                return
            way, _ = door.accept()
            with way:
                host, given, _, _ = socket.recv_fds(way, 1, 1)
                if given:  # else it ended before it was in
                    devices[host[0]] = given[0]
                    way.send(b"!")
        # On a busy machine packets would be late while the hosts compute.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        ordered = (ctypes.c_int * hosts)(*(devices[host] for host in range(hosts)))
        terms = _Access(8e9 / access.bandwidth, int(access.latency * 1e9), int(QUEUE_S * 1e9), FRAMING)
        counted = _Traffic()
        error = switch.carry(hosts, ordered, stopped.fileno(), ctypes.byref(terms), ctypes.byref(counted))
        if error:
            raise OSError(error, os.strerror(error))
        traffic.delivered, traffic.dropped, traffic.late = counted.delivered, counted.dropped, counted.late
    finally:
        for device in devices.values():
            os.close(device)
