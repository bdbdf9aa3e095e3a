"""The baselines, DiLoCo, and what differs from it in what is sent when: OpenDiLoCo, Streaming, Eager."""

import torch

from atoll.errors import UsageError
from atoll.parts.codecs import cast, exact, float4
from atoll.parts.estimates import eager
from atoll.parts.fragments import strided
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import all_mean
from atoll.parts.momentum import restarted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.train.run import Method
from atoll.wire import Keep, Reduce


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


def diloco_restarted(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, restart: int = 5) -> Method:
    """DiLoCo whose outer momentum is forgotten every few rounds (outer-momentum restarting, 2026), which widens the
    range of stable outer learning rates and momenta.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
        restart: rounds after which the momentum begins at zero again
    """
    rule = Rule(every(period), outer=restarted(nesterov(outer_lr, outer_momentum), restart))
    return Method("diloco-restarted", Strategy((rule,)), period=period)


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
    bits: int = 4,
) -> Method:
    """Streaming DiLoCo (Douillard et al. 2025, algorithm 2): fragments take turns, land `delay` steps later, and travel
    in 4 bits.

    `fragments` counts groups of blocks, strided; embeddings and head are one more. The paper takes three blocks per
    fragment. Every wire is kept as it was sent and summed in fp32, so that it is rounded once; alpha weighs the local
    copy.

    Args:
        period: inner steps of a round
        fragments: groups of transformer blocks; embeddings and head are one more
        delay: inner steps from launch to landing; 0 makes training wait
        alpha: weight of the local copy when a fragment lands, in [0, 1]
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
        bits: of each value on the wire: 4, or 32 for the values as they are
    """
    if bits not in (4, 32):
        raise UsageError(f"streaming was given bits={bits}, but its wire has 4 bits, or 32 for none taken away")
    rule = Rule(
        staggered(period, fragments + 1),
        outer=nesterov(outer_lr, outer_momentum),
        codec=float4() if bits == 4 else exact(),
        mixer=all_mean(Keep()) if bits == 4 else all_mean(),
        landing=After(delay) if delay else Blocking(),
        merge=blend(alpha),
    )
    return Method("streaming", Strategy((rule,), strided(fragments)), period=period)


def eager_diloco(period: int = 50, outer_lr: float = 0.4, outer_momentum: float = 0.9) -> Method:
    """Eager updates (Kale et al. 2025, section 4.1): a round's exchange overlaps the whole next round; one's own delta
    is used fresh, the others' a round late.

    Anchors and momenta differ between workers; the shared model is their mean. In the first round the others count as
    zero, which the paper leaves open.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    rule = Rule(every(period), outer=nesterov(outer_lr, outer_momentum), landing=After(period), estimate=eager())
    return Method("eager", Strategy((rule,)), period=period)
