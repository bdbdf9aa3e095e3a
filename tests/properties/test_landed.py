"""What a landing reports, against the same computed plainly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.parts.codecs import cast, exact
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean, by_share, weighted
from atoll.parts.outers import sgd
from atoll.parts.schedules import every
from atoll.peers.memory import Hub
from atoll.sync.drive import take_turns
from atoll.sync.gather import Gathering
from atoll.sync.rule import Rule, Strategy
from atoll.trees import CHUNK, Layout, Spec
from atoll.wire import Codec, Fold, Keep, Reduce, Sum, bytes_sent
from tests.properties.teams import Numbers, Team, examples

HALF = cast(torch.float16)
VECTORS = st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=2, max_size=5)


def moved(deltas: list[list[float]], rule: Rule, shares: list[float] | None = None) -> Team:
    """One step in which worker m moves by minus `deltas[m]`."""

    def move(worker: int, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w").sub_(torch.tensor(deltas[worker], dtype=torch.float64) if step == 1 else 0.0)

    return Team(Numbers([0.0] * 3), Strategy((rule,)), len(deltas), shares=shares).run(2, move)


def pairwise_cosine(deltas: list[Tensor], weights: list[float]) -> float:
    """The mean of cos(d_i, d_j) over pairs, each weighted by w_i |d_i| w_j |d_j|."""
    total = weight = 0.0
    for i, one in enumerate(deltas):
        for j, other in enumerate(deltas):
            if i != j:
                part = weights[i] * weights[j] * float(one.norm() * other.norm())
                total += part * float(torch.nn.functional.cosine_similarity(one, other, dim=0))
                weight += part
    return total / weight


@examples(40)
@given(deltas=VECTORS, data=st.data(), delay=st.integers(0, 1))
def test_norms_and_cosine_are_those_of_the_contributions(
    deltas: list[list[float]], data: st.DataObject, delay: int
) -> None:
    count = st.lists(st.floats(0.1, 10), min_size=len(deltas), max_size=len(deltas))
    weights = data.draw(st.one_of(st.none(), count))
    mixer = weighted(by_share(), all_mean()) if weights else all_mean()
    late = {"landing": After(1), "merge": blend(0.5)} if delay else {}
    landed = moved(deltas, Rule(every(2), outer=sgd(1.0), mixer=mixer, **late), weights)
    (event,) = landed.drain().landed()
    contributions = [torch.tensor(deltas[worker], dtype=torch.float64) for worker in event.peers]
    by = [weights[worker] if weights else 1.0 for worker in event.peers]
    mean = sum((w * d for w, d in zip(by, contributions, strict=True)), torch.zeros(3).double()) / sum(by)
    assert event.norms == pytest.approx([float(each.norm()) for each in contributions], rel=1e-12, abs=1e-12)
    assert event.mean_norm == pytest.approx(float(mean.norm()), rel=1e-9, abs=1e-9)
    parts = [w * float(d.norm()) for w, d in zip(by, contributions, strict=True)]
    pairs = sum(parts) ** 2 - sum(part**2 for part in parts)
    if pairs > 1e-6 * sum(parts) ** 2 > 1e-12:  # else the cosine is a difference of rounding errors
        assert event.cosine == pytest.approx(pairwise_cosine(contributions, by), abs=1e-8)


@pytest.mark.parametrize(("mixer", "codec"), [(Keep(), HALF), (Reduce(HALF), HALF), (Reduce(HALF), exact())])
def test_a_cosine_over_a_narrow_wire_is_that_of_what_arrived(mixer: Fold, codec: Codec) -> None:
    """The rounding of the mean shows in full where norms are alike; a far larger contribution would magnify it."""
    deltas = [[1.0, 2.0, 3.0], [1.1, 2.0, 2.9], [-1.0, 0.7, 4.0]]
    team = moved(deltas, Rule(every(1), outer=sgd(1.0), codec=codec, mixer=all_mean(mixer)))
    rounded = [torch.tensor(delta).to(torch.float16).double() for delta in deltas]
    event = team.landed()[0]
    assert event.cosine == pytest.approx(pairwise_cosine(rounded, [1.0] * 3), abs=2**-9)
    assert event.mean_norm == pytest.approx(float(torch.stack(rounded).mean(0).norm()), rel=2**-11)


def test_workers_that_agree_or_oppose_have_a_cosine_of_one_or_minus_one_and_one_worker_has_none() -> None:
    rule = Rule(every(1), outer=sgd(1.0))
    assert moved([[1.0, 2.0, 0.0], [3.0, 6.0, 0.0]], rule).landed()[0].cosine == pytest.approx(1.0)
    assert moved([[1.0, 2.0, 0.0], [-3.0, -6.0, 0.0]], rule).landed()[0].cosine == pytest.approx(-1.0)
    assert math.isnan(moved([[1.0, 2.0, 0.0]], rule).landed()[0].cosine)
    assert math.isnan(moved([[0.0] * 3] * 2, rule).landed()[0].cosine)


# Ten values among four: pieces of 3, 3, 3, 1. A worker sends the others' pieces, then its mean to three.
SENT: list[tuple[int, Codec, Fold, int, list[int]]] = [
    (4, exact(), Keep(), 4, [3 * 40] * 4),
    (4, HALF, Keep(), 4, [3 * 20] * 4),
    (4, exact(), Reduce(exact()), 4, [7 * 4 + 3 * 12] * 3 + [9 * 4 + 3 * 4]),
    (4, HALF, Reduce(HALF), 4, [7 * 2 + 3 * 6] * 3 + [9 * 2 + 3 * 2]),
    (4, HALF, Reduce(exact()), 4, [7 * 2 + 3 * 12] * 3 + [9 * 2 + 3 * 4]),
    (4, exact(), Reduce(exact()), 8, [7 * 8 + 3 * 24] * 3 + [9 * 8 + 3 * 8]),
    (4, exact(), Sum(), 4, [2 * 3 * 40 // 4] * 4),
    (2, exact(), Keep(), 4, [40] * 2),
    (2, exact(), Reduce(exact()), 4, [20 + 20] * 2),
    (1, exact(), Keep(), 4, [0]),
    (1, exact(), Reduce(exact()), 4, [0]),
]


@pytest.mark.parametrize(("workers", "codec", "fold", "size", "want"), SENT)
def test_bytes_sent_are_those_counted_by_hand(
    workers: int, codec: Codec, fold: Fold, size: int, want: list[int]
) -> None:
    dtype = {4: torch.float32, 8: torch.float64}[size]
    rule = Rule(every(1), outer=sgd(1.0), codec=codec, mixer=all_mean(fold))
    team = Team(Numbers([0.0] * 10, dtype), Strategy((rule,)), workers).run(1)
    assert [team.landed(worker)[0].sent for worker in range(workers)] == want


def test_pieces_are_cut_chunk_by_chunk() -> None:
    """One value over a chunk: the last chunk is owned by worker 0 alone."""
    layout = Layout.of([Spec("w", (CHUNK + 1,), (1,), torch.float32)])
    quarter = CHUNK // 4 * 4
    sent = [bytes_sent(Reduce(exact()), exact(), layout, 4, index) for index in range(4)]
    assert sent == [6 * quarter + 3 * 4] + [6 * quarter + 4] * 3


@examples(60)
@given(
    rows=st.integers(1, 12).flatmap(
        lambda workers: st.lists(st.lists(st.floats(), min_size=3, max_size=3), min_size=workers, max_size=workers)
    )
)
def test_gathered_numbers_come_back_to_the_bit_whatever_they_are(rows: list[list[float]]) -> None:
    """Any number of workers, infinities, nan, and a number far larger than all others."""
    hub = Hub(len(rows))
    groups = [hub.group(worker) for worker in range(len(rows))]
    gatherings = [Gathering(group.membership, 1, row) for group, row in zip(groups, rows, strict=True)]
    take_turns([gathering.flow() for gathering in gatherings], groups)
    for gathering in gatherings:
        assert list(map(repr, gathering.values)) == list(map(repr, rows))
