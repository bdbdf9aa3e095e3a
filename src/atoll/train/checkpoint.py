"""Checkpoints that are complete or do not count.

    OUT/checkpoints/step-00000050/worker-0.safetensors     tensors of one worker
                                  worker-0.json            the rest of its state
                                  complete.json            the marker: written last, names every part with its size

Each file is written beside its place, flushed to the disk and renamed, so a kill at any moment leaves whole files
only; a step without its marker is ignored, and removed when a later one is complete.
"""

import errno
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.errors import CheckpointError
from atoll.files import write_whole

FORMAT = 1
KEPT = 2
"""Complete checkpoints that are kept: the newest, and one before it in case a disk lies about the newest."""


def pack(value: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """Split nested dicts, lists and tuples into a JSON-able value and the tensors in it, each replaced by its name.

    Example:
        >>> import torch
        >>> pack({"a": [1, torch.ones(1)]}, "p")
        ({'dict': [['a', {'list': [1, {'tensor': 'p.a.1'}]}]]}, {'p.a.1': tensor([1.])})
    """
    tensors: dict[str, Tensor] = {}

    def walk(item: Any, name: str) -> Any:
        if isinstance(item, Tensor):
            tensors[name] = item.detach()
            return {"tensor": name}
        if isinstance(item, dict):
            return {"dict": [[key, walk(each, f"{name}.{key}")] for key, each in item.items()]}
        if isinstance(item, list | tuple):
            return {"list": [walk(each, f"{name}.{index}") for index, each in enumerate(item)]}
        return item

    return walk(value, prefix), tensors


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given, tuples as lists."""
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: unpack(each, tensors) for key, each in items}
        case {"list": items}:
            return [unpack(each, tensors) for each in items]
        case _:
            return value


class Checkpoints:
    """The checkpoints of one run directory.

    Raises: CheckpointError when the disk is full or a checkpoint cannot be read; what was complete before stays
    complete.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / "checkpoints"

    def write(self, step: int, worker: int, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write one worker's part."""
        folder = self._of(step)
        name = f"worker-{worker}"
        self._durably(
            folder / f"{name}.safetensors",
            lambda path: save_file({k: v.contiguous() for k, v in tensors.items()}, path),
        )
        self._durably(folder / f"{name}.json", lambda path: path.write_text(json.dumps({"format": FORMAT, **meta})))

    def complete(self, step: int, workers: Iterable[int]) -> None:
        """Mark the step complete once every worker's part is written, and remove what is older than the last two."""
        folder = self._of(step)
        parts = {
            path.name: path.stat().st_size for worker in workers for path in sorted(folder.glob(f"worker-{worker}.*"))
        }
        self._durably(
            folder / "complete.json",
            lambda path: path.write_text(json.dumps({"format": FORMAT, "step": step, "parts": parts})),
        )
        whole = self.steps()
        for path in self.folder.iterdir():
            number = int(path.name.removeprefix("step-"))
            if number < step and number not in whole[-KEPT:]:
                shutil.rmtree(path)

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
        path = self._of(step) / f"worker-{worker}.safetensors"
        try:
            meta = json.loads(path.with_suffix(".json").read_text())
            tensors = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); remove {path.parent} to resume from the checkpoint before it"
            ) from error
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {meta['format']}, this version of atoll reads format {FORMAT}; resume with the "
                "version that wrote it"
            )
        return meta, tensors

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _durably(self, path: Path, write: Any) -> None:
        try:
            write_whole(path, write)
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            last = max(self.steps(), default=None)
            raise CheckpointError(
                f"{path} could not be written: {'the disk is full' if full else error}; the last complete checkpoint "
                "is "
                + (f"step {last}: make room and resume" if last is not None else "none yet: make room and start again")
            ) from error
