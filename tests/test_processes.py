"""Processes that tests and benches start."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from atoll.testing.processes import launch


def nap(rank: int, folder: Path) -> None:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "napping")
    time.sleep(60)


def launches(folder: Path) -> None:
    launch(nap, 1, folder)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to see processes in")
def test_they_end_with_whoever_launched_them(tmp_path: Path) -> None:
    caller = multiprocessing.get_context("spawn").Process(target=launches, args=(tmp_path,))
    caller.start()
    until = time.monotonic() + 30
    while not (tmp_path / "napping").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process = Path("/proc") / (tmp_path / "napping").read_text()
    assert _runs(process)
    caller.kill()
    caller.join()
    while _runs(process):
        assert time.monotonic() < until, "it naps on"
        time.sleep(0.05)


def _runs(process: Path) -> bool:
    """Nobody here collects the status of one that has ended."""
    try:
        return " Z " not in (process / "stat").read_text()
    except OSError:
        return False
