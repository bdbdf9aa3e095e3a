"""A picture of a simulated run: one lane per island, with what it did in a bar and what was in flight under it.

A run of more rounds than can be told apart gets two panels: a strip that shows how much of each round each island
trained, over the whole run, and the lanes of a part of it.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import UsageError
from atoll.files import write_whole
from atoll.sim.trace import Trace
from atoll.wire import Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people who see few colours can tell apart
TRAINS, WAITS = "#0072B2", "#D55E00"
RULES = ("#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
MARKS = {"lost": ("X", "black"), "late": ("D", "#F0E442"), "died": ("v", "#D55E00"), "joined": ("^", "#009E73")}
WHOLE, SHOWN = 12, 8
"""Rounds of a run that is shown whole, and of the part that is shown of a longer one."""
STRIP = 120
"""Columns of the strip at most."""
ROWS = 4
"""Exchanges of one rule at a time that are drawn beside one another; more share a row."""
UNITS = ((180, 1, "seconds"), (3 * 3600, 60, "minutes"), (4 * 86_400, 3600, "hours"), (math.inf, 86_400, "days"))
Span = tuple[float, float]


@dataclass
class Lane:
    """What one island did, as [from, to) in seconds: trained, waited, stood frozen, was away; what was in flight, by
    its key; and marks (time, kind) for what befell it."""

    trained: list[Span] = field(default_factory=list[Span])
    waited: list[Span] = field(default_factory=list[Span])
    frozen: list[Span] = field(default_factory=list[Span])
    away: list[Span] = field(default_factory=list[Span])
    flights: list[tuple[Key, Span]] = field(default_factory=list[tuple[Key, Span]])
    marks: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    _flying: dict[Key, float] = field(default_factory=dict[Key, float])
    _froze: float | None = None
    _gone: float | None = 0.0

    def tell(self, kind: str, key: Key | None, time: float, until: float) -> None:
        """A moment, in order of time. An exchange that its island waits for has left when the wait begins."""
        if key and kind in ("idle", "launched"):
            self._flying.setdefault(key, time)
        match kind:
            case "trained":
                self._gone = None
                if self.trained and math.isclose(self.trained[-1][1], time, rel_tol=1e-12):
                    time = self.trained.pop()[0]
                self.trained.append((time, until))
            case "idle":
                self.waited.append((time, until))
            case "landed" | "lost" if key:
                self.flights.append((key, (self._flying.pop(key, time), time)))
            case "froze":
                self._froze = time
            case "woke":
                self._thaw(time)
            case "died":
                self._stop(time)
                self._gone = time
            case "joined":
                self._stop(time)
                self._come(time)
            case _:
                pass
        if kind in MARKS:
            self.marks.append((time, kind))

    def close(self, ended: float, end: float) -> None:
        """The run is over: it ended at `ended` for this island, at `end` for all."""
        self._stop(end)
        self._come(end)
        if ended < end and not (self.away and self.away[-1][1] == end):
            self.away.append((ended, end))

    def _stop(self, time: float) -> None:
        """What was under way is no more."""
        self._thaw(time)
        self.flights += [(key, (start, time)) for key, start in self._flying.items()]
        self._flying.clear()

    def _thaw(self, time: float) -> None:
        """It stood frozen until now, which is no training."""
        if self._froze is not None:
            self.frozen.append((self._froze, time))
            parts = [part for a, b in self.trained[-1:] for part in ((a, min(b, self._froze)), (max(a, time), b))]
            self.trained[-1:] = [(start, stop) for start, stop in parts if start < stop]
            self._froze = None

    def _come(self, time: float) -> None:
        if self._gone is not None and self._gone < time:
            self.away.append((self._gone, time))
        self._gone = None


def lanes(trace: Trace) -> tuple[list[Lane], float]:
    """What each island did, and the seconds at which nothing happens any more."""
    found, end = [Lane() for _ in range(trace.islands)], 0.0
    for moment in trace.ordered():
        until = moment.time + moment.seconds
        found[moment.island].tell(moment.kind, moment.key, moment.time, until)
        end = max(end, moment.time if moment.kind == "trained" else until)
    end = max(end, trace.seconds)
    for lane, ended in zip(found, trace.ended, strict=True):
        lane.close(ended, end)
    return found, end


@dataclass(frozen=True)
class View:
    """Which part of a run is shown, from `start` to `stop` seconds, and why; `rounds`: where rounds of the busiest
    island begin, and the run's two ends."""

    start: float
    stop: float
    why: str
    rounds: Sequence[float]


def view(found: Sequence[Lane], end: float, window: Span | None) -> View:
    """The window; else all of a short run; else a few rounds of it: where most different things befell the islands,
    and in the middle where nothing did."""
    begun: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for island, lane in enumerate(found):
        for key, (start, _) in lane.flights:
            begun[island, key.rule, key.fragment].append(start)
    launches = set(max(begun.values(), key=len, default=[]))
    rounds, count = sorted({0.0, end} | launches), len(launches)
    if window:
        return View(*window, f"from {window[0]:g} to {window[1]:g} s", rounds)
    if count <= WHOLE:
        return View(0.0, end, "", rounds)
    faults: defaultdict[str, list[float]] = defaultdict(list)
    for lane in found:
        for time, kind in (*lane.marks, *((start, "froze") for start, _ in lane.frozen)):
            faults[kind].append(time)
    times = {kind: sorted(each) for kind, each in faults.items()}

    def inside(first: int) -> dict[str, list[float]]:
        start, stop = rounds[first], rounds[first + SHOWN]
        each = {kind: at[bisect_left(at, start) : bisect_right(at, stop)] for kind, at in times.items()}
        return {kind: at for kind, at in each.items() if at}

    def worth(first: int) -> tuple[int, int, float]:
        seen = inside(first)
        felt = [time for at in seen.values() for time in at]
        middle = sum(felt) / len(felt) if felt else end / 2
        return len(seen), len(felt), -abs((rounds[first] + rounds[first + SHOWN]) / 2 - middle)

    best = max(range(len(rounds) - SHOWN), key=worth)
    kinds = ", ".join(inside(best))
    why = f"{SHOWN} of {count} rounds, " + (f"where most happened: {kinds}" if kinds else "in the middle of the run")
    return View(rounds[best], rounds[best + SHOWN], why, rounds)


def draw(
    path: Path, trace: Trace, *, islands: int = 16, window: Span | None = None, names: Sequence[str] | None = None
) -> None:
    """Write the picture of a run as a PNG; arguments and errors are those of `figure`."""
    drawn = figure(trace, islands=islands, window=window, names=names)
    write_whole(path, lambda beside: drawn.savefig(beside, dpi=140, format="png"))


def figure(
    trace: Trace, *, islands: int = 16, window: Span | None = None, names: Sequence[str] | None = None
) -> "Figure":
    """The picture of a run whose moments were kept.

    Args: islands: lanes at most, evenly chosen. window: the seconds that are shown, from and to; chosen if None (see
    `view`). names: of the islands, in order.
    Raises: UsageError if moments were not kept, or an argument does not fit the run.
    """
    # Here, because it takes a second to import; not pyplot, because that is global and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [f"island {island}" for island in range(trace.islands)] if names is None else names
    _check(trace, islands, window, names)
    found, end = lanes(trace)
    count = min(islands, trace.islands)
    chosen = [round(at * (trace.islands - 1) / max(1, count - 1)) for at in range(count)]
    shown = [found[island] for island in chosen]
    seen = view(shown, end, window)
    part = (seen.start, seen.stop) != (0.0, end)
    rows = _rows(shown, seen)
    heights = [0.5 + min(2.0, 0.14 * trace.islands)] * part + [0.3 + count * (0.36 + 0.11 * sum(rows.values()))]
    drawn = Figure(figsize=(13, sum(heights) + 1.4), layout="constrained")
    FigureCanvasAgg(drawn)
    places: list[Axes] = list(drawn.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    below = places[-1]
    _lanes(below, shown, seen, rows, _unit(end, seen.stop - seen.start))
    below.set_yticks(below.get_yticks(), [names[island] for island in chosen])
    _used(below, [trace.used(island) for island in chosen], "utilisation,\nwhole run" if part else "utilisation")
    length, unit = _unit(trace.seconds)
    whole = f"{trace.seconds / length:.3g} {unit}, utilisation {trace.utilisation:.0%}"
    few = f"; {count} of {trace.islands} islands shown, evenly chosen" if count < trace.islands else ""
    if part:
        places[0].set_title(f"the whole run: {whole}", loc="left", fontsize=11)
        below.set_title(seen.why + few, fontsize=11, bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})
        _strip(drawn, places[0], found, seen, end)
        _widen(drawn, places[0], below, [seen.start / _unit(end)[0], seen.stop / _unit(end)[0]])
    else:
        below.set_title(whole + few, loc="left", fontsize=11)
    _legend(drawn, shown, rows)
    return drawn


def _check(trace: Trace, islands: int, window: Span | None, names: Sequence[str]) -> None:
    if not trace.moments:
        raise UsageError(
            "a picture was asked of a run whose moments were not kept, so only totals are known; simulate it with "
            "keeps=True"
        )
    if islands < 1:
        raise UsageError(f"a picture was asked with {islands} lanes, which shows nothing; give 1 or more")
    if window and not window[0] < min(window[1], trace.seconds):
        raise UsageError(
            f"the window was {window[0]} to {window[1]} s, in which nothing happened: training took "
            f"{trace.seconds:.6g} s; give a window from an earlier time to a later one in that"
        )
    if len(names) != trace.islands:
        raise UsageError(f"{len(names)} names were given for {trace.islands} islands; give one for each")


def _within(spans: Iterable[Span], seen: View) -> list[Span]:
    """The parts of spans that are shown."""
    cut = ((max(start, seen.start), min(stop, seen.stop)) for start, stop in spans)
    return [(start, stop) for start, stop in cut if start < stop]


def _stack(flights: Iterable[Span]) -> list[tuple[int, Span]]:
    """Each span with the first row that is free when it begins; `ROWS` at most."""
    free: list[float] = []
    placed: list[tuple[int, Span]] = []
    for start, stop in sorted(flights):
        row = next((row for row, until in enumerate(free) if until <= start), len(free))
        row = min(row, ROWS - 1)
        free[row : row + 1] = [stop]
        placed.append((row, (start, stop)))
    return placed


def _by_rule(lane: Lane, seen: View) -> dict[int, list[tuple[int, Span]]]:
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    for key, span in lane.flights:
        spans[key.rule] += _within([span], seen)
    return {rule: _stack(each) for rule, each in spans.items() if each}


def _rows(shown: Sequence[Lane], seen: View) -> dict[int, int]:
    """Rows that each rule takes under every lane."""
    rows: Counter[int] = Counter()
    for lane in shown:
        for rule, placed in _by_rule(lane, seen).items():
            rows[rule] = max(rows[rule], 1 + max(row for row, _ in placed))
    return dict(sorted(rows.items()))


def _lanes(axes: "Axes", shown: Sequence[Lane], seen: View, rows: Mapping[int, int], unit: tuple[float, str]) -> None:
    """Lane `n` lies from n to n + 1, downwards: the bar, and a row for each exchange of a rule at a time."""
    length, name = unit
    row = 0.11 / (0.36 + 0.11 * sum(rows.values()))
    bar = 0.86 - row * sum(rows.values())

    def bars(spans: Iterable[Span], top: float, height: float, **look: Any) -> None:
        cut = [(start / length, (stop - start) / length) for start, stop in _within(spans, seen)]
        axes.broken_barh(cut, (top, height), **look)

    for at, lane in enumerate(shown):
        top = at + 0.07
        bars(lane.away, top + bar / 2 - 0.01, 0.02, facecolor="#999999", linewidth=0)
        bars(lane.trained, top, bar, facecolor=TRAINS, linewidth=0)
        bars(lane.waited, top + bar / 4, bar / 2, facecolor=WAITS, linewidth=0)
        bars(lane.frozen, top, bar, facecolor="white", edgecolor="black", hatch="////", linewidth=0.8)
        under = top + bar
        for rule, placed in _by_rule(lane, seen).items():
            first = under + row * sum(count for other, count in rows.items() if other < rule)
            for place, span in placed:
                look = {"facecolor": RULES[rule % len(RULES)], "edgecolor": "white", "linewidth": 0.8}
                bars([span], first + row * (place + 0.2), row * 0.75, **look)
        for kind, (marker, color) in MARKS.items():
            times = [time / length for time, what in lane.marks if what == kind and seen.start <= time <= seen.stop]
            if times:
                axes.plot(times, [top + bar / 2] * len(times), **_mark(marker, color, 9))
        if at:
            axes.axhline(at, color="#DDDDDD", linewidth=0.8)
    axes.set_xlim(seen.start / length, seen.stop / length)
    axes.set_ylim(len(shown), 0)
    axes.set_yticks([at + 0.07 + bar / 2 for at in range(len(shown))])
    _plain(axes, name)


def _strip(drawn: "Figure", axes: "Axes", found: Sequence[Lane], seen: View, end: float) -> None:
    """How much of each round every island trained, over the whole run."""
    from matplotlib.colors import LinearSegmentedColormap

    length, unit = _unit(end)
    step = math.ceil(len(seen.rounds) / STRIP)
    edges = np.array([*seen.rounds[:-1:step], end])

    def spent(spans: Sequence[Span]) -> Any:
        """Seconds of disjoint spans that lie in each column."""
        points = np.array([(0.0, 0.0), *spans])
        lengths = np.diff(points, axis=1)[:, 0]
        after = np.cumsum(lengths)
        return np.diff(np.interp(edges, points.ravel(), np.stack([after - lengths, after], axis=1).ravel()))

    there = np.array([np.diff(edges) - spent(lane.away) for lane in found])
    trained = np.array([spent(lane.trained) for lane in found])
    part = np.ma.masked_where(there < 0.02 * np.diff(edges), trained / np.maximum(there, 1e-12))
    colors = LinearSegmentedColormap.from_list("trains", [WAITS, "#F4EDE4", TRAINS])
    mesh = axes.pcolormesh(edges / length, np.arange(len(found) + 1), part, cmap=colors, vmin=0, vmax=1)
    bar = drawn.colorbar(mesh, ax=axes, pad=0.01, aspect=8, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["waits", "", "trains"])
    for kind, (marker, color) in MARKS.items():
        at = [(time / length, row + 0.5) for row, lane in enumerate(found) for time, what in lane.marks if what == kind]
        if at:
            axes.plot(*zip(*at, strict=True), **_mark(marker, color, 5))
    for time in (seen.start, seen.stop):
        axes.axvline(time / length, color="black", linewidth=1.2)
    axes.set_ylim(len(found), 0)
    axes.set_yticks([])
    axes.set_ylabel("islands")
    _plain(axes, unit)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")


def _used(axes: "Axes", parts: Sequence[float], head: str) -> None:
    """The utilisation of each lane, at its right."""
    look: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 9, "color": TRAINS}
    for height, part in zip(axes.get_yticks(), parts, strict=True):
        axes.text(1.008, height, "" if math.isnan(part) else f"{part:.0%}", va="center", fontweight="bold", **look)
    axes.text(1.008, -0.08, head, va="bottom", **look)


def _widen(drawn: "Figure", above: "Axes", below: "Axes", ends: Sequence[float]) -> None:
    """Lines from the part that is shown, in the strip, to the lanes that show it."""
    from matplotlib.patches import ConnectionPatch

    for side, place in enumerate(ends):
        line = ConnectionPatch((place, 0), (side, 1), above.get_xaxis_transform(), below.transAxes)
        line.set(color="#777777", linewidth=1.0, in_layout=False, zorder=-1)
        drawn.add_artist(line)


def _mark(marker: str, color: str, size: float) -> dict[str, Any]:
    look = {"marker": marker, "color": color, "markersize": size, "linestyle": "none", "zorder": 5}
    return {**look, "markeredgecolor": "white", "markeredgewidth": 0.8, "clip_on": False}


def _plain(axes: "Axes", unit: str) -> None:
    axes.set_xlabel(unit)
    axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(drawn: "Figure", shown: Sequence[Lane], rows: Mapping[int, int]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [Patch(color=TRAINS, label="trains"), Patch(color=WAITS, label="waits for an exchange")]
    if any(lane.frozen for lane in shown):
        keys.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="frozen"))
    keys += [Patch(color=RULES[rule % len(RULES)], label=f"in flight, rule {rule}") for rule in rows]
    kinds = {kind for lane in shown for _, kind in lane.marks}
    keys += [Line2D([], [], label=kind, **_mark(*MARKS[kind], 9)) for kind in MARKS if kind in kinds]
    drawn.legend(handles=keys, loc="outside lower left", ncols=len(keys), frameon=False)


def _unit(seconds: float, part: float = math.inf) -> tuple[float, str]:
    """The unit in which a length of time is read best: its seconds, and its name; that of its part, if it is short."""
    length, name = next((length, name) for limit, length, name in UNITS if seconds < limit)
    return (length, name) if part >= length else _unit(part)
