"""Parts and partitions that cannot work are refused when they are made; those that can are values, rebuilt by their
repr. What cannot work together is in `test_refusals`."""

import inspect
from collections.abc import Callable, Sequence

import pytest
import torch

from atoll.errors import CompositionError
from atoll.parts import (
    codecs,
    estimates,
    fragments,
    gossip,
    keepers,
    landings,
    merges,
    mixers,
    momentum,
    outers,
    schedules,
)
from atoll.parts.codecs import cast, exact
from atoll.parts.fragments import Fragments, by_name, sequential, strided, whole
from atoll.parts.gossip import alarmed, groups
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import adopt, blend, carry_on, leave
from atoll.parts.mixers import all_mean, alone, by_share, by_tokens, weighted
from atoll.parts.momentum import age_decay, restarted
from atoll.parts.outers import adam, nesterov, sgd
from atoll.parts.schedules import at, every, staggered
from atoll.peers.memory import Hub
from atoll.recipes.methods import METHODS
from atoll.sync import rule as rules
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.toys import Mlp
from atoll.trees import Spec
from atoll.wire import Keep, Reduce, Sum

OUTER = nesterov(0.7, 0.9)
GRADIENT = {"carry": Carry.GRADIENT, "merge": leave()}
NAN = float("nan")

IMPOSSIBLE_PARTS: dict[str, tuple[Callable[[], object], str]] = {
    "a period of no step": (lambda: every(0), r"period was 0, .* give period >= 1"),
    "a staggered period of no step": (lambda: staggered(0, 1), r"give period >= 1"),
    "no fragment to take turns": (lambda: staggered(4, 0), r"give fragments >= 1"),
    "more turns than steps": (lambda: staggered(3, 4), r"use every\(3\), at most 3 fragments, or a longer period"),
    "step zero": (lambda: at(0, 3), r"inner steps from 1 upwards"),
    "steps out of order": (lambda: at(5, 3), r"each once and in order"),
    "a step twice": (lambda: at(3, 3), r"each once and in order"),
    "a landing before the launch": (lambda: After(0), r"write After\(n\) with n >= 1, or Blocking\(\)"),
    "alpha over 1": (lambda: blend(1.5), r"give 0 <= alpha <= 1"),
    "alpha below 0": (lambda: blend(-0.1), r"give 0 <= alpha <= 1"),
    "alpha of nan": (lambda: blend(NAN), r"give 0 <= alpha <= 1"),
    "an outer rate of 0": (lambda: sgd(0.0), r"give lr > 0"),
    "a negative outer rate": (lambda: nesterov(-0.7, 0.9), r"give lr > 0"),
    "an outer rate of nan": (lambda: adam(NAN), r"give lr > 0"),
    "an infinite outer rate": (lambda: sgd(float("inf")), r"give lr > 0"),
    "momentum of 1": (lambda: nesterov(0.7, 1.0), r"give 0 <= momentum < 1"),
    "negative momentum": (lambda: nesterov(0.7, -0.1), r"give 0 <= momentum < 1"),
    "beta1 of 1": (lambda: adam(0.7, beta1=1.0), r"give 0 <= beta1 < 1"),
    "beta2 of 1": (lambda: adam(0.7, beta2=1.0), r"give 0 <= beta2 < 1"),
    "no epsilon": (lambda: adam(0.7, eps=0.0), r"0 / 0; give eps > 0"),
    "a wire of a wide type": (lambda: cast(torch.float32), r"write cast\(torch.float16\), .* or exact\(\)"),
}


class misses:
    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        return (tuple(spec.name for spec in specs if "head" not in spec.name),)


class repeats:
    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        return (tuple(spec.name for spec in specs), ("head.bias",))


class invents:
    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        return (tuple(spec.name for spec in specs), ("neck.bias",))


def one(partition: object, **options: object) -> Strategy:
    return Strategy((Rule(every(6), OUTER, **options),), partition)  # pyright: ignore[reportArgumentType]


IMPOSSIBLE_STRATEGIES: dict[str, tuple[Strategy, str]] = {
    "a parameter in no fragment": (one(misses()), r"misses head.bias, head.weight; add a last pattern '\*'"),
    "a pattern too few": (one(by_name("first.*", "m*")), r"misses head.bias, head.weight, last.bias, last.weight"),
    "a parameter twice": (one(repeats()), r"repeats head.bias"),
    "a parameter that is not there": (one(invents()), r"invents neck.bias"),
    "a pattern for nothing": (one(by_name("*", "neck.*")), r"leaves fragment 1 without parameters; drop its pattern"),
    "blocks of a model without": (one(strided(2)), r"has 0 numbered blocks; .* by_name\(...\)"),
    "runs of blocks of a model without": (one(sequential(2)), r"has 0 numbered blocks"),
    "turns for other fragments": (
        Strategy((Rule(staggered(6, 3), OUTER),), by_name("f*", "*")),
        r"write staggered\(6, 2\) or ask for 3 fragments",
    ),
    "a fragment that nobody serves": (
        one(by_name("f*", "*"), only=(0,)),
        r"serve fragments \[0\], but .* makes 2 of this model \(0 to 1\); correct `only` for fragment 1",
    ),
    "a fragment that is not there": (one(whole(), only=(0, 3)), r"correct `only` for fragment 3"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE_PARTS)
def test_a_part_that_cannot_work_is_refused_with_what_to_write(name: str) -> None:
    make, sentence = IMPOSSIBLE_PARTS[name]
    with pytest.raises(CompositionError, match=sentence):
        make()


@pytest.mark.parametrize("name", IMPOSSIBLE_STRATEGIES)
def test_a_strategy_that_does_not_fit_the_model_is_refused_with_what_to_write(name: str) -> None:
    strategy, sentence = IMPOSSIBLE_STRATEGIES[name]
    with pytest.raises(CompositionError, match=sentence):
        Synchronizer(Mlp(), strategy, Hub(1).group(0))


SCOPE = {"torch": torch, "Keep": Keep, "Reduce": Reduce, "Sum": Sum} | {
    name: part
    for module in (
        *(codecs, estimates, fragments, gossip, keepers, landings, merges, mixers, momentum, outers, schedules, rules),
    )
    for name, part in vars(module).items()
    if inspect.isclass(part)
}
HALF = cast(torch.float16)
POSSIBLE = [
    Strategy(),
    one(whole()),
    one(by_name("a.*", "it's", "*"), only=(0, 2)),
    one(strided(3), codec=HALF, mixer=all_mean(Reduce(HALF)), quorum=0.25),
    one(sequential(2), codec=cast(torch.bfloat16), mixer=weighted(by_share(), all_mean(Keep()))),
    Strategy((Rule(every(1), **GRADIENT), Rule(at(3, 9), sgd(1.0), mixer=weighted(by_tokens(), alone())))),
    Strategy((Rule(at(), adam(0.3, eps=1e-3)), Rule(every(2), carry=Carry.LIVE, mixer=all_mean(Sum())))),
    Strategy((Rule(staggered(9, 3), OUTER, landing=After(4), merge=blend(0.5)),)),
    Strategy((Rule(every(9), carry=Carry.LIVE, landing=After(8), merge=carry_on()),)),
    Strategy((Rule(every(9), OUTER, codec=exact(), landing=Blocking(), merge=adopt(), quorum=0.0),)),
    *(make().strategy for make in METHODS.values()),
    Strategy((Rule(every(2), restarted(age_decay(nesterov(0.7, 0.9)), 5), mixer=alarmed(groups(3, 4), 0.5, 0.2)),)),
]


@pytest.mark.parametrize("strategy", POSSIBLE, ids=range(len(POSSIBLE)))
def test_the_repr_of_a_strategy_rebuilds_it(strategy: Strategy) -> None:
    again = eval(repr(strategy), SCOPE)
    assert again == strategy
    assert repr(again) == repr(strategy)
    assert hash(again) == hash(strategy)
