"""Gather a few numbers from every worker through the group itself, so that reports need no second way of talking."""

import math
from typing import cast

import torch

from atoll.parts.codecs import exact
from atoll.sync.flow import Flow
from atoll.trees import Layout, Spec, Tree
from atoll.wire import Keep, Key, Landed, Lost, Membership, Post, Snapshot, Take

GATHERING = -1
"""The rule number of gatherings in their keys."""


class Gathering:
    """One gathering of `len(values)` floats per worker; `rows` holds them by worker once the flow has ended.

    Each worker sends a vector that is zero outside its own place, so the mean over M workers holds every value divided
    by M. A value that is not finite travels as a mark of its own, because groups refuse contributions that are not.
    """

    def __init__(self, membership: Membership, count: int, values: list[float]) -> None:
        self._membership = membership
        self._number = count
        self._width = len(values)
        layout = Layout.of(
            [Spec("values", (len(membership.workers), len(values), 2), (2 * len(values), 2, 1), torch.float64)]
        )
        self._tree = Tree(layout)
        mine = membership.workers.index(membership.me)
        for place, value in enumerate(values):
            self._cells[mine, place] = torch.tensor([value, 0.0] if math.isfinite(value) else [0.0, 1.0], dtype=torch.float64)

    @property
    def _cells(self) -> torch.Tensor:
        return self._tree.flat.view(len(self._membership.workers), self._width, 2)

    def flow(self) -> Flow:
        """Send and receive."""
        key = Key(GATHERING, 0, self._number, self._membership.lane)
        yield Post(key, self._membership.workers, Snapshot(self._tree), exact(), {}, Keep(), 1.0, 0.0, {})
        outcome = cast(Landed | Lost, (yield Take(key)))
        return [outcome]

    @property
    def rows(self) -> list[list[float]]:
        """The values of each worker in order of worker numbers; nan where a value was not finite."""
        workers = len(self._membership.workers)
        return [[math.nan if mark else value * workers for value, mark in row] for row in self._cells.tolist()]
