"""The flow: everything a worker does at a step boundary, as generators that perform no I/O.

A flow yields `Post` (answered at once with its ticket) and `Take` (answered with `Landed` or `Lost`, or None by one
that only looks); `atoll.sync.drive` performs them on a group. A delta is measured before the outer step, an anchor
after it, which fixes the order of a boundary:

    phase  what happens                                                which rules
    0      gradients are averaged (`before`, before clipping)          due, carrying GRADIENT
    1      what closes a round leaves                                  due, carrying DELTA, LIVE or BOTH
    2      what is due comes back: estimate, outer, merge              in flight and due, oldest first, anchors first
    3      a first round steps without a mean, if its estimate can     overlapped, eager
    4      anchors are agreed on                                       due, carrying ANCHOR, blocking
    5      what opens the next round leaves                            due, carrying ANCHOR, overlapped

These generators are the whole protocol of a worker (`atoll.sync.keeping` has that of a keeper). A landing is applied
chunk by chunk by `atoll.sync.landing`, and between the first and the last write of a fragment no effect is yielded.
State moves in three places only: `_launch` (round counts, queue), `_land` (queue, updates, signals) and
`landing.apply` (anchor, outer state, live). A round that is lost moves nothing but its round count: the next delta is
measured from the old start and holds what was learned meanwhile.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from atoll.errors import CompositionError, ModelError
from atoll.parts.estimates import eager, own
from atoll.parts.landings import Blocking, OnArrival
from atoll.parts.mixers import Situation, Work
from atoll.sync.carry import Carry
from atoll.sync.landing import Sink, begin, go_on_alone, make_up, sink_of
from atoll.sync.sources import AnchorSource, BothSource, DeltaSource, LiveSource, snapshot
from atoll.sync.state import InFlight, SyncState, Track
from atoll.trees import Live, Tree
from atoll.wire import (
    KEEPER,
    Collect,
    Event,
    Keep,
    Key,
    Landed,
    Launched,
    Lost,
    Post,
    Push,
    Reply,
    Snapshot,
    Source,
    Take,
)

Effect = Post | Take | Collect | Reply
Answer = Key | Landed | Lost | list[Push] | None
Flow = Generator[Effect, Answer, list[Event]]

CLOSING = (Carry.DELTA, Carry.LIVE, Carry.BOTH)


def before(state: SyncState) -> Flow:
    """Phase 0, between backward and clipping: average the gradients that are due at the step being made.

    A trained parameter without a gradient counts as one with a gradient of zero, so that all workers send the same
    elements.
    """
    events: list[Event] = []
    posted: list[tuple[InFlight, Live]] = []
    for track in state.gradient_tracks():
        if track.rule.schedule.next(state.step, track.fragment.turn, state.signals) == state.step + 1:
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
    """Phases 1 to 5, after the inner step that `state.step` counts."""
    state.look_again()
    events: list[Event] = []
    due = [track for track in state.tracks if track.due == state.step]
    closing = [track for track in due if track.rule.carry in CLOSING and not _waits_for_reply(state, track)]
    launched: list[InFlight] = []
    for track in closing:
        launched.append((yield from _launch(state, track, _source(track), events)))
    coming = [entry for entry in state.queue if entry.lands <= state.step]
    for entry in sorted(coming, key=lambda entry: (entry.launched, entry.track.rule.carry is not Carry.ANCHOR)):
        yield from _land(state, entry, entry.track.fragment.live, events)
    landed = {id(entry.track) for entry in coming}
    for entry in launched:
        if isinstance(entry.track.rule.estimate, eager) and id(entry.track) not in landed:
            begin(state, entry)
            entry.track.updates += 1
    mixing = [track for track in due if track.rule.carry is Carry.ANCHOR]
    blocking: list[InFlight] = []
    for track in mixing:
        if isinstance(track.rule.landing, Blocking):
            blocking.append((yield from _launch(state, track, _source(track), events)))
    for entry in blocking:
        yield from _land(state, entry, entry.track.fragment.live, events)
    for track in mixing:
        if not isinstance(track.rule.landing, Blocking):
            yield from _launch(state, track, _source(track), events)
    state.plan()
    return events


def settle(state: SyncState) -> Flow:
    """Collect what is in flight without using it, so that a checkpoint can hold it: its step of landing stays.

    What waits for a keeper is only looked at: it is handed in again by `resume`.
    """
    for entry in state.queue:
        if entry.outcome is None:
            entry.outcome = cast(Landed | Lost | None, (yield Take(entry.key, poll=entry.track.rule.kept)))
    return []


def resume(state: SyncState) -> Flow:
    """Hand in again what waited for a keeper as the checkpoint was written."""
    for entry in state.queue:
        if entry.outcome is None and entry.snapshot:
            yield _post(state, entry, entry.snapshot, (KEEPER,))
    return []


def drain(state: SyncState) -> Flow:
    """Use everything that is in flight now: the run ends here. What a keeper has not answered yet is left to it."""
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
    fragment, carry = track.fragment, track.rule.carry
    if carry is Carry.LIVE:
        return LiveSource(fragment.live)
    assert fragment.anchor is not None
    if carry is Carry.ANCHOR:
        return AnchorSource(fragment.anchor)
    return (BothSource if carry is Carry.BOTH else DeltaSource)(fragment.anchor, fragment.live)


def _waits_for_reply(state: SyncState, track: Track) -> bool:
    """Whether a keeper has not answered the last message yet: the next leaves when its turn comes again."""
    return isinstance(track.rule.landing, OnArrival) and any(entry.track is track for entry in state.queue)


def _launch(state: SyncState, track: Track, source: Source, events: list[Event]) -> Generator[Effect, Answer, InFlight]:
    rule, fragment = track.rule, track.fragment
    late = [entry for entry in state.queue if entry.track is track]
    if late and not (isinstance(rule.estimate, eager) and late[0].lands <= state.step):
        raise CompositionError(
            f"{rule.schedule!r} closed round {track.round} of fragment {fragment.index} at step {state.step}, before "
            f"the one before it had landed by {rule.landing!r}; use a shorter delay or a longer period"
        )
    # what else lands at this boundary moves the fragment before a blocking exchange is read
    moves = any(entry.track.fragment is fragment and entry.lands <= state.step for entry in state.queue)
    overlapped = not isinstance(rule.landing, Blocking) or rule.kept or (moves and rule.carry is not Carry.GRADIENT)
    contested = sum(other.fragment is fragment for other in state.tracks) > 1
    kept = snapshot(source, fragment.live, contested=contested) if overlapped else None
    work = Work(state.work.steps - track.launched.steps, state.work.tokens - track.launched.tokens, state.work.share)
    at = Situation(state.membership, track.round, work, state.signals, rule.codec, track.message)
    exchange = rule.mixer.exchange(at)
    entry = InFlight(
        Key(track.rule_index, fragment.index, track.round, state.membership.lane),
        track,
        state.step,
        state.lands(track),
        track.launched,
        len(exchange.to),
        exchange.weight,
        kept,
        _remembered(track, kept),
    )
    yield replace(_post(state, entry, kept or source, exchange.to), fold=exchange.fold, edges=exchange.edges)
    track.round += 1
    if not rule.kept:
        track.launched = state.work
    state.queue.append(entry)
    events.append(Launched(entry.key, state.step))
    return entry


def _remembered(track: Track, kept: Snapshot | None) -> Tree | None:
    if not track.remembers:
        return None
    if track.rule.carry is Carry.LIVE:
        return track.fragment.live.copied()
    assert kept is not None
    sent = Tree(track.message)
    for start, stop in track.message.chunks:
        values = kept.read(start, sent.flat[start:stop])
        torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0, out=sent.flat[start:stop])
    return sent


def _post(state: SyncState, entry: InFlight, source: Source, to: tuple[int, ...]) -> Post:
    track = entry.track
    return Post(
        entry.key,
        to,
        source,
        track.rule.codec.at(entry.key.round),
        track.codec,
        Keep(),
        entry.weight,
        track.rule.quorum,
        # only what all have met for is agreed by all
        dict(state.own_signals) if to == state.membership.workers else {},
    )


def _land(state: SyncState, entry: InFlight, live: Live, events: list[Event]) -> Generator[Effect, Answer, None]:
    track, rule = entry.track, entry.track.rule
    sink: Sink = sink_of(state, entry, live)
    outcome = entry.outcome
    if outcome is None:
        poll = isinstance(rule.landing, OnArrival)
        answer = yield Take(entry.key, None if entry.snapshot else sink, poll=poll)
        outcome = cast(Landed | Lost | None, answer)
    if outcome is None:
        return
    state.queue.remove(entry)
    if isinstance(outcome, Landed):
        if entry.snapshot:
            for start, stop in track.message.chunks:
                sink(outcome, start, entry.snapshot.tree.flat[start:stop])
        track.updates += 1
        outcome = replace(outcome, age=state.step - entry.launched, update=track.updates)
        state.signals.update(outcome.signals)
        if rule.kept:
            track.launched = state.work
        elif state.membership.me in outcome.dropped and not track.codec and not isinstance(rule.estimate, eager):
            # live was left, so the next message holds this round's work too
            track.launched = entry.since
    elif rule.carry is Carry.GRADIENT:
        # own gradients would let the replicas drift apart for good: all skip the step's gradient alike
        for start, stop in track.fragment.layout.chunks:
            live.write(start, torch.zeros(stop - start, dtype=track.fragment.layout.dtype))
    elif isinstance(rule.estimate, own):
        go_on_alone(state, entry, entry.snapshot or _source(track))
        track.updates += 1
        outcome = replace(outcome, why=f"{outcome.why}; this worker goes on with its own delta")
    elif isinstance(rule.estimate, eager):
        make_up(state, entry)
        track.updates += 1
    else:
        # the next message holds this round's work too
        track.launched = entry.since
    events.append(outcome)
