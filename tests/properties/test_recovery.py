"""Gossip, eager updates and streaming where they must be DiLoCo again, or have its mean trajectory.

Sums over workers come in another order there, so "is" means 1e-10 of the anchor's norm in float64 unless bits are
promised.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from atoll.parts.codecs import exact
from atoll.parts.estimates import own
from atoll.parts.fragments import by_name, whole
from atoll.parts.gossip import groups, hypercube, only, pairs
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import adopt, carry_on, leave
from atoll.parts.mixers import Mixer, all_mean, alone
from atoll.parts.momentum import consensus_momentum
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.peers.faults import Dropping
from atoll.recipes.gossip import factored
from atoll.recipes.methods import METHODS
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import toys
from tests.properties.teams import Blocks, KeptTeam, Move, Numbers, Team, close, mean, push, same, training, values

PERIOD, ROUNDS = 4, 5
DILOCO = METHODS["diloco"](period=PERIOD).strategy
MIXERS: dict[str, Mixer] = {
    "nobody": alone(),
    "pairs": pairs(1),
    "groups": groups(3, 1),
    "hypercube": hypercube(),
    "everyone": all_mean(),
}


def follows(got: Team, want: Team, moves: Callable[[], dict[str, Move]]) -> None:
    """Every worker's anchor of the one is that of the other after each of `ROUNDS` rounds."""
    mine, its = moves(), moves()
    start = want.anchors()[0]
    for _ in range(ROUNDS):
        got.run(PERIOD, **mine)
        want.run(PERIOD, **its)
        for one, other in zip(got.anchors(), want.anchors(), strict=True):
            assert close(one, other)
    assert not close(want.anchors()[0], start, 1e-3), "the run went nowhere"


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("mix1", MIXERS)
def test_factored_gossip_whose_deltas_all_meet_is_diloco_however_points_are_mixed(mix1: str, workers: int) -> None:
    """Equal points are the fixed points of every doubly stochastic mixing."""
    method = factored("recovery", PERIOD, MIXERS[mix1], all_mean(), 0.7, 0.9)
    got, want = (Team(toys.Mlp(), strategy, workers) for strategy in (method.strategy, DILOCO))
    follows(got, want, lambda: training(toys.adamw))


@pytest.mark.parametrize("workers", [2, 5])
def test_global_m1_that_blocks_is_diloco_because_the_outer_step_is_linear(workers: int) -> None:
    strategy = METHODS["global-m1-blocking"](period=PERIOD).strategy
    follows(Team(toys.Mlp(), strategy, workers), Team(toys.Mlp(), DILOCO, workers), lambda: training(toys.adamw))


# The mean over workers, on a quadratic


def common_curvature() -> dict[str, Move]:
    """Inner SGD on least squares in which all workers see the same inputs, each with targets of its own: gradients are
    then affine, and alike but for a constant."""

    def backward(worker: int, step: int, model: nn.Module) -> None:
        x, _ = toys.batch(0, 0, step)
        _, y = toys.batch(0, worker, step)
        model.zero_grad()
        model(x, y).backward()

    return training(toys.sgd) | {"backward": backward}


FACTORED = [name for name in METHODS if name.startswith(("global-m1", "local-m1", "factored"))]


@pytest.mark.parametrize("lost", [0.0, 0.3])
@pytest.mark.parametrize("workers", [4, 5])
@pytest.mark.parametrize("name", FACTORED)
def test_the_mean_of_factored_gossip_is_diloco_on_a_quadratic(name: str, workers: int, lost: float) -> None:
    """Also where messages are lost: whoever is not heard keeps its own, which leaves the mean as it is."""
    strategy = METHODS[name](period=PERIOD).strategy
    team = Team(toys.Quadratic(), strategy, workers, faults=Dropping(lost, seed=3))
    want, mine, its = Team(toys.Quadratic(), DILOCO, workers), common_curvature(), common_curvature()
    apart = False
    for _ in range(ROUNDS):
        team.run(PERIOD, **mine)
        want.run(PERIOD, **its)
        assert close(mean(team.anchors()), want.anchors()[0])
        apart = apart or not close(team.anchors()[0], want.anchors()[0], 1e-6)
    assert apart or name == "global-m1-blocking"
    unheard = [team.lost(worker) or any(each.dropped for each in team.landed(worker)) for worker in range(workers)]
    assert any(unheard) == bool(lost)


# One worker

ONE_WORKER = ["local-sgd", "diloco", "eager", "muloco", "noloco", *FACTORED]
"""Those that step by deltas and round nothing."""


class Outer:
    """What one worker does with PyTorch's own SGD as outer optimizer (Lookahead, SNOO): its gradient is the delta."""

    def __init__(self, module: nn.Module, lr: float, momentum: float, looks_ahead: bool) -> None:
        self.slow = [nn.Parameter(tensor) for tensor in toys.initial(module)]
        self.step = torch.optim.SGD(self.slow, lr, momentum, nesterov=looks_ahead)
        self.fast = toys.initial(module)

    def round(self) -> None:
        for slow, fast in zip(self.slow, self.fast, strict=True):
            slow.grad = slow.detach() - fast
        self.step.step()
        for slow, fast in zip(self.slow, self.fast, strict=True):
            fast.copy_(slow.detach())


def plain(module: nn.Module, outer: sgd | nesterov | consensus_momentum) -> list[Tensor]:
    momentum = 0.0 if isinstance(outer, sgd) else outer.momentum
    worker = Outer(module, outer.lr, momentum, isinstance(outer, nesterov))
    step = toys.inner_step(module, toys.adamw, seed=0)
    for t in range(1, ROUNDS * PERIOD + 1):
        step(0, t, worker.fast)
        if t % PERIOD == 0:
            worker.round()
    return worker.fast


@pytest.mark.parametrize("name", ONE_WORKER)
def test_a_single_worker_is_lookahead_with_pytorchs_own_outer_optimizer(name: str) -> None:
    strategy = METHODS[name](period=PERIOD).strategy
    outer = strategy.rules[-1].outer
    assert isinstance(outer, sgd | nesterov | consensus_momentum)
    team = Team(Blocks(), strategy, 1).run(ROUNDS * PERIOD, **training(toys.adamw))
    assert close(values(team.models[0]), dict(zip(values(Blocks()), plain(Blocks(), outer), strict=True)))


def test_a_single_worker_with_a_keeper_that_steps_at_each_delta_is_lookahead_too() -> None:
    strategy = METHODS["async-local-sgd"](period=PERIOD, delay=1).strategy
    moves = training(toys.adamw)

    def move(worker: int, step: int, model: nn.Module) -> None:
        moves["backward"](worker, step, model)
        moves["move"](worker, step, model)

    team = KeptTeam(Blocks(), strategy, [Fraction(1)]).run(ROUNDS * PERIOD, move)
    want = plain(Blocks(), nesterov(0.7, 0.9))
    assert close(values(team.models[0]), dict(zip(values(Blocks()), want, strict=True)))


@pytest.mark.parametrize("period", [1, PERIOD])
def test_eager_with_one_worker_is_diloco(period: int) -> None:
    """mean + (fresh - mine) is fresh to the bit only where the last delta and the newest are of about one size."""
    eager = METHODS["eager"](period=period, outer_lr=0.7).strategy
    diloco = METHODS["diloco"](period=period).strategy
    got, want = (Team(toys.Mlp(), strategy, 1).run(ROUNDS * period) for strategy in (eager, diloco))
    assert close(values(got.models[0]), values(want.models[0]), 1e-15)


# Streaming


def streaming(alpha: float) -> Strategy:
    """One fragment, no delay, nothing rounded."""
    strategy = METHODS["streaming"](PERIOD, fragments=0, delay=0, alpha=alpha, outer_lr=0.7).strategy
    (rule,) = strategy.rules
    return Strategy((replace(rule, codec=exact()),), whole())


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_streaming_of_one_fragment_without_delay_and_rounding_is_diloco(workers: int) -> None:
    got, want = (
        Team(toys.Mlp(), strategy, workers).run(ROUNDS * PERIOD, **training(toys.adamw))
        for strategy in (streaming(0.0), DILOCO)
    )
    for model, other in zip(got.models, want.models, strict=True):
        assert all(torch.equal(values(model)[name], tensor) for name, tensor in values(other).items())


def test_streaming_in_which_the_local_copy_weighs_everything_does_not_touch_live() -> None:
    got, want = (
        Team(toys.Mlp(), strategy, 3).run(ROUNDS * PERIOD, **training(toys.adamw))
        for strategy in (streaming(1.0), Strategy())
    )
    for model, other in zip(got.models, want.models, strict=True):
        assert same(values(model), values(other))
    assert not close(got.anchors()[0], Team(toys.Mlp(), streaming(1.0), 3).anchors()[0], 1e-3)


# What Mix1 changes sums to zero


@pytest.mark.parametrize("lost", [0.0, 0.3])
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("mix1", ["pairs", "groups", "hypercube", "everyone"])
def test_what_mixing_changes_sums_to_zero_over_the_workers(mix1: str, workers: int, lost: float) -> None:
    """Points land a step before the round closes, so that anchors move by the mixing alone. Live moves along."""
    points = Rule(every(3), carry=Carry.ANCHOR, mixer=MIXERS[mix1], landing=After(2), merge=carry_on())
    deltas = Rule(every(3), outer=nesterov(0.7, 0.9), mixer=alone(), estimate=own())
    team = Team(toys.Mlp(), Strategy((points, deltas)), workers, faults=Dropping(lost, seed=workers))
    moved = kept = 0
    for _ in range(8):
        team.run(4 if team.step == 0 else 1)
        before, live = team.anchors(), [values(model) for model in team.models]
        failed = [len(team.lost(worker)) for worker in range(workers)]
        team.run(1)
        change = [now - then for now, then in zip(team.anchors(), before, strict=True)]
        size = max(float(each.norm()) for each in before)
        assert float(sum(change).norm()) <= 1e-13 * size  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        for worker, each in enumerate(change):
            heard = team.landed(worker)[-1].dropped if len(team.lost(worker)) == failed[worker] else (worker,)
            kept += worker in heard
            moved += bool(each.any())
            assert not (worker in heard and each.any())
            pushed = {name: tensor.clone() for name, tensor in live[worker].items()}
            flat = torch.cat([tensor.flatten() for tensor in values(team.models[worker]).values()])
            shell = toys.Mlp()
            shell.load_state_dict(pushed)
            push(worker, team.step, shell)
            want = torch.cat([tensor.flatten() for tensor in values(shell).values()]) + each
            assert close(flat, want, 1e-12)
        team.run(1)
    assert moved
    assert bool(kept) == bool(lost)


@pytest.mark.parametrize("blocks", [False, True])
def test_only_what_is_mixed_differs_from_a_run_without_mixing(blocks: bool) -> None:
    """Mix1 of one fragment's points leaves the other's bits alone, overlapped and blocking."""
    late = {"landing": Blocking(), "merge": adopt()} if blocks else {"landing": After(3), "merge": leave()}
    names = only(("first.*",), pairs(1))
    points = Rule(every(3), carry=Carry.ANCHOR, mixer=names, **late)  # pyright: ignore[reportArgumentType]
    deltas = Rule(every(3), outer=nesterov(0.7, 0.9), mixer=alone(), estimate=own())
    mixed = Team(toys.Mlp(), Strategy((points, deltas), by_name("first.*", "*")), 4).run(15)
    apart = Team(toys.Mlp(), Strategy((deltas,), by_name("first.*", "*")), 4).run(15)
    assert all(torch.equal(one, other) for one, other in zip(mixed.anchors(1), apart.anchors(1), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(mixed.anchors(0), apart.anchors(0), strict=True))
    assert close(mean(mixed.anchors(0)), mean(apart.anchors(0)), 1e-13)


def test_the_mean_of_noloco_is_that_of_heavy_ball() -> None:
    """The pull sums to zero over a pair, so that blind deltas move the mean as if nothing pulled."""
    rule = Rule(every(2), outer=consensus_momentum(0.7, 0.5, 0.7), carry=Carry.BOTH, mixer=pairs(0), estimate=own())
    team = Team(Numbers([0.0] * 50), Strategy((rule,)), 6, faults=Dropping(0.2, seed=1)).run(20)
    alone_ = Team(Numbers([0.0] * 50), Strategy((replace(rule, mixer=alone()),)), 6).run(20)
    assert close(mean(team.anchors()), mean(alone_.anchors()), 1e-12)
    assert team.lost()
