"""The keeper's flow: it holds the anchors for workers that come when they can, and steps when it has heard enough.

    collect    what was handed in joins the open round of its fragment
    close      once `quorum` workers have joined and `grace` ticks have passed since, or all have joined
    step       D_m = anchor - live_m (or the delta that was sent); average; outer step of the anchor
    reply      everyone who joined gets the new anchor, after all rounds that the look closes

One call of `keep` is one look. A push that comes after its round has closed joins the next: nothing is dropped. A
keeper's tick is an inner step of the fastest worker.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError
from atoll.parts.keepers import keeper
from atoll.sync.carry import Carry
from atoll.sync.flow import Flow
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState, Track
from atoll.trees import Tree, cut
from atoll.wire import Collect, Event, Key, Landed, Membership, Push, Reply, absurd


class Arithmetic(Protocol):
    """What closing a round of one fragment comes to, apart from who counts in it."""

    @property
    def anchor(self) -> Tree:
        """What those who joined are answered with."""
        ...

    def norms(self, pushes: Sequence[Push]) -> Sequence[float]:
        """L2 norms of the outer gradients that these pushes stand for."""
        ...

    def step(self, counted: Sequence[Push], landed: Landed) -> None:
        """Move the anchor by those that count; their norms were asked for before."""
        ...

    def tensors(self, place: str) -> Iterator[tuple[str, Tensor]]:
        """What has to be saved of this `place` (a rule and a fragment), by name and by reference."""
        ...


class Anchored:
    """The anchor of a fragment under one rule, and the keeper's outer state. An outer gradient is formed in the memory
    of its push."""

    def __init__(self, track: Track) -> None:
        self.anchor = cast(Tree, track.fragment.anchor)
        self._carry, self._part, self._layout = track.rule.carry, cast(keeper, track.rule.mixer), track.fragment.layout
        self._outer = self._part.outer.init(self._layout)

    def norms(self, pushes: Sequence[Push]) -> list[float]:
        """|D_m|, of anchor - live where live was sent."""
        if self._carry is Carry.LIVE:
            for push in pushes:
                torch.sub(self.anchor.flat, push.values.flat, out=push.values.flat)
        return [torch.linalg.vector_norm(push.values.flat).item() for push in pushes]

    def step(self, counted: Sequence[Push], landed: Landed) -> None:
        """Average, and the outer step, chunk by chunk."""
        weights = [push.weight for push in counted]
        gradient = self._part.average([push.values.flat for push in counted], weights, self._layout)
        for start, stop in self._layout.chunks:
            anchor = self.anchor.flat[start:stop]
            state = cut(self._outer, start, stop)
            anchor.sub_(self._part.outer.update(gradient[start:stop], state, anchor, landed))

    def tensors(self, place: str) -> Iterator[tuple[str, Tensor]]:
        """Anchor and outer state."""
        yield f"anchor.{place}", self.anchor.flat
        for part, tensor in self._outer.items():
            yield f"outer.{place}.{part}", tensor


@dataclass
class Kept:
    """One fragment under one rule: the open round, and how many have counted. Numbers are for `arithmetic`."""

    rule_index: int
    fragment_index: int
    part: keeper
    arithmetic: Arithmetic
    updates: int = 0
    joined: list[Push] = field(default_factory=list[Push])
    ready: int | None = None
    """the tick at which the quorum was reached"""


class Keeping:
    """Everything a keeper holds. Saving and restoring it, with the workers handing in again, resumes bit for bit.

    Args: model: with the values all workers start from; it is not trained. strategy: one that is kept. workers: how
    many there are. arithmetic: of each fragment under each rule.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        workers: int,
        arithmetic: Callable[[Track], Arithmetic] = Anchored,
    ) -> None:
        self.workers = workers
        self.tick = 0
        state = SyncState(model, strategy, Membership(tuple(range(workers)), 0))
        self.tracks = [
            Kept(track.rule_index, track.fragment.index, cast(keeper, track.rule.mixer), arithmetic(track))
            for track in state.tracks
        ]
        self.anchors = state.anchors()

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Every tensor by a stable name, by reference."""
        for track in self.tracks:
            yield from track.arithmetic.tensors(f"{track.rule_index}.{track.fragment_index}")

    def meta(self) -> dict[str, Any]:
        """What is not a tensor, JSON-able."""
        return {"tick": self.tick, "tracks": [[track.updates, track.ready] for track in self.tracks]}

    def load(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up where a saved keeper stopped.

        Raises: CheckpointError if tensors are missing or of another shape.
        """
        for name, target in self.tensors():
            source = tensors.get(name)
            if source is None or source.shape != target.shape:
                raise CheckpointError(
                    f"the checkpoint lacks the keeper's {name} with {tuple(target.shape)}; it is damaged or of another "
                    "method, resume from the one before it"
                )
            target.copy_(source)
        self.tick = meta["tick"]
        for track, (updates, ready) in zip(self.tracks, meta["tracks"], strict=True):
            track.updates, track.ready = updates, ready


def keep(keeping: Keeping) -> Flow:
    """One look: join what has come, close what can be closed, then answer: all who joined a round that this look closed
    get the same anchor."""
    keeping.tick += 1
    events: list[Event] = []
    for track in keeping.tracks:
        closed: list[Reply] = []
        for push in cast(list[Push], (yield Collect(track.rule_index, track.fragment_index))):
            track.joined.append(push)
            if track.ready is None and len(track.joined) >= min(track.part.quorum, keeping.workers):
                track.ready = keeping.tick
            if track.part.grace == 0 and track.ready is not None:
                closed += _close(track, events)
        waited = track.ready is not None and keeping.tick - track.ready >= track.part.grace
        if track.joined and (waited or len(track.joined) >= keeping.workers):
            closed += _close(track, events)
        yield from closed
    return events


def _close(track: Kept, events: list[Event]) -> list[Reply]:
    joined = sorted(track.joined, key=lambda push: push.worker)
    track.joined, track.ready = [], None
    fits = [push for push in joined if math.isfinite(push.norm)]
    norms = track.arithmetic.norms(fits)
    limit = absurd(norms)
    counted: list[Push] = []
    counting: list[float] = []
    refused = [
        f"worker {push.worker} handed in values that are not finite" for push in joined if not math.isfinite(push.norm)
    ]
    for push, norm in zip(fits, norms, strict=True):
        if norm <= limit and push.weight > 0:
            counted.append(push)
            counting.append(norm)
        else:
            refused.append(
                f"worker {push.worker} handed in a norm of {norm:.3g} with the weight {push.weight:g}, which cannot "
                "count"
            )
    if counted:
        track.updates += 1
    landed = Landed(
        Key(track.rule_index, track.fragment_index, track.updates - 1),
        tuple(push.worker for push in counted),
        len(counted) / len(joined),
        norms=tuple(counting),
        weights=tuple(push.weight for push in counted),
        refused=tuple(refused),
        update=track.updates,
    )
    if counted:
        track.arithmetic.step(counted, landed)
    events.append(landed)
    return [Reply(push, landed, track.arithmetic.anchor) for push in joined]
