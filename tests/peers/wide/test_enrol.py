"""Enrolment over real sockets: what works, what is refused with a sentence, and what strangers can do to it."""

import json
import socket
import sqlite3
import ssl
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import which

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.errors import GroupError, UsageError
from atoll.peers.wide.credentials import DAY, HOUR, Authority, Invitation, SqliteInvitations, request
from atoll.peers.wide.enrol import CALLERS, MAX_REQUEST, Desk, Enrolled, EnrolmentService, enrol

ENDPOINTS = ("198.51.100.7:7447",)


class Coordinator:
    """One that gives the numbers 0, 1, ... or the one that is asked for, once."""

    def __init__(self, folder: Path, run: str = "demo", *, clock: float = 0.0, name: str = "coordinator") -> None:
        self.folder, self.run, self.clock = folder, run, clock
        self.said: list[str] = []
        self.places: list[int] = []
        self.authority = Authority.open(folder, run, self.now())
        self.authority.equip(folder, name, self.now())
        self.invitations = SqliteInvitations(sqlite3.connect(":memory:", check_same_thread=False))
        desk = Desk(self.authority, self.invitations, self.place, ENDPOINTS, self.said.append, self.now)
        self.service = EnrolmentService(desk, folder, "127.0.0.1:0", patience_s=1.0)

    def now(self) -> float:
        return time.time() + self.clock

    def place(self, wanted: int | None) -> int:
        if wanted in self.places:
            raise UsageError(f"worker {wanted} is here already; ask for another number")
        self.places.append(len(self.places) if wanted is None else wanted)
        return self.places[-1]

    def invite(self, *addresses: str, lasts: float = DAY) -> Invitation:
        der = self.authority.certificate.public_bytes(Encoding.DER)
        made = Invitation(self.run, addresses or (f"127.0.0.1:{self.service.port}",), der, self.now() + lasts)
        self.invitations.add(made)
        return made

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.service.port), 5.0)

    def talk(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        return context.wrap_socket(self.call(), server_hostname=f"coordinator.{self.run}.atoll")

    def answer(self, **changed: object) -> str:
        """The error with which a request is answered that is changed somewhere."""
        made = self.invite()
        asked = {"name": made.name, "secret": made.secret, "request": request()[1].decode(), "worker": None}
        with self.talk() as talk:
            talk.sendall(json.dumps({"protocol": 1, "time": time.time()} | asked | changed).encode() + b"\n")
            return json.loads(talk.makefile().readline())["error"]


Start = Callable[..., Coordinator]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Coordinator] = []

    def one(run: str = "demo", **given: object) -> Coordinator:
        started.append(Coordinator(tmp_path / f"coordinator-{len(started)}", run, **given))  # type: ignore[arg-type]
        return started[-1]

    yield one
    for each in started:
        each.service.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_invitation_becomes_a_certificate_that_openssl_accepts(start: Start, tmp_path: Path) -> None:
    here, folder = start(), tmp_path / "island"
    made = here.invite()
    assert enrol(made.text(), folder) == Enrolled("demo", 0, ENDPOINTS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {file.name for file in folder.iterdir()} == {"ca.pem", "cert.pem", "key.pem", "joined.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")  # raises unless they belong together
    assert any("enrolled as worker 0" in line and made.name in line for line in here.said)
    assert not any(made.secret in line for line in here.said)
    if which("openssl"):
        files = [str(folder / name) for name in ("ca.pem", "cert.pem")]
        verify = subprocess.run(["openssl", "verify", "-x509_strict", "-CAfile", *files], capture_output=True)
        subject = subprocess.run(["openssl", "x509", "-noout", "-subject", "-in", files[1]], capture_output=True)
        assert verify.stdout.endswith(b"OK\n")
        assert subject.stdout == b"subject=O = demo, CN = worker-0\n"


def test_the_private_key_never_leaves_the_island(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, heard = start(), list[bytes]()
    answer = Desk.answer

    def listen(desk: Desk, line: bytes, caller: str) -> bytes:
        heard.append(line)
        return answer(desk, line, caller)

    monkeypatch.setattr(Desk, "answer", listen)
    enrol(here.invite().text(), tmp_path / "island")
    key = (tmp_path / "island" / "key.pem").read_text().splitlines()[1]
    assert len(heard) == 1
    assert key[-30:].encode() not in heard[0]
    assert b"PRIVATE" not in heard[0]


def test_an_island_has_the_number_it_wants_unless_somebody_has_it(start: Start, tmp_path: Path) -> None:
    here, second = start(), tmp_path / "second"
    assert enrol(here.invite().text(), tmp_path / "first", worker=7).worker == 7
    kept = here.invite().text()
    with pytest.raises(UsageError, match="worker 7 is here already"):
        enrol(kept, second, worker=7)
    assert not list(second.iterdir())
    assert enrol(kept, second, worker=5).worker == 5


def test_an_island_that_has_enrolled_needs_no_invitation_and_uses_none_up(start: Start, tmp_path: Path) -> None:
    here, folder = start(), tmp_path / "island"
    first, second = here.invite(), here.invite(lasts=2 * DAY)
    enrolled, before = enrol(first.text(), folder), (folder / "cert.pem").read_bytes()
    here.service.close()
    assert enrol(first.text(), folder) == enrol(second.text(), folder) == enrolled
    assert (folder / "cert.pem").read_bytes() == before
    assert [each.worker for each in here.invitations.list()] == [0, None]
    with pytest.raises(UsageError, match="holds the credentials of worker-0; give another island"):
        enrol(second.text(), folder, worker=1)


def test_an_expired_certificate_is_replaced(start: Start, tmp_path: Path) -> None:
    here, folder = start(), tmp_path / "island"
    enrol(here.invite().text(), folder)
    here.clock = 91 * DAY
    assert enrol(here.invite().text(), folder, worker=3, now=here.now).worker == 3
    assert enrol(here.invite().text(), folder, now=here.now).worker == 3


def test_used_expired_revoked_and_unknown_invitations_are_refused_on_both_sides(start: Start, tmp_path: Path) -> None:
    here = start()
    used, expired, revoked = here.invite(), here.invite(lasts=0.0), here.invite()
    enrol(used.text(), tmp_path / "first")
    here.invitations.revoke(revoked.name)
    unknown = Invitation("demo", used.addresses, used.authority, used.expires)
    for made, why in (
        (used, "used already, by worker 0"),
        (expired, "expired at"),
        (revoked, "was revoked"),
        (unknown, "has no invitation"),
    ):
        with pytest.raises(UsageError, match=f"{made.name}.* {why}|{why} {made.name}"):
            enrol(made.text(), tmp_path / "second")
        assert why in here.said[-1]
    assert here.places == [0]


def test_another_runs_coordinator_is_found_out_before_it_hears_the_secret(start: Start, tmp_path: Path) -> None:
    """Both call themselves `demo`; only the authority differs."""
    ours, theirs = start(), start()
    moved = ours.invite(f"127.0.0.1:{theirs.service.port}")
    with pytest.raises(GroupError, match="is not of this run, by its certificate"):
        enrol(moved.text(), tmp_path / "island")
    until(lambda: theirs.said)
    assert "its invitation is of another run, or one of the two clocks is wrong" in theirs.said[-1]
    two = ours.invite(f"127.0.0.1:{theirs.service.port}", f"127.0.0.1:{ours.service.port}")
    assert enrol(two.text(), tmp_path / "island").worker == 0


def test_a_member_cannot_pass_for_the_coordinator(start: Start, tmp_path: Path) -> None:
    impostor = start(name="worker-1")
    with pytest.raises(GroupError, match="a member of the run that is not its coordinator"):
        enrol(impostor.invite().text(), tmp_path / "island")


@pytest.mark.parametrize(("clock", "why"), [(10 * DAY, "is not valid yet"), (-800 * DAY, "has expired")])
def test_a_clock_that_tls_trips_over_is_named(start: Start, tmp_path: Path, clock: float, why: str) -> None:
    with pytest.raises(GroupError, match=rf"{why} by this machine's clock, which shows .* UTC; set the clock"):
        enrol(start(clock=clock).invite().text(), tmp_path / "island")


@pytest.mark.parametrize("clock", [-2 * HOUR, 2 * HOUR])
def test_a_clock_that_is_hours_off_is_named_and_uses_nothing_up(start: Start, tmp_path: Path, clock: float) -> None:
    here = start()
    made = here.invite().text()
    with pytest.raises(UsageError, match=r"the island's clock shows .* and the coordinator's .* same invitation"):
        enrol(made, tmp_path / "island", now=lambda: time.time() + clock)
    assert "the island's clock shows" in here.said[-1]
    assert enrol(made, tmp_path / "island", now=lambda: time.time() + 0.4 * clock).worker == 0


def test_addresses_where_no_coordinator_is_are_named_one_by_one(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        ports = [silent.getsockname()[1], port]
        made = start().invite(*(f"127.0.0.1:{each}" for each in ports), "nowhere.invalid:1")
        with pytest.raises(GroupError) as caught:
            enrol(made.text(), tmp_path / "island", patience_s=0.3)
    assert f"127.0.0.1:{ports[0]} does not answer" in str(caught.value)
    assert f"127.0.0.1:{ports[1]} cannot be reached (Connection refused)" in str(caught.value)
    assert "nowhere.invalid:1 has a name that cannot be resolved" in str(caught.value)
    assert not list((tmp_path / "island").iterdir())


def test_something_else_at_the_address_is_named(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            way, _ = other.accept()
            way.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            way.recv(1 << 16)
            way.close()

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(GroupError, match="does not speak TLS as a coordinator does"):
            enrol(start().invite(f"127.0.0.1:{other.getsockname()[1]}").text(), tmp_path / "island")
        greeter.join()


def test_folders_that_hold_something_else_or_cannot_be_written_use_nothing_up(start: Start, tmp_path: Path) -> None:
    ours, theirs = start(), start("other")
    enrol(theirs.invite().text(), tmp_path / "taken")
    made = ours.invite().text()
    for folder, why in (
        (tmp_path / "taken", r"holds credentials of another run \(other\) than the invitation is for \(demo\)"),
        (ours.folder, "holds the authority of a run"),
        (ours.folder / "cert.pem", "cannot be .*File exists|Not a directory"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UsageError, match=why):
            enrol(made, folder)
        assert sorted(tmp_path.rglob("*")) == before
    assert enrol(made, tmp_path / "island").worker == 0


def test_a_full_disk_is_noticed_before_the_invitation_is_used(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start().invite().text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(UsageError, match="No space left on device"):
            enrol(made, tmp_path / "island")
    assert not list((tmp_path / "island").iterdir())
    assert enrol(made, tmp_path / "island").worker == 0


def test_a_port_that_is_taken_and_files_that_are_missing_are_named(start: Start, tmp_path: Path) -> None:
    here = start()
    desk = Desk(here.authority, here.invitations, here.place, ENDPOINTS, here.said.append)
    with pytest.raises(UsageError, match=r"cannot listen there \(Address already in use\); give a free port"):
        EnrolmentService(desk, here.folder, f"127.0.0.1:{here.service.port}")
    with pytest.raises(UsageError, match="give the folder in which the coordinator was started"):
        EnrolmentService(desk, tmp_path, "127.0.0.1:0")


def test_requests_that_are_none_get_a_sentence_and_use_nothing_up(start: Start) -> None:
    here = start()
    none = "what was sent is no request to enrol"
    assert "the island speaks version 2 of enrolment and the coordinator 1" in here.answer(protocol=2)
    assert "certificate request cannot be read" in here.answer(request="garbage")
    for changed in (
        {"protocol": "1"},
        {"name": "x\n forged line"},
        {"name": ["a"]},
        {"secret": "\ud800"},
        {"worker": -1},
        {"worker": 1 << 70},
        {"worker": "1"},
        {"time": float("nan")},
        {"time": 10**400},
        {"time": -1},
        {"request": None},
    ):
        assert none in here.answer(**changed)
    for line in (b"\n", b"[" * (MAX_REQUEST - 1) + b"\n", b'"\xff"\n', b"null\n", b"{}\n", b"1" * 5000 + b"\n"):
        with here.talk() as talk:
            talk.sendall(line)
            assert none in talk.makefile().readline()
    assert here.places == []


def test_an_error_of_the_coordinators_own_reaches_both_sides_and_the_service_lives_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = start()
    made = here.invite().text()

    def locked(*_: object) -> int:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(here.invitations, "take", locked)
        with pytest.raises(UsageError, match="met an error of its own"):
            enrol(made, tmp_path / "island")
    assert "OperationalError: database is locked" in here.said[-1]
    assert enrol(made, tmp_path / "island").worker == 0


def test_garbage_oversize_and_half_open_calls_end_with_a_sentence_in_the_log(start: Start) -> None:
    here = start()
    with here.call() as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: any("did not speak TLS" in line for line in here.said))
    with here.talk() as large:
        large.sendall(b"x" * (MAX_REQUEST + 1))
        until(lambda: any("sent too much" in line for line in here.said))
    with here.talk() as half:
        half.sendall(b'{"protocol"')
    until(lambda: any("hung up" in line for line in here.said))
    with here.call() as reset:
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert here.answer(protocol=2)


def test_a_caller_that_dribbles_is_ended_though_it_never_pauses(start: Start) -> None:
    here, began = start(), time.monotonic()
    with here.talk() as slow, suppress(OSError):
        while time.monotonic() - began < 5:
            slow.sendall(b" ")
            time.sleep(0.05)
    assert time.monotonic() - began < 3
    assert any("did not say all in time" in line for line in here.said)


def test_callers_that_say_nothing_keep_nobody_out_and_bind_no_more_threads(start: Start, tmp_path: Path) -> None:
    here, others = start(), threading.active_count()
    idle: list[socket.socket] = []
    for _ in range(3 * CALLERS):
        idle.append(here.call())
    began = time.monotonic()
    assert enrol(here.invite().text(), tmp_path / "island").worker == 0
    assert time.monotonic() - began < 0.9  # less than the patience after which the idle ones are ended anyway
    assert threading.active_count() - others <= CALLERS
    for each in idle:
        each.close()
    until(lambda: threading.active_count() <= others)


def test_closing_ends_calls_and_frees_the_port(start: Start) -> None:
    here = start()
    port, before = here.service.port, threading.active_count()
    with here.call() as waiting:
        until(lambda: threading.active_count() > before)
        here.service.close()
        assert waiting.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)
