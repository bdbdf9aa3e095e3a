"""Enrolment over real sockets: what works, what is refused with a sentence, and what a lost reply costs."""

import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which

import pytest

from atoll.errors import GroupError, UsageError
from atoll.files import write_whole
from atoll.peers.wide.credentials import DAY, HOUR
from atoll.peers.wide.desk import Desk, EnrolmentService
from atoll.peers.wide.enrol import Enrolled, enrol
from atoll.peers.wide.invitations import Invitation
from tests.peers.wide.desks import ENDPOINTS, Start, until


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


@pytest.mark.parametrize("ended", ["the reply is lost", "the reply is garbled", "the disk is full"])
def test_an_island_whose_reply_was_lost_enrols_again_with_the_same_invitation(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    here, folder = start(), tmp_path / "island"
    here.places = [0, 1, 2]
    made, answer, whole = here.invite().text(), Desk.answer, write_whole

    def lose(desk: Desk, line: bytes, caller: str) -> bytes:
        assert b"certificate" in answer(desk, line, caller)
        if ended == "the reply is lost":
            raise ConnectionResetError("Connection reset by peer")
        return b"{}\n"

    def full(path: Path, write: Callable[[Path], object]) -> None:
        if path.name == "cert.pem":
            raise OSError(28, "No space left on device")
        whole(path, write)

    with monkeypatch.context() as patched:
        if ended == "the disk is full":
            patched.setattr("atoll.peers.wide.credentials.write_whole", full)
        else:
            patched.setattr(Desk, "answer", lose)
        with pytest.raises((GroupError, UsageError)):
            enrol(made, folder)
    assert not (folder / "cert.pem").exists()
    key = (folder / "key.pem").read_bytes()
    with pytest.raises(UsageError, match="made this island worker 3 before; enrol again as that one"):
        enrol(made, folder, worker=7)
    with pytest.raises(UsageError, match="was used already, by worker 3"):
        enrol(made, tmp_path / "another")
    assert enrol(made, folder) == Enrolled("demo", 3, ENDPOINTS)
    assert (folder / "key.pem").read_bytes() == key
    assert here.places == [0, 1, 2, 3]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")  # raises unless they belong together


def test_a_coordinator_that_is_away_for_a_while_costs_no_key_that_has_asked(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, folder = start(), tmp_path / "island"
    there, made, answer = here.service.port, here.invite(), Desk.answer
    with monkeypatch.context() as patched:
        patched.setattr(Desk, "answer", lambda desk, line, caller: answer(desk, line, caller) and b"{}\n")
        with pytest.raises(GroupError):
            enrol(made.text(), folder)
    here.service.close()
    with pytest.raises(GroupError, match=f"127.0.0.1:{there} cannot be reached"):
        enrol(made.text(), folder)
    desk = Desk(here.authority, here.invitations, here.place, ENDPOINTS, here.said.append, here.now)
    here.service = EnrolmentService(desk, here.folder, f"127.0.0.1:{there}")
    assert enrol(made.text(), folder).worker == 0
    assert here.places == [0]


def test_a_key_that_is_left_over_and_broken_is_replaced(start: Start, tmp_path: Path) -> None:
    here, folder = start(), tmp_path / "island"
    folder.mkdir()
    (folder / "ca.pem").write_bytes((here.folder / "ca.pem").read_bytes())
    (folder / "key.pem").write_text("nonsense")
    assert enrol(here.invite().text(), folder).worker == 0


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
