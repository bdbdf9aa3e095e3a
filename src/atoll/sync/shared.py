"""The shared model: what is evaluated, exported and digested."""

from typing import cast

from atoll.parts.codecs import exact
from atoll.sync.flow import Flow
from atoll.sync.sources import AnchorSource, snapshot
from atoll.sync.state import SyncState
from atoll.trees import Tree
from atoll.wire import Key, Landed, Lost, Post, Reduce, Take

SHARING = -2
"""The rule number of these exchanges in their keys."""


class Sharing:
    """The anchors of the shared model; `anchors` holds them, by fragment, once the flow has ended.

    Where the strategy agrees they are this worker's own. Where each worker has its own (gossip, eager) they are the
    mean over all who are `among` it, and they must come for it. With a keeper they are what it last answered.

    Args: state: this worker's. number: alike on all, another for each sharing. among: all workers if None.
    """

    def __init__(self, state: SyncState, number: int, among: tuple[int, ...] | None = None) -> None:
        self._state, self._number = state, number
        self._among = among or state.membership.workers
        self.anchors = state.anchors()

    def flow(self) -> Flow:
        """Nothing where all hold the same, else one exchange for each fragment."""
        state, lane = self._state, self._state.membership.lane
        if state.strategy.agrees or state.strategy.kept or len(self._among) == 1:
            return []
        posted: list[tuple[int, Key, Tree]] = []
        for index, fragment in enumerate(state.fragments):
            if fragment.anchor:
                copy = snapshot(AnchorSource(fragment.anchor), fragment.live)
                key = Key(SHARING, index, self._number, lane)
                yield Post(key, self._among, copy, exact(), {}, Reduce(exact()), 1.0, 0.0, {})
                posted.append((index, key, copy.tree))
        for index, key, tree in posted:
            cast(Landed | Lost, (yield Take(key)))
            self.anchors[index] = tree
        return []
