"""One function per method. Each returns a composition; its arguments are the knobs its paper turns, with the paper's
values as defaults.

The period is the exception: papers use hundreds of steps in runs of tens of thousands. The default here is 50, the
shortest of DiLoCo's sweep, because a first run on a CPU has a thousand steps; give `period=500` for the published
setting.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from atoll.parts.codecs import cast
from atoll.parts.fragments import strided
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import all_mean, by_share, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.train.run import Method
from atoll.wire import Reduce


def single() -> Method:
    """One worker on its own: the baseline without communication."""
    return Method("single")


def data_parallel() -> Method:
    """Gradients averaged at every step, before clipping: the synchronous upper baseline."""
    return Method("data-parallel", Strategy((Rule(every(1), carry=Carry.GRADIENT, merge=leave()),)))


def local_sgd(period: int = 50) -> Method:
    """Parameters averaged every `period` steps (local SGD, FedAvg): DiLoCo with the outer step sgd(1).

    Args:
        period: inner steps of a round
    """
    return Method("local-sgd", Strategy((Rule(every(period), outer=sgd(1.0)),)), period=period)


def diloco(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """DiLoCo (Douillard et al. 2023, algorithm 1): deltas averaged every `period` steps, one Nesterov step, everyone
    adopts the result.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return Method("diloco", Strategy((Rule(every(period), outer=nesterov(outer_lr, outer_momentum)),)), period=period)


def opendiloco(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """OpenDiLoCo (Jaghouar et al. 2024): DiLoCo with fp16 on the wire, both ways; sums are in fp32, and so is the
    anchor.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    half = cast(torch.float16)
    rule = Rule(every(period), outer=nesterov(outer_lr, outer_momentum), codec=half, mixer=all_mean(Reduce(half)))
    return Method("opendiloco", Strategy((rule,)), period=period)


def streaming(
    period: int = 50,
    fragments: int = 2,
    delay: int = 1,
    alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
) -> Method:
    """Streaming DiLoCo (Douillard et al. 2025, algorithm 2), exact on the wire: fragments take turns and land `delay`
    steps later.

    `fragments` counts groups of blocks, strided; embeddings and head are one more. The paper takes three blocks per
    fragment and a wire of 4 bits, which is not here yet; alpha weighs the local copy.

    Args:
        period: inner steps of a round
        fragments: groups of transformer blocks; embeddings and head are one more
        delay: inner steps from launch to landing; 0 makes training wait
        alpha: weight of the local copy when a fragment lands, in [0, 1]
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    rule = Rule(
        staggered(period, fragments + 1),
        outer=nesterov(outer_lr, outer_momentum),
        landing=After(delay) if delay else Blocking(),
        merge=blend(alpha),
    )
    return Method("streaming", Strategy((rule,), strided(fragments)), period=period)


METHODS: dict[str, Callable[..., Method]] = {
    "single": single,
    "data-parallel": data_parallel,
    "local-sgd": local_sgd,
    "diloco": diloco,
    "opendiloco": opendiloco,
    "streaming": streaming,
}
"""Every method by its name on the command line."""


def weigh_by_share(method: Method) -> Method:
    """The same method with deltas weighted by the size of each worker's shard, as DiLoCo does when data differ
    (section 1.3)."""
    rules = tuple(
        replace(rule, mixer=weighted(by_share(), rule.mixer)) if rule.carry is Carry.DELTA else rule
        for rule in method.strategy.rules
    )
    return replace(method, strategy=replace(method.strategy, rules=rules))
