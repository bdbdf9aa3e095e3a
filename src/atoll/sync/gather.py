"""Gather a few numbers from every worker through the group itself, so that reports need no second way of talking."""

import struct
from typing import cast

import torch

from atoll.parts.codecs import exact
from atoll.sync.flow import Flow
from atoll.trees import Layout, Spec, Tree
from atoll.wire import Keep, Key, Landed, Lost, Membership, Post, Snapshot, Take

GATHERING = -1
"""The rule number of gatherings in their keys."""
BALLAST = 256.0
"""Sent beside the bytes of each value, so that no contribution is larger than another by enough to be refused."""
CELLS = 9
"""Numbers sent for each value: its eight bytes and the ballast."""


class Gathering:
    """One gathering of `len(values)` floats per worker; `rows` holds them by worker once the flow has ended.

    Each worker sends a vector that is zero outside its own place, so the mean over M workers holds everything divided
    by M. A value travels as its bytes, each a whole number of 0 to 255 times M: the division is exact for any M, no
    value (nan, inf, a large one beside small ones) is refused by the group, and all come back to the bit.
    """

    def __init__(self, membership: Membership, count: int, values: list[float]) -> None:
        self._membership = membership
        self._number = count
        self._width = len(values)
        shape, stride = (len(membership.workers), CELLS * len(values)), (CELLS * len(values), 1)
        self._tree = Tree(Layout.of([Spec("values", shape, stride, torch.float64)]))
        mine = [cell for value in values for cell in (*struct.pack("<d", value), BALLAST)]
        index = membership.workers.index(membership.me)
        self._cells[index] = torch.tensor(mine, dtype=torch.float64) * len(membership.workers)

    @property
    def _cells(self) -> torch.Tensor:
        return self._tree.flat.view(len(self._membership.workers), CELLS * self._width)

    def flow(self) -> Flow:
        """Send and receive."""
        key = Key(GATHERING, 0, self._number, self._membership.lane)
        yield Post(key, self._membership.workers, Snapshot(self._tree), exact(), {}, Keep(), 1.0, 0.0, {})
        outcome = cast(Landed | Lost, (yield Take(key)))
        return [outcome]

    @property
    def rows(self) -> list[list[float]]:
        """The values of each worker in order of worker numbers."""
        return [
            [struct.unpack("<d", bytes(map(int, row[at : at + 8])))[0] for at in range(0, len(row), CELLS)]
            for row in self._cells.tolist()
        ]


class GatheringBytes:
    """One gathering of `len(mine)` bytes per worker, equally many on all; `rows` holds them once the flow has ended.

    They travel as fp32: zero but for a worker's own row, which holds each byte times M, so that the mean is exact.
    """

    def __init__(self, membership: Membership, count: int, mine: torch.Tensor) -> None:
        self._membership = membership
        self._number = count
        shape = (len(membership.workers), mine.numel())
        self._tree = Tree(Layout.of([Spec("bytes", shape, (mine.numel(), 1), torch.float32)]))
        self._cells = self._tree.flat.view(shape)
        self._cells[membership.workers.index(membership.me)] = mine.float() * len(membership.workers)

    def flow(self) -> Flow:
        """Send and receive."""
        key = Key(GATHERING, 1, self._number, self._membership.lane)
        yield Post(key, self._membership.workers, Snapshot(self._tree), exact(), {}, Keep(), 1.0, 0.0, {})
        outcome = cast(Landed | Lost, (yield Take(key)))
        return [outcome]

    @property
    def rows(self) -> list[torch.Tensor]:
        """The bytes of each worker in order of worker numbers."""
        return list(self._cells.to(torch.uint8))
