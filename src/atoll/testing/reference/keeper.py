"""Workers of unequal speed around a keeper, who holds the anchor and waits for few of them or for none.

Time is counted in ticks. Worker m takes an inner step in tick t when ⌊t · pace_m⌋ > ⌊(t - 1) · pace_m⌋; the fastest
has pace 1. In these loops `steps` counts ticks, and the inner step is told the worker's own count of steps.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from atoll.testing.reference.contract import InnerStep, Outer, Result

MergeDeltas = Callable[[list[Tensor], list[float]], Tensor]
"""From the deltas of one tensor and their weights, in worker order, the outer gradient."""


def delayed_nesterov(lr: float, momentum: float, delay: int, c: float = 0.0) -> Outer:
    """Delayed Nesterov (arXiv 2401.09135): N = `delay` deltas go by between two steps of the momentum.

    B ← B + g. At each N-th g: m ← βm + B/N; Θ ← Θ - η((1 - cN + c)βm + g/N); B ← 0. Else Θ ← Θ - η(cβm + g/N).
    """

    def step(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        n = state["n"] = state.get("n", 0) + 1
        m = state.setdefault("m", torch.zeros_like(gradient))
        state["B"] = state.get("B", torch.zeros_like(gradient)) + gradient
        if n % delay == 0:
            m = state["m"] = m * momentum + state["B"] / delay
            state["B"] = torch.zeros_like(gradient)
            return ((m * momentum) * (1 - c * delay + c) + gradient / delay) * lr
        return ((m * momentum) * c + gradient / delay) * lr

    return step


def async_local_sgd(
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    periods: Sequence[int],
    paces: Sequence[Fraction],
    outer: Outer,
) -> Result:
    """Asynchronous Local-SGD (arXiv 2401.09135): each delta is applied as it comes, whatever others did meanwhile.

    After each `periods[m]` own steps worker m hands in Δ_m = (where it started) - θ_m; the keeper moves Θ by the outer
    step on it, one worker after another within a tick, and then all who handed in start again from the same Θ: the
    paper's grace period is one tick. DyLU is `periods[m]` = ⌊pace_m · H⌋.
    """
    anchor = [tensor.clone() for tensor in theta]
    start = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    done = [0] * workers
    for tick in range(1, steps + 1):
        handed_in: list[int] = []
        for m in range(workers):
            if math.floor(tick * paces[m]) > math.floor((tick - 1) * paces[m]):
                done[m] += 1
                inner_step(m, done[m], live[m])
                if done[m] % periods[m] == 0:
                    for i in range(len(anchor)):
                        anchor[i] = anchor[i] - outer(start[m][i] - live[m][i], state[i])
                    handed_in.append(m)
        for m in handed_in:
            for i in range(len(anchor)):
                start[m][i] = anchor[i]
                live[m][i].copy_(anchor[i])
    return anchor, live


def decoupled(  # noqa: PLR0913 (one argument for each symbol of the paper)
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    period: int,
    fragments: list[list[int]],
    paces: Sequence[Fraction],
    tokens_per_step: int,
    quorum: int,
    grace: int,
    merge: MergeDeltas,
    outer: Outer,
) -> Result:
    """Decoupled DiLoCo (arXiv 2604.21428): the keeper closes a fragment's round once a quorum of workers has joined it.

    With t_p = ⌊pH/P⌋, worker m pushes its live θ_p after t_p + H, t_p + 2H, ... own steps, with weight
    w = tokens · tokens / steps of its own since it last received p. At the end of a tick the keeper lets what was
    pushed join the open round of p, in worker order; a worker that has not been answered yet does not push again. The
    round closes when all have joined, or `grace` ticks after the tick in which `quorum` had; without grace, at the very
    push that made the quorum, so that the next push of the same tick opens the next round. All are answered alike at
    the end of the tick. Closing, from the pushes in worker order: D_m = Θ_p - θ_p; G = `merge` of D and w;
    Θ_p ← Θ_p - outer step on G. Those who joined find Θ_p after their next own step, once what is due then has been
    pushed, and write it over θ_p, dropping what they learned since the push.

    In the paper a push that comes after the round has closed is dropped; here it joins the next. Its grace period is
    adaptive.
    """
    anchor = [tensor.clone() for tensor in theta]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[dict[str, Any]] = [{} for _ in theta]
    done = [0] * workers
    since_received = [[0 for _ in fragments] for _ in range(workers)]
    joined: list[dict[int, tuple[list[Tensor], float]]] = [{} for _ in fragments]
    quorum_at: dict[int, int] = {}
    replies: list[dict[int, list[Tensor]]] = [{} for _ in range(workers)]

    def close(p: int) -> None:
        members = sorted(joined[p])
        weights = [joined[p][m][1] for m in members]
        for j, i in enumerate(fragments[p]):
            g = merge([anchor[i] - joined[p][m][0][j] for m in members], weights)
            anchor[i] = anchor[i] - outer(g, state[i])
        answered.extend((m, p) for m in members)
        joined[p].clear()
        quorum_at.pop(p, None)

    answered: list[tuple[int, int]] = []
    for tick in range(1, steps + 1):
        pushed: list[tuple[int, int, list[Tensor], float]] = []
        for m in range(workers):
            if math.floor(tick * paces[m]) > math.floor((tick - 1) * paces[m]):
                done[m] += 1
                inner_step(m, done[m], live[m])
                for p, fragment in enumerate(fragments):
                    since_received[m][p] += 1
                    since = done[m] - p * period // len(fragments)
                    waits = m in joined[p] or p in replies[m]
                    if since >= period and since % period == 0 and not waits:
                        tokens = tokens_per_step * since_received[m][p]
                        weight = tokens * tokens / since_received[m][p]
                        pushed.append((p, m, [live[m][i].clone() for i in fragment], weight))
                for p, reply in replies[m].items():
                    for i, tensor in zip(fragments[p], reply, strict=True):
                        live[m][i].copy_(tensor)
                    since_received[m][p] = 0
                replies[m].clear()
        for p, m, values, weight in pushed:
            joined[p][m] = (values, weight)
            if len(joined[p]) >= quorum:
                quorum_at.setdefault(p, tick)
                if grace == 0:
                    close(p)
        for p in range(len(fragments)):
            if len(joined[p]) == workers or (p in quorum_at and tick - quorum_at[p] >= grace):
                close(p)
        for m, p in answered:
            replies[m][p] = [anchor[i] for i in fragments[p]]
        answered.clear()
    return anchor, live


def weighted_mean(deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Σ w_m D_m / Σ w_m, both sums in worker order, one division."""
    total, weight = deltas[0] * weights[0], weights[0]
    for d, w in zip(deltas[1:], weights[1:], strict=True):
        total, weight = total + d * w, weight + w
    return total / weight


def radial_directional(deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Decoupled DiLoCo's radial-directional average of one tensor: the mean length in the mean direction.

    (Σ w|D_m| / Σ w) · φ(Σ w φ(D_m) / Σ w), φ(a) = a / |a|, φ(0) = 0. The formula as printed seems to lack the norm bars
    of the first factor.
    """

    def norm(a: Tensor) -> Tensor:
        return (a * a).sum().sqrt()

    def direction(a: Tensor) -> Tensor:
        return a / norm(a) if norm(a) > 0 else a

    radius = weighted_mean([norm(d) for d in deltas], weights)
    return direction(weighted_mean([direction(d) for d in deltas], weights)) * radius
