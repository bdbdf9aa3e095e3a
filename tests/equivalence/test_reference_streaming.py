"""The reference loop of Streaming DiLoCo against DiLoCo, the paper's example of a schedule, and sums done by hand."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.testing import reference, toys
from atoll.testing.reference import InnerStep

SEED = 3
NESTEROV = reference.nesterov(0.4, 0.9)


def training(make: toys.MakeOptimizer = toys.adamw) -> InnerStep:
    return toys.inner_step(toys.Mlp(), make, SEED)


@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
def test_one_fragment_without_delay_is_diloco_bit_for_bit(make: toys.MakeOptimizer) -> None:
    theta = toys.initial(toys.Mlp())
    want, want_live = reference.diloco(theta, workers=3, steps=18, inner_step=training(make), period=4, outer=NESTEROV)
    got, got_live = reference.streaming(
        theta,
        workers=3,
        steps=18,
        inner_step=training(make),
        period=4,
        fragments=[list(range(len(theta)))],
        delay=0,
        alpha=0.0,
        outer=NESTEROV,
    )
    assert toys.same_bits(got, want)
    assert all(toys.same_bits(a, b) for a, b in zip(got_live, want_live, strict=True))


@pytest.mark.parametrize(("count", "delay"), [(1, 0), (2, 0), (2, 3), (3, 1), (3, 9)])
def test_fragments_leave_on_their_own_grid_after_a_full_period_and_land_delay_steps_later(
    count: int, delay: int
) -> None:
    """The paper's example at H = 100, scaled to H = 10: the second of two fragments syncs at 15, 25, ..., not at 5."""
    now = 0
    landed: dict[int, list[int]] = {p: [] for p in range(count)}
    measured: dict[int, list[float]] = {p: [] for p in range(count)}

    def tick(worker: int, step: int, params: list[Tensor]) -> None:
        nonlocal now
        now = step
        for tensor in params:
            tensor.sub_(1.0)

    def spy(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """The anchor stays at 0 while live falls by 1 a step, so a delta names the step at which it was measured."""
        p = len(gradient) - 1
        landed[p].append(now)
        measured[p].append(gradient[0].item())
        return torch.zeros_like(gradient)

    reference.streaming(
        [torch.zeros(p + 1, dtype=torch.float64) for p in range(count)],
        workers=1,
        steps=50,
        inner_step=tick,
        period=10,
        fragments=[[p] for p in range(count)],
        delay=delay,
        alpha=1.0,
        outer=spy,
    )
    for p, offset in enumerate({1: [0], 2: [0, 5], 3: [0, 3, 6]}[count]):
        sends = [send for send in range(offset + 10, 51, 10) if send + delay <= 50]
        assert measured[p] == sends
        assert landed[p] == [send + delay for send in sends]
        assert all(later - earlier == 10 for earlier, later in pairwise(landed[p]))


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.5), (1, 0.5), (3, 0.0), (3, 0.25), (7, 0.5)])
def test_streaming_follows_the_recursion_over_rounds_worked_out_by_hand(delay: int, alpha: float) -> None:
    """Worker m falls by d_m a step; x_m is its place after a landing. Round by round, with H steps before the first
    send and H - τ before the others: Δ_m = Θ - x_m + (H - τ) d_m; u ← μu + Δ̄; Θ_new = Θ - η(Δ̄ + μu);
    x_m ← α(Θ - Δ_m - τ d_m) + (1 - α) Θ_new.
    """
    period, rounds, d = 8, 4, np.array([0.3, -0.1, 0.7])
    u = anchor = 0.0
    x = np.zeros(3)
    for n in range(rounds):
        deltas = anchor - x + (period if n == 0 else period - delay) * d
        u = 0.9 * u + deltas.mean()
        old, anchor = anchor, anchor - 0.4 * (deltas.mean() + 0.9 * u)
        x = alpha * (old - deltas - delay * d) + (1 - alpha) * anchor
    shared, live = reference.streaming(
        [torch.zeros(1, dtype=torch.float64)],
        workers=3,
        steps=period * rounds + delay,
        inner_step=lambda worker, step, params: params[0].sub_(float(d[worker])),
        period=period,
        fragments=[[0]],
        delay=delay,
        alpha=alpha,
        outer=NESTEROV,
    )
    assert shared[0].item() == pytest.approx(anchor, rel=1e-12)
    assert [params[0].item() for params in live] == pytest.approx(x.tolist(), rel=1e-11)


@pytest.mark.parametrize(("fragment", "offset"), [(0, 0), (1, 2), (2, 4)])
def test_a_fragment_with_an_offset_goes_through_the_rounds_of_one_without_it(fragment: int, offset: int) -> None:
    """Tensors that train apart and begin t_p steps later must come, t_p steps later, to the same bits."""
    theta = [torch.ones(size, dtype=torch.float64) for size in (2, 3, 4)]
    offsets = [0, 2, 4]

    def shifted(worker: int, step: int, params: list[Tensor]) -> None:
        for i, tensor in enumerate(params):
            if step > offsets[i]:
                tensor.sub_(toys.draws(SEED, worker, step - offsets[i], params)[i] / 100)

    def stream(steps: int, inner: InnerStep, fragments: list[list[int]]) -> reference.Result:
        return reference.streaming(
            theta,
            workers=3,
            steps=steps,
            inner_step=inner,
            period=7,
            fragments=fragments,
            delay=2,
            alpha=0.5,
            outer=NESTEROV,
        )

    alone, alone_live = stream(23, toys.pushes(SEED), [[0, 1, 2]])
    offset_by, offset_by_live = stream(23 + offset, shifted, [[0], [1], [2]])
    assert toys.same_bits([offset_by[fragment]], [alone[fragment]])
    for got, want in zip(offset_by_live, alone_live, strict=True):
        assert toys.same_bits([got[fragment]], [want[fragment]])


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_workers_stay_apart_unless_alpha_is_zero_and_are_uncoupled_where_it_is_one(alpha: float) -> None:
    theta = toys.initial(toys.Mlp())
    shared, live = reference.streaming(
        theta,
        workers=3,
        steps=13,
        inner_step=training(),
        period=4,
        fragments=[[0, 2, 4, 6], [1, 3, 5, 7]],
        delay=1,
        alpha=alpha,
        outer=NESTEROV,
    )
    apart = [[tensor.clone() for tensor in theta] for _ in range(3)]
    inner = training()
    for step in range(1, 14):
        for m, params in enumerate(apart):
            inner(m, step, params)
    assert toys.distance(shared, theta) > 1e-3
    assert toys.distance(live[0], live[1]) > 1e-3
    assert all(toys.same_bits(a, b) == (alpha == 1.0) for a, b in zip(live, apart, strict=True))
