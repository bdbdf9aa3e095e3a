"""DiLoCo and the methods around it in which all workers agree on one anchor."""

from typing import Any

import torch
from torch import Tensor

from atoll.testing.reference.contract import (
    Gradient,
    InnerStep,
    Outer,
    Result,
    See,
    Update,
    flattened,
    mean,
    shaped,
    unchanged,
)


def single(theta: list[Tensor], *, steps: int, inner_step: InnerStep) -> Result:
    """Plain training of one worker, number 0: the baseline without any communication."""
    params = [tensor.clone() for tensor in theta]
    for step in range(1, steps + 1):
        inner_step(0, step, params)
    return params, [params]


def data_parallel(theta: list[Tensor], *, workers: int, steps: int, gradient: Gradient, update: Update) -> Result:
    """Data-parallel training: the workers' gradients are averaged at every step, before clipping.

    `gradient(worker, step, params)` returns that worker's gradients; `update(step, params, mean)` clips the mean and
    moves the parameters in place. The replicas never differ, so one set of parameters stands for all of them.
    """
    params = [tensor.clone() for tensor in theta]
    for step in range(1, steps + 1):
        grads = [gradient(m, step, params) for m in range(workers)]
        mean: list[Tensor] = []
        for i in range(len(params)):
            total = grads[0][i]
            for m in range(1, workers):
                total = total + grads[m][i]
            mean.append(total / workers)
        update(step, params, mean)
    return params, [params for _ in range(workers)]


def local_sgd(theta: list[Tensor], *, workers: int, steps: int, inner_step: InnerStep, period: int) -> Result:
    """Local SGD, FedAvg (arXiv 1602.05629): every `period` inner steps all workers adopt their average.

    The average is written Θ - mean(Θ - θ_m), which is mean(θ_m) but for rounding, so that its bits are those of DiLoCo
    with the outer step Θ ← Θ - Δ̄.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            for i in range(len(anchor)):
                total = anchor[i] - live[0][i]
                for m in range(1, workers):
                    total = total + (anchor[i] - live[m][i])
                anchor[i] = anchor[i] - total / workers
                for m in range(workers):
                    live[m][i].copy_(anchor[i])
    return anchor, live


def diloco(
    theta: list[Tensor], *, workers: int, steps: int, inner_step: InnerStep, period: int, outer: Outer
) -> Result:
    """DiLoCo (arXiv 2311.08105, Algorithm 1): `period` inner steps apart, then one outer step on the mean delta.

    The paper's `outer` is Nesterov momentum: u ← μu + Δ̄; Θ ← Θ - η(Δ̄ + μu). It moves the anchor, from which every
    worker then starts again.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            for i in range(len(anchor)):
                total = anchor[i] - live[0][i]
                for m in range(1, workers):
                    total = total + (anchor[i] - live[m][i])
                anchor[i] = anchor[i] - outer(total / workers, state[i])
                for m in range(workers):
                    live[m][i].copy_(anchor[i])
    return anchor, live


def opendiloco(
    theta: list[Tensor], *, workers: int, steps: int, inner_step: InnerStep, period: int, outer: Outer
) -> Result:
    """OpenDiLoCo (arXiv 2407.07852): DiLoCo with the deltas all-reduced in fp16.

    fp16 is the format on the wire, both ways: each delta is rounded as it leaves, the sum is taken in fp32 (or in the
    parameters' own wider dtype), and the mean is rounded as it returns. Every worker, the one that adds up included,
    uses the rounded values. The anchor and the outer state keep the parameters' dtype.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            for i in range(len(anchor)):
                wide = torch.promote_types(anchor[i].dtype, torch.float32)
                total = (anchor[i] - live[0][i]).to(torch.float16).to(wide)
                for m in range(1, workers):
                    total = total + (anchor[i] - live[m][i]).to(torch.float16).to(wide)
                mean = (total / workers).to(torch.float16).to(anchor[i].dtype)
                anchor[i] = anchor[i] - outer(mean, state[i])
                for m in range(workers):
                    live[m][i].copy_(anchor[i])
    return anchor, live


def streaming(  # noqa: PLR0913 (one argument for each symbol of the paper)
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    period: int,
    fragments: list[list[int]],
    delay: int,
    alpha: float,
    outer: Outer,
    see: See = unchanged,
) -> Result:
    """Streaming DiLoCo (arXiv 2501.18512): fragments sync in turn, behind inner steps.

    `fragments` lists the tensors of each fragment p by index. With t_p = ⌊pH/P⌋, fragment p sends at t_p + H, t_p + 2H,
    ..., so never after fewer than H steps, and receives τ = `delay` < H steps later: the outer rule (Nesterov momentum
    in the paper) moves the anchor, and live keeps the weight α = `alpha` against 1 - α for the anchor. `see` is what
    the paper's four bits make of a delta (`float4`), all tensors of the fragment in one vector; everyone, the sender
    too, averages what is seen.

    The paper prints the outer step on θ_m, which differs between workers once α > 0; here, as in its prose, it is
    applied to an explicit Θ_p, from which deltas are measured too.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    under_way: dict[int, list[Tensor]] = {}
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        for p, fragment in enumerate(fragments):
            since = step - p * period // len(fragments)
            if since >= period and since % period == 0:
                delta = [flattened([anchor[i] - live[m][i] for i in fragment]) for m in range(workers)]
                seen = [see(m, since // period - 1, delta[m]) for m in range(workers)]
                under_way[p] = shaped(mean(seen), [anchor[i] for i in fragment])
            if since - delay >= period and (since - delay) % period == 0:
                for i, g in zip(fragment, under_way[p], strict=True):
                    anchor[i] = anchor[i] - outer(g, state[i])
                    for m in range(workers):
                        live[m][i].copy_(live[m][i] * alpha + anchor[i] * (1 - alpha))
    return anchor, live
