"""An island of two lanes, sharded by FSDP2 over gloo, gives the bits of an island of one rank.

Both lanes of an island train on the same batch, so that their averaged gradients are exactly those of one. All shards
are multiples of 64 bytes, so that vectorised operations have no tails which would round in another way.
"""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from atoll.parts.codecs import cast
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every, staggered
from atoll.peers.torchdist import TorchGroup
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.processes import gloo, launch
from atoll.wire import Landed, PeerGroup, Reduce

ISLANDS, STEPS, WIDTH = 2, 8, 64
HALF = cast(torch.float16)

STRATEGIES: dict[str, Strategy] = {
    "diloco": Strategy((Rule(every(2), outer=nesterov(0.7, 0.9)),)),
    "diloco in halves": Strategy((Rule(every(4), outer=nesterov(0.7, 0.9), codec=HALF, mixer=all_mean(Reduce(HALF))),)),
    "streaming": Strategy(
        (Rule(staggered(4, 2), outer=nesterov(0.4, 0.9), landing=After(1), merge=blend(0.5)),),
        by_name("0.*", "*"),
    ),
    "data-parallel": Strategy((Rule(every(1), carry=Carry.GRADIENT, merge=leave()),)),
}


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    layers = [nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(3)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_(std=WIDTH**-0.5, generator=generator)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def batch(worker: int, step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * worker + step))


def train(model: nn.Module, group: PeerGroup, name: str) -> tuple[str, list[tuple[float, ...]]]:
    """The digest of the shared model, and the norms of the contributions of every landing."""
    worker, optimizer = group.membership.me, torch.optim.AdamW(model.parameters(), lr=0.01)
    norms: list[tuple[float, ...]] = []
    with Synchronizer(model, STRATEGIES[name], group) as sync:
        for step in range(1, STEPS + 1):
            (model(batch(worker, step)) - batch(worker, step).sin()).square().mean().backward()
            events = sync.before_step()
            optimizer.step()
            optimizer.zero_grad()
            events += sync.after_step(tokens=16)
            norms += [event.norms for event in events if isinstance(event, Landed)]
    return sync.state.digest(), norms


Digests = dict[str, tuple[str, list[tuple[float, ...]]]]


def plain(rank: int, folder: Path) -> Digests:
    with gloo(rank, ISLANDS, folder / "plain"), closing(TorchGroup()) as group:
        return {name: train(network(), group, name) for name in STRATEGIES}


def sharded(rank: int, folder: Path) -> Digests:
    digests: Digests = {}
    with gloo(rank, 2 * ISLANDS, folder / "sharded"), closing(TorchGroup(lanes=2)) as group:
        island = init_device_mesh("cpu", (ISLANDS, 2), mesh_dim_names=("worker", "lane"))["lane"]
        for name in STRATEGIES:
            model = network()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=island)
            fully_shard(model, mesh=island)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            digests[name] = train(model, group, name)
    return digests


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Digests], list[Digests]]:
    """What the ranks saw: one per island, and two per island."""
    folder = tmp_path_factory.mktemp("lanes")
    return launch(plain, ISLANDS, folder), launch(sharded, 2 * ISLANDS, folder)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_sharded_lanes_per_island_give_the_bits_of_one_rank(
    name: str, both: tuple[list[Digests], list[Digests]]
) -> None:
    (one, norms), *others = [digests[name] for digests in both[0]]
    assert [digest for digest, _ in others] == [one] * (ISLANDS - 1)
    for digests in both[1]:
        digest, of_shards = digests[name]
        assert digest == one
        for whole, summed in zip(norms, of_shards, strict=True):
            assert summed == pytest.approx(whole, rel=1e-5)
