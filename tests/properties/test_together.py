"""Rules that cannot serve one model together are refused with what to write instead, and what it says then works."""

from typing import Any

import pytest

from atoll.errors import CompositionError
from atoll.parts.fragments import by_name
from atoll.parts.gossip import pairs
from atoll.parts.keepers import evenly, keeper
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import adopt, blend, carry_on, leave
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every, staggered
from atoll.sync import checks
from atoll.sync.rule import Carry, Rule, Strategy
from tests.properties.test_refusals import works

OUTER = nesterov(0.7, 0.9)
KEEPER = keeper(1, 0, evenly(), OUTER)
DELTAS = Rule(every(6), OUTER)
POINTS: dict[str, Any] = {"carry": Carry.ANCHOR, "mixer": pairs(1), "landing": After(6), "merge": leave()}
MIX1 = Rule(every(6), **POINTS)
LATE = Rule(every(6), OUTER, landing=After(2), merge=blend(0.5))
BLOCKING = Rule(every(6), carry=Carry.ANCHOR, mixer=pairs(1), landing=Blocking(), merge=adopt())


def later(delay: int) -> Rule:
    return Rule(every(6), carry=Carry.ANCHOR, mixer=pairs(1), landing=After(delay), merge=carry_on())


TOGETHER: dict[str, tuple[tuple[Rule, ...], str, tuple[tuple[Rule, ...], ...]]] = {
    "a keeper beside a meeting": (
        (Rule(every(5), mixer=KEEPER, only=(0,)), Rule(every(5), OUTER, only=(1,))),
        r"let all rules have the keeper, or none",
        (
            (Rule(every(5), mixer=KEEPER, only=(0,)), Rule(every(4), mixer=KEEPER, only=(1,))),
            (Rule(every(5), OUTER, only=(0,)), Rule(every(5), OUTER, only=(1,))),
        ),
    ),
    "points that land where no deltas are taken": (
        (Rule(every(6), carry=Carry.ANCHOR, landing=After(4), merge=leave()), DELTAS),
        r"write landing=After\(period\) on the same schedule, or merge=carry_on\(\) to land in between",
        ((MIX1, DELTAS), (later(4), DELTAS)),
    ),
    "points on another schedule": (
        (Rule(every(8), carry=Carry.ANCHOR, landing=After(8), merge=leave()), DELTAS),
        r"write landing=After\(period\) on the same schedule",
        ((MIX1, DELTAS),),
    ),
    "points that undo deltas that land late": (
        (MIX1, LATE),
        r"would undo that; write a delay that ends before, or landing=Blocking\(\), merge=adopt\(\)",
        ((later(1), LATE), (BLOCKING, LATE)),
    ),
    "points that undo deltas taken meanwhile": (
        (MIX1, Rule(every(3), OUTER)),
        r"would undo that; write a delay that ends before",
        ((later(2), Rule(every(3), OUTER)), (BLOCKING, Rule(every(3), OUTER))),
    ),
    "points that carry on over deltas taken meanwhile": (
        (later(5), Rule(every(3), OUTER)),
        r"would undo that",
        ((later(2), Rule(every(3), OUTER)), (BLOCKING, Rule(every(3), OUTER))),
    ),
    "points that undo the deltas of a later turn": (
        (MIX1, Rule(staggered(6, 2), OUTER)),
        r"must land at the very step",
        ((Rule(staggered(6, 2), **POINTS), Rule(staggered(6, 2), OUTER)),),
    ),
    "points that undo live": (
        (MIX1, Rule(every(4), carry=Carry.LIVE)),
        r"would undo that",
        ((BLOCKING, Rule(every(4), carry=Carry.LIVE)),),
    ),
}
TWO = by_name("first.*", "*")


@pytest.mark.parametrize("name", TOGETHER)
def test_rules_that_cannot_work_together_are_refused_with_what_to_write(name: str) -> None:
    rules, sentence, _ = TOGETHER[name]
    with pytest.raises(CompositionError, match=sentence):
        Strategy(rules, TWO)


@pytest.mark.parametrize("name", TOGETHER)
def test_what_a_refusal_of_rules_says_to_write_works(name: str) -> None:
    for rules in TOGETHER[name][2]:
        works(Strategy(rules, TWO))


def test_rules_of_different_fragments_do_not_hinder_one_another() -> None:
    points, deltas = Rule(every(6), only=(0,), **POINTS), Rule(every(6), OUTER, only=(0,))
    works(Strategy((points, deltas, Rule(every(4), OUTER, only=(1,))), TWO))


def test_every_refusal_of_rules_has_a_row() -> None:
    """Each line of the check is the first complaint about some row."""
    found = [checks.impossible_together(rules) for rules, _, _ in TOGETHER.values()]
    first = {next(line for line, (wrong, _) in enumerate(each) if wrong) for each in found}
    assert first == set(range(len(found[0])))
