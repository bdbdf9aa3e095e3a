"""All workers in one process: in turns (one thread advances every flow) or in threads. The reference for every other
group.

Messages are encoded, cut and decoded as on a network, and their bytes counted as if sent (a contribution that is
refused is not); only the copying between hosts is missing. An exchange of snapshots is combined when the last worker
has posted. One that reads live tensors is combined when the last worker has come to take it: then all of them stand
still, and one loop over the chunks forms the mean and hands it to every worker's sink, so that nothing larger than a
chunk is ever held.
"""

from dataclasses import dataclass, field, replace
from threading import Condition

import torch
from torch import Tensor

from atoll.errors import GroupError
from atoll.peers.rounds import accumulate, admit, check_alike, encode, finish, header_of, layouts_match
from atoll.trees import CHUNK
from atoll.wire import Key, Landed, Lost, Membership, Post, Reduce, Snapshot, Take, bytes_sent


@dataclass
class _Exchange:
    """One meeting: who has posted, who has come to take, and the answer of each once it is known."""

    posts: dict[int, Post] = field(default_factory=dict[int, Post])
    takes: dict[int, Take] = field(default_factory=dict[int, Take])
    answers: dict[int, Landed | Lost] = field(default_factory=dict[int, Landed | Lost])


class Hub:
    """Where the workers of one process meet.

    Args: workers: how many there are, numbered from 0.
    """

    def __init__(self, workers: int) -> None:
        self.workers = tuple(range(workers))
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
            to = self._to.get((me, take.ticket))
            exchange = self._exchanges.get((take.ticket, to)) if to else None
            if to is None or exchange is None:
                raise GroupError(f"worker {me} asked for {take.ticket}, which it has not posted or has taken already")
            exchange.takes[me] = take
            if not exchange.answers and len(exchange.posts) == len(exchange.takes) == len(to):
                self._combine(exchange, to)
            while not exchange.answers:
                if self._aborted:
                    raise GroupError(
                        f"the group was aborted while worker {me} waited for {take.ticket}: another worker failed"
                    )
                if not wait:
                    return None
                self._changed.wait()
            answer = exchange.answers[me]
            del self._to[me, take.ticket]
            if not any(key == take.ticket and where == to for (_, key), where in self._to.items()):
                del self._exchanges[take.ticket, to]
            return answer

    def abort(self) -> None:
        """Wake everyone."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _combine(self, exchange: _Exchange, to: tuple[int, ...]) -> None:
        posts = [exchange.posts[worker] for worker in to]
        if not layouts_match(posts):
            raise GroupError(
                f"workers {to} posted {posts[0].key} with different numbers of elements; they must train the same model"
            )
        verdict = admit(posts[0].key, to, [header_of(post) for post in posts], posts[0].quorum)
        if isinstance(verdict, Landed):
            verdict = replace(verdict, mean_norm=self._spread(exchange, to, verdict))
        for index, (worker, post) in enumerate(zip(to, posts, strict=True)):
            answer = verdict
            if isinstance(answer, Landed):
                refused = worker not in answer.peers
                sent = bytes_sent(post.fold, post.codec, post.source.layout, len(to), index, refused=refused)
                answer = replace(answer, sent=sent)
            exchange.answers[worker] = answer
        self._changed.notify_all()

    def _spread(self, exchange: _Exchange, to: tuple[int, ...], landed: Landed) -> float:
        """Form the mean chunk by chunk and hand it to every member. Returns its L2 norm."""
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
        return squares**0.5


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


class MemoryGroup:
    """One worker's end of a `Hub`."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub = hub
        self.membership = Membership(hub.workers, worker)

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
