"""The reference loops of eager updates and gossip: what they must become in the limits, and closed forms.

Where the compared arithmetic differs, float64 leaves about 1e-16 per operation; the toys are smooth and the runs short,
so 1e-12 is far above the noise and far below any wrong term.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.testing import reference, toys
from atoll.testing.reference import Groups, InnerStep, Result

SEED = 3
TIGHT = 1e-12
WORKERS = 4
NESTEROV = reference.nesterov(0.7, 0.9)
Plan = Callable[[int], Groups]


def training() -> InnerStep:
    return toys.inner_step(toys.Mlp(), toys.adamw, SEED)


def alone(round: int) -> Groups:
    return []


def together(round: int) -> Groups:
    return [tuple(range(WORKERS))]


@cache
def matching(seed: int, round: int) -> tuple[tuple[int, int], ...]:
    order = np.random.default_rng((seed, round)).permutation(WORKERS).tolist()
    return tuple(zip(order[::2], order[1::2], strict=True))


def pairs(seed: int) -> Plan:
    return lambda round: list(matching(seed, round))


PLANS: dict[str, Plan] = {"alone": alone, "pairs": pairs(1), "together": together}


def gossip(
    loop: Callable[..., Result],
    mix1: Plan,
    mix2: Plan,
    *,
    theta: list[Tensor] | None = None,
    inner: InnerStep | None = None,
    workers: int = WORKERS,
) -> Result:
    return loop(
        theta or toys.initial(toys.Mlp()),
        workers=workers,
        steps=22,
        inner_step=inner or training(),
        period=4,
        mix1=mix1,
        mix2=lambda round, tensor: mix2(round),
        outer=NESTEROV,
    )


def diloco(workers: int = WORKERS, theta: list[Tensor] | None = None, inner: InnerStep | None = None) -> Result:
    return reference.diloco(
        theta or toys.initial(toys.Mlp()),
        workers=workers,
        steps=22,
        inner_step=inner or training(),
        period=4,
        outer=NESTEROV,
    )


def by_hand(
    theta: list[Tensor], gradients: list[list[Tensor]], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> list[Tensor]:
    """Where torch's optimizer takes `theta` by a list of gradients, one for each step and tensor."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in theta]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def blind_deltas(theta: list[Tensor], rounds: int, workers: int) -> list[list[list[Tensor]]]:
    """The deltas of `toys.pushes` at a period of four, by round, worker and tensor."""
    return [
        [
            [sum((each[i] for each in steps), torch.zeros_like(theta[i])) / 100 for i in range(len(theta))]
            for m in range(workers)
            for steps in [[toys.draws(SEED, m, t, theta) for t in range(4 * r + 1, 4 * r + 5)]]
        ]
        for r in range(rounds)
    ]


def torch_nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# Eager updates


def test_eager_with_one_worker_is_diloco() -> None:
    theta = toys.initial(toys.Mlp())
    shared, (live,) = reference.eager(theta, workers=1, steps=22, inner_step=training(), period=4, outer=NESTEROV)
    want, (want_live,) = diloco(workers=1)
    assert toys.distance(shared, want) < TIGHT
    assert toys.distance(live, want_live) < TIGHT


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_an_eager_workers_gradient_is_its_own_fresh_delta_and_the_others_of_a_round_ago(workers: int) -> None:
    """g_m = (Δ_m[r] + Σ_{j≠m} Δ_j[r-1]) / M, the second form of the paper's update, nothing from others at first."""
    theta = [torch.ones(3, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    deltas = blind_deltas(theta, 5, workers)
    shared, live = reference.eager(
        theta, workers=workers, steps=20, inner_step=toys.pushes(SEED), period=4, outer=NESTEROV
    )
    ends: list[list[Tensor]] = []
    for m in range(workers):
        gradients = [
            [
                (deltas[r][m][i] + sum(deltas[r - 1][j][i] for j in range(workers) if j != m and r > 0)) / workers
                for i in range(len(theta))
            ]
            for r in range(5)
        ]
        ends.append(by_hand(theta, gradients, torch_nesterov))
        assert toys.distance(live[m], ends[m]) < TIGHT
    assert toys.distance(shared, [torch.stack(each).mean(0) for each in zip(*ends, strict=True)]) < TIGHT
    assert toys.distance(live[0], live[1]) > 1e-3


def test_eager_workers_agree_again_where_all_deltas_are_the_same() -> None:
    """From the second round on g_m = Δ for every worker, so all walk on as DiLoCo would from there."""
    theta = [torch.zeros(1, dtype=torch.float64)]
    outer = reference.sgd(1.0)

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(0.25)

    (shared,), live = reference.eager(theta, workers=4, steps=12, inner_step=push, period=4, outer=outer)
    assert shared.item() == -(1 / 4 + 1 + 1)
    assert all(params[0].item() == shared.item() for params in live)


# Factored gossip: exact recovery of DiLoCo


@pytest.mark.parametrize("mix1", PLANS)
@pytest.mark.parametrize("loop", [reference.factored_gossip, reference.blocking_gossip])
def test_a_global_mix2_makes_diloco_bit_for_bit_whatever_mix1_does(loop: Callable[..., Result], mix1: str) -> None:
    """All points are equal before Mix1, and the mean of two or four equal numbers is exact in binary."""
    shared, live = gossip(loop, PLANS[mix1], together)
    want, want_live = diloco()
    assert toys.same_bits(shared, want)
    assert all(toys.same_bits(a, b) for a, b in zip(live, want_live, strict=True))


def test_a_blocking_global_mix1_is_diloco_without_any_mix2() -> None:
    """The outer step is linear in its gradient, so averaging after it or before it is the same but for rounding."""
    shared, live = gossip(reference.blocking_gossip, together, alone)
    want, want_live = diloco()
    assert toys.distance(shared, want) < TIGHT
    assert all(toys.distance(a, b) < TIGHT for a, b in zip(live, want_live, strict=True))


def test_an_overlapped_global_mix1_is_not_diloco_where_gradients_are_not_affine() -> None:
    shared, live = gossip(reference.factored_gossip, together, alone)
    assert 1e-3 < toys.distance(shared, diloco()[0]) < 1
    assert toys.distance(live[0], live[1]) > 1e-3


@pytest.mark.parametrize("mix1", PLANS)
@pytest.mark.parametrize("mix2", PLANS)
@pytest.mark.parametrize("loop", [reference.factored_gossip, reference.blocking_gossip])
def test_on_a_quadratic_the_mean_over_workers_is_diloco_for_every_mixing(
    loop: Callable[..., Result], mix2: str, mix1: str
) -> None:
    """SGD on losses of one curvature A and a noise of each worker's own: every step is affine, the same linear part
    for all, and so it commutes with averaging, as do both mixings and the outer step."""
    a = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)

    def descend(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(0.05 * (a * params[0] + toys.draws(SEED, worker, step, params)[0]))

    theta = [torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)]
    shared, live = gossip(loop, PLANS[mix1], PLANS[mix2], theta=theta, inner=descend)
    want, _ = diloco(theta=theta, inner=descend)
    assert toys.distance(shared, want) < TIGHT
    if mix2 != "together":
        assert toys.distance(live[0], live[1]) > 1e-3


@pytest.mark.parametrize("loop", [reference.factored_gossip, reference.blocking_gossip])
def test_gossip_with_one_worker_is_diloco_bit_for_bit(loop: Callable[..., Result]) -> None:
    shared, (live,) = gossip(loop, alone, alone, workers=1)
    want, (want_live,) = diloco(workers=1)
    assert toys.same_bits(shared, want)
    assert toys.same_bits(live, want_live)


def test_without_any_mixing_each_worker_is_diloco_by_itself() -> None:
    def as_worker(m: int) -> InnerStep:
        inner = training()
        return lambda worker, step, params: inner(m, step, params)

    _, live = gossip(reference.factored_gossip, alone, alone)
    for m in range(WORKERS):
        _, (want,) = diloco(workers=1, inner=as_worker(m))
        assert toys.same_bits(live[m], want)


def test_mix2_of_a_subset_leaves_the_other_tensors_deltas_alone() -> None:
    """Blind pushes keep tensors apart, so each goes through what a mixing of all or of none makes of it."""
    theta = [torch.ones(3, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]

    def run(mix2: Callable[[int, int], Groups]) -> Result:
        return reference.factored_gossip(
            theta,
            workers=WORKERS,
            steps=22,
            inner_step=toys.pushes(SEED),
            period=4,
            mix1=pairs(1),
            mix2=mix2,
            outer=NESTEROV,
        )

    shared, live = run(lambda round, tensor: pairs(2)(round) if tensor == 1 else [])
    for i, mix2 in enumerate([alone, pairs(2)]):
        want, want_live = run(lambda round, tensor, mix2=mix2: mix2(round))
        assert toys.same_bits([shared[i]], [want[i]])
        assert all(toys.same_bits([a[i]], [b[i]]) for a, b in zip(live, want_live, strict=True))


@pytest.mark.parametrize(
    ("loop", "rounds"), [(reference.factored_gossip, [1, 2]), (reference.blocking_gossip, [1, 2, 3])]
)
def test_mix1_averages_points_that_are_one_outer_step_old_or_new_where_training_waits(
    loop: Callable[..., Result], rounds: list[int]
) -> None:
    """Two workers, three rounds, outer SGD at one: z[0] = -D[0]; z[1] = z̄[0] - D[1]; z[2] = z̄[1] - D[2]. Where
    training waits, live begins the fourth round from z̄[2]."""
    theta = [torch.zeros(5, dtype=torch.float64)]
    d = [[worker[0] for worker in round] for round in blind_deltas(theta, 3, 2)]
    asked: list[int] = []

    def mix1(round: int) -> Groups:
        asked.append(round)
        return [(0, 1)]

    _, live = loop(
        theta,
        workers=2,
        steps=12,
        inner_step=toys.pushes(SEED),
        period=4,
        mix1=mix1,
        mix2=lambda round, tensor: [],
        outer=reference.sgd(1.0),
    )
    assert asked == rounds
    for m in range(2):
        last = d[2][m] if loop is reference.factored_gossip else (d[2][0] + d[2][1]) / 2
        want = -((d[0][0] + d[0][1]) / 2 + (d[1][0] + d[1][1]) / 2 + last)
        assert toys.distance(live[m], [want]) < TIGHT


# NoLoCo


@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_the_mean_over_noloco_workers_is_heavy_ball_on_the_mean_delta_whatever_the_pull(pull: float) -> None:
    theta = [torch.ones(3, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    deltas = blind_deltas(theta, 5, WORKERS)
    means = [[torch.stack(each).mean(0) for each in zip(*round, strict=True)] for round in deltas]
    shared, live = reference.noloco(
        theta,
        workers=WORKERS,
        steps=20,
        inner_step=toys.pushes(SEED),
        period=4,
        pairs=pairs(1),
        lr=0.7,
        momentum=0.5,
        pull=pull,
    )
    assert toys.distance(shared, by_hand(theta, means, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5))) < TIGHT
    assert toys.distance(live[0], live[1]) > 1e-3


def test_a_noloco_worker_without_a_partner_walks_by_heavy_ball_on_its_own_delta() -> None:
    theta = [torch.ones(4, dtype=torch.float64)]
    deltas = blind_deltas(theta, 5, 3)
    _, live = reference.noloco(
        theta,
        workers=3,
        steps=20,
        inner_step=toys.pushes(SEED),
        period=4,
        pairs=lambda round: [(0, 2)],
        lr=0.7,
        momentum=0.5,
        pull=0.7,
    )
    own = [round[1] for round in deltas]
    assert toys.distance(live[1], by_hand(theta, own, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5))) < TIGHT


def test_noloco_pulls_a_pair_together_inside_the_momentum() -> None:
    """Worker 1 is pushed once, by -1, and nothing else moves: alone in the first round, φ_1 = η, and then in a pair
    the distance d and its momentum v follow v ← μv - γd, d ← d + v, from d = v = η. Both pull alike, so the mean
    moves by the momentum alone."""
    lr, mu, pull = 0.7, 0.5, 0.6

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        if worker == 1 and step == 1:
            params[0].add_(1.0)

    d = v = lr
    middle = lr / 2
    for r in range(1, 6):
        v = mu * v - pull * d
        d += v
        middle += lr / 2 * mu**r
    (shared,), live = reference.noloco(
        [torch.zeros(1, dtype=torch.float64)],
        workers=2,
        steps=6,
        inner_step=push,
        period=1,
        pairs=lambda round: [(0, 1)] if round > 0 else [],
        lr=lr,
        momentum=mu,
        pull=pull,
    )
    assert (live[1][0] - live[0][0]).item() == pytest.approx(d, rel=TIGHT)
    assert shared.item() == pytest.approx(middle, rel=TIGHT)
