"""Blocks: tokens cut into rows of equal length, and shards that hand them out in an order that can be resumed."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import CheckpointError, DataError


class Shard(Protocol):
    """One worker's data, in endless batches."""

    @property
    def size(self) -> int:
        """Tokens of a pass: the weight of the worker."""
        ...

    @property
    def passes(self) -> int:
        """Passes that are complete."""
        ...

    def next_batch(self) -> Tensor:
        """Tokens int64 [batch, length + 1]: [:, :-1] are inputs, [:, 1:] their targets."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON-able values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises: CheckpointError when it belongs to other data."""
        ...


class Blocks:
    """Domains in a row, cut into blocks of `width` tokens without a copy; the tokens after the last block are unused.

    Args: domains: tokens [tokens] each, of one integer dtype. width: tokens per block.
    """

    def __init__(self, domains: Sequence[Tensor], width: int) -> None:
        self.width = width
        self._domains = domains
        self._ends = np.array(list(accumulate(tokens.numel() for tokens in domains)), dtype=np.int64)
        self.count = sum(tokens.numel() for tokens in domains) // width

    def rows(self, numbers: NDArray[np.int64]) -> Tensor:
        """The blocks of the given numbers: int64 [numbers, width]."""
        starts = numbers * self.width
        # side="right": a block that starts where a domain ends begins in the next one that is not empty.
        domains = np.searchsorted(self._ends, starts, side="right")
        rows = [self._row(start, domain) for start, domain in zip(starts.tolist(), domains.tolist(), strict=True)]
        return torch.stack(rows).long()

    def _row(self, start: int, domain: int) -> Tensor:
        at = start - int(self._ends[domain]) + self._domains[domain].numel()
        row = self._domains[domain][at : at + self.width]
        while row.numel() < self.width:
            domain += 1
            row = torch.cat([row, self._domains[domain][: self.width - row.numel()]])
        return row


class BlockShard:
    """Blocks in random order: each at most once per pass, in an order per pass that (seed, worker, pass) decide.

    The blocks of a pass that do not fill a batch are left out of it; the next pass has another order and so leaves out
    others.

    Args: blocks, numbers: which of them are this worker's. batch: blocks per batch. seed, worker: which orders.
    """

    def __init__(self, blocks: Blocks, numbers: NDArray[np.int64], *, batch: int, seed: int, worker: int) -> None:
        self.size = numbers.size * blocks.width
        self.passes = 0
        self._blocks, self._numbers, self._batch, self._seed, self._worker = blocks, numbers, batch, seed, worker
        self._offset = 0
        self._order = self._shuffled()

    def next_batch(self) -> Tensor:
        """Tokens int64 [batch, length + 1]."""
        numbers = self._order[self._offset : self._offset + self._batch]
        self._go_to(self.passes, self._offset + self._batch)
        return self._blocks.rows(numbers)

    def seek(self, batch: int) -> None:
        """Go to a batch, counted from the first of the first pass."""
        passes, place = divmod(batch, self._numbers.size // self._batch)
        self._go_to(passes, place * self._batch)

    def state_dict(self) -> dict[str, Any]:
        """The position: complete passes, and blocks used of this one; and the size, to tell other data."""
        return {"pass": self.passes, "offset": self._offset, "size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises: CheckpointError when it belongs to other data."""
        if state.get("size") != self.size or not {"pass", "offset"} <= state.keys():
            raise CheckpointError(
                f"the checkpoint's data position belongs to a shard of {state.get('size')} tokens, but worker "
                f"{self._worker} has one of {self.size}; resume with the data, workers and length of the run"
            )
        self._go_to(state["pass"], state["offset"])

    def _go_to(self, passes: int, offset: int) -> None:
        if offset + self._batch > self._numbers.size:
            passes, offset = passes + 1, 0
        if passes != self.passes:
            self.passes = passes
            self._order = self._shuffled()
        self._offset = offset

    def _shuffled(self) -> NDArray[np.int64]:
        return random(self._seed, self._worker, self.passes).permutation(self._numbers)


class _Joint:
    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self._shards)

    @property
    def passes(self) -> int:
        return min(shard.passes for shard in self._shards)

    def next_batch(self) -> Tensor:
        return torch.cat([shard.next_batch() for shard in self._shards])

    def state_dict(self) -> dict[str, Any]:
        return {"shards": [shard.state_dict() for shard in self._shards]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        states: Sequence[Mapping[str, Any]] = state.get("shards", ())
        if len(states) != len(self._shards):
            raise CheckpointError(
                f"the checkpoint's data position is that of {len(states)} joined shards, but here are "
                f"{len(self._shards)}; resume with the workers of the run"
            )
        for shard, part in zip(self._shards, states, strict=True):
            shard.load_state_dict(part)


def joint(shards: Sequence[Shard]) -> Shard:
    """One shard whose batch is those of all given shards, in order: [sum of batches, length + 1].

    A pass is complete when it is for each of them.

    Raises: DataError when no shards are given.
    """
    if not shards:
        raise DataError("no shards were given to join; give at least one")
    return _Joint(shards)


def random(seed: int, *key: int) -> np.random.Generator:
    """A generator of its own for each seed and key."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
