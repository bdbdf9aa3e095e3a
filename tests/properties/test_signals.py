"""Signals: a few floats whose mean over the workers is agreed, which schedules may read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.parts.landings import After
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import alone
from atoll.parts.outers import sgd
from atoll.parts.schedules import every
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.wire import Launched
from tests.properties.teams import Numbers, Team, examples, still


@dataclass(frozen=True)
class adaptive:
    """Every `short` steps while the agreed signal "x" is below 1 (or not there yet), else every `long` steps."""

    short: int
    long: int

    def next(self, step: int, fragment: int, signals: Mapping[str, float]) -> int:
        period = self.short if signals.get("x", 0.0) < 1 else self.long
        return (step // period + 1) * period


SIGNALS = st.lists(st.lists(st.floats(0, 2), min_size=30, max_size=30), min_size=1, max_size=5)


@examples(20)
@given(x=SIGNALS, delay=st.integers(0, 1))
def test_all_workers_switch_period_at_the_same_step_by_the_agreed_mean(x: list[list[float]], delay: int) -> None:
    """What is sent at a launch holds from its landing."""
    landing = {"landing": After(delay), "merge": blend(0.5)} if delay else {}
    team = Team(Numbers([0.0]), Strategy((Rule(adaptive(2, 5), outer=sgd(1.0), **landing),)), len(x))
    team.run(30, still, signals=lambda worker, step: {"x": x[worker][step - 1]})
    want, due, agreed = [], 2, {0: 0.0}
    for step in range(1, 31):
        if step == due:
            want.append((step, 0))
            agreed[step + delay] = sum(each[step - 1] for each in x) / len(x)
        if step in agreed or step == due:
            now = agreed[max(at for at in agreed if at <= step)]
            due = adaptive(2, 5).next(step, 0, {"x": now})
    assert all(team.launched(worker) == want for worker in range(len(x)))


@pytest.mark.parametrize("missing", [{}, {"x": math.nan}, {"x": math.inf}])
def test_a_worker_without_a_finite_signal_is_left_out_of_the_mean(missing: dict[str, float]) -> None:
    team = Team(Numbers([0.0]), Strategy((Rule(every(1), outer=sgd(1.0)),)), 3)
    team.run(1, signals=lambda worker, step: missing if worker == 1 else {"x": 1.0 + worker})
    assert [sync.state.signals for sync in team.syncs] == [{"x": 2.0}] * 3


def test_the_signals_of_a_worker_that_was_refused_do_not_count() -> None:
    def move(worker: int, step: int, model: nn.Module) -> None:
        model.get_parameter("w").data.fill_(math.nan if worker == 0 else 1.0)

    team = Team(Numbers([0.0]), Strategy((Rule(every(1), outer=sgd(1.0)),)), 3)
    team.run(1, move, signals=lambda worker, step: {"x": 1.0 + worker})
    assert [sync.state.signals for sync in team.syncs] == [{"x": 2.5}] * 3


def test_what_a_worker_says_to_itself_alone_is_not_agreed() -> None:
    team = Team(Numbers([0.0]), Strategy((Rule(adaptive(2, 5), outer=sgd(1.0), mixer=alone()),)), 3)
    team.run(20, signals=lambda worker, step: {"x": float(worker)})
    assert all(sync.state.signals == {} for sync in team.syncs)
    assert team.launched(0) == team.launched(2) == [(step, 0) for step in range(2, 21, 2)]


def test_signals_of_averaged_gradients_reach_the_schedules_of_other_rules_at_once() -> None:
    """Agreed before step 2 is made, so the other rule's first round closes after 5 steps and not after 3."""
    gradients = Rule(every(2), carry=Carry.GRADIENT, merge=leave())
    team = Team(Numbers([0.0]), Strategy((gradients, Rule(adaptive(3, 5), outer=sgd(1.0)))), 2)
    team.run(12, signals=lambda worker, step: {"x": 2.0})
    launched = [event for event in team.events[1] if isinstance(event, Launched)]
    assert [event.step for event in launched if event.key.rule == 1] == [5, 10]
