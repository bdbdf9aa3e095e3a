"""Links over zenoh for tests: members of a run, and what they hear and see."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from atoll.peers.wide.credentials import Authority, worker_name
from atoll.peers.wide.link import COORDINATOR, Link, ZenohLink

LEASE_S = 1.0
MEMBERS = (COORDINATOR, 0, 1, 2)

# A member in a process of its own, to be killed or stopped; it says what it hears and answers short frames.
CHILD = """
import sys, threading
from pathlib import Path
from atoll.peers.wide.link import Priority, ZenohLink

me, folder, listen, connect, lease, then = sys.argv[1:]
link = ZenohLink("r1", int(me), Path(folder), listen=listen.split(), connect=connect.split(), lease_s=float(lease))

def heard(sender, frame):
    if frame == b"all?":
        link.send(sender, [b" ".join(lengths)], Priority.CONTROL)
    elif len(frame) < 100:
        link.send(sender, [b"echo " + frame], Priority.CONTROL)
    lengths.append(str(len(frame)).encode())

lengths = []
link.start(heard, lambda address, alive: print(address, alive, flush=True))
print("started", flush=True)
if then == "full":
    for _ in range(64):
        link.send(0, [bytes(1 << 20)], Priority.BLOCKING)
if then == "wait":
    threading.Event().wait()
sys.stdin.readline()
"""


class Ears:
    """What a link heard and saw."""

    def __init__(self, link: Link) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.seen: list[tuple[int, bool]] = []
        self._changed = threading.Condition()
        link.start(
            lambda *frame: self._note(lambda: self.frames.append(frame)),
            lambda *change: self._note(lambda: self.seen.append(change)),
        )

    def alive(self) -> set[int]:
        return {address for address, alive in dict(self.seen).items() if alive}

    def until(self, fact: Callable[[], object], seconds: float = 10.0) -> float:
        """Wait for it; returns how long it took."""
        began = time.monotonic()
        with self._changed:
            assert self._changed.wait_for(fact, seconds), (self.seen, [(who, frame[:40]) for who, frame in self.frames])
        return time.monotonic() - began

    def _note(self, note: Callable[[], None]) -> None:
        with self._changed:
            note()
            self._changed.notify_all()


class Between:
    """A stranger between two members: passes their bytes on, until it ends one direction and swallows the other.

    Args: place: of the member behind it. place, of the stranger, is where others connect to that one.
    """

    def __init__(self, place: str) -> None:
        self._server, self._behind = socket.create_server(("127.0.0.1", 0)), place
        self.place = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._ways: list[socket.socket] = []
        self._swallows = threading.Event()
        threading.Thread(target=self._meet, daemon=True).start()

    def end(self) -> None:
        """As if the member behind had ended, while what is sent to it still leaves."""
        self._server.close()
        self._swallows.set()
        for way in self._ways:
            way.shutdown(socket.SHUT_WR)

    def _meet(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                host, _, port = self._behind.rpartition(":")
                far = socket.create_connection((host, int(port)))
                self._ways.append(near)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while heard := one.recv(1 << 16):
                time.sleep(0.002)
                if not self._swallows.is_set():
                    other.sendall(heard)


def equip(authority: Authority, folder: Path) -> Path:
    for member in MEMBERS:
        authority.equip(folder / str(member), worker_name(member) if member >= 0 else "coordinator", time.time())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    return equip(Authority.open(home / "authority", "r1", time.time()), home)


@pytest.fixture
def place() -> str:
    return free_place()


def free_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def open_link(folder: Path, place: str) -> Iterator[Callable[..., ZenohLink]]:
    """Opens a coordinator at `place`, or an island that knows only that one; closes them all."""
    links: list[ZenohLink] = []

    def opens(me: int, *listen: str) -> ZenohLink:
        at, to = ([place], []) if me == COORDINATOR else (listen, [place])
        links.append(ZenohLink("r1", me, folder / str(me), listen=at, connect=to, lease_s=LEASE_S))
        return links[-1]

    yield opens
    for link in links:
        link.close()


@contextmanager
def child(folder: Path, me: int, place: str, then: str = "") -> Generator["subprocess.Popen[str]"]:
    arguments = [str(me), str(folder / str(me)), free_place(), place, str(LEASE_S), then]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
