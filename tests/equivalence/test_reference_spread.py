"""How far apart workers stay on a flat landscape: the gossip loops' steady state against second moments."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.testing import reference
from atoll.testing.reference import Groups, Result

SEED = 3
Plan = Callable[[int], Groups]


def alone(round: int) -> Groups:
    return []


def together(round: int) -> Groups:
    return [tuple(range(8))]


@cache
def matching(seed: int, round: int) -> tuple[tuple[int, int], ...]:
    order = np.random.default_rng((seed, round)).permutation(8).tolist()
    return tuple(zip(order[::2], order[1::2], strict=True))


def pairs(seed: int) -> Plan:
    return lambda round: list(matching(seed, round))


def spread(loop: Callable[..., Result], **mixing: object) -> float:
    """Mean squared distance of two of eight workers after an outer step, in units of V, which is what one round of
    inner noise makes of it: here one blind step of unit noise, so V = 2 for each element. 150 rounds go by uncounted.
    """
    seen: list[Tensor] = []
    generator = torch.Generator().manual_seed(SEED)

    def noise(worker: int, step: int, params: list[Tensor]) -> None:
        if step > 150:
            seen.append(params[0].clone())
        params[0].sub_(torch.randn(128, dtype=torch.float64, generator=generator))

    theta = [torch.zeros(128, dtype=torch.float64)]
    loop(theta, workers=8, steps=2500, inner_step=noise, period=1, **mixing)
    # The distance of two is twice the sample variance.
    return torch.stack(seen).view(-1, 8, 128).var(dim=1).mean().item()


def steady(rho1: float, rho2: float, mu: float, lr: float) -> float:
    """dist / V for Nesterov and mixing by projections that leave ρ1, ρ2 of the squared disagreement."""
    tail = mu**2 / (1 - mu**2)
    own = (1 + mu) ** 2 + mu**2 * tail
    carried = 2 * mu**2 * rho1 * (1 + mu / (1 - mu**2)) / (1 - rho1 * mu)
    return lr**2 * rho2 * (own + carried) / (1 - rho1)


@pytest.mark.parametrize(
    ("mix1", "rho1", "mix2", "rho2", "mu"),
    [
        (together, 0, alone, 1, 0.9),
        (together, 0, pairs(2), 3 / 7, 0.9),
        (pairs(1), 3 / 7, pairs(2), 3 / 7, 0.9),
        (pairs(1), 3 / 7, pairs(2), 3 / 7, 0.5),
    ],
)
def test_gossip_workers_stay_as_far_apart_as_the_second_moments_say(
    mix1: Plan, rho1: float, mix2: Plan, rho2: float, mu: float
) -> None:
    """A random matching of M leaves ρ = (M - 2) / (2 (M - 1)), 3/7 of eight. The estimate's own spread over seeds is
    0.8 %."""
    got = spread(
        reference.factored_gossip,
        mix1=mix1,
        mix2=lambda round, tensor: mix2(round),
        outer=reference.nesterov(0.7, mu),
    )
    assert got == pytest.approx(steady(rho1, rho2, mu, 0.7), rel=0.03)


def test_noloco_workers_stay_as_far_apart_as_the_second_moment_map_says() -> None:
    """With e a worker's deviation from the mean and u that of its momentum, A = E|e|², B = E<e,u>, C = E|u|² follow
    C ← μ²C - 2μγsB + γ²sA + η²ρ, B ← μB - γsA + C, A ← A + 2(μB - γsA) + C, at M = 8: s = 4/7, ρ = 1 - s."""
    mu, lr, pull, s = 0.5, 0.7, 0.7, 4 / 7
    a = b = c = 0.0
    for _ in range(200):
        c = mu**2 * c - 2 * mu * pull * s * b + pull**2 * s * a + lr**2 * (1 - s)
        t = mu * b - pull * s * a
        a, b = a + 2 * t + c, t + c
    got = spread(reference.noloco, pairs=pairs(1), lr=lr, momentum=mu, pull=pull)
    assert got == pytest.approx(a, rel=0.03)
