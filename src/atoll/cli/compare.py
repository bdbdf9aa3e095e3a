"""Several methods on the same data, with the same seeds and budget, as one table, one picture and one file."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from atoll.cli.jobs import side_by_side
from atoll.cli.specs import Row
from atoll.errors import CheckpointError, DataError, UsageError
from atoll.files import write_json
from atoll.peers.faults import Dropping
from atoll.peers.memory import Hub, MemoryGroup
from atoll.train.plots import plot_curves
from atoll.train.run import Result, Run

if TYPE_CHECKING:
    from atoll.cli.simulate import Scene


@dataclass(frozen=True)
class Entry:
    """One run of a comparison: the row it belongs to, its directory, and its network, if time is simulated."""

    label: str
    run: Run
    out: Path
    scene: "Scene | None" = None


def entries(rows: Sequence[Row], *, seeds: int, out: Path, scenes: "Mapping[str, Scene] | None" = None) -> list[Entry]:
    """Every row with seeds s, s + 1, ..., seed by seed; each run has a directory of its own in `out`.

    Args: scenes: the network of each row, by label, if time is simulated.
    """
    return [
        Entry(
            row.label,
            replace(row.run, seed=row.run.seed + each),
            out / _folder(row.label) / f"seed-{row.run.seed + each}",
            scenes[row.label] if scenes else None,
        )
        for each in range(seeds)
        for row in rows
    ]


def _folder(label: str) -> str:
    return re.sub(r"[^\w.=+-]+", "-", label)


def compare(
    planned: Sequence[Entry], out: Path, *, jobs: int = 1, resume: bool = False, save_every: int | None = None
) -> dict[str, list[Result]]:
    """Carry out the runs that are not finished yet, and write `out`/compare.json and `out`/compare.png.

    Args: jobs: runs side by side, each in a process; 1 for none but this one. resume: go on with what `out` holds;
        finished runs are not repeated. save_every: inner steps between checkpoints.
    Returns: results by label, in the order of the entries.
    Raises: UsageError if `out` holds runs already; CheckpointError if they are others; whatever a run raises. Other
        runs stop with it.
    """
    results = {index: done for index, entry in enumerate(planned) if (done := _finished(entry, resume=resume))}
    left = [index for index in range(len(planned)) if index not in results]
    work = [(planned[index], _begun(planned[index]), save_every) for index in left]
    at_once = min(jobs, len(work))
    if at_once > 1:
        with (
            _Watch([planned[index] for index in left]) as watch,
            closing(side_by_side(_train, work, at_once, watch.look)) as done,
        ):
            for number, result in done:
                results[left[number]] = result
                watch.ended(number)
    else:
        for index, job in zip(left, work, strict=True):
            results[index] = _train(*job, quiet=False)
    grouped: dict[str, list[Result]] = {}
    for index, entry in enumerate(planned):
        grouped.setdefault(entry.label, []).append(results[index])
    if len(texts := {result.data for result in results.values()}) > 1:
        raise DataError(
            f"the runs in {out} did not read the same text ({', '.join(sorted(texts))}), so they cannot be "
            "compared; it changed meanwhile: give another --out"
        )
    write_json(out / "compare.json", as_json(grouped))
    plot_curves(out / "compare.png", grouped)
    return grouped


def side_by_side_at_most(runs: Sequence[Run], asked: int | None) -> int:
    """How many of the runs share the machine: as many as were asked for, or as its cores have room for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(asked or max(1, cores // max(run.threads for run in runs)), len(runs))


def _train(entry: Entry, resume: bool, save_every: int | None, quiet: bool = True) -> Result:
    """One whole run, its workers in turns, or on virtual time."""
    # Here, because it imports transformers, which the process that only waits for others does without.
    if entry.scene:
        from atoll.cli.simulate import simulated

        return simulated(entry.run, entry.scene, out=entry.out, resume=resume, quiet=quiet)[0]
    from atoll.train.trainer import train

    groups = groups_of(entry.run)
    return train(entry.run, groups, out=entry.out, resume=resume, save_every=save_every, quiet=quiet)


def groups_of(run: Run) -> list[MemoryGroup]:
    """All workers' ways to one another in this process, with the faults that the run asks for."""
    hub = Hub(run.workers, Dropping(run.faults.loss, run.faults.seed) if run.faults.loss else None)
    return [hub.group(worker) for worker in range(run.workers)]


def _begun(entry: Entry) -> bool:
    return (entry.out / "config.json").exists()


def _finished(entry: Entry, *, resume: bool) -> Result | None:
    """The result of a run that has ended already."""
    if not _begun(entry):
        return None
    if not resume:
        raise UsageError(
            f"{entry.out} already holds a run; give --resume to go on with that comparison, or another --out"
        )
    path = entry.out / "result.json"
    if not path.exists():
        return None
    try:
        asked = json.loads((entry.out / "config.json").read_text())["run"]
        saved = json.loads(path.read_text())
        result = Result.from_json(saved)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # cut short as it was written: the run's last checkpoint gives it again
    wanted = entry.run
    if entry.scene:
        from atoll.cli.simulate import as_trained, keep_scene

        keep_scene(entry.out, entry.scene)
        wanted = as_trained(wanted)
    if asked != repr(wanted):
        raise CheckpointError(
            f"{entry.out} holds a run with other options than {entry.label} has now; compare with the options it "
            "was started with, or give another --out"
        )
    return result


def as_json(grouped: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """`{"runs": [...]}`: one object for each run, as `atoll train --json` prints it, with the label of its row."""
    return {"runs": [{"label": label} | result.as_json() for label, results in grouped.items() for result in results]}


class _Watch:
    """Progress of runs in other processes, read from their metrics: a bar for each that has begun and not ended."""

    def __init__(self, watched: Sequence[Entry]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._all = self._progress.add_task("runs", total=len(watched), loss="")
        self._tails = [_Tail(entry.out / "metrics.jsonl") for entry in watched]
        self._bars = [self._bar(entry) for entry in watched]

    def _bar(self, entry: Entry) -> TaskID:
        return self._progress.add_task(
            f"{entry.label} seed {entry.run.seed}", total=entry.run.steps, visible=False, loss=""
        )

    def look(self) -> None:
        """Read what is new."""
        for tail, bar in zip(self._tails, self._bars, strict=True):
            for record in tail.new():
                if record["kind"] == "step":
                    loss = sum(record["loss"]) / len(record["loss"])
                    self._progress.update(bar, completed=record["step"], loss=f"loss {loss:.3f}", visible=True)

    def ended(self, number: int) -> None:
        """One run less."""
        self._tails[number].stop()
        self._progress.update(self._bars[number], visible=False)
        self._progress.advance(self._all)

    def __enter__(self) -> "_Watch":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class _Tail:
    """New whole lines of a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._over = path, 0, False

    def new(self) -> Iterator[dict[str, Any]]:
        if self._over or not self._path.exists():
            return
        if self._path.stat().st_size < self._at:
            self._at = 0  # a resumed run drops what came after its checkpoint
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with suppress(ValueError):
                    yield json.loads(line)

    def stop(self) -> None:
        self._over = True
