"""Pictures of runs: held-out loss of the shared model against inner steps and against bytes, and how far workers are
from one another."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.files import write_whole
from atoll.train.metrics import size
from atoll.train.run import Result


@dataclass(frozen=True)
class _Band:
    """Runs that differ in their seed only, point by point: steps, bytes, and mean, lowest and highest loss; simulated
    seconds, mean over the runs, if time was simulated."""

    steps: Sequence[int]
    sent: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    seconds: Sequence[float]

    @staticmethod
    def of(results: Sequence[Result]) -> "_Band":
        """Points where a loss is not finite are left out; curves of different length are cut to the shortest."""
        times = [result.simulated.times if result.simulated else (0.0,) * len(result.curve) for result in results]
        points = [
            (steps, sent, [loss for _, _, loss in point], sum(seconds) / len(seconds))
            for point, seconds in zip(
                zip(*(result.curve for result in results), strict=False), zip(*times, strict=False), strict=False
            )
            for steps, sent, _ in point[:1]
            if all(math.isfinite(loss) for _, _, loss in point)
        ]
        return _Band(
            [steps for steps, *_ in points],
            [sent for _, sent, *_ in points],
            [sum(losses) / len(losses) for _, _, losses, _ in points],
            [min(losses) for _, _, losses, _ in points],
            [max(losses) for _, _, losses, _ in points],
            [seconds for *_, seconds in points],
        )

    def draw(self, axes: Any, x: Sequence[float], first: int, look: Mapping[str, Any]) -> None:
        """The line with its band over `x`, from point `first` on."""
        axes.plot(x[first:], self.mean[first:], linewidth=1.8, **look)
        axes.fill_between(x[first:], self.low[first:], self.high[first:], color=look["color"], alpha=0.2, linewidth=0)


def plot_curves(path: Path, groups: Mapping[str, Sequence[Result]]) -> None:
    """Draw one line for each group of runs that differ in their seed only, with a band from the lowest to the highest.

    The first picture goes by simulated seconds where time was simulated, else by inner steps. The third is there if
    workers were compared: the Jensen-Shannon distance of their predictions at the end of each round, mean over seeds.

    Args: path: of the PNG; groups: by label, as the legend shows it.
    """
    # Here, because it takes a second to import; not pyplot, because that is global and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    simulated = any(result.simulated for results in groups.values() for result in results)
    compared = any(result.disagreement for results in groups.values() for result in results)
    figure = Figure(figsize=(18 if compared else 13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(1, 3 if compared else 2))
    by_steps, by_bytes = places[:2]
    by_bytes.sharey(by_steps)
    bands = {label: _Band.of(results) for label, results in groups.items()}
    for index, (label, band) in enumerate(bands.items()):
        look = {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[index // 10 % 3]}
        band.draw(by_steps, band.seconds if simulated else band.steps, 0, {**look, "label": label})
        first = next((at for at, sent in enumerate(band.sent) if sent), None)
        if first is not None:
            by_bytes.set_xscale("log")
            band.draw(by_bytes, band.sent, first, {**look, "marker": "."})
        elif band.mean:
            by_bytes.axhline(band.mean[-1], linewidth=1.2, alpha=0.8, **look)
            where = {"xy": (0.01, band.mean[-1]), "xycoords": ("axes fraction", "data"), "va": "bottom"}
            by_bytes.annotate(f"{label}: no bytes", **where, fontsize=8, color=look["color"])
        for apart in places[2:]:
            points = list(zip(*(result.disagreement for result in groups[label]), strict=False))
            distances = [sum(js for _, js, _ in point) / len(point) for point in points]
            apart.plot([point[0][0] for point in points], distances, linewidth=1.4, **look)
    for apart in places[2:]:
        apart.set_xlabel("inner steps of a worker")
        apart.set_ylabel("Jensen-Shannon distance between workers, end of round")
    by_steps.set_xlabel("simulated seconds" if simulated else "inner steps of a worker")
    by_bytes.set_xlabel("bytes sent per worker")
    by_bytes.xaxis.set_major_formatter(lambda count, _: size(count))
    by_steps.set_ylabel("held-out loss of the shared model, nats per token")
    by_steps.set_ylim(*_heights(list(bands.values())))
    by_steps.legend(frameon=False)
    for axes in places:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if any(len(results) > 1 for results in groups.values()):
        figure.suptitle("lines: mean over seeds; bands: lowest to highest", fontsize=9)
    write_whole(path, lambda beside: figure.savefig(beside, dpi=140, format="png"))


def _heights(bands: Sequence[_Band]) -> tuple[float | None, float | None]:
    """What is worth seeing: the steep first fifth of every run may leave the picture at its top."""
    seen = [loss for band in bands for each in (band.low, band.high) for loss in each[len(each) // 5 :]]
    if not seen or min(seen) == max(seen):
        return None, None
    margin = 0.05 * (max(seen) - min(seen))
    return min(seen) - margin, max(seen) + margin
