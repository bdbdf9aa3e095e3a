"""Links over zenoh on this machine's loopback: who hears what, in which order, and who is seen to come and go."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from atoll.errors import GroupError
from atoll.peers.wide import lanes, sessions
from atoll.peers.wide.credentials import Authority
from atoll.peers.wide.link import COORDINATOR, Priority, ZenohLink
from tests.peers.wide.links import LEASE_S, Between, Ears, child, equip, free_place


def test_frames_arrive_whole_in_order_and_with_their_sender(open_link: Callable[..., ZenohLink]) -> None:
    coordinator, island = open_link(COORDINATOR), open_link(0, free_place())
    ears, _ = Ears(coordinator), Ears(island)
    big = bytes(range(256)) * 4096
    island.send(COORDINATOR, [b"a", memoryview(big)[1:], b"", memoryview(b"z")], Priority.BLOCKING)
    for index in range(100):
        island.send(COORDINATOR, [b"%d" % index], Priority.BLOCKING)
    ears.until(lambda: len(ears.frames) == 101)
    assert ears.frames == [(0, b"a" + big[1:] + b"z"), *((0, b"%d" % index) for index in range(100))]
    island.close()  # a frame is counted when zenoh has it, which may be after it was heard
    assert island.sent == len(big) + 1 + sum(len(b"%d" % index) for index in range(100))


def test_islands_that_know_only_the_coordinator_go_on_without_it(open_link: Callable[..., ZenohLink]) -> None:
    coordinator, one, two = open_link(COORDINATOR), open_link(0, free_place()), open_link(1)
    Ears(coordinator)
    hears, _ = Ears(one), Ears(two)
    hears.until(lambda: hears.alive() == {COORDINATOR, 1})
    time.sleep(0.5)  # to find each other
    coordinator.close()
    hears.until(lambda: COORDINATOR not in hears.alive())
    two.send(0, [b"direct"], Priority.CONTROL)
    hears.until(lambda: (1, b"direct") in hears.frames)
    assert (1, False) not in hears.seen


def test_members_that_listen_nowhere_meet_through_the_coordinator(open_link: Callable[..., ZenohLink]) -> None:
    coordinator, one, two = open_link(COORDINATOR), open_link(0), open_link(1)
    Ears(coordinator)
    at_one, at_two = Ears(one), Ears(two)
    at_one.until(lambda: at_one.alive() == {COORDINATOR, 1})
    at_two.until(lambda: at_two.alive() == {COORDINATOR, 0})
    big = bytes(range(256)) * 4096
    for index in range(10):
        one.send(1, [b"%d" % index, big], Priority.OVERLAPPED)
    two.send(0, [b"back"], Priority.CONTROL)
    at_two.until(lambda: len(at_two.frames) == 10)
    at_one.until(lambda: at_one.frames)
    assert at_two.frames == [(0, b"%d" % index + big) for index in range(10)]
    assert coordinator.sent > 10 * len(big)
    assert at_one.frames == [(1, b"back")]
    two.close()
    at_one.until(lambda: at_one.alive() == {COORDINATOR})


def test_who_is_there_is_seen_and_who_goes_is_seen_to_go(open_link: Callable[..., ZenohLink]) -> None:
    coordinator = open_link(COORDINATOR)
    early = Ears(coordinator)
    for round_ in range(3):
        island = open_link(0)
        late = Ears(island)
        late.until(lambda late=late: late.seen == [(COORDINATOR, True)])
        early.until(lambda: early.alive() == {0})
        island.close()
        early.until(lambda: not early.alive())
        assert early.seen == [(0, True), (0, False)] * (round_ + 1)


def test_a_killed_process_is_noticed_at_once_and_its_successor_counts(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    for _ in range(3):
        with child(folder, 0, place) as island:
            ears.until(lambda: ears.alive() == {0})
            island.kill()
            assert ears.until(lambda: not ears.alive()) < LEASE_S / 2


def test_a_stopped_process_is_gone_after_the_lease_and_back_when_it_goes_on(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    with child(folder, 0, place) as island:
        ears.until(lambda: ears.alive() == {0})
        island.send_signal(signal.SIGSTOP)
        assert LEASE_S / 2 < ears.until(lambda: not ears.alive()) < 2 * LEASE_S
        island.send_signal(signal.SIGCONT)
        assert ears.until(lambda: ears.alive() == {0}) < LEASE_S
        link.send(0, [b"hello"], Priority.CONTROL)
        ears.until(lambda: (0, b"echo hello") in ears.frames)


def test_a_new_process_takes_the_place_of_its_silent_predecessor_at_once(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    with child(folder, 0, place) as island:
        ears.until(lambda: ears.alive() == {0})
        island.send_signal(signal.SIGSTOP)
        successor = Ears(open_link(0))
        ears.until(lambda: ears.seen == [(0, True), (0, False), (0, True)])
        link.send(0, [b"new"], Priority.CONTROL)
        successor.until(lambda: successor.frames == [(COORDINATOR, b"new")], LEASE_S / 2)
        time.sleep(2 * LEASE_S)
        assert len(ears.seen) == 3, "the end of the predecessor is none of the successor's"


def test_control_passes_bulk_that_was_sent_before(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    with child(folder, 0, place) as island:
        ears.until(lambda: ears.alive() == {0})
        island.send_signal(signal.SIGSTOP)
        for _ in range(64):
            link.send(0, [bytes(1 << 20)], Priority.OVERLAPPED)
        time.sleep(0.2)
        link.send(0, [b"urgent"], Priority.CONTROL)
        time.sleep(0.2)
        island.send_signal(signal.SIGCONT)
        ears.until(lambda: ears.frames)
        link.send(0, [b"all?"], Priority.OVERLAPPED)
        ears.until(lambda: len(ears.frames) == 2)
        lengths = ears.frames[1][1].split()
        assert len(lengths) == 65
        assert lengths.index(b"6") < 32


def test_the_end_of_a_member_for_whom_frames_wait_holds_up_no_other(folder: Path, place: str) -> None:
    """An end that is heard before sending fails, as when a machine goes down with its processes."""
    between, listens = Between(place), free_place()
    with (
        closing(ZenohLink("r1", COORDINATOR, folder / str(COORDINATOR), listen=[place], lease_s=60.0)) as ends,
        closing(ZenohLink("r1", 1, folder / "1", listen=[listens], lease_s=60.0)) as other,
        closing(ZenohLink("r1", 0, folder / "0", connect=[between.place, listens], lease_s=60.0)) as link,
    ):
        at_end, at_other, ears = Ears(ends), Ears(other), Ears(link)
        ears.until(lambda: ears.alive() == {COORDINATOR, 1})
        for _ in range(256):
            link.send(COORDINATOR, [bytes(1 << 20)], Priority.OVERLAPPED)
        at_end.until(lambda: at_end.frames)
        between.end()
        for number in range(10):
            time.sleep(0.1)
            link.send(1, [b"%d" % number], Priority.CONTROL)
        at_other.until(lambda: len(at_other.frames) == 10, 2.0)


def test_a_frame_that_is_wanted_no_more_is_not_sent(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    link = open_link(COORDINATOR)
    ears, wanted = Ears(link), threading.Event()
    wanted.set()
    with child(folder, 0, place) as island:
        ears.until(lambda: ears.alive() == {0})
        island.send_signal(signal.SIGSTOP)
        for _ in range(64):
            link.send(0, [bytes(1 << 20)], Priority.OVERLAPPED, wanted.is_set)
        link.send(0, [b"all?"], Priority.OVERLAPPED)
        time.sleep(0.2)
        wanted.clear()
        island.send_signal(signal.SIGCONT)
        ears.until(lambda: ears.frames)
        assert 0 < len(ears.frames[0][1].split()) < 48, "some had left before"


def test_sending_and_closing_wait_for_no_one(open_link: Callable[..., ZenohLink], folder: Path, place: str) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    before = threading.active_count()
    with child(folder, 0, place) as island:
        ears.until(lambda: ears.alive() == {0})
        island.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for to in (0, 7):
            for _ in range(64):
                link.send(to, [bytes(1 << 20)], Priority.BLOCKING)
        assert time.monotonic() - began < 0.5
        time.sleep(0.3)  # until one waits in zenoh
        began = time.monotonic()
        link.close()
        assert time.monotonic() - began < 1.0
        assert threading.active_count() <= before
        link.close()
        with pytest.raises(GroupError, match="its link is closed"):
            link.send(0, [b"late"], Priority.CONTROL)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux breaks a connection that is stuck")
def test_a_stopped_member_with_frames_on_their_way_holds_up_no_other(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    coordinator, island = open_link(COORDINATOR), open_link(1)
    ears, at_island = Ears(coordinator), Ears(island)
    with child(folder, 0, place) as stops:
        ears.until(lambda: ears.alive() == {0, 1})
        at_island.until(lambda: at_island.alive() == {COORDINATOR, 0})
        stops.send_signal(signal.SIGSTOP)
        for link in (coordinator, island):
            for _ in range(64):
                link.send(0, [bytes(1 << 20)], Priority.BLOCKING)
        for index in range(int(20 * LEASE_S)):
            sent = time.monotonic()
            island.send(COORDINATOR, [b"%d" % index], Priority.CONTROL)
            ears.until(lambda index=index: len(ears.frames) > index)
            assert time.monotonic() - sent < LEASE_S / 2
            time.sleep(0.1)
        ears.until(lambda: ears.alive() == {1})
        at_island.until(lambda: at_island.alive() == {COORDINATOR})
        stops.send_signal(signal.SIGCONT)
        ears.until(lambda: ears.alive() == {0, 1})


def test_a_member_that_takes_part_no_more_does_not_count_among_those_that_are_sent_to(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    """Though its link seems to be there, and a frame waits for it."""
    island = open_link(COORDINATOR)
    ears = Ears(island)
    with child(folder, 0, place) as stops, child(folder, 1, place):
        ears.until(lambda: ears.alive() == {0, 1})
        stops.send_signal(signal.SIGSTOP)
        for _ in range(64):
            island.send(0, [bytes(1 << 20)], Priority.BLOCKING)
        assert island._hearers() == (1, 1), "or nothing waits here"
        island.drop(0)
        assert island._hearers() == (0, 0)
        island.send(1, [bytes(1 << 20)], Priority.BLOCKING)
        assert island._hearers()[0] == 1
        island.send(0, [b"again"], Priority.CONTROL)
        stops.send_signal(signal.SIGCONT)
        ears.until(lambda: (0, b"echo again") in ears.frames)


def test_a_frame_waits_for_a_member_that_comes_soon_but_not_for_ever(
    open_link: Callable[..., ZenohLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = open_link(COORDINATOR)
    ears = Ears(link)
    monkeypatch.setattr(lanes, "HOLD_S", 0.2)
    link.send(0, [b"too early"], Priority.CONTROL)
    time.sleep(0.4)
    monkeypatch.setattr(lanes, "HOLD_S", 5.0)
    link.send(0, [b"early"], Priority.CONTROL)
    island = Ears(open_link(0))
    ears.until(lambda: ears.alive() == {0})
    link.send(0, [b"now"], Priority.CONTROL)
    island.until(lambda: len(island.frames) == 2)
    assert island.frames == [(COORDINATOR, b"early"), (COORDINATOR, b"now")]


def test_another_runs_certificate_gets_nothing_and_is_told_why(
    open_link: Callable[..., ZenohLink], tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "CONNECT_S", 0.5)
    strangers = equip(Authority.open(tmp_path / "authority", "r1", time.time()), tmp_path)
    coordinator, island = open_link(COORDINATOR), open_link(0)
    ears, at_island = Ears(coordinator), Ears(island)
    at_island.until(lambda: at_island.alive() == {COORDINATOR})
    with pytest.raises(GroupError, match=f"{place}: its certificate is not from this run's authority"):
        ZenohLink("r1", 1, strangers / "1", connect=[place])
    island.send(COORDINATOR, [b"undisturbed"], Priority.CONTROL)
    ears.until(lambda: ears.frames)
    assert ears.seen == [(0, True)]
    assert at_island.seen == [(COORDINATOR, True)]


def test_a_link_that_was_never_closed_holds_up_no_process(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    ears = Ears(open_link(COORDINATOR))
    with child(folder, 0, place) as stopped, child(folder, 1, place, then="full") as sends:
        assert sends.stdin
        ears.until(lambda: ears.alive() == {0, 1})
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        sends.stdin.write("end\n")
        sends.stdin.flush()
        ears.until(lambda: 1 not in ears.alive(), LEASE_S / 2)
        # its attempts to reach the stopped one again have to time out
        assert sends.wait(3 * sessions.OPEN_S) == 0


def test_an_interrupt_ends_a_process_at_once(open_link: Callable[..., ZenohLink], folder: Path, place: str) -> None:
    ears = Ears(open_link(COORDINATOR))
    with child(folder, 0, place, then="wait") as waits:
        ears.until(lambda: ears.alive() == {0})
        time.sleep(0.2)
        waits.send_signal(signal.SIGINT)
        assert waits.wait(2) == -signal.SIGINT


def test_a_key_that_no_member_uses_ends_no_thread(
    open_link: Callable[..., ZenohLink],
) -> None:
    coordinator, island = open_link(COORDINATOR), open_link(0)
    ears, at_island = Ears(coordinator), Ears(island)
    at_island.until(lambda: at_island.alive() == {COORDINATOR})
    for key in ("alive/me/now", "pass/0/x/y", f"to/{COORDINATOR}/{coordinator._since}/nobody"):
        island._session.put(f"{island._root}/{key}", b"?")
    island.send(COORDINATOR, [b"still there"], Priority.CONTROL)
    ears.until(lambda: (0, b"still there") in ears.frames)


def test_the_end_of_a_transfer_waits_for_nothing_that_comes_after_it(folder: Path, place: str) -> None:
    """To one that is slow, so that sockets are full, with a lease so long that no sign of life pushes it on."""
    coordinator = ZenohLink("r1", COORDINATOR, folder / str(COORDINATOR), listen=[place], lease_s=400.0)
    island = ZenohLink("r1", 0, folder / "0", connect=[place], lease_s=400.0)
    heard, all_of_it = list[int](), threading.Event()

    def hears(sender: int, frame: bytes) -> None:
        time.sleep(0.005)
        heard.append(len(frame))
        if len(heard) % 128 == 0:
            all_of_it.set()

    with closing(coordinator), closing(island):
        coordinator.start(hears, lambda address, alive: None)
        at_island = Ears(island)
        at_island.until(lambda: at_island.alive() == {COORDINATOR})
        for _ in range(8):
            for _ in range(128):
                island.send(COORDINATOR, [bytes(1 << 18)], Priority.OVERLAPPED)
            assert all_of_it.wait(6.0), f"only {len(heard) % 128} of 128 frames came"
            all_of_it.clear()
