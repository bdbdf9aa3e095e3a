"""Everything is written down, and the terminal is not flooded."""

import json
from pathlib import Path

import pytest

from atoll.train.metrics import LOG_EVERY, Recorder
from atoll.wire import Key, Landed, Lost

REFUSED = "worker 1 sent values that are not finite"


def landed(round: int, *, refused: bool = False) -> Landed:
    return Landed(Key(0, 0, round), (0,), 0.5, norms=(1.0,), refused=(REFUSED,) * refused)


def shown(capsys: pytest.CaptureFixture[str], word: str) -> list[int]:
    """Steps of the lines that have the word in them."""
    lines = " ".join(capsys.readouterr().err.split("\n")).split("step ")[1:]
    return [int(line.split()[0]) for line in lines if word in line]


def test_one_landing_is_shown_in_ten_steps_and_all_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Recorder(tmp_path / "metrics.jsonl", steps=35, start=0, label="sparta x2", visible=True) as record:
        for step in range(1, 36):
            record.events(step, [landed(step), landed(step)], 0.0)
    assert shown(capsys, "boundary") == [1, 1 + LOG_EVERY, 1 + 2 * LOG_EVERY, 1 + 3 * LOG_EVERY]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step in range(1, 36) for _ in range(2)]


def test_a_refusal_and_a_lost_round_are_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(None, steps=9, start=0, label="sparta x2", visible=True) as record:
        for step in range(1, 10):
            record.events(step, [landed(step, refused=step in (4, 5))], 0.0)
            record.events(step, [Lost(Key(0, 0, step), "nobody was heard")] if step == 7 else [], 0.0)
    said = capsys.readouterr().err
    assert said.count(REFUSED) == 2
    assert said.count("nobody was heard") == 1
    assert said.count("boundary") == 3


def test_methods_with_long_rounds_show_every_landing(capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(None, steps=40, start=0, label="diloco x2", visible=True) as record:
        for step in range(LOG_EVERY, 41, LOG_EVERY):
            record.events(step, [landed(step)], 0.0)
    assert shown(capsys, "boundary") == [10, 20, 30, 40]
