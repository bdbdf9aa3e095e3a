"""The same strategy and seed give the same bits of the shared model and of live, whatever drives the flows and moves
the bytes."""

import threading
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atoll.parts.codecs import cast, error_feedback, float4, quantise, statistical, topk
from atoll.parts.estimates import own
from atoll.parts.fragments import by_name
from atoll.parts.gossip import exponential, only, pairs
from atoll.parts.landings import After
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import all_mean, by_tokens, weighted
from atoll.parts.outers import adam, nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.memory import Hub
from atoll.peers.torchdist import TorchGroup
from atoll.recipes.compressed import muloco, opendiloco_sparse, sparta
from atoll.recipes.diloco import eager_diloco
from atoll.recipes.gossip import factored, factored_gossip, local_m1_m2, noloco
from atoll.sim import network
from atoll.sim.numerics import Real
from atoll.sim.pace import Pace
from atoll.sim.run import run
from atoll.sim.runner import Course
from atoll.sim.trainee import Trainee
from atoll.sync.drive import drive, take_turns
from atoll.sync.flow import Flow, drain
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.sync.shared import Sharing
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.processes import gloo, launch
from atoll.testing.toys import FEATURES, Mlp, adamw, backward, move
from atoll.testing.turns import mean_anchors
from atoll.trees import CHUNK, Tree, digest
from atoll.wire import Keep, PeerGroup, Reduce

SEED, STEPS, WORKERS = 4, 12, (2, 3, 4, 5)
HALF = cast(torch.float16)
FEW = quantise(2, block=16, by=statistical())

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
"""Everyone has the same anchor, and everyone hears everyone."""

METHODS: dict[str, Strategy] = {
    "streaming in four bits": Strategy(
        (Rule(staggered(4, 2), sgd(0.8), codec=float4(), mixer=all_mean(Keep()), landing=After(1), merge=blend(0.5)),),
        by_name("first*", "*"),
    ),
    "opendiloco-sparse": opendiloco_sparse(3, density=0.2).strategy,
    "sparseloco": Strategy(
        (Rule(every(3), sgd(1.0), codec=error_feedback(topk(16, 64, then=FEW), 0.95), mixer=all_mean(Keep())),)
    ),
    "muloco": muloco(3, bits=2).strategy,
    "sparta": sparta(0.3).strategy,
    "eager": eager_diloco(3).strategy,
    "factored-gossip": factored_gossip(3, outer_lr=0.5).strategy,
    "local-m1-m2": local_m1_m2(3).strategy,
    "subset": factored("subset", 3, all_mean(), only(("first*", "head*"), pairs()), 0.7, 0.9).strategy,
    "noloco": noloco(3).strategy,
    "exponential": Strategy((Rule(every(3), nesterov(0.6, 0.9), mixer=exponential(), estimate=own()),)),
}
REFUSED = ("sparseloco", "eager", "factored-gossip", "noloco", "exponential")
"""Also run with a worker whose parameters are not finite at the end of a round."""
LONG = ("diloco", "eager", "noloco", "exponential")
"""Also run with a model of many chunks."""


class Wide(nn.Module):
    """One layer of more than a chunk: 3 x 200,000 float32, of which a step moves every element."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.w = nn.Parameter(torch.randn(FEATURES, 200_000, generator=generator))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of one batch, x [b, 3] and y [b]."""
        return ((x.float() @ self.w).tanh().mean(1) - y.float()).square().mean() + self.w.square().mean()


CASES = [(name, workers) for name in STRATEGIES for workers in WORKERS]
# two who meet in pairs meet all, so that local and global mixing are the same
CASES += [(name, workers) for name in METHODS for workers in ((3, 5) if name == "local-m1-m2" else (2, 3, 5))]
CASES += [(f"{name}; one refused", 5) for name in REFUSED]
CASES += [(f"{name}; many chunks", 3) for name in LONG]
STRATEGIES |= METHODS
Digests = tuple[str, str]
"""Of the shared model, and of a worker's live parameters."""


class Training:
    """One worker's own loop, in two halves around each place where it syncs."""

    def __init__(self, name: str, group: PeerGroup) -> None:
        method, _, self.how = name.partition("; ")
        self.worker, self.model = group.membership.me, Wide() if self.how == "many chunks" else Mlp(SEED)
        self.optimizer = adamw(self.model.parameters())
        self.sync = Synchronizer(self.model, STRATEGIES[method], group)

    def backward(self, step: int) -> None:
        backward(self.model, SEED, self.worker, step)

    def move(self) -> None:
        move(list(self.model.parameters()), self.optimizer, max_norm=0.5)
        if self.how == "one refused" and (self.worker, self.sync.state.step + 1) == (1, 6):
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)

    @property
    def tokens(self) -> int:
        return 8 + self.worker

    def digests(self, anchors: Sequence[Tree | None]) -> Digests:
        return self.sync.state.digest(anchors), digest(self.model.named_parameters())

    def run(self) -> Digests:
        """Train alone in this thread."""
        with self.sync:
            for step in range(1, STEPS + 1):
                self.backward(step)
                self.sync.before_step()
                self.move()
                self.sync.after_step(self.tokens)
        sharing = Sharing(self.sync.state, 0)
        drive(sharing.flow(), self.sync.group)
        return self.digests(sharing.anchors)


def in_turns(name: str, workers: int) -> list[Digests]:
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
    anchors = mean_anchors([training.sync for training in trainings])
    return [training.digests(anchors) for training in trainings]


def in_threads(name: str, workers: int) -> list[Digests]:
    hub, digests = Hub(workers), [("", "")] * workers

    def work(worker: int) -> None:
        torch.set_num_threads(1)
        digests[worker] = Training(name, hub.group(worker)).run()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return digests


class Island(Trainee):
    """A worker's own loop as the simulator drives it."""

    def __init__(self, training: Training) -> None:
        super().__init__(training.sync.state)
        self.training = training

    def train(self, steps: int, since: float, now: float) -> None:
        for _ in range(steps):
            self.backward()
            self.update()

    def backward(self) -> None:
        self.training.backward(self.step + 1)

    def update(self) -> None:
        self.training.move()
        self.training.sync.after(self.training.tokens)


def on_virtual_time(name: str, workers: int, bits: float = 3e3) -> list[Digests]:
    """Islands of unequal speeds and links, whose steps take 1 s and more and whose messages take seconds."""
    hub = Hub(workers)
    groups = [hub.group(worker) for worker in range(workers)]
    trainings = [Training(name, group) for group in groups]
    scale = sum(parameter.numel() for parameter in trainings[0].model.parameters()) / 86
    ports = [network.Island(f"{m % 2}", bits * scale * (1 + m), bits * scale, 1 + 0.3 * m, 0.1) for m in range(workers)]
    where = network.Network(tuple(ports), elsewhere=network.Between(2 * bits * scale, latency=0.3))
    run([Island(training) for training in trainings], where, Real(groups), Course(STEPS, pace=Pace(SEED)), None)
    anchors = mean_anchors([training.sync for training in trainings])
    return [training.digests(anchors) for training in trainings]


def over_gloo(rank: int, workers: int, meeting: Path) -> dict[str, Digests]:
    """This rank's digests of every case of so many workers."""
    with gloo(rank, workers, meeting), closing(TorchGroup()) as group:
        return {name: Training(name, group).run() for name, count in CASES if count == workers}


@cache
def gloo_digests(workers: int, folder: Path) -> list[dict[str, Digests]]:
    """By rank, in one launch."""
    return launch(over_gloo, workers, workers, folder / str(workers), timeout=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gloo")


reference = cache(in_turns)
"""By worker."""


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_threads_give_the_bits_of_turns(name: str, workers: int) -> None:
    assert in_threads(name, workers) == reference(name, workers)


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_simulated_run_gives_the_bits_of_turns(name: str, workers: int) -> None:
    assert on_virtual_time(name, workers) == reference(name, workers)


@pytest.mark.parametrize("name", ["diloco", "streaming", "eager", "factored-gossip", "data-parallel"])
def test_a_slower_network_changes_no_number(name: str) -> None:
    assert on_virtual_time(name, 3, bits=50.0) == on_virtual_time(name, 3, bits=1e9)


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_gloo_processes_give_the_bits_of_turns(name: str, workers: int, folder: Path) -> None:
    assert [digests[name] for digests in gloo_digests(workers, folder)] == reference(name, workers)


def test_every_case_trains_to_another_model_and_the_long_ones_have_several_chunks() -> None:
    shared = [shared for case in CASES for shared, _ in reference(*case)]
    assert len(set(shared)) == len(CASES)
    assert sum(parameter.numel() for parameter in Wide().parameters()) > 2 * CHUNK


def test_all_workers_end_apart_but_those_that_adopt_one_anchor() -> None:
    together = {name for name in METHODS if len({live for _, live in reference(name, 5)}) < 5}
    assert together == {"opendiloco-sparse", "sparseloco", "muloco"}
