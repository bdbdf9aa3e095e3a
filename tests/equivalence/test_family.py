"""The rest of the family against its plain loops, bit for bit in float64: compressed, eager, gossip, and kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.parts.codecs import cast, error_feedback, float4, prune_by_sign, quantise, random_mask, statistical, topk
from atoll.parts.fragments import by_name
from atoll.parts.gossip import pairs
from atoll.parts.keepers import by_throughput, evenly, keeper, radial_directional, weighted_mean
from atoll.parts.landings import OnArrival
from atoll.parts.mixers import Mixer, Situation, Work, all_mean
from atoll.parts.momentum import delayed_nesterov
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, matched, staggered
from atoll.recipes.methods import METHODS
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import reference, toys
from atoll.testing.turns import live, mean_anchors, run_kept, run_turns, shared
from atoll.trees import Layout
from atoll.wire import Keep, Membership
from tests.equivalence.test_methods import ROWS

STEPS = 31
SEED = 3
BY_LAYER = by_name("first.*", "[ml]*", "head.*")
FRAGMENTS = [[0, 1], [2, 3, 4, 5], [6, 7]]


def meetings(mixer: Mixer, workers: int, round: int) -> list[tuple[int, ...]]:
    """Who meets in a round."""
    everyone = tuple(range(workers))
    asked = [
        Situation(Membership(everyone, me), round, Work(1, 1), {}, cast(torch.float16), Layout.of([]))
        for me in everyone
    ]
    return sorted({mixer.exchange(each).to for each in asked})


def compare(strategy: Strategy, loop: Callable[..., reference.Result], workers: int, **options: Any) -> None:
    module = toys.Mlp()
    theta, step = toys.initial(module), toys.inner_step(module, toys.adamw, seed=SEED)
    anchor, replicas = loop(theta, workers=workers, steps=STEPS, inner_step=step, **options)
    syncs, _ = run_turns(module, strategy, workers=workers, steps=STEPS, seed=SEED)
    assert toys.same_bits(shared(syncs[0], mean_anchors(syncs)), anchor)
    for sync, replica in zip(syncs, replicas, strict=True):
        assert toys.same_bits(live(sync), replica)
    assert not toys.same_bits(anchor, theta), "the run went nowhere"


# Compressed: each worker's delta is seen through its own codec

See = Callable[[], Callable[[Tensor], Tensor]]


@dataclass
class Coded:
    """A composition, and how a reference codec of one sender is made."""

    strategy: Strategy
    seen: See
    outer: reference.Outer


OUTER, PLAIN = nesterov(0.7, 0.9), reference.nesterov(0.7, 0.9)
HALF = cast(torch.float16)


def coded(codec: Any, outer: Any = OUTER) -> Strategy:
    return Strategy((Rule(every(5), outer=outer, codec=codec, mixer=all_mean(Keep())),))


def feedback(codec: Callable[[Tensor], Tensor], decay: float) -> See:
    return lambda: reference.ErrorFeedback(codec, decay)


CODED = {
    "float4": Coded(coded(float4(16)), lambda: reference.float4(16), PLAIN),
    "8 bit": Coded(coded(quantise(8, block=16)), lambda: reference.quantise_linear(8, 16), PLAIN),
    "2 bit, statistical": Coded(
        coded(quantise(2, block=32, by=statistical())), lambda: reference.quantise_statistical(2, 32), PLAIN
    ),
    "signs pruned": Coded(coded(prune_by_sign(0.5, 16)), lambda: reference.prune_by_sign(0.5, 16), PLAIN),
    "sparseloco": Coded(
        METHODS["sparseloco"](period=5).strategy,
        feedback(reference.topk(64, 4096, reference.quantise_statistical(2, 64)), 0.95),
        reference.sgd(1.0),
    ),
    "sparseloco, several small chunks": Coded(
        coded(error_feedback(topk(8, 64, then=quantise(2, block=8, by=statistical())), 0.95), sgd(1.0)),
        feedback(reference.topk(8, 64, reference.quantise_statistical(2, 8)), 0.95),
        reference.sgd(1.0),
    ),
    "muloco": Coded(METHODS["muloco"](period=5).strategy, lambda: reference.exact, reference.nesterov(0.8, 0.8)),
    "muloco in 4 bits": Coded(
        METHODS["muloco"](period=5, bits=4).strategy,
        feedback(reference.quantise_statistical(4, 4096), 1.0),
        reference.nesterov(0.8, 0.8),
    ),
    "opendiloco-sparse": Coded(
        METHODS["opendiloco-sparse"](period=5, density=0.05).strategy,
        feedback(reference.topk(4, 4096, reference.cast(torch.float16)), 1.0),  # 5 % of 86
        PLAIN,
    ),
}


def by_worker(seen: See) -> Callable[[int, int, Tensor], Tensor]:
    """The reference codec of each worker, with a memory of its own."""
    made: dict[int, Callable[[Tensor], Tensor]] = {}
    return lambda worker, round, flat: made.setdefault(worker, seen())(flat)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CODED)
def test_a_compressed_method_is_its_plain_loop_bit_for_bit(name: str, workers: int) -> None:
    case = CODED[name]
    compare(case.strategy, reference.compressed_diloco, workers, period=5, outer=case.outer, see=by_worker(case.seen))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_streaming_in_four_bits_is_its_plain_loop_bit_for_bit(workers: int) -> None:
    method = METHODS["streaming"](period=6, fragments=2, delay=2)
    options = {"period": 6, "fragments": FRAGMENTS, "delay": 2, "alpha": 0.5, "outer": reference.nesterov(0.4, 0.9)}
    see = by_worker(lambda: reference.float4(256))
    compare(replace(method.strategy, fragments=BY_LAYER), reference.streaming, workers, see=see, **options)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_sparta_is_its_plain_loop_bit_for_bit(workers: int) -> None:
    mask = random_mask(0.1, seed=0)
    strategy = METHODS["sparta"](fraction=0.1).strategy
    compare(strategy, reference.sparta, workers, mask=lambda step: mask.at(step - 1).mask(86))


# Each worker with an anchor of its own


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("period", [1, 5])
def test_eager_is_its_plain_loop_bit_for_bit(workers: int, period: int) -> None:
    strategy = METHODS["eager"](period=period).strategy
    compare(strategy, reference.eager, workers, period=period, outer=reference.nesterov(0.4, 0.9))


Meet = Callable[[int, int], list[tuple[int, ...]]]
"""(workers, round): who meets."""


def everyone(workers: int, round: int) -> list[tuple[int, ...]]:
    return [tuple(range(workers))]


def nobody(workers: int, round: int) -> list[tuple[int, ...]]:
    return []


def _pairs(seed: int) -> Meet:
    return lambda workers, round: meetings(pairs(seed), workers, round)


VARIANTS: dict[str, tuple[Meet, Meet]] = {
    "factored-gossip": (everyone, _pairs(0)),
    "global-m1": (everyone, nobody),
    "global-m1-local-m2": (everyone, _pairs(0)),
    "local-m1": (_pairs(1), nobody),
    "local-m1-m2": (_pairs(1), _pairs(0)),
}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_factored_gossip_is_its_plain_loop_bit_for_bit(name: str, workers: int) -> None:
    one, two = VARIANTS[name]
    compare(
        METHODS[name](period=5).strategy,
        reference.factored_gossip,
        workers,
        period=5,
        mix1=lambda round: one(workers, round - 1),
        mix2=lambda round, tensor: two(workers, round),
        outer=PLAIN,
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "mix1"), [("global-m1-local-m2-subset", everyone), ("local-m1-m2-subset", _pairs(1))])
def test_a_subset_of_the_deltas_is_mixed_and_the_rest_is_ones_own(name: str, mix1: Meet, workers: int) -> None:
    """The recipe's own rules, but for the names of what is mixed: this toy has no blocks."""
    points, deltas = METHODS[name](period=5).strategy.rules
    chosen = replace(deltas, mixer=replace(deltas.mixer, names=("first.*", "head.weight")))
    compare(
        Strategy((points, chosen)),
        reference.factored_gossip,
        workers,
        period=5,
        mix1=lambda round: mix1(workers, round - 1),
        mix2=lambda round, tensor: meetings(pairs(0), workers, round) if tensor in (0, 1, 6) else [],
        outer=PLAIN,
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("name", "one", "two"),
    [("global-m1-blocking", everyone, nobody), ("local-m1-m2-blocking", _pairs(1), _pairs(0))],
)
def test_blocking_gossip_is_its_plain_loop_bit_for_bit(name: str, one: Meet, two: Meet, workers: int) -> None:
    compare(
        METHODS[name](period=5).strategy,
        reference.blocking_gossip,
        workers,
        period=5,
        mix1=lambda round: one(workers, round - 1),
        mix2=lambda round, tensor: two(workers, round),
        outer=PLAIN,
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_noloco_is_its_plain_loop_bit_for_bit(workers: int) -> None:
    compare(
        METHODS["noloco"](period=5).strategy,
        reference.noloco,
        workers,
        period=5,
        pairs=lambda round: meetings(pairs(0), workers, round),
        lr=0.7,
        momentum=0.5,
        pull=0.7,
    )


# A keeper

PACES = [Fraction(1), Fraction(2, 3), Fraction(1, 2), Fraction(1), Fraction(1, 5)]


def compare_kept(
    strategy: Strategy, loop: Callable[..., reference.Result], paces: list[Fraction], **options: Any
) -> None:
    module, workers, ticks = toys.Mlp(), len(paces), 40
    theta, step = toys.initial(module), toys.inner_step(module, toys.adamw, seed=SEED)
    anchor, replicas = loop(theta, workers=workers, steps=ticks, inner_step=step, paces=paces, **options)
    syncs, keeping, _ = run_kept(module, strategy, workers=workers, ticks=ticks, paces=paces, seed=SEED)
    assert toys.same_bits(shared(syncs[0], keeping.anchors), anchor)
    for sync, replica in zip(syncs, replicas, strict=True):
        assert toys.same_bits(live(sync), replica)
    assert not toys.same_bits(anchor, theta), "the run went nowhere"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("paced", ["alike", "unequal"])
def test_async_local_sgd_is_its_plain_loop_bit_for_bit(workers: int, paced: str) -> None:
    paces = PACES[:workers] if paced == "unequal" else [Fraction(1)] * workers
    part = keeper(1, 0, evenly(), delayed_nesterov(0.7, 0.9, delay=3, c=0.1))
    compare_kept(
        Strategy((Rule(matched(6), mixer=part),)),
        reference.async_local_sgd,
        paces,
        periods=[max(1, int(pace * 6)) for pace in paces],
        outer=reference.delayed_nesterov(0.7, 0.9, 3, 0.1),
    )


CLOSINGS = [(1, 0), (1, 1), (2, 1), (2, 2)]
"""(quorum, grace)"""


@pytest.mark.parametrize(
    ("workers", "quorum", "grace"), [(count, *each) for count in (1, 2, 3, 5) for each in CLOSINGS if each[0] <= count]
)
@pytest.mark.parametrize("paced", ["alike", "unequal"])
@pytest.mark.parametrize("average", ["mean", "radial"])
def test_decoupled_is_its_plain_loop_bit_for_bit(
    workers: int, paced: str, quorum: int, grace: int, average: str
) -> None:
    paces = PACES[:workers] if paced == "unequal" else [Fraction(1)] * workers
    merge = {
        "mean": (weighted_mean(), reference.weighted_mean),
        "radial": (radial_directional(()), reference.radial_directional),
    }[average]
    part = keeper(quorum, grace, by_throughput(), nesterov(0.7, 0.9), merge[0])
    rule = Rule(staggered(6, 3), carry=Carry.LIVE, mixer=part, landing=OnArrival())
    compare_kept(
        Strategy((rule,), BY_LAYER),
        reference.decoupled,
        paces,
        period=6,
        fragments=FRAGMENTS,
        tokens_per_step=8,
        quorum=quorum,
        grace=grace,
        merge=merge[1],
        outer=PLAIN,
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_async_local_sgd_of_equal_workers_with_a_delay_of_all_of_them_is_diloco(workers: int) -> None:
    """The footnote of the paper: N deltas from one anchor are one Nesterov step on their mean, but for rounding."""
    module = toys.Mlp()
    part = keeper(1, 0, evenly(), delayed_nesterov(0.7, 0.9, delay=workers))
    paces = [Fraction(1)] * workers
    syncs, keeping, _ = run_kept(
        module, Strategy((Rule(matched(6), mixer=part),)), workers=workers, ticks=30, paces=paces, seed=SEED
    )
    step = toys.inner_step(module, toys.adamw, seed=SEED)
    want, _ = reference.diloco(toys.initial(module), workers=workers, steps=30, inner_step=step, period=6, outer=PLAIN)
    assert toys.distance(shared(syncs[0], keeping.anchors), want) < 1e-10


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_two_recipes_with_a_keeper_are_their_plain_loops_bit_for_bit(workers: int) -> None:
    paces = PACES[:workers]
    compare_kept(
        METHODS["async-local-sgd"](period=6, delay=3).strategy,
        reference.async_local_sgd,
        paces,
        periods=[max(1, int(pace * 6)) for pace in paces],
        outer=reference.delayed_nesterov(0.7, 0.9, 3),
    )
    compare_kept(
        replace(METHODS["decoupled"](period=6, fragments=2).strategy, fragments=BY_LAYER),
        reference.decoupled,
        paces,
        period=6,
        fragments=FRAGMENTS,
        tokens_per_step=8,
        quorum=1,
        grace=1,
        merge=reference.radial_directional,
        outer=PLAIN,
    )


def test_every_method_is_compared_with_a_plain_loop() -> None:
    here = {"streaming", "sparta", "eager", "noloco", "decoupled", "async-local-sgd"}
    subsets = {"global-m1-local-m2-subset", "local-m1-m2-subset", "global-m1-blocking", "local-m1-m2-blocking"}
    baselines = {"single", "data-parallel"}  # test_methods.py, beside its rows
    assert {*METHODS} == {*METHODS} & {*ROWS, *CODED, *VARIANTS, *here, *subsets, *baselines}
