"""Gossip: workers meet in groups, in pairs or all together, and each keeps an anchor and an outer state of its own.

Who meets is given round by round, rounds counted from 0, as a list of groups of worker numbers: every member of a group
gets the group's mean, and a worker in no group keeps what it has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.testing.reference.contract import InnerStep, Outer, Result, mean

Groups = list[tuple[int, ...]]


def mixed(values: list[Tensor], groups: Groups) -> list[Tensor]:
    """W · values for the groups' doubly stochastic W: worker m's entry is the mean of its group, or its own value."""
    result = list(values)
    for group in groups:
        average = mean([values[m] for m in sorted(group)])
        for m in group:
            result[m] = average
    return result


def factored_gossip(  # noqa: PLR0913 (one argument for each symbol of the paper)
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    period: int,
    mix1: Callable[[int], Groups],
    mix2: Callable[[int, int], Groups],
    outer: Outer,
) -> Result:
    """Factored Gossip DiLoCo (arXiv 2606.22768): Mix1 averages points behind the inner steps, Mix2 averages deltas.

    z_m is worker m's point after an outer step. In round r it trains at once from z_m[r-1], while Mix1 turns the points
    into x[r] = W1[r] z[r-1]; then D_m = z_m[r-1] - θ_m, Mix2 makes W2[r] D of the deltas, and the outer rule, whose
    state stays with the worker, moves the mixed base: z_m[r] = x_m[r] - step. The shared model is the mean of z.

    Args: mix1: the groups of W1 by round, first asked for round 1, as all points are equal before. mix2: the groups of
    W2 by round and index of the tensor; those of a form that mixes a subset are empty for the other tensors.
    """
    z = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[list[dict[str, Any]]] = [[{} for _ in theta] for _ in range(workers)]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            r = step // period - 1
            met = mix1(r) if r > 0 else []
            for i in range(len(theta)):
                x = mixed([z[m][i] for m in range(workers)], met)
                delta = mixed([z[m][i] - live[m][i] for m in range(workers)], mix2(r, i))
                for m in range(workers):
                    z[m][i] = x[m] - outer(delta[m], state[m][i])
                    live[m][i].copy_(z[m][i])
    return [mean([z[m][i] for m in range(workers)]) for i in range(len(theta))], live


def blocking_gossip(  # noqa: PLR0913 (one argument for each symbol of the paper)
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    period: int,
    mix1: Callable[[int], Groups],
    mix2: Callable[[int, int], Groups],
    outer: Outer,
) -> Result:
    """Factored Gossip without overlap: training waits for Mix1, so that round r starts from x[r] = W1[r] z[r-1].

    Deltas are measured from x, the workers' anchors, and the shared model is their mean. Mix1 after the outer step of
    round r is `mix1(r + 1)`, as in `factored_gossip`.
    """
    x = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[list[dict[str, Any]]] = [[{} for _ in theta] for _ in range(workers)]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            r = step // period - 1
            met = mix1(r + 1)
            for i in range(len(theta)):
                delta = mixed([x[m][i] - live[m][i] for m in range(workers)], mix2(r, i))
                z = [x[m][i] - outer(delta[m], state[m][i]) for m in range(workers)]
                for m, point in enumerate(mixed(z, met)):
                    x[m][i] = point
                    live[m][i].copy_(point)
    return [mean([x[m][i] for m in range(workers)]) for i in range(len(theta))], live


def noloco(  # noqa: PLR0913 (one argument for each symbol of the paper)
    theta: list[Tensor],
    *,
    workers: int,
    steps: int,
    inner_step: InnerStep,
    period: int,
    pairs: Callable[[int], Groups],
    lr: float,
    momentum: float,
    pull: float,
) -> Result:
    """NoLoCo (arXiv 2506.10911): pairs average deltas and pull their anchors φ together inside the momentum.

    u_m ← μu_m + ηΔ̄ + γ(φ_m - φ̄), both means over the pair; φ_m ← φ_m - u_m, heavy ball without a look-ahead. In the
    paper's sign the momentum is -u and the delta θ - φ. A worker without a partner is a pair by itself, so nothing
    pulls it. The shared model is the mean of φ.

    The authors' code re-wires pipeline stages between replicas during inner steps as well; there are no stages here.
    """
    phi = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    u = [[torch.zeros_like(tensor) for tensor in theta] for _ in range(workers)]
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            met = pairs(step // period - 1)
            for i in range(len(theta)):
                delta = mixed([phi[m][i] - live[m][i] for m in range(workers)], met)
                center = mixed([phi[m][i] for m in range(workers)], met)
                for m in range(workers):
                    u[m][i] = (u[m][i] * momentum + delta[m] * lr) + (phi[m][i] - center[m]) * pull
                    phi[m][i] = phi[m][i] - u[m][i]
                    live[m][i].copy_(phi[m][i])
    return [mean([phi[m][i] for m in range(workers)]) for i in range(len(theta))], live
