"""What a trace adds up to, against closed forms and a plain count of seconds; and what its picture shows."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from atoll.errors import UsageError
from atoll.parts.codecs import exact
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every
from atoll.recipes.methods import METHODS
from atoll.sim.network import Island, Network
from atoll.sim.pace import Pace
from atoll.sim.picture import RULES, TRAINS, WAITS, draw, figure
from atoll.sim.run import Job, simulate, spec
from atoll.sim.trace import Trace
from atoll.sync.rule import Rule, Strategy
from atoll.wire import Key, Landed, Launched, Lost, Reduce

MB = 8e6
KEY = Key(0, 0, 0)
BLOCKING = Strategy((Rule(every(10), outer=nesterov(0.7, 0.9), mixer=all_mean(Reduce(exact()))),))
BEHIND = Strategy((replace(BLOCKING.rules[0], landing=After(3), merge=blend(0.5)),))


def islands(count: int = 4, slow: int | None = None, jitter: float = 0.0) -> Network:
    return Network(tuple(Island(f"site {i}", MB, MB, 1.5 if i == slow else 1.0, jitter) for i in range(count)))


def rounds(strategy: Strategy, count: int, keeps: bool = True, where: Network | None = None) -> Trace:
    return simulate(Job(strategy, (spec(1e6),), steps=10 * count), where or islands(), pace=Pace(1), keeps=keeps)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_blocking_exchange_blocks_and_overlaps_nothing(keeps: bool) -> None:
    """4 islands, 4 MB, 8 Mbit/s: 10 s of steps and 6 s of waiting in each of 10 rounds."""
    trace = rounds(BLOCKING, 10, keeps)
    assert trace.compute == pytest.approx([100.0] * 4, rel=1e-6)
    assert trace.blocked == pytest.approx([60.0] * 4, rel=1e-3)
    assert trace.overlapped == [0.0] * 4
    assert (trace.landed, trace.lost) == ([10] * 4, [0] * 4)
    assert trace.age == 0.0
    assert trace.utilisation == pytest.approx(10 / 16, rel=1e-3)
    assert [trace.used(island) for island in range(4)] == pytest.approx([10 / 16] * 4, rel=1e-3)
    assert bool(trace.moments) is keeps


def test_an_exchange_behind_three_steps_overlaps_them_and_blocks_the_rest() -> None:
    """6 s of exchange behind 3 s of steps, 9 times; the tenth leaves at the last step, and all of it is waited for."""
    trace = rounds(BEHIND, 10)
    assert trace.overlapped == pytest.approx([9 * 3.0] * 4, rel=1e-6)
    assert trace.blocked == pytest.approx([9 * 3.0 + 6.0] * 4, rel=1e-3)
    assert trace.ended == pytest.approx([100 + 9 * 3.0] * 4, rel=1e-3)
    assert trace.seconds == pytest.approx(100 + 9 * 3.0 + 6.0, rel=1e-3)
    assert trace.age == pytest.approx(9 * 3 / 10)


def by_seconds(seed: int) -> tuple[Trace, set[int], set[int], set[int]]:
    """A run of one island in whole seconds, and the seconds in which it trained, waited, and had something in flight.

    Events come at any second, also while it trains.
    """
    draw, trace, now = random.Random(seed), Trace(1), 0
    trained, waited, flew = set[int](), set[int](), set[int]()
    flying: dict[Key, int] = {}
    launched = 0
    while now < 200:
        start, seconds = now, draw.randint(1, 9)
        training = draw.random() < 0.6
        (trained if training else waited).update(range(start, start + seconds))
        if training:
            trace.trained(0, start, seconds)
        for second in range(start, start + seconds + 1):
            for key in [key for key in flying if draw.random() < 0.2]:
                flew.update(range(flying.pop(key), second))
                outcome = Lost(key, "gone") if draw.random() < 0.2 else Landed(key, (0,), 1.0, age=3)
                trace.happened(second, 0, outcome)
            if draw.random() < 0.2:
                launched, key = launched + 1, Key(0, 0, launched)
                flying[key] = second
                trace.happened(second, 0, Launched(key, second))
        if not training:
            trace.waited(0, start, start + seconds, KEY)
        now += seconds
    for since in flying.values():
        flew.update(range(since, now))
    trace.done(0, now)
    return trace, trained, waited, flew


@pytest.mark.parametrize("seed", range(20))
def test_overlapped_seconds_are_those_in_which_it_trained_with_something_in_flight(seed: int) -> None:
    trace, trained, waited, flew = by_seconds(seed)
    assert trace.compute == [len(trained)]
    assert trace.blocked == [len(waited)]
    assert trace.overlapped == [len(trained & flew)]


def test_an_island_that_died_is_charged_for_what_it_did_and_for_no_time_away() -> None:
    """Trains 10 s of each 20; dies 4 s into the second training; comes back at 50 and trains until 60."""
    trace = Trace(2)
    trace.trained(0, 0, 60)
    trace.done(0, 60)
    trace.trained(1, 0, 10)
    trace.happened(10, 1, Launched(KEY, 10))
    trace.waited(1, 10, 20, KEY)
    trace.trained(1, 20, math.inf)
    trace.add(24, 1, "died")
    assert trace.ended[1] == 24
    assert trace.used(1) == pytest.approx(14 / 24)
    trace.add(50, 1, "joined")
    trace.trained(1, 50, 10)
    trace.done(1, 60)
    assert trace.compute == [60, 24]
    assert trace.overlapped == [0, 4]
    assert trace.used(1) == pytest.approx(24 / (60 - 26))
    assert trace.utilisation == pytest.approx((60 + 24) / (60 + 34))
    assert "      20.000 s  island 1  trained for 4.000 s" in list(trace.lines())


def test_an_island_that_takes_up_elsewhere_drops_what_it_was_training() -> None:
    trace = Trace(1)
    trace.trained(0, 0, 10)
    trace.add(4, 0, "joined")
    trace.trained(0, 4, 10)
    trace.done(0, 14)
    assert trace.compute == [14]
    assert trace.used(0) == 1.0


def test_a_newcomer_is_charged_from_when_it_joined() -> None:
    trace = Trace(1)
    trace.add(30, 0, "joined")
    trace.trained(0, 30, 5)
    trace.done(0, 40)
    assert trace.used(0) == 0.5


def test_time_that_an_island_stands_frozen_is_not_training() -> None:
    """10 s of steps that take 30, because it froze from 4 to 24."""
    trace = Trace(1)
    trace.trained(0, 0, 30)
    trace.add(4, 0, "froze")
    trace.add(24, 0, "woke")
    trace.done(0, 30)
    assert trace.compute == [10]
    assert trace.used(0) == pytest.approx(1 / 3)


def test_what_comes_before_the_warm_step_does_not_count() -> None:
    trace = Trace(1)
    trace.trained(0, 0, 2)
    trace.waited(0, 2, 20, KEY)
    trace.warm(0, 20)
    trace.trained(0, 20, 9)
    trace.done(0, 30)
    assert trace.utilisation == pytest.approx(0.9)


def test_lines_are_in_order_of_time_and_then_of_happening() -> None:
    trace = Trace(2)
    trace.trained(0, 0, 5)
    trace.trained(1, 0, 8)
    trace.happened(8, 1, Launched(KEY, 8))
    trace.waited(0, 5, 9, KEY)
    trace.happened(8, 1, Lost(KEY, "the link is cut"))
    assert list(trace.lines()) == [
        "       0.000 s  island 0  trained for 5.000 s",
        "       0.000 s  island 1  trained for 8.000 s",
        "       5.000 s  island 0  idle rule 0 fragment 0 round 0 for 4.000 s",
        "       8.000 s  island 1  launched rule 0 fragment 0 round 0",
        "       8.000 s  island 1  lost rule 0 fragment 0 round 0: the link is cut",
    ]


def test_the_text_says_who_was_not_heard() -> None:
    trace = Trace(4)
    trace.happened(1, 0, Landed(KEY, (0, 1, 2), 0.75, age=10, dropped=(3,)))
    trace.happened(1, 0, Landed(KEY, (0, 1), 1.0, dropped=(2,)))
    trace.happened(1, 0, Landed(KEY, (0, 1, 2, 3), 1.0))
    assert [line.partition("round 0")[2] for line in trace.lines()] == [
        ": age 10; share 0.75, of 0, 1, 2; not heard 3",
        ": not heard 2",
        "",
    ]


def test_totals_are_one_line_for_all_one_for_each_island_and_one_for_each_link() -> None:
    trace = Trace(1)
    trace.trained(0, 0, 3)
    trace.waited(0, 3, 4, KEY)
    trace.happened(4, 0, Landed(KEY, (0,), 1.0, age=5))
    trace.add(4, 0, "late", KEY)
    trace.done(0, 4)
    trace.sent[0] = 6e6
    trace.links = {"zurich > tokyo": 6e6}
    assert list(trace.totals()) == [
        "       4.000 s  1 islands  utilisation 0.7500  age 5.00",
        "island 0  utilisation 0.750  compute_s 3.000  blocked_s 1.000  overlapped_s 0.000  bytes_sent 6000000"
        "  age 5.000  landed 1  lost 0  late 1",
        "link zurich > tokyo  bytes 6000000",
    ]


def test_json_holds_totals_and_moments_and_comes_back_whole() -> None:
    trace = rounds(BEHIND, 3)
    trace.links = {"up 0": 18e6}
    trace.happened(99, 0, Lost(Key(0, 0, 9), "the link is cut"))
    found = json.loads(json.dumps(trace.as_json(), allow_nan=False))
    assert found == trace.as_json()
    assert found["links"] == {"up 0": 18e6}
    # the last step is done at 36 s, and its exchange takes 6 s more
    assert found["seconds"] == pytest.approx(42.0, rel=1e-3)
    assert found["utilisation"] == pytest.approx(30 / 36, rel=1e-3)
    assert found["age"] == pytest.approx((3 + 3 + 0) / 3)
    first = found["islands"][0]
    assert first["compute_s"] == pytest.approx(30.0)
    assert first["blocked_s"] == pytest.approx(3 + 3 + 6, rel=1e-3)
    assert first["overlapped_s"] == pytest.approx(6.0)
    assert first["bytes_sent"] == pytest.approx(3 * 6e6, rel=1e-3)
    assert (first["landed"], first["lost"], first["late"]) == (3, 1, 0)
    assert found["moments"][0] == {"time": 0.0, "island": 0, "kind": "trained", "seconds": 10.0}
    want = {"time": 99, "island": 0, "kind": "lost", "key": [0, 0, 9, 0], "note": "the link is cut"}
    assert found["moments"][-1] == want
    assert [moment["time"] for moment in found["moments"]] == sorted(moment["time"] for moment in found["moments"])


def test_json_has_no_number_for_the_mean_of_nothing_and_no_moments_that_were_not_kept() -> None:
    trace = Trace(1, keeps=False)
    trace.trained(0, 0, 3)
    trace.done(0, 3)
    found = json.loads(json.dumps(trace.as_json(), allow_nan=False))
    assert (found["age"], found["islands"][0]["age"]) == (None, None)
    assert "moments" not in found


def bars(drawn: Figure, color: str) -> list[tuple[float, float, float]]:
    """Bars of one colour in the lanes: left, right, top."""
    found: list[tuple[float, float, float]] = []
    for collection in lanes(drawn).collections:
        if isinstance(collection, PolyCollection) and np.allclose(collection.get_facecolor(), to_rgba(color)):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((box.x0, box.x1, box.y0))
    return found


def lanes(drawn: Figure) -> Axes:
    """Below the strip where there is one; the strip's colours come last."""
    return drawn.axes[:2][-1]


def labels(drawn: Figure) -> list[str]:
    return [label.get_text() for label in lanes(drawn).get_yticklabels()]


def test_a_short_run_is_shown_whole_with_a_bar_for_each_training_and_each_wait() -> None:
    """3 rounds of 10 s of steps and 6 s of waiting."""
    drawn = figure(rounds(BLOCKING, 3))
    assert len(drawn.axes) == 1
    assert labels(drawn) == [f"island {n}" for n in range(4)]
    assert drawn.axes[0].get_xlim() == pytest.approx((0.0, 48.0), rel=1e-3)
    assert drawn.axes[0].get_xlabel() == "seconds"
    trained = [(left, right) for left, right, top in bars(drawn, TRAINS) if top < 1]
    waited = [(left, right) for left, right, top in bars(drawn, WAITS) if top < 1]
    flew = [(left, right) for left, right, top in bars(drawn, RULES[0]) if top < 1]
    assert [time for span in trained for time in span] == pytest.approx([0, 10, 16, 26, 32, 42], rel=1e-3)
    assert [time for span in waited for time in span] == pytest.approx([10, 16, 26, 32, 42, 48], rel=1e-3)
    assert [time for span in flew for time in span] == pytest.approx([10, 16, 26, 32, 42, 48], rel=1e-3)
    assert "62%" in [text.get_text() for text in drawn.axes[0].texts]


def test_what_is_behind_steps_is_drawn_from_launch_to_landing_beside_them() -> None:
    drawn = figure(rounds(BEHIND, 3))
    flew = sorted((left, right) for left, right, top in bars(drawn, RULES[0]) if top < 1)
    # at 10 s for 3 s of steps and 3 s of waiting; at 10 + 10 + 3; at the end, with nothing behind it
    assert [time for span in flew for time in span] == pytest.approx([10, 16, 23, 29, 36, 42], rel=1e-3)


@pytest.mark.parametrize("window", [(100.0, 160.0), (333.0, 350.0)])
def test_a_window_is_all_that_the_lanes_show(window: tuple[float, float]) -> None:
    drawn = figure(rounds(BLOCKING, 40), window=window)
    axes = lanes(drawn)
    scale = 60 if axes.get_xlabel() == "minutes" else 1
    assert [limit * scale for limit in axes.get_xlim()] == pytest.approx(list(window))
    for color in (TRAINS, WAITS, RULES[0]):
        shown = bars(drawn, color)
        assert shown
        assert min(left for left, _, _ in shown) * scale >= window[0] - 1e-6
        assert max(right for _, right, _ in shown) * scale <= window[1] + 1e-6
    assert f"from {window[0]:g} to {window[1]:g} s" in axes.get_title()


def test_a_long_run_shows_eight_rounds_of_its_middle_and_all_of_it_above() -> None:
    drawn = figure(rounds(BLOCKING, 40))
    axes = lanes(drawn)
    start, stop = axes.get_xlim()
    assert (stop - start) * 60 == pytest.approx(8 * 16.0, rel=1e-3)
    assert (start + stop) / 2 * 60 == pytest.approx(40 * 16 / 2, abs=16)
    assert axes.get_title() == "8 of 40 rounds, in the middle of the run"
    assert drawn.axes[0].get_xlim()[1] * 60 == pytest.approx(640.0, rel=1e-3)


def test_the_strip_shows_how_much_of_each_column_an_island_trained() -> None:
    """Columns begin with each wait: 6 s of waiting and 10 s of steps, after the first 10 s and up to the last 6."""
    drawn = figure(rounds(BLOCKING, 40))
    strip = next(each for each in drawn.axes[0].collections if isinstance(each, QuadMesh))
    parts = strip.get_array()
    assert parts is not None
    assert parts.shape == (4, 41)
    assert parts[0].tolist() == pytest.approx([1.0, *[10 / 16] * 39, 0.0], abs=1e-3)


def test_more_islands_than_lanes_are_evenly_chosen_and_said_to_be() -> None:
    drawn = figure(rounds(BLOCKING, 2, where=islands(9)), islands=3)
    assert labels(drawn) == ["island 0", "island 4", "island 8"]
    assert "3 of 9 islands shown" in drawn.axes[0].get_title(loc="left")
    assert len({math.floor(top) for _, _, top in bars(drawn, TRAINS)}) == 3


def test_exchanges_of_one_rule_at_a_time_lie_in_rows_of_their_own() -> None:
    """Two fragments in flight from 10 to 20 and from 15 to 25, a third one from 21 to 22."""
    trace = Trace(1)
    trace.trained(0, 0, 30)
    spans = {Key(0, 0, 0): (10, 20), Key(0, 1, 0): (15, 25), Key(0, 0, 1): (21, 22)}
    for time, key in sorted((time, key) for key, span in spans.items() for time in span):
        trace.happened(time, 0, Launched(key, time) if time == spans[key][0] else Landed(key, (0,), 1.0))
    trace.done(0, 30)
    shown = bars(figure(trace), RULES[0])
    rows = {(round(left), round(right)): top for left, right, top in shown}
    assert set(rows) == set(spans.values())
    assert rows[10, 20] == rows[21, 22] < rows[15, 25]


def test_faults_draw_the_window_and_are_marked() -> None:
    """40 rounds of 10 s; an island dies at 315 s and is back at 345 s."""
    trace = Trace(2)
    for island, each in enumerate((range(40), [*range(32), *range(35, 40)])):
        for key in (Key(0, 0, number) for number in each):
            now = 10.0 * key.round
            if island and key.round == 35:
                trace.add(345, 1, "joined")
            trace.trained(island, now, 10.0)
            trace.happened(now, island, Launched(key, 0))
            if island and key.round == 31:
                trace.add(315, 1, "died")
            else:
                trace.happened(now + 10, island, Landed(key, (0, 1), 1.0))
        trace.done(island, 400.0)
    drawn = figure(trace, names=["Zürich", "Tokyo"])
    axes = lanes(drawn)
    start, stop = (limit * 60 for limit in axes.get_xlim())
    assert stop - start == pytest.approx(80.0)
    assert start < 315 < 345 < stop
    assert axes.get_title() == "8 of 40 rounds, where most happened: died, joined"
    assert labels(drawn) == ["Zürich", "Tokyo"]
    marks = [line for line in axes.lines if line.get_marker() in ("v", "^")]
    assert {round(float(np.ravel(line.get_xdata())[0]) * 60) for line in marks} == {315, 345}
    second = [(left * 60, right * 60) for left, right, top in bars(drawn, TRAINS) if top > 1]
    assert not any(left < 330 < right for left, right in second)
    said = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert said == ["trains", "waits for an exchange", "in flight, rule 0", "died", "joined"]


@pytest.mark.parametrize("name", ["diloco", "global-m1-local-m2", "streaming", "noloco"])
def test_a_run_of_any_method_becomes_a_png(name: str, tmp_path: Path) -> None:
    specs = (spec(5e5, "embed.weight"), *(spec(1e5, f"layers.{block}.weight") for block in range(6)))
    job = Job(METHODS[name](period=10).strategy, specs, steps=150)
    draw(tmp_path / "run.png", simulate(job, islands(8, slow=3, jitter=0.05), pace=Pace(1), keeps=True))
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: figure(Trace(1, keeps=False)), "keeps=True"),
        (lambda: figure(rounds(BLOCKING, 1), islands=0), "1 or more"),
        (lambda: figure(rounds(BLOCKING, 1), window=(3, 2)), "nothing happened"),
        (lambda: figure(rounds(BLOCKING, 1), window=(17, 19)), "training took 16"),
        (lambda: figure(rounds(BLOCKING, 1), names=["one"]), "1 names were given for 4 islands"),
    ],
)
def test_what_cannot_be_drawn_is_said_with_what_to_do(ask: Callable[[], Figure], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask()
