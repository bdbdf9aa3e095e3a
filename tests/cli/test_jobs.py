"""Jobs side by side: all are done, and no process outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.jobs import side_by_side
from atoll.errors import AtollError, DataError
from tests.cli import chores

ROOT = Path(__file__).parents[2]


def run(function: Callable[..., Any], numbers: list[int], at_once: int = 2) -> dict[int, Any]:
    return dict(side_by_side(function, [(number,) for number in numbers], at_once, lambda: None))


def test_every_job_is_done_once_and_known_by_its_number() -> None:
    assert run(chores.square, [3, 4, 5]) == {0: 9, 1: 16, 2: 25}


def test_a_process_is_kept_for_the_next_job() -> None:
    processes = set(run(chores.process_of, [0] * 6).values())
    assert 1 <= len(processes) <= 2
    assert os.getpid() not in processes


def test_an_error_of_one_job_comes_back_as_it_was_and_stops_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match="there is no text"):
        run(chores.fails, [0, 1])
    assert time.monotonic() - start < 30


def test_a_defect_comes_back_with_its_traceback() -> None:
    with pytest.raises(AtollError, match=r"a defect of atoll:[\s\S]*ZeroDivisionError"):
        run(chores.breaks, [0])


def test_a_process_that_is_killed_is_a_sentence_and_not_a_hang() -> None:
    with pytest.raises(AtollError, match=r"process of a run died \(exit status -9\).*--resume"):
        run(chores.dies, [0])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_is_left_when_the_parent_is_interrupted_terminated_or_killed(how: int, tmp_path: Path) -> None:
    script = (
        "from atoll.cli.jobs import side_by_side; from tests.cli import chores\n"
        f"list(side_by_side(chores.waits, [({str(tmp_path)!r}, 0), ({str(tmp_path)!r}, 1)], 2, lambda: None))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    children = [int(path.name) for path in tmp_path.iterdir()]
    if how == signal.SIGINT:
        os.killpg(parent.pid, how)  # as the terminal does: to the whole group
    else:
        parent.send_signal(how)
    _, said = parent.communicate(timeout=30)
    assert "SpawnProcess" not in said, "a child was interrupted too, and said so"
    until(lambda: not any(alive(child) for child in children))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
