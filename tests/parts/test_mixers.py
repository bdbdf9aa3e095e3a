"""Mixers against the conformance suite, and the arithmetic of their bytes and weights."""

from dataclasses import dataclass

import pytest
import torch

from atoll.errors import CompositionError
from atoll.parts.codecs import cast, error_feedback, exact
from atoll.parts.gossip import alarmed, exponential, groups, hypercube, only, pairs
from atoll.parts.mixers import (
    Exchange,
    Mixer,
    Situation,
    Work,
    all_mean,
    alone,
    by_share,
    by_tokens,
    unrounded,
    weighted,
)
from atoll.testing.conformance import check_mixer
from atoll.trees import Layout, Spec
from atoll.wire import Codec, Edges, Fold, Keep, Membership, Reduce, Sum

HALF = cast(torch.float16)
WORK = Work(steps=10, tokens=640)
LAYOUT = Layout.of([Spec("w", (1200,), (1,), torch.float32)])

CASES: list[Mixer] = [
    all_mean(),
    all_mean(Keep()),
    all_mean(Sum()),
    alone(),
    weighted(by_tokens(), all_mean()),
    weighted(by_share(), all_mean(Keep())),
    unrounded(all_mean(Reduce(HALF))),
    pairs(),
    pairs(12),
    groups(2, 7),
    groups(4),
    hypercube(),
    exponential(),
    weighted(by_tokens(), exponential()),
    only(("val*",), pairs(3)),
    only(("other", "values"), all_mean()),
    only(("other",), pairs(3)),
    alarmed(groups(3), on=0.4, off=0.2),
]


@pytest.mark.parametrize("mixer", CASES, ids=repr)
def test_a_mixer_keeps_its_promises(mixer: Mixer) -> None:
    check_mixer(mixer)


@pytest.mark.parametrize("mixer", CASES, ids=repr)
def test_the_repr_of_a_mixer_rebuilds_it(mixer: Mixer) -> None:
    assert eval(repr(mixer), {**globals(), "torch": torch}) == mixer


def meeting(mixer: Mixer, workers: int, codec: Codec, work: Work) -> Exchange:
    return mixer.exchange(Situation(Membership(tuple(range(workers)), me=1), 3, work, {}, codec, LAYOUT))


@pytest.mark.parametrize(
    ("codec", "workers", "fold"),
    [
        # wires of w bytes against results of r = 4: Keep sends (M - 1) w, Reduce (M - 1) / M (w + r)
        (exact(), 2, Reduce(exact())),  # 4 against 4: a tie
        (exact(), 3, Reduce(exact())),  # 8 against 5.3
        (HALF, 2, Keep()),  # 2 against 3
        (HALF, 3, Reduce(exact())),  # 4 against 4: a tie
        (HALF, 4, Reduce(exact())),  # 6 against 4.5
    ],
)
def test_all_mean_takes_the_fold_that_sends_fewer_bytes(codec: Codec, workers: int, fold: Fold) -> None:
    assert meeting(all_mean(), workers, codec, WORK) == Exchange(tuple(range(workers)), fold, 1.0)


def test_a_fold_that_is_given_is_taken() -> None:
    assert meeting(all_mean(Keep()), 9, exact(), WORK).fold == Keep()


def test_alone_meets_only_oneself() -> None:
    assert meeting(alone(), 5, exact(), WORK) == Exchange((1,), Keep(), 1.0)


def test_weights_are_tokens_or_the_part_of_the_data() -> None:
    work = Work(steps=10, tokens=5120, share=0.75)
    assert meeting(weighted(by_tokens(), all_mean()), 4, exact(), work).weight == 5120.0
    assert meeting(weighted(by_share(), all_mean()), 4, exact(), work).weight == 0.75


def test_unrounded_takes_back_a_narrow_result_and_leaves_other_folds() -> None:
    assert meeting(unrounded(all_mean(Reduce(HALF))), 4, HALF, WORK).fold == Reduce(exact())
    assert meeting(unrounded(all_mean(Keep())), 4, HALF, WORK).fold == Keep()


def test_a_mean_that_would_come_back_by_a_codec_with_a_memory_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"write Reduce\(...\) with the codec inside of it"):
        all_mean(Reduce(error_feedback(HALF, decay=1.0)))


# The conformance suite itself: each broken promise is seen


@dataclass(frozen=True)
class Neighbour:
    """Meets the next worker, who meets another."""

    agrees = True

    def exchange(self, at: Situation) -> Exchange:
        me, count = at.membership.me, len(at.membership.workers)
        return Exchange(tuple(sorted({me, (me + 1) % count})), Keep(), 1.0)


@dataclass(frozen=True)
class FirstHalf:
    """The first of the workers weighs double."""

    agrees = True

    def exchange(self, at: Situation) -> Exchange:
        return Exchange(at.membership.workers, Keep(), 2.0 if at.membership.me == 0 else 1.0)


class Whisper:
    """Tells the next worker, who listens to somebody else."""

    agrees = False

    def exchange(self, at: Situation) -> Exchange:
        me, count = at.membership.me, len(at.membership.workers)
        hears, tells = tuple(sorted({me, (me + 1) % count})), tuple({(me + 1) % count} - {me})
        return Exchange(at.membership.workers, Keep(), 1.0, Edges(hears, tells))


@dataclass(frozen=True)
class Megaphone:
    """Everyone hears itself and the first worker, so the first counts more than the others."""

    agrees = False

    def exchange(self, at: Situation) -> Exchange:
        me, workers = at.membership.me, at.membership.workers
        tells = workers[1:] if me == 0 else ()
        return Exchange(workers, Keep(), 1.0, Edges(tuple(sorted({0, me})), tells))


@dataclass(frozen=True)
class Deaf:
    """Hears the one before it, but not itself."""

    agrees = False

    def exchange(self, at: Situation) -> Exchange:
        me, count = at.membership.me, len(at.membership.workers)
        return Exchange(
            at.membership.workers, Keep(), 1.0, Edges(((me - 1) % count,), tuple({(me + 1) % count} - {me}))
        )


@dataclass(frozen=True)
class DirectedReduce:
    """Names edges, but folds by pieces that everyone must have."""

    agrees = True

    def exchange(self, at: Situation) -> Exchange:
        me, workers = at.membership.me, at.membership.workers
        edges = Edges(workers, tuple(other for other in workers if other != me))
        return Exchange(workers, Reduce(exact()), 1.0, edges)


@dataclass(frozen=True)
class Boast(pairs):
    """Pairs that claim to give everyone the same."""

    @property
    def agrees(self) -> bool:
        return True


class Moody:
    """Changes its mind from call to call."""

    calls = 0

    agrees = True

    def exchange(self, at: Situation) -> Exchange:
        self.calls += 1
        return Exchange(at.membership.workers, Keep(), float(self.calls))


@pytest.mark.parametrize(
    ("mixer", "sentence"),
    [
        (Neighbour(), "sees"),
        (FirstHalf(), "moves the mean"),
        (Moody(), "asked again"),
        (Whisper(), "expect to hear it"),
        (Megaphone(), "moves the mean"),
        (Deaf(), "does not count itself"),
        (DirectedReduce(), "edges need Keep"),
        (Boast(), "says that all agree"),
    ],
)
def test_a_mixer_that_breaks_a_promise_is_caught(mixer: Mixer, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_mixer(mixer)
