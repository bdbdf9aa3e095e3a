"""The bytes of one exchange that are here: this worker's own, what came from others, and means; which are missing."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_128

from atoll.parts.codecs import exact
from atoll.peers.rounds import accumulate, encode, finish
from atoll.peers.wide.messages import CONTRIBUTION, MEAN, Bulk
from atoll.peers.wide.offers import view
from atoll.peers.wide.segments import Part, Segments
from atoll.wire import Codec, Fold, Keep, Landed, Post, Reduce, Snapshot

WHOLE: Part = ()
"""The part of everyone under `Keep`."""


def taken(payload: bytes | memoryview) -> Tensor:
    """A copy of bytes that came."""
    wire = torch.empty(len(payload), dtype=torch.uint8)
    view(wire)[:] = payload
    return wire


class Pieces:
    """Of worker `me`. Attributes: segments: who adds up what, under `Reduce`; wires: this worker's, by chunk; arrived:
    by part and origin, and chunk; means: by part and chunk."""

    def __init__(self, me: int, post: Post, fold: Fold) -> None:
        self.me, self.post, self.fold = me, post, fold
        self.segments = Segments.of(post.to, post.source.layout, post.codec, self.result)
        self.wires: list[Tensor] = []
        self.arrived: dict[tuple[Part, int], dict[int, Tensor]] = {}
        self.means: dict[Part, dict[int, Tensor]] = {}

    @property
    def result(self) -> Codec:
        return self.fold.result if isinstance(self.fold, Reduce) else exact()

    @property
    def chunks(self) -> Sequence[tuple[int, int]]:
        return self.post.source.layout.chunks

    @property
    def dtype(self) -> torch.dtype:
        return self.post.source.layout.dtype

    def place(self, sender: int, bulk: Bulk, version: int) -> dict[int, Tensor] | None:
        """Where bytes belong that a member may send."""
        if sender == self.me:
            return None
        if bulk.phase == CONTRIBUTION:
            keeps, owner = isinstance(self.fold, Keep), self.segments.owners.get(bulk.part)
            mine = bulk.part == WHOLE if keeps else owner == self.me
            return self.arrived.setdefault((bulk.part, sender), {}) if mine else None
        if bulk.phase == MEAN and isinstance(self.fold, Reduce) and bulk.version == version:
            return self.means.setdefault(bulk.part, {}) if self.segments.owners.get(bulk.part) == sender else None
        return None

    def length(self, bulk: Bulk) -> int:
        """Bytes that a message must have."""
        codec = self.post.codec if bulk.phase == CONTRIBUTION else self.result
        first, last = self.span(bulk.part, bulk.chunk)
        return self.nbytes(codec, bulk.chunk, last) - self.nbytes(codec, bulk.chunk, first)

    def missing(self, hears: Sequence[int]) -> list[tuple[int, int, Part, list[int]]]:
        """(from whom, phase, part, chunks) of what has not come."""
        found: list[tuple[int, int, Part, list[int]]] = []

        def add(origin: int, phase: int, part: Part, held: Mapping[int, Tensor]) -> None:
            if chunks := [chunk for chunk in self.filled(part) if chunk not in held]:
                found.append((origin, phase, part, chunks))

        keeps = isinstance(self.fold, Keep)
        for part, owner in {WHOLE: self.me}.items() if keeps else self.segments.owners.items():
            if owner != self.me:
                add(owner, MEAN, part, self.means.get(part, {}))
                continue
            for worker in hears:
                if worker != self.me:
                    add(worker, CONTRIBUTION, part, self.arrived.get((part, worker), {}))
        return found

    def filled(self, part: Part) -> list[int]:
        """The chunks of which a part holds any elements."""
        spans = ((chunk, self.span(part, chunk)) for chunk in range(len(self.chunks)))
        return [chunk for chunk, (first, last) in spans if first < last]

    def landing(self, chunk: int, hears: Sequence[int]) -> list[Tensor]:
        """The bytes that the mean of a chunk is made of, in order."""
        if isinstance(self.fold, Reduce):
            return [self.means[part][chunk] for part, _, _ in self.segments.whole(chunk)]
        return [self.wires[chunk] if worker == self.me else self.arrived[WHOLE, worker][chunk] for worker in hears]

    def span(self, part: Part, chunk: int) -> tuple[int, int]:
        return self.chunks[chunk] if part == WHOLE else self.segments.span(part, chunk)

    def nbytes(self, codec: Codec, chunk: int, element: int) -> int:
        return codec.nbytes(element - self.chunks[chunk][0], self.dtype.itemsize)

    def cut(self, wire: Tensor, codec: Codec, chunk: int, first: int, last: int) -> Tensor:
        return wire[self.nbytes(codec, chunk, first) : self.nbytes(codec, chunk, last)]

    def here(self, chunk: int, hears: Sequence[int]) -> bool:
        """Whether all that the mean of a chunk is made of is here."""
        if isinstance(self.fold, Reduce):
            return all(chunk in self.means.get(part, {}) for part, _, _ in self.segments.whole(chunk))
        return self._have(hears, WHOLE, chunk)

    def summable(self, peers: Sequence[int], part: Part, chunk: int) -> bool:
        """Whether all that is added up in a part of a chunk is here, if it holds any elements."""
        first, last = self.span(part, chunk)
        return first < last and self._have(peers, part, chunk)

    def _have(self, origins: Sequence[int], part: Part, chunk: int) -> bool:
        return all(
            chunk < len(self.wires) if worker == self.me else chunk in self.arrived.get((part, worker), {})
            for worker in origins
        )

    def digest(self, chunk: int, hears: Sequence[int]) -> bytes:
        """Of the bytes that the mean of a chunk is made of: it shows mistakes, not who means to differ."""
        hashed = xxh3_128()
        for wire in self.landing(chunk, hears):
            hashed.update(view(wire))
        return hashed.digest()

    def encode(self, start: int, stop: int, scratch: Tensor) -> None:
        """The wire of the next chunk: it stays as it is until the exchange is over."""
        wire = encode(self.post, start, stop, scratch)
        inside = wire.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
        self.wires.append(wire.clone() if inside or not isinstance(self.post.source, Snapshot) else wire)

    def add(self, verdict: Landed, part: Part, chunk: int) -> Tensor:
        """The mean of a part of a chunk, summed in worker order."""
        first, last = self.span(part, chunk)
        out, total = torch.empty(last - first, dtype=self.dtype), None
        for worker, weight in zip(verdict.peers, verdict.weights, strict=True):
            wire = (
                self.cut(self.wires[chunk], self.post.codec, chunk, first, last)
                if worker == self.me
                else self.arrived[part, worker][chunk]
            )
            total = accumulate(total, self.post.codec, wire, weight, out)
        return finish(out, verdict.weights, self.fold)

    def mean(self, landed: Landed, chunk: int, out: Tensor) -> Tensor:
        """The mean of a chunk, in `out`."""
        wires = self.landing(chunk, landed.peers)
        if isinstance(self.fold, Reduce):
            values = self.result.decode(torch.cat(wires), out)
            return values if values.dtype == out.dtype else out.copy_(values)
        total = None
        for wire, weight in zip(wires, landed.weights, strict=True):
            total = accumulate(total, self.post.codec, wire, weight, out)
        return finish(out, landed.weights, Keep())
