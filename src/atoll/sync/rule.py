"""Rule and Strategy: what is synced, when, with whom, and what becomes of the result. Values: frozen, comparable,
rebuilt by their repr."""

from dataclasses import dataclass

from atoll.errors import CompositionError
from atoll.parts.codecs import exact, random_mask
from atoll.parts.estimates import Estimate, as_landed
from atoll.parts.fragments import Fragments, Partition, checked, whole
from atoll.parts.gossip import only
from atoll.parts.keepers import keeper
from atoll.parts.landings import Blocking, Landing
from atoll.parts.merges import Merge, adopt
from atoll.parts.mixers import Mixer, all_mean, unrounded
from atoll.parts.outers import Outer, sgd
from atoll.parts.schedules import Schedule, staggered
from atoll.sync.carry import Carry
from atoll.sync.checks import impossible, impossible_together, nested
from atoll.trees import Layout, Spec
from atoll.wire import Codec


@dataclass(frozen=True)
class Rule:
    """One choice of each part. `Rule(every(500), outer=nesterov(0.7, 0.9))` is DiLoCo.

    Args:
        schedule: when rounds close. outer: how the anchor moves (DELTA and BOTH only). carry: what is sent. codec: how
        it is written. mixer: with whom, and how it is combined. landing: when the result is used. estimate: which outer
        gradient is made of it. merge: what it does to live. quorum: the part of the contributions asked for that must
        be exceeded for a round to count. only: the fragments served, by number; all when None.
    Raises: CompositionError where two parts cannot work together, with what to write instead.
    """

    schedule: Schedule
    outer: Outer | None = None
    carry: Carry = Carry.DELTA
    codec: Codec = exact()
    mixer: Mixer = all_mean()
    landing: Landing = Blocking()
    estimate: Estimate = as_landed()
    merge: Merge = adopt()
    quorum: float = 0.5
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for wrong, sentence in impossible(self):
            if wrong:
                raise CompositionError(sentence)

    @property
    def steps_by_delta(self) -> bool:
        """Whether the message holds an outer gradient."""
        return self.carry in (Carry.DELTA, Carry.BOTH)

    @property
    def kept(self) -> bool:
        """Whether a keeper holds the anchor."""
        return isinstance(self.mixer, keeper)

    @property
    def agrees(self) -> bool:
        """Whether workers whose anchors are equal have equal anchors after it."""
        partial = isinstance(self.codec, random_mask) and not self.steps_by_delta
        return self.mixer.agrees and self.estimate.agrees and not partial


@dataclass(frozen=True)
class Strategy:
    """Fragments and the rules that serve them. No rule at all is a worker on its own."""

    rules: tuple[Rule, ...] = ()
    fragments: Partition = whole()

    def __post_init__(self) -> None:
        for wrong, sentence in impossible_together(self.rules):
            if wrong:
                raise CompositionError(sentence)

    @property
    def agrees(self) -> bool:
        """Whether all workers hold the same anchors at every step."""
        return all(rule.agrees for rule in self.rules)

    @property
    def kept(self) -> bool:
        """Whether a keeper holds the anchors."""
        return any(rule.kept for rule in self.rules)

    def parts(self, specs: tuple[Spec, ...]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(number of the fragment, parameter names), where a fragment of which a rule mixes only some parameters is two
        parts."""
        parts = list(enumerate(self.divide(specs)))
        for selection in (each for rule in self.rules for each in nested(rule.mixer) if isinstance(each, only)):
            split = [(number, selection.divide(names)) for number, names in parts]
            parts = [(number, names) for number, halves in split for names in halves if names]
        return tuple(parts)

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
        peers and quorum. Deltas are carried, so that a buffer nobody writes (a mask, a table) keeps its bits. A keeper
        knows no buffers: they stay with their worker."""
        if not self.rules or self.kept:
            return None
        first = self.rules[0]
        mixer = first.mixer.mixer if isinstance(first.mixer, only) else first.mixer
        return Rule(first.schedule, outer=sgd(1.0), mixer=unrounded(mixer), quorum=first.quorum)


def layout_of(specs: tuple[Spec, ...], names: tuple[str, ...]) -> Layout:
    """The layout of the named specs, in the order of `names`."""
    by_name = {spec.name: spec for spec in specs}
    return Layout.of(by_name[name] for name in names)
