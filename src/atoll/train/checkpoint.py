"""Checkpoints that are complete or do not count.

    OUT/checkpoints/step-00000050/worker-0.safetensors     one worker's state: tensors, and the rest as JSON in the
    header
                                  worker-1.safetensors
                                  complete.json            the marker: written last, names every part with its size

Each file is written beside its place, flushed to the disk and renamed, so a kill at any moment leaves whole files
only; a step without its marker is ignored, and removed when a later one is complete.
"""

import errno
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.errors import CheckpointError
from atoll.files import write_json, write_whole

FORMAT = "atoll-1"
KEPT = 2
"""Complete checkpoints that are kept: the newest, and one before it in case a disk lies about the newest."""


class Checkpoints:
    """The checkpoints of one run directory.

    Raises: CheckpointError when the disk is full or a checkpoint cannot be read; what was complete before stays
    complete.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / "checkpoints"

    def write(self, step: int, worker: int, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write one worker's part."""
        marker, part = self._of(step) / "complete.json", self._part(step, worker)
        header = {"format": FORMAT, "state": json.dumps(meta)}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        # a marker left from parts that have since been damaged must not vouch for a mixture of old and new ones
        self._told(marker, lambda: marker.unlink(missing_ok=True))
        self._told(part, lambda: write_whole(part, lambda path: save_file(contiguous, path, header)))

    def complete(self, step: int, workers: Iterable[int]) -> None:
        """Mark the step complete once every worker's part is written, and remove what is older than the last two.

        Raises: CheckpointError if a worker's part is not here.
        """
        parts = [self._part(step, worker) for worker in workers]
        if missing := [part for part in parts if not part.exists()]:
            raise CheckpointError(
                f"{missing[0]} was not written by its worker; give all workers the same, shared directory as --out"
            )
        sizes = {part.name: part.stat().st_size for part in parts}
        marker = self._of(step) / "complete.json"
        self._told(marker, lambda: write_json(marker, {"step": step, "parts": sizes}))
        whole = self.steps()
        for path in self.folder.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdigit() and int(number) < step and int(number) not in whole[-KEPT:]:
                shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending. A marker whose parts are missing or have other sizes does not
        count."""
        found: list[int] = []
        for marker in sorted(self.folder.glob("step-*/complete.json")):
            try:
                record = json.loads(marker.read_text())
                whole = all((marker.parent / name).stat().st_size == size for name, size in record["parts"].items())
            except (OSError, ValueError, KeyError):
                continue
            if whole:
                found.append(record["step"])
        return found

    def read(self, step: int, worker: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One worker's part of a complete step."""
        part = self._part(step, worker)
        try:
            with safe_open(part, "pt") as file:
                header: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{part} cannot be read ({error}); remove {part.parent} to resume from the checkpoint before it"
            ) from error
        if header.get("format") != FORMAT:
            raise CheckpointError(
                f"{part} has format {header.get('format')}, this version of atoll reads {FORMAT}; resume with the "
                "version that wrote it"
            )
        return json.loads(header["state"]), tensors

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _part(self, step: int, worker: int) -> Path:
        return self._of(step) / f"worker-{worker}.safetensors"

    def _told(self, path: Path, write: Callable[[], object]) -> None:
        """Write, or say in a sentence what is the matter and what is left."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            last = max(self.steps(), default=None)
            left = f"step {last}: make room and resume" if last is not None else "none yet: make room and start again"
            raise CheckpointError(
                f"{path} could not be written: {'the disk is full' if full else error}; the last complete checkpoint "
                f"is {left}"
            ) from error
