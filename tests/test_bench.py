"""The benches at toy sizes: they run, compare like with like, and print what they promise. No time is tested."""

import math

import pytest

from atoll.recipes.methods import METHODS
from bench import after_step, boundary, codecs, link, memory, planned, scale, simulated, throughput
from bench.measure import Figure, in_turns, ratios


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
        (lambda: boundary.figures(width=32, layers=2, vocab=64, turns=2, threads=(1,)), 1),
        (lambda: codecs.figures(numel=10_000, turns=1, names=["quantise(8, linear())", "topk(64)"]), 4),
        (lambda: memory.figures(["streaming"], width=32, layers=2, vocab=64, turns=1), 2),
        pytest.param(
            lambda: planned.figures(bandwidth=20e6, elements=1 << 16, step_s=0.01, rounds=1, turns=1),
            3,
            marks=pytest.mark.skipif(link.missing() is not None, reason="no network can be emulated here"),
        ),
        (lambda: scale.figures(share=0.008, rounds=2), 2 * len(scale.CASES)),
        (lambda: simulated.figures(steps=20, turns=1), 1),
        (lambda: throughput.figures(steps=2, turns=1, threads=(1,)), 1),
    ],
    ids=["after_step", "boundary", "codecs", "memory", "planned", "scale", "simulated", "throughput"],
)
def test_a_bench_gives_a_finite_figure_for_every_goal(figures, goals: int) -> None:
    found = list(figures())
    assert all(math.isfinite(value) for figure in found for value in figure.values)
    assert sum(figure.most is not None or figure.least is not None for figure in found) == goals
