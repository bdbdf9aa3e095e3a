"""The Trainer of transformers with a SyncCallback against a plain loop of the same arithmetic, bit for bit."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from atoll.errors import CheckpointError, UsageError
from atoll.parts.mixers import all_mean, by_tokens, weighted
from atoll.parts.outers import sgd
from atoll.parts.schedules import every
from atoll.peers.memory import Hub
from atoll.recipes.methods import (
    data_parallel,
    decoupled,
    diloco,
    eager_diloco,
    factored_gossip,
    local_sgd,
    opendiloco,
    single,
    streaming,
)
from atoll.sync.drive import drive
from atoll.sync.gather import Gathering
from atoll.sync.rule import Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.train.callback import SyncCallback
from atoll.train.run import Method
from atoll.trees import digest
from atoll.wire import PeerGroup
from tests.train.trainers import BATCH, CLIP, LR, STEPS, Data, Net, Watch, data_of, held, loss_on, trainer


def own_loop(data: Data, strategy: Strategy, group: PeerGroup, accumulate: int) -> str:
    """What a person would write; nothing of the Trainer or the callback is in it. The digest of the shared model."""
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    with Synchronizer(model, strategy, group) as sync:
        for step in range(STEPS):
            for micro in range(accumulate):
                rows = data[(step * accumulate + micro) * BATCH :][:BATCH]
                loss = model(*(torch.stack([row[name] for row in rows]) for name in ("x", "labels")))["loss"]
                (loss / accumulate).backward()
            sync.before_step()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            inner.step()
            inner.zero_grad()
            sync.after_step(tokens=BATCH * accumulate)
    with sync.shared_weights():
        return held(model)


METHODS = [
    diloco(3),
    opendiloco(3),
    streaming(5, fragments=1, delay=2),
    data_parallel(),
    eager_diloco(3),
    factored_gossip(3),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_beside_a_plain_loop_ends_where_two_plain_loops_end(
    method: Method, accumulate: int, tmp_path: Path
) -> None:
    data = [data_of(worker, STEPS * accumulate) for worker in range(2)]
    both, mixed = Hub(2), Hub(2)

    def loop(hub: Hub, worker: int) -> str:
        if hub is mixed:  # what every callback does once, before the first step
            drive(Gathering(hub.group(worker).membership, 0, [0.0, STEPS, *[0.0] * 4]).flow(), hub.group(worker))
        return own_loop(data[worker], method.strategy, hub.group(worker), accumulate)

    with ThreadPoolExecutor(2) as pool:
        expected = set(pool.map(loop, [both, both], range(2)))
    callback, model = SyncCallback(method, mixed.group(0)), Net()
    one = trainer(tmp_path, [callback], data=data[0], model=model, gradient_accumulation_steps=accumulate)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(loop, mixed, 1)
        one.train()
        assert {held(model), other.result()} == expected
    assert len(expected) == 1
    assert callback.sync.state.step == STEPS
    assert one.args.max_grad_norm == CLIP


def test_after_training_the_model_holds_the_shared_weights(tmp_path: Path) -> None:
    model, callback = Net(), SyncCallback(diloco(period=3), Hub(1).group(0))
    trainer(tmp_path, [callback], data=data_of(0, STEPS), model=model).train()
    assert held(model) == callback.sync.state.digest()


RESUMED = [(diloco(4), 5), (streaming(4, fragments=1, delay=2), 9), (data_parallel(), 5)]


@pytest.mark.parametrize(("method", "at"), RESUMED, ids=lambda value: value.name if isinstance(value, Method) else "")
def test_resuming_inside_a_round_equals_an_uninterrupted_run(method: Method, at: int, tmp_path: Path) -> None:
    def run(resume: bool) -> tuple[str, str]:
        callback = SyncCallback(method, Hub(1).group(0))
        model = Net(dropout=0.2)
        trainer(
            tmp_path,
            [callback],
            data=data_of(0, 2 * STEPS),
            model=model,
            save_strategy="steps",
            save_steps=at,
            gradient_accumulation_steps=2,
        ).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}") if resume else None)
        return callback.sync.state.digest(), digest(model.named_parameters())

    assert run(resume=False) == run(resume=True)


@pytest.mark.parametrize(("when", "epoch"), [("steps", STEPS), ("epoch", 2)])
def test_evaluations_and_checkpoints_see_the_shared_model_and_disturb_nothing(
    when: str, epoch: int, tmp_path: Path
) -> None:
    data, held_out = data_of(0, epoch), data_of(7, 2)

    def run(folder: str, **options: Any) -> Watch:
        watch = Watch()
        one = trainer(tmp_path / folder, [watch, SyncCallback(diloco(3), Hub(1).group(0))], data=data, **options)
        one.train()
        return watch

    plain = run("plain")
    watched = run(
        "watched",
        eval_strategy=when,
        eval_steps=2,
        save_strategy=when,
        save_steps=2,
        eval_on_start=True,
        per_device_eval_batch_size=len(held_out),
    )
    assert watched.live == plain.live
    start = Net()
    assert watched.losses[0] == watched.losses[2] == pytest.approx(loss_on(start, held_out), rel=1e-6)
    assert watched.losses[4] != watched.losses[2]
    saved = load_file(tmp_path / "watched" / "checkpoint-2" / "model.safetensors")
    assert digest(saved) == digest(start.state_dict())


def test_the_best_model_at_the_end_is_the_best_of_the_shared_models(tmp_path: Path) -> None:
    too_far = Strategy((Rule(every(3), outer=sgd(100.0)),))  # so that the last model is not the best
    model, watch = Net(), Watch()
    one = trainer(
        tmp_path,
        [watch, SyncCallback(too_far, Hub(1).group(0))],
        data=data_of(0, STEPS),
        model=model,
        save_strategy="best",
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
    )
    one.train()
    best = min(watch.losses.values())
    assert best < 0.9 * watch.losses[STEPS]
    assert loss_on(model, data_of(7, 2)) == pytest.approx(best, rel=1e-5)


def run_to(folder: Path, method: Method | Strategy, *, resume: bool = False, **options: Any) -> SyncCallback:
    callback = SyncCallback(method, Hub(1).group(0))
    one = trainer(folder, [callback], data=data_of(0, STEPS), **{"save_strategy": "steps", "save_steps": 5} | options)
    one.train(resume_from_checkpoint=resume or None)
    return callback


def test_what_cannot_work_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Strategy((Rule(every(2), outer=sgd(1.0), mixer=weighted(by_tokens(), all_mean())),))
    with pytest.raises(UsageError, match="no rules"):
        run_to(tmp_path, single())
    with pytest.raises(UsageError, match="include_num_input_tokens_seen='all'"):
        run_to(tmp_path, tokens)
    for late, due in ((diloco(STEPS + 1), STEPS + 1), (streaming(STEPS - 2, fragments=2, delay=1), STEPS + 4)):
        with pytest.raises(UsageError, match=f"after {due} optimizer steps, but the Trainer takes 11"):
            run_to(tmp_path, late)
    with pytest.raises(UsageError, match="run it by `atoll train`"):
        run_to(tmp_path, decoupled())
    with pytest.raises(UsageError, match="write save_total_limit=2"):
        run_to(tmp_path, diloco(3), save_total_limit=1)
    used = run_to(tmp_path, diloco(3))
    with pytest.raises(UsageError, match="make a new group and a new callback"):
        trainer(tmp_path, [used], data=data_of(0, STEPS)).train()
    launched = SimpleNamespace(parallel_mode=ParallelMode.DISTRIBUTED, save_total_limit=None)
    with pytest.raises(UsageError, match="start each worker as a plain process"):
        SyncCallback(diloco(3), Hub(1).group(0)).on_train_begin(launched, None, None, model=Net())
    half = SimpleNamespace(parallel_mode=ParallelMode.NOT_PARALLEL, save_total_limit=None, fp16=True)
    with pytest.raises(UsageError, match="write bf16=True"):
        SyncCallback(data_parallel(), Hub(1).group(0)).on_train_begin(half, None, None, model=Net())
    with pytest.raises(UsageError, match=r"before trainer\.train"):
        _ = SyncCallback(diloco(3), Hub(1).group(0)).sync
    monkeypatch.setattr("atoll.train.callback.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'atoll\[hf\]'"):
        SyncCallback(diloco(3), Hub(1).group(0))


def test_workers_that_would_write_into_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "atoll-worker-1").touch()
    with pytest.raises(UsageError, match=r"worker 0 was to save into .* also the folder of worker-0 and worker-1"):
        run_to(tmp_path, diloco(3))


def test_workers_of_different_lengths_are_refused_before_the_first_step(tmp_path: Path) -> None:
    hub = Hub(2)
    other = SyncCallback(diloco(3), hub.group(1))
    args = SimpleNamespace(save_strategy="no", output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=0, max_steps=STEPS + 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other._compare, args, state)
        with pytest.raises(UsageError, match="worker 0 trains from optimizer step 0 to 11 but worker 1 from 0 to 12"):
            trainer(tmp_path, [SyncCallback(diloco(3), hub.group(0))], data=data_of(0, STEPS)).train()
        assert isinstance(waiting.exception(), UsageError)


def test_a_checkpoint_that_is_not_this_runs_is_refused(tmp_path: Path) -> None:
    run_to(tmp_path / "a", diloco(3))
    for later in (10, STEPS):
        shutil.rmtree(tmp_path / "a" / f"checkpoint-{later}")
    path = tmp_path / "a" / "checkpoint-5" / "atoll-worker-0.safetensors"
    whole = path.read_bytes()

    def refused(why: str, method: Method = diloco(3)) -> None:  # noqa: B008 (a method is a frozen value)
        with pytest.raises(CheckpointError, match=why):
            run_to(tmp_path / "a", method, resume=True)

    refused("resume with the method it was made with", local_sgd(3))
    path.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read")
    path.write_bytes(whole.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    refused("has format 9")
    path.unlink()
    refused("does not exist; resume all workers from a step whose checkpoints in output_dir are complete")
    run_to(tmp_path / "b", diloco(3), max_grad_norm=1.0)
    shutil.copy(tmp_path / "b" / "checkpoint-5" / "atoll-worker-0.safetensors", path)
    refused("is not of the checkpoint that the Trainer loaded")


def test_a_checkpoint_asked_for_after_the_callback_says_that_it_cannot_be_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 4

    trainer(tmp_path, [SyncCallback(diloco(3), Hub(1).group(0)), Late()], data=data_of(0, STEPS)).train()
    assert "put SyncCallback last" in caplog.text
    assert not (tmp_path / "checkpoint-4" / "atoll-worker-0.safetensors").exists()


def test_a_round_that_does_not_count_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = data_of(0, STEPS)
    data[-1]["labels"] = torch.full((1,), torch.nan)
    trainer(tmp_path, [SyncCallback(diloco(STEPS), Hub(1).group(0))], data=data).train()
    assert f"step {STEPS}: round 0 of fragment 0 did not count" in caplog.text


def test_tokens_are_those_the_trainer_counts(tmp_path: Path) -> None:
    model, callback = Net(), SyncCallback(diloco(3), Hub(1).group(0))
    model.main_input_name = "x"  # each row of three numbers is three tokens, as the Trainer counts
    trainer(
        tmp_path,
        [callback],
        data=data_of(0, 2 * STEPS),
        model=model,
        gradient_accumulation_steps=2,
        include_num_input_tokens_seen="all",
    ).train()
    assert callback.sync.state.work.tokens == STEPS * 2 * BATCH * 3
