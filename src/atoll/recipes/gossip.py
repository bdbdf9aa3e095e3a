"""Gossip: Factored Gossip DiLoCo in its published variants, and NoLoCo."""

from collections.abc import Callable

from atoll.parts.estimates import own
from atoll.parts.gossip import only, pairs
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import adopt, leave
from atoll.parts.mixers import Mixer, all_mean, alone
from atoll.parts.momentum import consensus_momentum
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.train.run import Method

MIX1_SEED, MIX2_SEED = 1, 0
"""Different, so that a worker meets another partner for its parameters than for its gradient."""


def sensitive(blocks: int) -> tuple[str, ...]:
    """The parameters whose disagreement changes predictions most: embedding, head, and the first `blocks` blocks."""
    return ("*embed*", "lm_head*", *(f"*layers.{block}.*" for block in range(blocks)))


def overlapped(period: int, mixer: Mixer) -> Rule:
    """Mix1 behind the inner steps: what lands is only the base of the coming outer step."""
    return Rule(every(period), carry=Carry.ANCHOR, mixer=mixer, landing=After(period), merge=leave())


def blocking(period: int, mixer: Mixer) -> Rule:
    """Mix1 without overlap: points are mixed right after the outer step, and inner steps start from the mixed point."""
    return Rule(every(period), carry=Carry.ANCHOR, mixer=mixer, landing=Blocking(), merge=adopt())


def factored(
    name: str,
    period: int,
    mix1: Mixer,
    mix2: Mixer,
    outer_lr: float,
    outer_momentum: float,
    points: Callable[[int, Mixer], Rule] = overlapped,
) -> Method:
    """Mix1 averages points, Mix2 averages deltas while training waits (Koneputugodage et al. 2026; gossip of one anchor
    per worker).

    The outer step is applied to the mixed point, its momentum stays with the worker. The paper does not state outer
    learning rate and momentum: DiLoCo's. Local mixing is a fresh random matching in each round; a pair that fails goes
    on alone.
    """
    deltas = Rule(every(period), outer=nesterov(outer_lr, outer_momentum), mixer=mix2, estimate=own())
    return Method(name, Strategy((points(period, mix1), deltas)), period=period)


def factored_gossip(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """Factored Gossip DiLoCo (Koneputugodage et al. 2026): global Mix1 of points, overlapped; Mix2 of deltas in random
    pairs.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored("factored-gossip", period, all_mean(), pairs(MIX2_SEED), outer_lr, outer_momentum)


def global_m1(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """GlobalM1: points are averaged over all workers behind the inner steps, deltas stay one's own; nothing blocks.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored("global-m1", period, all_mean(), alone(), outer_lr, outer_momentum)


def global_m1_local_m2(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """GlobalM1LocalM2: what `factored-gossip` is.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored("global-m1-local-m2", period, all_mean(), pairs(MIX2_SEED), outer_lr, outer_momentum)


def global_m1_local_m2_subset(
    period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, blocks: int = 2
) -> Method:
    """GlobalM1LocalM2-subset: pairs mix the deltas of embedding, head and the first blocks only.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
        blocks: transformer blocks whose deltas are mixed; 2 of 16 in the paper
    """
    mix2 = only(sensitive(blocks), pairs(MIX2_SEED))
    return factored("global-m1-local-m2-subset", period, all_mean(), mix2, outer_lr, outer_momentum)


def local_m1(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """LocalM1: points are averaged in random pairs behind the inner steps, deltas stay one's own.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored("local-m1", period, pairs(MIX1_SEED), alone(), outer_lr, outer_momentum)


def local_m1_m2(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """LocalM1M2: points and deltas are both averaged in random pairs, each in pairs of its own.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored("local-m1-m2", period, pairs(MIX1_SEED), pairs(MIX2_SEED), outer_lr, outer_momentum)


def local_m1_m2_subset(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, blocks: int = 2) -> Method:
    """LocalM1M2-subset: as local-m1-m2, but deltas of embedding, head and the first blocks only.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
        blocks: transformer blocks whose deltas are mixed; 2 of 16 in the paper
    """
    mix2 = only(sensitive(blocks), pairs(MIX2_SEED))
    return factored("local-m1-m2-subset", period, pairs(MIX1_SEED), mix2, outer_lr, outer_momentum)


def global_m1_blocking(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """GlobalM1 without overlap: for a linear outer step the same as DiLoCo, up to rounding.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored("global-m1-blocking", period, all_mean(), alone(), outer_lr, outer_momentum, blocking)


def local_m1_m2_blocking(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Method:
    """LocalM1M2 without overlap.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
    """
    return factored(
        "local-m1-m2-blocking", period, pairs(MIX1_SEED), pairs(MIX2_SEED), outer_lr, outer_momentum, blocking
    )


def noloco(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.5, pull: float = 0.7) -> Method:
    """NoLoCo (Kolehmainen et al. 2025): random pairs average deltas, and pull their anchors together by momentum.

    Without the paper's random wiring of pipeline stages. With DiLoCo's momentum of 0.9 the pull of 0.7 is unstable.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: momentum of the outer optimizer, heavy ball
        pull: how strongly a worker's anchor is drawn to its partner's
    """
    outer = consensus_momentum(outer_lr, outer_momentum, pull)
    rule = Rule(every(period), outer=outer, carry=Carry.BOTH, mixer=pairs(MIX2_SEED), estimate=own())
    return Method("noloco", Strategy((rule,)), period=period)
