"""Shards: who gets which blocks, in which order, and from where a run goes on."""

import json
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import CheckpointError
from atoll.train.corpus import Corpus
from atoll.train.shards import Shard, by_domain, held_out_batches, iid, joint, make_shards


def marked(*sizes: int, held_out: int = 0) -> Corpus:
    """Domains in which each token is its own position in the corpus."""
    names = "abcdefghijklmnop"
    tokens = torch.arange(sum(sizes) + held_out, dtype=torch.int32)
    *domains, last = tokens.split([*sizes, held_out])
    return Corpus("marked", 1 << 20, dict(zip(names, domains, strict=False)), last, "")


def one_pass(shard: Shard) -> list[Tensor]:
    batches: list[Tensor] = []
    begun = shard.passes
    while shard.passes == begun:
        batches.append(shard.next_batch())
    return batches


def tokens_of(batches: list[Tensor]) -> list[int]:
    return torch.cat(batches).flatten().tolist()


def test_a_pass_of_all_workers_is_each_block_of_the_corpus_once() -> None:
    corpus = marked(100, 37, 0, 63)  # 200 tokens: 20 blocks of 10, some across domains
    blocks = Counter(tuple(range(start, start + 10)) for start in range(0, 200, 10))
    shards = make_shards(corpus, iid(), workers=2, batch=5, length=9, seed=3)
    for _ in range(3):
        rows = torch.cat([batch for shard in shards for batch in one_pass(shard)])
        assert Counter(map(tuple, rows.tolist())) == blocks


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(30, 400), min_size=5, max_size=8),
    how=st.sampled_from([iid(), by_domain()]),
    workers=st.integers(1, 5),
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    seed=st.integers(0, 2**63),
)
def test_each_token_is_seen_at_most_once_per_pass_by_at_most_one_worker(
    sizes: list[int], how: iid | by_domain, workers: int, batch: int, length: int, seed: int
) -> None:
    shards = make_shards(marked(*sizes), how, workers=workers, batch=batch, length=length, seed=seed)
    seen = Counter(token for shard in shards for token in tokens_of(one_pass(shard)))
    assert max(seen.values()) == 1
    # Left over: what fills no block, blocks that do not divide among workers, and blocks that fill no batch.
    most = (length + 1) * (workers - 1 + workers * batch)
    assert sum(sizes) - most - (length + 1) * workers <= len(seen) <= sum(sizes)


def test_iid_shards_are_of_equal_size_and_hold_every_domain() -> None:
    sizes = (3000, 2000, 1007)
    shards = make_shards(marked(*sizes), iid(), workers=4, batch=2, length=9, seed=0)
    assert [shard.size for shard in shards] == [1500] * 4
    for shard in shards:
        tokens = tokens_of(one_pass(shard))
        parts = [sum(token < 3000 for token in tokens), sum(token >= 5000 for token in tokens)]
        assert parts == pytest.approx([750, 250], rel=0.25)


def test_by_domain_gives_whole_domains_from_the_largest_to_the_lightest_worker() -> None:
    corpus = marked(300, 1000, 400, 600, 500)
    borders = [0, 300, 1300, 1700, 2300, 2800]
    shards = make_shards(corpus, by_domain(), workers=3, batch=1, length=9, seed=0)
    owners = [
        {sum(token >= border for border in borders) - 1 for token in tokens_of(one_pass(shard))} for shard in shards
    ]
    assert owners == [{1}, {0, 3}, {2, 4}]  # 1000; 600, then 300 as 600 < 900 < 1000; 500 + 400
    assert [shard.size for shard in shards] == [1000, 900, 900]


def test_an_order_is_decided_by_seed_worker_and_pass_alone() -> None:
    def orders(seed: int, workers: int = 2) -> list[list[int]]:
        shards = make_shards(marked(1000), iid(), workers=workers, batch=5, length=9, seed=seed)
        return [tokens_of(one_pass(shard)) for shard in shards for _ in range(2)]

    first = orders(0)
    assert orders(0) == first
    assert orders(1) != first
    assert sorted(first[0]) == sorted(first[1])
    assert first[0] != first[1]
    before = torch.random.get_rng_state()
    orders(0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_workers_do_not_share_the_order_of_equal_portions() -> None:
    corpus = marked(1000, 1000)
    first, second = make_shards(corpus, by_domain(), workers=2, batch=10, length=9, seed=0)
    assert tokens_of(one_pass(first)) != [token - 1000 for token in tokens_of(one_pass(second))]


@pytest.mark.parametrize("how", [iid(), by_domain()])
@pytest.mark.parametrize("done", [0, 1, 6, 7, 8, 23])
def test_resumed_is_uninterrupted(how: iid | by_domain, done: int) -> None:
    def shard() -> Shard:
        return make_shards(marked(400, 370), how, workers=2, batch=3, length=15, seed=5)[1]

    whole, stopped, resumed = shard(), shard(), shard()
    for _ in range(done):
        whole.next_batch()
        stopped.next_batch()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.passes == whole.passes
    for _ in range(20):
        assert torch.equal(resumed.next_batch(), whole.next_batch())
    assert resumed.state_dict() == whole.state_dict()


def test_a_shard_can_be_wound_back() -> None:
    (shard,) = make_shards(marked(100), iid(), workers=1, batch=2, length=9, seed=0)
    start = shard.state_dict()
    first = [shard.next_batch() for _ in range(7)]
    shard.load_state_dict(start)
    assert torch.equal(torch.stack(first), torch.stack([shard.next_batch() for _ in range(7)]))


def test_a_position_in_other_data_is_refused() -> None:
    (small,) = make_shards(marked(100), iid(), workers=1, batch=2, length=9, seed=0)
    (large,) = make_shards(marked(500), iid(), workers=1, batch=2, length=9, seed=0)
    with pytest.raises(CheckpointError, match="a shard of 100 tokens, but worker 0 has one of 500"):
        large.load_state_dict(small.state_dict())


def test_a_joint_batch_is_the_workers_batches_one_after_the_other() -> None:
    def shards() -> tuple[Shard, ...]:
        return make_shards(marked(1000), iid(), workers=3, batch=2, length=9, seed=0)

    apart, together = shards(), joint(shards())
    assert together.size == sum(shard.size for shard in apart)
    for _ in range(40):
        assert torch.equal(together.next_batch(), torch.cat([shard.next_batch() for shard in apart]))
    assert together.passes == min(shard.passes for shard in apart) == 2
    again = joint(shards())
    again.load_state_dict(json.loads(json.dumps(together.state_dict())))
    assert torch.equal(again.next_batch(), together.next_batch())
    with pytest.raises(CheckpointError, match="3 joined shards, but here are 2"):
        joint(shards()[:2]).load_state_dict(together.state_dict())


def test_batches_are_int64_and_hold_one_token_more_than_is_predicted() -> None:
    (shard,) = make_shards(marked(1000), iid(), workers=1, batch=4, length=16, seed=0)
    batch = shard.next_batch()
    assert (batch.dtype, batch.shape) == (torch.int64, (4, 17))
    assert torch.equal(batch[:, :-1] + 1, batch[:, 1:])


def test_a_batch_of_16_by_128_costs_less_than_a_millisecond() -> None:
    (shard,) = make_shards(marked(1_000_000), iid(), workers=1, batch=16, length=128, seed=0)
    seconds: list[float] = []
    for _ in range(200):
        start = time.perf_counter()
        shard.next_batch()
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[100] < 1e-3


def test_held_out_rows_do_not_overlap_and_the_last_batch_may_be_smaller() -> None:
    batches = held_out_batches(marked(9, held_out=75), batch=3, length=9, most=100)
    assert torch.equal(torch.cat(batches), torch.arange(9, 79).view(7, 10))
    assert [len(batch) for batch in batches] == [3, 3, 1]


def test_few_held_out_batches_come_from_all_over() -> None:
    batches = held_out_batches(marked(0, held_out=1000), batch=2, length=9, most=5)
    assert torch.cat(batches)[:, 0].tolist() == list(range(0, 1000, 100))


@pytest.mark.parametrize("held_out", [2, 9, 10, 11, 39])
def test_a_held_out_set_smaller_than_a_batch_is_one_smaller_batch(held_out: int) -> None:
    (batch,) = held_out_batches(marked(0, held_out=held_out), batch=4, length=9, most=5)
    width = min(held_out, 10)
    assert torch.equal(batch, torch.arange(held_out // width * width).view(-1, width))
