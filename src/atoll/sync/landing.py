"""Landings: what comes back becomes a step, the step moves the anchor, and the merge moves live. Chunk by chunk."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from atoll.parts.codecs import random_mask
from atoll.parts.estimates import eager
from atoll.parts.merges import adopt, leave
from atoll.sync.carry import Carry
from atoll.sync.sources import DeltaSource
from atoll.sync.state import InFlight, SyncState
from atoll.trees import CHUNK, Live, cut
from atoll.wire import Landed, Source

Sink = Callable[[Landed, int, Tensor], None]


def sink_of(state: SyncState, entry: InFlight, live: Live) -> Sink:
    """What is called with each chunk of the message that comes back, and may overwrite it."""
    track, layout, held = entry.track, entry.track.message, list[Tensor]()

    def sink(landed: Landed, start: int, mean: Tensor) -> None:
        landed = replace(landed, age=state.step - entry.launched, update=track.updates + 1)
        if track.rule.carry is not Carry.BOTH:
            apply(state, entry, live, landed, start, mean)
            return
        element, part = layout.element(start)
        if part == 0:
            held[:] = [mean.clone()]  # the group may use its memory for the anchors that follow
        else:
            apply(state, entry, live, replace(landed, anchor=mean), element, held[0])

    return sink


def apply(state: SyncState, entry: InFlight, live: Live, landed: Landed, start: int, MEAN: Tensor | None) -> None:
    """One chunk of a landing, `MEAN` is overwritten; None in a round that steps without.

    A mean of live or of anchors becomes the anchor itself, to the bit. A worker that was refused adopts the anchor
    whatever the merge: what its live holds is what was refused. One that was not heard in time keeps its live, unless
    its codec has put aside what was lost; and it keeps an anchor that is its own.
    """
    rule, fragment, me = entry.track.rule, entry.track.fragment, state.membership.me
    if rule.carry is Carry.GRADIENT:
        assert MEAN is not None
        live.write(start, MEAN)
        return
    unheard = me in landed.dropped
    if unheard and rule.carry is Carry.ANCHOR:
        return
    assert fragment.anchor is not None
    stop = start + _length(fragment.layout.numel, start, MEAN)
    anchor = fragment.anchor.flat[start:stop]
    sent = entry.sent.flat[start:stop] if entry.sent else None
    if rule.outer:
        gradient = MEAN
        if isinstance(rule.estimate, eager):
            # what is not finite in it is refused by the group a round later
            fresh = _finite(DeltaSource(fragment.anchor, live).read(start, torch.empty_like(anchor)))
            gradient = rule.estimate.gradient(fresh, MEAN, sent, entry.members)
        assert gradient is not None
        step = rule.outer.update(gradient, cut(entry.track.outer, start, stop), anchor, landed)
        anchor.sub_(step)
    else:
        assert MEAN is not None
        values = MEAN
        if isinstance(rule.codec, random_mask) and not rule.kept:
            mask = rule.codec.at(entry.key.round).mask(len(MEAN))
            own = rule.carry is Carry.ANCHOR or me not in landed.peers
            values = torch.where(mask, MEAN, anchor if own else _unsent(live, anchor, sent, start))
        step = (anchor if sent is None else sent) - values
        anchor.copy_(values)
    waits = unheard and not entry.track.codec
    merge = rule.merge
    if me not in landed.peers:
        merge = leave() if waits else adopt()
    near = (
        (lambda tensor: tensor)
        if live.device == anchor.device
        else (lambda tensor: tensor.to(live.device, non_blocking=True))
    )
    for view, first, last in live.segments(start):
        merge(view, near(step[first:last]), near(anchor[first:last]))
    if waits and isinstance(rule.estimate, eager):
        _put_back(entry, start, stop)


def begin(state: SyncState, entry: InFlight) -> None:
    """A first round, nothing of which has come back: the others count as zero, and what was sent counts on."""
    landed = _own(state, entry)
    for start, _ in entry.track.fragment.layout.chunks:
        apply(state, entry, entry.track.fragment.live, landed, start, None)


def go_on_alone(state: SyncState, entry: InFlight, source: Source) -> None:
    """A meeting that failed: this worker's own message takes the place of the mean."""
    sink, landed = sink_of(state, entry, entry.track.fragment.live), _own(state, entry)
    for start, stop in entry.track.message.chunks:
        values = source.read(start, torch.empty(stop - start, dtype=source.layout.dtype))
        sink(landed, start, _finite(values.clone()))


def make_up(state: SyncState, entry: InFlight) -> None:
    """A round of eager deltas that does not count: its mean is zero, what it held goes back into live, and so leaves
    again with the next."""
    fragment, landed = entry.track.fragment, _own(state, entry)
    for start, stop in fragment.layout.chunks:
        apply(state, entry, fragment.live, landed, start, torch.zeros(stop - start, dtype=fragment.layout.dtype))
        _put_back(entry, start, stop)


def _put_back(entry: InFlight, start: int, stop: int) -> None:
    """Live holds again what was sent in vain: the newest delta, which is on its way, no more."""
    fragment = entry.track.fragment
    assert fragment.anchor is not None
    assert entry.sent is not None
    fragment.live.write(start, fragment.anchor.flat[start:stop] - entry.sent.flat[start:stop])


def _own(state: SyncState, entry: InFlight) -> Landed:
    me, age = state.membership.me, state.step - entry.launched
    return Landed(entry.key, (me,), 1 / entry.members, age=age, update=entry.track.updates + 1)


def _length(numel: int, start: int, mean: Tensor | None) -> int:
    return min(CHUNK, numel - start) if mean is None else len(mean)


def _unsent(live: Live, anchor: Tensor, sent: Tensor | None, start: int) -> Tensor:
    """What this worker has where it sent nothing."""
    if sent is not None:
        return sent
    values = torch.empty_like(anchor)
    live.read(start, values)
    return values


def _finite(VALUES: Tensor) -> Tensor:
    """With zeros for what is not finite."""
    return VALUES.masked_fill_(VALUES.isfinite().logical_not_(), 0.0)
