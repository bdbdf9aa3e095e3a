"""Some of the values, as chance or their neighbours decide."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.blocks import Blockwise, check_block, pack, packed_size, unpack
from atoll.parts.codecs.nested import check_then, read_kept
from atoll.parts.codecs.plain import exact
from atoll.trees import CHUNK
from atoll.wire import Codec


@dataclass(frozen=True)
class random_mask(Blockwise):
    """The same random elements on all workers, written by `then`; the others come back as 0, and no positions are sent.

    Of n elements (of each chunk of a fragment) max(1, round(fraction n)), drawn anew each round: those with the
    smallest hashes of (seed, round, position), by the finaliser of splitmix64, which is a bijection, so that there are
    no ties, and all in integers, so that all machines agree. SPARTA averages 0.05 to 0.5 % of the parameters so in
    every step; its own mask has a random size.

    A value that is not finite, and not among those sent, makes the first of them NaN: the contribution is refused.

    Args: fraction: in (0, 1]. seed: any int, the same on all workers. round: set by `at`.

    Example:
        >>> int(random_mask(0.25, seed=7).at(3).mask(1000).sum())
        250
    """

    fraction: float
    seed: int
    then: Codec = exact()
    round: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise CompositionError(
                f"{self!r} sends the part {self.fraction} of the elements, but a part lies in (0, 1]; give one of these"
            )
        check_then(self, self.then, 0)

    @property
    def block(self) -> int:
        """All that is encoded at once."""
        return CHUNK

    def at(self, round: int) -> "random_mask":
        """Draw for that round."""
        return replace(self, then=self.then.at(round), round=round)

    def mask(self, numel: int) -> Tensor:
        """Which of a chunk's `numel` elements are sent, as bool."""
        return torch.zeros(numel, dtype=torch.bool).index_fill_(0, self._positions(numel), True)

    def size(self, numel: int, itemsize: int) -> int:
        """The values alone."""
        return self.then.nbytes(self._kept(numel), itemsize)

    def write(self, rows: Tensor, WIRE: Tensor) -> None:
        """Collect."""
        kept = rows.index_select(1, self._positions(rows.shape[1]))
        # The sum is cheap, and not finite if a value is not; the other way round it may only have overflowed.
        if not rows.sum().isfinite() and not rows.isfinite().all():
            kept[:, 0] = torch.nan
        WIRE.copy_(self.then.encode(kept.view(-1), {}).view(len(rows), -1))

    def read(self, wire: Tensor, OUT: Tensor) -> None:
        """Put them into zeros."""
        positions = self._positions(OUT.shape[1])
        values = read_kept(self.then, wire, len(positions), OUT)
        OUT.zero_().index_copy_(1, positions, values.view(len(OUT), -1))

    def _kept(self, numel: int) -> int:
        return max(1, round(self.fraction * numel))

    def _positions(self, numel: int) -> Tensor:
        return _drawn(self.seed, self.round, numel, self._kept(numel))


@lru_cache(maxsize=2)  # the whole chunks of a round, and the last one
def _drawn(seed: int, round: int, numel: int, count: int) -> Tensor:
    stream = _mixed(_mixed(torch.tensor([seed])).add_(round))
    hashes = _mixed(torch.arange(numel).add_(stream))
    return hashes.topk(count, largest=False, sorted=False).indices.sort().values


def _mixed(NUMBERS: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose right shift must be told to bring in zeros; products wrap."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        _xor_shifted(NUMBERS, shift).mul_(factor - (1 << 64))
    return _xor_shifted(NUMBERS, 31)


def _xor_shifted(NUMBERS: Tensor, shift: int) -> Tensor:
    return NUMBERS.bitwise_xor_((NUMBERS >> shift).bitwise_and_((1 << (64 - shift)) - 1))


@dataclass(frozen=True)
class prune_by_sign(Blockwise):
    """Drops `fraction` of each neuron, first what points against the neuron's majority.

    In each run of `neuron` elements the sign with the larger total magnitude is elected (+ if they are equal); those of
    the other sign bit are dropped first, the smallest magnitude first, then the others, the smallest first, until
    max(1, n - round(fraction n)) of n are left. The dropped come back as 0. On the wire, per neuron: a bitmap, the
    first element in the lowest bit, then what is left by `then`.

    DiLoCo (table 6) prunes deltas by sign and neuron, after TIES-merging, but does not say how: order, ties and what a
    neuron is are ours. A codec sees runs, not matrices, so a neuron is a run of elements.

    Args: fraction: in [0, 1). neuron: a power of two up to 4096. then: its blocks must fill what is left of a neuron.

    Example:
        >>> values, prune = torch.tensor([1.0, -3.0, 0.5, 2.0]), prune_by_sign(0.5, neuron=4)
        >>> prune.decode(prune.encode(values, {}), like=values)
        tensor([1., 0., 0., 2.])
    """

    fraction: float
    neuron: int = 64
    then: Codec = exact()

    def __post_init__(self) -> None:
        check_block(self, self.neuron)
        if not 0 <= self.fraction < 1:
            raise CompositionError(
                f"{self!r} drops the part {self.fraction} of each neuron, but something must be left; give a fraction "
                "in [0, 1)"
            )
        check_then(self, self.then, self._kept(self.neuron))

    @property
    def block(self) -> int:
        """A neuron."""
        return self.neuron

    def at(self, round: int) -> "prune_by_sign":
        """With `then` of that round."""
        return replace(self, then=self.then.at(round))

    def size(self, numel: int, itemsize: int) -> int:
        """Bitmap and values."""
        return packed_size(numel, 1) + self.then.nbytes(self._kept(numel), itemsize)

    def write(self, rows: Tensor, WIRE: Tensor) -> None:
        """Search by integers: where + is elected, the values' bits are in the order in which they are to be kept, and
        with their sign bits turned where - is."""
        word = torch.int32 if rows.itemsize == 4 else torch.int64
        limits = torch.iinfo(word)
        total = rows.sum(1, keepdim=True)
        keys = rows.view(word).bitwise_xor((total < 0).to(word).mul_(limits.min))
        if not total.isfinite().all():
            keys.masked_fill_(rows.isfinite().logical_not_(), limits.max)
        kept = keys.topk(self._kept(rows.shape[1]), 1, sorted=False).indices
        mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, kept, True)
        head = packed_size(rows.shape[1], 1)
        WIRE[:, head:] = self.then.encode(rows[mask], {}).view(len(rows), -1)
        WIRE[:, :head] = pack(mask.view(torch.uint8), 1)

    def read(self, wire: Tensor, OUT: Tensor) -> None:
        """Put them into zeros."""
        numel = OUT.shape[1]
        head = packed_size(numel, 1)
        mask = unpack(wire[:, :head], 1, numel).to(torch.bool)
        OUT.zero_().masked_scatter_(mask, read_kept(self.then, wire[:, head:], self._kept(numel), OUT))

    def _kept(self, numel: int) -> int:
        return max(1, numel - round(self.fraction * numel))
