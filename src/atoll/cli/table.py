"""The table of a comparison, with the columns of DiLoCo's table 2: communication, time, compute and data, loss."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from atoll.cli.specs import Row
from atoll.train.metrics import duration, size
from atoll.train.run import Result


@dataclass(frozen=True)
class Line:
    """What the table says of one row, as numbers.

    Args:
        nbytes, rounds: sent by a worker, and syncs of a fragment, in the whole run.
        nbytes_part, rounds_part: of data-parallel's, if it is there.
        time: sequences a worker trains one after another; compute: those of all workers; in budgets of one worker.
        loss: mean over seeds; spread: their standard deviation, None for one seed.
        closed: part of the gap between single and data-parallel, if both are there.
        js: Jensen-Shannon distance between workers late in the run, mean over seeds; None where they were not compared.
        seconds, utilisation: of the run on virtual time, mean over seeds; None where time was not simulated.
    """

    label: str
    nbytes: int
    rounds: int
    nbytes_part: float | None
    rounds_part: float | None
    time: float
    compute: float
    loss: float
    spread: float | None
    closed: float | None
    js: float | None
    seconds: float | None
    utilisation: float | None


def lines(rows: Sequence[Row], results: Mapping[str, Sequence[Result]], budget: int) -> list[Line]:
    """One line per row.

    Args: results: by label. budget: sequences that one worker trains in the steps and batches asked for: 1x.
    """
    losses = {label: statistics.fmean(result.val_loss for result in each) for label, each in results.items()}
    parallel = results["data-parallel"][0] if "data-parallel" in results else None
    return [_line(row, results[row.label], losses, parallel, budget) for row in rows]


def _line(
    row: Row, results: Sequence[Result], losses: Mapping[str, float], parallel: Result | None, budget: int
) -> Line:
    run, first = row.run, results[0]
    sequences = run.steps * run.accumulate * run.data.batch
    low, high = losses.get("data-parallel"), losses.get("single")
    virtual = [result.simulated for result in results if result.simulated]
    closed = None
    if low is not None and high is not None and high != low and row.label not in ("single", "data-parallel"):
        closed = (high - losses[row.label]) / (high - low)
    return Line(
        label=row.label,
        nbytes=first.bytes_sent_per_worker,
        rounds=first.rounds,
        nbytes_part=first.bytes_sent_per_worker / parallel.bytes_sent_per_worker
        if parallel and parallel.bytes_sent_per_worker
        else None,
        rounds_part=first.rounds / parallel.rounds if parallel and parallel.rounds else None,
        time=sequences / budget,
        compute=first.tokens / (run.data.length * budget),
        loss=losses[row.label],
        spread=statistics.stdev([result.val_loss for result in results]) if len(results) > 1 else None,
        closed=closed,
        js=statistics.fmean(apart) if (apart := [result.js for result in results if result.js is not None]) else None,
        seconds=statistics.fmean(each.seconds for each in virtual) if virtual else None,
        utilisation=statistics.fmean(each.utilisation for each in virtual) if virtual else None,
    )


def table(each: Sequence[Line], *, seeds: int, wall_s: float, jobs: int, data: str) -> Table:
    """The lines for people, and a caption that says what the columns mean.

    Args: wall_s: seconds of all runs together; jobs: how many shared the machine; data: the text's
    fingerprint.
    """
    shared = f", {jobs} runs side by side on one machine" if jobs > 1 else ""
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed, so no spread"
    simulated = any(line.seconds is not None for line in each)
    last = (
        "simulated time: on the given network, waiting included; utilisation: part of it spent training. "
        if simulated
        else "JS: Jensen-Shannon distance between the workers' predictions at the ends of rounds, last quarter of the "
        "run. "
    )
    caption = (
        "communication: sent by each worker, and its part of data-parallel's; rounds: syncs of a fragment. time: "
        "sequences that a worker trains one after another; compute and data: those of all workers; both as multiples "
        "of one worker's (time on a link is not in it: see atoll explain). loss: nats per token of held-out text, of "
        f"the shared model, {spread}. gap closed: of the way from single to data-parallel, if both are there. {last}"
        f"All runs together trained for {wall_s:,.0f} s{shared}; the text has fingerprint {data}."
    )
    columns = ["method", "communication", "rounds", "time", "compute\nand data", "held-out loss", "gap\nclosed", "JS"]
    if simulated:
        columns[-1:] = ["simulated\ntime", "utilisation"]
    shown = Table(caption=caption, caption_justify="left")
    for column in columns:
        name = column == "method"
        # where the terminal is narrow a name is folded, and no figure is cut
        least = 16 if name else None
        shown.add_column(
            column, justify="left" if name else "right", no_wrap=not name, overflow="fold", min_width=least
        )
    for line in each:
        distance = "" if line.js is None else f"{line.js:.3f}"
        shown.add_row(
            line.label,
            size(line.nbytes) + _part(line.nbytes_part, line.nbytes),
            f"{line.rounds}" + _part(line.rounds_part, line.rounds),
            f"{line.time:g}x",
            f"{line.compute:g}x",
            f"{line.loss:.4f}" + ("" if line.spread is None else f" ± {line.spread:.4f}"),
            "" if line.closed is None else f"{line.closed:.0%}",
            *([duration(line.seconds or 0.0), f"{line.utilisation or 0.0:.0%}"] if simulated else [distance]),
        )
    return shown


def _part(part: float | None, count: float) -> str:
    """As a fraction of data-parallel's: 1/50, or 1.2x where it is more."""
    if part is None or not count:
        return ""
    return f" ({part:.3g}x)" if part >= 1 else f" (1/{1 / part:.3g})"
