"""What `atoll plan` says, against arithmetic done by hand, longer simulations, and itself asked in another way."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll.cli.plan import row, rows
from atoll.recipes.methods import METHODS
from atoll.sim import plan
from atoll.sim.plan import Curve, Setting, exchanged, sent, unawaited, used
from atoll.sim.published import GOSSIP_MODEL, SCALING, STREAMING
from atoll.sim.run import spec
from atoll.sync.explain import explain
from atoll.sync.rule import Strategy
from atoll.train.model import meta_model
from atoll.trees import spec_of, trainable
from tests.cli.conftest import Call

SMALL = "--params 1e6 --layers 4 --workers 4"
"""Four islands, 4 MB of parameters, 1 s per inner step."""
MB = 8e6
SPECS = (spec(2e5, "embed.weight"), *(spec(2e5, f"layers.{block}.weight") for block in range(4)))
OVERLAPPING = METHODS["streaming"](period=20, fragments=4, delay=18).strategy


def of(name: str, period: int = 20) -> tuple[Strategy, int]:
    each = row(name, name, {"period": period})
    return each.strategy, each.period


def test_a_step_takes_six_flop_for_each_parameter_and_token(atoll: Call) -> None:
    by_flops = atoll(f"plan diloco {SMALL} --flops 3e12 --tokens-per-step 1000000 --bandwidth 8Mbit --json").json
    by_time = atoll(f"plan diloco {SMALL} --step-time 2 --bandwidth 8Mbit --json").json
    assert by_flops[0]["inner_step_s"] == pytest.approx(2.0, rel=1e-9)
    assert by_flops[0]["utilisation"] == pytest.approx(by_time[0]["utilisation"], rel=1e-9)


def test_the_plan_of_diloco_is_the_arithmetic_of_its_two_trips(atoll: Call) -> None:
    """100 steps of 1 s, then 3/4 of 4 MB out and 3/4 back over 8 Mbit/s: 6 s. 4e9 tokens are 1e6 / 262.144 steps."""
    (said,) = atoll(f"plan diloco {SMALL} --bandwidth 8Mbit --tokens 1e9 --json").json
    steps = 1e9 / (4 * 262_144)
    assert said["utilisation"] == pytest.approx(100 / 106, rel=1e-4)
    assert said["round_s"] == pytest.approx(106, rel=1e-4)
    assert said["bytes_per_worker_and_round"] == pytest.approx(6e6, rel=1e-4)
    assert said["wall_s"] == pytest.approx(steps * 1.06, rel=1e-4)
    assert said["bytes_per_worker"] == pytest.approx(steps * 6e4, rel=1e-4)
    for target, bits in said["needed_bps"].items():
        waits = 100 * (1 / float(target) - 1)
        assert 48e6 / waits <= bits * 1.0001 <= 48e6 / waits * 1.0111


def test_a_model_too_large_to_list_its_chunks_is_planned_by_the_same_arithmetic(atoll: Call) -> None:
    (said,) = atoll("plan diloco --params 1e15 --workers 4 --bandwidth 1000Tbit --json").json
    assert said["utilisation"] == pytest.approx(100 / 148, rel=1e-6)
    assert said["bytes_per_worker_and_round"] == pytest.approx(6e15, rel=1e-6)


def test_rows_are_methods_with_arguments_of_their_own() -> None:
    found = rows(["streaming:fragments=4,delay=2", "diloco:period=500", "diloco", "data-parallel"], 30)
    assert [each.label for each in found] == [
        "streaming:fragments=4,delay=2",
        "diloco:period=500",
        "diloco",
        "data-parallel",
    ]
    assert [each.period for each in found] == [30, 500, 30, 1]
    assert found[0].strategy == METHODS["streaming"](period=30, fragments=4, delay=2).strategy
    assert found[1].strategy == METHODS["diloco"](period=500).strategy


def test_every_row_has_its_label_in_table_and_json(atoll: Call) -> None:
    said = atoll(f"plan diloco diloco:period=500 {SMALL} --bandwidth 8Mbit --json")
    assert [each["method"] for each in said.json] == ["diloco", "diloco:period=500"]
    assert [each["period"] for each in said.json] == [100, 500]
    assert "diloco:period=500" in said.err


TINY = meta_model("tiny", vocab=256, length=128)


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name]().strategy.kept])
def test_bytes_are_those_that_explain_counts_in_a_round(name: str) -> None:
    with torch.device("meta"):
        specs = tuple(spec_of(*each) for each in trainable(TINY).items())
    strategy, period = of(name)
    each = explain(TINY, strategy, workers=4, steps=period).exchanges
    want = sum(one.nbytes for one in each) / period
    # pieces of a reduced chunk are whole blocks, and the fluid model splits them evenly
    assert sent(strategy, period, Setting(specs, 4, 1.0)) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("latency", [0.0, 0.3])
@pytest.mark.parametrize("bandwidth", [0.2 * MB, MB, 10 * MB])
@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name]().strategy.kept])
def test_two_rounds_tell_what_sixteen_do_where_rounds_repeat(name: str, bandwidth: float, latency: float) -> None:
    strategy, period = of(name)
    where = Setting(SPECS, 4, 1.0, bandwidth, latency)
    want = where.trace(strategy, period, 16, 16).utilisation
    assert used(strategy, period, where)[0] == pytest.approx(want, rel=1e-9)


def test_only_rounds_that_repeat_are_told_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[int] = []
    trace = Setting.trace

    def noted(self: Setting, strategy: Strategy, period: int, warm: int, rounds: int):
        simulated.append(rounds)
        return trace(self, strategy, period, warm, rounds)

    monkeypatch.setattr(Setting, "trace", noted)
    even = Setting(SPECS, 4, 1.0, MB)
    for strategy, where in (
        (of("diloco")[0], replace(even, jitter=0.1)),
        (of("local-m1-m2")[0], replace(even, workers=5)),
        (of("async-local-sgd")[0], even),
        (OVERLAPPING, even),
    ):
        simulated.clear()
        used(strategy, 20, where)
        assert simulated[0] > 2


@pytest.mark.parametrize("load", [1.01, 1.03, 1.5])
def test_a_link_that_fills_slowly_is_planned_as_it_ends(load: float) -> None:
    """Exchanges that overlap hide a link that is a little too slow for many rounds; in the end it is always busy."""
    where = Setting(SPECS, 4, 1.0)
    slow = replace(where, bandwidth=8 * sent(OVERLAPPING, 20, where) / load)
    assert used(OVERLAPPING, 20, slow)[0] == pytest.approx(1 / load, rel=0.01)
    assert used(OVERLAPPING, 20, slow)[0] <= 1 / load * (1 + 1e-9)


def linear(bits: float) -> float:
    return 1 / (1 + 100 / bits)


def kinked(bits: float) -> float:
    return min(1.0, bits / 100, 1 / (0.7 + 100 / bits))


def stepped(bits: float) -> float:
    return 1 / math.ceil(1000 / bits) if bits < 1000 else 1.0


def late(bits: float) -> float:
    return 0.93 / (1 + 1 / bits)


@pytest.mark.parametrize("target", plan.TARGETS)
@pytest.mark.parametrize("value", [linear, kinked, stepped, late])
def test_the_first_bandwidth_that_reaches_a_target_is_found_to_a_percent(
    value: Callable[[float], float], target: float
) -> None:
    asked: list[float] = []

    def measure(bits: float) -> float:
        asked.append(bits)
        return value(bits)

    found = Curve(measure, 50.0).reaches(target)
    assert len(asked) == len(set(asked)) <= 17
    if value is late and target > 0.93:
        assert found is None
        return
    assert found is not None
    assert value(found) >= target > value(found / 1.0101)


def test_what_sends_nothing_or_waits_for_nothing_is_content_with_any_link(atoll: Call) -> None:
    said = atoll(f"plan single decoupled {SMALL} --bandwidth 8Mbit --json")
    for each in said.json:
        assert set(each["needed_bps"].values()) == {0.0}
    assert said.err.count("any") >= 10


def counted(strategy: Strategy, period: int, where: Setting, rounds: int) -> tuple[float, float]:
    """Launches in the last three quarters of a long run, as a part of those that are due, and their mean age; of the
    islands that do not stand beside the keeper."""
    trace = where.trace(strategy, period, 0, rounds, keeps=True)
    since, ages, far = rounds * period / 4, list[float](), [each for each in trace.moments if each.island]
    launched = {(each.island, each.key): each.time for each in far if each.kind == "launched"}
    for each in far:
        if each.kind == "landed" and launched[each.island, each.key] > since:
            ages.append(each.time - launched[each.island, each.key])
    tracks = len({(island, key.fragment) for island, key in launched if key})
    late = sum(time > since for time in launched.values())
    return late / (tracks * rounds * 3 / 4), sum(ages) / len(ages)


@pytest.mark.parametrize("load", [0.2, 2.0, 6.0])
def test_rounds_that_nobody_waits_for_are_counted_as_in_a_long_run(load: float) -> None:
    strategy, period = of("decoupled")
    where = Setting(SPECS, 3, 1.0)
    where = replace(where, bandwidth=8 * 3 * sent(strategy, period, where) / load)
    share, age = counted(strategy, period, where, 300)
    found = exchanged(strategy, period, where)
    assert (found.share == 1.0) == (load < 1)
    assert found.share == pytest.approx(share, rel=0.15)
    assert found.age == pytest.approx(age, rel=0.15)


def test_a_fragment_leaves_again_at_its_first_turn_after_it_has_landed() -> None:
    """4 MB at 8 Mbit/s: 4 s to the keeper beside the other island, 4 s back; turns are every 10, 6 and 4 steps."""
    specs = (spec(1, "embed.weight"), spec(1e6, "layers.0.weight"))
    for period, turns in ((10, 1), (6, 2), (4, 3)):
        strategy = METHODS["decoupled"](period=period, fragments=1, grace=0).strategy
        found = exchanged(strategy, period, Setting(specs, 2, 1.0, MB))
        assert unawaited(strategy)
        # the embedding is one element, and always there at once
        assert found.share == pytest.approx((1 + 1 / turns) / 2, abs=0.1)


def test_a_method_that_never_waits_says_how_few_of_its_rounds_come_about(atoll: Call) -> None:
    slow = atoll(f"plan decoupled {SMALL} --workers 3 --bandwidth 20kbit --json")
    (each,) = slow.json
    assert each["utilisation"] == 1.0
    assert each["exchanged"]["part_of_rounds"] < 0.5
    assert each["exchanged"]["age_steps"] > 100
    words = " ".join(slow.err.split())
    part = re.search(r"nobody waits, but only ([\d.]+)% of the rounds are exchanged", words)
    assert part
    assert float(part[1]) == pytest.approx(100 * each["exchanged"]["part_of_rounds"], abs=0.5)
    assert "an anchor comes back after" in words
    fast = atoll(f"plan decoupled diloco {SMALL} --workers 2 --bandwidth 800Mbit --json")
    assert fast.json[0]["exchanged"]["part_of_rounds"] == 1.0
    assert fast.json[1]["exchanged"] is None
    assert "all rounds are exchanged" in fast.err
    never = atoll(f"plan decoupled {SMALL} --workers 2 --bandwidth 1bit --json")
    assert never.json[0]["exchanged"]["age_steps"] is None
    assert "nothing comes back" in never.err


@pytest.mark.parametrize("bandwidth", ["80kbit", "20Mbit"])
def test_every_change_that_is_named_helps_and_says_by_how_much(bandwidth: str, atoll: Call) -> None:
    names = ["data-parallel", "diloco", "streaming", "sparseloco", "decoupled"]
    said = atoll("plan", *names, *SMALL.split(), "--bandwidth", bandwidth, "--tokens", "1e9", "--json").json
    for each in said:
        gains = [change["gain"] for change in each["changes"]]
        assert gains == sorted(gains, reverse=True)
        for change in each["changes"]:
            assert change["gain"] == pytest.approx(change["utilisation"] - each["utilisation"])
            assert change["saved_s"] >= -1e-6
            now = each["exchanged"] or {"part_of_rounds": 1.0}
            more = (change["part_of_rounds"] or 1.0) / now["part_of_rounds"]
            assert more >= 1.0
            assert change["gain"] >= 0.001 or more >= 1.25


def test_a_change_leads_to_what_planning_it_says(atoll: Call) -> None:
    options = f"{SMALL} --bandwidth 2Mbit --tokens 1e9"
    now, twice, overlap = atoll(f"plan diloco diloco:period=200 streaming {options} --json").json
    helps = {change["what"]: change for change in now["changes"]}
    for change, then in ((helps["twice the period, 200"], twice), (helps["overlap: streaming"], overlap)):
        assert change["utilisation"] == pytest.approx(then["utilisation"])
        assert change["saved_s"] == pytest.approx(now["wall_s"] - then["wall_s"])
    people = atoll(f"plan diloco {options}").out
    for what, change in helps.items():
        assert f"{what}: {change['utilisation']:.0%}, +{100 * change['gain']:.1f} points, saves" in people


def test_progress_is_for_terminals_and_leaves_the_answer_alone(atoll: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = atoll(f"plan diloco {SMALL} --bandwidth 8Mbit --json")
    assert "planning" not in quiet.err
    stream = sys.stderr
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    watched = atoll(f"plan diloco {SMALL} --bandwidth 8Mbit --json")
    assert "planning" in watched.err
    assert "trying changes" in watched.err
    assert watched.out == quiet.out


def test_the_table_of_factored_gossip_is_for_people_unless_json_is_asked_for(atoll: Call) -> None:
    people, said = atoll("plan --paper factored-gossip"), atoll("plan --paper factored-gossip --json").json
    assert len(said) == 7
    for each in said:
        assert round(each["utilisation"], 2) == each["published"]
        assert f"{each['utilisation']:.1%}" in people.out
        worse = each["utilisation_with_latency_and_jitter"]
        assert each["utilisation"] - 0.01 < worse <= each["utilisation"] + 0.0005
    far = max(abs(each["utilisation"] - each["published"]) for each in said)
    assert (
        f"7 of 7 figures are the published ones to the percent; the largest difference is {100 * far:.2f} points."
        in (people.out)
    )
    assert "{" not in people.out


@pytest.mark.parametrize(("name", "table"), [("streaming", STREAMING), ("scaling", SCALING)])
def test_a_table_of_bandwidths_says_how_well_it_agrees(name: str, table: object, atoll: Call) -> None:
    said, people = atoll(f"plan --paper {name} --json").json, atoll(f"plan --paper {name}").out
    assert len(said) == 75
    # a point of the grid is a factor of 10 ** (4 / 49)
    apart = Counter[int]()
    for each in said:
        ours, theirs = (each[key] or 10**12 * 10 ** (4 / 49) for key in ("bandwidth_bps", "published"))
        points = round(math.log10(ours / theirs) / (4 / 49))
        assert each["points_apart"] == points
        apart[abs(points)] += 1
    one, two = apart[0] + apart[1], apart[0] + apart[1] + apart[2]
    sentence = " ".join(people.split())
    assert (
        f"{apart[0]} of 75 cells are the same point of the grid, {one} lie within one point and {two} within two"
        in sentence
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("diloco --params 1e18", "--params was 1e+18, but a plan is made for 1 to 1e+15"),
        ("diloco --workers 1000000000", "--workers was 1000000000, but a plan is made for 1 to 512"),
        ("diloco --params 1e9 --layers 1000000000", "--layers was 1000000000"),
        ("diloco --period 1000000000000", "--period was 1000000000000"),
        ("diloco:period=1000000000000", "has a period of 1000000000000"),
        ("diloco --period 1000000 --jitter 0.1", "jitter is drawn for 200000 at most"),
        ("diloco --jitter 1", "--jitter was 1.0, but it is a part of a step"),
        ("diloco --seed 99999999999999999999", "--seed was 99999999999999999999"),
        ("decoupled --workers 512", "decoupled makes 1310720 exchanges in a round of 512 islands with a keeper"),
        ("streaming:fragments=400 --params 1e9 --layers 400 --period 500 --workers 100", "but 10000 are simulated"),
        ("diloco --step-time 1e-300", "--step-time was 1e-300"),
        ("diloco --step-time 1 --flops 1e15", "--step-time and --flops were both given"),
        ("diloco --flops 1e-300", "--flops 1e-300 means inf s for an inner step"),
        ("diloco --flops 1e300", "--flops 1e+300 means 2.36e-285 s"),
        ("diloco --latency 1e300", "--latency was 1e+300"),
        ("diloco --tokens 1e300", "--tokens was 1e+300"),
        ("diloco --tokens-per-step 99999999999999", "--tokens-per-step was 99999999999999"),
        ("diloco --bandwidth 0.001bit", "--bandwidth was 0.001bit, but a plan is made for 1bit to 1000Tbit"),
        ("diloco --bandwidth 9999999Tbit", "--bandwidth was 9999999Tbit"),
        ("diloco diloco", "'diloco' was given twice"),
        ("dilco", "the method 'dilco' is unknown; did you mean diloco?"),
        ("diloco:perod=3", "'diloco:perod=3' has the unknown key 'perod'; did you mean period?"),
        ("single:period=3", "'single:period=3' has the unknown key 'period'; it has none, write single"),
        ("diloco:period", "'diloco:period' has 'period' where a KEY=VALUE belongs"),
        ("diloco:period=x", "diloco:period was 'x', but it takes a whole number"),
        ("streaming:fragments=17", "17 fragments of whole blocks were asked for, but the model has 16"),
        ("streaming --period 2", "3 fragments were to take turns within a period of 2 inner steps"),
        ("diloco --paper scaling", "atoll plan needs methods, or --paper NAME without any"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words: str, sentence: str, atoll: Call) -> None:
    said = atoll(f"plan {words}")
    assert sentence in said.err
    assert (said.status, said.out) == (2, "")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "diloco --params 1e15 --bandwidth 1bit",
        "diloco --params 1e12 --layers 1000 --bandwidth 1Gbit",
        "diloco decoupled --period 1000000 --bandwidth 1Mbit",
        "diloco decoupled --workers 1 --bandwidth 1Mbit",
        "diloco --latency 1000000 --bandwidth 1Mbit",
    ],
)
def test_what_is_large_but_planned_has_an_answer(words: str, atoll: Call) -> None:
    said = atoll(f"plan {words} --json")
    assert said.status == 0
    assert all(0 <= each["utilisation"] <= 1 for each in said.json)


def test_as_many_islands_as_are_planned_for_cost_seconds() -> None:
    """512 islands: 100 steps of 1 s, then 511/512 of 4 MB out and back over 8 Mbit/s."""
    busy, step_s = used(*of("diloco", 100), Setting(SPECS, 512, 1.0, MB))
    assert busy == pytest.approx(100 / (100 + 8 * 511 / 512), rel=1e-3)
    assert step_s == pytest.approx(1 / busy)


def test_a_plot_is_drawn_for_methods_that_wait_and_that_do_not(atoll: Call, tmp_path: object) -> None:
    path = f"{tmp_path}/plan.png"
    said = atoll(
        f"plan diloco decoupled --params 1e6 --layers 4 --workers 2 --period 10 --bandwidth 8Mbit --out {path}"
    )
    assert said.status == 0
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("bits", "want"), [(100e6, 31.0), (200e6, 47.3)])
def test_collectives_that_begin_again_cost_what_the_paper_reads_and_pairs_do_not_begin_again(
    bits: float, want: float
) -> None:
    """8 links that fail with 5 %, 1.5 B parameters in 16 bits: Factored Gossip's failure experiment, within a point."""
    specs = (spec(GOSSIP_MODEL.parameters, "layers.0.weight"),)
    where = Setting(specs, 8, GOSSIP_MODEL.step_s, bits)
    whole, pairs = (METHODS[name](period=100).strategy for name in ("opendiloco", "local-m1-m2"))
    failing = replace(where, failing=0.05)
    assert abs(100 * used(whole, 100, failing)[0] - want) < 1.0
    assert used(whole, 100, failing)[0] < used(whole, 100, where)[0]
    assert used(pairs, 100, failing)[0] == pytest.approx(used(pairs, 100, where)[0], rel=1e-3)


def test_more_failures_than_can_be_planned_for_are_refused(atoll: Call) -> None:
    assert "--failing was 0.7" in atoll("plan diloco --failing 0.7").err
