"""Compositions that cannot work, each with a sentence: what was asked, why it cannot work, what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from atoll.parts.codecs import error_feedback, exact, random_mask
from atoll.parts.estimates import as_landed, eager
from atoll.parts.keepers import keeper
from atoll.parts.landings import After, Blocking, OnArrival
from atoll.parts.merges import adopt, carry_on, leave
from atoll.parts.mixers import Mixer, by_tokens, weighted
from atoll.parts.momentum import consensus_momentum
from atoll.parts.outers import Outer
from atoll.parts.schedules import NEVER, matched
from atoll.sync.carry import Carry
from atoll.trees import Layout, Spec
from atoll.wire import Reduce, Sum

if TYPE_CHECKING:
    from atoll.sync.rule import Rule

ROUNDS = 100
"""Rounds of a schedule that are looked at when a rule is made."""

Complaints = list[tuple[bool, str]]


def nested(mixer: Mixer) -> Iterator[Mixer]:
    """A mixer, the one it holds, and so on."""
    yield mixer
    held = getattr(mixer, "mixer", None)
    if held is not None:
        yield from nested(held)


def due(rule: Rule, fragment: int = 0) -> list[int]:
    """The first `ROUNDS` steps at which a rule is due for a fragment (without signals)."""
    steps = [rule.schedule.next(0, fragment, {})]
    while steps[-1] < NEVER and len(steps) < ROUNDS:
        steps.append(rule.schedule.next(steps[-1], fragment, {}))
    return steps


def impossible(rule: Rule) -> Complaints:
    """(whether it is so, the sentence) for everything that can be wrong with one rule."""
    return [*_kept(rule), *_messages(rule), *_landings(rule)]


def _messages(rule: Rule) -> Complaints:
    gradient, name = rule.carry is Carry.GRADIENT, rule.carry.name
    mixers = list(nested(rule.mixer))
    return [
        (
            rule.steps_by_delta and rule.outer is None and not rule.kept,
            f"a rule carrying {name} was given no outer optimizer, so nothing would move its anchor; write "
            "outer=sgd(1.0) for plain averaging or outer=nesterov(0.7, 0.9)",
        ),
        (
            not rule.steps_by_delta and rule.outer is not None,
            f"a rule carrying {name} was given outer={rule.outer!r}, but only deltas are outer gradients; leave outer "
            "out, or carry DELTA",
        ),
        (
            gradient and (not isinstance(rule.landing, Blocking) or not isinstance(rule.merge, leave)),
            f"a rule carrying GRADIENT was given landing={rule.landing!r} and merge={rule.merge!r}, but gradients are "
            "averaged in place before the inner step; write landing=Blocking(), merge=leave()",
        ),
        (
            rule.steps_by_delta and isinstance(rule.merge, carry_on),
            "carry_on() with DELTA would count this worker's own progress twice, once in live and once in the mean; "
            "write adopt() or blend(alpha)",
        ),
        (
            rule.carry is Carry.LIVE and isinstance(rule.landing, Blocking) and isinstance(rule.merge, carry_on),
            "carry_on() with a blocking LIVE rule would count this worker's own progress twice, once in live and once "
            "in the mean; write adopt(), or landing=After(n) to keep the steps taken meanwhile",
        ),
        (
            any(isinstance(getattr(mixer, "fold", None), Sum) for mixer in mixers) and rule.codec != exact(),
            f"all_mean(Sum()) was given codec={rule.codec!r}, but a backend's own all-reduce adds values as they are; "
            "write codec=exact(), or all_mean(Reduce(...)) to send less",
        ),
        (
            gradient and any(isinstance(mixer, weighted) and mixer.by == by_tokens() for mixer in mixers),
            "by_tokens() was to weigh gradients, but the tokens of a step are counted after it, so the first would "
            "weigh nothing; write weighted(by_share(), ...)",
        ),
        (
            rule.carry is Carry.BOTH and not _pulls(rule.outer),
            f"a rule carrying BOTH was given outer={rule.outer!r}, which has no use for the others' anchors; write "
            "outer=consensus_momentum(lr, momentum, pull), or carry DELTA and send half",
        ),
        (
            rule.carry is not Carry.BOTH and _pulls(rule.outer),
            f"{rule.outer!r} pulls towards the others' anchors, but a rule carrying {name} does not send them; write "
            "carry=Carry.BOTH",
        ),
        (
            rule.carry in (Carry.LIVE, Carry.ANCHOR) and _drops(rule),
            f"a rule carrying {name} was given codec={rule.codec!r}, which leaves out values, but a parameter that was "
            "left out is not zero; write codec=random_mask(...), of which all send the same part, or carry DELTA",
        ),
        (
            rule.carry is Carry.BOTH and (_drops(rule) or isinstance(rule.codec, random_mask)),
            f"a rule carrying BOTH was given codec={rule.codec!r}, which leaves out values, but an anchor that was "
            "left out is not zero; write a codec that sends all of them, such as cast(torch.bfloat16)",
        ),
        (
            rule.carry in (Carry.LIVE, Carry.ANCHOR, Carry.BOTH) and isinstance(rule.codec, error_feedback),
            f"a rule carrying {name} was given codec={rule.codec!r}, whose memory adds what was lost to the next "
            "message, but parameters are sent whole each time, so the next would hold them twice; write the inner "
            "codec alone, or carry DELTA",
        ),
        (
            not 0 <= rule.quorum < 1,
            f"quorum was {rule.quorum}, but it is the part of the contributions that must be exceeded; give 0 <= "
            "quorum < 1",
        ),
    ]


def _pulls(outer: Outer | None) -> bool:
    """Whether an outer optimizer, or the one it holds, uses the others' anchors."""
    return isinstance(outer, consensus_momentum) or (outer is not None and _pulls(getattr(outer, "outer", None)))


def _drops(rule: Rule) -> bool:
    """Whether values are left out on the way or on the way back, and not the same by all: seen by what codecs make of
    values of about one size."""
    folds = [getattr(mixer, "fold", None) for mixer in nested(rule.mixer)]
    codecs = [rule.codec.then if isinstance(rule.codec, random_mask) else rule.codec]
    codecs += [fold.result for fold in folds if isinstance(fold, Reduce)]
    values = torch.linspace(0.9, 1.0, 1024)
    layout = Layout.of([Spec("values", (1024,), (1,), torch.float32)])
    seen = [codec.decode(codec.encode(values, codec.init(layout)), values) for codec in codecs]
    return not all(bool((each != 0).all()) for each in seen)


def _landings(rule: Rule) -> Complaints:
    delay = _delay(rule)
    steps = due(rule)
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    gap = min(gaps, default=NEVER)
    blocking = isinstance(rule.landing, Blocking)
    # what is landed at a boundary before the next leaves may be as old as the period
    whole_period = rule.carry is Carry.ANCHOR or isinstance(rule.estimate, eager)
    made_up = ", or estimate=eager() and merge=adopt(), which makes up for it"
    return [
        (
            isinstance(rule.landing, After)
            and isinstance(rule.merge, adopt)
            and not isinstance(rule.estimate, eager)
            and rule.carry in (Carry.DELTA, Carry.LIVE),
            f"{rule.landing!r} with adopt() would throw away the inner steps taken while the exchange is in flight; "
            "write merge=blend(0.5), or blend(0.0) to throw them away on purpose",
        ),
        (
            delay > gap or (delay == gap and not whole_period),
            f"{rule.landing!r} is as long as the {gap} inner steps between two rounds of {rule.schedule!r}, so a round "
            "would land after the next has left; use a shorter delay or a longer period"
            f"{made_up if rule.carry is Carry.DELTA and gaps == {delay} else ''}",
        ),
        (
            not isinstance(rule.estimate, as_landed) and rule.carry in (Carry.LIVE, Carry.ANCHOR, Carry.GRADIENT),
            f"estimate={rule.estimate!r} makes an outer gradient, but a rule carrying {rule.carry.name} has none; "
            "leave it out, or carry DELTA",
        ),
        (
            isinstance(rule.estimate, eager) and blocking,
            "eager() was given landing=Blocking(), but it makes up for results that are a round late, and a blocking "
            "one never is; write landing=After(period), or estimate=as_landed()",
        ),
        (
            isinstance(rule.estimate, eager) and (len(gaps) != 1 or steps[-1] == NEVER),
            f"eager() was given {rule.schedule!r}, whose rounds are not equally long or end, but a mean must land just "
            "as the next round closes; write every(n), landing=After(n)",
        ),
        (
            isinstance(rule.estimate, eager) and not blocking and not (delay == gap and isinstance(rule.merge, adopt)),
            f"eager() was given {rule.landing!r} and {rule.merge!r} on {rule.schedule!r}, but it joins a mean with the "
            f"delta of the round that closes as it lands; write landing=After({gap}), merge=adopt()",
        ),
        (
            rule.carry is Carry.BOTH and not blocking,
            f"a rule carrying BOTH was given {rule.landing!r}, but delta and anchor belong to one moment; write "
            "landing=Blocking()",
        ),
        (
            rule.carry is Carry.ANCHOR and blocking and not isinstance(rule.merge, adopt),
            f"a blocking rule carrying ANCHOR was given merge={rule.merge!r}, but live starts the next round from the "
            "mixed anchor; write merge=adopt()",
        ),
        (
            rule.carry is Carry.ANCHOR and not blocking and not isinstance(rule.merge, leave | carry_on),
            f"an overlapped rule carrying ANCHOR was given merge={rule.merge!r}, which would undo inner steps; write "
            "merge=leave(), or carry_on() to move live along",
        ),
    ]


def _kept(rule: Rule) -> Complaints:
    arriving = isinstance(rule.landing, OnArrival)
    return [
        (
            rule.kept and rule.outer is not None,
            f"both the keeper and the worker were given an outer optimizer ({rule.outer!r}), so a step would be taken "
            "twice; give it to the keeper alone: outer=None",
        ),
        (
            rule.kept and not isinstance(rule.estimate, as_landed),
            f"a rule with a keeper was given estimate={rule.estimate!r}, but the keeper makes the outer gradient; "
            "leave it out",
        ),
        (
            any(isinstance(mixer, keeper) for mixer in nested(rule.mixer)) and not rule.kept,
            f"{rule.mixer!r} wraps a keeper, which weighs and combines by itself; write mixer=keeper(..., weigh=...)",
        ),
        (
            rule.kept and rule.carry not in (Carry.DELTA, Carry.LIVE),
            f"a keeper was to be sent {rule.carry.name}, but it makes outer gradients of deltas or of live parameters; "
            "carry DELTA or LIVE",
        ),
        (
            rule.kept and isinstance(rule.codec, error_feedback),
            f"a rule with a keeper was given codec={rule.codec!r}, whose memory could not be told whether a "
            "contribution counted in time; write the inner codec alone",
        ),
        (
            rule.kept and rule.carry is Carry.LIVE and isinstance(rule.codec, random_mask),
            f"a rule with a keeper carries LIVE by {rule.codec!r}, but the keeper makes deltas of whole parameters; "
            "write a codec that sends all of them, or carry DELTA",
        ),
        (
            rule.kept and not isinstance(rule.merge, adopt),
            f"a rule with a keeper was given merge={rule.merge!r}, but what comes back is the keeper's anchor; write "
            "merge=adopt()",
        ),
        (
            rule.kept and isinstance(rule.landing, After),
            f"a rule with a keeper was given {rule.landing!r}, but a keeper answers when it can; write "
            "landing=OnArrival(), or Blocking() to wait for it",
        ),
        (
            rule.kept and arriving and rule.carry is Carry.DELTA,
            "a rule with a keeper carries DELTA and lands OnArrival(), so the steps taken meanwhile would be thrown "
            "away unseen; write landing=Blocking(), or carry LIVE",
        ),
        (
            isinstance(rule.schedule, matched) and not rule.kept,
            f"{rule.schedule!r} lets each worker count by its own speed, but a meeting needs all of them at one count; "
            f"write every({getattr(rule.schedule, 'period', 1)}), or mixer=keeper(...)",
        ),
        (
            arriving and not rule.kept,
            "OnArrival() was given to a rule without a keeper, so workers would use the same mean at different steps "
            "and no longer agree; write landing=After(n) with a merge such as blend(0.5)",
        ),
    ]


def impossible_together(rules: Sequence[Rule]) -> Complaints:
    """(whether it is so, the sentence) for what can be wrong with rules that serve one model."""
    kept = [rule for rule in rules if rule.kept]
    late = [
        (rule, other, fragment)
        for rule in rules
        for other in rules
        for fragment in _both_serve(rule, other)
        if rule.carry is Carry.ANCHOR and isinstance(rule.landing, After) and rule is not other
    ]
    return [
        (
            bool(kept) and len(kept) < len(rules),
            "a keeper holds the anchors, but other rules were to move them too; let all rules have the keeper, or none",
        ),
        (
            any(
                isinstance(rule.merge, leave) and other.steps_by_delta and not _lands_with(rule, other, fragment)
                for rule, other, fragment in late
            ),
            "an overlapped rule carrying ANCHOR with leave() must land at the very step at which the deltas are taken, "
            "or they would hold what the mixing moved; write landing=After(period) on the same schedule, or "
            "merge=carry_on() to land in between",
        ),
        (
            any(other.carry is not Carry.GRADIENT and _undoes(rule, other, fragment) for rule, other, fragment in late),
            "an overlapped rule carrying ANCHOR lands after another rule has moved the anchors that it mixes, and "
            "would undo that; write a delay that ends before, or landing=Blocking(), merge=adopt()",
        ),
    ]


def _both_serve(rule: Rule, other: Rule) -> Sequence[int]:
    """The numbers of the fragments (of those that can be told apart) that both rules serve."""
    named = [each.only for each in (rule, other) if each.only is not None]
    if named:
        return sorted(set(named[0]).intersection(*named))
    return range(max(getattr(each.schedule, "fragments", 1) for each in (rule, other)))


def _lands_with(mixing: Rule, stepping: Rule, fragment: int) -> bool:
    """Whether points land at steps at which deltas are taken."""
    closes = set(due(stepping, fragment))
    lands = [left + _delay(mixing) for left in due(mixing, fragment)]
    return all(step in closes for step in lands if step <= max(closes))


def _undoes(mixing: Rule, other: Rule, fragment: int) -> bool:
    """Whether `other` moves the anchor between a step at which it leaves to be mixed and the one at which it lands."""
    moves = [(closed, closed + _delay(other)) for closed in due(other, fragment) if closed < NEVER]
    return any(
        left < moved < left + _delay(mixing) or (moved == left + _delay(mixing) and closed < left)
        for left in due(mixing, fragment)
        for closed, moved in moves
    )


def _delay(rule: Rule) -> int:
    return rule.landing.steps if isinstance(rule.landing, After) else 0
