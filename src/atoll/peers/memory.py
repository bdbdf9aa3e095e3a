"""All workers in one process: in turns (one thread advances every flow) or in threads. The reference for every other
group.

Messages are encoded, cut and decoded as on a network, and their bytes counted as if sent (a contribution that is
refused is not); only the copying between hosts is missing. An exchange of snapshots is combined when the last worker
has posted. One that reads live tensors is combined when the last worker has come to take it: then all of them stand
still, and one loop over the chunks forms the mean and hands it to every worker's sink, so that nothing larger than a
chunk is ever held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Condition

import torch
from torch import Tensor

from atoll.errors import GroupError, UsageError
from atoll.peers.faults import Dropping, lose
from atoll.peers.kept import Desk
from atoll.peers.rounds import accumulate, admit, check_alike, encode, finish, header_of, heard, layouts_match
from atoll.trees import CHUNK
from atoll.wire import (
    KEEPER,
    Collect,
    Key,
    Landed,
    Lost,
    Membership,
    Post,
    Push,
    Reduce,
    Reply,
    Snapshot,
    Take,
    bytes_sent,
)


@dataclass
class _Exchange:
    """One meeting: who has posted, who has come to take, and the answer of each once it is known."""

    posts: dict[int, Post] = field(default_factory=dict[int, Post])
    takes: dict[int, Take] = field(default_factory=dict[int, Take])
    answers: dict[int, Landed | Lost] = field(default_factory=dict[int, Landed | Lost])


class Hub:
    """Where the workers of one process meet.

    Args: workers: how many there are, numbered from 0. faults: which messages get lost; none if None.
    """

    def __init__(self, workers: int, faults: "Dropping | None" = None) -> None:
        self.workers = tuple(range(workers))
        self.desk = Desk()
        self.kept = False
        self._faults = faults
        self._exchanges: dict[tuple[Key, tuple[int, ...]], _Exchange] = {}
        self._to: dict[tuple[int, Key], tuple[int, ...]] = {}
        self._fingerprints: dict[int, str] = {}
        self._changed = Condition()
        self._aborted = False

    def group(self, worker: int) -> "MemoryGroup":
        """Worker number `worker`'s end."""
        return MemoryGroup(self, worker)

    def agree(self, me: int, fingerprint: str) -> None:
        """Compare with everyone who is here already; a difference ends the run for all of them."""
        with self._changed:
            self._fingerprints[me] = fingerprint
            if different := check_alike(self._fingerprints, me):
                self.abort()
                raise GroupError(different)
            if len(self._fingerprints) == len(self.workers):
                self._fingerprints.clear()

    def post(self, me: int, post: Post) -> Key:
        """Add a contribution; the last one completes an exchange of snapshots."""
        with self._changed:
            if post.to == (KEEPER,):
                if not self.kept:
                    raise UsageError(
                        f"worker {me} handed in to a keeper, but nobody keeps, so nobody would answer; carry out "
                        "`atoll.sync.keeping.keep` on `group.keeper()` beside the workers, or use atoll train"
                    )
                self.desk.hand_in(me, post, lost=me in self._dropped(post.key, (me,)))
                return post.key
            self._to[me, post.key] = post.to
            exchange = self._exchanges.setdefault((post.key, post.to), _Exchange())
            if me not in exchange.posts:
                exchange.posts[me] = post
                if len(exchange.posts) == len(post.to) and all(
                    isinstance(each.source, Snapshot) for each in exchange.posts.values()
                ):
                    self._combine(exchange, post.to)
        return post.key

    def take(self, me: int, take: Take, wait: bool) -> Landed | Lost | None:
        """The answer, computed by the last worker who comes for it."""
        with self._changed:
            if self.desk.knows(me, take.ticket):
                while (reply := self.desk.answer(me, take.ticket)) is None:
                    self._check(me, take.ticket)
                    if not wait:
                        return None
                    self._changed.wait()
                return reply
            to = self._to.get((me, take.ticket))
            exchange = self._exchanges.get((take.ticket, to)) if to else None
            if to is None or exchange is None:
                raise GroupError(f"worker {me} asked for {take.ticket}, which it has not posted or has taken already")
            exchange.takes[me] = take
            if not exchange.answers and len(exchange.posts) == len(exchange.takes) == len(to):
                self._combine(exchange, to)
            while not exchange.answers:
                self._check(me, take.ticket)
                if not wait:
                    return None
                self._changed.wait()
            answer = exchange.answers[me]
            del self._to[me, take.ticket]
            if not any(key == take.ticket and where == to for (_, key), where in self._to.items()):
                del self._exchanges[take.ticket, to]
            return answer

    def collect(self, collect: Collect) -> list[Push]:
        """What was handed in to the keeper."""
        with self._changed:
            return self.desk.collect(collect)

    def reply(self, reply: Reply) -> None:
        """The keeper's answer."""
        with self._changed:
            self.desk.reply(reply)
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake everyone."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _check(self, me: int, ticket: Key) -> None:
        if self._aborted:
            raise GroupError(f"the group was aborted while worker {me} waited for {ticket}: another worker failed")

    def _dropped(self, key: Key, to: tuple[int, ...]) -> frozenset[int]:
        return self._faults(key, to) if self._faults else frozenset()

    def _combine(self, exchange: _Exchange, to: tuple[int, ...]) -> None:
        posts = [exchange.posts[worker] for worker in to]
        if not layouts_match(posts):
            raise GroupError(
                f"workers {to} posted {posts[0].key} with different numbers of elements; they must train the same model"
            )
        key, headers = posts[0].key, [header_of(post) for post in posts]
        # what a worker keeps to itself cannot get lost
        lost = self._dropped(key, to) if len(to) > 1 else frozenset[int]()
        verdict = admit(key, to, headers, posts[0].quorum, lost)
        norms: Sequence[float] = ()
        if isinstance(verdict, Landed):
            # before what comes back is written over what was sent
            for worker in verdict.dropped:
                lose(exchange.posts[worker])
            spread = _spread_along if posts[0].edges else self._spread
            norms = spread(exchange, to, verdict)
        for index, (worker, post) in enumerate(zip(to, posts, strict=True)):
            answer = verdict
            if isinstance(answer, Landed):
                refused, told = worker not in answer.peers, len(post.edges.tells) if post.edges else None
                layout, members = post.source.layout, len(to)
                sent = bytes_sent(post.fold, post.codec, layout, members, index, refused=refused, told=told)
                answer = replace(heard(answer, post.edges), sent=sent, mean_norm=norms[index])
                if not sum(answer.weights) > 0:
                    answer = Lost(key, "; ".join([f"nothing that worker {worker} hears counts", *answer.refused]))
            exchange.answers[worker] = answer
        self._changed.notify_all()

    def _spread(self, exchange: _Exchange, to: tuple[int, ...], landed: Landed) -> Sequence[float]:
        """Form the mean chunk by chunk and hand it to every member. Returns its L2 norm, for each."""
        accepted = [exchange.posts[worker] for worker in landed.peers]
        layout = accepted[0].source.layout
        pool = torch.empty(3, min(CHUNK, layout.numel), dtype=layout.dtype)
        squares = 0.0
        for start, stop in layout.chunks:
            mean = finish_chunk(accepted, start, stop, pool)
            norm = torch.linalg.vector_norm(mean).item()
            squares += norm * norm
            for worker in to:
                source, take = exchange.posts[worker].source, exchange.takes.get(worker)
                if isinstance(source, Snapshot):
                    source.write(start, mean)
                elif take and take.sink:
                    # a sink may overwrite what it gets; after the last one nobody needs the mean
                    take.sink(landed, start, mean if worker == to[-1] else pool[2][: stop - start].copy_(mean))
        return [squares**0.5] * len(to)


def _spread_along(exchange: _Exchange, to: tuple[int, ...], landed: Landed) -> Sequence[float]:
    """The same where each member hears others: all means of a chunk are formed before any is handed out. Returns the
    norm of each."""
    layout = exchange.posts[to[0]].source.layout
    pool = torch.empty(len(to) + 1, min(CHUNK, layout.numel), dtype=layout.dtype)
    squares = [0.0] * len(to)
    for start, stop in layout.chunks:
        wires = {worker: encode(exchange.posts[worker], start, stop, pool[-1]).clone() for worker in landed.peers}
        rounds = [heard(landed, exchange.posts[worker].edges) for worker in to]
        for row, mine in zip(pool, rounds, strict=False):
            total = None
            for worker, weight in zip(mine.peers, mine.weights, strict=True):
                codec = exchange.posts[worker].codec
                total = accumulate(total, codec, wires[worker], weight, row[: stop - start])
            if total is not None:
                total.div_(sum(mine.weights))
        for index, worker in enumerate(to):
            if not sum(rounds[index].weights) > 0:
                continue
            mean = pool[index][: stop - start]
            squares[index] += torch.linalg.vector_norm(mean).item() ** 2
            source, take = exchange.posts[worker].source, exchange.takes.get(worker)
            if isinstance(source, Snapshot):
                source.write(start, mean)
            elif take and take.sink:
                take.sink(rounds[index], start, mean)
    return [square**0.5 for square in squares]


def finish_chunk(posts: list[Post], start: int, stop: int, pool: Tensor) -> Tensor:
    """The mean of one chunk over the contributions of `posts`, in their order, as every member sees it after the wire.

    Args: pool: three rows of scratch; the mean may lie in the first.
    """
    out, total = pool[0][: stop - start], None
    for post in posts:
        total = accumulate(total, post.codec, encode(post, start, stop, pool[1]), post.weight, out)
    fold = posts[0].fold
    result = finish(out, [post.weight for post in posts], fold)
    mean = fold.result.decode(result, out) if isinstance(fold, Reduce) else result
    return mean if mean.dtype == out.dtype else out.copy_(mean)


class MemoryKeeper:
    """A keeper's end of a `Hub`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        hub.kept = True

    def collect(self, collect: Collect) -> list[Push]:
        """What workers handed in since the last look."""
        return self._hub.collect(collect)

    def reply(self, reply: Reply) -> None:
        """Answer one of them."""
        self._hub.reply(reply)


class MemoryGroup:
    """One worker's end of a `Hub`."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub = hub
        self.membership = Membership(hub.workers, worker)

    def keeper(self) -> MemoryKeeper:
        """The end of this hub's keeper."""
        return MemoryKeeper(self._hub)

    def agree(self, fingerprint: str) -> None:
        """Raise `GroupError` if another worker of the hub trains something else."""
        self._hub.agree(self.membership.me, fingerprint)

    def post(self, post: Post) -> Key:
        """Add this worker's contribution."""
        return self._hub.post(self.membership.me, post)

    def take(self, take: Take, wait: bool = True) -> Landed | Lost | None:
        """The answer; None if others are still missing and `wait` is False."""
        return self._hub.take(self.membership.me, take, wait)

    def abort(self) -> None:
        """Wake everyone in the hub with a `GroupError`."""
        self._hub.abort()
