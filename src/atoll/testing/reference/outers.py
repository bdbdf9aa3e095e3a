"""Outer rules: from the outer gradient of one tensor and its state, the step to subtract from its anchor."""

from typing import Any

import torch
from torch import Tensor

from atoll.testing.reference.contract import Outer


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


def restarted(outer: Outer, every: int) -> Outer:
    """Outer-momentum restarting (arXiv 2605.28585): after every `every` rounds `outer` begins anew."""

    def step(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        rounds = state["rounds"] = state.get("rounds", 0) + 1
        if rounds % every == 1 or every == 1:
            state["within"] = {}
        return outer(gradient, state["within"])

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
