"""Does it learn, and is what it reports true?"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from atoll.errors import CheckpointError, UsageError
from atoll.parts.mixers import alone
from atoll.parts.outers import sgd
from atoll.parts.schedules import every
from atoll.peers.memory import Hub
from atoll.recipes import methods
from atoll.sync.rule import Rule, Strategy
from atoll.train.corpus import load_corpus
from atoll.train.evaluate import held_out_loss
from atoll.train.inner import AdamW, autocast
from atoll.train.material import EVALUATED, ROWS
from atoll.train.model import SIZES, build_model, parameter_count
from atoll.train.run import Data, Method, Result, Run
from atoll.train.shards import held_out_batches, iid, joint, make_shards
from atoll.train.tokens import bytes_tokenizer
from atoll.train.trainer import train
from atoll.train.worker import Worker, make_model
from atoll.trees import digest


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
    count = parameter_count(SIZES["tiny"], 256)
    assert (
        plain.bytes_sent_per_worker == 3 * 4 * count
    )  # three rounds; two workers send each other half, then return half
    assert half.bytes_sent_per_worker == 3 * 2 * count
    assert parallel.bytes_sent_per_worker == 12 * 4 * count


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_worker_is_a_plain_torch_loop_bit_for_bit(text: Path, accumulate: int) -> None:
    """Warm-up, cosine, mean over micro-batches, clipping of that mean, AdamW: by torch and transformers alone."""
    run = small(text, methods.single(), workers=1, accumulate=accumulate, clip=0.3, steps=20)
    corpus = load_corpus(f"text:{text}", bytes_tokenizer())
    (shard,) = make_shards(corpus, iid(), workers=1, batch=2, length=32, seed=0)
    model = build_model("tiny", vocab=256, length=32, seed=0)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 20)
    clipped = 0
    for _ in range(20):
        for _ in range(accumulate):
            tokens = shard.next_batch()
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / accumulate).backward()
        clipped += bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert clipped > 0
    assert go(run).digest == digest(dict(model.named_parameters()))


def test_data_parallel_is_one_worker_with_the_joint_batch_to_rounding(text: Path) -> None:
    """Three workers with two rows each, or one with the six.

    The mean of three means is the mean over six rows but for the order of fp32 sums: a relative 1e-6 or so of a
    gradient. AdamW divides by the root of its square, so an element whose gradient is near zero can turn its step of
    lr around: with 12 steps of at most 3e-3 the models may differ by a few 1e-3 in single elements, and by far less
    as a whole; the losses agree to 1e-3. A wrong sum, a wrong shard or clipping before the mean misses that by far.
    """
    run = small(text, methods.data_parallel(), workers=3, clip=0.3)
    corpus = load_corpus(f"text:{text}", bytes_tokenizer())
    shards = make_shards(corpus, iid(), workers=3, batch=2, length=32, seed=0)
    by_itself = replace(run, method=replace(methods.single(), inner=run.method.inner), workers=1)
    worker = Worker(by_itself, make_model(by_itself, 256, None), joint(shards), 1.0, Hub(1).group(0))
    for step in range(run.steps):
        tokens = worker.backward()
        worker.update(step)
        worker.sync.after_step(tokens)
    held_out = held_out_batches(corpus, batch=ROWS, length=32, most=EVALUATED)
    assert go(run).val_loss == pytest.approx(held_out_loss(worker.model, held_out, autocast("fp32")), rel=1e-3)


def test_a_fragment_that_would_never_sync_is_refused(text: Path) -> None:
    with pytest.raises(UsageError, match=r"its last fragment after 16 inner steps.*give --steps 16 or more"):
        go(small(text, methods.streaming(10, fragments=2)))


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
    assert go(run, out=tmp_path / "other", resume=True).digest == go(run).digest, "resuming what has not begun begins"


def test_a_period_longer_than_the_run_is_refused(text: Path) -> None:
    with pytest.raises(UsageError, match="--period 50 is longer than the run's --steps 12"):
        small(text, methods.diloco(50))


def test_dropout_gives_the_same_bits_in_turns_as_alone(text: Path) -> None:
    """Random numbers belong to the worker: its neighbours' draws do not change them."""
    apart = Method("apart", Strategy((Rule(every(4), outer=sgd(1.0), mixer=alone()),)), period=4)
    run = small(text, apart)

    def trained(numbers: list[int]) -> str:
        corpus = load_corpus(f"text:{text}", bytes_tokenizer())
        shards = make_shards(corpus, run.data.sharding, workers=2, batch=2, length=32, seed=0)
        hub = Hub(2)
        workers = [
            Worker(run, make_model(run, 256, None), shards[number], 1.0, hub.group(number)) for number in numbers
        ]
        for worker in workers:
            for layer in worker.model.model.layers:
                layer.register_forward_hook(lambda module, inputs, output: torch.nn.functional.dropout(output, 0.5))
        for step in range(5):
            for worker in workers:
                tokens = worker.backward()
                worker.update(step)
                worker.sync.after_step(tokens)
        return digest(dict(workers[-1].model.named_parameters()))

    assert trained([0, 1]) == trained([1]) != trained([0])


class Bigrams(torch.nn.Module):
    """Logits from the last token alone: any module trains, not only transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)
        torch.nn.init.zeros_(self.table.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def test_a_module_of_ones_own_trains_and_its_weights_are_exported(text: Path, tmp_path: Path) -> None:
    result = go(small(text, methods.diloco(4), steps=40), build=Bigrams, out=tmp_path / "run")
    uniform = float(torch.log(torch.tensor(256.0)))
    assert result.curve[-1][2] == result.val_loss < uniform - 0.05
    exported = Bigrams()
    load_model(exported, str(tmp_path / "run" / "model" / "model.safetensors"))
    assert exported.table.weight.abs().max() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_learns_and_resumes_to_the_same_digest(text: Path, tmp_path: Path) -> None:
    run = small(text, methods.streaming(6, fragments=2, delay=3), device="cuda")
    whole = go(run, out=tmp_path / "whole", save_every=2)
    again = go(run, out=tmp_path / "whole", resume=True)
    assert again.digest == whole.digest


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_one_sentence(text: Path) -> None:
    with pytest.raises(UsageError, match="--device cuda was given, but PyTorch sees no CUDA device"):
        small(text, methods.diloco(4), device="cuda")
