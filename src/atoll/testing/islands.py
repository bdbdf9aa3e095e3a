"""Islands and a coordinator in one process, on a network of threads that can be cut: for tests of the wide runtime."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.link import Heard, Part, Priority, Seen
from atoll.peers.wide.messages import COORDINATOR
from atoll.peers.wide.server import Server


@dataclass
class Sea:
    """What is between the islands: frames arrive at once, unless `passes(sender, hearer, frame)` says otherwise."""

    passes: Callable[[int, int, bytes], bool] = lambda sender, hearer, frame: True
    _ports: "dict[int, Loopback]" = field(default_factory=dict[int, "Loopback"])
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def enter(self, port: "Loopback") -> None:
        """Someone is there."""
        with self._lock:
            others = [other for other in self._ports.values() if other.me != port.me]
            self._ports[port.me] = port
        for other in others:
            other.seen(port.me, True)
            port.seen(other.me, True)

    def sink(self, me: int, port: "Loopback | None" = None) -> None:
        """Someone is gone, as if killed."""
        with self._lock:
            if port is not None and self._ports.get(me) is not port:
                return
            gone, others = self._ports.pop(me, None), list(self._ports.values())
        for other in others if gone else ():
            other.seen(me, False)

    def carry(self, sender: "Loopback", to: int, frame: bytes) -> None:
        """Bring a frame to its hearer, if both are there."""
        with self._lock:
            hearer = self._ports.get(to) if self._ports.get(sender.me) is sender else None
        if hearer and self.passes(sender.me, to, frame):
            hearer.heard(sender.me, frame)


class Loopback:
    """One end of a `Sea`."""

    def __init__(self, sea: Sea, me: int) -> None:
        self.me, self.sent, self._sea = me, 0, sea
        self.heard: Heard = lambda sender, frame: None
        self.seen: Seen = lambda address, alive: None

    def send(self, to: int, parts: Sequence[Part], priority: Priority) -> None:
        """At once."""
        frame = b"".join(parts)
        self.sent += len(frame)
        self._sea.carry(self, to, frame)

    def start(self, heard: Heard, seen: Seen) -> None:
        """Be there."""
        self.heard, self.seen = heard, seen
        self._sea.enter(self)

    def close(self) -> None:
        """Be gone."""
        self._sea.sink(self.me, self)


@contextmanager
def islands(
    count: int, folder: Path, sea: Sea | None = None, *, lease: float = 10.0
) -> Generator[tuple[Sequence[WideGroup], Server]]:
    """`count` groups of a run, and its coordinator, whose ledger is in `folder`."""
    sea, said = sea or Sea(), list[str]()
    server = serve(sea, folder, count, said.append, lease=lease)
    groups = [WideGroup(Loopback(sea, worker), "run", "1", patience=lease) for worker in range(count)]
    try:
        yield groups, server
    finally:
        for group in groups:
            group.close()
        server.close()


def serve(sea: Sea, folder: Path, count: int, say: Callable[[str], None], *, lease: float = 10.0) -> Server:
    """A coordinator of a run of `count` islands."""
    ledger = Ledger(folder / "ledger.sqlite")
    return Server(Loopback(sea, COORDINATOR), ledger, "run", "1", say, count, lease)
