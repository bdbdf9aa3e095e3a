"""The flow: everything a worker does at a step boundary, as generators that perform no I/O.

A flow yields `Post` (answered at once with its ticket) and `Take` (answered with `Landed` or `Lost`);
`atoll.sync.drive` performs them on a group. A delta is measured before the outer step, an anchor after it, which fixes
the order of a boundary:

    phase  what happens                                        which rules
    0      gradients are averaged (`before`, before clipping)  due, carrying GRADIENT
    1      what closes a round leaves                          due, carrying DELTA or LIVE
    2      what is due comes back: outer, merge                in flight and due, oldest first

Both generators below are the whole protocol; a landing is applied chunk by chunk by `_apply`, and between the first
and the last write of a fragment no effect is yielded. State moves in three places only: `_launch` (round counts,
queue), `_land` (queue, updates, signals) and `_apply` (anchor, outer state, live). A round that is lost moves nothing
but its round count: the next delta is measured from the old start and holds what was learned meanwhile.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from atoll.errors import CompositionError, ModelError
from atoll.parts.landings import After
from atoll.parts.merges import adopt
from atoll.parts.mixers import Situation, Work
from atoll.sync.rule import Carry
from atoll.sync.sources import DeltaSource, LiveSource, snapshot
from atoll.sync.state import InFlight, SyncState, Track
from atoll.trees import Live, cut
from atoll.wire import Event, Key, Landed, Launched, Lost, Post, Source, Take

Flow = Generator[Post | Take, Key | Landed | Lost, list[Event]]


def before(state: SyncState) -> Flow:
    """Phase 0, between backward and clipping: average the gradients that are due at the step being made.

    A trained parameter without a gradient counts as one with a gradient of zero, so that all workers send the same
    elements.
    """
    events: list[Event] = []
    posted: list[tuple[InFlight, Live]] = []
    for track in state.gradient_tracks():
        if track.rule.schedule.next(state.step, track.fragment.index, state.signals) == state.step + 1:
            layout = track.fragment.layout
            named = zip(layout.specs, track.fragment.tensors, strict=True)
            gradients = Live(layout, [_gradient(spec.name, tensor) for spec, tensor in named])
            entry = yield from _launch(state, track, LiveSource(gradients), events)
            posted.append((entry, gradients))
    for entry, gradients in posted:
        yield from _land(state, entry, gradients, events)
    state.plan()
    return events


def boundary(state: SyncState) -> Flow:
    """Phases 1 and 2, after the inner step that `state.step` counts."""
    state.look_again()
    events: list[Event] = []
    for track in state.tracks:
        if track.due == state.step and track.rule.carry is not Carry.GRADIENT:
            yield from _launch(state, track, _source(track), events)
    for entry in [entry for entry in state.queue if entry.lands <= state.step]:
        yield from _land(state, entry, entry.track.fragment.live, events)
    state.plan()
    return events


def settle(state: SyncState) -> Flow:
    """Collect what is in flight without using it, so that a checkpoint can hold it: its step of landing stays."""
    for entry in state.queue:
        if entry.outcome is None:
            entry.outcome = cast(Landed | Lost, (yield Take(entry.key)))
    return []


def drain(state: SyncState) -> Flow:
    """Use everything that is in flight now: the run ends here."""
    state.look_again()
    events: list[Event] = []
    for entry in list(state.queue):
        yield from _land(state, entry, entry.track.fragment.live, events)
    state.plan()
    return events


def _gradient(name: str, parameter: Tensor) -> Tensor:
    """The gradient, laid out in memory as its parameter, because elements meet by their place in memory."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout is not torch.strided:
        raise ModelError(
            f"the gradient of {name!r} is sparse, but gradients are averaged element by element; build the layer with "
            "sparse=False, or carry DELTA"
        )
    elif parameter.grad.stride() != parameter.stride():
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


def _source(track: Track) -> Source:
    fragment = track.fragment
    if track.rule.carry is Carry.DELTA:
        assert fragment.anchor is not None
        return DeltaSource(fragment.anchor, fragment.live)
    return LiveSource(fragment.live)


def _launch(
    state: SyncState, track: Track, source: Source, events: list[Event]
) -> Generator[Post | Take, Key | Landed | Lost, InFlight]:
    rule, fragment = track.rule, track.fragment
    if any(entry.track is track for entry in state.queue):
        raise CompositionError(
            f"{rule.schedule!r} closed round {track.round} of fragment {fragment.index} at step {state.step}, before "
            f"the one before it had landed by {rule.landing!r}; use a shorter delay or a longer period"
        )
    # what else lands at this boundary moves the fragment before a blocking exchange is read
    moves = any(entry.track.fragment is fragment and entry.lands <= state.step for entry in state.queue)
    overlapped = isinstance(rule.landing, After) or (moves and rule.carry is not Carry.GRADIENT)
    contested = sum(other.fragment is fragment for other in state.tracks) > 1
    kept = snapshot(source, fragment.live, contested=contested) if overlapped else None
    sent = fragment.live.copied() if track.remembers else None
    work = Work(state.work.steps - track.launched.steps, state.work.tokens - track.launched.tokens, state.work.share)
    at = Situation(state.membership, track.round, work, state.signals, rule.codec, fragment.layout)
    exchange = rule.mixer.exchange(at)
    key = Key(track.rule_index, fragment.index, track.round, state.membership.lane)
    yield Post(
        key,
        exchange.to,
        kept or source,
        rule.codec,
        track.codec,
        exchange.fold,
        exchange.weight,
        rule.quorum,
        # only what all have met for is agreed by all
        dict(state.own_signals) if exchange.to == state.membership.workers else {},
    )
    entry = InFlight(key, track, state.step, state.lands(track), track.launched, kept, sent)
    track.round += 1
    track.launched = state.work
    state.queue.append(entry)
    events.append(Launched(key, state.step))
    return entry


def _land(
    state: SyncState, entry: InFlight, live: Live, events: list[Event]
) -> Generator[Post | Take, Key | Landed | Lost, None]:
    track = entry.track

    def aged(landed: Landed) -> Landed:
        return replace(landed, age=state.step - entry.launched, update=track.updates + 1)

    def sink(landed: Landed, start: int, mean: Tensor) -> None:
        _apply(entry, live, state.membership.me, aged(landed), start, mean)

    outcome = entry.outcome or cast(Landed | Lost, (yield Take(entry.key, None if entry.snapshot else sink)))
    state.queue.remove(entry)
    if isinstance(outcome, Landed):
        if entry.snapshot:
            for start, stop in track.fragment.layout.chunks:
                sink(outcome, start, entry.snapshot.tree.flat[start:stop])
        outcome = aged(outcome)
        track.updates += 1
        state.signals.update(outcome.signals)
    elif track.rule.carry is not Carry.GRADIENT:
        # the next message holds this round's work too
        track.launched = entry.since
    else:
        # own gradients would let the replicas drift apart for good: all skip the step's gradient alike
        for start, stop in track.fragment.layout.chunks:
            live.write(start, torch.zeros(stop - start, dtype=track.fragment.layout.dtype))
    events.append(outcome)


def _apply(entry: InFlight, live: Live, me: int, landed: Landed, start: int, mean: Tensor) -> None:
    """One chunk of a landing: the mean becomes a step, the step moves the anchor, and the merge moves live. `mean` is
    overwritten.

    A mean of live becomes the anchor itself, to the bit. A worker that was refused adopts the anchor whatever the
    merge: what its live holds is what was refused.
    """
    track, stop = entry.track, start + len(mean)
    rule, fragment = track.rule, track.fragment
    if rule.carry is Carry.GRADIENT:
        live.write(start, mean)
        return
    assert fragment.anchor is not None
    anchor = fragment.anchor.flat[start:stop]
    if rule.outer:
        step = rule.outer.update(mean, cut(track.outer, start, stop), anchor, landed)
        anchor.sub_(step)
    else:
        step = (entry.sent.flat[start:stop] if entry.sent else anchor) - mean
        anchor.copy_(mean)
    merge = rule.merge if me in landed.peers else adopt()
    near = (
        (lambda tensor: tensor)
        if live.device == anchor.device
        else (lambda tensor: tensor.to(live.device, non_blocking=True))
    )
    for view, first, last in live.segments(start):
        merge(view, near(step[first:last]), near(anchor[first:last]))
