"""How far workers are apart on a flat landscape, where inner steps are noise and nothing else.

V is the expected squared distance that two independent workers build up in one inner phase. Anchors, and the live
parameters at the end of a phase, are then apart by

    dist(z) = gam^2 rho2 K V,   dist(live) = dist(z) + V,
    K = {(1 + mu)^2 + mu^4 / (1 - mu^2) + 2 mu^2 rho1 (1 + mu / (1 - mu^2)) / (1 - rho1 mu)} / (1 - rho1)

for Nesterov of rate gam and momentum mu on each worker, and mixing that leaves the parts rho1 of the squared distance
of points and rho2 of that of deltas. (K = 1 / (1 - rho1) without momentum.)

Where meetings are drawn, a spread hangs on the draws of the rounds before it, so that a mean over hundreds of rounds
still scatters by 2 %, however many elements there are. So each run is compared with the second moments that its own
draws imply, which leaves the error of the sampled elements (0.4 %), and these moments over 10,000 rounds of draws with
the closed form (0.3 %).
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from atoll.parts.codecs import exact
from atoll.parts.mixers import Mixer, Situation, Work, all_mean, alone
from atoll.parts.momentum import consensus_momentum
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every
from atoll.recipes.diloco import diloco
from atoll.recipes.gossip import global_m1, global_m1_local_m2, local_m1, local_m1_m2, noloco
from atoll.sync.rule import Rule, Strategy
from atoll.trees import Layout
from atoll.wire import Membership
from tests.properties.teams import Move, Numbers, Team

WORKERS, ELEMENTS = 8, 20_000
PERIOD, SIZE = 3, 0.1
V = 2 * SIZE**2 * PERIOD * ELEMENTS
SETTLE, ROUNDS, DRAWS = 40, 60, 10_000
"""Rounds until what is left of the start is 0.9^80 = 0.02 %; measured after that; of second moments alone."""
RATE, LOCAL = 0.7, 3 / 7
"""Random pairs of 8 leave 3/7 of the squared distance."""
EYE = torch.eye(WORKERS, dtype=torch.float64)


def noise() -> Move:
    """Inner steps of independent normal noise of size `SIZE` in every element, each worker from its own seed."""
    sources = [torch.Generator().manual_seed(worker) for worker in range(WORKERS)]

    def move(worker: int, step: int, model: nn.Module) -> None:
        w = model.get_parameter("w").detach()
        w.add_(torch.randn(len(w), generator=sources[worker], dtype=w.dtype) * SIZE)

    return move


def distance(points: list[Tensor]) -> float:
    """The mean squared distance of two different workers, in V."""
    return 2 * torch.stack(points).double().var(0).sum().item() / V


def spreads(strategy: Strategy, rounds: int) -> list[tuple[float, float]]:
    """(of anchors, of live at the end of the phase that starts there), after each outer step but the last."""
    team = Team(Numbers([0.0] * ELEMENTS, torch.float32), strategy, WORKERS)
    walk, ends = noise(), dict[int, Tensor]()

    def move(worker: int, step: int, model: nn.Module) -> None:
        walk(worker, step, model)
        if step % PERIOD == 0:
            ends[worker] = model.get_parameter("w").detach().clone()

    seen: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        start = distance(team.anchors())
        team.run(PERIOD, move)
        seen.append((start, distance(list(ends.values()))))
    return seen[1:]


# The same without a model: second moments of (z, momentum) over the workers

Step = Callable[[int], tuple[Tensor, Tensor]]
"""(round) -> F, G: the state s of all workers becomes F s + G n, where n is the noise of the round's phase."""


@cache
def matrix(mixer: Mixer, round: int) -> Tensor:
    """W: row m has 1/g for each of the g workers that m meets."""
    rows = torch.zeros_like(EYE)
    for me in range(WORKERS):
        if not rows[me].any():
            asked = Situation(Membership(tuple(range(WORKERS)), me), round, Work(1, 1), {}, exact(), Layout.of([]))
            to = list(mixer.exchange(asked).to)
            for member in to:
                rows[member, to] = 1 / len(to)
    return rows


def factored(points: Mixer, deltas: Mixer, mu: float) -> Step:
    """v = mu v + W2 n; z = W1 z - gam (W2 n + mu v). W1 is not asked for the first round: all points are equal."""

    def step(round: int) -> tuple[Tensor, Tensor]:
        one, two = (matrix(points, round - 1) if round else EYE), matrix(deltas, round)
        forward = torch.cat([torch.cat([one, -RATE * mu * mu * EYE], 1), torch.cat([0 * EYE, mu * EYE], 1)])
        return forward, torch.cat([-RATE * (1 + mu) * two, two])

    return step


def pulled(pairs: Mixer, mu: float, pull: float) -> Step:
    """NoLoCo: u = mu u + gam W n + y (z - W z); z = z - u."""

    def step(round: int) -> tuple[Tensor, Tensor]:
        met = matrix(pairs, round)
        apart = pull * (EYE - met)
        forward = torch.cat([torch.cat([EYE - apart, -mu * EYE], 1), torch.cat([apart, mu * EYE], 1)])
        return forward, torch.cat([-RATE * met, RATE * met])

    return step


def moments(step: Step) -> Iterator[float]:
    """The expected dist(z) / V after each outer step, given who meets."""
    covariance = torch.zeros(2 * WORKERS, 2 * WORKERS, dtype=torch.float64)
    round = 0
    while True:
        forward, source = step(round)
        covariance = forward @ covariance @ forward.T + source @ source.T
        points = covariance[:WORKERS, :WORKERS]
        yield (points.trace() - points.sum() / WORKERS).item() / (WORKERS - 1)
        round += 1


def average(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def check(strategy: Strategy, step: Step, want: float) -> None:
    """Anchors, and live at the end of a phase, within 1 % of the moments of the run's own draws; these within 1 % of
    `want` over many draws."""
    own = average(list(islice(moments(step), SETTLE, SETTLE + ROUNDS)))
    seen = spreads(strategy, SETTLE + ROUNDS)[SETTLE:]
    assert average([anchors for anchors, _ in seen]) == pytest.approx(own, rel=0.01)
    assert average([live for _, live in seen]) == pytest.approx(own + 1, rel=0.01)
    assert average(list(islice(moments(step), SETTLE, DRAWS))) == pytest.approx(want, rel=0.01)


def closed_form(rho1: float, rho2: float, mu: float) -> float:
    """gam^2 rho2 K(rho1, mu)."""
    rest = 1 - mu**2
    carried = 2 * mu**2 * rho1 * (1 + mu / rest) / (1 - rho1 * mu)
    return RATE**2 * rho2 * ((1 + mu) ** 2 + mu**4 / rest + carried) / (1 - rho1)


VARIANTS = {
    "global-m1": (global_m1, 0.0, 1.0),
    "global-m1-local-m2": (global_m1_local_m2, 0.0, LOCAL),
    "local-m1": (local_m1, LOCAL, 1.0),
    "local-m1-m2": (local_m1_m2, LOCAL, LOCAL),
}


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("name", VARIANTS)
def test_factored_gossip_keeps_workers_as_far_apart_as_the_closed_form_says(name: str, mu: float) -> None:
    make, rho1, rho2 = VARIANTS[name]
    strategy = make(PERIOD, RATE, mu).strategy
    points, deltas = (rule.mixer for rule in strategy.rules)
    check(strategy, factored(points, deltas, mu), closed_form(rho1, rho2, mu))


def test_noloco_keeps_workers_0_93_v_apart() -> None:
    """Its stationary second moments (see `test_noloco_map`), to which deltas add gam^2 rho V of noise in each round."""
    mu, pull, s = 0.5, 0.7, WORKERS / (2 * (WORKERS - 1))
    last = torch.tensor([pull**2 * s, -2 * mu * pull * s, mu**2], dtype=torch.float64)
    cross = torch.tensor([-pull * s, mu, 0.0], dtype=torch.float64)
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) + 2 * cross + last
    transition = torch.eye(3, dtype=torch.float64) - torch.stack([first, cross + last, last])
    added = torch.full((3,), RATE**2 * (1 - s), dtype=torch.float64)
    want = torch.linalg.solve(transition, added)[0].item()
    assert want == pytest.approx(0.9265, abs=5e-5)
    strategy = noloco(PERIOD, RATE, mu, pull).strategy
    check(strategy, pulled(strategy.rules[0].mixer, mu, pull), want)
    assert strategy.rules[0].outer == consensus_momentum(RATE, mu, pull)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_diloco_has_no_spread_but_that_of_one_phase(mu: float) -> None:
    seen = spreads(diloco(PERIOD, RATE, mu).strategy, ROUNDS)
    assert {anchors for anchors, _ in seen} == {0.0}
    assert average([live for _, live in seen]) == pytest.approx(1.0, rel=0.01)
    assert closed_form(0.0, 0.0, mu) == 0.0 == next(moments(factored(alone(), all_mean(), mu)))


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_without_mixing_workers_drift_apart_for_ever(mu: float) -> None:
    """A phase that ended k outer steps ago counts by gam (1 + mu + ... + mu^k), which tends to gam / (1 - mu): in the
    end dist(z) grows by (gam / (1 - mu))^2 V with every round."""
    rounds = 100
    counts = [RATE * (1 - mu ** (k + 1)) / (1 - mu) for k in range(1, rounds + 1)]
    strategy = Strategy((Rule(every(PERIOD), outer=nesterov(RATE, mu), mixer=alone()),))
    seen = spreads(strategy, rounds)
    for round in (1, 2, 5, 20, 50, 100):
        want = sum(count**2 for count in counts[:round])
        anchors, live = seen[round - 1]
        assert anchors == pytest.approx(want, rel=0.03)
        assert live == pytest.approx(want + 1, rel=0.03)
    grown = (seen[99][0] - seen[49][0]) / 50
    assert grown == pytest.approx((RATE / (1 - mu)) ** 2, rel=0.03)
