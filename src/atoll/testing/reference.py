"""The methods as plain loops, written from the papers: slow, serial, and meant to be read with the paper open.

Every loop trains `workers` replicas of one model in a single thread and shares one contract:

- `theta`: the initial parameters, a list of tensors; it is left untouched.
- `inner_step(worker, step, params)`: moves that worker's parameters in place by one inner step. Steps are counted
  from 1. Each worker always gets the same tensor objects, so its optimizer state can live in the closure, and must:
  no loop resets it.
- result: `(shared, live)`, the shared model and each worker's live parameters as they stand after `steps` inner steps.
  Steps after the last sync are in `live` alone; an exchange still under way at the end is not applied.

Symbols: Θ anchor, θ_m live parameters of worker m, Δ_m = Θ - θ_m delta (old minus new: a gradient for a minimiser),
Δ̄ their mean, η outer learning rate, μ outer momentum. The arithmetic is fixed, so that another implementation can be
compared bit for bit: deltas are added in worker order beginning with worker 0, one division by M ends the sum, and
products and sums are separate operations, never fused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

InnerStep = Callable[[int, int, list[Tensor]], None]
Gradient = Callable[[int, int, list[Tensor]], list[Tensor]]
Update = Callable[[int, list[Tensor], list[Tensor]], None]
Result = tuple[list[Tensor], list[list[Tensor]]]

Outer = Callable[[Tensor, dict[str, Any]], Tensor]
"""An outer rule: from one tensor's outer gradient and state (empty at first), the step to subtract from its anchor."""


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
) -> Result:
    """Streaming DiLoCo (arXiv 2501.18512), deltas in full precision: fragments sync in turn, behind inner steps.

    `fragments` lists the tensors of each fragment p by index. With t_p = ⌊pH/P⌋, fragment p sends at t_p + H, t_p + 2H,
    ..., so never after fewer than H steps, and receives τ = `delay` < H steps later: the outer rule (Nesterov momentum
    in the paper) moves the anchor, and live keeps the weight α = `alpha` against 1 - α for the anchor.

    The paper prints the outer step on θ_m, which differs between workers once α > 0; here, as in its prose, it is
    applied to an explicit Θ_p, from which deltas are measured too.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    under_way: dict[int, Tensor] = {}
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        for p, fragment in enumerate(fragments):
            since = step - p * period // len(fragments)
            if since >= period and since % period == 0:
                for i in fragment:
                    total = anchor[i] - live[0][i]
                    for m in range(1, workers):
                        total = total + (anchor[i] - live[m][i])
                    under_way[i] = total / workers
            if since - delay >= period and (since - delay) % period == 0:
                for i in fragment:
                    anchor[i] = anchor[i] - outer(under_way[i], state[i])
                    for m in range(workers):
                        live[m][i].copy_(live[m][i] * alpha + anchor[i] * (1 - alpha))
    return anchor, live


def sgd(lr: float) -> Outer:
    """Outer SGD: Θ ← Θ - η Δ̄."""

    def step(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient * lr

    return step


def nesterov(lr: float, momentum: float) -> Outer:
    """Outer Nesterov momentum in PyTorch's form: u ← μu + Δ̄; Θ ← Θ - η(Δ̄ + μu)."""

    def step(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        u = state.setdefault("u", torch.zeros_like(gradient))
        u.mul_(momentum).add_(gradient)
        return (gradient + u * momentum) * lr

    return step


def adam(lr: float, beta1: float, beta2: float, eps: float) -> Outer:
    """Outer Adam, the FedOpt row of DiLoCo's sweep, with n counting the rounds of this tensor.

    m ← β₁m + (1 - β₁)Δ̄; v ← β₂v + (1 - β₂)Δ̄²; Θ ← Θ - η / (1 - β₁ⁿ) · m / (√v / √(1 - β₂ⁿ) + ε).
    """

    def step(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        n = state["n"] = state.get("n", 0) + 1
        m = state.setdefault("m", torch.zeros_like(gradient))
        v = state.setdefault("v", torch.zeros_like(gradient))
        m.mul_(beta1).add_(gradient * (1 - beta1))
        v.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        return m / (v.sqrt() / (1 - beta2**n) ** 0.5 + eps) * (lr / (1 - beta1**n))

    return step
