"""The bulk of an exchange over a network: encode, send, receive, decode and sum, chunk by chunk, with a few chunks in flight.

Every chunk is a generator that stops where it would wait for the link. `WINDOW` of them are under way at a time and advance in one fixed
order, which is the same on all members, so that messages between two of them match by their order alone:

    Keep      encode, swap wires with everyone                         | sum, deliver
    Reduce    encode once, send piece j to its owner | sum, swap means | decode, deliver
    Sum       weigh, start an all-reduce                               | divide, deliver

Scratch is `WINDOW` chunks, whatever the size of the model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.peers.rounds import accumulate, encode, finish
from atoll.wire import Codec, Fold, Keep, Landed, Post, Reduce, Snapshot, Sum, Take, pieces

WINDOW = 4
"""Chunks under way at a time: while one is summed, two are arriving and one is going back."""

Wait = Callable[[], None]


class Link(Protocol):
    """The way to the other members, by worker number. What is started in one order on all members is matched in that order."""

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> Wait:
        """Start to send each (worker, bytes) of `out` and to receive those of `into`; what is returned waits for all of them."""
        ...

    def reduces(self, to: Sequence[int]) -> bool:
        """Whether the backend has an all-reduce over exactly these members."""
        ...

    def all_reduce(self, VALUES: Tensor) -> Wait:
        """Start the backend's own sum over all members, in place."""
        ...


class Pool:
    """Scratch on the host, allocated once under each name, grown to the largest request, and shared by all fragments."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, int], Tensor] = {}

    def wire(self, name: str, slot: int, nbytes: int, row: int = 0) -> Tensor:
        """`nbytes` uint8 elements, with whatever was last in them."""
        held = self._held.get((name, slot, row))
        if held is None or held.numel() < nbytes:
            held = self._held[name, slot, row] = torch.empty(nbytes, dtype=torch.uint8)
        return held[:nbytes]

    def values(self, name: str, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of `dtype`."""
        return self.wire(name, slot, numel * dtype.itemsize).view(dtype)


@dataclass(frozen=True)
class Meeting:
    """An exchange whose contributions have been agreed: what this worker posted and how it takes, who counts, and their weights.

    `me` may be missing from `landed.peers`: a contribution that was refused is not sent, but its worker still sums, and gets the mean.
    """

    me: int
    post: Post
    take: Take | None
    landed: Landed
    weights: Mapping[int, float]

    def run(self, link: Link, pool: Pool) -> float:
        """Form the mean and hand it out. Returns its L2 norm."""
        squares = [0.0]

        def deliver(start: int, mean: Tensor) -> None:
            norm = torch.linalg.vector_norm(mean).item()
            squares[0] += norm * norm
            if isinstance(self.post.source, Snapshot):
                self.post.source.write(start, mean)
            elif self.take and self.take.sink:
                self.take.sink(self.landed, start, mean)

        bulk = _Bulk(self, link, pool, deliver)
        fold: Fold = self.post.fold
        if isinstance(fold, Sum) and not link.reduces(self.post.to):
            fold = Reduce(exact())
        match fold:
            case Keep():
                _advance([bulk.kept(*chunk) for chunk in bulk.grid], stages=2)
            case Reduce(result):
                _advance([bulk.reduced(*chunk, result) for chunk in bulk.grid], stages=3)
            case Sum():
                _advance([bulk.summed(*chunk) for chunk in bulk.grid], stages=2)
        return math.sqrt(squares[0])


def _advance(chunks: Sequence[Iterator[None]], stages: int) -> None:
    """Run all chunks to their end, each `WINDOW // (stages - 1)` turns between two stages; a turn ends old chunks before it starts one."""
    lag = WINDOW // (stages - 1)
    for turn in range(len(chunks) + WINDOW):
        for index in range(turn - (stages - 1) * lag, turn + 1, lag):
            if 0 <= index < len(chunks):
                next(chunks[index], None)


@dataclass(frozen=True)
class _Bulk:
    """The chunks of one meeting."""

    meeting: Meeting
    link: Link
    pool: Pool
    deliver: Callable[[int, Tensor], None]

    @property
    def grid(self) -> Iterator[tuple[int, int, int]]:
        """(slot, start, stop) of each chunk."""
        for index, (start, stop) in enumerate(self.meeting.post.source.layout.chunks):
            yield index % WINDOW, start, stop

    def kept(self, slot: int, start: int, stop: int) -> Iterator[None]:
        meeting, post = self.meeting, self.meeting.post
        wire = self._encoded(slot, start, stop)
        others = [worker for worker in post.to if worker != meeting.me]
        size = post.codec.nbytes(stop - start, post.source.layout.dtype.itemsize)
        received = {worker: self.pool.wire("received", slot, size, worker) for worker in others if worker in meeting.landed.peers}
        wait = self.link.swap([] if wire is None else [(worker, wire) for worker in others], list(received.items()))
        yield
        wait()
        if wire is not None:
            received[meeting.me] = wire
        total = self._summed(received, "total", 0, stop - start)
        self.deliver(start, finish(total, self._weights, Keep()))

    def reduced(self, slot: int, start: int, stop: int, result: Codec) -> Iterator[None]:
        meeting, post = self.meeting, self.meeting.post
        item = post.source.layout.dtype.itemsize
        owned = dict(zip(post.to, pieces(start, stop, len(post.to), math.lcm(post.codec.block, result.block)), strict=True))
        first, last = owned[meeting.me]
        wire = self._encoded(slot, start, stop)
        sends = {} if wire is None else {worker: _piece(wire, post.codec, start, owned[worker], item) for worker in post.to}
        size = post.codec.nbytes(last - first, item)
        received = {worker: self.pool.wire("received", slot, size, worker) for worker in meeting.landed.peers if worker != meeting.me}
        wait = self.link.swap([(worker, part) for worker, part in sends.items() if worker != meeting.me], list(received.items()))
        yield
        wait()
        means = self.pool.wire("means", slot, result.nbytes(stop - start, item))
        parts = {worker: _piece(means, result, start, owned[worker], item) for worker in post.to}
        if first < last:
            if wire is not None:
                received[meeting.me] = sends[meeting.me]
            total = self._summed(received, "total", slot, last - first)
            parts[meeting.me].copy_(finish(total, self._weights, Reduce(result)))
        others = [worker for worker in post.to if worker != meeting.me]
        wait = self.link.swap([(worker, parts[meeting.me]) for worker in others], [(worker, parts[worker]) for worker in others])
        yield
        wait()
        wide = self.pool.values("mean", 0, stop - start, post.source.layout.dtype)
        mean = result.decode(means, wide)
        self.deliver(start, mean if mean.dtype == wide.dtype else wide.copy_(mean))

    def summed(self, slot: int, start: int, stop: int) -> Iterator[None]:
        post, dtype = self.meeting.post, self.meeting.post.source.layout.dtype
        total = self.pool.values("total", slot, stop - start, dtype)
        if self.meeting.me in self.meeting.landed.peers:
            values = post.source.read(start, self.pool.values("values", slot, stop - start, dtype))
            torch.mul(values, post.weight, out=total)
        else:
            total.zero_()
        wait = self.link.all_reduce(total)
        yield
        wait()
        self.deliver(start, finish(total, self._weights, Sum()))

    def _encoded(self, slot: int, start: int, stop: int) -> Tensor | None:
        """This worker's wire, or None if its contribution does not count."""
        post = self.meeting.post
        if self.meeting.me not in self.meeting.landed.peers:
            return None
        return encode(post, start, stop, self.pool.values("values", slot, stop - start, post.source.layout.dtype))

    @property
    def _weights(self) -> list[float]:
        return [self.meeting.weights[worker] for worker in self.meeting.landed.peers]

    def _summed(self, wires: Mapping[int, Tensor], name: str, slot: int, numel: int) -> Tensor:
        out, total = self.pool.values(name, slot, numel, self.meeting.post.source.layout.dtype), None
        for worker in self.meeting.landed.peers:
            total = accumulate(total, self.meeting.post.codec, wires[worker], self.meeting.weights[worker], out)
        return out


def _piece(wire: Tensor, codec: Codec, start: int, piece: tuple[int, int], item: int) -> Tensor:
    """The part of a chunk's wire that holds elements [first, last) of the fragment, both at block boundaries or the chunk's end."""
    first, last = (codec.nbytes(element - start, item) for element in piece)
    return wire[first:last]
