"""Workers that train unequal numbers of batches in an inner step: against plain loops."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from atoll.errors import UsageError
from atoll.parts.mixers import by_tokens
from atoll.recipes.methods import data_parallel, diloco, local_sgd, weigh
from atoll.sync.rule import Strategy
from atoll.train.checkpoint import Checkpoints
from atoll.train.corpus import load_corpus
from atoll.train.inner import Inner, InnerOptimizer
from atoll.train.model import next_token_loss
from atoll.train.run import Method, Run
from atoll.train.shards import iid, make_shards
from atoll.train.tokens import bytes_tokenizer
from tests.train.reef import Reef, check_resumes, go, small

LOADS, STEPS, LR = (3, 1, 2), 12, 0.5


@dataclass(frozen=True)
class Sgd:
    """Plain gradient descent, for which a mean of deltas is a mean of gradients."""

    def build(self, model: nn.Module) -> InnerOptimizer:
        return InnerOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR))


def loaded(text: Path, strategy: Strategy) -> Run:
    method = Method("descent", strategy, cast(Inner, Sgd()), period=1)
    return small(text, method, workers=3, loads=LOADS, steps=STEPS, accumulate=2, warmup=0, clip=1e9)


def test_with_gradient_descent_and_a_round_each_step_all_train_as_one_worker_on_all_their_batches(
    text: Path, tmp_path: Path
) -> None:
    """Only with weights by tokens: then the mean of means is the mean over all batches."""
    result = go(loaded(text, weigh(local_sgd(1), by_tokens()).strategy), out=tmp_path / "run")
    assert result.tokens == STEPS * sum(LOADS) * 2 * 2 * 16
    corpus = load_corpus(f"text:{text}", bytes_tokenizer())
    shards = make_shards(corpus, iid(), workers=3, batch=2, length=16, seed=0)
    model = Reef()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS)
    for _ in range(STEPS):
        batches = [shards[m].next_batch() for m, load in enumerate(LOADS) for _ in range(2 * load)]
        next_token_loss(model, torch.cat(batches)).backward()
        inner.step()
        inner.zero_grad()
        rates.step()
    ended = Checkpoints(tmp_path / "run").read(STEPS, 0)[1]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ended[f"model.{name}"], parameter.detach(), rtol=1e-4, atol=1e-6)
    alike = go(loaded(text, local_sgd(1).strategy), out=tmp_path / "alike")
    assert alike.digest != result.digest
    off = [
        (Checkpoints(tmp_path / "alike").read(STEPS, 0)[1][f"model.{name}"] - parameter).abs().max().item()
        for name, parameter in model.named_parameters()
    ]
    assert max(off) > 1e-3, "what weights by tokens are for is not to be seen here"


def test_a_run_of_unequal_loads_goes_on_from_a_checkpoint_as_if_nothing_had_been(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(text, weigh(diloco(4), by_tokens()), loads=(2, 1))
    assert set(check_resumes(run, tmp_path / "run", monkeypatch, save_every=3)) == {3, 6, 9, 12}


@pytest.mark.parametrize("loads", [(1,), (1, 2, 3), (1, 0), (2000, 1)])
def test_loads_that_do_not_fit_the_workers_are_refused(text: Path, loads: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"give a whole number from 1 to 1000 for each, such as 2,1"):
        small(text, diloco(4), loads=loads)


def test_gradients_have_one_weight_so_workers_that_share_them_train_alike(text: Path) -> None:
    with pytest.raises(UsageError, match="data-parallel averages gradients within a step"):
        small(text, data_parallel(), loads=(2, 1))
