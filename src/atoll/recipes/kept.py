"""A keeper holds the anchor, and nobody waits for the slowest: Decoupled DiLoCo, asynchronous local SGD."""

from atoll.parts.fragments import balanced
from atoll.parts.keepers import by_throughput, evenly, keeper, radial_directional
from atoll.parts.landings import OnArrival
from atoll.parts.momentum import delayed_nesterov
from atoll.parts.outers import nesterov
from atoll.parts.schedules import matched, staggered
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.train.run import Method


def decoupled(
    period: int = 50,
    fragments: int = 4,
    quorum: int = 1,
    grace: int = 1,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> Method:
    """Decoupled DiLoCo (DeepMind 2026): workers hand in fragments to a keeper in turn, and take what it answers when it
    comes.

    The paper has 24 fragments and a period of 24, answers everyone at the end of a round and drops what comes late;
    here those are answered who handed in, and what comes late joins the next round. Its grace follows from measured
    times, here it is a number of steps.

    Args:
        period: inner steps between two hand-ins of a fragment
        fragments: groups of tensors of about the same size, and the embedding
        quorum: contributions that a round needs
        grace: steps that the keeper waits for others after that
        outer_lr: learning rate of the keeper's outer optimizer
        outer_momentum: Nesterov momentum of the keeper's outer optimizer
    """
    mixer = keeper(quorum, grace, by_throughput(), nesterov(outer_lr, outer_momentum), radial_directional())
    rule = Rule(staggered(period, fragments + 1), carry=Carry.LIVE, mixer=mixer, landing=OnArrival())
    return Method("decoupled", Strategy((rule,), balanced(fragments)), period=period)


def async_local_sgd(period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, delay: int = 8) -> Method:
    """Asynchronous Local-SGD (Liu et al. 2024): a keeper applies every delta as it comes, with delayed Nesterov; slower
    workers take fewer steps (DyLU).

    Args:
        period: inner steps of the fastest worker between two hand-ins
        outer_lr: learning rate of the keeper's outer optimizer
        outer_momentum: its momentum
        delay: deltas between two updates of the momentum; the number of workers is the natural choice
    """
    mixer = keeper(1, 0, evenly(), delayed_nesterov(outer_lr, outer_momentum, delay))
    return Method("async-local-sgd", Strategy((Rule(matched(period), mixer=mixer),)), period=period)
