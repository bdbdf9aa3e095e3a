"""Real signals in the middle of a run: a sentence, no process left, and `--resume` gives the undisturbed bits."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from atoll.cli import main
from tests.cli.conftest import Call

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def command(text: Path) -> list[str]:
    run = ["train", "diloco", "--period", "10", "--data", f"text:{text}", "--steps", "100", "--batch", "2"]
    return [*run, "--length", "16", "--lr", "0.003", "--json", "--workers", "2"]


@pytest.fixture(scope="module")
def undisturbed(command: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(command) == 0
    return json.loads(out.getvalue())["digest"]


@contextmanager
def begun(words: Sequence[str | Path], out: Path) -> Generator[subprocess.Popen[str]]:
    """A process that has just completed the first checkpoint in `out`."""
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(out.glob("checkpoints/*/complete.json")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline, "no checkpoint was completed"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def last_words(process: subprocess.Popen[str]) -> str:
    """What was said to the end: the pipe closes when the last process that has inherited it, a child too, is gone."""
    _, said = process.communicate(timeout=20)
    return said


def test_ctrl_c_is_a_sentence_and_status_130_and_resuming_changes_no_bit(
    atoll: Call, command: list[str], undisturbed: str, tmp_path: Path
) -> None:
    command = [*command, "--out", str(tmp_path / "run")]
    with begun(["-m", "atoll.cli", *command], tmp_path / "run") as process:
        os.killpg(process.pid, signal.SIGINT)
        said = last_words(process)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("interrupted; the same command with --out")
    assert "Traceback" not in said
    assert atoll(*command, "--resume").json["digest"] == undisturbed


def test_ctrl_c_of_torchrun_leaves_no_rank_and_resuming_changes_no_bit(
    atoll: Call, command: list[str], undisturbed: str, tmp_path: Path
) -> None:
    command = [*command, "--out", str(tmp_path / "run")]
    with begun([*TORCHRUN, "-m", "atoll.cli", *command], tmp_path / "run") as process:
        os.killpg(process.pid, signal.SIGINT)
        said = last_words(process)
    assert process.returncode != 0
    assert "interrupted; the same command with --out" in said
    assert atoll(*command, "--resume").json["digest"] == undisturbed


def test_ranks_that_were_killed_resume_under_torchrun_to_the_bits_of_one_process(
    command: list[str], undisturbed: str, tmp_path: Path
) -> None:
    command = [*command, "--out", str(tmp_path / "run")]
    with begun([*TORCHRUN, "-m", "tests.cli.chores", str(tmp_path / "ranks"), *command], tmp_path / "run") as process:
        for rank in (tmp_path / "ranks").iterdir():
            os.kill(int(rank.name), signal.SIGKILL)
        last_words(process)
    assert process.returncode != 0
    resumed = subprocess.run(
        [sys.executable, *TORCHRUN, "-m", "atoll.cli", *command, "--resume"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["digest"] == undisturbed
