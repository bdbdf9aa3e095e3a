"""The bulk of an exchange over a network: encode, send, receive, decode and sum, with a few chunks in flight.

Every chunk is a generator that stops where it would wait for the link. `WINDOW` of them are under way at a time and
advance in one fixed order, the same on all members, so that messages between two of them match by their order alone:

    Keep      encode, tell those who hear this one, hear one's own     | sum, deliver
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
    """The way to the other members, by worker number. All members start the same messages in the same order."""

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> Wait:
        """Start to send each (worker, bytes) of `out` and to receive those of `into`; the result waits for all."""
        ...

    def reduces(self, to: Sequence[int]) -> bool:
        """Whether the backend has an all-reduce over exactly these members."""
        ...

    def all_reduce(self, VALUES: Tensor) -> Wait:
        """Start the backend's own sum over all members, in place."""
        ...


class Pool:
    """Scratch on the host: allocated once under each name, grown to the largest request, shared by all fragments."""

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
    """An exchange whose contributions have been agreed: what this worker posted and how it takes, and who counts.

    `landed` is the round as this worker hears it. `me` may be missing from its peers: a contribution that was refused
    is not sent, but its worker still sums its share, and gets the mean. Where nothing that it hears weighs anything, it
    sends and gets nothing.
    """

    me: int
    post: Post
    take: Take | None
    landed: Landed

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
    """Run all chunks to their end, each resting `WINDOW // (stages - 1)` turns between two stages.

    A turn ends old chunks before it starts a new one, which then takes over the scratch of one that has ended.
    """
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
        wire = self._encoded(slot, start, stop)
        received = self._buffers(slot, stop - start)
        edges, weights = self.meeting.post.edges, self.meeting.landed.weights
        told = self.others if edges is None else edges.tells
        wait = self.link.swap([] if wire is None else [(worker, wire) for worker in told], [*received.items()])
        yield
        wait()
        if wire is not None:
            received[self.meeting.me] = wire
        if sum(weights) > 0:
            self.deliver(start, finish(self._sum(received, stop - start), weights, Keep()))

    def reduced(self, slot: int, start: int, stop: int, result: Codec) -> Iterator[None]:
        me, to, codec = self.meeting.me, self.meeting.post.to, self.meeting.post.codec
        owned = dict(zip(to, pieces(start, stop, len(to), math.lcm(codec.block, result.block)), strict=True))
        wire = self._encoded(slot, start, stop)
        sent = {} if wire is None else {worker: self._piece(wire, codec, start, owned[worker]) for worker in to}
        first, last = owned[me]
        received = self._buffers(slot, last - first)
        wait = self.link.swap([(worker, sent[worker]) for worker in self.others if sent], [*received.items()])
        yield
        wait()
        means = self.pool.wire("means", slot, result.nbytes(stop - start, self.dtype.itemsize))
        parts = {worker: self._piece(means, result, start, owned[worker]) for worker in to}
        if first < last:
            if sent:
                received[me] = sent[me]
            mean = finish(self._sum(received, last - first), self.meeting.landed.weights, Reduce(result))
            parts[me].copy_(mean)
        wait = self.link.swap(
            [(worker, parts[me]) for worker in self.others], [(worker, parts[worker]) for worker in self.others]
        )
        yield
        wait()
        wide = self.pool.values("mean", 0, stop - start, self.dtype)
        values = result.decode(means, wide)
        self.deliver(start, values if values.dtype == wide.dtype else wide.copy_(values))

    def summed(self, slot: int, start: int, stop: int) -> Iterator[None]:
        me, landed = self.meeting.me, self.meeting.landed
        total, wire = self.pool.values("total", slot, stop - start, self.dtype), self._encoded(slot, start, stop)
        if wire is None:
            total.zero_()
        else:
            torch.mul(self.meeting.post.codec.decode(wire, total), landed.weights[landed.peers.index(me)], out=total)
        wait = self.link.all_reduce(total)
        yield
        wait()
        self.deliver(start, finish(total, landed.weights, Sum()))

    @property
    def others(self) -> list[int]:
        """The members without this one."""
        return [worker for worker in self.meeting.post.to if worker != self.meeting.me]

    @property
    def dtype(self) -> torch.dtype:
        """In which sums are formed."""
        return self.meeting.post.source.layout.dtype

    def _encoded(self, slot: int, start: int, stop: int) -> Tensor | None:
        """This worker's wire, or None if its contribution does not count."""
        if self.meeting.me not in self.meeting.landed.peers:
            return None
        return encode(self.meeting.post, start, stop, self.pool.values("values", slot, stop - start, self.dtype))

    def _buffers(self, slot: int, numel: int) -> dict[int, Tensor]:
        """Where the wires of `numel` elements arrive, by the other workers whose contributions count."""
        size = self.meeting.post.codec.nbytes(numel, self.dtype.itemsize)
        senders = [worker for worker in self.others if worker in self.meeting.landed.peers]
        return {worker: self.pool.wire("received", slot, size, worker) for worker in senders}

    def _sum(self, wires: Mapping[int, Tensor], numel: int) -> Tensor:
        """The weighted sum of what counts, in worker order."""
        out, total = self.pool.values("total", 0, numel, self.dtype), None
        for worker, weight in zip(self.meeting.landed.peers, self.meeting.landed.weights, strict=True):
            total = accumulate(total, self.meeting.post.codec, wires[worker], weight, out)
        return out

    def _piece(self, wire: Tensor, codec: Codec, start: int, piece: tuple[int, int]) -> Tensor:
        """The part of a chunk's wire that holds elements [first, last) of the fragment, cut at block boundaries."""
        first, last = (codec.nbytes(element - start, self.dtype.itemsize) for element in piece)
        return wire[first:last]
