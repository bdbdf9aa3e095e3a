"""Exchanges under faults at every phase, without threads: all who are left come to the same, whatever happens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from atoll.parts.codecs import error_feedback
from atoll.peers.wide.exchange import Exchange
from atoll.peers.wide.messages import Bulk, Committed, Head, Report, Settle
from atoll.peers.wide.segments import Segments
from atoll.testing.exchanges import HALF, Case, Member
from atoll.wire import Fold, Keep, Landed, Lost, Membership
from tests.peers.wide.scripted import FOLDS, KEY, LAYOUT, SIZE, World, mean

VALUES = {
    worker: torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(worker))
    for worker in range(4)
}
folds = pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)


def begun(folder: Path, seed: int, fold: Fold, *, steps: int, loses: float = 0.0) -> World:
    """Four members and an exchange, so many things in."""
    folder.mkdir()
    world = World(4, seed, folder, loses=loses)
    world.post(VALUES, fold, range(4), {})
    for _ in range(steps):
        if not world.step():
            break
    return world


def check(world: World, *, can_be_lost: bool = False) -> tuple[int, ...]:
    """That all who are left hold the mean of the same contributions. Returns whose."""
    outcomes = world.outcomes()
    assert all(member.error is None and member.out is None for member in world.members.values())
    assert None not in outcomes.values(), (outcomes, world.said)
    landed = [outcome for outcome in outcomes.values() if isinstance(outcome, Landed)]
    if can_be_lost and not landed:
        return ()
    assert len(landed) == len(outcomes)
    (peers,) = {outcome.peers for outcome in landed}
    for worker in outcomes:
        assert torch.equal(world.sources[worker].tree.flat, mean(VALUES, peers))
    assert not any("do not hold the same" in line for line in world.said)
    return peers


@folds
def test_without_faults_all_contributions_are_in_the_mean(fold: Fold, tmp_path: Path) -> None:
    for seed in range(10):
        world = begun(tmp_path / str(seed), seed, fold, steps=0)
        world.settle()
        assert check(world) == (0, 1, 2, 3)


@folds
@pytest.mark.parametrize("drops", [False, True])
def test_a_death_at_any_moment_loses_no_round(fold: Fold, drops: bool, tmp_path: Path) -> None:
    seen, dropped = set[tuple[int, ...]](), 0
    for steps in range(0, 130, 2):
        world = begun(tmp_path / str(steps), steps, fold, steps=steps)
        world.kill(steps % 4, drops=drops)
        world.settle()
        dropped += world.dropped
        gone = steps % 4
        peers = check(world)
        assert {0, 1, 2, 3} - {gone} <= set(peers)
        seen.add(peers)
    assert len(seen) > 1
    assert dropped or isinstance(fold, Keep), "means of before the death were on their way"


@folds
def test_two_deaths_at_any_moments_leave_the_rest_with_the_same(fold: Fold, tmp_path: Path) -> None:
    for steps in range(0, 130, 3):
        world = begun(tmp_path / str(steps), steps, fold, steps=steps)
        world.kill(3, drops=bool(steps % 2))
        for _ in range(world.rng.randrange(60)):
            world.step()
        world.kill(1, drops=bool(steps % 3))
        world.settle()
        check(world)


@folds
def test_a_coordinator_that_dies_at_any_moment_after_a_death_changes_nothing(fold: Fold, tmp_path: Path) -> None:
    for steps in range(0, 130, 3):
        world = begun(tmp_path / str(steps), steps, fold, steps=steps)
        world.kill(2, drops=bool(steps % 2))
        for _ in range(world.rng.randrange(40)):
            world.step()
        world.restart()
        world.settle()
        assert {0, 1, 3} <= set(check(world))


@folds
def test_lost_messages_are_asked_for_again_also_when_somebody_dies(fold: Fold, tmp_path: Path) -> None:
    for steps in range(0, 130, 5):
        world = begun(tmp_path / str(steps), steps, fold, steps=steps, loses=0.2)
        world.kill(2, drops=True)
        world.settle(200.0)
        check(world)


def test_whoever_missed_the_last_vote_of_somebody_gone_is_told_the_outcome_by_those_who_did_not(tmp_path: Path) -> None:
    for seed in range(20):
        world = begun(tmp_path / str(seed), seed, FOLDS["keep"], steps=0)
        world.mutes.add(Settle)
        while not any(world.outcomes().values()):
            assert world.step()
        world.kill(next(worker for worker, outcome in world.outcomes().items() if not outcome), drops=True)
        world.settle(20.0)
        assert check(world) == (0, 1, 2, 3)


def test_a_report_that_is_under_way_when_the_one_before_it_is_answered_still_holds_the_vote(tmp_path: Path) -> None:
    world = begun(tmp_path / "one", 0, FOLDS["keep"], steps=20)
    (exchange,) = world.members[0].exchanges
    first, second = exchange.report(0), exchange.report(0)
    exchange.settle(Settle(KEY, (0, 1, 2, 3), (), first.number))
    assert exchange.held == second.number
    exchange.settle(Settle(KEY, (0, 1, 2, 3), (), second.number))
    assert exchange.held is None


def test_what_was_reported_before_it_was_answered_is_held_against_nobody(tmp_path: Path) -> None:
    world = begun(tmp_path / "one", 0, FOLDS["keep"], steps=0)
    coordinator, to = world.coordinator, (0, 1, 2, 3)
    for worker in to:
        coordinator.heard(worker, Report(KEY, to, 0, 0, 1, complete=False, silent=()), 0.0)
    coordinator.heard(0, Committed(KEY, to, to, "same", lost=False), 0.0)
    coordinator.seen(3, False, 0.0)
    for worker in (1, 2):
        coordinator.heard(worker, Report(KEY, to, 0, 0, 2, complete=True, silent=(3,)), 0.0)
    assert coordinator.ledger.connection.execute("select out from settled").fetchall() == [("[[[3], true]]",)]


@given(some.integers(2, 6), some.integers(1, 5), some.data())
def test_parts_hold_each_element_once_after_any_deaths(members: int, block: int, data: some.DataObject) -> None:
    left = tuple(range(members))
    segments = Segments(left, LAYOUT, block)
    while True:
        for chunk, (first, last) in enumerate(LAYOUT.chunks):
            held = [element for _, start, stop in segments.whole(chunk) for element in range(start, stop)]
            assert held == list(range(first, last))
        assert set(segments.owners.values()) <= set(left)
        if len(left) == 1:
            return
        gone = data.draw(some.lists(some.sampled_from(left), min_size=1, max_size=len(left) - 1, unique=True))
        left = tuple(worker for worker in left if worker not in gone)
        segments.hand_over(gone, left)


def test_what_was_sent_for_a_round_that_is_lost_goes_back_into_the_codecs_memory() -> None:
    codec, case = error_feedback(HALF, decay=1.0), Case(1001, Keep(), overlapped=True)
    state, sent = codec.init(case.layout), list[tuple[int, object]]()
    memberships = [Membership((0, 1), worker) for worker in (0, 1)]
    mine, theirs = (Member(membership, 0).post(case)[0] for membership in memberships)
    one = Exchange(
        0, replace(mine, codec=codec, codec_state=state), None, lambda to, message: sent.append((to, message))
    )
    other = Exchange(1, replace(theirs, codec=codec, codec_state=codec.init(case.layout)), None, one_way(one, 1))
    one.start()
    other.start()
    while one.work():
        pass
    assert any(isinstance(message, Bulk) for _, message in sent)
    assert not torch.equal(state["residual"], case.values(0)), "nothing had been sent"
    one.settle(Settle(mine.key, (0, 1), (((1,), False),), 0))
    assert isinstance(one.outcome, Lost)
    assert torch.equal(state["residual"], case.values(0))


def one_way(to: Exchange, sender: int) -> Callable[[int, object], None]:
    """Brings heads to one side, and nothing else."""
    return lambda _, message: to.head(sender, message) if isinstance(message, Head) else None
