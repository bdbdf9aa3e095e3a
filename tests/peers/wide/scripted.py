"""Members and their coordinator without threads or a clock: messages arrive in an order drawn from a seed, and somebody
can die, or be cut off, between any two of them."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.peers.wide.coordinator import Coordinator
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.link import Priority
from atoll.peers.wide.member import Member
from atoll.peers.wide.messages import COORDINATOR, MEAN, Beat, Bulk, Hello, Message, read, write
from atoll.trees import Layout, Spec, Tree
from atoll.wire import Codec, Edges, Fold, Keep, Key, Landed, Lost, Post, Reduce, Snapshot

KEY = Key(0, 0, 0)
LEASE_S, TICK_S = 4.0, 0.5
SIZE = 20


class Cut(Layout):
    """A layout of three small chunks."""

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        return (0, 7), (7, 14), (14, SIZE)


LAYOUT = Cut((Spec("w", (SIZE,), (1,), torch.float64),), torch.float64)


class World:
    """`workers` members who have agreed on their first epoch, and a coordinator.

    Args: seed: of the order in which messages arrive. folder: for the ledger. loses: the part of messages between
    members that is lost.
    Attributes: mutes: kinds of messages that never arrive. delivered: how many have; dropped: means that nobody wanted
    any more when their turn came.
    """

    def __init__(self, workers: int, seed: int, folder: Path, *, loses: float = 0.0) -> None:
        self.rng, self.now, self.folder = random.Random(seed), 0.0, folder
        self.delivered, self.loses, self.mutes = 0, loses, set[type[Message]]()
        self.dropped = 0
        self.said: list[str] = []
        self._to_post: dict[int, Post] = {}
        self.sources: dict[int, Snapshot] = {}
        self._queues: defaultdict[tuple[int, int, Priority], deque[bytes]] = defaultdict(deque)
        self.members = {worker: self._member(worker) for worker in range(workers)}
        self._islands = workers
        self.coordinator = self._coordinator()
        for worker in self.members:
            self.hail(worker)
        self.settle()
        for member in self.members.values():
            met = member.meet(5)
            assert met
            assert met.workers == tuple(range(workers))

    # what happens

    def hail(self, worker: int) -> None:
        """Say hello."""
        self.members[worker].life = life = f"life {self.rng.random()}"
        self._send(worker, COORDINATOR, Hello("run", "same", "1", 0, life), Priority.CONTROL)

    def post(self, values: Mapping[int, Tensor], fold: Fold, to: Sequence[int], edges: Mapping[int, Edges]) -> None:
        """Let members begin one exchange, at moments of the order's choice."""
        self._to_post = {worker: _post(values[worker], fold, tuple(to), edges.get(worker)) for worker in to}
        for worker, post in self._to_post.items():
            assert isinstance(post.source, Snapshot)
            self.sources[worker] = post.source

    def step(self) -> bool:
        """One thing happens; whether there was anything to happen without the passing of time."""
        ways: list[Callable[[], bool]] = [partial(self._begin, worker) for worker in self._to_post]
        ways += [partial(self._carry, way) for way, queue in self._queues.items() if queue]
        ways += [member.work for member in self.members.values()]
        self.rng.shuffle(ways)
        return any(way() for way in ways)

    def settle(self, seconds: float = 60.0) -> None:
        """Go on until nothing more happens, but that time passes."""
        end = self.now + seconds
        while self.now < end:
            while self.step():
                pass
            if self._quiet():
                return
            self.now += TICK_S
            for member in self.members.values():
                member.tick(self.now)
                newest = member.newest.number if member.newest else -1
                member.beat(Beat(member.step, newest, 0, 0.0, 0.0))
            self.coordinator.tick(self.now)

    def kill(self, worker: int, *, drops: bool) -> None:
        """A member dies; what it had sent still arrives, unless it `drops`."""
        del self.members[worker]
        for (sender, hearer, _), queue in self._queues.items():
            if hearer == worker or (sender == worker and drops):
                queue.clear()
        self.coordinator.seen(worker, False, self.now)

    def restart(self) -> None:
        """The coordinator dies, and another one takes up its ledger."""
        for (sender, hearer, _), queue in self._queues.items():
            if COORDINATOR in (sender, hearer):
                queue.clear()
        self.coordinator.ledger.close()
        self.coordinator = self._coordinator()

    def outcomes(self) -> dict[int, Landed | Lost | None]:
        """What everyone who is left has come to."""
        return {worker: member.answers.get(KEY) for worker, member in self.members.items()}

    # how

    def _member(self, worker: int) -> Member:
        def send(to: int, message: Message, priority: Priority) -> None:
            self._send(worker, to, message, priority)

        member = Member(worker, send, LEASE_S)
        member.home = True
        return member

    def _coordinator(self) -> Coordinator:
        def send(to: int, message: Message) -> None:
            self._send(COORDINATOR, to, message, Priority.CONTROL)

        ledger = Ledger(self.folder / "ledger.sqlite")
        ledger.connection.execute("pragma synchronous = off")  # nobody pulls the plug
        return Coordinator("run", "1", ledger, send, self.said.append, self._islands, LEASE_S)

    def _send(self, sender: int, to: int, message: Message, priority: Priority) -> None:
        frame = b"".join(bytes(part) for part in write(message))
        if type(message) not in self.mutes and (COORDINATOR in (sender, to) or self.rng.random() >= self.loses):
            self._queues[sender, to, priority].append(frame)

    def _begin(self, worker: int) -> bool:
        post = self._to_post.pop(worker)
        if worker in self.members:
            self.members[worker].post(post, None, self.now)
        return True

    def _carry(self, way: tuple[int, int, Priority]) -> bool:
        sender, hearer, _ = way
        message = read(self._queues[way].popleft())
        if isinstance(message, Bulk) and message.phase == MEAN and self.rng.random() < 0.5:
            member = self.members.get(sender)
            if member and not member.wants(message):
                self.dropped += 1  # the other half was on the wire before it was known
                return True
        self.delivered += 1
        if hearer == COORDINATOR:
            self.coordinator.heard(sender, message, self.now)
        elif hearer in self.members:
            self.members[hearer].heard(sender, message, self.now)
        return True

    def _quiet(self) -> bool:
        over = all(KEY in member.answers for member in self.members.values())
        return over if self.sources else all(member.newest for member in self.members.values())


def _post(values: Tensor, fold: Fold, to: tuple[int, ...], edges: Edges | None) -> Post:
    codec: Codec = exact()
    source = Snapshot(Tree(LAYOUT))
    source.tree.flat.copy_(values)
    return Post(KEY, to, source, codec, {}, fold, 1.0, 0.25, {}, edges)


def mean(values: Mapping[int, Tensor], peers: Sequence[int]) -> Tensor:
    """In worker order, one sum and one division."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    for worker in sorted(peers):
        total = total + values[worker]
    return total / len(peers)


FOLDS: dict[str, Fold] = {"keep": Keep(), "reduce": Reduce(exact())}
