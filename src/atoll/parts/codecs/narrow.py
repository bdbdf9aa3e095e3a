"""Floats of four bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.parts.codecs.blocks import Blockwise, aligned, check_block, divisor, pack, packed_size, scale_of, unpack

LEVELS = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])
HEADER = 4
"""Bytes of a scale."""


@dataclass(frozen=True)
class float4(Blockwise):
    """E3M0, one sign and three exponent bits per value: with s = max|x| of each block (fp32), x becomes the nearest of
    0 and +-s 2^(c-7), c = 1..7.

    |error| <= max(|x|/3, s 2^-7), to rounding. Nearest in value: x/s, rounded to fp32, goes up from the midpoints
    0.75 2^k on, and from half of the lowest level 2^-6; a block whose s is below 2^-118 becomes zeros. On the wire: s,
    then a nibble per value, sign above c, the first of two in the lower half of a byte.

    Streaming DiLoCo (section 3.3) sends deltas so and sums them in fp32; how they are scaled, whether one code is zero
    and how they are rounded is not said there.

    Args: block: elements that share a scale, a power of two up to 4096.

    Example:
        >>> values = torch.tensor([1.0, -0.6, 0.3, 0.001])
        >>> float4().decode(float4().encode(values, {}), like=values)
        tensor([ 1.0000, -0.5000,  0.2500,  0.0000])
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self, self.block)

    def size(self, numel: int, itemsize: int) -> int:
        """A scale, and half a byte per element."""
        return HEADER + packed_size(numel, 4)

    def write(self, rows: Tensor, WIRE: Tensor) -> None:
        """By integers: the exponent of 1.5 x is that of the level above a midpoint."""
        scale = scale_of(rows)
        bits = rows.div(divisor(scale)).float().view(torch.int32)
        # Sign, exponent and seven bits of fraction: all that the bounds between the levels depend on.
        upper = bits.bitwise_right_shift_(16).to(torch.int16)
        size = (upper & 0x7FFF).sub_(0x3C00)  # 0x3C00 is 2^-7, half of the lowest level
        sign = upper.bitwise_right_shift_(12).bitwise_and_(8)
        reached = (size >> 15).add_(1)
        # Half a fraction more carries into the exponent from the midpoint on.
        codes = size.add_(0x40).bitwise_right_shift_(7)
        torch.maximum(codes, reached, out=codes)
        WIRE[:, :HEADER] = scale.view(torch.uint8)
        WIRE[:, HEADER:] = pack(codes.bitwise_or_(sign).to(torch.uint8), 4)

    def read(self, wire: Tensor, OUT: Tensor) -> None:
        """The level by its code, times the scale."""
        scale = aligned(wire[:, :HEADER]).view(torch.float32)
        codes = unpack(wire[:, HEADER:], 4, OUT.shape[1]).to(torch.int32)
        levels = torch.cat([LEVELS, -LEVELS]).to(OUT.dtype)
        torch.index_select(levels, 0, codes.view(-1), out=OUT.view(-1))
        OUT.mul_(scale)
