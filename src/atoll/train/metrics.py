"""Records of a run: metrics as JSON lines, and what a person sees while it goes."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atoll.files import finite, write_whole
from atoll.wire import Event, Landed, Lost

LOG_EVERY = 10
"""Inner steps between two records of the training loss; reading it makes the device wait."""


class Distance(NamedTuple):
    """Jensen-Shannon distance between workers' predictions, in [0, 1]; root mean square distance of their weights from
    the mean, and its part of the mean's norm (nan where the workers live in several processes)."""

    js: float
    l2: float
    relative: float


class Recorder:
    """Writes `metrics.jsonl` and shows progress on stderr.

    Args: path: of the file, or None; steps: of the whole run; start: the step resumed from, later records are dropped;
    visible: show it.
    Attributes: now: simulated seconds, where time is simulated.
    """

    now: float | None = None

    def __init__(self, path: Path | None, *, steps: int, start: int, label: str, visible: bool) -> None:
        self._console = Console(stderr=True, quiet=not visible)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not visible)
        self._bar = self._progress.add_task(label, total=steps, completed=start, loss=math.nan, speed=0.0)
        self._quiet_until = 0
        self._file = None
        if path:
            kept = [line for line in _lines(path) if _step(line) <= start]
            write_whole(path, lambda beside: beside.write_text("".join(kept)))
            self._file = path.open("a", buffering=1)  # by lines, so that a watcher sees them

    def step(self, step: int, losses: Sequence[float], speed: float) -> None:
        """Training loss of this process's workers, nats per token, and tokens/s of all of them."""
        self._progress.update(self._bar, completed=step, loss=sum(losses) / len(losses), speed=speed)
        self._write(kind="step", step=step, loss=losses, tokens_per_s=round(speed))

    def events(self, step: int, events: Sequence[Event], seconds: float | None) -> None:
        """One worker's events at a boundary that took `seconds`, if that was measured. People see one landing in
        `LOG_EVERY` steps, every one at which a contribution was refused, and, louder, every round that was lost."""
        for event in events:
            match event:
                case Landed():
                    self._write(
                        kind="landed",
                        step=step,
                        key=event.key,
                        norm=event.mean_norm,
                        cosine=event.cosine,
                        sent=event.sent,
                        age=event.age,
                        peers=event.peers,
                        refused=event.refused,
                        seconds=seconds,
                    )
                    if event.refused or step >= self._quiet_until:
                        self._quiet_until = step + LOG_EVERY
                        self._show(step, event, seconds)
                case Lost():
                    self._write(kind="lost", step=step, key=event.key, why=event.why)
                    self._console.print(
                        f"{self._at(step)}  round {event.key.round} does not count: {event.why}", style="bold red"
                    )
                case _:
                    pass

    def _show(self, step: int, landed: Landed, seconds: float | None) -> None:
        only = f"  from workers {landed.peers} only: {'; '.join(landed.refused)}" if landed.refused else ""
        self._console.print(
            f"{self._at(step)}  round {landed.key.round}  fragment {landed.key.fragment}  |mean delta| "
            f"{landed.mean_norm:.3g}  cosine {landed.cosine:.2f}  sent {size(landed.sent)}  "
            f"{'' if seconds is None else f'boundary {seconds * 1e3:.0f} ms'}{only}",
            highlight=False,
        )

    def _at(self, step: int) -> str:
        return f"step {step}" if self.now is None else f"{self.now:.1f} s  step {step}"

    def disagreement(self, step: int, distance: Distance) -> None:
        """How far workers are from one another at the end of a round."""
        self._write(kind="disagreement", step=step, js=distance.js, l2=distance.l2, l2_relative=distance.relative)

    def evaluation(self, step: int, val_loss: float, sent: int) -> None:
        """Held-out loss of the shared model."""
        self._write(kind="evaluation", step=step, val_loss=val_loss, bytes_sent=sent)
        self._console.print(
            f"{self._at(step)}  held-out loss of the shared model {val_loss:.4f} nats per token", highlight=False
        )

    def say(self, sentence: str) -> None:
        """Something a person should read."""
        self._console.print(sentence, highlight=False)

    def flush(self) -> None:
        """Put what was recorded on the disk, so that no checkpoint is newer than its records."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write(self, **record: Any) -> None:
        if self._file:
            record |= {} if self.now is None else {"simulated_s": self.now}
            self._file.write(json.dumps(finite(record)) + "\n")

    def __enter__(self) -> "Recorder":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file:
            self._file.close()


def _lines(path: Path) -> list[str]:
    """The whole lines of a file that a kill may have cut short."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def _step(line: str) -> float:
    """The step of a record; a line that is none is dropped."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def size(count: float) -> str:
    """Bytes for people.

    Example:
        >>> size(1536), size(25e6)
        ('1.5 kB', '25.0 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the last unit always returns")


def duration(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> duration(90), duration(1e6)
        ('90 s', '11.6 days')
    """
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"
