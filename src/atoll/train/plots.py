"""Pictures of runs: held-out loss of the shared model against inner steps and against bytes."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.train.metrics import size
from atoll.train.run import Result

Curve = tuple[tuple[int, int, float], ...]
"""(inner steps, bytes sent per worker, loss) along a run: `Result.curve`."""


def plot_curves(path: Path, groups: Mapping[str, Sequence[Result]]) -> None:
    """Draw one line for each group of runs that differ in their seed only: the mean, with a band from the lowest to
    the highest.

    Args: path: of the PNG; groups: by label, as the legend shows it.
    """
    # Here, because matplotlib takes a second to import; its object interface, because pyplot is global and may want a
    # display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
    for index, (label, results) in enumerate(groups.items()):
        look = {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[index // 10 % 3]}
        steps, sent, mean, low, high = _summary([result.curve for result in results])
        by_steps.plot(steps, mean, label=label, linewidth=1.8, **look)
        by_steps.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
        moved = [at for at, count in enumerate(sent) if count > 0]
        if moved:
            at = [sent[i] for i in moved]
            by_bytes.plot(at, [mean[i] for i in moved], marker=".", linewidth=1.8, **look)
            by_bytes.fill_between(
                at, [low[i] for i in moved], [high[i] for i in moved], color=look["color"], alpha=0.2, linewidth=0
            )
        elif mean:
            by_bytes.axhline(mean[-1], linewidth=1.2, alpha=0.8, **look)
            by_bytes.annotate(
                f"{label}: no bytes",
                (0.01, mean[-1]),
                xycoords=("axes fraction", "data"),
                va="bottom",
                fontsize=8,
                color=look["color"],
            )
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(lambda count, _: size(count))
    by_steps.set_xlabel("inner steps of a worker")
    by_bytes.set_xlabel("bytes sent per worker")
    by_steps.set_ylabel("held-out loss of the shared model, nats per token")
    for axes in (by_steps, by_bytes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    by_steps.set_ylim(*_heights(groups))
    by_steps.legend(frameon=False)
    if any(len(results) > 1 for results in groups.values()):
        figure.suptitle("lines: mean over seeds; bands: lowest to highest", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        figure.savefig(beside, dpi=140, format="png")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _heights(groups: Mapping[str, Sequence[Result]]) -> tuple[float | None, float | None]:
    """The part of the losses that is worth seeing: the steep first fifth of every run may leave the picture at its
    top."""
    curves = [result.curve for results in groups.values() for result in results]
    tops = [loss for curve in curves for _, _, loss in curve[len(curve) // 5 :] if math.isfinite(loss)]
    if not tops or min(tops) == max(tops):
        return None, None
    margin = 0.05 * (max(tops) - min(tops))
    return min(tops) - margin, max(tops) + margin


def _summary(curves: Sequence[Curve]) -> tuple[list[int], list[int], list[float], list[float], list[float]]:
    """Steps, bytes, and mean, lowest and highest loss, point by point; curves of different length are cut to the
    shortest."""
    points = list(zip(*curves, strict=False))
    losses = [[loss for _, _, loss in point] for point in points]
    return (
        [point[0][0] for point in points],
        [point[0][1] for point in points],
        [sum(each) / len(each) for each in losses],
        [min(each) for each in losses],
        [max(each) for each in losses],
    )
