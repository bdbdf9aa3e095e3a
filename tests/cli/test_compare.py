"""`atoll compare`: the same runs as `atoll train`, as a table, a picture and a file; half-finished ones go on."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from atoll.cli import compare as comparing
from atoll.cli.compare import compare, entries, side_by_side_at_most
from atoll.cli.options import Options
from atoll.cli.specs import rows
from atoll.cli.table import lines
from atoll.files import write_json
from atoll.train.plots import plot_curves
from atoll.train.run import Result
from tests.cli.conftest import Call


def result(loss: float, **others: object) -> Result:
    made = Result("diloco", 2, 10, 5, 2, 100, loss, (loss,), 1000, 1.0, "d" * 64, 0, "text")
    return replace(made, **others)  # pyright: ignore[reportArgumentType]


def test_a_comparison_gives_the_runs_of_train(atoll: Call, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = atoll(
        "compare",
        "single",
        "diloco:period=3",
        *small,
        "--workers",
        "2",
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--out",
        out,
        "--json",
    )
    assert said.status == 0
    assert said.out.count("\n") == 1
    runs = said.json["runs"]
    assert [(run["label"], run["seed"], run["workers"]) for run in runs] == [
        ("single", 0, 1),
        ("single", 1, 1),
        ("diloco:period=3", 0, 2),
        ("diloco:period=3", 1, 2),
    ]
    alone = atoll("train", "diloco", "--period", "3", *small, "--workers", "2", "--seed", "1", "--json").json
    assert runs[3]["digest"] == alone["digest"]
    assert json.loads((out / "compare.json").read_text()) == said.json
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "diloco:period=3" in said.err
    assert "held-out loss" in said.err


def test_runs_side_by_side_give_the_bits_of_runs_one_by_one(atoll: Call, small: list[str], tmp_path: Path) -> None:
    command = ["compare", "data-parallel", "diloco", "--period", "3", *small, "--workers", "2", "--json", "--out"]
    together = atoll(*command, tmp_path / "two", "--jobs", "2").json["runs"]
    apart = atoll(*command, tmp_path / "one", "--jobs", "1").json["runs"]
    assert [run["digest"] for run in together] == [run["digest"] for run in apart]
    assert not list(tmp_path.rglob("*.part"))


def test_finished_runs_are_not_repeated_and_others_go_on(
    atoll: Call, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.train import trainer

    done: list[tuple[str, bool]] = []
    real = trainer.train

    def train(run: object, groups: object, **options: object) -> object:
        done.append((run.method.name, options["resume"]))  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        if len(done) == 2:
            raise KeyboardInterrupt
        return real(run, groups, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(trainer, "train", train)
    command = ["compare", "data-parallel", "diloco", "--period", "3", *small, "--workers", "2", "--jobs", "1"]
    command += ["--out", str(tmp_path / "out")]
    first = atoll(*command)
    assert first.status == 130
    assert f"--out {tmp_path / 'out'} --resume goes on" in first.err
    assert not (tmp_path / "out" / "compare.json").exists()
    assert atoll(*command).status == 2, "without --resume it is refused"
    assert atoll(*command, "--resume").status == 0
    assert done == [("data-parallel", False), ("diloco", False), ("diloco", False)]
    other = atoll(*command, "--resume", "--lr", "0.5")
    assert other.status == 1
    assert "holds a run with other options than data-parallel has now" in other.err


def test_a_finished_run_that_diverged_is_not_repeated_and_its_nulls_are_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_train", lambda *_, **__: pytest.fail("trained again"))
    (planned,) = entries(rows(["single"], Options(), None), seeds=1, out=tmp_path)
    saved = asdict(result(2.0)) | {"val_loss": None, "val_loss_workers": [None, 2.0]}
    saved["curve"] = [[5, 0, 2.5], [10, 0, None]]
    saved["disagreement"] = [[5, 0.5, 0.25], [10, None, None]]
    write_json(planned.out / "config.json", {"run": repr(planned.run)})
    write_json(planned.out / "result.json", saved)
    ((again,),) = compare([planned], tmp_path, resume=True).values()
    nan = math.nan
    apart = ((5, 0.5, 0.25), (10, nan, nan))
    want = result(nan, val_loss_workers=(nan, 2.0), curve=((5, 0, 2.5), (10, 0, nan)), disagreement=apart)
    assert repr(again) == repr(want)  # not ==, because nan is no number's equal, nor its own
    assert json.loads((tmp_path / "compare.json").read_text())["runs"] == [{"label": "single"} | saved]


def test_results_on_different_text_are_not_compared(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["one", "two"])
    monkeypatch.setattr(comparing, "_train", lambda *_, **__: result(1.0, data=next(texts)))
    planned = entries(rows(["single", "data-parallel"], Options(), None), seeds=1, out=tmp_path)
    with pytest.raises(comparing.DataError, match="did not read the same text"):
        compare(planned, tmp_path)


def test_without_a_directory_each_comparison_gets_a_fresh_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.cli.options import Comparing

    monkeypatch.chdir(tmp_path)
    assert Comparing().directory() == Path("runs/compare")
    Path("runs/compare").mkdir(parents=True)
    assert Comparing().directory() == Path("runs/compare-2")
    assert Comparing(out=Path("runs/compare")).directory() == Path("runs/compare")


def test_the_table_has_the_papers_columns_as_multiples_of_one_worker() -> None:
    options = Options(workers=4, steps=10, batch=2)
    compared = rows(
        ["single", "data-parallel", "diloco:period=5", "single:steps=40", "single:accumulate=4"], options, None
    )
    results = {
        "single": [result(2.0, bytes_sent_per_worker=0, rounds=0), result(2.2, bytes_sent_per_worker=0, rounds=0)],
        "data-parallel": [result(1.0, bytes_sent_per_worker=8000, rounds=10), result(1.2, bytes_sent_per_worker=8000)],
        "diloco:period=5": [
            result(
                1.4, bytes_sent_per_worker=1600, rounds=2, disagreement=((5, 0.9, 0.1), (8, 0.2, 0.1), (10, 0.4, 0.1))
            ),
            result(1.6, disagreement=((5, 0.9, 0.1), (10, 0.5, 0.1))),
        ],
        "single:steps=40": [result(0.9, bytes_sent_per_worker=0, rounds=0)],
        "single:accumulate=4": [result(1.1, bytes_sent_per_worker=0, rounds=0)],
    }
    length = 128  # of a sequence; diloco's pool was half empty, and what counts is what was trained
    trained = {
        "single": 20,
        "data-parallel": 80,
        "diloco:period=5": 40,
        "single:steps=40": 80,
        "single:accumulate=4": 80,
    }
    results = {
        label: [replace(each, tokens=trained[label] * length) for each in made] for label, made in results.items()
    }
    single, parallel, diloco, longer, micro = lines(compared, results, budget=10 * 2)
    assert [(line.time, line.compute) for line in (single, parallel, diloco, longer, micro)] == [
        (1, 1), (1, 4), (1, 2), (4, 4), (4, 4),
    ]  # fmt: skip
    assert (diloco.nbytes_part, diloco.rounds_part) == (0.2, 0.2)
    assert diloco.loss == pytest.approx(1.5)
    assert diloco.spread == pytest.approx(math.sqrt(0.02))
    assert diloco.closed == pytest.approx(0.6)
    assert (single.closed, parallel.closed, longer.spread) == (None, None, None)
    assert longer.closed == pytest.approx(1.2)
    assert diloco.js == pytest.approx(0.4), "the mean of 0.3 and 0.5: of the last quarter of each seed's run"
    assert [line.js for line in (single, parallel, longer, micro)] == [None] * 4


def test_the_table_shows_the_distance_of_the_workers_where_there_are_several(
    atoll: Call, small: list[str], tmp_path: Path
) -> None:
    command = [
        "compare",
        "single",
        "local-sgd:period=3",
        *small,
        "--workers",
        "2",
        "--jobs",
        "1",
        "--out",
        tmp_path / "out",
    ]
    said = atoll(*command)
    assert said.status == 0
    (one, two) = json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]
    assert one["disagreement"] == []
    assert [step for step, _, _ in two["disagreement"]] == [3, 6]
    shown = said.out.splitlines()
    assert any(line.rstrip(" ┃").endswith(" JS") for line in shown if "┃" in line)
    cells = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in shown if "│" in line}
    assert cells["single"] == ""
    assert cells["local-sgd:period=3"] == f"{two['disagreement'][-1][1]:.3f}"


def test_a_picture_is_drawn_of_curves_with_gaps_and_without_any_bytes(tmp_path: Path) -> None:
    curve = ((5, 0, 3.0), (10, 500, float("nan")))
    groups = {"single": [result(2.0, curve=((5, 0, 3.0), (10, 0, 2.0)))], "diloco": [result(1.0, curve=curve)] * 2}
    plot_curves(tmp_path / "new" / "some.png", groups)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["some.png"]


def test_the_picture_has_a_third_part_where_workers_were_compared(tmp_path: Path) -> None:
    curve = ((5, 0, 3.0), (10, 500, 2.0))
    apart = ((5, 0.2, 0.1), (10, float("nan"), float("nan")))
    plain = {"single": [result(2.0, curve=curve)]}
    both = plain | {"diloco": [result(1.0, curve=curve, disagreement=apart), result(1.1, curve=curve)]}
    plot_curves(tmp_path / "plain.png", plain)
    plot_curves(tmp_path / "both.png", both | {"eager": [result(1.0, curve=curve, disagreement=apart)] * 2})
    widths = [imread(tmp_path / name).shape[1] for name in ("plain.png", "both.png")]
    assert widths == [13 * 140, 18 * 140]


def test_runs_share_the_cores_by_their_threads() -> None:
    planned = [each.run for each in rows(["single", "diloco", "streaming"], Options(), None)]
    assert side_by_side_at_most(planned, 2) == 2
    assert side_by_side_at_most(planned, 9) == 3
    assert side_by_side_at_most([replace(run, threads=10_000) for run in planned], None) == 1
