"""An island of two lanes, sharded by FSDP2 over gloo, gives the bits of an island of one rank.

Both lanes of an island train on the same batch, so that their averaged gradients are exactly those of one. All shards
are multiples of 64 bytes, so that vectorised operations have no tails which would round in another way.
"""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

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
from atoll.recipes.diloco import eager_diloco
from atoll.recipes.gossip import factored_gossip, noloco
from atoll.sync.drive import drive
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.sync.shared import Sharing
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.processes import gloo, launch
from atoll.trees import digest, whole
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
    "eager": eager_diloco(2).strategy,
    "factored-gossip": factored_gossip(2).strategy,
    "noloco": noloco(2).strategy,
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


class Seen(NamedTuple):
    """Digests of the shared model and of live, and the norms of the contributions of every landing."""

    shared: str
    live: str
    norms: list[tuple[float, ...]]


def train(model: nn.Module, group: PeerGroup, name: str) -> Seen:
    """One worker's run."""
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
    sharing = Sharing(sync.state, 0)
    drive(sharing.flow(), group)
    return Seen(sync.state.digest(sharing.anchors), digest(model.named_parameters(), whole), norms)


def plain(rank: int, folder: Path) -> dict[str, Seen]:
    with gloo(rank, ISLANDS, folder / "plain"), closing(TorchGroup()) as group:
        return {name: train(network(), group, name) for name in STRATEGIES}


def sharded(rank: int, folder: Path) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    with gloo(rank, 2 * ISLANDS, folder / "sharded"), closing(TorchGroup(lanes=2)) as group:
        island = init_device_mesh("cpu", (ISLANDS, 2), mesh_dim_names=("worker", "lane"))["lane"]
        for name in STRATEGIES:
            model = network()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=island)
            fully_shard(model, mesh=island)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            seen[name] = train(model, group, name)
    return seen


Both = tuple[list[dict[str, Seen]], list[dict[str, Seen]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """What the ranks saw: one per island, and two per island."""
    folder = tmp_path_factory.mktemp("lanes")
    return launch(plain, ISLANDS, folder), launch(sharded, 2 * ISLANDS, folder)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_sharded_lanes_per_island_give_the_bits_of_one_rank(name: str, both: Both) -> None:
    alone, lanes = ([seen[name] for seen in ranks] for ranks in both)
    assert len({seen.shared for seen in alone}) == 1
    for rank, of_shards in enumerate(lanes):
        one = alone[rank // 2]
        assert (of_shards.shared, of_shards.live) == (one.shared, one.live)
        for whole_norms, summed in zip(one.norms, of_shards.norms, strict=True):
            assert summed == pytest.approx(whole_norms, rel=1e-5)
