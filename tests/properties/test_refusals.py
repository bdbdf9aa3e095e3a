"""Parts that cannot work together are refused with what to write instead, and what it says then works."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch

from atoll.errors import CompositionError
from atoll.parts.codecs import cast, error_feedback, exact, prune_by_sign, quantise, random_mask, topk
from atoll.parts.estimates import as_landed, eager, own
from atoll.parts.gossip import only
from atoll.parts.keepers import by_throughput, evenly, keeper
from atoll.parts.landings import After, Blocking, OnArrival
from atoll.parts.merges import adopt, blend, carry_on, leave
from atoll.parts.mixers import all_mean, by_share, by_tokens, weighted
from atoll.parts.momentum import age_decay, consensus_momentum, restarted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import at, every, matched, staggered
from atoll.sync import checks
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing.toys import Mlp
from atoll.wire import Landed, Reduce, Sum
from tests.properties.teams import KeptTeam, Team

OUTER = nesterov(0.7, 0.9)
PULLING = consensus_momentum(0.7, 0.5, 0.7)
HALF = cast(torch.float16)
NAN = float("nan")
KEEPER = keeper(1, 0, evenly(), OUTER)
GRADIENT: dict[str, Any] = {"carry": Carry.GRADIENT, "merge": leave()}
FEEDBACK = error_feedback(quantise(4, block=32), 1.0)


@dataclass
class Row:
    """What is refused, by a sentence, and what that sentence says to write, in its order."""

    bad: Callable[[], Rule]
    sentence: str
    instead: tuple[Rule, ...]


def row(bad: Callable[[], Rule], sentence: str, *instead: Rule) -> Row:
    return Row(bad, sentence, instead)


def anchors(**options: Any) -> Rule:
    return Rule(every(5), carry=Carry.ANCHOR, **options)


ROWS = {
    "deltas without an outer": row(
        lambda: Rule(every(5)),
        r"write outer=sgd\(1.0\) .* or outer=nesterov\(0.7, 0.9\)",
        Rule(every(5), outer=sgd(1.0)),
        Rule(every(5), outer=nesterov(0.7, 0.9)),
    ),
    "live with an outer": row(
        lambda: Rule(every(5), OUTER, Carry.LIVE),
        r"leave outer out, or carry DELTA",
        Rule(every(5), carry=Carry.LIVE),
        Rule(every(5), OUTER, Carry.DELTA),
    ),
    "anchors with an outer": row(
        lambda: anchors(outer=OUTER), r"leave outer out, or carry DELTA", anchors(), Rule(every(5), OUTER)
    ),
    "gradients with an outer": row(
        lambda: Rule(every(1), OUTER, **GRADIENT),
        r"leave outer out, or carry DELTA",
        Rule(every(1), **GRADIENT),
        Rule(every(1), OUTER),
    ),
    "gradients that are adopted": row(
        lambda: Rule(every(1), carry=Carry.GRADIENT),
        r"write landing=Blocking\(\), merge=leave\(\)",
        Rule(every(1), carry=Carry.GRADIENT, landing=Blocking(), merge=leave()),
    ),
    "gradients that land later": row(
        lambda: Rule(every(2), landing=After(1), **GRADIENT),
        r"write landing=Blocking\(\), merge=leave\(\)",
        Rule(every(2), carry=Carry.GRADIENT, landing=Blocking(), merge=leave()),
    ),
    "gradients by tokens": row(
        lambda: Rule(every(1), mixer=weighted(by_tokens(), all_mean()), **GRADIENT),
        r"counted after it, .* write weighted\(by_share\(\), ...\)",
        Rule(every(1), mixer=weighted(by_share(), all_mean()), **GRADIENT),
    ),
    "deltas that carry on": row(
        lambda: Rule(every(5), OUTER, merge=carry_on()),
        r"write adopt\(\) or blend\(alpha\)",
        Rule(every(5), OUTER, merge=adopt()),
        Rule(every(5), OUTER, merge=blend(0.3)),
    ),
    "blocking live that carries on": row(
        lambda: Rule(every(5), carry=Carry.LIVE, merge=carry_on()),
        r"write adopt\(\), or landing=After\(n\) to keep",
        Rule(every(5), carry=Carry.LIVE, merge=adopt()),
        Rule(every(5), carry=Carry.LIVE, landing=After(2), merge=carry_on()),
    ),
    "a backend's sum of coded values": row(
        lambda: Rule(every(5), OUTER, codec=HALF, mixer=weighted(by_share(), all_mean(Sum()))),
        r"write codec=exact\(\), or all_mean\(Reduce\(...\)\)",
        Rule(every(5), OUTER, codec=exact(), mixer=weighted(by_share(), all_mean(Sum()))),
        Rule(every(5), OUTER, codec=HALF, mixer=weighted(by_share(), all_mean(Reduce(HALF)))),
    ),
    "both without a pull": row(
        lambda: Rule(every(5), OUTER, Carry.BOTH),
        r"write outer=consensus_momentum\(lr, momentum, pull\), or carry DELTA",
        Rule(every(5), PULLING, Carry.BOTH),
        Rule(every(5), OUTER, Carry.DELTA),
    ),
    "a pull without the others' anchors": row(
        lambda: Rule(every(5), age_decay(restarted(PULLING, 3))),
        r"write carry=Carry.BOTH",
        Rule(every(5), age_decay(restarted(PULLING, 3)), Carry.BOTH),
    ),
    "live of which the largest are sent": row(
        lambda: Rule(every(5), carry=Carry.LIVE, codec=topk(8)),
        r"a parameter that was left out is not zero; write codec=random_mask\(...\), .* or carry DELTA",
        Rule(every(5), carry=Carry.LIVE, codec=random_mask(0.1, 0)),
        Rule(every(5), OUTER, codec=topk(8)),
    ),
    "anchors that are pruned": row(
        lambda: anchors(codec=prune_by_sign(0.5)),
        r"a parameter that was left out is not zero; write codec=random_mask\(...\), .* or carry DELTA",
        anchors(codec=random_mask(0.1, 0)),
        Rule(every(5), OUTER, codec=prune_by_sign(0.5)),
    ),
    "live of which the largest come back": row(
        lambda: Rule(every(5), carry=Carry.LIVE, mixer=all_mean(Reduce(topk(8)))),
        r"a parameter that was left out is not zero; write codec=random_mask\(...\), .* or carry DELTA",
        Rule(every(5), carry=Carry.LIVE, codec=random_mask(0.1, 0)),
        Rule(every(5), OUTER, mixer=all_mean(Reduce(topk(8)))),
    ),
    "a part of live, of which the largest are sent": row(
        lambda: Rule(every(5), carry=Carry.LIVE, codec=random_mask(0.5, 0, then=topk(8))),
        r"a parameter that was left out is not zero; write codec=random_mask\(...\), .* or carry DELTA",
        Rule(every(5), carry=Carry.LIVE, codec=random_mask(0.5, 0)),
        Rule(every(5), OUTER, codec=topk(8)),
    ),
    "both, of which the largest are sent": row(
        lambda: Rule(every(5), PULLING, Carry.BOTH, codec=topk(8)),
        r"an anchor that was left out is not zero; write a codec .* such as cast\(torch.bfloat16\)",
        Rule(every(5), PULLING, Carry.BOTH, codec=cast(torch.bfloat16)),
    ),
    "both, of which some are sent": row(
        lambda: Rule(every(5), PULLING, Carry.BOTH, codec=random_mask(0.1, 0)),
        r"an anchor that was left out is not zero; write a codec .* such as cast\(torch.bfloat16\)",
        Rule(every(5), PULLING, Carry.BOTH, codec=cast(torch.bfloat16)),
    ),
    "live with a memory": row(
        lambda: Rule(every(5), carry=Carry.LIVE, codec=FEEDBACK),
        r"would hold them twice; write the inner codec alone, or carry DELTA",
        Rule(every(5), carry=Carry.LIVE, codec=FEEDBACK.codec),
        Rule(every(5), OUTER, codec=FEEDBACK),
    ),
    "a quorum of everyone and more": row(
        lambda: Rule(every(5), OUTER, quorum=1.0), r"give 0 <= quorum < 1", Rule(every(5), OUTER, quorum=0.99)
    ),
    "a quorum below nobody": row(
        lambda: Rule(every(5), OUTER, quorum=-0.1), r"give 0 <= quorum < 1", Rule(every(5), OUTER, quorum=0.0)
    ),
    "a quorum of nan": row(
        lambda: Rule(every(5), OUTER, quorum=NAN), r"give 0 <= quorum < 1", Rule(every(5), OUTER, quorum=0.5)
    ),
    # When it lands
    "adopting what lands later": row(
        lambda: Rule(every(5), OUTER, landing=After(1)),
        r"write merge=blend\(0.5\), or blend\(0.0\) to throw them away on purpose",
        Rule(every(5), OUTER, landing=After(1), merge=blend(0.5)),
        Rule(every(5), OUTER, landing=After(1), merge=blend(0.0)),
    ),
    "adopting live that lands later": row(
        lambda: Rule(every(5), carry=Carry.LIVE, landing=After(1)),
        r"write merge=blend\(0.5\), or blend\(0.0\)",
        Rule(every(5), carry=Carry.LIVE, landing=After(1), merge=blend(0.5)),
    ),
    "a delay of a whole period": row(
        lambda: Rule(every(5), OUTER, landing=After(5), merge=blend(0.5)),
        r"use a shorter delay or a longer period, or estimate=eager\(\) and merge=adopt\(\)",
        Rule(every(5), OUTER, landing=After(4), merge=blend(0.5)),
        Rule(every(6), OUTER, landing=After(5), merge=blend(0.5)),
        Rule(every(5), OUTER, landing=After(5), merge=adopt(), estimate=eager()),
    ),
    "a delay of a whole turn": row(
        lambda: Rule(staggered(5, 2), OUTER, landing=After(7), merge=blend(0.5)),
        r"as long as the 5 inner steps between two rounds .* use a shorter delay or a longer period$",
        Rule(staggered(5, 1), OUTER, landing=After(4), merge=blend(0.5)),
        Rule(staggered(8, 1), OUTER, landing=After(7), merge=blend(0.5)),
    ),
    "a delay longer than a later gap": row(
        lambda: Rule(at(10, 30, 32), OUTER, landing=After(2), merge=blend(0.5)),
        r"as long as the 2 inner steps between two rounds of at\(10, 30, 32\)",
        Rule(at(5, 10, 12), OUTER, landing=After(1), merge=blend(0.5)),
    ),
    "points that are late for their next round": row(
        lambda: anchors(landing=After(6), merge=leave()),
        r"use a shorter delay or a longer period$",
        anchors(landing=After(5), merge=leave()),
    ),
    "eager for what is not late": row(
        lambda: Rule(every(5), OUTER, estimate=eager()),
        r"write landing=After\(period\), or estimate=as_landed\(\)",
        Rule(every(5), OUTER, landing=After(5), estimate=eager()),
        Rule(every(5), OUTER, estimate=as_landed()),
    ),
    "eager for what is a part of a round late": row(
        lambda: Rule(every(5), OUTER, landing=After(2), merge=blend(0.5), estimate=eager()),
        r"write landing=After\(5\), merge=adopt\(\)",
        Rule(every(5), OUTER, landing=After(5), merge=adopt(), estimate=eager()),
    ),
    "eager that blends": row(
        lambda: Rule(every(5), OUTER, landing=After(5), merge=blend(0.5), estimate=eager()),
        r"write landing=After\(5\), merge=adopt\(\)",
        Rule(every(5), OUTER, landing=After(5), merge=adopt(), estimate=eager()),
    ),
    "eager on rounds that are not equally long": row(
        lambda: Rule(at(2, 4, 8, 10), OUTER, landing=After(2), estimate=eager()),
        r"write every\(n\), landing=After\(n\)",
        Rule(every(2), OUTER, landing=After(2), estimate=eager()),
    ),
    "eager on rounds that end": row(
        lambda: Rule(at(2, 4), OUTER, landing=After(2), estimate=eager()),
        r"write every\(n\), landing=After\(n\)",
        Rule(every(2), OUTER, landing=After(2), estimate=eager()),
    ),
    "an estimate of points": row(
        lambda: anchors(estimate=own()),
        r"a rule carrying ANCHOR has none; leave it out, or carry DELTA",
        anchors(),
        Rule(every(5), OUTER, estimate=own()),
    ),
    "an estimate of live": row(
        lambda: Rule(every(5), carry=Carry.LIVE, landing=After(5), merge=blend(0.5), estimate=eager()),
        r"a rule carrying LIVE has none; leave it out, or carry DELTA",
        Rule(every(5), OUTER, landing=After(5), estimate=eager()),
    ),
    "both, that land later": row(
        lambda: Rule(every(5), PULLING, Carry.BOTH, landing=After(2), merge=blend(0.5)),
        r"write landing=Blocking\(\)",
        Rule(every(5), PULLING, Carry.BOTH, landing=Blocking(), merge=blend(0.5)),
    ),
    "blocking points that leave live alone": row(
        lambda: anchors(merge=leave()), r"write merge=adopt\(\)", anchors(merge=adopt())
    ),
    "points that are adopted later": row(
        lambda: anchors(landing=After(5)),
        r"write merge=leave\(\), or carry_on\(\) to move live along",
        anchors(landing=After(5), merge=leave()),
        anchors(landing=After(5), merge=carry_on()),
    ),
    # A keeper
    "two outer optimizers": row(
        lambda: Rule(every(5), OUTER, mixer=KEEPER),
        r"give it to the keeper alone: outer=None",
        Rule(every(5), mixer=KEEPER),
    ),
    "a keeper that is wrapped": row(
        lambda: Rule(every(5), mixer=weighted(by_share(), KEEPER)),
        r"write mixer=keeper\(..., weigh=...\)",
        Rule(every(5), mixer=keeper(1, 0, by_throughput(), OUTER)),
    ),
    "a keeper of some parameters": row(
        lambda: Rule(every(5), OUTER, mixer=only(("first.*",), KEEPER)),
        r"write mixer=keeper\(..., weigh=...\)",
        Rule(every(5), mixer=KEEPER),
    ),
    "a keeper's own estimate": row(
        lambda: Rule(every(5), mixer=KEEPER, estimate=own()), r"leave it out", Rule(every(5), mixer=KEEPER)
    ),
    "a keeper of gradients": row(
        lambda: Rule(every(1), mixer=KEEPER, **GRADIENT),
        r"carry DELTA or LIVE",
        Rule(every(1), mixer=KEEPER, carry=Carry.DELTA),
        Rule(every(1), mixer=KEEPER, carry=Carry.LIVE),
    ),
    "a keeper of points": row(
        lambda: anchors(mixer=KEEPER), r"carry DELTA or LIVE", Rule(every(5), mixer=KEEPER, carry=Carry.LIVE)
    ),
    "a keeper and a memory": row(
        lambda: Rule(every(5), mixer=KEEPER, codec=FEEDBACK),
        r"write the inner codec alone",
        Rule(every(5), mixer=KEEPER, codec=FEEDBACK.codec),
    ),
    "a keeper of masked live": row(
        lambda: Rule(every(5), carry=Carry.LIVE, mixer=KEEPER, codec=random_mask(0.5, 0)),
        r"write a codec that sends all of them, or carry DELTA",
        Rule(every(5), carry=Carry.LIVE, mixer=KEEPER, codec=HALF),
        Rule(every(5), carry=Carry.DELTA, mixer=KEEPER, codec=random_mask(0.5, 0)),
    ),
    "a keeper whose answer is blended": row(
        lambda: Rule(every(5), mixer=KEEPER, merge=blend(0.5)),
        r"write merge=adopt\(\)",
        Rule(every(5), mixer=KEEPER, merge=adopt()),
    ),
    "a keeper that answers on time": row(
        lambda: Rule(every(5), mixer=KEEPER, carry=Carry.LIVE, landing=After(2)),
        r"write landing=OnArrival\(\), or Blocking\(\) to wait for it",
        Rule(every(5), mixer=KEEPER, carry=Carry.LIVE, landing=OnArrival()),
        Rule(every(5), mixer=KEEPER, carry=Carry.LIVE, landing=Blocking()),
    ),
    "deltas that a keeper answers on arrival": row(
        lambda: Rule(every(5), mixer=KEEPER, landing=OnArrival()),
        r"write landing=Blocking\(\), or carry LIVE",
        Rule(every(5), mixer=KEEPER, landing=Blocking()),
        Rule(every(5), mixer=KEEPER, carry=Carry.LIVE, landing=OnArrival()),
    ),
    "unequal rounds without a keeper": row(
        lambda: Rule(matched(5), OUTER),
        r"write every\(5\), or mixer=keeper\(...\)",
        Rule(every(5), OUTER),
        Rule(matched(5), mixer=KEEPER),
    ),
    "on arrival without a keeper": row(
        lambda: Rule(every(5), OUTER, landing=OnArrival()),
        r"write landing=After\(n\) with a merge such as blend\(0.5\)",
        Rule(every(5), OUTER, landing=After(3), merge=blend(0.5)),
    ),
}


def works(strategy: Strategy) -> None:
    """It runs, lands, and leaves everything finite."""
    if strategy.kept:
        team = KeptTeam(Mlp(), strategy, [Fraction(1), Fraction(1, 2)]).run(24)
    else:
        team = Team(Mlp(), strategy, 4).run(24).drain()
    assert all(any(isinstance(event, Landed) for event in events) for events in team.events)
    assert all(tensor.isfinite().all() for model in team.models for tensor in model.parameters())


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_that_cannot_work_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(CompositionError, match=ROWS[name].sentence):
        ROWS[name].bad()


@pytest.mark.parametrize("name", ROWS)
def test_what_a_refusal_says_to_write_works(name: str) -> None:
    assert ROWS[name].instead
    for rule in ROWS[name].instead:
        works(Strategy((rule,)))


def test_every_refusal_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the checks is the first complaint about some row."""
    first: set[int] = set()
    every: set[int] = set()

    def watched(rule: Rule) -> list[tuple[bool, str]]:
        found = checks.impossible(rule)
        every.update(range(len(found)))
        first.update([line for line, (wrong, _) in enumerate(found) if wrong][:1])
        return found

    monkeypatch.setattr("atoll.sync.rule.impossible", watched)
    for each in ROWS.values():
        with pytest.raises(CompositionError):
            each.bad()
    assert first == every
