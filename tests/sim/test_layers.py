"""Utilisation by layers: against arithmetic done by hand, a walk over every node, and the published tables."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from atoll.errors import CompositionError, UsageError
from atoll.sim.layers import GRID, Method, Model, data_parallel, diloco, required, streaming, timing, utilisation
from atoll.sim.published import BITS, SCALING, STREAMING, TARGETS, Row

ONE, TWO, SIX = Model(1, 10.0, 2.0), Model(2, 10.0, 5.0), Model(6, 12.0, 17.0)
METHODS: list[Method] = [
    data_parallel(1.0),
    diloco(5, 1.0),
    streaming(5, 1.0, fragment=2),
    streaming(5, 1.0, fragment=2, delay=1),
    streaming(7, 1.0, fragment=1, delay=7),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("model", [ONE, TWO, SIX], ids=["one", "two", "six"])
def test_an_infinite_link_keeps_nobody_waiting(model: Model, method: Method) -> None:
    assert utilisation(model, method, math.inf) == 1.0


@pytest.mark.parametrize("rate", [0.01, 1.0, 3.0, 1e3])
@pytest.mark.parametrize("period", [1, 4])
def test_one_layer_hides_nothing_of_its_transfer(rate: float, period: int) -> None:
    # Its gradient is there when the step ends, and the next forward begins with it.
    got = timing(ONE, diloco(period, 3.0), rate)
    assert got.compute_s == period * 2.0
    assert got.total_s == pytest.approx(period * 2.0 + 30.0 / rate, rel=1e-12)


@pytest.mark.parametrize(
    ("transfer", "wait"),
    [
        # Slots of 1 s: two forward; activations, parameters of layer 1 (leaves at 4); parameters of layer 0 (at 5).
        (0.5, 0.5),  # layer 1 has landed before layer 0 leaves: 5 + 0.5
        (1.0, 1.0),  # the link is free again just as layer 0 leaves
        (1.5, 2.0),  # layer 0 goes after layer 1: 4 + 2 x 1.5 = 7, for a forward that could begin at 5
        (4.0, 7.0),
    ],
)
def test_two_layers_hide_the_first_transfer_behind_one_slot(transfer: float, wait: float) -> None:
    got = timing(TWO, data_parallel(1.0), 5.0 / transfer)
    assert (got.compute_s, got.total_s) == pytest.approx((5.0, 5.0 + wait), rel=1e-12)


@pytest.mark.parametrize("layers", [2, 5, 24])
@pytest.mark.parametrize("period", [1, 10])
def test_a_slow_link_hides_behind_all_of_the_backward_but_its_first_layer(layers: int, period: int) -> None:
    # The link is busy from slot L + 2 of the last step on, and then until layer 0, the last to leave, has landed.
    model, link_s = Model(layers, 1e3, 1.0), 40.0
    hidden = (3 * layers - 1 - (layers + 2)) / (3 * layers - 1)
    got = timing(model, diloco(period, 2.0), 2e3 / link_s)
    assert got.total_s == pytest.approx(period + link_s - hidden, rel=1e-12)


def test_streaming_waits_only_for_what_does_not_fit_into_its_delay() -> None:
    # Slots of 1 s; turns begin with steps 0 and 3. Layer 0 leaves at 5 and is read at 10. Layer 1 leaves at 19 and is
    # read at 26, after a slot of forward.
    method = streaming(10, 1.0, fragment=1, delay=1)
    assert utilisation(TWO, method, 5.0 / 5.0) == 1.0, "5 s fit"
    # Of 8 s, layer 0 lands at 13, three late; then layer 1 leaves at 22 and lands at 30 for 29, one late.
    assert timing(TWO, method, 5.0 / 8.0).total_s == pytest.approx(50.0 + 3.0 + 1.0, rel=1e-12)


@pytest.mark.parametrize("load", [0.5, 0.99, 1.0, 1.01, 2.0, 30.0])
def test_a_round_of_delay_hides_all_that_the_link_can_carry(load: float) -> None:
    # A link with load over 1 is always busy, however little it is over: the long fill from an idle start is left out.
    got = timing(SIX, streaming(9, 1.0, fragment=2, delay=9), 12.0 / (load * 9 * 17.0))
    assert got.utilisation == pytest.approx(min(1.0, 1 / load), rel=1e-12)


@pytest.mark.parametrize("rate", [0.02, 0.3, 5.0])
def test_streaming_in_one_fragment_without_delay_is_diloco(rate: float) -> None:
    assert utilisation(SIX, streaming(5, 1.0, fragment=6), rate) == pytest.approx(
        utilisation(SIX, diloco(5, 1.0), rate), rel=1e-12
    )


def walk(model: Model, method: Method, rate: float, rounds: int) -> float:
    """Seconds of the last of `rounds` rounds, walking every node of every step from an idle start."""
    layers, period = model.layers, method.period
    slot, transfer = model.step_s / (3 * layers - 1), model.parameters / layers * method.bits / rate
    fragments = math.ceil(layers / method.fragment) if isinstance(method, streaming) else 1
    delay = method.delay if isinstance(method, streaming) else 0
    clock = free = begun = 0.0
    landing: dict[tuple[int, int], float] = {}
    for step in range(rounds * period):
        if step % period == 0:
            begun = clock
        for layer in range(layers):
            clock = max(clock, landing.pop((step, layer), 0.0)) + slot
        for layer in reversed(range(layers)):
            clock += slot if layer == 0 else 2 * slot
            turn = layer % fragments * period // (fragments + 1) if isinstance(method, streaming) else period - 1
            if step % period == turn:
                free = max(free, clock) + transfer
                landing[step + 1 + delay, layer] = free
    return clock - begun


@pytest.mark.parametrize("load", [0.1, 0.8, 1.25, 4.0])
@pytest.mark.parametrize(
    "method",
    [*METHODS, streaming(6, 1.0, fragment=1, delay=2), streaming(4, 1.0, delay=3), streaming(4, 1.0, delay=10)],
    ids=repr,
)
def test_visiting_events_alone_gives_what_a_walk_over_every_node_gives(method: Method, load: float) -> None:
    for layers in (1, 4, 5):
        if isinstance(method, streaming) and math.ceil(layers / method.fragment) >= method.period:
            continue
        model = Model(layers, 12.0, 3.0)
        rate = 12.0 / (load * method.period * 3.0)
        assert timing(model, method, rate).total_s == pytest.approx(walk(model, method, rate, 60), rel=1e-9)


ROWS = [*STREAMING, *SCALING]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model.layers}-{row.method!r}")
def test_more_bandwidth_never_lowers_utilisation_and_waits_are_for_transfers(row: Row) -> None:
    busy = [timing(row.model, row.method, rate) for rate in GRID]
    assert all(less.utilisation <= more.utilisation for less, more in pairwise(busy))
    link = row.model.parameters * row.method.bits
    for rate, each in zip(GRID, busy, strict=True):
        hidden = each.compute_s + link / rate - each.total_s
        assert -1e-9 * each.total_s <= hidden, "waits that no transfer explains"
        assert each.total_s >= max(each.compute_s, link / rate) * (1 - 1e-9), "a link that carried more than it can"


def misses(rows: Iterable[Row], width: float) -> list[int]:
    """How many points of the grid ours lies above the printed bandwidth, for each cell, with `width` for `BITS`."""
    missed: list[int] = []
    for row in rows:
        model = replace(row.model, parameters=row.model.parameters * width / BITS)
        for target, gbits in zip(TARGETS, row.gbits, strict=True):
            ours = required(model, row.method, target)
            missed.append((GRID.index(ours) if ours else len(GRID)) - printed(gbits))
    return missed


def printed(gbits: float | None) -> int:
    """The point of the grid that is meant; None is beyond it."""
    if gbits is None:
        return len(GRID)
    return min(range(len(GRID)), key=lambda point: abs(math.log(GRID[point] / (gbits * 1e9))))


def test_both_published_tables_come_out_of_one_width() -> None:
    missed = misses(ROWS, BITS)
    assert len(missed) == 150
    histogram = Counter(abs(each) for each in missed)
    assert max(histogram) <= 2, histogram
    assert histogram[0] + histogram[1] >= 145, histogram
    assert histogram[0] >= 90, histogram


def test_no_other_whole_number_of_bits_is_nearer_to_the_tables() -> None:
    total = {width: sum(map(abs, misses(ROWS, width))) for width in (11, 12, 13, 14, 15, 16)}
    assert min(total, key=lambda width: total[width]) == BITS


def test_what_the_grid_does_not_reach_is_none() -> None:
    model = Model(1, 1e9, 1.0)
    # One layer: utilisation is 1 / (1 + 1e9 / rate).
    assert required(model, data_parallel(1.0), 0.5) == pytest.approx(1.1513953993e9), "the first point above 1 Gbit/s"
    assert required(model, data_parallel(1.0), 0.9999) is None
    assert required(model, data_parallel(1.0), 0.0) == GRID[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Model(0, 1.0, 1.0), "layers was 0"),
        (lambda: Model(1, 1.0, 0.0), "step_s was 0"),
        (lambda: diloco(0, 16.0), "period was 0"),
        (lambda: streaming(10, 16.0, fragment=0), "fragment was 0"),
        (lambda: streaming(10, 16.0, delay=-1), "delay was -1"),
        (lambda: timing(ONE, diloco(1, 16.0), 0.0), "rate was 0"),
        (lambda: timing(ONE, diloco(1, 16.0), math.nan), "rate was nan"),
    ],
)
def test_what_no_run_has_is_refused_in_words(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_more_turns_than_a_round_has_steps_are_refused() -> None:
    with pytest.raises(CompositionError, match="37 fragments"):
        utilisation(Model(108, 1e11, 4.9), streaming(30, 4.0), 1e9)
