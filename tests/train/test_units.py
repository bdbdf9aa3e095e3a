"""Units on an island against plain loops: what is dealt, what is told of it, and where it goes on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.parts.codecs import float4
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.memory import Hub
from atoll.recipes.gossip import factored_gossip, global_m1, noloco
from atoll.sync.drive import take_turns
from atoll.sync.rule import Rule, Strategy
from atoll.sync.state import SyncState
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.toys import Mlp
from atoll.train.blocks import BlockShard
from atoll.train.corpus import Corpus
from atoll.train.shards import Shard, iid, make_shards
from atoll.train.units import UnitShard
from atoll.wire import Keep

Lease = tuple[int, int, int]


@dataclass
class Hand:
    """Hands out what is given, and keeps what it was told."""

    given: list[Lease] = field(default_factory=list[Lease])
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    first: int = 0

    def lease(self) -> Lease | None:
        return self.given.pop(0) if self.given else None

    def account(self, **told: Any) -> None:
        self.told.append(told)


def shards() -> Sequence[Shard]:
    """Three, of 13 batches a pass, in which each token is its own place in the corpus."""
    tokens = torch.arange(3 * 40 * 8 + 5, dtype=torch.int32)
    corpus = Corpus("marked", 1 << 20, {"a": tokens}, tokens[:0], "")
    return make_shards(corpus, iid(), workers=3, batch=3, length=7, seed=4)


def unit(shard: int, index: int, accumulate: int) -> list[Tensor]:
    """By going through the shard from its beginning."""
    fresh = shards()[shard]
    batches = [fresh.next_batch() for _ in range((index + 1) * accumulate)]
    return batches[-accumulate:]


def trained(units: UnitShard, steps: int, accumulate: int) -> list[list[Tensor]]:
    return [[units.next_batch() for _ in range(accumulate)] for _ in range(steps)]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_an_island_that_is_handed_nothing_draws_the_batches_of_its_shard(accumulate: int) -> None:
    alone = shards()[1]
    expected = [[alone.next_batch() for _ in range(accumulate)] for _ in range(40)]
    assert same(trained(UnitShard(shards(), 1, accumulate, Hand()), 40, accumulate), expected)


def dealt(own: int, first: int, given: list[Lease], steps: int) -> list[tuple[int, int, bool]]:
    """(shard, index, whether by a lease) of what comes: own units, but a lease as soon as there is one, and as many own
    ones came since the last."""
    order, left, since, last = list[tuple[int, int, bool]](), list(given), 0, 0
    while len(order) < steps:
        if left and since >= last:
            shard, start, end = left.pop(0)
            order += [(shard, index, True) for index in range(start, end)]
            since, last = 0, end - start
        else:
            order.append((own, first, False))
            first, since = first + 1, since + 1
    return order[:steps]


def told_units(told: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(step + i, shard, index + i) for step, shard, index, count in told["runs"] for i in range(count)]


def nowhere() -> SyncState:
    return Synchronizer(Mlp(), Strategy(), Hub(1).group(0)).state


leases = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 5)).map(
        lambda each: (*each[:2], each[1] + each[2])
    ),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(leases, st.integers(1, 2), st.integers(1, 4), st.integers(0, 20), st.integers(0, 30))
def test_leases_and_own_units_come_in_turns_so_many_in_a_step_and_all_is_told(
    given: list[Lease], accumulate: int, load: int, first: int, start: int
) -> None:
    hand = Hand(list(given))
    units = UnitShard(shards(), 1, accumulate, hand, loads=(1, load, 2))
    units.begin(start, first)
    expected = dealt(1, first, given, 24)
    assert same(trained(units, 24, accumulate), [unit(shard, index, accumulate) for shard, index, _ in expected])
    units.tell(nowhere())
    told = [(-(-ordinal // load), *each) for ordinal, *each in told_units(hand.told[-1])]
    assert told == [(start + 1 + place // load, *each[:2]) for place, each in enumerate(expected)]
    assert hand.told[-1]["next"] == first + sum(not by_lease for *_, by_lease in expected)
    assert hand.told[-1]["loads"] == (1, load, 2)


@settings(max_examples=30, deadline=None)
@given(leases, st.integers(0, 24), st.integers(0, 3))
def test_resumed_is_uninterrupted_but_for_what_was_in_hand(given: list[Lease], done: int, first: int) -> None:
    units, hand = UnitShard(shards(), 1, 2, Hand(list(given))), Hand()
    units.begin(0, first)
    trained(units, done, 2)
    resumed = UnitShard(shards(), 1, 2, hand)
    resumed.load_state_dict(json.loads(json.dumps(units.state_dict())))
    before = dealt(1, first, given, done)
    own = first + sum(not by_lease for *_, by_lease in before)
    assert same(trained(resumed, 5, 2), [unit(1, own + place, 2) for place in range(5)])
    resumed.tell(nowhere())
    expected = [*(each[:2] for each in before), *((1, own + place) for place in range(5))]
    assert told_units(hand.told[-1]) == [(1 + place, *each) for place, each in enumerate(expected)]


def test_who_comes_in_later_goes_on_behind_what_others_know_of_and_what_it_has_trained() -> None:
    units = UnitShard(shards(), 2, 1, Hand([(0, 4, 9)]))
    trained(units, 9, 1)
    units.begin(40, 2)
    assert same(trained(units, 1, 1), [unit(2, 4, 1)])
    units.begin(50, 17)
    assert same(trained(units, 1, 1), [unit(2, 17, 1)])


@pytest.mark.parametrize("batches", [0, 1, 12, 13, 14, 40])
def test_a_shard_goes_to_any_batch(batches: int) -> None:
    there, counted = shards()[0], shards()[0]
    for _ in range(batches):
        counted.next_batch()
    there.next_batch()
    assert isinstance(there, BlockShard)
    there.seek(batches)
    assert there.state_dict() == counted.state_dict()
    assert torch.equal(there.next_batch(), counted.next_batch())


DILOCO = Strategy((Rule(every(5), outer=nesterov(0.7, 0.9)),))
STREAMING = Strategy(
    (Rule(staggered(6, 2), sgd(0.8), codec=float4(), mixer=all_mean(Keep()), landing=After(2), merge=blend(0.5)),),
    by_name("first*", "*"),
)


def last(period: int, turn: int, delay: int, step: int) -> int:
    """The last step, every period from turn on, at which a message left that has landed."""
    left = range(period + turn, step - delay + 1, period)
    return max(left, default=0)


@pytest.mark.parametrize(
    ("strategy", "workers", "expected"),
    [
        (DILOCO, 3, lambda step: [last(5, 0, 0, step)]),
        (STREAMING, 3, lambda step: sorted([last(6, 0, 2, step), last(6, 3, 2, step)])),
        (noloco(5).strategy, 2, lambda step: [last(5, 0, 0, step)]),
        # pairs mix deltas at once
        (factored_gossip(5).strategy, 2, lambda step: [last(5, 0, 0, step)]),
        # deltas stay one's own: what is in an anchor that left has come to others once that has landed
        (global_m1(5).strategy, 2, lambda step: [last(5, 0, 5, step)]),
    ],
)
def test_a_workers_work_counts_when_it_has_come_to_others(
    strategy: Strategy, workers: int, expected: Callable[[int], list[int]]
) -> None:
    hub = Hub(workers)
    groups = [hub.group(worker) for worker in range(workers)]
    syncs = [Synchronizer(Mlp(), strategy, group) for group in groups]
    hands = [Hand() for _ in groups]
    units = [UnitShard(shards(), worker, 1, hand) for worker, hand in enumerate(hands)]
    for step in range(1, 31):
        flows = [sync.after(tokens=8) for sync in syncs]
        events = take_turns([flow for flow in flows if flow], groups) if flows[0] else [[]] * workers
        for sync, each, told, hand in zip(syncs, units, events, hands, strict=True):
            each.heard(told, sync.state)
            each.tell(sync.state)
            counts = dict(hand.told[-1]["counts"])
            assert all(sorted(steps) == expected(step) for steps in counts.values()), step
            assert sorted(counts) == (list(range(workers)) if any(expected(step)) else []), step
            launched = [entry.launched for entry in sync.state.queue]
            assert hand.told[-1]["over"] == min(launched, default=step + 1) - 1


class Counting:
    """A shard that can only be gone through from its beginning."""

    size = 6
    passes = 0

    def __init__(self) -> None:
        self.drawn = 0

    def next_batch(self) -> Tensor:
        self.drawn += 1
        return torch.full((2, 3), self.drawn - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]


def test_of_shards_that_are_read_from_their_beginning_nothing_is_handed_out_and_the_own_one_is_read_on() -> None:
    hand = Hand()
    units = UnitShard([Counting(), Counting()], 1, 2, hand)
    trained(units, 3, 2)
    resumed = UnitShard([Counting(), Counting()], 1, 2, hand)
    resumed.load_state_dict(units.state_dict())
    resumed.begin(9, 5)
    assert [batch[0, 0].item() for batch in trained(resumed, 1, 2)[0]] == [10, 11]
    resumed.tell(nowhere())
    assert hand.told[-1]["shards"] == 0
