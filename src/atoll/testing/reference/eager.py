"""Eager updates: the others' deltas one round late, one's own at once."""

from typing import Any

from torch import Tensor

from atoll.testing.reference.contract import InnerStep, Outer, Result, mean


def eager(theta: list[Tensor], *, workers: int, steps: int, inner_step: InnerStep, period: int, outer: Outer) -> Result:
    """Eager updates (arXiv 2502.12996): round r's deltas travel through the whole of round r + 1.

    At the end of round r worker m knows its own new delta and the mean of the old ones, which it brings up to date:
    g_m = Δ̄[r-1] + (Δ_m[r] - Δ_m[r-1]) / M. As g_m differs between workers, so do anchors Θ_m and outer states, and
    Δ_m = Θ_m - θ_m is measured from the worker's own. The shared model is the mean of the anchors.

    In the first round, of which the sources say nothing, the others count as zero: g_m = Δ_m[0] / M.
    """
    anchor = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    live = [[tensor.clone() for tensor in theta] for _ in range(workers)]
    state: list[list[dict[str, Any]]] = [[{} for _ in theta] for _ in range(workers)]
    before: list[list[Tensor]] = []
    for step in range(1, steps + 1):
        for m in range(workers):
            inner_step(m, step, live[m])
        if step % period == 0:
            delta = [[anchor[m][i] - live[m][i] for i in range(len(theta))] for m in range(workers)]
            for i in range(len(theta)):
                for m in range(workers):
                    if before:
                        own = (delta[m][i] - before[m][i]) / workers
                        g = mean([before[n][i] for n in range(workers)]) + own
                    else:
                        g = delta[m][i] / workers
                    anchor[m][i] = anchor[m][i] - outer(g, state[m][i])
                    live[m][i].copy_(anchor[m][i])
            before = delta
    return [mean([anchor[m][i] for m in range(workers)]) for i in range(len(theta))], live
