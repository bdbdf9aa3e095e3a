"""Who meets whom: the meetings of every gossip mixer, their draws, and how fast they mix.

Contraction factors are measured on mixing matrices that are built from the mixers' own meetings. Each estimate is a
mean over `DRAWS` independent draws of meetings and of a standard normal vector, and must lie within four of its
standard errors of the closed form; the seeds are fixed.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs import cast, exact
from atoll.parts.gossip import alarmed, exponential, groups, hypercube, only, pairs
from atoll.parts.mixers import Exchange, Mixer, Situation, Work, all_mean
from atoll.trees import Layout, Spec
from atoll.wire import Codec, Keep, Membership, Reduce

examples = settings(derandomize=True, deadline=None, max_examples=100)
DRAWS = 4000
NUMBERS = st.sets(st.integers(0, 500), min_size=1, max_size=17).map(sorted).map(tuple)
"""Worker numbers: those who leave make gaps."""
COUNTS = st.integers(0, 10**6)


def layout(*names: str) -> Layout:
    return Layout.of([Spec(name, (1200,), (1,), torch.float32) for name in names])


def situation(
    workers: tuple[int, ...], me: int, round: int = 0, epoch: int = 0, *, alarm: float | None = None
) -> Situation:
    signals = {} if alarm is None else {"alarm": alarm}
    return Situation(Membership(workers, me, epoch), round, Work(10, 640), signals, exact(), layout("w"))


def meetings(mixer: Mixer, workers: tuple[int, ...], round: int = 0, epoch: int = 0) -> dict[int, Exchange]:
    return {me: mixer.exchange(situation(workers, me, round, epoch)) for me in workers}


def parts(mixer: Mixer, workers: tuple[int, ...], round: int = 0, epoch: int = 0) -> frozenset[tuple[int, ...]]:
    """Into which sets a round cuts the workers; each set is asked once (that its members agree is another test's)."""
    met: set[tuple[int, ...]] = set()
    left = set(workers)
    while left:
        to = mixer.exchange(situation(workers, min(left), round, epoch)).to
        met.add(to)
        left -= set(to)
    return frozenset(met)


# Who meets whom


@examples
@given(workers=NUMBERS, seed=st.integers(-5, 10**6), epoch=COUNTS, round=COUNTS)
def test_pairs_are_a_perfect_matching_on_which_all_agree(
    workers: tuple[int, ...], seed: int, epoch: int, round: int
) -> None:
    met = meetings(pairs(seed), workers, round, epoch)
    assert all(met[other] == meeting for meeting in met.values() for other in meeting.to)
    assert all(me in meeting.to and set(meeting.to) <= set(workers) for me, meeting in met.items())
    sizes = Counter(len(meeting.to) for meeting in met.values())
    assert sizes == Counter({2: len(workers) // 2 * 2}) + Counter({1: len(workers) % 2})
    assert all(meeting == Exchange(meeting.to, Keep(), 1.0) for meeting in met.values())


@examples
@given(workers=NUMBERS, size=st.integers(2, 9), seed=COUNTS, epoch=COUNTS, round=COUNTS)
def test_groups_hold_everyone_once_and_nobody_meets_fewer_than_asked(
    workers: tuple[int, ...], size: int, seed: int, epoch: int, round: int
) -> None:
    met = meetings(groups(size, seed), workers, round, epoch)
    assert all(met[other] == meeting for meeting in met.values() for other in meeting.to)
    cut = {meeting.to for meeting in met.values()}
    assert sorted(worker for group in cut for worker in group) == list(workers)
    sizes = {len(group) for group in cut}
    assert min(sizes) >= min(size, len(workers))
    assert max(sizes) - min(sizes) <= 1
    assert len(cut) == max(1, len(workers) // size)


@examples
@given(workers=NUMBERS, round=COUNTS)
def test_the_hypercube_pairs_neighbours_along_one_dimension(workers: tuple[int, ...], round: int) -> None:
    met = meetings(hypercube(), workers, round)
    dimensions = math.ceil(math.log2(len(workers)))
    for index, me in enumerate(workers):
        other = index ^ 2 ** (round % dimensions) if dimensions else index
        both = {me, workers[other]} if other < len(workers) else {me}
        assert met[me] == Exchange(tuple(sorted(both)), Keep(), 1.0)


@examples
@given(workers=NUMBERS, round=COUNTS)
def test_the_exponential_graph_tells_ahead_and_hears_from_behind(workers: tuple[int, ...], round: int) -> None:
    count = len(workers)
    for me, meeting in meetings(exponential(), workers, round).items():
        if count == 1:
            assert meeting == Exchange((me,), Keep(), 1.0)
            continue
        hop = 2 ** (round % math.ceil(math.log2(count)))
        assert (meeting.to, meeting.fold, meeting.weight) == (workers, Keep(), 1.0)
        assert meeting.edges is not None
        assert meeting.edges.tells == (workers[(workers.index(me) + hop) % count],)
        assert set(meeting.edges.hears) == {me, workers[(workers.index(me) - hop) % count]}
        assert list(meeting.edges.hears) == sorted(meeting.edges.hears)


# The draws


@examples
@given(workers=NUMBERS, seed=COUNTS, epoch=COUNTS, round=COUNTS)
def test_pairs_are_neighbours_in_the_order_of_their_sha256(
    workers: tuple[int, ...], seed: int, epoch: int, round: int
) -> None:
    keyed = sorted((hashlib.sha256(f"{seed}:{epoch}:{round}:{w}".encode()).hexdigest(), w) for w in workers)
    order = [worker for _, worker in keyed]
    want = {tuple(sorted(order[index : index + 2])) for index in range(0, len(order), 2)}
    assert parts(pairs(seed), workers, round, epoch) == want


SIXTEEN = tuple(range(16))


@pytest.mark.parametrize("make", [pairs, lambda seed: groups(4, seed)], ids=["pairs", "groups"])
def test_each_of_seed_epoch_and_round_changes_the_draw(make: Callable[[int], Mixer]) -> None:
    """Two of 16 workers' 2 million matchings (2.6 million cuts in four) coincide by chance once in millions."""
    draws = [(seed, epoch, round) for seed in (0, 1, 11) for epoch in (0, 1, 11) for round in (0, 1, 11)]
    met = [parts(make(seed), SIXTEEN, round, epoch) for seed, epoch, round in draws]
    assert len(set(met)) == len(draws)


QUANTILES = {2: 13.816, 8: 26.124, 9: 27.877, 14: 36.123, 34: 65.247}
"""Of chi square by degrees of freedom: exceeded once in a thousand."""


def even(cells: Iterable[object], kinds: int) -> bool:
    """Whether every one of `kinds` cells is as frequent as the others, by Pearson's chi square."""
    seen = Counter(cells)
    expected = seen.total() / kinds
    assert len(seen) == kinds
    return sum((count - expected) ** 2 / expected for count in seen.values()) < QUANTILES[kinds - 1]


VARIED: dict[str, Callable[[Callable[[int], Mixer], int, int], frozenset[tuple[int, ...]]]] = {
    "seed": lambda make, count, draw: parts(make(draw), tuple(range(count)), 3, 1),
    "epoch": lambda make, count, draw: parts(make(5), tuple(range(count)), 3, draw),
    "round": lambda make, count, draw: parts(make(5), tuple(range(count)), draw, 1),
}


@pytest.mark.parametrize("varied", VARIED)
@pytest.mark.parametrize(("count", "matchings"), [(4, 3), (5, 15), (6, 15)])
def test_all_matchings_are_equally_likely(count: int, matchings: int, varied: str) -> None:
    assert even((VARIED[varied](pairs, count, draw) for draw in range(3000)), matchings)


@pytest.mark.parametrize("varied", VARIED)
@pytest.mark.parametrize(("count", "size", "cuts"), [(6, 3, 10), (7, 3, 35)])
def test_all_cuts_into_groups_are_equally_likely(count: int, size: int, cuts: int, varied: str) -> None:
    drawn = (VARIED[varied](lambda seed: groups(size, seed), count, draw) for draw in range(3000))
    assert even(drawn, cuts)


@pytest.mark.parametrize("varied", VARIED)
def test_a_matching_says_nothing_about_the_next_one(varied: str) -> None:
    drawn = [VARIED[varied](pairs, 4, draw) for draw in range(3001)]
    assert even(pairwise(drawn), 9)


# How fast they mix


def matrices(mixer: Mixer, count: int, rounds: Iterable[int]) -> Tensor:
    """W of each round: row i holds the weights in worker i's mean."""
    workers, heard = tuple(range(count)), []
    for round in rounds:
        rows: list[list[float]] = [[]] * count
        for me in workers:
            if not rows[me]:
                meeting = mixer.exchange(situation(workers, me, round))
                hears = meeting.to if meeting.edges is None else meeting.edges.hears
                row = [float(other in hears) for other in workers]
                for other in hears if meeting.edges is None else (me,):
                    rows[other] = row
        heard.append(rows)
    mask = torch.tensor(heard, dtype=torch.float64)
    return mask / mask.sum(2, keepdim=True)


def estimate(mixing: Tensor, seed: int) -> tuple[float, float]:
    """The mean of |W x - mean|^2 / |x - mean|^2 over matrices and normal vectors, and its standard error."""
    x = torch.randn(mixing.shape[:2], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x -= x.mean(1, keepdim=True)
    after = (mixing @ x[:, :, None])[:, :, 0]
    ratio = (after - after.mean(1, keepdim=True)).square().sum(1) / x.square().sum(1)
    return ratio.mean().item(), ratio.std().item() / math.sqrt(len(ratio))


def assert_contracts(mixing: Tensor, rho: float) -> None:
    assert len(mixing) == DRAWS
    measured, error = estimate(mixing, seed=1)
    assert abs(measured - rho) < 4 * error
    assert error < 0.015 * (1 - rho) + 0.01 * rho  # so that a factor beside the true one would be seen


@pytest.mark.parametrize("count", [4, 8, 16])
def test_pairs_contract_by_their_factor(count: int) -> None:
    assert_contracts(matrices(pairs(1), count, range(DRAWS)), (count - 2) / (2 * (count - 1)))


@pytest.mark.parametrize(("count", "size"), [(8, 4), (16, 4), (9, 3)])
def test_groups_contract_by_their_factor(count: int, size: int) -> None:
    assert_contracts(matrices(groups(size, 1), count, range(DRAWS)), (count - size) / (size * (count - 1)))


@pytest.mark.parametrize(("count", "size", "cuts"), [(7, 3, 2), (11, 4, 2), (11, 3, 3)])
def test_groups_of_unequal_sizes_contract_by_their_number(count: int, size: int, cuts: int) -> None:
    assert_contracts(matrices(groups(size, 1), count, range(DRAWS)), (cuts - 1) / (count - 1))


@pytest.mark.parametrize("rounds", [2, 3])
def test_rounds_of_pairs_contract_independently(rounds: int) -> None:
    drawn = matrices(pairs(1), 8, range(rounds * DRAWS)).reshape(DRAWS, rounds, 8, 8)
    mixing = drawn[:, 0]
    for round in range(1, rounds):
        mixing = drawn[:, round] @ mixing
    assert_contracts(mixing, (3 / 7) ** rounds)


@pytest.mark.parametrize("q", [0.05, 0.2])
def test_pairs_that_fail_with_probability_q_contract_less_and_keep_the_mean(q: float) -> None:
    """Of a pair that fails both keep their own."""
    drawn = matrices(pairs(1), 8, range(DRAWS))
    luck = torch.rand(DRAWS, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    first = (drawn > 0).to(torch.int8).argmax(2)  # of each worker's pair, so that both draw the same luck
    failed = luck.gather(1, first) < q
    mixing = torch.where(failed[:, :, None], torch.eye(8, dtype=torch.float64), drawn)
    assert 0.8 * q < failed.double().mean() < 1.2 * q
    assert torch.equal(mixing.sum(1), torch.ones(DRAWS, 8, dtype=torch.float64))
    assert_contracts(mixing, 1 - (1 - q) * (1 - 3 / 7))


def cycle(mixer: Mixer, count: int, first: int = 0) -> Tensor:
    """The product of the matrices of ceil(log2 M) rounds."""
    product = torch.eye(count, dtype=torch.float64)
    for mixing in matrices(mixer, count, range(first, first + math.ceil(math.log2(count)))):
        product = mixing @ product
    return product


@pytest.mark.parametrize("mixer", [hypercube(), exponential()], ids=repr)
@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_power_of_two_is_mixed_exactly_after_a_cycle(mixer: Mixer, count: int, first: int) -> None:
    want = torch.full((count, count), 1 / count, dtype=torch.float64)
    assert torch.equal(cycle(mixer, count, first), want)  # halves of halves are exact


def worst(mixing: Tensor) -> float:
    """The factor by which a cycle shrinks the worst vector's squared distance from its mean."""
    count = len(mixing)
    apart = torch.eye(count, dtype=torch.float64) - 1 / count
    return torch.linalg.matrix_norm(apart @ mixing @ apart, 2).item() ** 2


@pytest.mark.parametrize(("count", "rho"), [(6, 0.047), (12, 0.044)])
def test_the_exponential_graph_of_another_size_leaves_a_part(count: int, rho: float) -> None:
    assert worst(cycle(exponential(), count)) == pytest.approx(rho, abs=0.0005)


@pytest.mark.parametrize("count", [3, 5, 6, 7, 12])
def test_the_hypercube_of_another_size_keeps_the_mean_and_still_mixes(count: int) -> None:
    mixing = cycle(hypercube(), count)
    assert torch.equal(mixing.sum(0), torch.ones(count, dtype=torch.float64))
    assert worst(mixing) < 0.8


# Folds, wrappers and refusals


@pytest.mark.parametrize(
    ("count", "size", "codec", "fold"),
    [
        (8, 2, cast(torch.float16), Keep()),
        (8, 4, cast(torch.float16), Reduce(exact())),
        (8, 3, exact(), Reduce(exact())),
    ],
)
def test_a_group_folds_as_all_mean_would_among_its_members(count: int, size: int, codec: Codec, fold: object) -> None:
    at = situation(tuple(range(count)), 1)._replace(codec=codec)
    meeting = groups(size).exchange(at)
    assert meeting.fold == fold
    assert meeting.fold == all_mean().exchange(at._replace(membership=Membership(meeting.to, 1))).fold


def test_only_mixes_the_fragments_whose_parameters_all_match() -> None:
    part, at = only(("model.embed*", "lm_head*"), pairs(3)), situation((0, 1, 2, 5), 2)
    matching = at._replace(layout=layout("model.embed.weight", "lm_head.weight"))
    assert part.exchange(matching) == pairs(3).exchange(matching)
    assert part.exchange(at._replace(layout=layout("model.layers.0.w"))) == Exchange((2,), Keep(), 1.0)


def test_only_refuses_a_fragment_of_which_some_parameters_match() -> None:
    at = situation((0, 1), 0)._replace(layout=layout("model.embed.weight", "model.layers.0.w"))
    with pytest.raises(CompositionError, match=r"matches model\.embed\.weight but not model\.layers\.0\.w.*by_name"):
        only(("model.embed*",), pairs()).exchange(at)


def test_only_tells_upper_from_lower_case_on_every_system() -> None:
    at = situation((0, 1), 0)._replace(layout=layout("Head"))
    assert only(("head",), pairs()).exchange(at).to == (0,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: groups(1),
        lambda: groups(0, 3),
        lambda: only((), pairs()),
        lambda: only("lm_head*", pairs()),  # type: ignore[arg-type]  # each letter would be a pattern
        lambda: alarmed(pairs(), on=0.2, off=0.4),
        lambda: alarmed(pairs(), on=1.1, off=0.4),
        lambda: alarmed(pairs(), on=0.5, off=-0.1),
        lambda: alarmed(pairs(), on=float("nan"), off=0.1),
    ],
)
def test_a_mixer_that_cannot_work_is_refused(make: Callable[[], Mixer]) -> None:
    with pytest.raises(CompositionError, match=r"give |write "):
        make()


@pytest.mark.parametrize(("alarm", "meets"), [(1.0, True), (0.0, False), (None, False)])
def test_alarmed_meets_while_the_alarm_is_on(alarm: float | None, meets: bool) -> None:
    at = situation((0, 1, 2, 3), 1, 4, alarm=alarm)
    want = groups(4).exchange(at) if meets else Exchange((1,), Keep(), 1.0)
    assert alarmed(groups(4), on=0.4, off=0.2).exchange(at) == want


def test_the_alarm_goes_on_above_one_threshold_and_off_below_the_other() -> None:
    part, state, states = alarmed(pairs(), on=0.4, off=0.2), 0.0, []
    for js in (0.0, 0.3, 0.4, 0.41, 0.3, 0.2, 0.19, 0.3, 0.9):
        state = part.switch(state, js)
        states.append(state)
    assert states == [0, 0, 0, 1, 1, 1, 0, 0, 1]
