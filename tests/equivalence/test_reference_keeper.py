"""The reference loops around a keeper: what they must become in the limits, closed forms, and schedules by hand.

Where the compared arithmetic differs, float64 leaves about 1e-16 per operation; the toys are smooth and the runs short,
so 1e-12 is far above the noise and far below any wrong term.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.testing import reference, toys
from atoll.testing.reference import InnerStep, Outer, Result

SEED = 3
TIGHT = 1e-12
WHOLE = Fraction(1)
HALF = Fraction(1, 2)
NESTEROV = reference.nesterov(0.7, 0.9)
ALONE = [torch.zeros(1, dtype=torch.float64)]


def training() -> InnerStep:
    return toys.inner_step(toys.Mlp(), toys.adamw, SEED)


def walk(*lengths: float) -> InnerStep:
    """Worker m falls by `lengths[m]` a step."""

    def step_of(worker: int, step: int, params: list[Tensor]) -> None:
        for tensor in params:
            tensor.sub_(lengths[worker])

    return step_of


def same_pushes(worker: int, step: int, params: list[Tensor]) -> None:
    """The same displacement for every worker."""
    toys.pushes(SEED)(0, step, params)


def asynchronous(theta: list[Tensor], inner: InnerStep, outer: Outer, *, workers: int = 4, steps: int = 16) -> Result:
    """Workers of one pace at a period of four."""
    return reference.async_local_sgd(
        theta,
        workers=workers,
        steps=steps,
        inner_step=inner,
        periods=[4] * workers,
        paces=[WHOLE] * workers,
        outer=outer,
    )


# Delayed Nesterov


@pytest.mark.parametrize("c", [0.0, 0.1, 0.25])
def test_delayed_nesterov_spreads_one_momentum_step_over_n_deltas(c: float) -> None:
    """By hand at N = 4: the steps of a first cycle of g, from m = 0, and of a second without any g, from m = ḡ. Each g
    counts 1/N, and the weights of the momentum over a cycle, (N - 1)c and 1 - cN + c, make one."""
    lr, beta, n = 0.7, 0.9, 4
    outer = reference.delayed_nesterov(lr, beta, n, c)
    g = [1.0, -2.0, 5.0, 4.0]
    mean = 2.0
    state: dict[str, Any] = {}
    steps = [outer(torch.tensor([value], dtype=torch.float64), state).item() / lr for value in [*g, 0.0, 0.0, 0.0, 0.0]]
    last = 1 - c * n + c
    want = [0.25, -0.5, 1.25, 1.0 + last * beta * mean, *[c * beta * mean] * 3, last * beta * beta * mean]
    assert steps == pytest.approx(want, rel=TIGHT, abs=TIGHT)
    assert (n - 1) * c + last == pytest.approx(1.0)


@pytest.mark.parametrize("inner", [same_pushes, toys.pushes(SEED)])
def test_n_deltas_through_delayed_nesterov_are_one_nesterov_step_on_their_mean(inner: InnerStep) -> None:
    """The deltas do not depend on where a worker starts, so those of one tick are those of a round of DiLoCo."""
    theta = [torch.ones(3, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    shared, _ = asynchronous(theta, inner, reference.delayed_nesterov(0.7, 0.9, 4))
    want, _ = reference.diloco(theta, workers=4, steps=16, inner_step=inner, period=4, outer=NESTEROV)
    assert toys.distance(shared, want) < TIGHT


# Asynchronous local SGD


def test_asynchronous_local_sgd_with_one_worker_is_diloco_bit_for_bit() -> None:
    theta = toys.initial(toys.Mlp())
    shared, (live,) = asynchronous(theta, training(), NESTEROV, workers=1, steps=22)
    want, (want_live,) = reference.diloco(theta, workers=1, steps=22, inner_step=training(), period=4, outer=NESTEROV)
    assert toys.same_bits(shared, want)
    assert toys.same_bits(live, want_live)


def test_four_equal_deltas_in_a_row_carry_nesterov_away_as_the_paper_says() -> None:
    """m⁺ = β⁴m + (1 + β + β² + β³)g; Θ⁺ = Θ - ε[(4 + 4β + 3β² + 2β³ + β⁴)g + β²(1 + β + β² + β³)m]."""
    lr, b, g = 0.7, 0.9, 1.0
    theta = m = 0.0
    for _ in range(3):
        row = 1 + b + b**2 + b**3
        theta -= lr * ((4 + 4 * b + 3 * b**2 + 2 * b**3 + b**4) * g + b**2 * row * m)
        m = b**4 * m + row * g
    (shared,), _ = asynchronous(ALONE, walk(*[g / 4] * 4), reference.nesterov(lr, b), steps=12)
    assert shared.item() == pytest.approx(theta, rel=TIGHT)


def test_workers_step_at_their_own_pace_and_hand_in_after_their_own_steps() -> None:
    """At 1, 2/3 and 1/2 steps a tick, periods of four, two and one: the deltas by the tick at which they come."""
    now: list[tuple[int, int]] = []
    came: list[tuple[int, float]] = []

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        now.append((worker, step))
        params[0].sub_(10.0**worker)

    def spy(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        came.append((max(step for worker, step in now if worker == 0), gradient.item()))
        return torch.zeros_like(gradient)

    reference.async_local_sgd(
        ALONE,
        workers=3,
        steps=8,
        inner_step=push,
        periods=[4, 2, 1],
        paces=[WHOLE, Fraction(2, 3), HALF],
        outer=spy,
    )
    assert [step for worker, step in now if worker == 1] == [1, 2, 3, 4, 5]
    # Worker 1 steps in ticks 2, 3, 5, 6, 8; worker 2 in 2, 4, 6, 8.
    assert came == [(2, 100.0), (3, 20.0), (4, 4.0), (4, 100.0), (6, 20.0), (6, 100.0), (8, 4.0), (8, 100.0)]


def test_workers_who_hand_in_within_a_tick_go_on_from_the_same_anchor() -> None:
    """Two of one pace, outer SGD at one: worker 0 sees what worker 1 hands in after it in the same tick."""
    (shared,), live = asynchronous(ALONE, walk(1.0, 10.0), reference.sgd(1.0), workers=2, steps=8)
    assert [params[0].item() for params in live] == [-88.0, -88.0]
    assert shared.item() == -88.0


# Decoupled DiLoCo


def decoupled(theta: list[Tensor], inner: InnerStep, **options: Any) -> Result:
    defaults: dict[str, Any] = {
        "workers": 2,
        "steps": 8,
        "period": 4,
        "fragments": [list(range(len(theta)))],
        "tokens_per_step": 8,
        "quorum": 1,
        "grace": 0,
        "merge": reference.weighted_mean,
        "outer": NESTEROV,
    }
    options = defaults | options
    return reference.decoupled(theta, inner_step=inner, **{"paces": [WHOLE] * options["workers"]} | options)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_a_keeper_that_waits_for_all_equal_workers_is_streaming_with_a_delay_of_one(count: int, workers: int) -> None:
    """Equal paces make equal weights, and a reply is written over live one step after the push: τ = 1, α = 0. The
    keeper's anchor moves at the push already; after 25 steps all that was sent has landed."""
    theta = toys.initial(toys.Mlp())
    fragments = [list(range(p, len(theta), count)) for p in range(count)]
    shared, live = decoupled(
        theta, training(), workers=workers, steps=25, period=6, fragments=fragments, quorum=workers
    )
    want, want_live = reference.streaming(
        theta,
        workers=workers,
        steps=25,
        inner_step=training(),
        period=6,
        fragments=fragments,
        delay=1,
        alpha=0.0,
        outer=NESTEROV,
    )
    assert toys.distance(shared, want) < TIGHT
    assert all(toys.distance(a, b) < TIGHT for a, b in zip(live, want_live, strict=True))


@pytest.mark.parametrize(
    ("quorum", "grace", "rounds"),
    [
        (1, 0, [(4, [4.0]), (8, [3.0]), (8, [40.0])]),
        (1, 1, [(5, [4.0]), (8, [2.0, 40.0])]),
        (1, 3, [(7, [4.0])]),
        (1, 9, [(8, [4.0, 40.0])]),
        (2, 0, [(8, [4.0, 40.0])]),
        (2, 1, [(8, [4.0, 40.0])]),
    ],
)
def test_a_round_closes_at_its_quorum_and_grace_or_when_all_have_joined(
    quorum: int, grace: int, rounds: list[tuple[int, list[float]]]
) -> None:
    """Paces 1 and 1/2, period 4, an anchor that stays at 0: worker 0 pushes in ticks 4 and 8, worker 1 in tick 8.

    Worker 0's second push holds the steps since the reply to its first put it back to 0, used in the tick after the
    round closed. It does not leave before: not while the first waits, nor in tick 8 with a reply made in tick 7.
    """
    now = 0
    closed: list[tuple[int, list[float]]] = []

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        nonlocal now
        now = step if worker == 0 else now
        params[0].sub_(10.0**worker)

    def spy(deltas: list[Tensor], weights: list[float]) -> Tensor:
        closed.append((now, [delta.item() for delta in deltas]))
        return torch.zeros_like(deltas[0])

    decoupled(ALONE, push, paces=[WHOLE, HALF], quorum=quorum, grace=grace, merge=spy, outer=reference.sgd(1.0))
    assert closed == rounds


def test_the_grace_runs_from_the_quorum_and_not_from_the_last_to_join() -> None:
    """Pushes in tick 4 at pace one and in tick 8 at a half; the third worker's would come in tick 16."""
    closed: list[list[float]] = []

    def spy(deltas: list[Tensor], weights: list[float]) -> Tensor:
        closed.append([delta.item() for delta in deltas])
        return deltas[0]

    for ticks, want in [(8, []), (9, [[4.0, 40.0]])]:
        paces = [WHOLE, HALF, Fraction(1, 4)]
        decoupled(ALONE, walk(1.0, 10.0, 100.0), workers=3, paces=paces, steps=ticks, grace=5, merge=spy)
        assert closed == want


def test_a_push_weighs_its_tokens_times_tokens_a_step_since_the_last_reply() -> None:
    """Worker 0 counts 4 steps up to its first push, then 3 (the step before a reply is used is not counted); worker 1,
    at half the pace, 4 up to the push of tick 8 and 3 up to that of tick 16. w = tokens² / steps, 5 tokens a step."""
    weighed: list[list[float]] = []

    def spy(deltas: list[Tensor], weights: list[float]) -> Tensor:
        weighed.append(weights)
        return deltas[0]

    decoupled(ALONE, lambda worker, step, params: None, paces=[WHOLE, HALF], steps=16, tokens_per_step=5, merge=spy)
    # Ticks 4, 8 (both), 12, 16 (both).
    assert weighed == [[20 * 20 / 4], [15 * 15 / 3], [20 * 20 / 4], [75.0], [75.0], [75.0]]


def test_a_worker_pushes_again_only_after_it_has_used_the_reply_to_its_last_push() -> None:
    """At a period of one, outer SGD at one: the reply to tick 1's push, -1, takes away tick 2's step, in which nothing
    leaves; so the worker walks one step in two ticks."""
    weighed: list[float] = []

    def spy(deltas: list[Tensor], weights: list[float]) -> Tensor:
        weighed.extend(weights)
        return deltas[0]

    def after(ticks: int) -> tuple[float, float]:
        weighed.clear()
        (shared,), ((live,),) = decoupled(
            ALONE,
            walk(1.0),
            workers=1,
            steps=ticks,
            period=1,
            tokens_per_step=1,
            merge=spy,
            outer=reference.sgd(1.0),
        )
        return shared.item(), live.item()

    assert [after(ticks) for ticks in range(1, 7)] == [(-1, -1)] * 2 + [(-2, -2)] * 2 + [(-3, -3)] * 2
    assert weighed == [1, 1, 1]


# Merges of weighted deltas


def numpy_radial_directional(deltas: list[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    lengths = [np.linalg.norm(d) for d in deltas]
    units = [d / length if length else d for d, length in zip(deltas, lengths, strict=True)]
    middle = np.average(units, axis=0, weights=weights)
    length = np.linalg.norm(middle)
    return np.average(lengths, weights=weights) * (middle / length if length else middle)


@pytest.mark.parametrize(
    ("merge", "by_numpy"),
    [
        (reference.weighted_mean, lambda deltas, weights: np.average(deltas, axis=0, weights=weights)),
        (reference.radial_directional, numpy_radial_directional),
    ],
)
def test_merges_are_numpys_weighted_averages(
    merge: Callable[[list[Tensor], list[float]], Tensor],
    by_numpy: Callable[[list[np.ndarray], list[float]], np.ndarray],
) -> None:
    deltas = [toys.draws(SEED, m, 0, [torch.empty(4, 5, dtype=torch.float64)])[0] * (m + 1) for m in range(3)]
    deltas[1].zero_()
    weights = [3.0, 1.0, 12.5]
    want = torch.from_numpy(by_numpy([delta.numpy() for delta in deltas], weights))
    assert toys.distance([merge(deltas, weights)], [want]) < TIGHT


def test_radial_directional_keeps_the_length_that_a_mean_of_orthogonal_deltas_loses() -> None:
    deltas = list(torch.eye(4, dtype=torch.float64) * 3)
    weights = [1.0] * 4
    assert reference.weighted_mean(deltas, weights).norm().item() == pytest.approx(3 / 2)
    assert reference.radial_directional(deltas, weights).norm().item() == pytest.approx(3)
    opposite = [deltas[0], -deltas[0]]
    assert reference.radial_directional(opposite, [1.0, 1.0]).abs().max().item() == 0.0
