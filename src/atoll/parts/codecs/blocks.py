"""What codecs that write block after block have in common: each block of a run becomes a row of bytes.

Numbers on the wire are little-endian, as on every machine that torch is built for.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.stateless import Stateless
from atoll.trees import State

LARGEST = 4096
"""Elements of the largest block that is chosen freely."""


class Blocks(Protocol):
    """A codec that is told by what it makes of rows, each of them a block."""

    @property
    def block(self) -> int: ...

    def size(self, numel: int, itemsize: int) -> int:
        """Bytes of one block of `numel` elements."""
        ...

    def write(self, rows: Tensor, WIRE: Tensor) -> None:
        """Encode (blocks, elements) into (blocks, bytes)."""
        ...

    def read(self, wire: Tensor, OUT: Tensor) -> None:
        """Decode (blocks, bytes) into (blocks, elements)."""
        ...

    def nbytes(self, numel: int, itemsize: int) -> int: ...


class Blockwise(Stateless):
    """The rest of such a codec. A last block that is shorter is a row by itself."""

    def encode(self: Blocks, values: Tensor, STATE: State) -> Tensor:
        """Block after block."""
        wire = torch.empty(self.nbytes(len(values), values.itemsize), dtype=torch.uint8)
        for rows, written in _paired(self, values, wire):
            self.write(rows, written)
        return wire

    def decode(self: Blocks, wire: Tensor, like: Tensor) -> Tensor:
        """As many values as `like` has, in its dtype."""
        values = torch.empty_like(like)
        for rows, written in _paired(self, values, wire):
            self.read(written, rows)
        return values

    def nbytes(self: Blocks, numel: int, itemsize: int) -> int:
        """Those of the whole blocks, and of what is left."""
        blocks, rest = divmod(numel, self.block)
        return blocks * self.size(self.block, itemsize) + (self.size(rest, itemsize) if rest else 0)


def _paired(codec: Blocks, values: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    blocks = len(values) // codec.block
    whole = blocks * codec.block
    end = blocks * codec.size(codec.block, values.itemsize)
    if whole:
        yield values[:whole].view(blocks, -1), wire[:end].view(blocks, -1)
    if whole < len(values):
        yield values[whole:].view(1, -1), wire[end:].view(1, -1)


def check_block(what: object, block: int) -> None:
    """Refuse a block that chunks could not be cut into."""
    if block not in {1 << power for power in range(LARGEST.bit_length())}:
        raise CompositionError(
            f"{what!r} has blocks of {block} elements, but the chunks of a fragment are cut into powers of two; give "
            f"1, 2, 4, ... or {LARGEST}"
        )


def aligned(part: Tensor) -> Tensor:
    """A part of each row in memory of its own, one after the other: from there bytes can be seen as numbers."""
    return part.clone(memory_format=torch.contiguous_format)


LEAST = 2.0**-118
"""The least scale in use: the reciprocal of a lower one, 127 times over, could leave the range of fp32."""


def scale_of(rows: Tensor) -> Tensor:
    """max|x| of each row in fp32, as a column; 0 where it lies below `LEAST`, NaN where a value is NaN."""
    scale = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()).float()
    return scale.masked_fill_(scale < LEAST, 0)


def divisor(scale: Tensor) -> Tensor:
    """The scale, and 1 where it is 0."""
    return scale.masked_fill(scale == 0, 1)


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits."""
    return -(-count * bits // 8)


WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""The integer that holds, in a byte each, the codes of a packed byte."""


def pack(CODES: Tensor, bits: int) -> Tensor:
    """Rows of codes, in uint8 each, as rows of bytes; the first code of a byte lies in its lowest bits.

    Args: bits: 8, 4, 2 or 1. A row is filled up to a whole byte with zeros.
    """
    if bits == 8:
        return CODES
    missing = -CODES.shape[1] % (8 // bits)
    filled = torch.nn.functional.pad(CODES, (0, missing)) if missing else CODES
    words, shift = filled.view(WORDS[bits]), 8 - bits
    # Neighbours are joined to pairs, these to fours, these to eights: the lowest byte of the word ends up with all.
    while shift < 8 * words.itemsize // 2:
        words.bitwise_or_(words >> shift)
        shift *= 2
    return words.to(torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row, in uint8 each."""
    if bits == 8:
        return packed
    words = packed.to(WORDS[bits])
    lanes, shift = 8 // bits, (8 - bits) * (8 // bits) // 2
    while lanes > 1:
        # A word of eights is spread to fours, these to pairs, these to single codes.
        lanes //= 2
        mask = sum(((1 << (bits * lanes)) - 1) << at for at in range(0, 8 * words.itemsize, 8 * lanes))
        words.bitwise_or_(words << shift).bitwise_and_(mask)
        shift //= 2
    return words.view(torch.uint8)[:, :count]


def pack_indices(indices: Tensor, bits: int) -> Tensor:
    """Rows of numbers below 2^bits as rows of bytes: one string of bits per row, lowest first."""
    digits = (indices.unsqueeze(-1) >> torch.arange(bits)).bitwise_and_(1).to(torch.uint8)
    return pack(digits.view(len(indices), -1), 1)


def unpack_indices(packed: Tensor, bits: int, count: int) -> Tensor:
    """`count` numbers of each row, in int64."""
    digits = unpack(packed, 1, count * bits).reshape(len(packed), count, bits)
    return (digits.to(torch.int64) << torch.arange(bits)).sum(-1)
