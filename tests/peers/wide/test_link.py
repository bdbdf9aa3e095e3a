"""Links over zenoh on this machine's loopback: who hears what, in which order, and who is seen to come and go."""

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.errors import GroupError, UsageError
from atoll.peers.wide import lanes, sessions
from atoll.peers.wide.credentials import Authority, worker_name
from atoll.peers.wide.link import COORDINATOR, Link, Priority, ZenohLink

LEASE_S = 1.0
MEMBERS = (COORDINATOR, 0, 1, 2)

# A member in a process of its own, to be killed or stopped; it says what it hears and answers short frames.
CHILD = """
import sys, threading
from pathlib import Path
from atoll.peers.wide.link import Priority, ZenohLink

me, folder, listen, connect, lease, then = sys.argv[1:]
link = ZenohLink("r1", int(me), Path(folder), listen=listen.split(), connect=connect.split(), lease_s=float(lease))

def heard(sender, frame):
    if frame == b"all?":
        link.send(sender, [b" ".join(lengths)], Priority.CONTROL)
    elif len(frame) < 100:
        link.send(sender, [b"echo " + frame], Priority.CONTROL)
    lengths.append(str(len(frame)).encode())

lengths = []
link.start(heard, lambda address, alive: print(address, alive, flush=True))
print("started", flush=True)
if then == "full":
    for _ in range(64):
        link.send(0, [bytes(1 << 20)], Priority.BLOCKING)
if then == "wait":
    threading.Event().wait()
sys.stdin.readline()
"""


class Ears:
    """What a link heard and saw."""

    def __init__(self, link: Link) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.seen: list[tuple[int, bool]] = []
        self._changed = threading.Condition()
        link.start(
            lambda *frame: self._note(lambda: self.frames.append(frame)),
            lambda *change: self._note(lambda: self.seen.append(change)),
        )

    def alive(self) -> set[int]:
        return {address for address, alive in dict(self.seen).items() if alive}

    def until(self, fact: Callable[[], object], seconds: float = 10.0) -> float:
        """Wait for it; returns how long it took."""
        began = time.monotonic()
        with self._changed:
            assert self._changed.wait_for(fact, seconds), (self.seen, [(who, frame[:40]) for who, frame in self.frames])
        return time.monotonic() - began

    def _note(self, note: Callable[[], None]) -> None:
        with self._changed:
            note()
            self._changed.notify_all()


def equip(authority: Authority, folder: Path) -> Path:
    for member in MEMBERS:
        authority.equip(folder / str(member), worker_name(member) if member >= 0 else "coordinator", time.time())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    return equip(Authority.open(home / "authority", "r1", time.time()), home)


@pytest.fixture
def place() -> str:
    return free_place()


def free_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def open_link(folder: Path, place: str) -> Iterator[Callable[..., ZenohLink]]:
    """Opens a coordinator at `place`, or an island that knows only that one; closes them all."""
    links: list[ZenohLink] = []

    def opens(me: int, *listen: str) -> ZenohLink:
        at, to = ([place], []) if me == COORDINATOR else (listen, [place])
        links.append(ZenohLink("r1", me, folder / str(me), listen=at, connect=to, lease_s=LEASE_S))
        return links[-1]

    yield opens
    for link in links:
        link.close()


@contextmanager
def child(folder: Path, me: int, place: str, then: str = "") -> Generator["subprocess.Popen[str]"]:
    arguments = [str(me), str(folder / str(me)), free_place(), place, str(LEASE_S), then]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


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


@pytest.mark.parametrize("run", ["", "a/b", "a*", "$x"])
def test_a_run_needs_a_plain_name(folder: Path, run: str) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        ZenohLink(run, 0, folder / "0")


@pytest.mark.parametrize("address", ["", "host", "tls/127.0.0.1:7447", "127.0.0.1:seven", "127.0.0.1:70000", ":7447"])
def test_an_address_is_a_host_and_a_port(folder: Path, address: str) -> None:
    for side in ("listen", "connect"):
        with pytest.raises(UsageError, match='write "host:port"'):
            ZenohLink("r1", 0, folder / "0", **{side: [address]})


def test_a_name_that_nobody_knows_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"the name no-such-host\.invalid .* cannot be resolved"):
        ZenohLink("r1", 0, folder / "0", connect=["no-such-host.invalid:7447"])


def test_an_address_where_nobody_listens_is_named(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "CONNECT_S", 0.3)
    with pytest.raises(GroupError, match=f"no member of the run answered within 0.3 s at {place}: connection refused"):
        ZenohLink("r1", 0, folder / "0", connect=[place])


def test_a_taken_port_and_an_address_of_another_machine_are_named(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    open_link(COORDINATOR)
    with pytest.raises(UsageError, match=f"the port of {place} is taken"):
        ZenohLink("r1", 0, folder / "0", listen=[place])
    with pytest.raises(UsageError, match=r"has no address 192\.0\.2\.1:7447"):
        ZenohLink("r1", 0, folder / "0", listen=["192.0.2.1:7447"])


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path, place: str) -> None:
    other = equip(Authority.open(tmp_path / "authority", "r1", time.time()), tmp_path / "other")
    for name, source, match in [
        ("key.pem", folder / "1/key.pem", "cannot be used together"),
        ("ca.pem", other / "0/ca.pem", "cannot be used together"),
        ("cert.pem", folder / "0/key.pem", "cannot be used together"),
        ("cert.pem", None, r"cert\.pem.*No such file"),
    ]:
        mixed = tmp_path / f"mixed-{name}-{source is None}"
        shutil.copytree(folder / "0", mixed, dirs_exist_ok=True)
        (mixed / name).unlink()
        if source:
            shutil.copy(source, mixed / name)
        with pytest.raises(UsageError, match=match):
            ZenohLink("r1", 0, mixed, connect=[place])
