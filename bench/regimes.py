"""Where DiLoCo closes the gap between one worker and data-parallel training, and where it loses: one thing varied at a
time.

    python -m bench.regimes [rounds] [start] [batch] [momentum]      writes runs/regimes/NAME.json and
    docs/pictures/regimes.png

Everything is a comparison as `atoll compare` makes it; a run that is finished is not repeated. One seed, so read
trends, not digits.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.cli.compare import compare, entries, side_by_side_at_most
from atoll.cli.options import Options
from atoll.cli.specs import rows
from atoll.train.run import Result

OUT = Path("runs/regimes")
BASE = Options(steps=600, lr=3e-3)
PERIOD = 20
PAPER, CALM = "diloco", "diloco:outer_momentum=0.5"
BASELINES = ["single", "data-parallel"]
Point = dict[str, float]


def losses(name: str, specs: Sequence[str], options: Options) -> Point:
    """Held-out loss of the shared model for each row, by its label."""
    out = OUT / name
    planned = entries(rows(list(specs), options, PERIOD), seeds=1, out=out)
    jobs = side_by_side_at_most([entry.run for entry in planned], None)
    results: dict[str, list[Result]] = compare(planned, out, jobs=jobs, resume=True, save_every=options.steps)
    return {label: each[0].val_loss for label, each in results.items()}


def rounds() -> dict[float, Point]:
    """Rounds in the run: more steps at the same period."""
    return {
        steps / PERIOD: losses(f"rounds-{steps}", [*BASELINES, PAPER, CALM], replace(BASE, steps=steps))
        for steps in (100, 300, 600, 1200)
    }


def start() -> dict[float, Point]:
    """Inner steps that one worker trained before: the warm-up begins again, the outer momentum at zero."""
    points = {0: losses("start-0", [*BASELINES, PAPER, CALM], BASE)}
    for steps in (400, 1600):
        losses(f"pretrain-{steps}", ["single"], replace(BASE, steps=steps, seed=1))
        model = OUT / f"pretrain-{steps}" / "single" / "seed-1" / "model"
        points[steps] = losses(f"start-{steps}", [*BASELINES, PAPER, CALM], replace(BASE, init=str(model)))
    return points


def batch() -> dict[float, Point]:
    """Sequences per worker and step."""
    return {size: losses(f"batch-{size}", [*BASELINES, PAPER, CALM], replace(BASE, batch=size)) for size in (2, 8, 24)}


def momentum() -> dict[float, Point]:
    """Outer momentum, at the paper's outer learning rate."""
    values = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
    labels = {value: f"diloco:outer_momentum={value}" for value in values}
    found = losses("momentum", [*BASELINES, *labels.values()], BASE)
    return {
        value: {name: found[name] for name in BASELINES} | {"diloco": found[label]} for value, label in labels.items()
    }


SWEEPS: dict[str, tuple[str, Callable[[], dict[float, Point]]]] = {
    "rounds": ("rounds (20 inner steps each)", rounds),
    "start": ("inner steps of one worker before", start),
    "batch": ("sequences per worker and step", batch),
    "momentum": ("outer momentum", momentum),
}


def closed(point: Point, label: str) -> float:
    """Part of the way from single to data-parallel; below 0 it is worse than one worker alone."""
    return (point["single"] - point[label]) / (point["single"] - point["data-parallel"])


def show(names: Sequence[str]) -> None:
    """Run the sweeps, print a table for each, and draw all that have been run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name in names:
        axis, sweep = SWEEPS[name]
        points = sweep()
        (OUT / f"{name}.json").write_text(json.dumps(points, indent=1) + "\n")
        labels = [label for label in next(iter(points.values())) if label not in BASELINES]
        print(f"\n| {axis} | single | data-parallel | " + " | ".join(f"{label}, closed" for label in labels) + " |")
        print("|---" * (3 + len(labels)) + "|")
        for value, point in points.items():
            cells = [f"{point[label]:.3f}, {closed(point, label):+.0%}" for label in labels]
            print(
                f"| {value:g} | {point['single']:.3f} | {point['data-parallel']:.3f} | " + " | ".join(cells) + " |",
                flush=True,
            )
    drawn = [name for name in SWEEPS if (OUT / f"{name}.json").exists()]
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4 * len(drawn), 3.4), sharey=True, squeeze=False)
    for name, ax in zip(drawn, axes[0], strict=True):
        points = {float(value): point for value, point in json.loads((OUT / f"{name}.json").read_text()).items()}
        for label in [label for label in next(iter(points.values())) if label not in BASELINES]:
            ax.plot(list(points), [closed(point, label) for point in points.values()], marker="o", label=label)
        ax.axhline(0, color="grey", linewidth=0.8)
        ax.axhline(1, color="grey", linewidth=0.8)
        ax.set_xlabel(SWEEPS[name][0])
        ax.legend(fontsize=7)
        if name in ("rounds", "batch"):
            ax.set_xscale("log")
            ax.set_xticks(list(points), [f"{value:g}" for value in points], minor=False)
            ax.minorticks_off()
    axes[0][0].set_ylabel("part of the gap closed\n0: one worker, 1: data-parallel")
    axes[0][0].set_ylim(-1, 1.1)
    target = Path("docs/pictures/regimes.png")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    show(sys.argv[1:] or list(SWEEPS))
