"""The run directory: what it is called, what it must hold, and whose it is.

OUT/config.json       the run as a value (`repr` rebuilds it), versions, threads, fingerprint of the data
    metrics.jsonl     losses, landings, evaluations
    checkpoints/      see `atoll.train.checkpoint`
    result.json       what it came to, written last
    model/            the shared model, as transformers loads it
"""

import json
from pathlib import Path

import torch

from atoll import __version__
from atoll.errors import CheckpointError, UsageError
from atoll.files import write_json
from atoll.train.run import Run


def open_directory(out: Path, run: Run, fingerprint: str, *, resume: bool, writes: bool) -> None:
    """Create a run's directory, or make sure that the one to resume is this run's. Resuming what has not begun begins
    it.

    Args: fingerprint: of the data. writes: whether this process is the one that writes the config.
    Raises: UsageError if it exists and `resume` was not asked for; CheckpointError if it belongs to another run.
    """
    path = out / "config.json"
    config = {"run": repr(run), "data": fingerprint, "atoll": __version__, "torch": torch.__version__}
    if path.exists() and not resume and writes:
        raise UsageError(f"{out} already holds a run; give --resume to go on with it, or another --out")
    if not path.exists():
        if writes:
            try:
                write_json(path, config)
            except OSError as error:
                raise UsageError(
                    f"the run directory {out} cannot be written ({error.strerror}); give another --out"
                ) from error
        return
    try:
        saved: dict[str, str] = json.loads(path.read_text())
        different = next((name for name in ("run", "data") if saved[name] != config[name]), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); start again with another --out") from error
    if resume and different:
        raise CheckpointError(
            f"{out} belongs to another run: it has {_difference(saved[different], config[different])}; resume with the "
            "options it was started with"
        )


def _difference(saved: str, mine: str) -> str:
    """The first place where two descriptions differ, with a little around it."""
    at = next(
        (index for index, (a, b) in enumerate(zip(saved, mine, strict=False)) if a != b), min(len(saved), len(mine))
    )
    first = max(saved.rfind(", ", 0, at), saved.rfind("(", 0, at)) + 1
    return f"{saved[first : at + 24].strip()!r} where you asked for {mine[first : at + 24].strip()!r}"
