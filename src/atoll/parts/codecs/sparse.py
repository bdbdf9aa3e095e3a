"""The largest values only."""

from dataclasses import dataclass, replace

from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.blocks import Blockwise, check_block, pack_indices, packed_size, unpack_indices
from atoll.parts.codecs.nested import check_then, read_kept
from atoll.parts.codecs.plain import exact
from atoll.wire import Codec

GROUP = 8
"""Elements of a group in the search for the largest."""


@dataclass(frozen=True)
class topk(Blockwise):
    """The k largest |x| of each chunk, written by `then`; the others come back as 0.

    Every |x| left out is at most the smallest |x| kept (which of several equal ones are kept is not promised, but is
    the same each time). On the wire, per chunk: the positions in ascending order at log2(chunk) bits each, then the
    values. SparseLoCo keeps 64 of 4096 and writes them by quantise(2, by=statistical()): with block=64, 128 bytes for
    16384. It takes chunks of 64 by 64 from matrices; here they are runs of elements.

    Args: k: how many (an int), or which part, rounded, one at least (a float in (0, 1]); a last chunk that is shorter
    keeps k too, or all, or the same part. chunk: a power of two from 2 to 4096. then: its blocks must fill a chunk's k.

    Example:
        >>> import torch
        >>> values = torch.tensor([1.0, -3.0, 0.5, 2.0])
        >>> topk(2, chunk=4).decode(topk(2, chunk=4).encode(values, {}), like=values)
        tensor([ 0., -3.,  0.,  2.])
    """

    k: int | float
    chunk: int = 4096
    then: Codec = exact()

    def __post_init__(self) -> None:
        check_block(self, self.chunk)
        if self.chunk == 1:
            raise CompositionError(f"{self!r} keeps each element, and has no position to send; write {self.then!r}")
        if isinstance(self.k, float) and not 0 < self.k <= 1:
            raise CompositionError(
                f"{self!r} keeps the part {self.k} of each chunk, but a part lies in (0, 1]; give one of these, or a "
                "number of elements as an int"
            )
        if isinstance(self.k, int) and not 1 <= self.k <= self.chunk:
            raise CompositionError(
                f"{self!r} keeps {self.k} of each {self.chunk} elements; give a k from 1 to {self.chunk}"
            )
        check_then(self, self.then, self.kept(self.chunk))

    @property
    def block(self) -> int:
        """A chunk."""
        return self.chunk

    def kept(self, numel: int) -> int:
        """How many of `numel` elements."""
        return min(self.k, numel) if isinstance(self.k, int) else max(1, round(self.k * numel))

    def at(self, round: int) -> "topk":
        """With `then` of that round."""
        return replace(self, then=self.then.at(round))

    def size(self, numel: int, itemsize: int) -> int:
        """Positions and values."""
        return self._head(numel) + self.then.nbytes(self.kept(numel), itemsize)

    def write(self, rows: Tensor, WIRE: Tensor) -> None:
        """Search, sort by position, collect."""
        numel = rows.shape[1]
        positions = _largest(rows.abs(), self.kept(numel)).sort(1).values
        head = self._head(numel)
        WIRE[:, :head] = pack_indices(positions, self._bits)
        WIRE[:, head:] = self.then.encode(rows.gather(1, positions).view(-1), {}).view(len(rows), -1)

    def read(self, wire: Tensor, OUT: Tensor) -> None:
        """Put them into zeros."""
        numel = OUT.shape[1]
        count, head = self.kept(numel), self._head(numel)
        positions = unpack_indices(wire[:, :head], self._bits, count)
        values = read_kept(self.then, wire[:, head:], count, OUT)
        OUT.zero_().scatter_(1, positions, values.view(-1, count))

    @property
    def _bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def _head(self, numel: int) -> int:
        return packed_size(self.kept(numel), self._bits)


def _largest(rows: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of each row, in no order.

    Of few, in two steps: the `count` groups with the largest maxima hold them all, for any other element has as many
    maxima before it.
    """
    numel = rows.shape[1]
    if numel % GROUP or 2 * GROUP * count > numel:
        return rows.topk(count, 1, sorted=False).indices
    groups = rows.view(len(rows), GROUP, -1)
    leading = groups.amax(1).topk(count, 1, sorted=False).indices
    candidates = groups.gather(2, leading.unsqueeze(1).expand(-1, GROUP, -1)).view(len(rows), -1)
    best = candidates.topk(count, 1, sorted=False).indices
    return best // count * groups.shape[2] + leading.gather(1, best % count)
