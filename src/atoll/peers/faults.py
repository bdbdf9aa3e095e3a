"""Faults on purpose, drawn from a seed, so that a run with them can be repeated."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from atoll.errors import UsageError
from atoll.faults import Faults
from atoll.peers.rounds import encode
from atoll.trees import CHUNK, cut
from atoll.wire import Key, Post


@dataclass(frozen=True)
class Dropping:
    """Each message of a rule is lost with `probability`, independently of the others (DiLoCo, section 1.3).

    A worker that is not heard keeps its own parameters; a pair of which one is not heard does not meet.
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise UsageError(
                f"messages were to be dropped with probability {self.probability}, but some must arrive; give a "
                "probability from 0 up to, but not including, 1"
            )

    def __call__(self, key: Key, workers: Collection[int]) -> frozenset[int]:
        """Whose message of this exchange is lost. What is not a rule's (reports, evaluation) always arrives."""
        return Faults(loss=self.probability, seed=self.seed).lost(key, workers)


def lose(post: Post) -> None:
    """Send a contribution into the void: a codec with a memory puts aside what it held."""
    if not post.codec_state:
        return
    layout = post.source.layout
    scratch = torch.empty(min(CHUNK, layout.numel), dtype=layout.dtype)
    for start, stop in layout.chunks:
        wire = encode(post, start, stop, scratch)
        post.codec.restore(wire, cut(post.codec_state, start, stop))
