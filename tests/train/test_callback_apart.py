"""SyncCallback where each worker has an anchor of its own: the shared model is their mean, and all come for it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import IntervalStrategy

from atoll.errors import UsageError
from atoll.peers.memory import Hub
from atoll.recipes.methods import eager_diloco, factored_gossip, global_m1
from atoll.train.callback import SyncCallback
from atoll.train.run import Method
from atoll.trees import digest
from tests.train.trainers import STEPS, Net, Watch, data_of, held, trainer


class Pair:
    """Two workers of one method, each with a Trainer in a thread of its own: their models, and what they saw."""

    def __init__(self, out: Path, method: Method, **options: Any) -> None:
        hub = Hub(2)
        self.out, self.models, self.seen = out, [Net() for _ in range(2)], [Watch() for _ in range(2)]
        self.callbacks = [SyncCallback(method, hub.group(worker)) for worker in range(2)]
        self.trainers = [
            trainer(out / str(worker), [seen, callback], data=data_of(worker, STEPS), model=model, **options)
            for worker, (seen, callback, model) in enumerate(zip(self.seen, self.callbacks, self.models, strict=True))
        ]

    def train(self, resume: int = 0) -> "Pair":
        def run(worker: int) -> None:
            checkpoint = str(self.out / str(worker) / f"checkpoint-{resume}")
            try:
                self.trainers[worker].train(resume_from_checkpoint=checkpoint if resume else None)
            except BaseException:
                self.callbacks[worker].group.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))
        return self

    @property
    def held(self) -> list[str]:
        """By worker: the digest of what its model holds, and of its own anchor."""
        return [held(model) for model in self.models] + [callback.sync.state.digest() for callback in self.callbacks]

    def saved(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """By worker: the parameters of a checkpoint's model, and its own anchor, both flat."""
        parameters, anchors = list[Tensor](), list[Tensor]()
        for worker in range(2):
            folder = self.out / str(worker) / f"checkpoint-{step}"
            model = load_file(folder / "model.safetensors")
            parameters.append(torch.cat([model[name].flatten() for name, _ in Net().named_parameters()]))
            anchors.append(load_file(folder / f"atoll-worker-{worker}.safetensors")["sync.anchor.0"])
        return list(zip(parameters, anchors, strict=True))


@pytest.fixture(autouse=True)
def _two_trainers_load_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Trainer allows numpy in checkpoints for the whole process while it loads; the first of two that is done would
    take it away from the other."""
    with safe_globals():
        monkeypatch.setattr("transformers.trainer.safe_globals", nullcontext)
        yield


STEPWISE = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 5}


@pytest.mark.parametrize("method", [eager_diloco(3), global_m1(3), factored_gossip(3)], ids=lambda method: method.name)
def test_two_workers_evaluate_save_resume_and_end_with_the_mean_of_their_anchors(
    method: Method, tmp_path: Path
) -> None:
    plain = Pair(tmp_path / "plain", method).train()
    pair = Pair(tmp_path / "pair", method, eval_on_start=True, **STEPWISE).train()
    assert pair.held == plain.held
    assert [seen.live for seen in pair.seen] == [seen.live for seen in plain.seen], "whoever looks disturbs nothing"
    assert pair.seen[0].live[-1] != pair.seen[1].live[-1]
    assert pair.seen[0].losses == pair.seen[1].losses
    assert list(pair.seen[0].losses) == [0, 2, 4, 6, 8, 10, 11]
    (first, mine), (second, theirs) = pair.saved(5)
    # two workers that meet in pairs meet all
    assert torch.equal(mine, theirs) == (method.name == "factored-gossip")
    assert torch.equal(first, (mine + theirs) / 2)
    assert torch.equal(second, first)
    again = Pair(tmp_path / "pair", method, **STEPWISE).train(resume=5)
    assert again.held == pair.held


def test_after_training_both_models_hold_the_mean_of_two_anchors_that_differ(tmp_path: Path) -> None:
    pair = Pair(tmp_path, eager_diloco(3)).train()
    mine, theirs = (dict(callback.sync.state.shared()) for callback in pair.callbacks)
    mean = digest({name: (anchor + theirs[name]) / 2 for name, anchor in mine.items()})
    assert [held(model) for model in pair.models] == [mean, mean]
    assert digest(mine) != digest(theirs)


def test_workers_that_would_not_all_come_for_the_shared_model_are_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path, eager_diloco(3), **STEPWISE)
    pair.trainers[1].args.eval_strategy = IntervalStrategy.NO
    theirs = "evaluates every 0 steps from 0 on and saves every 5 .* all must come together"
    with pytest.raises(UsageError, match=f"worker 0 evaluates every 2 steps .* but worker 1 {theirs}"):
        pair.train()
    with pytest.raises(UsageError, match=r"an epoch ends at another step .* write eval_strategy='steps'"):
        Pair(tmp_path, factored_gossip(3), eval_strategy="epoch").train()
