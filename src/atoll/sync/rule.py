"""Rule and Strategy: what is synced, when, with whom, and what becomes of the result. Values: frozen, comparable,
rebuilt by their repr."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from atoll.errors import CompositionError
from atoll.parts.codecs import exact
from atoll.parts.fragments import Fragments, Partition, checked, whole
from atoll.parts.landings import After, Blocking, Landing
from atoll.parts.merges import Merge, adopt, carry_on, leave
from atoll.parts.mixers import Mixer, all_mean, by_tokens, unrounded, weighted
from atoll.parts.outers import Outer, sgd
from atoll.parts.schedules import NEVER, Schedule, staggered
from atoll.trees import Layout, Spec
from atoll.wire import Codec, Sum

ROUNDS = 100
"""Rounds of a schedule that are looked at when a rule is made."""


class Carry(Enum):
    """What a message holds."""

    GRADIENT = "gradient"
    """the inner gradient, averaged before clipping: synchronous data parallelism"""
    DELTA = "delta"
    """the outer gradient, start - live"""
    LIVE = "live"
    """the live parameters themselves"""

    def __repr__(self) -> str:
        return f"Carry.{self.name}"


@dataclass(frozen=True)
class Rule:
    """One choice of each part. `Rule(every(500), outer=nesterov(0.7, 0.9))` is DiLoCo.

    Args:
        schedule: when rounds close. outer: how the anchor moves (DELTA only). carry: what is sent. codec: how it is
        written. mixer: with whom, and how it is combined. landing: when the result is used. merge: what it does to
        live. quorum: the part of the contributions asked for that must be exceeded for a round to count. only: the
        fragments served, by number; all when None.
    Raises: CompositionError where two parts cannot work together, with what to write instead.
    """

    schedule: Schedule
    outer: Outer | None = None
    carry: Carry = Carry.DELTA
    codec: Codec = exact()
    mixer: Mixer = all_mean()
    landing: Landing = Blocking()
    merge: Merge = adopt()
    quorum: float = 0.5
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for wrong, sentence in self._impossible():
            if wrong:
                raise CompositionError(sentence)

    def _impossible(self) -> list[tuple[bool, str]]:
        delta, gradient = self.carry is Carry.DELTA, self.carry is Carry.GRADIENT
        overlapped = isinstance(self.landing, After)
        mixers = list(_nested(self.mixer))
        return [
            (
                delta and self.outer is None,
                "a rule carrying DELTA was given no outer optimizer, so nothing would move its anchor; write "
                "outer=sgd(1.0) for plain averaging "
                "or outer=nesterov(0.7, 0.9)",
            ),
            (
                not delta and self.outer is not None,
                f"a rule carrying {self.carry.name} was given outer={self.outer!r}, but only deltas are outer "
                "gradients; leave outer out, or carry DELTA",
            ),
            (
                gradient and (overlapped or not isinstance(self.merge, leave)),
                f"a rule carrying GRADIENT was given landing={self.landing!r} and merge={self.merge!r}, but gradients "
                "are averaged in place before "
                "the inner step; write landing=Blocking(), merge=leave()",
            ),
            (
                overlapped and isinstance(self.merge, adopt),
                f"{self.landing!r} with adopt() would throw away the inner steps taken while the exchange is in "
                "flight; write merge=blend(0.5), "
                "or blend(0.0) to throw them away on purpose",
            ),
            (
                delta and isinstance(self.merge, carry_on),
                "carry_on() with DELTA would count this worker's own progress twice, once in live and once in the "
                "mean; write adopt() or blend(alpha)",
            ),
            (
                self.carry is Carry.LIVE and not overlapped and isinstance(self.merge, carry_on),
                "carry_on() with a blocking LIVE rule would count this worker's own progress twice, once in live and "
                "once in the mean; write adopt(), or landing=After(n) to keep the steps taken meanwhile",
            ),
            (
                overlapped and self._gap() <= getattr(self.landing, "steps", 0),
                f"{self.landing!r} is as long as the {self._gap()} inner steps between two rounds of "
                f"{self.schedule!r}, so a round would land after the next has left; use a shorter delay or a longer "
                "period",
            ),
            (
                any(isinstance(getattr(mixer, "fold", None), Sum) for mixer in mixers) and self.codec != exact(),
                f"all_mean(Sum()) was given codec={self.codec!r}, but a backend's own all-reduce adds values as they "
                "are; write codec=exact(), or all_mean(Reduce(...)) to send less",
            ),
            (
                gradient and any(isinstance(mixer, weighted) and mixer.by == by_tokens() for mixer in mixers),
                "by_tokens() was to weigh gradients, but the tokens of a step are counted after it, so the first would "
                "weigh nothing; write weighted(by_share(), ...)",
            ),
            (
                not 0 <= self.quorum < 1,
                f"quorum was {self.quorum}, but it is the part of the contributions that must be exceeded; give 0 <= "
                "quorum < 1",
            ),
        ]

    def _gap(self) -> int:
        """The fewest inner steps between two of the first `ROUNDS` rounds of fragment 0 (without signals)."""
        due = [self.schedule.next(0, 0, {})]
        while due[-1] < NEVER and len(due) < ROUNDS:
            due.append(self.schedule.next(due[-1], 0, {}))
        return min((later - earlier for earlier, later in pairwise(due)), default=NEVER)


def _nested(mixer: Mixer) -> Iterator[Mixer]:
    """A mixer, the one it holds, and so on."""
    yield mixer
    held = getattr(mixer, "mixer", None)
    if held is not None:
        yield from _nested(held)


@dataclass(frozen=True)
class Strategy:
    """Fragments and the rules that serve them. No rule at all is a worker on its own."""

    rules: tuple[Rule, ...] = ()
    fragments: Partition = whole()

    def divide(self, specs: tuple[Spec, ...]) -> Fragments:
        """The parameter names of each fragment of a model.

        Raises: CompositionError if a parameter is missing or repeated, or if rules and fragments do not fit.
        """
        fragments = checked(self.fragments, specs)
        count = len(fragments)
        served = {index for rule in self.rules for index in (range(count) if rule.only is None else rule.only)}
        for rule in self.rules:
            if isinstance(rule.schedule, staggered) and rule.schedule.fragments != count:
                raise CompositionError(
                    f"{rule.schedule!r} takes turns among {rule.schedule.fragments} fragments, but {self.fragments!r} "
                    f"makes {count} of this model; "
                    f"write staggered({rule.schedule.period}, {count}) or ask for {rule.schedule.fragments} fragments"
                )
        if self.rules and served != set(range(count)):
            wrong = sorted(served ^ set(range(count)))
            raise CompositionError(
                f"the rules serve fragments {sorted(served)}, but {self.fragments!r} makes {count} of this model (0 "
                f"to {count - 1}); "
                f"correct `only` for fragment {wrong[0]}"
            )
        return fragments

    def buffer_rule(self) -> Rule | None:
        """The rule that averages floating buffers (running means): exactly, at the rhythm of the first rule, with its
        peers and quorum. Deltas are carried, so that a buffer nobody writes (a mask, a table) keeps its bits."""
        if not self.rules:
            return None
        first = self.rules[0]
        return Rule(first.schedule, outer=sgd(1.0), mixer=unrounded(first.mixer), quorum=first.quorum)


def layout_of(specs: tuple[Spec, ...], names: tuple[str, ...]) -> Layout:
    """The layout of the named specs, in the order of `names`."""
    by_name = {spec.name: spec for spec in specs}
    return Layout.of(by_name[name] for name in names)
