"""What `atoll plan` shows: tables and sentences, JSON, and utilisation against bandwidth."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from atoll.cli import plan
from atoll.cli.options import Planning
from atoll.cli.plan import Budget, Change, Row
from atoll.cli.show import json_line
from atoll.files import write_whole
from atoll.sim.layers import GRID
from atoll.sim.plan import TARGETS, Planned, Setting, curve, exchanged
from atoll.sim.plan import plan as planned
from atoll.train.metrics import duration, size

T = TypeVar("T")


def show(words: Sequence[str], asked: Planning, stdout: TextIO) -> None:
    """Plan the methods of `words`, each METHOD or METHOD:KEY=VALUE,..., and say what comes of them.

    Raises: UsageError, CompositionError for what cannot be planned.
    """
    where = plan.setting(asked)
    rows = plan.rows(words, asked.period)
    for row in rows:
        plan.check(row, where)
    found = [planned(row.label, row.strategy, row.period, where) for row in _watched(rows, "planning")]
    tries = [(row.label, tried) for row in rows for tried in plan.tries(row)]
    now = {each.method: each for each in found}
    tried = [(label, plan.change(each, now[label], where)) for label, each in _watched(tries, "trying changes")]
    helps = {row.label: plan.best_first([each for label, each in tried if label == row.label]) for row in rows}
    console = _console(sys.stderr if asked.json else stdout)
    console.print(table(found, asked, where))
    for each in found:
        console.print(in_words(each, helps[each.method], asked, where), highlight=False)
    if asked.out:
        plot(asked.out, _watched(rows, "drawing"), now, where)
        print(f"{asked.out} shows utilisation against bandwidth", file=sys.stderr)
    if asked.json:
        print(json_line([as_json(each, helps[each.method], asked, where) for each in found]), file=stdout)


def _watched(each: Sequence[T], doing: str) -> Iterable[T]:
    """The same, with a bar for whoever watches."""
    return track(each, doing, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _console(shows: TextIO) -> Console:
    return Console(file=shows, width=None if shows.isatty() else 160)


def table(each: Sequence[Planned], asked: Planning, where: Setting) -> Table:
    """Methods side by side, for people."""
    far = f"{asked.latency:g} ms one way, " if asked.latency else ""
    shown = Table(
        caption=f"{where.workers} islands, {_speed(where.bandwidth)} each, {far}{where.step_s:.3g} s per inner step. "
        "bytes: that a worker sends. needed: bandwidth of each island for that utilisation.",
        caption_justify="left",
    )
    columns = ["method", "utilisation", "per round", "bytes per round"]
    columns += [f"needed for {target:.0%}" for target in TARGETS]
    columns += ["wall time", "traffic of a worker"] if asked.tokens else []
    for column in columns:
        shown.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for one in each:
        cells = [
            one.method,
            f"{one.utilisation:.1%}",
            duration(one.step_s * one.period),
            size(one.nbytes * one.period),
        ]
        cells += [rate(one.needed[target]) for target in TARGETS]
        if budget := Budget.of(one, asked):
            cells += [duration(budget.wall_s), size(budget.nbytes)]
        shown.add_row(*cells)
    return shown


def _speed(bits: float) -> str:
    return rate(bits) if bits < math.inf else "no limit"


def rate(bits: float | None) -> str:
    """Bits per second for people; 0 where any link will do, None where none does.

    Example:
        >>> rate(1.5e8), rate(0.0), rate(None)
        ('150 Mbit/s', 'any', 'none')
    """
    if not bits:
        return "none" if bits is None else "any"
    for unit in ("", "k", "M", "G"):
        if bits < 1000:
            return f"{bits:.3g} {unit}bit/s"
        bits /= 1000
    return f"{bits:.4g} Tbit/s"


def in_words(each: Planned, helps: Sequence[Change], asked: Planning, where: Setting) -> str:
    """What a method comes to, and what to change first."""
    budget = Budget.of(each, asked)
    said = "what helps, in time alone (loss may suffer):" if helps else "nothing that was tried helps"
    lines = [f"{each.method}: {_part(each.utilisation)} now{_rounds(each, where)}; {said}"]
    told = [(change.what, _helps(change, each, budget)) for change in helps]
    return "\n".join([*lines, *(f"  {what}: {helps}" for what, helps in told if helps)])


def _helps(change: Change, now: Planned, budget: Budget | None) -> str:
    told = [f"{_part(change.utilisation)}, {100 * change.gain:+.1f} points"] if change.gain >= plan.LEAST else []
    if change.share is not None and now.exchanged:
        told.append(f"{_part(change.share)} of the rounds, {100 * (change.share - now.exchanged.share):+.1f} points")
    saved = budget.steps * (now.step_s - change.step_s) if budget else 0.0
    if saved > 0:
        told.append(f"saves {duration(saved)}")
    return ", ".join(told)


def _rounds(each: Planned, where: Setting) -> str:
    """How often rounds come about where nobody waits for them."""
    heard = each.exchanged
    if heard is None:
        return ""
    if heard.age == math.inf:
        return f": nobody waits, but nothing comes back within {round(1 / heard.share)} rounds"
    comes = f"an anchor comes back after {heard.age:,.0f} inner steps on average"
    if heard.share > 0.999:
        return f": nobody waits, all rounds are exchanged, and {comes}"
    full = 8 * each.nbytes / heard.share * where.workers / where.step_s
    return (
        f": nobody waits, but only {_part(heard.share)} of the rounds are exchanged, because {comes} (for all of them "
        f"the keeper's link would have to carry {rate(full)})"
    )


def _part(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def as_json(each: Planned, helps: Sequence[Change], asked: Planning, where: Setting) -> dict[str, Any]:
    """One method as a JSON-able object."""
    budget = Budget.of(each, asked)
    heard = each.exchanged
    return {
        "method": each.method,
        "bandwidth_bps": where.bandwidth,
        "utilisation": each.utilisation,
        "period": each.period,
        "inner_step_s": where.step_s,
        "round_s": each.step_s * each.period,
        "bytes_per_worker_and_round": each.nbytes * each.period,
        "needed_bps": {f"{target:g}": bits for target, bits in each.needed.items()},
        "exchanged": heard and {"part_of_rounds": heard.share, "age_steps": heard.age},
        "changes": [
            {
                "what": change.what,
                "utilisation": change.utilisation,
                "gain": change.gain,
                "part_of_rounds": change.share,
                "saved_s": budget and budget.steps * (each.step_s - change.step_s),
            }
            for change in helps
        ],
        **({"steps": budget.steps, "wall_s": budget.wall_s, "bytes_per_worker": budget.nbytes} if budget else {}),
    }


def plot(path: Path, rows: Iterable[Row], now: Mapping[str, Planned], where: Setting) -> None:
    """Utilisation against bandwidth, a line for each method; the part of the rounds where nobody waits.

    Args: rows; now: what each comes to, by label: the bandwidths that they need say what is drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = _points(now.values(), where)
    for row in rows:
        if now[row.label].exchanged:
            few = points[::4]
            heard = [exchanged(row.strategy, row.period, replace(where, bandwidth=bits)) for bits in few]
            drawn = [each.share if each.age < math.inf else 0.0 for each in heard]
            axes.plot([bits / 1e6 for bits in few], drawn, "--", label=f"{row.label}: part of the rounds")
        else:
            by_bandwidth = curve(row.strategy, row.period, where)
            axes.plot([bits / 1e6 for bits in points], [by_bandwidth.at(bits) for bits in points], label=row.label)
    if where.bandwidth < math.inf:
        axes.axvline(where.bandwidth / 1e6, color="0.6", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("bandwidth of each island, Mbit/s")
    axes.set_ylabel("part of the time that islands train")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write_whole(path, lambda beside: figure.savefig(beside, dpi=140, format="png"))


def _points(each: Iterable[Planned], where: Setting) -> list[float]:
    """Bandwidths from where everyone waits to where nobody does, and a little on both sides."""
    known = [bits for one in each for bits in one.needed.values() if bits]
    known += [where.bandwidth] if where.bandwidth < math.inf else []
    low, high = math.log10(min(known, default=1e6)) - 1, math.log10(max(known, default=1e10)) + 0.5
    return [10 ** (low + (high - low) * place / 40) for place in range(41)]


def show_paper(name: str, stdout: TextIO, *, json: bool) -> None:
    """A published table beside ours, and how well they agree: for people, or all rows as JSON."""
    console = _console(sys.stderr if json else stdout)
    with Console(stderr=True).status("simulating") if sys.stderr.isatty() else nullcontext():
        rows = list(plan.paper(name))
    shown, sentence = (gossip_table if name == "factored-gossip" else cells_table)(rows)
    console.print(shown)
    console.print(sentence, highlight=False)
    if json:
        print(json_line(rows), file=stdout)


def gossip_table(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, str]:
    """Utilisations, and a sentence."""
    shown = Table()
    worse = f"with {1e3 * plan.FAR:g} ms and {plan.SHAKY:.0%} jitter"
    for column in ("method", "bandwidth", "ours", "published", "difference, points", worse):
        shown.add_column(column, justify="left" if column == "method" else "right")
    apart = [100 * (row["utilisation"] - row["published"]) for row in rows]
    for row, points in zip(rows, apart, strict=True):
        shown.add_row(
            row["method"],
            rate(row["bandwidth_bps"]),
            f"{row['utilisation']:.1%}",
            f"{row['published']:.0%}",
            f"{points:+.1f}",
            f"{row['utilisation_with_latency_and_jitter']:.1%}",
        )
    equal = sum(round(row["utilisation"], 2) == row["published"] for row in rows)
    return shown, (
        f"{equal} of {len(rows)} figures are the published ones to the percent; the largest difference is "
        f"{max(map(abs, apart)):.2f} points."
    )


def cells_table(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, str]:
    """Bandwidths, and a sentence."""
    targets = sorted({row["utilisation"] for row in rows})
    shown = Table(caption="Gbit/s that reach a utilisation: ours / published (points of the grid that ours is above).")
    for column in ("parameters", "method", *(f"{target:.0%}" for target in targets)):
        shown.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for line in _lines(rows, len(targets)):
        shown.add_row(f"{line[0]['model_parameters']:.3g}", line[0]["method"], *map(_cell, line))
    apart = [abs(row["points_apart"]) for row in rows]
    one, two = (sum(each <= most for each in apart) for most in (1, 2))
    return shown, (
        f"{sum(not each for each in apart)} of {len(rows)} cells are the same point of the grid, {one} lie within one "
        f"point and {two} within two (a point is a factor of {GRID[1] / GRID[0]:.3g})."
    )


def _lines(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    return (rows[start : start + width] for start in range(0, len(rows), width))


def _cell(row: Mapping[str, Any]) -> str:
    ours, theirs = (f"{bits / 1e9:.1f}" if bits else "1000+" for bits in (row["bandwidth_bps"], row["published"]))
    apart = row["points_apart"]
    return f"{ours} / {theirs}" + (f" ({apart:+d})" if apart else "")
