"""Islands of very different speed: the fast wait for the slow, longer than any lease, and nobody counts as gone."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.parts.codecs import float4
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean, by_tokens, weighted
from atoll.parts.outers import sgd
from atoll.parts.schedules import every, staggered
from atoll.recipes.diloco import diloco
from atoll.recipes.gossip import factored_gossip
from atoll.sync.rule import Rule, Strategy
from atoll.testing.islands import Sea, serve
from atoll.testing.toys import Mlp, adamw, backward, initial, move
from atoll.testing.turns import run_turns, shared
from atoll.wire import Keep, Landed, Lost
from tests.peers.wide.chaos import hurried, kind_of
from tests.peers.wide.crew import Sailor

LEASE_S = PATIENCE_S = 1.5
SLOW_S = 1.8
"""Of one inner step: longer than the lease."""
STEPS = 4
STREAMING = Strategy(
    (Rule(staggered(2, 2), sgd(0.8), codec=float4(), mixer=all_mean(Keep()), landing=After(1), merge=blend(0.5)),),
    by_name("first*", "*"),
)


def sail(
    strategy: Strategy, folder: Path, paces: list[float], steps: int, tokens: Callable[[int], int] = lambda worker: 8
) -> tuple[list[Sailor], list[str], int, int]:
    """Train islands whose inner steps take `paces` seconds, with a short lease. Returns them, what the coordinator
    said, its newest epoch, and how many reports it got of exchanges that took longer than anybody's patience."""
    reports, said = list[int](), list[str]()

    def passes(sender: int, _: int, frame: bytes) -> bool:
        reports.extend([sender] * (kind_of(frame) == "Report"))
        return True

    sea = Sea(passes)
    with hurried():
        server = serve(sea, folder, len(paces), said.append, lease=LEASE_S)
        try:
            crew = [
                Sailor(sea, worker, Mlp(), strategy, steps, lambda step, pace=pace: pace, PATIENCE_S, tokens(worker))
                for worker, pace in enumerate(paces)
            ]
            for sailor in crew:
                sailor.join()
            assert server.coordinator.epoch
            return crew, said, server.coordinator.epoch.number, len(reports)
        finally:
            server.close()


@pytest.mark.parametrize(
    "strategy",
    [diloco(2).strategy, STREAMING, factored_gossip(2).strategy],
    ids=["diloco", "streaming", "factored-gossip"],
)
def test_fast_islands_wait_for_a_slow_one_longer_than_lease_and_patience(strategy: Strategy, tmp_path: Path) -> None:
    syncs, _ = run_turns(Mlp(), strategy, workers=4, steps=STEPS)
    crew, said, epoch, reports = sail(strategy, tmp_path, [0.0, 0.0, SLOW_S / 5, SLOW_S], STEPS)
    assert reports, "nobody's patience came to its end"
    assert [line for line in said if "gone" in line] == []
    assert epoch == 0
    for sailor, sync in zip(crew, syncs, strict=True):
        assert sailor.entered == [0]
        assert [event for _, event in sailor.log if isinstance(event, Lost)] == []
        assert sailor.sync
        assert sailor.sync.state.digest() == sync.state.digest()


def test_a_mean_by_tokens_weighs_what_each_island_trained(tmp_path: Path) -> None:
    tokens = [40, 40, 8]
    strategy = Strategy((Rule(every(2), outer=sgd(1.0), mixer=weighted(by_tokens(), all_mean())),))
    crew, _, _, _ = sail(strategy, tmp_path, [0.0, 0.0, SLOW_S], STEPS, tokens.__getitem__)
    for sailor in crew:
        landed = [event for _, event in sailor.log if isinstance(event, Landed)]
        assert [event.weights for event in landed] == [(80.0, 80.0, 16.0)] * 2
        assert sailor.sync
        torch.testing.assert_close(shared(sailor.sync), by_hand(tokens, rounds=2, period=2), rtol=1e-12, atol=0.0)


def by_hand(tokens: list[int], rounds: int, period: int) -> list[Tensor]:
    """Anchors that become the mean of where the workers have come to, by tokens."""
    replicas = [copy.deepcopy(Mlp()) for _ in tokens]
    optimizers = [adamw(replica.parameters()) for replica in replicas]
    anchor = initial(replicas[0])
    for step in range(1, rounds * period + 1):
        for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            backward(replica, 0, worker, step)
            move(replica.parameters(), optimizer)
        if step % period == 0:
            anchor = [
                sum((there * count for there, count in zip(each, tokens, strict=True)), torch.zeros(())) / sum(tokens)
                for each in zip(*map(initial, replicas), strict=True)
            ]
            with torch.no_grad():
                for replica in replicas:
                    for parameter, value in zip(replica.parameters(), anchor, strict=True):
                        parameter.copy_(value)
    return anchor
