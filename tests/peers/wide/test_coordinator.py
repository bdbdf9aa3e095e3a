"""What the coordinator decides, without a link: who is gone, who takes part, and whom an epoch is meant for."""

from pathlib import Path

import pytest

from atoll.peers.wide.coordinator import Coordinator
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.member import Member
from atoll.peers.wide.messages import (
    COORDINATOR,
    Beat,
    Done,
    Epoch,
    Gone,
    Hello,
    Message,
    Promise,
    Propose,
    Ready,
    Refused,
    Report,
    Settle,
    Welcome,
)
from atoll.peers.wide.offers import Offers
from atoll.wire import Key

BEAT = Beat(5, 0, 0, 0.0, 0.0)
KEY = Key(0, 0, 0)


class Office:
    """A coordinator of workers 0 to 2 whose lease is 10 s, at 100 s; what it said, and to whom."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.said = folder, list[tuple[int, Message]](), list[str]()
        self.desk = self.begin()
        for worker in range(3):
            self.desk.heard(worker, Hello("run", "same", "1", 0, f"life {worker}"), 100.0)
        self.beat(0.5, 100.0, 112.0)

    def begin(self) -> Coordinator:
        def send(to: int, message: Message) -> None:
            self.told.append((to, message))

        return Coordinator("run", "1", Ledger(self.folder / "ledger"), send, self.said.append, 3, 10.0)

    def beat(self, every: float, first: float, last: float, workers: tuple[int, ...] = (0, 1, 2)) -> None:
        now = first
        while now <= last:
            for worker in workers:
                self.desk.heard(worker, BEAT, now)
            self.desk.tick(now)
            now += every

    def to(self, worker: int, kind: type[Message]) -> list[Message]:
        return [message for to, message in self.told if to == worker and isinstance(message, kind)]

    def promise(self, *workers: int, step: int = 5) -> None:
        assert self.desk.epoch
        for worker in workers:
            self.desk.heard(worker, Promise(self.desk.epoch.number + 1, step), 113.0)


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_one_that_is_silent_is_gone_after_a_lease(office: Office) -> None:
    office.beat(0.5, 112.5, 124.0, workers=(0, 2))
    assert office.desk.present() == [0, 2]


def test_a_coordinator_that_stood_still_counts_nobody_as_gone(office: Office) -> None:
    office.desk.heard(1, BEAT, 150.0)
    office.desk.tick(150.0)
    office.beat(0.5, 150.5, 159.0)
    assert office.desk.present() == [0, 1, 2]


def test_a_coordinator_that_hears_nobody_at_all_counts_nobody_as_gone(office: Office) -> None:
    office.beat(0.5, 112.5, 140.0, workers=())
    for worker in range(3):
        office.desk.seen(worker, False, 140.0)
    office.beat(0.5, 140.0, 141.0, workers=(2,))
    office.beat(0.5, 141.0, 160.0)
    assert office.desk.present() == [0, 1, 2]
    office.beat(0.5, 160.0, 172.0, workers=(2,))
    assert office.desk.present() == [2]


def test_a_link_that_closes_is_believed_at_once_while_others_are_heard(office: Office) -> None:
    office.desk.seen(1, False, 112.5)
    assert office.desk.present() == [0, 2]
    assert office.to(0, Gone) == [Gone((1,))]


def comes_again(office: Office, step: int) -> None:
    """Worker 1 dies, comes again, and is ready when the others have looked at this step."""
    office.desk.seen(1, False, 112.5)
    office.desk.heard(1, Hello("run", "same", "1", 0, "another life"), 113.0)
    office.promise(0, 2)
    office.desk.heard(1, Ready(5), 113.0)
    office.promise(1)
    office.promise(0, 2, step=step)


def test_who_is_ready_only_when_the_others_have_come_to_the_end_keeps_nobody(office: Office) -> None:
    comes_again(office, step=20)
    assert office.to(1, Epoch)[-1] == Epoch(2, 21, (0, 1, 2), (), ())
    office.desk.heard(0, Done(20), 114.0)
    assert not office.to(0, Done), "another one has not come to it"
    office.desk.heard(2, Done(20), 114.0)
    assert office.to(0, Done) == office.to(2, Done) == [Done(0)]
    assert office.to(1, Refused)


def test_who_takes_part_before_the_end_is_waited_for(office: Office) -> None:
    comes_again(office, step=19)
    for worker in (0, 2):
        office.desk.heard(worker, Done(20), 114.0)
    assert not office.to(0, Done)
    office.desk.heard(1, Done(20), 115.0)
    assert office.to(0, Done) == [Done(0)]


def test_whoever_comes_again_is_told_of_no_epoch_from_before_it_was_gone(office: Office) -> None:
    office.desk.seen(1, False, 112.5)
    del office.told[:]
    hello = Hello("run", "same", "1", 0, "another life")
    for _ in range(2):
        office.desk.heard(1, hello, 113.0)
        office.desk.heard(1, Beat(0, -1, 0, 0.0, 0.0), 113.0)
    assert office.to(1, Epoch) == []
    assert {(each.life, each.epoch) for each in office.to(1, Welcome)} == {("another life", 1)}
    office.promise(0, 2)
    assert office.to(1, Epoch) == [Epoch(1, 6, (0, 2), (1,), (0, 2))]


def test_a_process_takes_nothing_that_was_said_to_one_before_it_for_its_own() -> None:
    member = Member(1, lambda to, message, priority: None, life="new")
    old, new = Epoch(0, 1, (0, 1), (), ()), Epoch(1, 6, (0,), (1,), (0,))
    for message in (old, Welcome("old", 0, 0), old, Propose(1), Gone((1,)), Welcome("new", 1, 0), old):
        member.heard(COORDINATOR, message, 0.0)
    assert member.newest is None
    assert member.out is None
    member.heard(COORDINATOR, new, 0.0)
    assert member.newest == new


def test_a_worker_takes_epochs_one_after_another_so_none_is_skipped_that_governs_a_step_of_its_own() -> None:
    member = Member(1, lambda to, message, priority: None, life="new")
    epochs = [Epoch(number, 10 * number + 1, (0, 1, 2)[: 2 + number % 2], (), ()) for number in range(12)]
    member.heard(COORDINATOR, Welcome("new", 0, 0), 0.0)
    for epoch in (epochs[0], epochs[2], *epochs):
        member.heard(COORDINATOR, epoch, 0.0)
    assert [met.epoch for step in (5, 15, 25) if (met := member.meet(step))] == [0, 1, 2]


def test_whoever_missed_epochs_is_told_all_of_them(office: Office) -> None:
    office.desk.seen(1, False, 112.5)
    office.promise(0, 2)
    office.desk.seen(2, False, 113.0)
    office.promise(0, step=20)
    del office.told[:]
    office.desk.heard(0, BEAT, 114.0)
    assert [epoch.number for epoch in office.to(0, Epoch) if isinstance(epoch, Epoch)] == [1, 2]


def test_whoever_promised_a_coordinator_that_was_killed_is_answered_by_the_next(office: Office) -> None:
    office.desk.heard(3, Hello("run", "same", "1", 0, "life 3"), 112.0)
    assert office.to(0, Propose) == [Propose(1)]
    office.desk.ledger.close()
    office.desk = office.begin()
    office.beat(0.5, 113.0, 114.0)
    office.promise(0, 1, 2)
    office.promise(0, 1, 2)
    assert office.desk.epoch == Epoch(1, 6, (0, 1, 2), (), ())


def test_what_began_before_somebody_was_gone_goes_on_without_it_though_it_has_come_again(office: Office) -> None:
    office.desk.seen(1, False, 112.5)
    office.desk.heard(1, Hello("run", "same", "1", 0, "another life"), 112.5)
    office.promise(0, 2)
    assert office.desk.epoch
    assert office.desk.epoch.joining == (1,)
    for worker in (0, 2):
        office.desk.heard(worker, Report(KEY, (0, 1, 2), 0, 0, 1, complete=False, silent=()), 114.0)
    assert office.to(0, Settle) == [Settle(KEY, (0, 1, 2), (((1,), False),), 0)]


def test_a_joiner_that_is_ready_takes_part_also_after_the_coordinator_was_killed(office: Office) -> None:
    office.desk.heard(3, Hello("run", "same", "1", 0, "life 3"), 112.0)
    office.promise(0, 1, 2)
    office.desk.ledger.close()
    office.desk = office.begin()
    office.beat(0.5, 113.0, 114.0, workers=(0, 1, 2, 3))
    office.desk.heard(3, Ready(8), 114.0)
    office.promise(0, 1, 2, 3, step=9)
    assert office.desk.epoch == Epoch(2, 10, (0, 1, 2, 3), (), ())


def test_whoever_is_slow_to_come_is_not_blamed_for_one_that_is_gone(office: Office) -> None:
    office.desk.seen(1, False, 112.5)
    for now in range(113, 150):
        office.desk.heard(0, Report(KEY, (0, 1, 2), 0, 0, now, complete=False, silent=()), float(now))
        office.beat(0.5, now, now + 0.6, workers=(0, 2))
    assert office.desk.present() == [0, 2]


def test_whoever_does_not_reach_the_others_for_a_lease_is_gone_for_them(office: Office) -> None:
    for now in range(113, 130):
        for worker in (0, 1):
            silent = tuple({2} - {worker})
            report = Report(KEY, (0, 1, 2), 0, 0, now, complete=False, silent=silent)
            if 2 in office.desk.present():
                office.desk.heard(worker, report, float(now))
        office.beat(0.5, now, now + 0.6)
    assert office.desk.present() == [0, 1]


def test_landings_are_offered_until_every_joiner_says_that_it_has_all() -> None:
    offers = Offers(lambda key, asked: None)
    offers.state(3, (1, 2), {}, [])
    offers.state(4, (2,), {}, [])
    offers.entered(1, 5)
    offers.entered(2, 3)  # of an entry before this one
    assert offers.goers == {2: 4}
    offers.entered(2, 5)
    assert (offers.goers, offers.epochs) == ({}, [])
