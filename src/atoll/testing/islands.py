"""Islands and a coordinator in one process, on a network of threads that can be cut: for tests of the wide runtime."""

import heapq
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.lanes import Part, Wanted, always
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.link import Heard, Priority, Seen
from atoll.peers.wide.messages import COORDINATOR
from atoll.peers.wide.server import Server


@dataclass(order=True)
class _Frame:
    """On its way, until `due`."""

    due: float
    number: int
    sender: "Loopback" = field(compare=False)
    hearer: "Loopback" = field(compare=False)
    frame: bytes = field(compare=False)


@dataclass
class Sea:
    """What is between the islands. Frames of one priority stay in order between two ends, as on a link.

    Args: passes: whether a frame (sender, hearer, bytes) arrives. delay: seconds that it takes (sender, hearer); where
    there is none it is heard at once, in the sender's thread.
    """

    passes: Callable[[int, int, bytes], bool] = lambda sender, hearer, frame: True
    delay: Callable[[int, int], float] | None = None
    _ports: "dict[int, Loopback]" = field(default_factory=dict[int, "Loopback"])
    still: dict[int, list[_Frame]] = field(default_factory=dict[int, list[_Frame]])
    _apart: set[frozenset[int]] = field(default_factory=set[frozenset[int]])
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _due: dict[tuple[int, int, Priority], float] = field(default_factory=dict[tuple[int, int, Priority], float])

    def __post_init__(self) -> None:
        self._numbers, self._under_way = count(), list[_Frame]()
        self._more, self._ended = threading.Condition(), False
        if self.delay:
            threading.Thread(target=self._bring, name="sea", daemon=True).start()

    def enter(self, port: "Loopback") -> None:
        """Someone is there."""
        with self._lock:
            others = [other for other in self._ports.values() if other.me != port.me]
            self._ports[port.me] = port
            self.still.pop(port.me, None)
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

    def freeze(self, me: int) -> None:
        """From now on nothing that someone sends or is sent arrives."""
        with self._lock:
            self.still.setdefault(me, [])

    def lose(self, me: int, alive: bool = False) -> None:
        """Let someone and all others count each other as gone, or as there again: what a link says after a lease."""
        with self._lock:
            port, others = self._ports.get(me), [other for other in self._ports.values() if other.me != me]
        for other in others if port else ():
            other.seen(me, alive)
            if port:
                port.seen(other.me, alive)

    def wake(self, me: int, *, drops: bool = False) -> None:
        """Let someone be heard again, and hear: what was sent meanwhile too, unless it `drops` out."""
        with self._lock:
            held = self.still.pop(me, [])
            for frame in () if drops else held:
                self._arrive(frame)

    def cut(self, one: int, other: int) -> None:
        """Lose every frame between these two."""
        self._apart.add(frozenset((one, other)))

    def mend(self, one: int, other: int) -> None:
        """And no more."""
        self._apart.discard(frozenset((one, other)))

    def carry(self, sender: "Loopback", to: int, frame: bytes, priority: Priority) -> None:
        """Bring a frame to its hearer, if both are there."""
        with self._lock:
            hearer = self._ports.get(to) if self._ports.get(sender.me) is sender else None
        if not hearer or frozenset((sender.me, to)) in self._apart or not self.passes(sender.me, to, frame):
            return
        with self._lock:
            number = next(self._numbers)
            held = self.still.get(sender.me)
            if held is not None:
                held.append(_Frame(0.0, number, sender, hearer, frame))
                return
            if self.delay:
                lane = sender.me, to, priority
                due = max(time.monotonic() + self.delay(sender.me, to), self._due.get(lane, 0.0))
                self._due[lane] = due
                with self._more:
                    heapq.heappush(self._under_way, _Frame(due, number, sender, hearer, frame))
                    self._more.notify()
                return
        self._arrive(_Frame(0.0, number, sender, hearer, frame))

    def _arrive(self, frame: _Frame) -> None:
        hearer = frame.hearer
        with self._lock:
            held = self.still.get(hearer.me)
            if held is not None:
                held.append(frame)
                return
            there = self._ports.get(hearer.me) is hearer
        if there:
            hearer.heard(frame.sender.me, frame.frame)

    def end(self) -> None:
        """No frame arrives any more."""
        with self._more:
            self._ended = True
            self._more.notify()

    def _bring(self) -> None:
        while True:
            with self._more:
                while not self._under_way and not self._ended:
                    self._more.wait()
                if self._ended:
                    return
                if (wait := self._under_way[0].due - time.monotonic()) > 0:
                    self._more.wait(wait)
                    continue
                frame = heapq.heappop(self._under_way)
            self._arrive(frame)


class Loopback:
    """One end of a `Sea`."""

    def __init__(self, sea: Sea, me: int) -> None:
        self.me, self.sent, self._sea = me, 0, sea
        self.heard: Heard = lambda sender, frame: None
        self.seen: Seen = lambda address, alive: None

    def send(self, to: int, parts: Sequence[Part], priority: Priority, wanted: Wanted = always) -> None:
        """At once."""
        frame = b"".join(parts)
        self.sent += len(frame)
        self._sea.carry(self, to, frame, priority)

    def drop(self, to: int) -> None:
        """Nothing is ever queued."""

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


def serve(
    sea: Sea,
    folder: Path,
    count: int,
    say: Callable[[str], None],
    *,
    lease: float = 10.0,
    recovers: bool = False,
) -> Server:
    """A coordinator of a run of `count` islands."""
    ledger = Ledger(folder / "ledger.sqlite")
    return Server(Loopback(sea, COORDINATOR), ledger, "run", "1", say, count, lease, recovers)
