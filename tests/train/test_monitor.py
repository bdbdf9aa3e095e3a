"""What a run says of its workers' disagreement is true, and an alarm that follows it decides who meets."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.parts.gossip import alarmed, pairs
from atoll.parts.mixers import all_mean
from atoll.peers.torchdist import TorchGroup
from atoll.recipes import methods
from atoll.recipes.gossip import factored
from atoll.testing.processes import gloo, launch
from atoll.train.checkpoint import Checkpoints
from atoll.train.corpus import load_corpus
from atoll.train.disagreement import all_pairs, from_sketches, generalised, probe, sketch
from atoll.train.dynamics import POOLS, Dynamics
from atoll.train.material import EVALUATED, ROWS
from atoll.train.monitor import Monitor
from atoll.train.run import Method, Result, Run
from atoll.train.shards import held_out_batches
from atoll.train.tokens import bytes_tokenizer
from atoll.train.trainer import train
from atoll.train.worker import Worker
from tests.train.reef import Reef, check_resumes, go, records, small

ON, OFF = 0.014, 0.012
WARY = factored("wary", 2, all_mean(), alarmed(pairs(0), on=ON, off=OFF), 0.7, 0.9)
"""Deltas are mixed in pairs while the alarm is on; points are always."""

Seen = list[list[nn.Module]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Copies of the workers' live models at each comparison."""
    found: Seen = []
    real = Monitor.measure

    def measure(monitor: Monitor, workers: Sequence[Worker], groups: Sequence[Any]) -> Any:
        found.append([copy.deepcopy(worker.model) for worker in workers])
        return real(monitor, workers, groups)

    monkeypatch.setattr(Monitor, "measure", measure)
    return found


def rows(text: Path, count: int) -> Tensor:
    """The first rows of the held-out text."""
    corpus = load_corpus(f"text:{text}", bytes_tokenizer())
    return torch.cat(held_out_batches(corpus, batch=ROWS, length=16, most=EVALUATED))[:count]


def relative(models: Sequence[nn.Module]) -> tuple[float, float]:
    """Root mean square distance of all weights from their mean, and its part of the mean's norm."""
    flat = [torch.cat([each.detach().flatten() for each in model.parameters()]).double() for model in models]
    mean = sum(flat[1:], start=flat[0]) / len(flat)
    apart = math.sqrt(sum(float((each - mean).square().sum()) for each in flat) / len(flat))
    return apart, apart / float(mean.norm())


@pytest.mark.parametrize(("method", "workers"), [("local-m1-m2", 3), ("diloco", 2), ("decoupled", 2), ("diloco", 9)])
def test_the_distance_at_the_end_of_each_round_is_that_of_the_live_models(
    method: str, workers: int, text: Path, tmp_path: Path, seen: Seen
) -> None:
    """Of 40 tokens that are asked for, whole rows of 16 are read. Over eight workers are compared all at once."""
    made = methods.decoupled(4, fragments=2) if method == "decoupled" else methods.METHODS[method](4)
    result = go(small(text, made, workers=workers, probe=40), out=tmp_path / "run")
    told = [record for record in records(tmp_path / "run") if record["kind"] == "disagreement"]
    assert [record["step"] for record in told] == [4, 8, 12] == [step for step, _, _ in result.disagreement]
    for models, record, (_, js, l2) in zip(seen, told, result.disagreement, strict=True):
        logs = [probe(model, rows(text, 2)) for model in models]
        assert js == record["js"] == (all_pairs(logs) if workers < 9 else generalised(logs))
        assert 0 < js < 1
        distance, part = relative(models)
        assert record["l2"] == pytest.approx(distance, rel=1e-9)
        assert l2 == record["l2_relative"] == pytest.approx(part, rel=1e-9)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["disagreement"][-1][0] == 12
    assert result.js == result.disagreement[-1][1], "of the last quarter, in which one round ends"


def test_without_a_period_workers_are_compared_twenty_times(text: Path) -> None:
    result = go(small(text, methods.sparta(0.1), steps=45))
    assert [step for step, _, _ in result.disagreement] == list(range(2, 46, 2))


def test_probe_zero_measures_nothing(text: Path, tmp_path: Path, seen: Seen) -> None:
    result = go(small(text, methods.diloco(4), probe=0), out=tmp_path / "run")
    assert (result.disagreement, result.js, seen) == ((), None, [])
    assert not [record for record in records(tmp_path / "run") if record["kind"] == "disagreement"]


def test_one_worker_is_compared_with_nobody(text: Path) -> None:
    assert go(small(text, methods.diloco(4), workers=1)).disagreement == ()
    ramp = go(small(text, methods.diloco(4), workers=3, dynamics=Dynamics(pool=POOLS["ramp-down"])))
    assert [step for step, _, _ in ramp.disagreement] == [4, 8]


class Sprayed(Reef):
    """Drops out half of what it hears, while it trains."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.5, self.training)


def test_comparing_changes_no_bit_of_training(text: Path, tmp_path: Path) -> None:
    """Random numbers, modes and gradients are as if nobody had looked."""
    run = small(text, methods.local_m1_m2(3))
    looked = go(run, out=tmp_path / "looked", build=Sprayed)
    apart = go(replace(run, probe=0), out=tmp_path / "apart", build=Sprayed)
    assert replace(looked, disagreement=(), wall_s=0.0) == replace(apart, wall_s=0.0)
    told = [record for record in records(tmp_path / "looked") if record["kind"] != "disagreement"]
    assert told == records(tmp_path / "apart")


def alarms(distances: Sequence[float]) -> list[bool]:
    """On above ON, off below OFF, else as it was."""
    now, found = False, list[bool]()
    for distance in distances:
        now = distance > ON or (now and distance >= OFF)
        found.append(now)
    return found


def meetings(out: Path) -> list[bool]:
    """In which rounds worker 0 met somebody to mix deltas."""
    landed = [record for record in records(out) if record["kind"] == "landed" and record["key"][0] == 1]
    assert [record["key"][2] for record in landed] == list(range(len(landed)))
    return [len(record["peers"]) > 1 for record in landed]


def wary(text: Path, **options: object) -> Run:
    return small(text, WARY, steps=16, **options)


def test_deltas_are_mixed_in_the_rounds_at_whose_end_the_alarm_is_on(text: Path, tmp_path: Path) -> None:
    result = go(wary(text), out=tmp_path / "run")
    expected = alarms([js for _, js, _ in result.disagreement])
    assert meetings(tmp_path / "run") == expected
    assert expected[:5] == [False, True, True, False, True]
    never = replace(WARY, strategy=factored("wary", 2, all_mean(), alarmed(pairs(0), 1, 0), 0.7, 0.9).strategy)
    quiet = go(replace(wary(text), method=never))
    one = quiet.bytes_sent_per_worker // 8
    assert result.bytes_sent_per_worker == quiet.bytes_sent_per_worker + sum(expected) * one


def test_the_alarm_is_the_same_on_all_workers_and_survives_a_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = wary(text, workers=4)
    check_resumes(run, tmp_path / "run", monkeypatch, save_every=5)
    checkpoints = Checkpoints(tmp_path / "run")
    told = [js for _, js, _ in go(run).disagreement]
    for step in checkpoints.steps():
        signals = [checkpoints.read(step, worker)[0]["sync"]["signals"][0] for worker in range(4)]
        assert all(each["alarm"] == float(alarms(told)[step // 2 - 1]) for each in signals)
        assert all(each["js"] == told[step // 2 - 1] for each in signals)


def test_an_alarm_without_a_probe_is_never_on(text: Path, tmp_path: Path) -> None:
    go(wary(text, probe=0), out=tmp_path / "run")
    assert meetings(tmp_path / "run") == [False] * 8


def over_gloo(rank: int, meeting: Path, run: Run, out: Path) -> Result:
    """One of two processes."""
    with gloo(rank, 2, meeting):
        group = TorchGroup()
        return train(run, [group], build=Reef, out=out, quiet=True)


def test_processes_tell_one_another_sketches_and_take_the_same_alarm(text: Path, tmp_path: Path, seen: Seen) -> None:
    """An alarm follows sketches in turns too, and so all bits are the same."""
    run = wary(text)
    turns = go(run, out=tmp_path / "turns")
    first, second = launch(over_gloo, 2, tmp_path / "meeting", run, tmp_path / "gloo")
    assert first.digest == second.digest == turns.digest
    assert first.val_loss_workers == turns.val_loss_workers
    assert meetings(tmp_path / "gloo") == meetings(tmp_path / "turns")
    told = [js for _, js, _ in first.disagreement]
    logs = [[probe(model, rows(text, 32)) for model in models] for models in seen]
    assert told == [from_sketches([sketch(log) for log in each]) for each in logs]
    assert told == [js for _, js, _ in second.disagreement] == [js for _, js, _ in turns.disagreement]
    assert all(bound < all_pairs(each) for bound, each in zip(told, logs, strict=True))
    assert all(math.isnan(l2) for _, _, l2 in first.disagreement)
    assert Result.from_json(first.as_json()).js == first.js
    rmtree(tmp_path / "gloo" / "checkpoints" / "step-00000016")
    assert go(run, out=tmp_path / "gloo", resume=True).digest == turns.digest, "one process goes on where two stopped"


def test_a_method_without_an_alarm_sets_none(text: Path, tmp_path: Path) -> None:
    plain: Method = methods.diloco(4)
    go(small(text, plain), out=tmp_path / "run")
    meta, _ = Checkpoints(tmp_path / "run").read(12, 0)
    assert meta["sync"]["signals"][0].keys() == {"speed", "js"}
