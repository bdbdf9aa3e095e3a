"""The reference loops against facts that owe nothing to them: torch's own optimizers, NumPy's fp16, joint batches, and sums done by hand.

Where the compared arithmetic differs, float64 leaves about 1e-16 per operation; the toys are smooth and the runs short, so 1e-12 is far above
the noise and far below any wrong term.
"""

import copy
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.testing import reference, toys
from atoll.testing.reference import InnerStep, Outer, Result

SEED = 3
TIGHT = 1e-12
Loop = Callable[..., Result]


def close(got: list[Tensor], want: list[Tensor], tolerance: float = TIGHT) -> bool:
    """Whether the distance is within `tolerance` of the norm of what was wanted, over all tensors together."""
    distance = torch.cat([(g - w).flatten() for g, w in zip(got, want, strict=True)]).norm()
    return bool(distance <= tolerance * torch.cat([w.flatten() for w in want]).norm())


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def pushes(workers: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64, scale: float = 0.01) -> InnerStep:
    """Inner steps that ignore where the parameters are: θ ← θ - d(worker, step), with d drawn anew for each call and known to the test."""

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        for tensor, d in zip(params, draws(worker, step, shapes, dtype, scale), strict=True):
            tensor.sub_(d)

    return push


def draws(worker: int, step: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64, scale: float = 0.01) -> list[Tensor]:
    generator = torch.Generator().manual_seed(worker * 1000 + step)
    return [torch.randn(shape, generator=generator, dtype=dtype) * scale for shape in shapes]


def methods(workers: int, inner: InnerStep, count: int) -> dict[str, Callable[[list[Tensor], int], Result]]:
    """Every loop with an inner step, ready to run on (theta, steps) at period 4."""
    outer = reference.nesterov(0.7, 0.9)
    halves = [list(range(0, count, 2)), list(range(1, count, 2))]
    shared = {"workers": workers, "inner_step": inner, "period": 4}
    return {
        "single": lambda theta, steps: reference.single(theta, steps=steps, inner_step=inner),
        "local_sgd": lambda theta, steps: reference.local_sgd(theta, steps=steps, **shared),
        "diloco": lambda theta, steps: reference.diloco(theta, steps=steps, outer=outer, **shared),
        "opendiloco": lambda theta, steps: reference.opendiloco(theta, steps=steps, outer=outer, **shared),
        "streaming": lambda theta, steps: reference.streaming(
            theta, steps=steps, fragments=halves, delay=1, alpha=0.5, outer=outer, **shared
        ),
    }


ALL = ["single", "local_sgd", "diloco", "opendiloco", "streaming"]


# The contract of every loop


@pytest.mark.parametrize("name", ALL)
def test_theta_is_left_untouched_and_live_parameters_are_never_repointed(name: str) -> None:
    theta = toys.initial(toys.Mlp())
    before = [tensor.clone() for tensor in theta]
    seen: dict[int, set[tuple[int, ...]]] = {}
    inner = toys.inner_step(toys.Mlp(), toys.adamw, SEED)

    def watched(worker: int, step: int, params: list[Tensor]) -> None:
        inner(worker, step, params)
        seen.setdefault(worker, set()).add(tuple(tensor.data_ptr() for tensor in params))

    _, live = methods(3, watched, len(theta))[name](theta, 10)
    assert same(theta, before)
    assert [seen[m] for m in sorted(seen)] == [{tuple(tensor.data_ptr() for tensor in params)} for params in live]


@pytest.mark.parametrize("name", ALL)
def test_every_worker_takes_each_step_once_in_order_beginning_with_one(name: str) -> None:
    calls: list[tuple[int, int]] = []
    run = methods(3, lambda worker, step, params: calls.append((step, worker)), 2)[name]
    run([torch.zeros(2), torch.zeros(3)], 9)
    assert calls == [(step, worker) for step in range(1, 10) for worker in range(1 if name == "single" else 3)]


@pytest.mark.parametrize("name", ALL)
def test_rounds_without_training_change_no_bit(name: str) -> None:
    theta = toys.initial(toys.Mlp())
    shared, live = methods(3, lambda worker, step, params: None, len(theta))[name](theta, 12)
    assert same(shared, theta)
    assert all(same(params, theta) for params in live)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "opendiloco"])
def test_after_a_blocking_sync_all_workers_hold_the_bits_of_the_shared_model(name: str) -> None:
    theta = toys.initial(toys.Mlp())
    run = methods(5, toys.inner_step(toys.Mlp(), toys.adamw, SEED), len(theta))[name]
    shared, live = run(theta, 12)
    assert all(same(params, shared) for params in live)
    assert not close(shared, theta, 1e-3)


def test_steps_after_the_last_sync_reach_the_workers_but_not_the_shared_model() -> None:
    theta = toys.initial(toys.Mlp())
    at_sync, _ = methods(3, toys.inner_step(toys.Mlp(), toys.adamw, SEED), len(theta))["diloco"](theta, 8)
    later, live = methods(3, toys.inner_step(toys.Mlp(), toys.adamw, SEED), len(theta))["diloco"](theta, 11)
    assert same(later, at_sync)
    assert not any(close(params, later, 1e-6) for params in live)


# The outer rules


def test_nesterov_takes_the_steps_of_torch_sgd_with_nesterov_momentum() -> None:
    assert_same_path(reference.nesterov(0.7, 0.9), lambda p: torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True))


def test_sgd_takes_the_steps_of_torch_sgd() -> None:
    assert_same_path(reference.sgd(0.5), lambda p: torch.optim.SGD([p], lr=0.5))


@pytest.mark.parametrize("eps", [1.0, 1e-1, 1e-7])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adam_takes_the_steps_of_torch_adam(eps: float, beta2: float) -> None:
    assert_same_path(reference.adam(0.3, 0.9, beta2, eps), lambda p: torch.optim.Adam([p], lr=0.3, betas=(0.9, beta2), eps=eps))


def assert_same_path(outer: Outer, make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> None:
    anchor = torch.linspace(-1, 1, 7, dtype=torch.float64)
    parameter = nn.Parameter(anchor.clone())
    optimizer = make(parameter)
    state: dict[str, object] = {}
    for n in range(12):
        (gradient,) = draws(0, n, [(7,)])
        untouched = gradient.clone()
        anchor = anchor - outer(gradient, state)
        parameter.grad = untouched.clone()
        optimizer.step()
        assert torch.equal(gradient, untouched)
        assert close([anchor], [parameter.detach()])


# DiLoCo


@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_one_worker_with_outer_sgd_one_is_plain_training(name: str, make: toys.MakeOptimizer) -> None:
    theta = toys.initial(toys.Mlp())
    plain, _ = reference.single(theta, steps=20, inner_step=toys.inner_step(toys.Mlp(), make, SEED))
    inner = toys.inner_step(toys.Mlp(), make, SEED)
    if name == "diloco":
        shared, _ = reference.diloco(theta, workers=1, steps=20, inner_step=inner, period=5, outer=reference.sgd(1.0))
    else:
        shared, _ = reference.local_sgd(theta, workers=1, steps=20, inner_step=inner, period=5)
    assert close(shared, plain)
    assert not close(shared, theta, 1e-3)


@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
def test_diloco_is_modules_trained_apart_and_joined_by_torch_sgd(make: toys.MakeOptimizer) -> None:
    """The round as authors' codes write it: `p.grad` = old minus mean of new, on restored parameters, stepped by `torch.optim.SGD`."""
    workers, period, rounds = 4, 5, 6
    keeper = toys.Mlp()
    outer = torch.optim.SGD(keeper.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [copy.deepcopy(keeper) for _ in range(workers)]
    optimizers = [make(replica.parameters()) for replica in replicas]
    for step in range(1, period * rounds + 1):
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
        steps=period * rounds,
        inner_step=toys.inner_step(toys.Mlp(), make, SEED),
        period=period,
        outer=reference.nesterov(0.7, 0.9),
    )
    assert close(shared, toys.initial(keeper))


def test_the_first_round_of_nesterov_moves_by_1_33_mean_deltas() -> None:
    shapes = [(3, 2), (4,)]
    theta = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
    shared, _ = reference.diloco(
        theta, workers=3, steps=2, inner_step=pushes(3, shapes), period=2, outer=reference.nesterov(0.7, 0.9)
    )
    for i, tensor in enumerate(shared):
        mean = torch.stack([draws(m, 1, shapes)[i] + draws(m, 2, shapes)[i] for m in range(3)]).mean(0)
        torch.testing.assert_close(tensor, theta[i] - 1.33 * mean, rtol=TIGHT, atol=TIGHT)


def test_a_constant_delta_settles_at_seven_deltas_a_round() -> None:
    def drift(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(0.01)

    def anchor(rounds: int) -> float:
        theta = [torch.zeros(1, dtype=torch.float64)]
        return reference.diloco(
            theta, workers=2, steps=rounds, inner_step=drift, period=1, outer=reference.nesterov(0.7, 0.9)
        )[0][0].item()

    assert anchor(400) - anchor(401) == pytest.approx(0.07, rel=1e-9)


def test_local_sgd_adopts_the_plain_average_of_the_parameters() -> None:
    theta = toys.initial(toys.Mlp())
    inner = toys.inner_step(toys.Mlp(), toys.adamw, SEED)
    live = [[tensor.clone() for tensor in theta] for _ in range(3)]
    for step in range(1, 13):
        for m, params in enumerate(live):
            inner(m, step, params)
        if step % 4 == 0:
            for copies in zip(*live, strict=True):
                average = torch.stack(copies).mean(0)
                for tensor in copies:
                    tensor.copy_(average)
    shared, _ = methods(3, toys.inner_step(toys.Mlp(), toys.adamw, SEED), len(theta))["local_sgd"](theta, 12)
    assert close(shared, live[0])


# Data-parallel


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_period_of_one_with_sgd_inside_and_outside_is_large_batch_sgd(workers: int) -> None:
    theta = toys.initial(toys.Mlp())
    inner = toys.inner_step(toys.Mlp(), toys.sgd, SEED)
    shared, _ = reference.diloco(theta, workers=workers, steps=15, inner_step=inner, period=1, outer=reference.sgd(1.0))
    averaged, _ = reference.data_parallel(
        theta, workers=workers, steps=15, gradient=toys.gradient(toys.Mlp(), SEED), update=toys.update(toys.sgd)
    )
    assert close(shared, averaged)


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
    assert close(shared, toys.initial(module))
    assert all(same(params, shared) for params in live)


# OpenDiLoCo


def test_opendiloco_in_float32_has_the_bits_of_numpys_fp16() -> None:
    workers, shapes = 5, [(6, 7)]
    theta = draws(9, 9, shapes, torch.float32, scale=1.0)
    shared, _ = reference.opendiloco(
        theta, workers=workers, steps=1, inner_step=pushes(workers, shapes, torch.float32), period=1, outer=reference.sgd(1.0)
    )
    start = theta[0].numpy()
    wires = [(start - (start - draws(m, 1, shapes, torch.float32)[0].numpy())).astype(np.float16) for m in range(workers)]
    total = np.zeros_like(start)
    for wire in wires:
        total += wire.astype(np.float32)
    mean = (total / np.float32(workers)).astype(np.float16)
    assert np.array_equal(shared[0].numpy(), start - mean.astype(np.float32))
    assert not np.array_equal(mean, sum(wires[1:], wires[0]) / np.float16(workers)), "a sum in fp16 would pass as well"


def test_opendiloco_differs_from_diloco_by_the_rounding_to_fp16_and_no_more() -> None:
    """Rounding x to fp16 moves it by at most h(x) = 2^-11 |x| + 2^-25, the second term for subnormals; 2^-23 |x| more covers a conversion that
    passes through fp32. With A the mean of |Δ_m|, each mean is off by at most e = h(A) as it leaves and h(|Δ̄| + h(A)) as it returns. The pushes do
    not depend on θ, so deltas are those of DiLoCo and only the outer step carries errors on: E_u ← μ E_u + e; E_Θ ← E_Θ + η(e + μ E_u).
    """
    workers, rounds, shapes, lr, mu = 4, 6, [(50,)], 0.7, 0.9

    def h(x: Tensor) -> Tensor:
        return (2**-11 + 2**-23) * x + 2**-25

    # Sizes from the subnormal range of fp16 to its largest binades.
    sizes = torch.logspace(-8, 3, 50, dtype=torch.float64)

    def sized(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(draws(worker, step, shapes, scale=1.0)[0] * sizes)

    theta = [torch.zeros(shapes[0], dtype=torch.float64)]
    outer = reference.nesterov(lr, mu)
    error_u = error = torch.zeros(shapes[0], dtype=torch.float64)
    for n in range(1, rounds + 1):
        exact, _ = reference.diloco(theta, workers=workers, steps=n, inner_step=sized, period=1, outer=outer)
        rounded, _ = reference.opendiloco(theta, workers=workers, steps=n, inner_step=sized, period=1, outer=outer)
        deltas = torch.stack([draws(m, n, shapes, scale=1.0)[0] * sizes for m in range(workers)])
        leaves = h(deltas.abs().mean(0))
        e = leaves + h(deltas.mean(0).abs() + leaves)
        error_u = mu * error_u + e
        error = error + lr * (e + mu * error_u)
        off = (rounded[0] - exact[0]).abs()
        noise = 1e-13 * n * sizes  # float64's own, relative to the sizes
        assert bool((off <= error + noise).all())
        assert bool((off > noise).any()), "nothing was rounded"


# Streaming


@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
def test_streaming_with_one_fragment_and_no_delay_is_diloco_bit_for_bit(make: toys.MakeOptimizer) -> None:
    theta = toys.initial(toys.Mlp())
    outer = reference.nesterov(0.4, 0.9)
    want, live = reference.diloco(
        theta, workers=3, steps=18, inner_step=toys.inner_step(toys.Mlp(), make, SEED), period=4, outer=outer
    )
    got, got_live = reference.streaming(
        theta,
        workers=3,
        steps=18,
        inner_step=toys.inner_step(toys.Mlp(), make, SEED),
        period=4,
        fragments=[list(range(len(theta)))],
        delay=0,
        alpha=0.0,
        outer=outer,
    )
    assert same(got, want)
    assert all(same(a, b) for a, b in zip(got_live, live, strict=True))


@pytest.mark.parametrize(("count", "delay"), [(1, 0), (2, 0), (2, 3), (3, 1), (3, 9)])
def test_fragments_send_on_their_own_grid_after_a_full_period_and_land_delay_steps_later(count: int, delay: int) -> None:
    """At H = 10 the paper's example of H = 100 reads: a second fragment with offset 5 syncs at 15, 25, ..., not at 5."""
    now = 0
    landed: dict[int, list[int]] = {i: [] for i in range(count)}
    carried: dict[int, list[float]] = {i: [] for i in range(count)}

    def tick(worker: int, step: int, params: list[Tensor]) -> None:
        nonlocal now
        now = step
        for tensor in params:
            tensor.sub_(1.0)

    def spy(gradient: Tensor, state: dict[str, object]) -> Tensor:
        fragment = len(gradient) - 1
        landed[fragment].append(now)
        carried[fragment].append(gradient[0].item())
        return torch.zeros_like(gradient)

    theta = [torch.zeros(i + 1, dtype=torch.float64) for i in range(count)]
    fragments = [[i] for i in range(count)]
    reference.streaming(
        theta, workers=1, steps=50, inner_step=tick, period=10, fragments=fragments, delay=delay, alpha=1.0, outer=spy
    )
    offsets = {1: [0], 2: [0, 5], 3: [0, 3, 6]}[count]
    for p, offset in enumerate(offsets):
        sends = [s for s in (offset + 10, offset + 20, offset + 30, offset + 40, offset + 50) if s + delay <= 50]
        assert landed[p] == [s + delay for s in sends]
        # The anchor stands at 0 and live falls by 1 a step, so the delta tells the step at which it was measured.
        assert carried[p] == sends
        assert all(b - a == 10 for a, b in pairwise(landed[p]))


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.5), (1, 0.5), (3, 0.0), (3, 0.25), (7, 0.5)])
def test_streaming_follows_the_recursion_over_rounds_worked_out_by_hand(delay: int, alpha: float) -> None:
    """Worker m falls by d_m a step. With x_m its place after a landing, round by round: Δ_m = Θ - x_m + (H - τ) d_m (all H steps in the first round);
    Θ ← Θ - η(Δ̄ + μu); x_m ← α(Θ_old - Δ_m - τ d_m) + (1 - α)Θ."""
    H, rounds, lr, mu, d = 8, 4, 0.4, 0.9, np.array([0.3, -0.1, 0.7])

    def drift(worker: int, step: int, params: list[Tensor]) -> None:
        for tensor in params:
            tensor.sub_(float(d[worker]))

    u = big = 0.0
    x = np.zeros(3)
    for n in range(rounds):
        deltas = big - x + (H if n == 0 else H - delay) * d
        u = mu * u + deltas.mean()
        old, big = big, big - lr * (deltas.mean() + mu * u)
        x = alpha * (old - deltas - delay * d) + (1 - alpha) * big
    outer = reference.nesterov(lr, mu)
    shared, live = reference.streaming(
        [torch.zeros(1, dtype=torch.float64)],
        workers=3,
        steps=H * rounds + delay,
        inner_step=drift,
        period=H,
        fragments=[[0]],
        delay=delay,
        alpha=alpha,
        outer=outer,
    )
    assert shared[0].item() == pytest.approx(big, rel=TIGHT)
    assert [params[0].item() for params in live] == pytest.approx(x.tolist(), rel=1e-11)


def test_fragments_that_do_not_interact_are_synced_as_if_each_were_alone() -> None:
    """A fragment with offset t_p whose inner steps begin only after t_p goes through the rounds of a fragment without offset."""
    shapes = [(2,), (3,), (4,)]
    offsets = [0, 2, 4]
    outer = reference.nesterov(0.4, 0.9)

    def shifted(worker: int, step: int, params: list[Tensor]) -> None:
        for i, tensor in enumerate(params):
            if step > offsets[i]:
                tensor.sub_(draws(worker, step - offsets[i], shapes)[i])

    theta = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
    settings = {"workers": 3, "period": 7, "delay": 2, "alpha": 0.5, "outer": outer}
    for i, offset in enumerate(offsets):
        together, live = reference.streaming(
            theta, steps=23 + offset, inner_step=shifted, fragments=[[0], [1], [2]], **settings
        )
        alone, alone_live = reference.streaming(
            theta, steps=23, inner_step=pushes(3, shapes), fragments=[[0, 1, 2]], **settings
        )
        assert torch.equal(together[i], alone[i])
        assert all(torch.equal(a[i], b[i]) for a, b in zip(live, alone_live, strict=True))


def test_alpha_one_leaves_the_workers_uncoupled_while_the_anchor_moves() -> None:
    theta = toys.initial(toys.Mlp())
    apart = [[tensor.clone() for tensor in theta] for _ in range(3)]
    inner = toys.inner_step(toys.Mlp(), toys.adamw, SEED)
    for step in range(1, 13):
        for m, params in enumerate(apart):
            inner(m, step, params)
    shared, live = reference.streaming(
        theta,
        workers=3,
        steps=12,
        inner_step=toys.inner_step(toys.Mlp(), toys.adamw, SEED),
        period=4,
        fragments=[[0, 2, 4, 6], [1, 3, 5, 7]],
        delay=1,
        alpha=1.0,
        outer=reference.nesterov(0.4, 0.9),
    )
    assert all(same(a, b) for a, b in zip(live, apart, strict=True))
    assert not close(shared, theta, 1e-3)


def test_with_alpha_between_zero_and_one_the_workers_stay_apart_after_a_landing() -> None:
    theta = toys.initial(toys.Mlp())
    run = methods(3, toys.inner_step(toys.Mlp(), toys.adamw, SEED), len(theta))["streaming"]
    _, live = run(theta, 13)
    assert not any(torch.equal(live[0][i], live[1][i]) for i in range(len(theta)))


# The toys


TOYS: list[Callable[[], nn.Module]] = [toys.Quadratic, toys.Mlp, toys.TiedMlp, toys.BufferedMlp]


@pytest.mark.parametrize("max_norm", [float("inf"), 0.1])
@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
@pytest.mark.parametrize("toy", TOYS)
def test_a_toy_trains_to_the_same_bits_as_a_module_and_as_a_list(
    toy: Callable[[], nn.Module], make: toys.MakeOptimizer, max_norm: float
) -> None:
    module = toy()
    listed, _ = reference.single(toys.initial(module), steps=10, inner_step=toys.inner_step(toy(), make, SEED, max_norm))
    optimizer = make(module.parameters())
    for step in range(1, 11):
        toys.backward(module, SEED, 0, step)
        toys.move(module.parameters(), optimizer, max_norm)
    assert same(listed, toys.initial(module))
    assert not close(listed, toys.initial(toy()), 1e-3)


def test_buffers_note_the_batches_and_leave_the_parameters_alone() -> None:
    module = toys.BufferedMlp()
    plain, _ = reference.single(toys.initial(module), steps=5, inner_step=toys.inner_step(toys.Mlp(), toys.adamw, SEED))
    optimizer = toys.adamw(module.parameters())
    running = torch.zeros(toys.FEATURES, dtype=torch.float64)
    for step in range(1, 6):
        toys.backward(module, SEED, 0, step)
        toys.move(module.parameters(), optimizer)
        running = 0.9 * running + 0.1 * toys.batch(SEED, 0, step)[0].mean(0)
    assert same(toys.initial(module), plain)
    assert close([module.get_buffer("running")], [running])
    assert module.get_buffer("batches").item() == 5


def test_a_tied_weight_is_one_tensor_under_its_first_name() -> None:
    names = [name for name, _ in toys.TiedMlp().named_parameters()]
    assert "middle.weight" in names
    assert "last.weight" not in names
    assert sum(tensor.numel() for tensor in toys.initial(toys.TiedMlp())) == 61


def test_batches_differ_between_seeds_workers_and_steps_and_repeat_for_the_same_three() -> None:
    keys = [(seed, worker, step) for seed in range(3) for worker in range(3) for step in range(3)]
    batches = {key: toys.batch(*key)[0] for key in keys}
    assert all(torch.equal(toys.batch(*key)[0], x) for key, x in batches.items())
    assert not any(torch.equal(batches[a], batches[b]) for a in keys for b in keys if a < b)


def test_toys_draw_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    module = toys.Mlp(seed=5)
    toys.backward(module, SEED, 0, 1)
    assert torch.equal(torch.get_rng_state(), before)
