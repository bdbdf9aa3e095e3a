"""The benches at toy sizes: they run, compare like with like, and print what they promise. No time is tested."""

import math
import socket
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from atoll.recipes.methods import METHODS, diloco, factored_gossip
from atoll.testing.processes import launch
from atoll.train.run import Method
from bench import (
    after_step,
    apart,
    beside,
    boundary,
    codecs,
    link,
    lives,
    memory,
    planned,
    scale,
    simulated,
    throughput,
    used,
    wide,
)
from bench.engines import ENGINES, Engine, Told
from bench.measure import Figure, in_turns, ratios

emulated = pytest.mark.skipif(link.missing() is not None, reason=f"no network can be emulated here: {link.missing()}")


def test_turns_are_interleaved_and_prepared_each_time() -> None:
    done: list[str] = []
    actions = [lambda: done.append("a"), lambda: done.append("b")]
    seconds = in_turns(actions, 2, lambda: done.append("-"))
    assert "".join(done) == "-ab-ab"
    assert [len(each) for each in seconds] == [2, 2]


def test_a_ratio_is_taken_within_each_turn() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_a_line_has_median_quartiles_goal_and_verdict() -> None:
    assert "2 [1.5, 2.5] s; at most 2: met" in str(Figure("x", [1.0, 2.0, 3.0], "s", most=2.0))
    assert "2 [1.5, 2.5] s; at least 2.1: MISSED" in str(Figure("x", [1.0, 2.0, 3.0], "s", least=2.1))


@pytest.mark.parametrize(
    ("figures", "goals"),
    [
        (lambda: after_step.figures(calls=10, turns=2, layers=2), len(METHODS) - 1),
        pytest.param(lambda: apart.figures(20_000, link.Access(20e6, 0.005), rounds=1), 0, marks=emulated),
        pytest.param(lambda: beside.figures(20_000, link.Access(20e6, 0.005), rounds=1), 1, marks=emulated),
        (lambda: boundary.figures(width=32, layers=2, vocab=64, turns=2, threads=(1,)), 1),
        (lambda: codecs.figures(numel=10_000, turns=1, names=["quantise(8, linear())", "topk(64)"]), 4),
        (lambda: memory.figures(["streaming"], width=32, layers=2, vocab=64, turns=1), 2),
        pytest.param(
            lambda: planned.figures(bandwidth=20e6, elements=20_000, step_s=0.01, rounds=1, turns=1), 3, marks=emulated
        ),
        (lambda: scale.figures(share=0.008, rounds=2), 2 * len(scale.CASES)),
        (lambda: simulated.figures(steps=20, turns=1), 1),
        (lambda: throughput.figures(steps=2, turns=1, threads=(1,)), 1),
        pytest.param(lambda: used.figures(20e6, 100_000, 0.002, rounds=1, methods=used.METHODS[:1]), 2, marks=emulated),
    ],
    ids=[
        "after_step",
        "apart",
        "beside",
        "boundary",
        "codecs",
        "memory",
        "planned",
        "scale",
        "simulated",
        "throughput",
        "used",
    ],
)
def test_a_bench_gives_a_finite_figure_for_every_goal(figures, goals: int) -> None:
    found = list(figures())
    assert all(math.isfinite(value) for figure in found for value in figure.values)
    assert sum(figure.most is not None or figure.least is not None for figure in found) == goals


@emulated
def test_engines_are_compared_over_a_link_and_those_that_cannot_be_are_named(capsys) -> None:
    others = (Engine("nowhere", needs="torch", install="x"), Engine("absent", needs="absent", install="y"))
    engines = (*ENGINES[:3], *others)
    found = list(wide.figures([link.Access(20e6, 0.005)], peers=2, elements=1 << 16, turns=1, warm=1, engines=engines))
    lines = capsys.readouterr().out
    assert "absent skipped: not installed (pip install y)" in lines
    assert "nowhere failed" in lines
    assert "No module named 'bench.engines.nowhere'" in lines
    assert "raw all-mean ratio 0." in lines
    assert "atoll all-mean ratio 0." in lines
    assert "gloo all-mean ratio 0." in lines
    assert "not the mean" not in lines
    of_link = [value for figure in found if "of the link" in figure.unit for value in figure.values]
    assert len(of_link) == 6  # warm and cold, of three engines
    assert all(0 < value < 1 for value in of_link)


@emulated
def test_a_network_has_its_latency_its_bandwidth_and_its_queue() -> None:
    traffic = link.Traffic()
    with link.network(2, link.Access(1e6, 0.02), traffic) as door:
        (began,), heard = launch(datagrams, 2, door)
    # Of 10 ms each on either line: ten wait no longer than a tenth of a second, and one is on its way.
    assert 11 <= len(heard) == 30 - traffic.dropped < 30
    assert heard[-1] - began >= 0.02 + 0.01 * (len(heard) + 1)


def datagrams(host: int, door: str) -> list[float]:
    """The first host sends 30 at once, of 1250 bytes on the wire, and returns when; the other one when each came."""
    link.join(door, host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.bind((f"10.0.0.{host + 1}", 5000))
        if host == 0:
            way.recv(1)
            began = time.monotonic()
            for _ in range(30):
                way.sendto(bytes(1250 - link.FRAMING - 28), ("10.0.0.2", 5000))
            time.sleep(0.5)  # a call that comes once nobody listens is answered by the kernel, through the full queue
            return [began]
        way.settimeout(0.5)
        heard: list[float] = []
        while not heard or time.monotonic() < heard[-1] + 0.5:
            if not heard:
                way.sendto(b"!", ("10.0.0.1", 5000))
            with suppress(TimeoutError):
                way.recv(1250)
                heard.append(time.monotonic())
        return heard


def test_a_ring_of_members_sends_its_share_at_least() -> None:
    access = link.Access(8e6)
    assert wide.Case(access, peers=4, members=4, elements=1000).ideal == pytest.approx(1.5 * 4000 / 1e6)
    assert wide.Case(access, peers=4, members=2, elements=1000).ideal == pytest.approx(4000 / 1e6)
    assert wide.Case(access, peers=4, members=2, elements=1000).seat(3).members == (2, 3)


def test_an_exchange_that_one_peer_got_wrong_is_not_timed() -> None:
    right, wrong = Told(1.0, 3.0, 0.5, True), Told(2.0, 4.0, 0.5, False)
    run = wide.Ran([[right, right], [right, right], [right, wrong], [right, right]], control="", late=0.0)
    assert run.warm == [2.0]
    assert run.right(2) is False


def test_a_round_is_the_shortest_that_is_planned_to_be_used_so_well() -> None:
    case = lives.Case(link.Access(8e6, 0.1), planned=0.9, step_s=0.5)
    # of four islands each sends three quarters of 844,928 values twice, which takes two latencies
    boundary = 2 * (0.75 * 4 * 844_928 * 8 / 8e6 + 0.1)
    assert case.period == math.ceil(9 * boundary / case.step_s)
    assert case.run(seed=0).steps == case.rounds * case.period


def test_utilisation_counts_what_steps_should_take_and_a_joiner_from_its_hello() -> None:
    whole = lives.Life([lives.Told(0, 0.0, 9.0), lives.Told(20, 10.0, 1.0, slow=3)], lives.Ended(2.5, "same"))
    dead = lives.Life([lives.Told(0, 0.0, 9.0), lives.Told(10, 5.0, 1.0)])
    joiner = lives.Life([lives.Told(10, 0.0, 2.0), lives.Told(20, 5.0, 1.0)], lives.Ended(2.5, "same"))
    run = lives.Ran(lives.Case(step_s=0.4), [whole, dead, joiner], late=0.0)
    assert [life.joined for life in run.lives] == [False, False, True]
    assert run.utilisation == pytest.approx(0.4 * (20 + 10 + 10) / (10 + 5 + 2 + 5))
    assert run.slow == 3 / 40
    assert run.loss == 2.5
    with pytest.raises(AssertionError, match="2 digests"):
        _ = lives.Ran(run.case, [whole, replace(joiner, ended=lives.Ended(2.5, "another"))], late=0.0).loss


@pytest.mark.parametrize("method", [diloco(20), factored_gossip(20)], ids=lambda method: method.name)
def test_a_calibration_is_found_from_what_it_makes_of_three_settings(method: Method) -> None:
    true = planned.Calibration(fixed=0.03, each=2e-7, efficiency=0.85)
    base = planned.Case(method, 50e6, 0.02, 1_400_000, 0.1, 8)
    slow, bare = replace(base, bandwidth=25e6), replace(base, elements=1, step_s=0.01)
    found = planned.calibrated(bare, base, slow, {case: true.boundary(case) for case in (bare, base, slow)})
    assert (found.fixed, found.each, found.efficiency) == pytest.approx(
        (true.fixed, true.each, true.efficiency), rel=1e-4
    )


def test_an_efficiency_is_what_two_settings_have_in_common_where_elements_take_no_time() -> None:
    base = planned.Case(diloco(20), 50e6, 0.02, 1_400_000, 0.1, 8)
    slow, bare = replace(base, bandwidth=25e6), replace(base, elements=1)
    # 16.8 MB at 50 Mbit/s, of which each island sends three quarters twice, at 0.9 of it and at 0.8
    bits = 8 * 4 * 3 * 1_400_000 * 2 * 3 / 4
    seconds = {bare: 0.04, base: 0.04 + bits / 50e6 / 0.9, slow: 0.04 + bits / 25e6 / 0.8}
    found = planned.calibrated(bare, base, slow, seconds)
    assert found.each == 0
    assert 0.84 < found.efficiency < 0.86
    assert planned.calibrated(bare, base, None, seconds).efficiency == pytest.approx(0.9, rel=1e-3)
