"""Does it learn, and is what it reports true?"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.errors import CheckpointError, UsageError
from atoll.peers.memory import Hub
from atoll.recipes import methods
from atoll.train.inner import AdamW
from atoll.train.run import Data, Method, Result, Run
from atoll.train.trainer import train


def small(text: Path, method: Method, **options: object) -> Run:
    """A run of seconds: two workers, a tiny model, the made-up text."""
    run = Run(
        replace(method, inner=AdamW(lr=3e-3)),
        data=Data(f"text:{text}", batch=2, length=32),
        workers=2,
        steps=12,
        warmup=2,
    )
    return replace(run, **options)  # pyright: ignore[reportArgumentType]


def go(run: Run, **options: object) -> Result:
    """Train all workers in turns, quietly."""
    hub = Hub(run.workers)
    return train(run, [hub.group(worker) for worker in range(run.workers)], quiet=True, **options)  # pyright: ignore[reportArgumentType]


def test_diloco_learns_the_text(text: Path) -> None:
    run = small(text, methods.diloco(10), steps=100, data=Data(f"text:{text}", batch=8, length=64))
    result = go(run)
    uniform = float(torch.log(torch.tensor(256.0)))
    assert result.val_loss < result.curve[0][2]
    assert result.val_loss < 2.2 < uniform
    assert result.rounds == 10
    assert result.tokens == 100 * 2 * 8 * 64


def test_a_seed_decides_every_bit_and_another_seed_other_ones(text: Path) -> None:
    run = small(text, methods.streaming(5, fragments=2))
    assert go(run).digest == go(run).digest != go(replace(run, seed=1)).digest


def test_the_loss_reported_is_that_of_the_exported_shared_model(text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from atoll.train.corpus import load_corpus
    from atoll.train.shards import held_out_batches
    from atoll.train.tokens import bytes_tokenizer
    from atoll.train.trainer import EVALUATED, ROWS

    run = small(text, methods.diloco(5))
    result = go(run, out=tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    total, count = 0.0, 0
    for batch in held_out_batches(
        load_corpus(f"text:{text}", bytes_tokenizer()), batch=ROWS, length=32, most=EVALUATED
    ):
        with torch.no_grad():
            logits = model(input_ids=batch[:, :-1]).logits.double()
        total -= logits.log_softmax(-1).gather(-1, batch[:, 1:, None].long()).sum().item()
        count += batch[:, 1:].numel()
    assert result.val_loss == pytest.approx(total / count, rel=1e-5)
    assert len(result.val_loss_workers) == 2


def test_bytes_are_what_the_method_sends(text: Path) -> None:
    plain = go(small(text, methods.diloco(4)))
    half = go(small(text, methods.opendiloco(4)))
    parallel = go(small(text, methods.data_parallel()))
    from atoll.train.model import SIZES, parameter_count

    count = parameter_count(SIZES["tiny"], 256)
    assert (
        plain.bytes_sent_per_worker == 3 * 4 * count
    )  # three rounds; two workers send each other half, then return half
    assert half.bytes_sent_per_worker == 3 * 2 * count
    assert parallel.bytes_sent_per_worker == 12 * 4 * count


def test_accumulated_micro_batches_are_the_joint_batch(text: Path) -> None:
    """Two micro-batches of one sequence against one batch of two: the same mean gradient but for the order of fp32
    sums.

    One step moves a parameter by at most lr in AdamW, whose sign-like first steps can amplify a rounding error of 1e-7
    in a gradient near zero; the losses of the trained models therefore agree to 1e-3, not to 1e-7.
    """
    joint = small(text, methods.single(), workers=1, data=Data(f"text:{text}", batch=2, length=32))
    parts = replace(joint, accumulate=2, data=replace(joint.data, batch=1))
    assert go(parts).tokens == go(joint).tokens
    assert go(parts).val_loss == pytest.approx(go(joint).val_loss, rel=1e-3)


def test_metrics_hold_losses_landings_and_evaluations(text: Path, tmp_path: Path) -> None:
    result = go(small(text, methods.diloco(4)), out=tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    landed = [record for record in records if record["kind"] == "landed"]
    assert [record["step"] for record in landed] == [4, 8, 12]
    assert all(record["norm"] > 0 and -1 <= record["cosine"] <= 1 for record in landed)
    assert [record for record in records if record["kind"] == "evaluation"][-1]["val_loss"] == result.val_loss
    assert json.loads((tmp_path / "run" / "result.json").read_text())["digest"] == result.digest


def test_a_directory_belongs_to_one_run(text: Path, tmp_path: Path) -> None:
    run = small(text, methods.diloco(4))
    go(run, out=tmp_path / "run")
    with pytest.raises(UsageError, match="already holds a run; give --resume"):
        go(run, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"period=4.*where you asked for.*period=6"):
        go(replace(run, method=methods.diloco(6)), out=tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match="holds no run"):
        go(run, out=tmp_path / "other", resume=True)


def test_a_period_longer_than_the_run_is_refused(text: Path) -> None:
    with pytest.raises(UsageError, match="--period 50 is longer than the run's --steps 12"):
        small(text, methods.diloco(50))


def test_dropout_gives_the_same_bits_in_turns_as_alone(text: Path) -> None:
    """Random numbers belong to the worker: its neighbours' draws do not change them."""
    from atoll.parts.mixers import alone
    from atoll.parts.outers import sgd
    from atoll.parts.schedules import every
    from atoll.sync.rule import Rule, Strategy
    from atoll.train.corpus import load_corpus
    from atoll.train.shards import make_shards
    from atoll.train.tokens import bytes_tokenizer
    from atoll.train.worker import Worker

    apart = Method("apart", Strategy((Rule(every(4), outer=sgd(1.0), mixer=alone()),)), period=4)
    run = small(text, apart)

    def trained(numbers: list[int]) -> str:
        corpus = load_corpus(f"text:{text}", bytes_tokenizer())
        shards = make_shards(corpus, run.data.sharding, workers=2, batch=2, length=32, seed=0)
        hub = Hub(2)
        workers = [Worker(run, 256, shards[number], 1.0, hub.group(number)) for number in numbers]
        for worker in workers:
            for layer in worker.model.model.layers:
                layer.register_forward_hook(lambda module, inputs, output: torch.nn.functional.dropout(output, 0.5))
        for _ in range(5):
            for worker in workers:
                tokens = worker.backward()
                worker.update()
                worker.sync.after_step(tokens)
        from atoll.trees import digest

        return digest(dict(workers[-1].model.named_parameters()))

    assert trained([0, 1]) == trained([1]) != trained([0])
