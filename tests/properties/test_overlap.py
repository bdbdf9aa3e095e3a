"""Exchanges that are in flight while training goes on."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import CompositionError
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import reference, toys
from atoll.testing.toys import draws
from tests.properties.teams import Numbers, Team, close, examples, mean, push, same, shared, values

# Mlp: first 0-1, middle 2-3, last 4-5, head 6-7 (weight, bias)
LAYERS = {
    1: (by_name("*"), [[0, 1, 2, 3, 4, 5, 6, 7]]),
    2: (by_name("[fh]*", "*"), [[0, 1, 6, 7], [2, 3, 4, 5]]),
    3: (by_name("first.*", "[ml]*", "head.*"), [[0, 1], [2, 3, 4, 5], [6, 7]]),
    4: (by_name("h*", "l*", "m*", "f*"), [[6, 7], [4, 5], [2, 3], [0, 1]]),
}


def pushes(worker: int, step: int, params: list[Tensor]) -> None:
    for tensor, move in zip(params, draws(0, worker, step, params), strict=True):
        tensor.sub_(move, alpha=0.01)


@examples(40)
@given(
    fragments=st.sampled_from([*LAYERS]),
    workers=st.integers(1, 4),
    alpha=st.sampled_from([0.0, 0.5, 0.3, 1.0]),
    data=st.data(),
)
def test_streaming_is_the_papers_loop_for_any_period_delay_and_number_of_fragments(
    fragments: int, workers: int, alpha: float, data: st.DataObject
) -> None:
    """P need not divide H; a fragment may land where another leaves, or several be in flight; τ goes up to H - 1."""
    period = data.draw(st.integers(max(2, fragments), 9), "period")
    delay = data.draw(st.integers(1, period - 1), "delay")
    partition, places = LAYERS[fragments]
    rule = Rule(staggered(period, fragments), outer=nesterov(0.4, 0.9), landing=After(delay), merge=blend(alpha))
    team = Team(toys.Mlp(), Strategy((rule,), partition), workers)
    for _ in range(3):
        team.run(period)
        anchor, live = reference.streaming(
            toys.initial(toys.Mlp()),
            workers=workers,
            steps=team.step,
            inner_step=pushes,
            period=period,
            fragments=places,
            delay=delay,
            alpha=alpha,
            outer=reference.nesterov(0.4, 0.9),
        )
        for sync, model, want in zip(team.syncs, team.models, live, strict=True):
            named = shared(sync)
            assert toys.same_bits([named[name] for name in values(model)], anchor)
            assert toys.same_bits(list(values(model).values()), want)


@examples(30)
@given(fragments=st.sampled_from([*LAYERS]), data=st.data())
def test_fragment_p_leaves_at_its_offset_plus_whole_periods_and_lands_after_the_delay(
    fragments: int, data: st.DataObject
) -> None:
    """t_p = floor(p H / P): the first launch is at H + t_p, so never after fewer than H steps."""
    period = data.draw(st.integers(max(2, fragments), 9))
    delay = data.draw(st.integers(1, period - 1))
    rule = Rule(staggered(period, fragments), outer=sgd(1.0), landing=After(delay), merge=blend(0.5))
    team = Team(toys.Mlp(), Strategy((rule,), LAYERS[fragments][0]), 2)
    lands: list[tuple[int, int]] = []
    most = 0
    for step in range(1, 3 * period + 1):
        before = len(team.landed())
        team.run(1)
        lands += [(step, landed.key.fragment) for landed in team.landed()[before:]]
        most = max(most, len(team.syncs[0].state.queue))
    every_launch = [(p * period // fragments + r * period, p) for r in (1, 2, 3) for p in range(fragments)]
    want = [(step, p) for step, p in every_launch if step <= 3 * period]
    assert sorted(team.launched()) == sorted(want)
    assert sorted(lands) == sorted((step + delay, p) for step, p in want if step + delay <= 3 * period)
    assert {landed.age for landed in team.landed()} <= {delay}
    assert most == max(sum(left <= step < left + delay for left, _ in want) for step in range(1, 3 * period + 1))


def test_a_delta_is_measured_at_launch_and_not_at_landing() -> None:
    """Every worker walks 1 a step, then 100 a step while the exchange of step 4 is in flight."""

    def move(worker: int, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w").sub_(1.0 if step <= 4 else 100.0)

    rule = Rule(every(4), outer=sgd(1.0), landing=After(3), merge=blend(0.25))
    team = Team(Numbers([0.0]), Strategy((rule,)), 2).run(7, move)
    assert shared(team.syncs[0])["w"].item() == -4.0
    assert values(team.models[0])["w"].item() == 0.25 * -304.0 + 0.75 * -4.0


@pytest.mark.parametrize("later", [Carry.DELTA, Carry.LIVE])
def test_a_message_is_read_before_anything_else_lands_on_its_fragment(later: Carry) -> None:
    """A blocking rule is due where an overlapped one lands, on the same fragment: what leaves is measured first."""
    behind = Rule(every(4), outer=sgd(0.5), landing=After(2), merge=blend(0.0))
    blocking = Rule(every(6), outer=sgd(0.25) if later is Carry.DELTA else None, carry=later)
    team = Team(toys.Mlp(), Strategy((behind, blocking)), 3).run(6)
    apart = [values(model) for model in Team(toys.Mlp(), Strategy(), 3).run(4).models]
    now = [values(model) for model in Team(toys.Mlp(), Strategy(), 3).run(6).models]
    for name, start in values(toys.Mlp()).items():
        anchor = start - 0.5 * (start - mean([each[name] for each in apart]))
        average = mean([each[name] for each in now])
        want = anchor - 0.25 * (start - average) if later is Carry.DELTA else average
        assert all(close(values(model)[name], want) for model in team.models)
        assert all(close(shared(sync)[name], want) for sync in team.syncs)


def test_two_rules_may_carry_live_of_one_fragment_without_harm_to_a_third_carrying_deltas() -> None:
    """Anchors stay equal on all workers whatever is in flight."""
    slow = Rule(every(7), outer=nesterov(0.7, 0.9))
    one, two = (Rule(every(h), carry=Carry.LIVE, landing=After(2), merge=blend(0.5)) for h in (3, 5))
    team = Team(toys.Mlp(), Strategy((slow, one, two)), 3)
    for _ in range(30):
        team.run(1)
        assert len({sync.state.digest() for sync in team.syncs}) == 1


def test_draining_uses_what_is_in_flight_as_if_its_step_had_come() -> None:
    rule = Rule(every(4), outer=nesterov(0.7, 0.9), landing=After(3), merge=blend(0.0))
    drained = Team(toys.Mlp(), Strategy((rule,)), 2).run(9).drain()
    landed = Team(toys.Mlp(), Strategy((rule,)), 2).run(11)
    assert [event.age for event in drained.landed()] == [3, 1]
    assert not drained.syncs[0].state.queue
    assert same(shared(drained.syncs[0]), shared(landed.syncs[0]))
    assert same(values(drained.models[0]), values(landed.models[0]))


@dataclass(frozen=True)
class hastening:
    """Every `period` steps, but every step once the signal "hurry" is agreed to be over 0.5."""

    period: int

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        period = 1 if signals.get("hurry", 0.0) > 0.5 else self.period
        return (step // period + 1) * period


def test_a_schedule_that_becomes_shorter_than_the_delay_is_stopped_with_a_sentence() -> None:
    rule = Rule(hastening(4), outer=sgd(1.0), landing=After(2), merge=blend(0.5))
    team = Team(toys.Mlp(), Strategy((rule,)), 2)
    with pytest.raises(CompositionError, match=r"closed round 2 of fragment 0 at step 8, before .* After\(steps=2\)"):
        team.run(12, push, signals=lambda worker, step: {"hurry": 1.0})
