"""The reference loops against facts that owe nothing to them: torch's own optimizers, NumPy's fp16, joint batches.

Where the compared arithmetic differs, float64 leaves about 1e-16 per operation; the toys are smooth and the runs short,
so 1e-12 is far above the noise and far below any wrong term.
"""

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.testing import reference, toys
from atoll.testing.reference import InnerStep, Outer, Result

SEED = 3
TIGHT = 1e-12
NESTEROV = reference.nesterov(0.7, 0.9)


def training(make: toys.MakeOptimizer = toys.adamw) -> InnerStep:
    return toys.inner_step(toys.Mlp(), make, SEED)


def run(name: str, theta: list[Tensor], inner: InnerStep, workers: int, steps: int) -> Result:
    """Any loop with an inner step, at a period of four."""
    options: dict[str, Any] = {"workers": workers, "steps": steps, "inner_step": inner, "period": 4, "outer": NESTEROV}
    halves = [list(range(0, len(theta), 2)), list(range(1, len(theta), 2))]
    evens = [tuple(range(0, workers, 2)), tuple(range(1, workers, 2))]
    paces = [Fraction(1)] * workers
    match name:
        case "single":
            del options["workers"], options["period"], options["outer"]
        case "local_sgd":
            del options["outer"]
        case "streaming":
            options |= {"fragments": halves, "delay": 1, "alpha": 0.5}
        case "compressed_diloco":
            options["see"] = lambda worker, round, flat: reference.float4(16)(flat)
        case "sparta":
            del options["period"], options["outer"]
            options["mask"] = lambda step: torch.arange(sum(tensor.numel() for tensor in theta)) % 4 == step % 4
        case "factored_gossip" | "blocking_gossip":
            options |= {"mix1": lambda round: evens, "mix2": lambda round, tensor: evens[:1]}
        case "noloco":
            del options["outer"]
            options |= {"pairs": lambda round: evens, "lr": 0.7, "momentum": 0.5, "pull": 0.7}
        case "async_local_sgd":
            del options["period"]
            options |= {"periods": [4] * workers, "paces": paces}
        case "decoupled":
            options |= {"fragments": halves, "paces": paces, "tokens_per_step": 8, "quorum": 2, "grace": 1}
            options["merge"] = reference.weighted_mean
        case _:
            pass
    return getattr(reference, name)(theta, **options)


ALL = [
    "single",
    "local_sgd",
    "diloco",
    "opendiloco",
    "streaming",
    "compressed_diloco",
    "sparta",
    "eager",
    "factored_gossip",
    "blocking_gossip",
    "noloco",
    "async_local_sgd",
    "decoupled",
]


# The contract of every loop


@pytest.mark.parametrize("name", ALL)
def test_theta_is_left_untouched_and_live_parameters_are_never_repointed(name: str) -> None:
    theta = toys.initial(toys.Mlp())
    before = [tensor.clone() for tensor in theta]
    seen: dict[int, set[tuple[int, ...]]] = {}
    inner = training()

    def watched(worker: int, step: int, params: list[Tensor]) -> None:
        inner(worker, step, params)
        seen.setdefault(worker, set()).add(tuple(tensor.data_ptr() for tensor in params))

    _, live = run(name, theta, watched, 4, 10)
    assert toys.same_bits(theta, before)
    assert [seen[m] for m in sorted(seen)] == [{tuple(tensor.data_ptr() for tensor in params)} for params in live]


@pytest.mark.parametrize("name", ALL)
def test_every_worker_takes_each_step_once_in_order_beginning_with_one(name: str) -> None:
    calls: list[tuple[int, int]] = []
    run(name, [torch.zeros(2), torch.zeros(3)], lambda worker, step, params: calls.append((step, worker)), 4, 9)
    assert calls == [(step, worker) for step in range(1, 10) for worker in range(1 if name == "single" else 4)]


@pytest.mark.parametrize("name", ALL)
def test_rounds_without_training_change_no_bit(name: str) -> None:
    theta = toys.initial(toys.Mlp())
    shared, live = run(name, theta, lambda worker, step, params: None, 4, 12)
    assert toys.same_bits(shared, theta)
    assert all(toys.same_bits(params, theta) for params in live)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "opendiloco"])
def test_after_a_blocking_sync_all_workers_hold_the_bits_of_the_shared_model(name: str) -> None:
    theta = toys.initial(toys.Mlp())
    shared, live = run(name, theta, training(), 5, 12)
    assert all(toys.same_bits(params, shared) for params in live)
    assert toys.distance(shared, theta) > 1e-3


def test_steps_after_the_last_sync_reach_the_workers_but_not_the_shared_model() -> None:
    theta = toys.initial(toys.Mlp())
    at_sync, _ = run("diloco", theta, training(), 3, 8)
    later, live = run("diloco", theta, training(), 3, 11)
    assert toys.same_bits(later, at_sync)
    assert all(toys.distance(params, later) > 1e-6 for params in live)


# The outer rules


def assert_same_path(outer: Outer, make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> None:
    anchor = torch.linspace(-1, 1, 7, dtype=torch.float64)
    parameter = nn.Parameter(anchor.clone())
    optimizer = make(parameter)
    state: dict[str, object] = {}
    for n in range(12):
        gradient = toys.draws(SEED, 0, n, [anchor])[0] / 100
        parameter.grad = gradient.clone()
        optimizer.step()
        anchor = anchor - outer(gradient, state)
        assert toys.same_bits([gradient], [parameter.grad])
        assert toys.distance([anchor], [parameter.detach()]) < TIGHT


def test_nesterov_takes_the_steps_of_torch_sgd_with_nesterov_momentum() -> None:
    assert_same_path(NESTEROV, lambda p: torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True))


def test_sgd_takes_the_steps_of_torch_sgd() -> None:
    assert_same_path(reference.sgd(0.5), lambda p: torch.optim.SGD([p], lr=0.5))


@pytest.mark.parametrize("eps", [1.0, 1e-1, 1e-7])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adam_takes_the_steps_of_torch_adam(eps: float, beta2: float) -> None:
    assert_same_path(
        reference.adam(0.3, 0.9, beta2, eps), lambda p: torch.optim.Adam([p], lr=0.3, betas=(0.9, beta2), eps=eps)
    )


# DiLoCo


@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_one_worker_with_outer_sgd_one_is_plain_training(name: str, make: toys.MakeOptimizer) -> None:
    theta = toys.initial(toys.Mlp())
    plain, _ = run("single", theta, training(make), 1, 20)
    if name == "diloco":
        shared, _ = reference.diloco(
            theta, workers=1, steps=20, inner_step=training(make), period=5, outer=reference.sgd(1.0)
        )
    else:
        shared, _ = reference.local_sgd(theta, workers=1, steps=20, inner_step=training(make), period=5)
    assert toys.distance(shared, plain) < TIGHT
    assert toys.distance(shared, theta) > 1e-3


@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
def test_diloco_is_modules_trained_apart_and_joined_by_torch_sgd(make: toys.MakeOptimizer) -> None:
    """The round as a practitioner writes it: `.grad` = old minus mean of new, then `torch.optim.SGD` on the old."""
    workers, period, steps = 4, 5, 30
    keeper = toys.Mlp()
    outer = torch.optim.SGD(keeper.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [copy.deepcopy(keeper) for _ in range(workers)]
    optimizers = [make(replica.parameters()) for replica in replicas]
    for step in range(1, steps + 1):
        for m, replica in enumerate(replicas):
            toys.backward(replica, SEED, m, step)
            optimizers[m].step()
        if step % period == 0:
            for p, *copies in zip(keeper.parameters(), *(r.parameters() for r in replicas), strict=True):
                p.grad = p.detach() - torch.stack([c.detach() for c in copies]).mean(0)
            outer.step()
            for replica in replicas:
                replica.load_state_dict(keeper.state_dict())
    shared, _ = reference.diloco(
        toys.initial(toys.Mlp()),
        workers=workers,
        steps=steps,
        inner_step=training(make),
        period=period,
        outer=NESTEROV,
    )
    assert toys.distance(shared, toys.initial(keeper)) < TIGHT


def test_the_first_round_of_nesterov_moves_by_1_33_mean_deltas() -> None:
    theta = [torch.ones(3, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    shared, _ = run("diloco", theta, toys.pushes(SEED), 3, 4)
    for i, tensor in enumerate(shared):
        walked = [sum(toys.draws(SEED, m, t, theta)[i] / 100 for t in range(1, 5)) for m in range(3)]
        expected = theta[i] - 1.33 * (walked[0] + walked[1] + walked[2]) / 3
        torch.testing.assert_close(tensor, expected, rtol=TIGHT, atol=0)


def test_a_constant_delta_settles_at_seven_deltas_a_round() -> None:
    def anchor_after(rounds: int) -> float:
        theta = [torch.zeros(1, dtype=torch.float64)]
        return run("diloco", theta, lambda worker, step, params: params[0].sub_(0.25), 2, 4 * rounds)[0][0].item()

    assert anchor_after(300) - anchor_after(301) == pytest.approx(7.0, rel=1e-9)


def test_local_sgd_adopts_the_plain_average_of_the_parameters() -> None:
    theta = toys.initial(toys.Mlp())
    inner = training()
    live = [[tensor.clone() for tensor in theta] for _ in range(3)]
    for step in range(1, 13):
        for m, params in enumerate(live):
            inner(m, step, params)
        if step % 4 == 0:
            for copies in zip(*live, strict=True):
                average = torch.stack(copies).mean(0)
                for tensor in copies:
                    tensor.copy_(average)
    shared, _ = run("local_sgd", theta, training(), 3, 12)
    assert toys.distance(shared, live[0]) < TIGHT


# Data-parallel


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_period_of_one_with_sgd_inside_and_outside_is_large_batch_sgd(workers: int) -> None:
    theta = toys.initial(toys.Mlp())
    shared, _ = reference.diloco(
        theta, workers=workers, steps=15, inner_step=training(toys.sgd), period=1, outer=reference.sgd(1.0)
    )
    averaged, _ = reference.data_parallel(
        theta, workers=workers, steps=15, gradient=toys.gradient(toys.Mlp(), SEED), update=toys.update(toys.sgd)
    )
    assert toys.distance(shared, averaged) < TIGHT


@pytest.mark.parametrize("max_norm", [float("inf"), 0.1])
def test_data_parallel_is_one_worker_with_the_joint_batch_clipped_once(max_norm: float) -> None:
    module = toys.Mlp()
    theta = toys.initial(module)
    optimizer = toys.adamw(module.parameters())
    for step in range(1, 13):
        batches = [toys.batch(SEED, m, step) for m in range(3)]
        module.zero_grad()
        module(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
        toys.move(module.parameters(), optimizer, max_norm)
    shared, live = reference.data_parallel(
        theta, workers=3, steps=12, gradient=toys.gradient(toys.Mlp(), SEED), update=toys.update(toys.adamw, max_norm)
    )
    assert toys.distance(shared, toys.initial(module)) < TIGHT
    assert len(live) == 3
    assert all(toys.same_bits(params, shared) for params in live)


# OpenDiLoCo


def test_opendiloco_in_float32_has_the_bits_of_numpys_fp16() -> None:
    workers = 5
    theta = toys.draws(SEED, 9, 9, [torch.empty(6, 7)])

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(toys.draws(SEED, worker, step, params)[0])

    shared, _ = reference.opendiloco(
        theta, workers=workers, steps=1, inner_step=push, period=1, outer=reference.sgd(1.0)
    )
    start = theta[0].numpy()
    ends = [start - toys.draws(SEED, m, 1, theta)[0].numpy() for m in range(workers)]
    wires = [(start - end).astype(np.float16) for end in ends]
    total = np.zeros_like(start)
    for wire in wires:
        total += wire.astype(np.float32)
    mean = (total / np.float32(workers)).astype(np.float16)
    assert np.array_equal(shared[0].numpy(), start - mean.astype(np.float32))
    narrow = (wires[0] + wires[1] + wires[2] + wires[3] + wires[4]) / np.float16(workers)
    assert not np.array_equal(mean, narrow), "a sum in fp16 would have passed as well"


def test_opendiloco_differs_from_diloco_by_the_rounding_to_fp16_and_no_more() -> None:
    """Rounding to fp16 moves x by at most h(x) = 2^-11 |x| + 2^-25, the second term for subnormals; 2^-23 |x| more
    covers a conversion by way of fp32. With A = mean |Δ_m|, a mean is off by at most h(A) as the deltas leave, and by h
    of what that makes of it as it returns: e = h(A) + h(|Δ̄| + h(A)). The pushes do not depend on θ, so the deltas are
    those of DiLoCo, and only the outer step carries errors on: E_u ← μ E_u + e; E_Θ ← E_Θ + η(e + μ E_u).
    """
    # From fp16's subnormals to its largest binades.
    sizes = torch.logspace(-8, 3, 50, dtype=torch.float64)

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(toys.draws(SEED, worker, step, params)[0] * sizes)

    def h(x: Tensor) -> Tensor:
        return (2**-11 + 2**-23) * x.abs() + 2**-25

    theta = [torch.zeros_like(sizes)]
    error_u = error = torch.zeros_like(sizes)
    for n in range(1, 7):
        exact, _ = reference.diloco(theta, workers=4, steps=n, inner_step=push, period=1, outer=NESTEROV)
        rounded, _ = reference.opendiloco(theta, workers=4, steps=n, inner_step=push, period=1, outer=NESTEROV)
        deltas = torch.stack([toys.draws(SEED, m, n, theta)[0] * sizes for m in range(4)])
        leaving = h(deltas.abs().mean(0))
        e = leaving + h(deltas.mean(0).abs() + leaving)
        error_u = 0.9 * error_u + e
        error = error + 0.7 * (e + 0.9 * error_u)
        off = (rounded[0] - exact[0]).abs()
        noise = 1e-13 * n * sizes  # float64's own
        assert bool((off <= error + noise).all())
        assert bool((off > noise).sum() > 25), "hardly anything was rounded"
