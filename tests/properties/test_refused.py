"""Contributions that are refused, and rounds that are lost."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.parts.codecs import exact
from atoll.parts.landings import After
from atoll.parts.merges import blend, carry_on, leave
from atoll.parts.mixers import Exchange, Mixer, Situation, all_mean, by_share, by_tokens, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import reference, toys
from atoll.wire import Keep, Reduce
from tests.properties.teams import (
    Move,
    Numbers,
    Team,
    close,
    examples,
    live_anchor_outer,
    mean,
    push,
    same,
    shared,
    training,
    values,
)

RULES = {
    "diloco": Rule(every(3), outer=nesterov(0.7, 0.9)),
    "kept": Rule(every(3), outer=nesterov(0.7, 0.9), mixer=all_mean(Keep())),
    "streaming": Rule(every(3), outer=nesterov(0.7, 0.9), landing=After(1), merge=blend(0.5)),
    "averaging": Rule(every(3), carry=Carry.LIVE),
    "averaging behind": Rule(every(3), carry=Carry.LIVE, landing=After(1), merge=carry_on()),
}


def poisoned(by: int, at: int, value: float) -> Move:
    """`push`, but at step `at` worker `by` writes `value` into its model."""

    def move(worker: int, step: int, model: nn.Module) -> None:
        push(worker, step, model)
        if worker == by and step == at:
            with torch.no_grad():
                next(model.parameters())[0] = value

    return move


@pytest.mark.parametrize("name", RULES)
@examples(4)
@given(workers=st.integers(3, 6), value=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_values_that_are_not_finite_are_refused_by_all_alike_named_and_healed_by_the_mean(
    name: str, workers: int, value: float, data: st.DataObject
) -> None:
    by = data.draw(st.integers(0, workers - 1))
    team = Team(toys.Mlp(), Strategy((RULES[name],)), workers).run(4, poisoned(by, 3, value))
    others = tuple(worker for worker in range(workers) if worker != by)
    for worker in range(workers):
        (landed,) = team.landed(worker)
        assert landed.peers == others
        assert landed.share == len(others) / workers
        assert landed.refused == (f"worker {by} sent values that are not finite",)
        assert same(shared(team.syncs[worker]), shared(team.syncs[0]))
        assert all(tensor.isfinite().all() for tensor in values(team.models[worker]).values())


@examples(10)
@given(workers=st.integers(3, 6), data=st.data())
def test_the_mean_is_that_of_the_others_when_one_is_refused(workers: int, data: st.DataObject) -> None:
    by = data.draw(st.integers(0, workers - 1))
    strategy = Strategy((Rule(every(2), outer=sgd(1.0)),))
    apart = Team(toys.Mlp(), Strategy(), workers).run(2)
    team = Team(toys.Mlp(), strategy, workers).run(2, poisoned(by, 2, math.nan))
    each = [values(model) for worker, model in enumerate(apart.models) if worker != by]
    assert close(values(team.models[by]), {name: mean([live[name] for live in each]) for name in each[0]})


@examples(40)
@given(
    sizes=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6),
    factor=st.sampled_from([1.0, 5.0, 9.0, 11.0, 20.0, 1e6]),
)
def test_a_norm_of_over_ten_times_the_median_is_refused_if_four_or_more_take_part(
    sizes: list[float], factor: float
) -> None:
    sizes = [*sizes, factor * median([*sizes, sizes[0]])]

    def move(worker: int, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w").add_(sizes[worker])

    team = Team(Numbers([0.0]), Strategy((Rule(every(1), outer=sgd(1.0)),)), len(sizes)).run(1, move)
    limit = 10 * median(sizes) if len(sizes) >= 4 else math.inf
    kept = [size for size in sizes if size <= limit]
    assert team.landed()[0].peers == tuple(worker for worker, size in enumerate(sizes) if size <= limit)
    assert ("times the median" in " ".join(team.landed()[0].refused)) == (len(kept) < len(sizes))
    for model in team.models:
        assert close(values(model)["w"], torch.tensor([sum(kept) / len(kept)], dtype=torch.float64))


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_that_is_not_a_finite_number_from_zero_is_refused(weight: float) -> None:
    rule = Rule(every(1), outer=sgd(1.0), mixer=weighted(by_share(), all_mean()))
    team = Team(Numbers([0.0]), Strategy((rule,)), 3, shares=[1.0, weight, 1.0]).run(2)
    assert [landed.peers for landed in team.landed()] == [(0, 2), (0, 2)]
    assert "worker 1 sent the weight" in team.landed()[0].refused[0]


@dataclass(frozen=True)
class losing:
    """`mixer`, but the given rounds have no quorum: everybody's weight is refused."""

    rounds: tuple[int, ...]
    mixer: Mixer = all_mean()
    agrees: bool = True

    def exchange(self, at: Situation) -> Exchange:
        meeting = self.mixer.exchange(at)
        return meeting._replace(weight=math.nan) if at.round in self.rounds else meeting


@pytest.mark.parametrize("name", RULES)
def test_a_lost_round_changes_no_bit_of_live_anchor_and_outer_state(name: str) -> None:
    """Round 1 leaves at step 6; it lands there, or one step later."""
    rule = replace(RULES[name], mixer=losing((1,), RULES[name].mixer))
    team = Team(toys.BufferedMlp(), Strategy((rule,)), 3).run(5)
    for step in (6, 7):
        moved: dict[int, list[bytes]] = {}

        def move(worker: int, step: int, model: nn.Module, moved: dict[int, list[bytes]] = moved) -> None:
            push(worker, step, model)
            moved[worker] = live_anchor_outer(team.syncs[worker])

        team.run(1, move)
        assert [live_anchor_outer(sync) for sync in team.syncs] == [moved[worker] for worker in range(3)], step
    assert {lost.key.round for lost in team.lost()} == {1}


def test_a_lone_failure_among_two_is_below_the_quorum_and_says_who_and_why() -> None:
    team = Team(toys.Mlp(), Strategy((RULES["diloco"],)), 2).run(3, poisoned(1, 3, math.nan))
    for worker in range(2):
        (lost,) = team.lost(worker)
        assert "1 of 2 contributions count" in lost.why
        assert "worker 1 sent values that are not finite" in lost.why


@pytest.mark.parametrize("mixer", [all_mean(Keep()), all_mean(Reduce(exact())), weighted(by_tokens(), all_mean())])
@pytest.mark.parametrize("rule", [RULES["diloco"], RULES["streaming"], Rule(every(3), outer=sgd(1.0))])
def test_losing_every_other_round_is_a_period_twice_as_long(rule: Rule, mixer: Mixer) -> None:
    """The delta after a lost round holds what was learned in it, and weighs as much."""
    half = Team(toys.Mlp(), Strategy((replace(rule, mixer=losing((0, 2, 4), mixer)),)), 3)
    whole = Team(toys.Mlp(), Strategy((replace(rule, schedule=every(6), mixer=mixer),)), 3)
    for team in (half, whole):
        team.run(20, tokens=lambda worker, step: 1 + worker * step)
    assert len(half.lost()) == len(half.landed()) == len(whole.landed()) == 3
    for sync, other, model, twin in zip(half.syncs, whole.syncs, half.models, whole.models, strict=True):
        assert same(shared(sync), shared(other))
        assert same(values(model), values(twin))


GRADIENTS = Strategy((Rule(every(1), carry=Carry.GRADIENT, merge=leave()),))


def _poisoned_gradients(moves: dict[str, Move], by: Callable[[int, int], bool]) -> dict[str, Move]:
    def backward(worker: int, step: int, model: nn.Module) -> None:
        moves["backward"](worker, step, model)
        if by(worker, step):
            next(iter(model.parameters())).grad.fill_(math.nan)  # pyright: ignore[reportOptionalMemberAccess]

    return moves | {"backward": backward}


def test_when_gradients_are_lost_all_skip_them_alike_and_replicas_stay_equal() -> None:
    """As a loop in which that step's gradient is zero; AdamW still moves by its momentum and decay."""
    module, gradient = toys.Mlp(), toys.gradient(toys.Mlp(), 0)
    want, _ = reference.data_parallel(
        toys.initial(module),
        workers=2,
        steps=8,
        gradient=lambda w, step, params: [g * (step != 4) for g in gradient(w, step, params)],
        update=toys.update(toys.adamw),
    )
    team = Team(module, GRADIENTS, 2)
    team.run(8, **_poisoned_gradients(training(toys.adamw), lambda worker, step: worker == 1 and step == 4))
    assert [lost.key.round for lost in team.lost()] == [3]
    for model in team.models:
        assert toys.same_bits(list(values(model).values()), want)


def test_a_gradient_that_is_not_finite_is_replaced_by_the_mean_of_the_others() -> None:
    module, gradient = toys.Mlp(), toys.gradient(toys.Mlp(), 0)
    want = toys.initial(module)
    update = toys.update(toys.adamw)
    for step in range(1, 9):
        who = (0, 2) if step == 4 else (0, 1, 2)
        each = [gradient(worker, step, want) for worker in who]
        update(step, want, [mean(grads) for grads in zip(*each, strict=True)])
    team = Team(module, GRADIENTS, 3)
    team.run(8, **_poisoned_gradients(training(toys.adamw), lambda worker, step: worker == 1 and step == 4))
    for model in team.models:
        assert close(values(model), dict(zip(values(model), want, strict=True)))
