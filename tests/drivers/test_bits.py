"""The same strategy and seed give the same bits of the shared model, whatever drives the flows and moves the bytes."""

import threading
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atoll.parts.codecs import cast
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import all_mean, by_tokens, weighted
from atoll.parts.outers import adam, nesterov
from atoll.parts.schedules import every, staggered
from atoll.peers.memory import Hub
from atoll.peers.torchdist import TorchGroup
from atoll.sync.drive import take_turns
from atoll.sync.flow import Flow, drain
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.processes import gloo, launch
from atoll.testing.toys import FEATURES, Mlp, adamw, backward, move
from atoll.trees import CHUNK
from atoll.wire import Keep, PeerGroup, Reduce

SEED, STEPS, WORKERS = 4, 12, (2, 3, 4, 5)
HALF = cast(torch.float16)

STRATEGIES: dict[str, Strategy] = {
    "diloco": Strategy((Rule(every(3), outer=nesterov(0.7, 0.9)),)),
    "diloco in halves": Strategy(
        (Rule(every(3), outer=nesterov(0.7, 0.9), codec=HALF, mixer=all_mean(Reduce(HALF))),),
    ),
    "diloco kept, by tokens": Strategy(
        (Rule(every(4), outer=adam(0.3), codec=HALF, mixer=weighted(by_tokens(), all_mean(Keep()))),),
    ),
    "streaming": Strategy(
        (Rule(staggered(4, 2), outer=nesterov(0.4, 0.9), landing=After(2), merge=blend(0.5)),),
        by_name("first*", "*"),
    ),
    "data-parallel": Strategy((Rule(every(1), carry=Carry.GRADIENT, merge=leave()),)),
}


class Wide(nn.Module):
    """One layer of more than a chunk: 3 x 200,000 float32, of which a step moves every element."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.w = nn.Parameter(torch.randn(FEATURES, 200_000, generator=generator))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of one batch, x [b, 3] and y [b]."""
        return ((x.float() @ self.w).tanh().mean(1) - y.float()).square().mean() + self.w.square().mean()


def model_of(name: str) -> nn.Module:
    return Wide() if name == "many chunks" else Mlp(SEED)


STRATEGIES["many chunks"] = STRATEGIES["diloco"]
CASES = [(name, workers) for name in STRATEGIES for workers in (WORKERS if name != "many chunks" else (3,))]


class Training:
    """One worker's own loop, in two halves around each place where it syncs."""

    def __init__(self, name: str, group: PeerGroup) -> None:
        self.worker, self.model = group.membership.me, model_of(name)
        self.optimizer = adamw(self.model.parameters())
        self.sync = Synchronizer(self.model, STRATEGIES[name], group)

    def backward(self, step: int) -> None:
        backward(self.model, SEED, self.worker, step)

    def move(self) -> None:
        move(list(self.model.parameters()), self.optimizer, max_norm=0.5)

    @property
    def tokens(self) -> int:
        return 8 + self.worker

    def run(self) -> str:
        """Train alone in this thread; the digest of the shared model."""
        with self.sync:
            for step in range(1, STEPS + 1):
                self.backward(step)
                self.sync.before_step()
                self.move()
                self.sync.after_step(self.tokens)
        return self.sync.state.digest()


def in_turns(name: str, workers: int) -> list[str]:
    hub = Hub(workers)
    groups = [hub.group(worker) for worker in range(workers)]
    trainings = [Training(name, group) for group in groups]

    def advance(flows: Sequence[Flow | None]) -> None:
        take_turns([flow for flow in flows if flow], groups)

    for step in range(1, STEPS + 1):
        for training in trainings:
            training.backward(step)
        advance([training.sync.before() for training in trainings])
        for training in trainings:
            training.move()
        advance([training.sync.after(training.tokens) for training in trainings])
    advance([drain(training.sync.state) for training in trainings])
    return [training.sync.state.digest() for training in trainings]


def in_threads(name: str, workers: int) -> list[str]:
    hub, digests = Hub(workers), [""] * workers

    def work(worker: int) -> None:
        torch.set_num_threads(1)
        digests[worker] = Training(name, hub.group(worker)).run()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return digests


def over_gloo(rank: int, folder: Path) -> dict[tuple[str, int], str]:
    """This rank's digest of every case it has a part in."""
    digests: dict[tuple[str, int], str] = {}
    for workers in WORKERS:
        if rank < workers:
            with gloo(rank, workers, folder / str(workers)), closing(TorchGroup()) as group:
                for name, count in CASES:
                    if count == workers:
                        digests[name, count] = Training(name, group).run()
    return digests


@pytest.fixture(scope="module")
def gloo_digests(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], str]]:
    """By rank: all cases in one launch."""
    return launch(over_gloo, max(WORKERS), tmp_path_factory.mktemp("gloo"))


@cache
def reference(name: str, workers: int) -> str:
    """The digest in turns, which all workers share."""
    digests = in_turns(name, workers)
    assert len(set(digests)) == 1
    return digests[0]


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_threads_give_the_bits_of_turns(name: str, workers: int) -> None:
    assert in_threads(name, workers) == [reference(name, workers)] * workers


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_gloo_processes_give_the_bits_of_turns(
    name: str, workers: int, gloo_digests: list[dict[tuple[str, int], str]]
) -> None:
    seen = [digests[name, workers] for digests in gloo_digests if (name, workers) in digests]
    assert seen == [reference(name, workers)] * workers


def test_every_case_trains_to_another_model_and_the_long_one_has_several_chunks() -> None:
    digests = {case: reference(*case) for case in CASES}
    assert len(set(digests.values())) == len(CASES)
    assert sum(parameter.numel() for parameter in Wide().parameters()) > 2 * CHUNK
