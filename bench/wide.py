"""How much of a wide-area link does an engine use, what does plain TCP reach there, and what does it cost in CPU?

Four peers, each a process in a network namespace with an access link of its own (`bench.link`), hold 25 MB of fp32.
Exchanges are `all-mean` (of all peers) and `pairs` (of two each). A mean of S bytes over M members makes each send
2 (M - 1)/M S at least, which takes the ideal time on the nominal link; a ratio is ideal over measured time, from when
all are told to begin until the last one has its result. Headers and acknowledgements leave about 0.93 to any TCP. The
first exchange after connecting is `cold`, and the next is not counted.

Seconds of CPU are those of peers during warm exchanges, over all peers, for each GB that they must send. What the
kernel does on arrival of a packet falls to the emulated network, for all engines alike.

`python -m bench.wide --python PATH` runs those engines that this interpreter lacks in another one.
"""

import argparse
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import IO, Any

from bench import link
from bench.engines import ENGINES, TIMEOUT_S, Engine, Job, Seat, Told
from bench.measure import Figure

SETTINGS = (link.Access(100e6, 0.05), link.Access(1e9, 0.02))
SLOW = 100e6
"""Goals are parts of the link up to so many bits per second, and seconds of CPU above."""
PEERS = 4
ELEMENTS = 6_553_600
ROOT = Path(__file__).parents[1]
LEAVING_S, ENDING_S = 20.0, 5.0
"""How long an engine may take to close, and a peer that has lost the bench to end."""
ALONE = (
    *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"),
)
"""In a process and a mount namespace: what a peer leaves running goes with it, and what it leaves in shared memory."""


@dataclass(frozen=True)
class Case:
    """What is exchanged over what. Args: members: of each exchange."""

    access: link.Access
    peers: int
    members: int
    elements: int

    @property
    def sent(self) -> float:
        """Bytes that a peer sends at least."""
        return 2 * (self.members - 1) / self.members * 4 * self.elements

    @property
    def ideal(self) -> float:
        """Seconds that they take on the nominal link."""
        return 8 * self.sent / self.access.bandwidth

    def seat(self, rank: int) -> Seat:
        first = rank - rank % self.members
        return Seat(rank, tuple(range(first, first + self.members)), self.elements)

    @property
    def pattern(self) -> str:
        return "all-mean" if self.members == self.peers else "pairs"

    def __str__(self) -> str:
        return f"{self.access.bandwidth / 1e6:.4g} Mbit/s {self.pattern}"


@dataclass(frozen=True)
class Ran:
    """Of one connection: what peers told of each round, their congestion control, and the part of late packets."""

    rounds: Sequence[Sequence[Told]]
    control: str
    late: float

    def seconds(self, round: int) -> float:
        """From the first peer's beginning to the last one's end."""
        told = self.rounds[round]
        return max(each.ended for each in told) - min(each.began for each in told)

    def right(self, round: int) -> bool:
        """Whether every peer got the mean."""
        return all(each.right for each in self.rounds[round])

    @property
    def cold(self) -> list[float]:
        """Seconds of the first exchange, if it was right."""
        return [self.seconds(0)] if self.right(0) else []

    @property
    def warm(self) -> list[float]:
        """Seconds of those that were right, after two."""
        return [self.seconds(round) for round in range(2, len(self.rounds)) if self.right(round)]

    @property
    def cpu(self) -> float:
        """Seconds of an exchange, of all peers."""
        warm = self.rounds[2:]
        return sum(each.cpu for told in warm for each in told) / len(warm)


def figures(
    settings: Sequence[link.Access] = SETTINGS,
    peers: int = PEERS,
    elements: int = ELEMENTS,
    turns: int = 3,
    warm: int = 4,
    engines: Sequence[Engine] = ENGINES,
    pythons: Sequence[str] = (),
) -> Iterator[Figure]:
    """Each engine, in turns of a fresh connection with so many warm exchanges: minutes for each engine."""
    if why := link.missing() or (None if shutil.which("unshare") else "it takes the command unshare of util-linux"):
        print(f"wide       skipped: {why}")
        return
    able: dict[Engine, str] = {}
    for engine in engines:
        if python := able_python(engine.needs, (sys.executable, *pythons)):
            able[engine] = python
        else:
            print(f"wide       {engine.name} skipped: not installed (pip install {engine.install})")
    for access in settings:
        for members in dict.fromkeys((peers, 2)):
            case = Case(access, peers, members, elements)
            found: defaultdict[Engine, list[Ran]] = defaultdict(list)
            for _ in range(turns):
                for engine, python in list(able.items()):
                    try:
                        found[engine].append(ran(case, engine.name, python, 2 + warm))
                    except (RuntimeError, OSError) as error:
                        print(f"wide       {engine.name} failed, {case}: {error}", flush=True)
            yield from _told(case, found)


def _told(case: Case, found: dict[Engine, list[Ran]]) -> Iterator[Figure]:
    """The figures of a case, and a line for each engine."""
    raw = [seconds for run in next(iter(found.values()), []) for seconds in run.warm]
    slow = case.access.bandwidth <= SLOW
    for index, (engine, runs) in enumerate(found.items()):
        name, rights = f"{case}: {engine.name}", [run.right(round) for run in runs for round in range(len(run.rounds))]
        if not all(rights):
            print(f"wide       {name}: not the mean at every peer in {rights.count(False)} of {len(rights)} rounds")
        warm = [seconds for run in runs for seconds in run.warm]
        if not warm or not raw:
            continue
        print(
            f"wide       {engine.name} {case.pattern} ratio {case.ideal / median(warm):.2f} "
            f"(raw {case.ideal / median(raw):.2f}) at {case.access.bandwidth / 1e6:g} Mbit/s, "
            f"{case.access.latency * 1e3:g} ms, {runs[0].control}"
        )
        of_link, of_raw, cpu = (engine.of_link, engine.of_raw, None) if slow else (None, None, engine.cpu)
        yield Figure(name, [case.ideal / seconds for seconds in warm], "of the link", least=of_link)
        if index:
            yield Figure(name, [median(raw) / seconds for seconds in warm], "of raw", least=of_raw)
        if cold := [seconds for run in runs for seconds in run.cold]:
            yield Figure(name, [case.ideal / seconds for seconds in cold], "of the link, cold")
        yield Figure(name, [run.cpu / (case.peers * case.sent / 1e9) for run in runs], "s of CPU per GB", most=cpu)
    if late := [run.late for runs in found.values() for run in runs]:
        yield Figure(str(case), late, "of packets over 1 ms late, as the machine was busy")


@functools.cache
def able_python(module: str, pythons: tuple[str, ...]) -> str | None:
    """The first interpreter that has a module."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return next((python for python in pythons if not subprocess.run([python, "-c", look], cwd=ROOT).returncode), None)


def ran(case: Case, engine: str, python: str, rounds: int) -> Ran:
    """The rounds of a fresh connection. Raises: RuntimeError with a peer's last words; TimeoutError."""
    traffic = link.Traffic()
    with link.network(case.peers, case.access, traffic) as door, ExitStack() as stack:
        peers = [stack.enter_context(_started(python)) for _ in range(case.peers)]
        _say(peers, [Job(engine, door, case.seat(rank), rounds) for rank in range(case.peers)])
        control = _heard(peers)[0]
        told: list[list[Told]] = []
        for _ in range(rounds):
            _say(peers, ["ready"] * case.peers)
            _heard(peers)
            _say(peers, ["exchange"] * case.peers)
            told.append(_heard(peers))
        _say(peers, ["leave"] * case.peers)
        deadline = time.monotonic() + LEAVING_S
        for peer in peers:
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(max(0.0, deadline - time.monotonic()))
    return Ran(told, control, traffic.late / max(1, traffic.delivered))


@dataclass(frozen=True)
class _Peer:
    process: subprocess.Popen[bytes]
    way: Connection
    output: IO[bytes]

    def last_words(self) -> str:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing")


@contextmanager
def _started(python: str) -> Generator[_Peer]:
    """A peer's process. All that its engine starts and shares with it is in namespaces that end when it does."""
    mine, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as output:
        with theirs:
            process = subprocess.Popen(
                [*ALONE, python, "-m", "bench.engines.peer", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            with Connection(mine.detach()) as way:
                yield _Peer(process, way, output)
        finally:
            # Without its socket the peer ends, and `unshare` waits for it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            process.wait()


def _say(peers: Sequence[_Peer], words: Sequence[object]) -> None:
    for peer, word in zip(peers, words, strict=True):
        with suppress(BrokenPipeError):  # what made it end is told when it should be heard
            peer.way.send(word)


def _heard(peers: Sequence[_Peer]) -> list[Any]:
    """One message from each peer."""
    heard: dict[int, object] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(heard) < len(peers):
        pending = [peer.way for rank, peer in enumerate(peers) if rank not in heard]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            words = next(peer.last_words() for peer in peers if peer.way in pending)
            raise TimeoutError(f"{len(pending)} peers said nothing for {TIMEOUT_S:g} s, one after: {words}")
        for rank, peer in enumerate(peers):
            if peer.way in ready:
                try:
                    heard[rank] = peer.way.recv()
                except (EOFError, OSError):
                    raise RuntimeError(f"peer {rank} ended with: {peer.last_words()}") from None
    return [heard[rank] for rank in range(len(peers))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", action="append", default=[], help="an interpreter that has more engines")
    for figure in figures(pythons=parser.parse_args().python):
        print(f"wide       {figure}", flush=True)
