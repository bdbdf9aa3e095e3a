"""What every part and every group must do, for the test suites of those who write one.

Each check raises `AssertionError` with what is wrong. One line in a table of cases is enough:

    check_codec(cast(torch.bfloat16), relative=2**-8)
    check_outer(nesterov(0.7, 0.9))
    check_mixer(all_mean())
    check_peer_group(make_groups)
"""

import io
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.parts.mixers import Exchange, Mixer, Situation, Work
from atoll.parts.outers import Outer
from atoll.testing.groups import check_peer_group
from atoll.trees import CHUNK, Layout, Spec, State, cut
from atoll.wire import Codec, Keep, Key, Landed, Membership

__all__ = ["check_codec", "check_mixer", "check_outer", "check_peer_group"]

DTYPES = (torch.float32, torch.float64)


def _layout(numel: int, dtype: torch.dtype) -> Layout:
    return Layout.of([Spec("values", (numel,), (1,), dtype)])


def _normal(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def _same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _flat(state: State, layout: Layout) -> bool:
    return all(tensor.shape == (layout.numel,) for tensor in state.values())


def check_codec(codec: Codec, relative: float = 0.0, absolute: float = 0.0) -> None:
    """Assert that a codec keeps its promises about bytes, blocks, donation, error, rounds and lost wires.

    |decode(encode(x)) - x| <= relative |x| + absolute, on normal values of several sizes; zeros come back as zeros, and
    no block with a value that is not finite comes back finite; the wire is `nbytes` long; it can be cut at block
    boundaries, and joined from such pieces; the same values and state give the same wire and state; only STATE is
    written to; the codec of a round is always the same, and of the same sizes; what a lost wire held is sent again, if
    the codec sends later what it left out.

    Args: relative, absolute: the error that its docstring claims for values of size one.
    """
    for dtype, numel in itertools.product(DTYPES, _sizes(codec.block)):
        values, layout = _normal(numel, dtype, seed=numel), _layout(numel, dtype)
        what = f"{codec!r} of {numel} values of {dtype}"
        _check_wire(codec, values, layout, what)
        _check_cuts(codec, values, layout, what)
        error = (_seen(codec, values, codec.init(layout)) - values).abs()
        assert bool((error <= relative * values.abs() + absolute).all()), f"{what}: wrong by {error.max().item():g}"
        zeros = _seen(codec, torch.zeros_like(values), codec.init(layout))
        assert not zeros.any(), f"{what}: zeros came back changed"
        _check_not_finite(codec, values, layout, what)
        _check_rounds(codec, values, layout, what)
        _check_lost(codec, values, layout, what)


def _sizes(block: int) -> list[int]:
    """Whole blocks, parts of one, and both; a chunk at most, for no longer run is ever encoded."""
    part = block // 2 + 1
    sizes = {1, part, *(blocks * block + rest for blocks in (1, 3, 7) for rest in (0, part))}
    return sorted({min(size, CHUNK) for size in sizes})


def _seen(codec: Codec, values: Tensor, state: State) -> Tensor:
    """What the others make of the wire of `values`, in their dtype."""
    return codec.decode(codec.encode(values, state), values).to(values.dtype)


def _check_wire(codec: Codec, values: Tensor, layout: Layout, what: str) -> None:
    state, sent = codec.init(layout), values.clone()
    assert _flat(state, layout), f"{what}: state must be flat tensors with one entry per element"
    first, second = _copy(state), _copy(state)
    wire = codec.encode(values, first)
    assert torch.equal(values, sent), f"{what}: encode wrote to the values"
    assert wire.dtype == torch.uint8, f"{what}: the wire is of {wire.dtype}, not uint8"
    announced = codec.nbytes(len(values), values.itemsize)
    assert wire.shape == (announced,), f"{what}: the wire is {tuple(wire.shape)}, but {announced} bytes were announced"
    assert codec.nbytes(0, values.itemsize) == 0, f"{what}: no values take bytes"
    assert torch.equal(codec.encode(values, second), wire), f"{what}: the same values gave another wire"
    assert _same(first, second), f"{what}: the same values gave another state"
    kept = wire.clone()
    decoded = codec.decode(wire, values)
    assert decoded.shape == values.shape, f"{what}: {tuple(decoded.shape)} values came back"
    assert torch.equal(values.clone().add_(decoded), values + decoded.to(values.dtype)), f"{what}: cannot be added up"
    assert torch.equal(wire, kept), f"{what}: decode wrote to the wire"


def _check_cuts(codec: Codec, values: Tensor, layout: Layout, what: str) -> None:
    whole_state, parts_state = codec.init(layout), codec.init(layout)
    wire = codec.encode(values, whole_state)
    decoded = codec.decode(wire, values)
    item = values.dtype.itemsize
    for middle in range(codec.block, len(values), codec.block):
        at = codec.nbytes(middle, item)
        for part, piece in ((values[:middle], wire[:at]), (values[middle:], wire[at:])):
            assert len(piece) == codec.nbytes(len(part), item), f"{what}: cut at {middle}, a piece has another size"
        pieces = [
            codec.decode(piece.clone(), part)
            for part, piece in ((values[:middle], wire[:at]), (values[middle:], wire[at:]))
        ]
        assert torch.equal(torch.cat(pieces), decoded), f"{what}: cut at {middle}, the pieces decode to other values"
    joined = [codec.encode(values[a:b], cut(parts_state, a, b)) for a, b in _cuts(len(values), codec.block)]
    assert torch.equal(torch.cat(joined), wire), f"{what}: encoded in pieces, the wire is another"
    assert _same(whole_state, parts_state), f"{what}: encoded in pieces, the state is another"


def _check_rounds(codec: Codec, values: Tensor, layout: Layout, what: str) -> None:
    for round_ in (0, 7):
        drawn, what_then = codec.at(round_), f"{what}, round {round_}"
        assert drawn == codec.at(round_) == codec.at(round_ + 1).at(round_), f"{what_then}: asked again, it is another"
        sizes = [(each.block, each.nbytes(len(values), values.itemsize)) for each in (codec, drawn)]
        assert sizes[0] == sizes[1], f"{what_then}: block and bytes are {sizes[1]}, not {sizes[0]}"
        _check_wire(drawn, values, layout, what_then)


def _check_lost(codec: Codec, values: Tensor, layout: Layout, what: str) -> None:
    lost, arrived, zeros = codec.init(layout), codec.init(layout), torch.zeros_like(values)
    wire = codec.encode(values, lost)
    kept, pieces = wire.clone(), _copy(lost)
    codec.restore(wire, lost)
    assert torch.equal(wire, kept), f"{what}: restore wrote to the wire"
    for a, b in _cuts(len(values), codec.block):
        first, last = (codec.nbytes(at, values.itemsize) for at in (a, b))
        codec.restore(wire[first:last].clone(), cut(pieces, a, b))
    assert _same(lost, pieces), f"{what}: restored in pieces, the state is another"
    held = _seen(codec, values, arrived)
    later = _seen(codec, zeros, arrived)
    again = _seen(codec, zeros, lost) - later
    assert not later.any() or bool(again @ held > 0), f"{what}: what a lost wire held is not sent again"


def _check_not_finite(codec: Codec, values: Tensor, layout: Layout, what: str) -> None:
    for at, bad in ((0, math.nan), (codec.block // 2, math.inf), (codec.block - 1, -math.inf)):
        spoiled = values.clone()
        places = [min(a + at, b - 1) for a, b in _cuts(len(values), codec.block)]
        spoiled[places] = bad
        seen = _seen(codec, spoiled, codec.init(layout)).isfinite()
        for a, b in _cuts(len(values), codec.block):
            assert not seen[a:b].all(), f"{what}: {bad} in [{a}, {b}) came back as something finite"


def _cuts(numel: int, block: int) -> Iterator[tuple[int, int]]:
    yield from itertools.pairwise([*range(0, numel, block), numel])


def check_outer(outer: Outer) -> None:
    """Assert that an outer optimizer can be cut into chunks, checkpointed, and trusted with what it is lent.

    Five updates in pieces of odd sizes give the bits of five updates of the whole; so do five with a save and a load
    of the state in between; the step lies in the memory of GRADIENT; the anchor is left untouched.
    """
    for dtype in DTYPES:
        numel, what = 1037, f"{outer!r} in {dtype}"
        layout, anchor = _layout(numel, dtype), _normal(numel, dtype, seed=0)
        gradients = [_normal(numel, dtype, seed=1 + index) for index in range(5)]
        state, lent = outer.init(layout), anchor.clone()
        assert _flat(state, layout), f"{what}: state must be flat tensors with one entry per element"
        assert _same(state, outer.init(layout)), f"{what}: init gave another state at the second call"
        chunked, stored = _copy(state), _copy(state)
        for update, gradient in enumerate(gradients, start=1):
            landed, given = Landed(Key(0, 0, update - 1), (0,), 1.0, update=update), gradient.clone()
            step = outer.update(given, state, anchor, landed)
            assert step.data_ptr() == given.data_ptr(), f"{what}: the step must lie in the memory of GRADIENT"
            assert step.shape == gradient.shape, f"{what}: the step has shape {tuple(step.shape)}"
            assert step.dtype == dtype, f"{what}: the step is of {step.dtype}"
            assert bool(step.isfinite().all()), f"{what}: the step is not finite"
            assert torch.equal(anchor, lent), f"{what}: update wrote to the anchor"
            pieces = [
                outer.update(gradient[a:b].clone(), cut(chunked, a, b), anchor[a:b], landed)
                for a, b in itertools.pairwise((0, 7, 107, 620, numel))
            ]
            assert torch.equal(torch.cat(pieces), step), f"{what}: in pieces, update {update} gives another step"
            assert _same(chunked, state), f"{what}: in pieces, update {update} gives another state"
            stored = _saved_and_loaded(stored)
            resumed = outer.update(gradient.clone(), stored, anchor, landed)
            assert torch.equal(resumed, step), f"{what}: resumed from a saved state, update {update} gives another step"


def _saved_and_loaded(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_mixer(mixer: Mixer) -> None:
    """Assert that all members derive the same meetings from a mixer, and that mixing keeps the mean.

    For up to six workers and several rounds: asked twice, `exchange` answers the same; all who meet agree on who they
    are, on the fold, and on who hears whom; weights are finite and not negative; among workers that did the same work,
    the mean over all workers is the same before and after, and all get the same if the mixer says that it agrees.
    """
    layout, work = _layout(1000, torch.float32), Work(steps=10, tokens=640)
    for count, round_ in itertools.product(range(1, 7), range(5)):
        workers = tuple(range(count))
        asked = {me: Situation(Membership(workers, me), round_, work, {}, exact(), layout) for me in workers}
        meetings = {me: mixer.exchange(asked[me]) for me in workers}
        for me, meeting in meetings.items():
            what = f"{mixer!r}, worker {me} of {count} in round {round_}"
            again = mixer.exchange(asked[me])
            assert again == meeting, f"{what}: asked again, the meeting is another"
            assert me in meeting.to, f"{what}: it is not in its own meeting {meeting.to}"
            assert list(meeting.to) == sorted(set(meeting.to) & set(workers)), f"{what}: {meeting.to} are not workers"
            assert 0 <= meeting.weight < math.inf, f"{what}: its weight is {meeting.weight}"
            for other in meeting.to:
                theirs = meetings[other]
                assert (theirs.to, theirs.fold) == (meeting.to, meeting.fold), f"{what}: worker {other} sees {theirs}"
            _check_edges(meetings, me, what)
        before = [worker * worker - 3.0 * worker for worker in workers]
        after = [_mixed(meetings, meeting, before) for meeting in meetings.values()]
        kept = math.isclose(sum(after), sum(before), rel_tol=1e-12, abs_tol=1e-12)
        what = f"{mixer!r} of {count} workers in round {round_}"
        assert kept, f"{what} moves the mean from {sum(before) / count} to {sum(after) / count}"
        assert not mixer.agrees or len(set(after)) == 1, f"{what} says that all agree, but they get {after}"


def _hears(meeting: Exchange) -> tuple[int, ...]:
    return meeting.to if meeting.edges is None else meeting.edges.hears


def _check_edges(meetings: dict[int, Exchange], me: int, what: str) -> None:
    meeting, heard = meetings[me], _hears(meetings[me])
    listeners = {other for other in meeting.to if other != me and me in _hears(meetings[other])}
    told = set(meeting.to) - {me} if meeting.edges is None else set(meeting.edges.tells)
    assert meeting.edges is None or isinstance(meeting.fold, Keep), f"{what}: edges need Keep, not {meeting.fold}"
    assert me in heard, f"{what}: it does not count itself among {heard}"
    assert list(heard) == sorted(set(heard) & set(meeting.to)), f"{what}: it hears {heard} in a meeting of {meeting.to}"
    assert told == listeners, f"{what}: it tells {sorted(told)}, but {sorted(listeners)} expect to hear it"


def _mixed(meetings: dict[int, Exchange], meeting: Exchange, values: list[float]) -> float:
    weights = {worker: meetings[worker].weight for worker in _hears(meeting)}
    return sum(weights[worker] * values[worker] for worker in weights) / sum(weights.values())
