"""The run directory: what it is called, what it must hold, and whose it is.

OUT/config.json       the run as a value (`repr` rebuilds it), versions, threads, fingerprint of the data
    metrics.jsonl     losses, landings, evaluations
    checkpoints/      see `atoll.train.checkpoint`
    result.json       what it came to, written last
    model/            the shared model, as transformers loads it
"""

import json
from pathlib import Path
from typing import Any

import torch

from atoll import __version__
from atoll.errors import CheckpointError, UsageError
from atoll.files import write_json
from atoll.train.run import Run


def open_directory(out: Path, run: Run, fingerprint: str, *, resume: bool, writes: bool) -> None:
    """Create a run's directory, or make sure that the one to resume is this run's.

    Args: fingerprint: of the data. writes: whether this process is the one that writes the config.
    Raises: UsageError if it exists and `resume` was not asked for; CheckpointError if it belongs to another run.
    """
    path = out / "config.json"
    config: dict[str, Any] = {"run": repr(run), "data": fingerprint, "atoll": __version__, "torch": torch.__version__}
    if not resume:
        if path.exists() and writes:
            raise UsageError(f"{out} already holds a run; give --resume to go on with it, or another --out")
        if writes:
            try:
                out.mkdir(parents=True, exist_ok=True)
                write_json(path, config)
            except OSError as error:
                raise UsageError(
                    f"the run directory {out} cannot be written ({error.strerror}); give another --out"
                ) from error
        return
    if not path.exists():
        raise CheckpointError(f"--resume was given, but {out} holds no run; leave --resume out to start one there")
    saved = json.loads(path.read_text())
    for name, mine in config.items():
        if saved[name] != mine and name in ("run", "data"):
            raise CheckpointError(
                f"{out} belongs to another run: it has {_difference(saved[name], mine)}; resume with the options it "
                "was started with"
            )


def _difference(saved: str, mine: str) -> str:
    """The first place where two descriptions differ, with a little around it."""
    at = next(
        (index for index, (a, b) in enumerate(zip(saved, mine, strict=False)) if a != b), min(len(saved), len(mine))
    )
    first = max(saved.rfind(", ", 0, at), saved.rfind("(", 0, at)) + 1
    return f"{saved[first : at + 24].strip()!r} where you asked for {mine[first : at + 24].strip()!r}"
