"""Compositions that must coincide with something older and simpler."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.parts.codecs import exact
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean, by_share, by_tokens, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.sync.rule import Rule, Strategy
from atoll.testing import reference, toys
from atoll.wire import Keep, Reduce
from tests.properties.teams import Numbers, Team, close, examples, push, same, training, values

PERIODS = st.integers(1, 7)
WORKERS = st.integers(1, 5)
SEEDS = st.integers(0, 1000)


def named(module: nn.Module, tensors: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(values(module), tensors, strict=True))


@examples(12)
@given(period=PERIODS, seed=SEEDS, steps=st.integers(1, 20))
def test_one_worker_with_outer_sgd_of_rate_one_is_plain_training(period: int, seed: int, steps: int) -> None:
    module = toys.Mlp(seed)
    team = Team(module, Strategy((Rule(every(period), outer=sgd(1.0)),)), 1).run(steps, **training(toys.adamw, seed))
    want, _ = reference.single(
        toys.initial(module), steps=steps, inner_step=toys.inner_step(module, toys.adamw, seed=seed)
    )
    assert close(values(team.models[0]), named(module, want))


@examples(12)
@given(period=PERIODS, alpha=st.floats(0.05, 1.5), seed=SEEDS)
def test_diloco_of_one_worker_is_lookahead(period: int, alpha: float, seed: int) -> None:
    """Lookahead (arXiv 1907.08610): every k steps, slow += alpha (fast - slow); fast = slow."""
    module = toys.Mlp(seed)
    slow, fast = toys.initial(module), toys.initial(module)
    step = toys.inner_step(module, toys.adamw, seed=seed)
    for t in range(1, 21):
        step(0, t, fast)
        if t % period == 0:
            for s, f in zip(slow, fast, strict=True):
                s += alpha * (f - s)
                f.copy_(s)
    team = Team(module, Strategy((Rule(every(period), outer=sgd(alpha)),)), 1).run(20, **training(toys.adamw, seed))
    assert close(values(team.models[0]), named(module, fast))


@examples(12)
@given(workers=WORKERS, period=st.integers(2, 7), data=st.data())
def test_streaming_of_one_fragment_whose_delay_nobody_uses_is_diloco(
    workers: int, period: int, data: st.DataObject
) -> None:
    """No worker moves while an exchange is in flight, and the local copy has no weight in the blend."""
    delay = data.draw(st.integers(1, period - 1))

    def pausing(worker: int, step: int, model: nn.Module) -> None:
        if step < period or (step - 1) % period >= delay:
            push(worker, step, model)

    late = Rule(staggered(period, 1), outer=nesterov(0.7, 0.9), landing=After(delay), merge=blend(0.0))
    streaming = Team(toys.Mlp(), Strategy((late,)), workers).run(5 * period + delay, pausing)
    diloco = Team(toys.Mlp(), Strategy((Rule(every(period), outer=nesterov(0.7, 0.9)),)), workers)
    diloco.run(5 * period + delay, pausing)
    assert len(streaming.landed()) == len(diloco.landed()) == 5
    for got, want in zip(streaming.models, diloco.models, strict=True):
        assert all(torch.equal(values(got)[name], tensor) for name, tensor in values(want).items())


@examples(6)
@given(workers=WORKERS, period=PERIODS)
def test_streaming_of_one_fragment_without_delay_is_diloco(workers: int, period: int) -> None:
    blocking = Rule(staggered(period, 1), outer=nesterov(0.7, 0.9), merge=blend(0.0))
    diloco = Rule(every(period), outer=nesterov(0.7, 0.9))
    got, want = (Team(toys.Mlp(), Strategy((rule,)), workers).run(4 * period) for rule in (blocking, diloco))
    assert all(torch.equal(values(got.models[0])[n], tensor) for n, tensor in values(want.models[0]).items())


@examples(8)
@given(workers=WORKERS, seed=SEEDS)
def test_a_period_of_one_with_inner_and_outer_sgd_is_gradient_averaging(workers: int, seed: int) -> None:
    module = toys.Mlp(seed)
    team = Team(module, Strategy((Rule(every(1), outer=sgd(1.0)),)), workers).run(15, **training(toys.sgd, seed))
    want, _ = reference.data_parallel(
        toys.initial(module),
        workers=workers,
        steps=15,
        gradient=toys.gradient(module, seed),
        update=toys.update(toys.sgd),
    )
    assert close(values(team.models[workers - 1]), named(module, want))


def _constant(speeds: list[float]) -> Callable[[int, int, nn.Module], None]:
    def move(worker: int, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w").sub_(speeds[worker])

    return move


def test_the_first_diloco_round_moves_the_anchor_1_33_times_the_mean_delta() -> None:
    team = Team(Numbers([0.0, 5.0]), Strategy((Rule(every(10), outer=nesterov(0.7, 0.9)),)), 2)
    team.run(10, _constant([0.1, 0.3]))
    mean_delta = 10 * 0.2
    assert close(values(team.models[0])["w"], Numbers([0.0, 5.0]).w - 1.33 * mean_delta, 1e-12)


def test_constant_deltas_move_the_anchor_7_times_as_far_in_the_end() -> None:
    team = Team(Numbers([0.0]), Strategy((Rule(every(2), outer=nesterov(0.7, 0.9)),)), 2)
    team.run(2 * 300, _constant([0.1, 0.3]))
    before = values(team.models[0])["w"]
    team.run(2, _constant([0.1, 0.3]))
    assert close(before - values(team.models[0])["w"], Numbers([7 * 2 * 0.2]).w, 1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_keeping_wires_and_reducing_them_exactly_give_the_same_bits(workers: int) -> None:
    kept, reduced, chosen = (
        Team(toys.Mlp(), Strategy((Rule(every(3), outer=nesterov(0.7, 0.9), mixer=all_mean(fold)),)), workers).run(12)
        for fold in (Keep(), Reduce(exact()), None)
    )
    assert same(values(kept.models[0]), values(reduced.models[0]))
    assert same(values(kept.models[0]), values(chosen.models[0]))


@examples(8)
@given(workers=WORKERS, weight=st.floats(1e-3, 1e3), tokens=st.integers(1, 10**6))
def test_workers_of_equal_weight_are_averaged_as_if_unweighted(workers: int, weight: float, tokens: int) -> None:
    plain, share, token = (
        Team(
            toys.Mlp(),
            Strategy((Rule(every(3), outer=nesterov(0.7, 0.9), mixer=mixer),)),
            workers,
            shares=[weight] * workers,
        ).run(12, tokens=lambda worker, step: tokens)
        for mixer in (all_mean(), weighted(by_share(), all_mean()), weighted(by_tokens(), all_mean()))
    )
    for team in (share, token):
        assert close(values(team.models[0]), values(plain.models[0]), 1e-12)
