"""Gather a little from every worker through the group itself, so that reports need no second way of talking."""

import struct
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.sync.flow import Flow
from atoll.trees import Layout, Spec, Tree
from atoll.wire import Keep, Key, Landed, Lost, Membership, Post, Snapshot, Take

GATHERING = -1
"""The rule number of gatherings in their keys."""
BALLAST = 256.0
"""Sent beside each byte, so that no contribution is larger than another by enough to be refused."""


class GatheringBytes:
    """One gathering of `len(mine)` bytes per worker, equally many on all; `rows` holds them by worker once the flow has
    ended.

    Each worker sends a vector that is zero outside of its own row, so the mean over M workers holds everything divided
    by M. A byte travels as a whole number of 0 to 255 times M, which fp32 holds for up to 65,000 workers, and so the
    division is exact.

    Args: kind, number: what the gathering is called; alike on all, and no other is called so.
    """

    def __init__(self, membership: Membership, kind: int, number: int, mine: Tensor) -> None:
        self._membership, self._kind, self._number = membership, kind, number
        count = len(membership.workers)
        shape, stride = (count, 2, mine.numel()), (2 * mine.numel(), mine.numel(), 1)
        self._tree = Tree(Layout.of([Spec("bytes", shape, stride, torch.float32)]))
        self._cells = self._tree.flat.view(shape)
        index = membership.workers.index(membership.me)
        self._cells[index, 0] = mine.float() * count
        self._cells[index, 1] = BALLAST * count

    def flow(self) -> Flow:
        """Send and receive."""
        key = Key(GATHERING, self._kind, self._number, self._membership.lane)
        yield Post(key, self._membership.workers, Snapshot(self._tree), exact(), {}, Keep(), 1.0, 0.0, {})
        outcome = cast(Landed | Lost, (yield Take(key)))
        return [outcome]

    @property
    def rows(self) -> list[Tensor]:
        """The bytes of each worker in order of worker numbers."""
        return list(self._cells[:, 0].to(torch.uint8))


class Gathering(GatheringBytes):
    """The same for `len(values)` floats per worker, to the bit: nan and inf too, and a large one beside small ones."""

    def __init__(self, membership: Membership, number: int, values: Sequence[float]) -> None:
        packed = struct.pack(f"<{len(values)}d", *values)
        super().__init__(membership, 0, number, torch.frombuffer(bytearray(packed), dtype=torch.uint8))

    @property
    def values(self) -> list[list[float]]:
        """The values of each worker in order of worker numbers."""
        return [list(struct.unpack(f"<{len(row) // 8}d", bytes(row.tolist()))) for row in self.rows]
