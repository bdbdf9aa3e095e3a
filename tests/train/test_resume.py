"""Killed at any moment, resumed from the last complete checkpoint, a run gives what it would have given: every bit."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.errors import CheckpointError
from atoll.peers.memory import Hub, MemoryGroup
from atoll.recipes import methods
from atoll.train.checkpoint import Checkpoints
from atoll.train.run import Data, Method, Result, Run
from atoll.train.trainer import train
from atoll.wire import Key, Post

METHODS = {
    "diloco": methods.diloco(4),
    "streaming, with exchanges in flight": methods.streaming(6, fragments=2, delay=3),
    "opendiloco": methods.opendiloco(3),
    "data-parallel": methods.data_parallel(),
}


def small(text: Path, method: Method) -> Run:
    return Run(method, data=Data(f"text:{text}", batch=2, length=16), workers=2, steps=14, warmup=2)


def go(run: Run, groups: list[MemoryGroup], out: Path, resume: bool = False) -> Result:
    return train(run, groups, out=out, resume=resume, save_every=2, quiet=True)


def groups_of(run: Run, fails_at: int | None = None) -> list[MemoryGroup]:
    hub = Hub(run.workers)
    return [Failing(hub, worker, fails_at) for worker in range(run.workers)]


class Killed(BaseException):
    """Not an Exception: nothing may catch it and go on."""


class Failing(MemoryGroup):
    """Worker 1 dies in its `fails_at`-th post."""

    def __init__(self, hub: Hub, worker: int, fails_at: int | None) -> None:
        super().__init__(hub, worker)
        self.left = fails_at if worker == 1 and fails_at is not None else -1

    def post(self, post: Post) -> Key:
        if self.left == 0:
            raise Killed
        self.left -= 1
        return super().post(post)


def state(out: Path, workers: int) -> dict[str, bytes]:
    """The newest checkpoint's tensors of all workers, byte for byte."""
    checkpoints = Checkpoints(out)
    read = [checkpoints.read(checkpoints.steps()[-1], worker)[1] for worker in range(workers)]
    named = {f"{worker}.{name}": tensor for worker, tensors in enumerate(read) for name, tensor in tensors.items()}
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in named.items()}


@pytest.mark.parametrize("name", METHODS)
def test_dying_in_any_exchange_and_resuming_changes_no_bit(name: str, text: Path, tmp_path: Path) -> None:
    run = small(text, METHODS[name])
    whole = go(run, groups_of(run), tmp_path / "whole")
    for fails_at in (0, 2):
        out = tmp_path / f"cut-{fails_at}"
        with pytest.raises(Killed):
            go(run, groups_of(run, fails_at), out)
        resumed = go(run, groups_of(run), out, resume=True)
        assert resumed.digest == whole.digest
        assert resumed.curve == whole.curve
        assert resumed.bytes_sent_per_worker == whole.bytes_sent_per_worker
        assert state(out, run.workers) == state(tmp_path / "whole", run.workers)
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps), "a record of the run that died was left after the step resumed from"


def test_a_killed_process_resumes_to_the_same_digest(text: Path, tmp_path: Path) -> None:
    run = replace(small(text, METHODS["streaming, with exchanges in flight"]), steps=60)
    script = (
        "import sys; from pathlib import Path; from tests.train.test_resume import *\n"
        f"run = replace(small(Path({str(text)!r}), METHODS['streaming, with exchanges in flight']), steps=60)\n"
        "go(run, groups_of(run), Path(sys.argv[1]), resume=len(sys.argv) > 2)\n"
    )
    out = tmp_path / "killed"
    resume: list[str] = []
    for after in (0.05, 0.25):
        process = subprocess.Popen([sys.executable, "-c", script, str(out), *resume], cwd=Path(__file__).parents[2])
        deadline = time.monotonic() + 60
        seen = len(Checkpoints(out).steps())
        newest = max(Checkpoints(out).steps(), default=0)
        while max(Checkpoints(out).steps(), default=0) <= newest + 2 * seen and process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint was ever completed"
            time.sleep(0.01)
        time.sleep(after)
        process.kill()
        process.wait()
        resume = ["resume"]
    resumed = go(run, groups_of(run), out, resume=True)
    assert resumed.digest == go(run, groups_of(run), tmp_path / "whole").digest


def test_a_step_without_its_marker_or_with_a_cut_part_does_not_count(text: Path, tmp_path: Path) -> None:
    run = small(text, METHODS["diloco"])
    whole = go(run, groups_of(run), tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [12, 14], "the last two are kept"
    newest = checkpoints.folder / "step-00000014" / "worker-1.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert checkpoints.steps() == [12]
    assert go(run, groups_of(run), tmp_path / "run", resume=True).digest == whole.digest


def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint_whole(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(text, METHODS["diloco"])
    real, calls = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 8 * 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        CheckpointError, match="the disk is full; the last complete checkpoint is step 2: make room and resume"
    ):
        go(run, groups_of(run), tmp_path / "run")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "run").steps() == [2]
    assert (
        go(run, groups_of(run), tmp_path / "run", resume=True).digest
        == go(run, groups_of(run), tmp_path / "whole").digest
    )
