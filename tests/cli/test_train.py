"""`atoll train`: one line of JSON, the same bits under torchrun, and a sentence for an interrupt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.show import json_line
from tests.cli.conftest import Call

ROOT = Path(__file__).parents[2]
PROMISED = {
    "method", "workers", "steps", "rounds", "period", "tokens", "val_loss", "val_loss_workers", "bytes_sent_per_worker",
    "wall_s", "digest",
}  # fmt: skip


def test_json_is_the_only_line_on_stdout_and_holds_what_was_promised(atoll: Call, small: list[str]) -> None:
    said = atoll("train", "diloco", "--period", "3", "--workers", "2", *small, "--json")
    assert said.status == 0
    assert said.out.count("\n") == 1
    result = said.json
    assert result.keys() >= PROMISED
    assert (result["method"], result["workers"], result["steps"]) == ("diloco", 2, 6)
    assert (result["rounds"], result["period"], result["tokens"]) == (2, 3, 2 * 6 * 2 * 16)
    assert len(result["val_loss_workers"]) == 2
    assert "held-out loss" in said.err


def test_a_number_that_json_does_not_know_is_null() -> None:
    assert json.loads(json_line({"loss": float("nan"), "each": (1.0, float("inf"))})) == {
        "loss": None,
        "each": [1.0, None],
    }


def test_a_run_directory_has_a_picture_and_can_be_resumed_when_it_is_done(
    atoll: Call, small: list[str], tmp_path: Path
) -> None:
    command = ["train", "diloco", "--period", "3", "--workers", "2", *small, "--out", str(tmp_path / "run")]
    first = atoll(*command)
    assert first.status == 0
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "nats per token" in first.out
    again = atoll(*command)
    assert (again.status, again.out) == (2, "")
    assert "already holds a run; give --resume" in again.err
    resumed = atoll(*command, "--resume", "--json")
    assert resumed.json["digest"] in first.out


def test_a_method_that_never_syncs_trains_one_worker_by_default(atoll: Call, small: list[str]) -> None:
    result = atoll("train", "single", *small, "--json").json
    assert (result["workers"], result["rounds"], result["period"], result["bytes_sent_per_worker"]) == (1, 0, None, 0)


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ([], "nothing was kept; give --out DIR"),
        (["--out", "nowhere"], "nothing was in nowhere yet"),
        (["--out", "here"], "with --out here --resume goes on from the last complete"),
    ],
)
def test_an_interrupt_says_how_to_go_on_and_is_status_130(
    out: list[str], sentence: str, atoll: Call, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.train import trainer

    def interrupted(*_: object, **__: object) -> None:
        if out == ["--out", "here"]:
            Path("here").mkdir()
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "train", interrupted)
    said = atoll("train", "diloco", "--period", "3", *small, *out)
    assert (said.status, said.out, said.err.count("\n")) == (130, "", 1)
    assert sentence in said.err


def test_a_full_disk_is_a_sentence_and_status_1(atoll: Call, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.train import trainer

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "runs/metrics.jsonl")

    monkeypatch.setattr(trainer, "train", full)
    said = atoll("train", "diloco", "--period", "3", *small)
    assert (said.status, said.err.count("\n")) == (1, 1)
    assert "runs/metrics.jsonl could not be used (No space left on device)" in said.err


def test_torchrun_gives_the_bits_of_one_process_and_only_rank_0_prints(atoll: Call, small: list[str]) -> None:
    command = ["train", "diloco", "--period", "3", *small, "--json"]
    alone = atoll(*command, "--workers", "2").json
    launched = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "atoll.cli",
            *command,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.count("\n") == 1
    together = json.loads(launched.stdout)
    for name in PROMISED - {"wall_s"}:
        assert together[name] == alone[name], name


def test_workers_must_be_as_many_as_torchrun_started(atoll: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = atoll("train diloco --workers 2")
    assert said.status == 2
    assert "--workers was 2, but torchrun started 3 processes" in said.err
    assert atoll("compare diloco").status == 2
