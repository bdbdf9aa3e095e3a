"""How far workers are from one another: in what they predict (Jensen-Shannon distance) and in their weights (L2).

The Jensen-Shannon divergence of M distributions is JSD = H(mean_m p_m) - mean_m H(p_m), with H in bits: 0 where all are
equal, 1 where two have no token in common, at most log2 M. Its root is a metric: the distance at one token.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.trees import CHUNK

SCALE = 2.0**15
"""Probabilities are sent times this: fp16 then holds all from 2e-9 to 1 to a part in 2048, where their logarithms would
be known to a part in 250 only."""
ID, MASS = 4, 2
"""Bytes of a token id and of a probability in a sketch."""


def probe(model: nn.Module, batch: Tensor) -> Tensor:
    """Log-probabilities of the next token at every token read: [T, V] in fp32, or in the logits' own wider dtype.

    Dropout is off meanwhile; every module has its mode back afterwards, and nothing is recorded for gradients.

    Args: model: maps [rows, length] tokens to logits [rows, length, V], or to an object with `.logits`. batch: int64
    [rows, length + 1] as for `next_token_loss`; the last column is not read. T = rows * length.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            answer = model(batch[:, :-1])
            logits: Tensor = getattr(answer, "logits", answer)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return wide.flatten(0, 1).log_softmax(-1)
    finally:
        for module, mode in modes:
            module.training = mode


def js_distance(lp: Tensor, lq: Tensor) -> float:
    """Mean over tokens of sqrt(JSD(p, q)), in [0, 1].

    Args: lp, lq: log-probabilities [T, V] of two workers on the same tokens.

    Example:
        >>> p, q = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.0, 1.0]]).log()
        >>> js_distance(p, p), js_distance(p, q)
        (0.0, 1.0)
    """
    return all_pairs((lp, lq))


def all_pairs(logs: Sequence[Tensor]) -> float:
    """`js_distance`, mean over all pairs of workers; 0 for one worker.

    The signal of Factored Gossip DiLoCo, which leaves the base of the logarithm and the set of pairs open: base 2 and
    all of them here. Work grows with M², so for many workers there is `generalised`.

    Args: logs: log-probabilities [T, V] of each worker on the same tokens.
    """
    distances = [_mean_of_pairs(probabilities) for probabilities in _portions(logs)]
    return float(torch.cat(distances).mean())


def generalised(logs: Sequence[Tensor]) -> float:
    """Mean over tokens of sqrt(JSD_M / log2 M) of all M workers at once, in [0, 1]; 0 for one worker.

    Equal to `all_pairs` for two workers, else another number: the root of a mean, not a mean of roots. Work grows with
    M. Arguments as in `all_pairs`.
    """
    most = math.log2(len(logs)) or 1.0
    distances = [(_divergence(probabilities) / most).sqrt() for probabilities in _portions(logs)]
    return float(torch.cat(distances).mean())


@dataclass(frozen=True, eq=False)
class Sketch:
    """What a worker tells of its predictions: at each of T tokens, the `top` likeliest next tokens with their
    probabilities, and the probability of all others together.

    Args: packed: uint8 [T * (6 top + 2)], as it travels: int32 ids [T, top], then fp16 probabilities [T, top + 1].
    """

    packed: Tensor
    top: int

    @property
    def tokens(self) -> int:
        """T."""
        return self.packed.numel() // (ID * self.top + MASS * (self.top + 1))

    @property
    def ids(self) -> Tensor:
        """Token ids int32 [T, top], ascending at each token."""
        return self._read(0, ID * self.top * self.tokens, torch.int32)

    @property
    def probabilities(self) -> Tensor:
        """fp64 [T, top + 1] beside the ids, at the end that of all other tokens; each row has the sum 1."""
        rows = self._read(ID * self.top * self.tokens, self.packed.numel(), torch.float16).double()
        return rows / rows.sum(-1, keepdim=True)

    def _read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        # a clone, because what came in the middle of a message may lie at an odd address
        return self.packed[start:stop].clone().view(dtype).view(self.tokens, -1)


def sketch(log_probs: Tensor, top: int = 64) -> Sketch:
    """The sketch of log-probabilities [T, V], on the host: 386 bytes a token, 0.2 MB for 512 tokens.

    Args: top: likeliest tokens kept, at most V.
    """
    top = min(top, log_probs.shape[-1])
    ids, masses = list[Tensor](), list[Tensor]()
    for (probabilities,) in _portions([log_probs]):
        likeliest = probabilities.topk(top).indices.sort().values
        # summed, not one minus the others: a tail of 1e-8 matters beside another worker's of 1e-4
        tail = probabilities.scatter(-1, likeliest, 0.0).sum(-1, keepdim=True)
        ids.append(likeliest.int())
        masses.append(torch.cat([probabilities.gather(-1, likeliest), tail], -1).mul(SCALE).half())
    parts = [torch.cat(each).cpu().view(torch.uint8).flatten() for each in (ids, masses)]
    return Sketch(torch.cat(parts), top)


def from_sketches(sketches: Sequence[Sketch]) -> float:
    """A lower bound of `all_pairs` from sketches of the same tokens; 0 for one worker.

    Two workers are compared on the tokens that both name, and on one outcome more: all the rest. That merges outcomes
    of the true distributions, which can only lower their divergence (data processing inequality), at each token by no
    more than the mean mass of the rest, in bits. Rounding to fp16 moves it by less than 5e-4.

    Raises: ValueError if they are not of equally many tokens.
    """
    told = [(each.ids, each.probabilities) for each in sketches]
    distances = [_mean_of_pairs(_merged(*mine, *theirs)) for mine, theirs in combinations(told, 2)]
    return float(torch.stack(distances).mean()) if distances else 0.0


def _merged(ids: Tensor, p: Tensor, others: Tensor, q: Tensor) -> list[Tensor]:
    """Both distributions over the ids that both have (0 in both at the places of the others), and the rest at the
    end."""
    if ids.shape[0] != others.shape[0]:
        raise ValueError(
            f"sketches of {ids.shape[0]} and {others.shape[0]} tokens cannot be compared; probe all workers with the "
            "same batch"
        )
    place = torch.searchsorted(others, ids).clamp_max(others.shape[-1] - 1)
    both = others.gather(-1, place) == ids
    mine, theirs = p[:, :-1] * both, q[:, :-1].gather(-1, place) * both
    return [
        torch.cat([named, (whole.sum(-1) - named.sum(-1)).clamp_min(0).unsqueeze(-1)], -1)
        for named, whole in ((mine, p), (theirs, q))
    ]


def _portions(logs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Each worker's probabilities in fp64, a chunk's worth of tokens at a time.

    fp64, because a difference of entropies in fp32 is lost below a distance of 1e-3, where workers that mix often are.
    """
    rows = max(1, CHUNK // logs[0].shape[-1])
    for portion in zip(*(each.split(rows) for each in logs), strict=True):
        yield [each.double().exp() for each in portion]


def _divergence(probabilities: Sequence[Tensor]) -> Tensor:
    """JSD in bits at each token, of [tokens, outcomes] each."""
    mean = sum(probabilities[1:], start=probabilities[0]) / len(probabilities)
    entropies = [_entropy(each) for each in probabilities]
    within = sum(entropies[1:], start=entropies[0]) / len(entropies)
    return (_entropy(mean) - within).clamp(0, math.log2(len(probabilities)))


def _mean_of_pairs(probabilities: Sequence[Tensor]) -> Tensor:
    """sqrt(JSD) at each token, mean over pairs."""
    distances = [_divergence(pair).sqrt() for pair in combinations(probabilities, 2)]
    return torch.stack(distances).mean(0) if distances else torch.zeros(len(probabilities[0]), dtype=torch.float64)


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1) / math.log(2)


class Spread(NamedTuple):
    """Root mean square over workers of |theta_m - mean|, and its part of |mean| (nan where that is 0)."""

    distance: float
    relative: float


def l2_distance(workers: Iterable[Iterable[Tensor]]) -> Spread:
    """How far the workers' weights lie from their mean: sqrt(mean_m |theta_m - mean|²), all parameters in one vector.

    Args: workers: for each its flat chunks, cut at the same places; they are read side by side, one of each at a time.

    Example:
        >>> l2_distance([[torch.tensor([3.0, 5.0])], [torch.tensor([3.0, 3.0])]])
        Spread(distance=1.0, relative=0.2)
    """
    apart = size = 0.0
    for chunks in zip(*workers, strict=True):
        wide = torch.stack([chunk.double() for chunk in chunks])
        mean = wide.mean(0)
        size += float(mean.square().sum())
        apart += float((wide - mean).square().sum()) / len(chunks)
    return Spread(math.sqrt(apart), math.sqrt(apart / size) if size else math.nan)
