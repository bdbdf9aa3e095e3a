"""What differs from DiLoCo in how much is sent: sparse, narrow, or a little at every step."""

import torch

from atoll.parts.codecs import cast, error_feedback, exact, quantise, random_mask, statistical, topk
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.train.inner import Muon
from atoll.train.run import Method
from atoll.wire import Keep


def opendiloco_sparse(
    period: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, density: float = 0.05
) -> Method:
    """OpenDiLoCo with the largest part of the accumulated delta only, in fp16; what is left out is sent later.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer
        outer_momentum: Nesterov momentum of the outer optimizer
        density: part of the values that is sent, of each 4096
    """
    codec = error_feedback(topk(density, then=cast(torch.float16)), decay=1.0)
    rule = Rule(every(period), outer=nesterov(outer_lr, outer_momentum), codec=codec, mixer=all_mean(Keep()))
    return Method("opendiloco-sparse", Strategy((rule,)), period=period)


def sparseloco(period: int = 30, outer_lr: float = 1.0, kept: int = 64, bits: int = 2, decay: float = 0.95) -> Method:
    """SparseLoCo (Sarfi et al. 2025): the largest 64 of each 4096 values in 2 bits; error feedback takes the place of
    outer momentum.

    Chunks run over the flat fragment, where the paper cuts matrices in tiles of 64 x 64. The mean is over all workers,
    as in the paper's formula; its code divides by those who sent the value.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer, sgd
        kept: values that are sent of each 4096
        bits: of each value that is sent: 2, 4 or 8
        decay: of the error feedback
    """
    values = quantise(bits, block=kept, by=statistical())
    codec = error_feedback(topk(kept, then=values), decay=decay)
    rule = Rule(every(period), outer=sgd(outer_lr), codec=codec, mixer=all_mean(Keep()))
    return Method("sparseloco", Strategy((rule,)), period=period)


def muloco(period: int = 30, outer_lr: float = 0.8, outer_momentum: float = 0.8, bits: int = 32) -> Method:
    """MuLoCo (Therien et al. 2025): DiLoCo with Muon as inner optimizer.

    Args:
        period: inner steps of a round
        outer_lr: learning rate of the outer optimizer; 0.7 for one worker, 0.8 to 1.0 for many
        outer_momentum: Nesterov momentum of the outer optimizer; 0.6 for one worker, 0.8 to 0.9 for many
        bits: of each value that is sent: 32, or 8, 4 or 2 with error feedback
    """
    codec = exact() if bits == 32 else error_feedback(quantise(bits, by=statistical()), decay=1.0)
    mixer = all_mean() if bits == 32 else all_mean(Keep())
    rule = Rule(every(period), outer=nesterov(outer_lr, outer_momentum), codec=codec, mixer=mixer)
    return Method("muloco", Strategy((rule,)), inner=Muon(), period=period)


def sparta(fraction: float = 0.005) -> Method:
    """SPARTA (EXO Labs 2025): after every inner step a random fraction of the parameters is averaged.

    Args:
        fraction: part of the parameters that is averaged in a step, the same on all workers
    """
    rule = Rule(every(1), carry=Carry.LIVE, codec=random_mask(fraction, seed=0))
    return Method("sparta", Strategy((rule,)))
