"""The keeper's flow: it holds the anchors for workers that come when they can, and steps when it has heard enough.

    collect    what was handed in joins the open round of its fragment
    close      once `quorum` workers have joined and `grace` ticks have passed since, or all have joined
    step       D_m = anchor - live_m (or the delta that was sent); average; outer step of the anchor
    reply      everyone who joined gets the new anchor, after all rounds that the look closes

One call of `keep` is one look. A push that comes after its round has closed joins the next: nothing is dropped. A
keeper's tick is an inner step of the fastest worker.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError
from atoll.parts.keepers import keeper
from atoll.sync.carry import Carry
from atoll.sync.flow import Flow
from atoll.sync.rule import Strategy
from atoll.sync.state import Fragment, SyncState
from atoll.trees import State, Tree, cut
from atoll.wire import Collect, Event, Key, Landed, Membership, Push, Reply, absurd


@dataclass
class Kept:
    """One fragment under one rule: the anchor, the keeper's outer state, and the open round."""

    rule_index: int
    carry: Carry
    part: keeper
    fragment: Fragment
    anchor: Tree
    outer: State
    updates: int = 0
    joined: list[Push] = field(default_factory=list[Push])
    ready: int | None = None
    """the tick at which the quorum was reached"""


class Keeping:
    """Everything a keeper holds. Saving and restoring it, with the workers handing in again, resumes bit for bit.

    Args: model: with the values all workers start from; it is not trained. strategy: one that is kept. workers: how
    many there are.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, workers: int) -> None:
        self.workers = workers
        self.tick = 0
        state = SyncState(model, strategy, Membership(tuple(range(workers)), 0))
        self.tracks = [
            Kept(
                track.rule_index,
                track.rule.carry,
                cast(keeper, track.rule.mixer),
                track.fragment,
                cast(Tree, track.fragment.anchor),
                cast(keeper, track.rule.mixer).outer.init(track.fragment.layout),
            )
            for track in state.tracks
        ]
        self.anchors = state.anchors()

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Every tensor by a stable name, by reference."""
        for track in self.tracks:
            name = f"{track.rule_index}.{track.fragment.index}"
            yield f"anchor.{name}", track.anchor.flat
            for part, tensor in track.outer.items():
                yield f"outer.{name}.{part}", tensor

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
        for push in cast(list[Push], (yield Collect(track.rule_index, track.fragment.index))):
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
    deltas = {push.worker: _delta(track, push) for push in fits}
    norms = {worker: torch.linalg.vector_norm(delta).item() for worker, delta in deltas.items()}
    limit = absurd(list(norms.values()))
    counted = [push for push in fits if norms[push.worker] <= limit and push.weight > 0]
    refused = [f"worker {push.worker} handed in values that are not finite" for push in joined if push not in fits]
    refused += [
        f"worker {push.worker} handed in a norm of {norms[push.worker]:.3g} with the weight {push.weight:g}, which "
        "cannot count"
        for push in fits
        if push not in counted
    ]
    if counted:
        track.updates += 1
    landed = Landed(
        Key(track.rule_index, track.fragment.index, track.updates - 1),
        tuple(push.worker for push in counted),
        len(counted) / len(joined),
        norms=tuple(norms[push.worker] for push in counted),
        weights=tuple(push.weight for push in counted),
        refused=tuple(refused),
        update=track.updates,
    )
    if counted:
        gradient = track.part.average(
            [deltas[push.worker] for push in counted], [push.weight for push in counted], track.fragment.layout
        )
        for start, stop in track.fragment.layout.chunks:
            anchor = track.anchor.flat[start:stop]
            anchor.sub_(track.part.outer.update(gradient[start:stop], cut(track.outer, start, stop), anchor, landed))
    events.append(landed)
    return [Reply(push, landed, track.anchor) for push in joined]


def _delta(track: Kept, push: Push) -> Tensor:
    """The outer gradient that a push stands for, in its own memory."""
    values = push.values.flat
    return values if track.carry is Carry.DELTA else torch.sub(track.anchor.flat, values, out=values)
