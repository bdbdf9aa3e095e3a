"""Compression as what the others see of a tensor, element by element, and the loops that send what is compressed.

A codec is a function from a flat tensor of finite values to what a receiver makes of its wire, in the same dtype; what
travels in fp32 (scales, codebooks) is rounded to it. Blocks are runs of consecutive elements, the last may be shorter.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.testing.reference.contract import InnerStep, Outer, Result, See, flattened, mean, shaped

Codec = Callable[[Tensor], Tensor]


def exact(values: Tensor) -> Tensor:
    """The values themselves."""
    return values


def cast(dtype: torch.dtype) -> Codec:
    """Rounded to a narrower float, to nearest even."""

    def seen(values: Tensor) -> Tensor:
        return values.to(dtype).to(values.dtype)

    return seen


def float4(block: int = 256) -> Codec:
    """E3M0, the four bits of Streaming DiLoCo (arXiv 2501.18512): a sign, and zero or one of seven powers of two.

    s = max|x| of the block; x becomes the nearest of 0, s/64, s/32, ..., s, of two equally near ones the larger, with
    its own sign. The paper names the format; scale, zero code and rounding are ours.
    """

    def seen(values: Tensor) -> Tensor:
        result: list[float] = []
        for x_block in _blocks(values, block):
            s = _fp32(max(abs(x) for x in x_block))
            levels = [s, s / 2, s / 4, s / 8, s / 16, s / 32, s / 64, 0.0]
            for x in x_block:
                distances = [abs(abs(x) - level) for level in levels]
                result.append(math.copysign(levels[distances.index(min(distances))], x))
        return values.new_tensor(result)

    return seen


def quantise_linear(bits: int, block: int) -> Codec:
    """Evenly spaced levels between ±s, s = max|x| of the block: q = round(x · (L / s)), seen as q · (s / L).

    L = 2^(bits-1) - 1. Operations in that order, in the values' dtype, ties to the even q; a block of zeros stays one.
    """
    top = 2 ** (bits - 1) - 1

    def seen(values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for start in range(0, len(values), block):
            x = values[start : start + block]
            s = x.abs().max().to(torch.float32).to(values.dtype)
            if s > 0:
                result[start : start + block] = (x * (top / s)).round() * (s / top)
        return result

    return seen


def quantise_statistical(bits: int, block: int) -> Codec:
    """INTELLECT-1 (arXiv 2412.01152) and SparseLoCo: buckets around the mean, each seen as the mean of what it holds.

    n = 2^bits buckets of width w = 6σ/n cover μ ± 3σ of the block (σ over the population): x is in bucket
    ⌊(x - μ) / w + n/2⌋, the outer ones also taking what lies beyond. The reports say ±6σ; ±3σ is what their code does,
    and the shift by μ that it sends apart is in the bucket means here.
    """
    n = 2**bits

    def seen(values: Tensor) -> Tensor:
        result: list[float] = []
        for x_block in _blocks(values, block):
            mu = math.fsum(x_block) / len(x_block)
            w = 6 * math.sqrt(math.fsum((x - mu) * (x - mu) for x in x_block) / len(x_block)) / n
            index = [min(max(math.floor((x - mu) / w + n / 2), 0), n - 1) if w > 0 else 0 for x in x_block]
            held = {j: [x for x, place in zip(x_block, index, strict=True) if place == j] for j in set(index)}
            codebook = {j: _fp32(math.fsum(xs) / len(xs)) for j, xs in held.items()}
            result += [codebook[j] for j in index]
        return values.new_tensor(result)

    return seen


def topk(k: int, chunk: int = 4096, then: Codec = exact) -> Codec:
    """The k largest |x| of each chunk, in their order as `then` writes them; the others are seen as zero.

    Of equal ones the first are kept; a last chunk of fewer elements than k keeps them all.
    """

    def seen(values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for start in range(0, len(values), chunk):
            x = values[start : start + chunk]
            sizes = x.abs().tolist()
            kept = sorted(sorted(range(len(x)), key=sizes.__getitem__, reverse=True)[:k])
            result[[start + i for i in kept]] = then(x[kept])
        return result

    return seen


def prune_by_sign(fraction: float, neuron: int = 64, then: Codec = exact) -> Codec:
    """DiLoCo's pruning (arXiv 2311.08105, table 6) after TIES: what disagrees with a neuron's elected sign goes first.

    The sign with the larger sum of |x| is elected, + of equal ones. round(fraction · n) of the n elements are dropped:
    those of the other sign, smallest |x| first, then those of the elected. The paper gives neither the count nor the
    order, and here a neuron is a run of `neuron` elements.
    """

    def seen(values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for start in range(0, len(values), neuron):
            x = values[start : start + neuron]
            xs: list[float] = x.tolist()
            sign = 1 if math.fsum(xs) >= 0 else -1
            order = sorted(range(len(xs)), key=[(v * sign > 0, abs(v)) for v in xs].__getitem__)
            kept = sorted(order[round(fraction * len(xs)) :])
            result[[start + i for i in kept]] = then(x[kept])
        return result

    return seen


def random_mask(mask: Callable[[int], Tensor], then: Codec = exact) -> Codec:
    """The elements where the n booleans `mask(n)` are true, in order, as `then` writes them; the others as zero."""

    def seen(values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        kept = mask(len(values))
        result[kept] = then(values[kept])
        return result

    return seen


class ErrorFeedback:
    """What one sender's wires have left out, e: a = βe + x is sent in place of x, and e ← a - seen(a)."""

    def __init__(self, codec: Codec, decay: float) -> None:
        self.codec, self.decay = codec, decay
        self.residual: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """What the others see of βe + `values`."""
        a = values if self.residual is None else self.residual * self.decay + values
        seen = self.codec(a)
        self.residual = a - seen
        return seen


def compressed_diloco(
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    period: int,
    outer: Outer,
    see: See,
) -> Result:
    """DiLoCo in which everyone, the sender too, averages what is seen of each delta, all tensors in one vector.

    SparseLoCo (arXiv 2508.15706): `ErrorFeedback(topk(64, 4096, quantise_statistical(2, 64)), 0.95)` for each worker
    and outer SGD; MuLoCo (2505.23725): `ErrorFeedback` of four or two bits, outer Nesterov. SparseLoCo's formula
    divides by M, as here, and its code by the number of workers that sent the coordinate. Its chunks are 64 x 64 blocks
    of a matrix, here runs of the vector.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            delta = [flattened([anchor[i] - live[m][i] for i in range(len(anchor))]) for m in range(workers)]
            seen = [see(m, step // period - 1, delta[m]) for m in range(workers)]
            for i, g in enumerate(shaped(mean(seen), anchor)):
                anchor[i] = anchor[i] - outer(g, state[i])
                for m in range(workers):
                    live[m][i].copy_(anchor[i])
    return anchor, live


def sparta(
    theta: list[Tensor], *, workers: int, steps: int, inner_step: InnerStep, mask: Callable[[int], Tensor]
) -> Result:
    """SPARTA (EXO Labs): after each inner step a few coordinates of the parameters, the same on all, are averaged.

    θ[mask] ← mean over workers of θ[mask], `mask(step)` one boolean for each element of the tensors in one vector. The
    shared model is the mean of the live parameters.
    """
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        chosen = mask(step)
        flat = [flattened(live[m]) for m in range(workers)]
        average = mean([flat[m][chosen] for m in range(workers)])
        for m in range(workers):
            flat[m][chosen] = average
            for tensor, values in zip(live[m], shaped(flat[m], theta), strict=True):
                tensor.copy_(values)
    return [mean([live[m][i] for m in range(workers)]) for i in range(len(theta))], live


def _blocks(values: Tensor, block: int) -> list[list[float]]:
    return [piece.tolist() for piece in values.split(block)]


def _fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()
