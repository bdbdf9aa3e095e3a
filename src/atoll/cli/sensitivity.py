"""`atoll sensitivity DIR`: blocks of a model by how much they keep workers apart: a table, a picture and a mixer."""

import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from atoll.cli.options import Measuring
from atoll.cli.show import json_line
from atoll.files import write_whole
from atoll.train.metrics import size
from atoll.train.sensitivity import Sensitivity, sensitivity


def measure(out: Path, measuring: Measuring, stdout: TextIO) -> None:
    """Measure the run in `out`, write its `sensitivity.png`, and print the table and the selection, or the JSON."""
    with Console(stderr=True).status("") as status:
        found = sensitivity(out, tokens=measuring.tokens, share=measuring.share, told=status.update)
    picture = out / "sensitivity.png"
    plot(picture, found)
    shows = sys.stderr if measuring.json else stdout
    Console(file=shows, width=None if shows.isatty() else 110).print(table(found))
    print(f"{picture} shows the drops", file=sys.stderr)
    print(in_words(found), file=shows)
    if measuring.json:
        print(json_line(as_json(found)), file=stdout)


def selection(found: Sensitivity) -> str:
    """The mixer that mixes what was selected, as Python."""
    quoted = [f'"{pattern}"' for pattern in patterns_of(found)]
    return f"only(({', '.join(quoted)}{',' * (len(quoted) == 1)}), pairs(seed=0))"


def patterns_of(found: Sensitivity) -> list[str]:
    """Shell-style patterns that match the selected parameters and no others."""
    return [pattern for block in found.chosen for pattern in block.patterns]


def in_words(found: Sensitivity) -> str:
    """What the selection comes to, and the line that makes it."""
    nbytes = sum(block.nbytes for block in found.chosen)
    return (
        f"the distance between {found.workers} workers at step {found.step} is {found.distance:.4f}, and "
        f"{found.left[-1]:.4f} with this selection mixed ({found.part:.1%} of the parameters, {size(nbytes)}):\n"
        f"{selection(found)}"
    )


def table(found: Sensitivity) -> Table:
    """All blocks, steepest drop per byte first."""
    taken = {block.name: place for place, block in enumerate(found.chosen)}
    caption = (
        f"drop: by how much the mean Jensen-Shannon distance between {found.workers} workers (base 2, all pairs, "
        f"{found.tokens} tokens of held-out text), {found.distance:.4f} as they are, falls when this block alone is "
        "replaced by its mean over workers. taken: in which order, each measured beside those before it, and the "
        "distance after it."
    )
    shown = Table(caption=caption, caption_justify="left")
    for column in ("block", "parameters", "size", "drop", "drop per MB", "taken", "distance\nthen"):
        name = column == "block"
        shown.add_column(column, justify="left" if name else "right", no_wrap=not name, overflow="fold")
    total = sum(drop.block.numel for drop in found.drops)
    for drop in found.drops:
        block, place = drop.block, taken.get(drop.block.name)
        shown.add_row(
            block.name,
            f"{block.numel:,} ({block.numel / total:.1%})",
            size(block.nbytes),
            f"{drop.drop:.4f}",
            f"{drop.per_megabyte:.3g}",
            "" if place is None else f"{place + 1}",
            "" if place is None else f"{found.left[place]:.4f}",
        )
    return shown


def as_json(found: Sensitivity) -> dict[str, Any]:
    """Everything that was measured, with stable names."""
    return {
        "step": found.step,
        "workers": found.workers,
        "tokens": found.tokens,
        "distance": found.distance,
        "blocks": [
            {
                "name": each.block.name,
                "parameters": each.block.numel,
                "nbytes": each.block.nbytes,
                "drop": each.drop,
                "drop_per_megabyte": each.per_megabyte,
            }
            for each in found.drops
        ],
        "selection": {
            "blocks": [block.name for block in found.chosen],
            "distances": found.left,
            "part": found.part,
            "patterns": patterns_of(found),
            "mixer": selection(found),
        },
    }


def plot(path: Path, found: Sensitivity) -> None:
    """Draw a bar for each block: the drop, and the drop per byte; selected blocks are darker."""
    # Here, because it takes a second to import; not pyplot, because that is global and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drops = found.drops[::-1]  # bars are drawn from the bottom
    figure = Figure(figsize=(13, 1.5 + 0.35 * len(drops)), layout="constrained")
    FigureCanvasAgg(figure)
    alone, per_byte = figure.subplots(1, 2, sharey=True)
    names = [drop.block.name for drop in drops]
    colors = ["C0" if drop.block in found.chosen else "0.75" for drop in drops]
    alone.barh(names, [drop.drop for drop in drops], color=colors)
    per_byte.barh(names, [drop.per_megabyte for drop in drops], color=colors)
    alone.set_xlabel(f"drop of the Jensen-Shannon distance between workers ({found.distance:.4f} as they are)")
    per_byte.set_xlabel("drop per MB")
    for axes in (alone, per_byte):
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"each block alone replaced by its mean over {found.workers} workers, step {found.step}; "
        f"blue: selected, {found.part:.1%} of the parameters",
        fontsize=10,
    )
    write_whole(path, lambda beside: figure.savefig(beside, dpi=140, format="png"))
