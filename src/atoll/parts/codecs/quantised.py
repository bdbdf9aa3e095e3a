"""Integers of eight, four or two bits."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.blocks import (
    LEAST,
    Blockwise,
    aligned,
    check_block,
    divisor,
    pack,
    packed_size,
    scale_of,
    unpack,
)

FP32 = 4
"""Bytes."""
PIECE = 1 << 15
"""Values that are sorted into buckets at a time."""


class Levels(Protocol):
    """How the values of a block become integers below 2^bits, and these become values."""

    def entries(self, bits: int) -> int:
        """fp32 numbers that are sent with each block."""
        ...

    def codes(self, rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """(blocks, entries) in fp32, and (blocks, elements) in uint8."""
        ...

    def values(self, header: Tensor, codes: Tensor, bits: int, OUT: Tensor) -> None:
        """Both again, as (blocks, elements) in OUT."""
        ...


@dataclass(frozen=True)
class linear:
    """Equal steps from -s to s = max|x|: q = round(x (L / s)), halves to even, L = 2^(bits-1) - 1; decoded q (s / L).

    |error| <= s / (2 L), to rounding, for |x| up to 2^127; a block whose s is below 2^-118 becomes zeros. On the wire:
    s in fp32, then q + L.
    """

    def entries(self, bits: int) -> int:
        """The scale."""
        return 1

    def codes(self, rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """One division per block, and one multiplication per value."""
        scale, top = scale_of(rows), (1 << (bits - 1)) - 1
        factor = (top / scale.to(rows.dtype)).masked_fill_(scale == 0, 0)
        whole = rows.mul(factor).round_().to(torch.int16)
        return scale, whole.to(torch.uint8).add_(top)

    def values(self, header: Tensor, codes: Tensor, bits: int, OUT: Tensor) -> None:
        """One division per block again."""
        top = (1 << (bits - 1)) - 1
        OUT.copy_(codes.sub(top).view(torch.int8)).mul_(header.to(OUT.dtype).div_(top))


@dataclass(frozen=True)
class statistical:
    """n = 2^bits equal buckets over three standard deviations to both sides of the mean; decoded to the mean of the
    values in the bucket.

    With mu and sigma (of the population) of each block and w = 6 sigma / n: bucket = clamp(floor((x - mu) / w + n/2),
    0, n - 1). |error| <= w, to rounding, but in the first and the last bucket, which hold all that lies outside, at
    most w + max(0, max|x - mu| - 3 sigma). A block whose w is below 2^-118 becomes its mean. Magnitudes above 2^115 may
    overflow, which makes the block NaN. On the wire: the n means in fp32 (an empty bucket's centre), then the buckets.

    INTELLECT-1 (int8) and SparseLoCo (2 bit). INTELLECT-1's report says mu +- 6 sigma; the code, and we, have 3. The
    code sends a shift beside the means, which here is part of them.
    """

    def entries(self, bits: int) -> int:
        """The mean of each bucket."""
        return 1 << bits

    def codes(self, rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """In units of w, counted from the mean: near it, where most values are, sums of many are exact enough."""
        n = 1 << bits
        mean = rows.mean(1, keepdim=True)
        apart = rows - mean
        width = _norm(apart).div_(rows.shape[1] ** 0.5).mul_(6 / n)
        width.masked_fill_(width < LEAST, 0)
        apart.div_(divisor(width))
        # At most n/6 sqrt(4096) + n/2 in magnitude, so it fits. Above -1 it is cut off to 0, to which it is clamped
        # anyway; what is not a number becomes some integer.
        codes = apart.add(n / 2).to(torch.int16).clamp_(0, n - 1)
        sums, counts = _bucket_sums(apart, codes, n)
        centres = torch.arange(n, dtype=apart.dtype).sub_(n / 2 - 0.5).expand_as(sums)
        book = torch.where(counts > 0, sums.div_(counts), centres).mul_(width).add_(mean)
        # Whatever is not finite makes the width so, and then all of the block.
        return book.add_(width - width).float(), codes.to(torch.uint8)

    def values(self, header: Tensor, codes: Tensor, bits: int, OUT: Tensor) -> None:
        """Looked up."""
        first = torch.arange(0, header.numel(), 1 << bits, dtype=torch.int32).unsqueeze(1)
        index = codes.to(torch.int32).add_(first)
        torch.index_select(header.to(OUT.dtype).view(-1), 0, index.view(-1), out=OUT.view(-1))


def _bucket_sums(rows: Tensor, codes: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(blocks, n) each: sum and number of the values with each code.

    Few codes are spread over several lanes, or each addition would wait for the one before; and a few rows are done at
    a time, because an index needs eight bytes per value.
    """
    lanes, together = max(1, 64 // n), max(1, PIECE // rows.shape[1])
    spread = torch.arange(rows.shape[1], dtype=torch.int16).remainder_(lanes).mul_(n)
    cells = codes.add(spread) if lanes > 1 else codes
    index, ones = torch.empty_like(cells[:together], dtype=torch.int64), torch.ones_like(rows[:together])
    sums, counts = rows.new_zeros(2, len(rows), lanes * n)
    for first in range(0, len(rows), together):
        part = slice(first, first + together)
        here = index[: len(cells[part])].copy_(cells[part])
        sums[part].scatter_add_(1, here, rows[part])
        counts[part].scatter_add_(1, here, ones)
    return sums.view(-1, lanes, n).sum(1), counts.view(-1, lanes, n).sum(1)


def _norm(rows: Tensor) -> Tensor:
    """L2 norm of each row, as a column: again in fp64 where squares could have left the range of fp32."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if norm.amin().item() > 2**-48 and norm.amax().item() < 2**60:
        return norm
    unsafe = (norm > 2**-48).logical_and_(norm < 2**60).logical_not_()
    return torch.where(unsafe, torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64), norm).to(norm)


@dataclass(frozen=True)
class quantise(Blockwise):
    """Integers of `bits` bits, found and read `by` linear() or statistical(), packed with the first in the lowest bits.

    Args: bits: 8, 4 or 2. block: elements that share a scale or codebook, a power of two up to 4096.

    Example:
        >>> values = torch.tensor([0.0, 1.27, -0.634])
        >>> quantise(8).decode(quantise(8).encode(values, {}), like=values)
        tensor([ 0.0000,  1.2700, -0.6300])
    """

    bits: int
    block: int = 4096
    by: Levels = linear()

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise CompositionError(
                f"{self!r} has codes of {self.bits} bits, but bytes are filled with 8, 4 or 2; give one of these"
            )
        check_block(self, self.block)
        head = FP32 * self.by.entries(self.bits)
        if self.size(self.block, FP32) >= FP32 * self.block:
            raise CompositionError(
                f"{self!r} sends {head} bytes ahead of each block, as much as the values themselves; give a larger "
                "block, or write exact()"
            )

    def size(self, numel: int, itemsize: int) -> int:
        """The header, and the packed codes."""
        return FP32 * self.by.entries(self.bits) + packed_size(numel, self.bits)

    def write(self, rows: Tensor, WIRE: Tensor) -> None:
        """Header and codes."""
        header, codes = self.by.codes(rows, self.bits)
        head = FP32 * self.by.entries(self.bits)
        WIRE[:, :head] = header.view(torch.uint8)
        WIRE[:, head:] = pack(codes, self.bits)

    def read(self, wire: Tensor, OUT: Tensor) -> None:
        """From header and codes."""
        head = FP32 * self.by.entries(self.bits)
        codes = unpack(wire[:, head:], self.bits, OUT.shape[1])
        self.by.values(aligned(wire[:, :head]).view(torch.float32), codes, self.bits, OUT)
