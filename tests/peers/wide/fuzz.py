"""Throws mutated messages at islands and a coordinator in the middle of a run: `python -m tests.peers.wide.fuzz`.

    noise        bytes of a frame changed, or its text spelled otherwise under a right checksum: refused, from anyone
    harmless     well-formed, from a member: what only the coordinator may say, bytes that are not the sender's to send,
                 of the wrong length or of no exchange, anything asked for
    strangers    anything but the hello of an island that fits, from a number that takes no part
    lies         anything at all, under the number of one member

After noise, harmless messages and strangers the run has the digest of one without. After lies, everyone comes to an
end, well or with a sentence, or waits, for the liar or for somebody with a checkpoint, and can be told to stop; and no
thread has met anything that it did not expect.
"""

import argparse
import queue
import random
import resource
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.parts.codecs import float4
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.messages import COORDINATOR, BadMessage, Hello, read
from atoll.sync.rule import Rule, Strategy
from atoll.testing.islands import Sea, serve
from atoll.testing.toys import Mlp
from atoll.testing.turns import run_turns
from atoll.wire import Keep
from tests.peers.wide.crew import Sailor
from tests.peers.wide.mutations import Mutator, Sent, fits, harmless

DILOCO = Strategy((Rule(every(5), outer=nesterov(0.7, 0.9)),))
STREAMING = Strategy(
    (Rule(staggered(6, 2), sgd(0.8), codec=float4(), mixer=all_mean(Keep()), landing=After(2), merge=blend(0.5)),),
    by_name("first*", "*"),
)
WORKERS, STEPS, LIAR, BATCH, LEASE = 3, 40, 2, 256, 2.0
PATIENCE_S, ENDS_S = 90.0, 8.0
"""Within which a run of so few steps ends; and within which one with a liar either does, or waits."""


@dataclass
class Storm:
    """A run of three islands, and messages that come beside its own.

    Args: folder: of its ledger. seed: of the mutations. lies: of one member; or else what must change nothing.
    Attributes: counts: of what was thrown, by kind; wrong: noise that was taken for a message; said: by the
    coordinator; waited: islands that did not come to an end by themselves; hung: nor when told to; most: `weight` of an
    island, of what it offers and of the coordinator, at any time; errors: of islands that ended badly, and of the
    coordinator.
    """

    folder: Path
    strategy: Strategy
    seed: int
    lies: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[bytes] = field(default_factory=list[bytes])
    said: list[str] = field(default_factory=list[str])
    waited: list[int] = field(default_factory=list[int])
    hung: list[int] = field(default_factory=list[int])
    most: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.recent: dict[str, deque[Sent]] = {}
        self._thrown, self._moved = 0, threading.Condition()
        self._rng = random.Random(self.seed)
        self._mutator = Mutator(self._rng)

    def blow(self, messages: int) -> None:
        """Run, with so many messages thrown: the first ones once it has begun, the last ones before it ends."""
        sea, share = Sea(self._passes), messages / (STEPS - 10)
        self.server = serve(sea, self.folder, WORKERS, self.said.append, lease=LEASE)

        def pause(step: int) -> float:
            with self._moved:
                self._moved.wait_for(lambda: self._thrown >= share * (step - 10), PATIENCE_S)
            return 0.0

        try:
            sailors = [Sailor(sea, worker, Mlp(), self.strategy, STEPS, pause, LEASE) for worker in range(WORKERS)]
            self.crew = sailors
            self._throw(messages)
            end = time.monotonic() + (ENDS_S if self.lies else PATIENCE_S)
            for sailor in sailors:
                sailor.thread.join(max(end - time.monotonic(), 0.0))
            self.waited = [sailor.worker for sailor in sailors if sailor.thread.is_alive()]
            for sailor in sailors:
                if sailor.group:
                    sailor.group.abort()
            for sailor in sailors:
                sailor.thread.join(10.0)
            self.hung = [sailor.worker for sailor in sailors if sailor.thread.is_alive()]
            errors = [*(sailor.error for sailor in sailors), self.server.error]
            self.errors = [f"{type(error).__name__}: {error}" for error in errors if error]
        finally:
            self.server.close()

    def same(self) -> list[bool]:
        """Which islands hold what they hold without all this."""
        digest = run_turns(Mlp(), self.strategy, workers=WORKERS, steps=STEPS)[0][0].state.digest()
        return [sailor.sync is not None and sailor.sync.state.digest() == digest for sailor in self.crew]

    def _passes(self, sender: int, hearer: int, frame: bytes) -> bool:
        """Remember what is really sent, by its kind: it is what mutations are made of."""
        with suppress(BadMessage):
            self.recent.setdefault(type(read(frame)).__name__, deque(maxlen=64)).append(Sent(sender, hearer, frame))
        return True

    def _throw(self, messages: int) -> None:
        rng = self._rng
        while "Head" not in self.recent and any(sailor.thread.is_alive() for sailor in self.crew):
            time.sleep(0.001)
        while (
            self._thrown < messages and not self.server.error and any(sailor.thread.is_alive() for sailor in self.crew)
        ):
            for _ in range(BATCH):
                kind, sent = self._mutated(rng.choice(list(rng.choice(list(self.recent.values())))))
                if sent:
                    self.counts[kind] += 1
                    port = self.server.link if sent.hearer == COORDINATOR else self.crew[sent.hearer].port
                    port.heard(sent.sender, sent.frame)  # type: ignore[attr-defined]
            self._drain()
            with self._moved:
                self._thrown += BATCH
                self._moved.notify_all()
        with self._moved:
            self._thrown = 1 << 60
            self._moved.notify_all()

    def _mutated(self, true: Sent) -> tuple[str, Sent | None]:
        """What is thrown, of which kind; None for what would be of another kind."""
        rng = self._rng
        if rng.random() < 0.3:
            frame = self._mutator.noise(true.frame)
            with suppress(BadMessage):
                read(frame)
                self.wrong.append(frame)
            return "noise", Sent(rng.choice([true.sender, WORKERS, COORDINATOR]), true.hearer, frame)
        frame = self._mutator.changed(true.frame)
        hearer = rng.choice([*range(WORKERS), COORDINATOR, true.hearer, true.hearer])
        if self.lies:
            # whoever is refused, or said to have come again, is out of the run before it has lied about anything else
            tame = isinstance(read(true.frame), Hello) and rng.random() < 0.99
            return "lies", None if tame or hearer == LIAR else Sent(LIAR, hearer, frame)
        if rng.random() < 0.3:
            return "strangers", None if fits(true, frame) else Sent(rng.randrange(WORKERS, 1 << 31), hearer, frame)
        if true.sender == COORDINATOR:
            true = Sent(rng.choice([worker for worker in range(WORKERS) if worker != hearer]), true.hearer, true.frame)
        if true.sender == hearer or not harmless(true, hearer, frame):
            return "left out", None
        return "harmless", Sent(true.sender, hearer, frame)

    def _drain(self) -> None:
        """Wait until all has been heard, and see what is kept of it."""
        groups = [sailor.group for sailor in self.crew if sailor.thread.is_alive() and sailor.group]
        for group in groups:
            heard = threading.Event()

            def look(group: WideGroup = group, heard: threading.Event = heard) -> None:
                self._weigh("island", group.member)
                self._weigh("offers", group.offers)
                heard.set()

            group._do(look)
            while not heard.wait(0.05) and not group._closed:
                pass
        with suppress(queue.Empty):  # it has ended, and says so in its error
            self.server.look(lambda coordinator: self._weigh("coordinator", coordinator), timeout=10.0)

    def _weigh(self, name: str, what: object) -> dict[str, object]:
        self.most[name] = max(self.most[name], weight(what, set()))
        return {}


def weight(what: object, seen: set[int]) -> int:
    """Bytes and entries of all that is held by an object of the wide runtime, roughly: what must not grow."""
    if id(what) in seen:
        return 0
    seen.add(id(what))
    match what:
        case bytes() | str() | memoryview():
            return len(what)
        case dict():
            return sum(weight(key, seen) + weight(value, seen) for key, value in what.items())
        case list() | tuple() | set() | deque():
            return len(what) + sum(weight(each, seen) for each in what)
        case _ if type(what).__module__.startswith("atoll.peers.wide") and not isinstance(what, Ledger):
            return weight(getattr(what, "__dict__", {}), seen)
        case _:
            return 1


def accepted(corpus: list[bytes], seed: int, messages: int) -> list[tuple[bytes, bytes]]:
    """Of so much noise made of true frames, what was taken for a message, with the frame that it was made of."""
    rng = random.Random(seed)
    mutator, taken = Mutator(rng), list[tuple[bytes, bytes]]()
    for _ in range(messages):
        frame = rng.choice(corpus)
        noise = mutator.noise(frame)
        with suppress(BadMessage):
            read(noise)
            taken.append((noise, frame))
    return taken


def main() -> None:
    """The long form: half of the messages as noise to the reader alone, half in runs of 20,000 each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began, seed, thrown, corpus = time.monotonic(), asked.seed, Counter[str](), list[bytes]()
    memory = Path("/dev/shm")
    while thrown.total() < asked.messages // 2:
        for strategy in (DILOCO, STREAMING):
            for lies in (False, True):
                with tempfile.TemporaryDirectory(dir=memory if memory.exists() else None) as folder:
                    storm = Storm(Path(folder), strategy, seed, lies)
                    storm.blow(min(20_000, asked.messages // 8))
                thrown += storm.counts
                corpus = [sent.frame for kept in storm.recent.values() for sent in kept]
                rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                print(f"seed {seed}{' lies' * lies}: {dict(storm.counts)}, kept at most {dict(storm.most)}, {rss} MiB")
                print(f"    same {storm.same()}, waited {storm.waited}, hung {storm.hung}, wrong {len(storm.wrong)}")
                print(*(f"    {error}" for error in storm.errors), sep="\n", flush=True)
        seed += 1
    per_s = thrown.total() / (time.monotonic() - began)
    print(f"{thrown.total()} messages in runs, {per_s:.0f} per second: {dict(thrown)}")
    began, alone = time.monotonic(), asked.messages - thrown.total()
    taken = accepted(corpus, seed, alone)
    print(f"{alone} of noise alone, {alone / (time.monotonic() - began):.0f} per second, {len(taken)} accepted")
    for noise, frame in taken:
        print(f"    {noise[:200]!r}, made of {frame[:200]!r}")


if __name__ == "__main__":
    main()
