"""Certificates as OpenSSL and TLS itself see them, invitations that get damaged, and their single use."""

import sqlite3
import ssl
import stat
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from shutil import which

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.errors import UsageError
from atoll.peers.wide.credentials import DAY, Authority, request, requested
from atoll.peers.wide.invitations import Invitation, Invited, SqliteInvitations, hash_of

NOW = time.time()
KEY, OTHER = b"the hash of a key", b"of another"


def authority(folder: Path, run: str = "demo") -> Authority:
    return Authority.open(folder, run, NOW)


def invitation(expires: float = NOW + DAY) -> Invitation:
    return Invitation("demo", ("10.0.0.1:7448", "[::1]:7448"), b"\x30\x82certificate", expires)


def store() -> SqliteInvitations:
    return SqliteInvitations(sqlite3.connect(":memory:", check_same_thread=False))


def meet(server: Path, client: Path, name: str | None = None) -> str:
    """A mutual TLS handshake in memory between the members of two folders; the name of the client's certificate."""
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
    for context, folder in zip(contexts, (server, client), strict=True):
        context.check_hostname = bool(name) and folder == client
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = contexts[0].wrap_bio(there, back, server_side=True)
    sides = [contexts[1].wrap_bio(back, there, server_hostname=name), listening]
    for _ in range(4):
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass
    certificate = listening.getpeercert()
    assert certificate
    assert not sides
    return dict(part[0] for part in certificate["subject"])["commonName"]  # type: ignore[misc]


def openssl(*said: str | Path, given: bytes | None = None) -> str:
    """What the command prints; a test is skipped where it is not installed."""
    if not which("openssl"):
        pytest.skip("openssl is not installed")
    return subprocess.run(["openssl", *said], input=given, capture_output=True).stdout.decode()


def test_openssl_accepts_the_certificates_for_both_ends_and_reads_role_and_run(tmp_path: Path) -> None:
    authority(tmp_path).equip(tmp_path, "worker-3", NOW)
    for purpose in ("sslserver", "sslclient"):
        ca, cert = tmp_path / "ca.pem", tmp_path / "cert.pem"
        assert openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", ca, cert) == f"{cert}: OK\n"
    printed = openssl("x509", "-in", tmp_path / "cert.pem", "-noout", "-text")
    for part in ("Version: 3", "O = demo, CN = worker-3", "DNS:worker-3.demo.atoll", "CA:FALSE", "prime256v1"):
        assert part in printed


def test_a_certificate_holds_from_an_hour_before_to_ninety_days_after_but_not_beyond_its_authority(
    tmp_path: Path,
) -> None:
    def span(now: float) -> list[float]:
        authority(tmp_path).equip(tmp_path, "worker-0", now)
        shown = (openssl("x509", "-noout", end, "-in", tmp_path / "cert.pem") for end in ("-startdate", "-enddate"))
        return [ssl.cert_time_to_seconds(each.partition("=")[2].strip()) - int(NOW) for each in shown]

    assert span(int(NOW)) == [-3600, 90 * 86400]
    assert span(int(NOW) + 700 * DAY) == [700 * 86400 - 3600, 730 * 86400]


def test_two_members_of_a_run_meet_by_mutual_tls_and_another_runs_is_refused(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    for name, of in (("coordinator", ours), ("worker-3", ours), ("stranger", theirs)):
        of.equip(tmp_path / name, name, NOW)
    assert meet(tmp_path / "coordinator", tmp_path / "worker-3", "coordinator.demo.atoll") == "worker-3"
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(tmp_path / "coordinator", tmp_path / "stranger")
    (tmp_path / "stranger" / "ca.pem").write_bytes((tmp_path / "ours" / "ca.pem").read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(tmp_path / "coordinator", tmp_path / "stranger")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        meet(tmp_path / "worker-3", tmp_path / "worker-3", "coordinator.demo.atoll")


def test_only_the_owner_can_read_what_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    authority(folder).equip(folder, "coordinator", NOW)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == dict.fromkeys(
        ("ca.pem", "ca-key.pem", "cert.pem", "key.pem"), 0o600
    )


def test_an_authority_is_found_again(tmp_path: Path) -> None:
    assert authority(tmp_path).certificate == authority(tmp_path).certificate


def test_folders_that_cannot_be_used_and_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    authority(tmp_path / "a")
    with pytest.raises(UsageError, match="holds the credentials of run demo, not of other"):
        authority(tmp_path / "a", "other")
    with pytest.raises(UsageError, match=r"in .* has expired; start a new run"):
        Authority.open(tmp_path / "a", "demo", NOW + 731 * DAY)
    authority(tmp_path / "b").equip(tmp_path / "island", "worker-0", NOW)
    with pytest.raises(UsageError, match=r"holds an island's credentials, without ca-key\.pem"):
        authority(tmp_path / "island")
    (tmp_path / "a" / "ca-key.pem").write_bytes((tmp_path / "b" / "ca-key.pem").read_bytes())
    with pytest.raises(UsageError, match="do not belong together"):
        authority(tmp_path / "a")
    (tmp_path / "b" / "ca.pem").write_text("nonsense")
    with pytest.raises(UsageError, match=r"ca\.pem is broken"):
        authority(tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"were to be written to .*file.*\(File exists\)"):
        authority(tmp_path / "file")
    for run in ("", "Demo", "-demo", "a.b", "é", "x" * 64, "a\n"):
        with pytest.raises(UsageError, match="certificates carry the name"):
            authority(tmp_path / "c", run)


def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        authority(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_request_shows_its_key_and_nothing_else_passes_for_one() -> None:
    key, asked = request()
    public = requested(asked).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    assert openssl("pkey", "-pubout", given=key) == openssl("req", "-pubkey", "-noout", given=asked) == public
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp384r1")
    other = openssl("req", "-new", *curve, "-nodes", "-keyout", "/dev/null", "-subj", "/CN=x").encode()
    assert other
    for bad in (b"", b"garbage", key, asked[:-60], other):
        with pytest.raises(UsageError, match="certificate request"):
            requested(bad)


def test_an_invitation_is_one_printable_line_and_survives_copying(tmp_path: Path) -> None:
    der = authority(tmp_path).certificate.public_bytes(Encoding.DER)
    made = Invitation("demo", ("a.example:7448",), der, NOW + DAY)
    line = made.text()
    assert line.startswith("atoll1.")
    assert line.isascii()
    assert line.isprintable()
    assert not set(line) & set(" \"'\\$`!&|;<>()*?")
    assert len(line) < 1000
    wrapped = "  " + "\r\n".join(line[at : at + 76] for at in range(0, len(line), 76)) + "\n"
    assert Invitation.parse(line) == Invitation.parse(wrapped) == made


def test_no_truncated_or_mistyped_invitation_is_taken_for_one() -> None:
    line = invitation().text()
    swapped = line[:50] + line[51] + line[50] + line[52:]
    assert swapped != line
    mistyped = [line[:at] + ("A" if line[at] != "A" else "B") + line[at + 1 :] for at in range(7, len(line) - 1)]
    for bad in (*(line[:length] for length in range(7, len(line))), *mistyped, swapped, line + "AAAA", line + "é"):
        with pytest.raises(UsageError, match="missing or mistyped; copy the whole line"):
            Invitation.parse(bad)
    for bad, match in (("", "none: one begins with atoll1"), (line[1:], "none"), ("atoll2.abc", "another version")):
        with pytest.raises(UsageError, match=match):
            Invitation.parse(bad)
    with pytest.raises(UsageError, match='write "host:port"'):
        Invitation("demo", ("example",), b"", NOW)
    with pytest.raises(UsageError, match="no address"):
        Invitation("demo", (), b"", NOW)


def test_a_secret_is_long_differs_and_is_neither_printed_nor_kept() -> None:
    first, second, kept = invitation(), invitation(), sqlite3.connect(":memory:", check_same_thread=False)
    assert len(first.secret) * 6 >= 256
    assert first.secret != second.secret
    assert first.name != second.name
    assert first.secret not in repr(first)
    SqliteInvitations(kept).add(first)
    assert first.secret not in "".join(kept.iterdump())


def test_an_invitation_is_used_once_and_not_when_the_place_is_refused() -> None:
    invitations, one = store(), invitation()
    invitations.add(one)

    def refuse() -> int:
        raise UsageError("worker 3 is here already")

    with pytest.raises(UsageError, match="here already"):
        invitations.take(one.name, hash_of(one.secret), KEY, NOW, refuse)
    with pytest.raises(UsageError, match=r"no invitation .* with this secret"):
        invitations.take(one.name, hash_of("guess"), KEY, NOW, lambda: 1)
    assert invitations.list() == [Invited(one.name, one.expires, False, None)]
    assert invitations.take(one.name, hash_of(one.secret), KEY, NOW, lambda: 4) == 4
    with pytest.raises(UsageError, match="was used already, by worker 4"):
        invitations.take(one.name, hash_of(one.secret), OTHER, NOW, refuse)
    assert invitations.list() == [Invited(one.name, one.expires, False, 4)]


def test_whoever_asks_again_with_the_same_key_gets_the_same_place_until_the_invitation_expires() -> None:
    invitations, one, places = store(), invitation(NOW + 2), iter(range(4, 9))
    invitations.add(one)
    take = partial(invitations.take, one.name, hash_of(one.secret))
    for now in (NOW, NOW, NOW + 1):
        assert take(KEY, now, lambda: next(places)) == 4
    assert next(places) == 5
    with pytest.raises(UsageError, match="expired at"):
        take(KEY, NOW + 2, lambda: 0)
    with pytest.raises(UsageError, match=r"no invitation .* with this secret"):
        invitations.take(one.name, hash_of("guess"), KEY, NOW, lambda: 0)


def test_one_key_that_asks_twice_at_once_gets_one_place() -> None:
    invitations, one = store(), invitation()
    invitations.add(one)
    take = partial(invitations.take, one.name, hash_of(one.secret), KEY, NOW)
    assert take(lambda: take(lambda: 4) + 1) == 4


def test_an_invitation_expires_and_can_be_revoked() -> None:
    invitations, late, revoked, used = store(), invitation(NOW), invitation(NOW + 1), invitation(NOW + 2)
    for each in (used, revoked, late):
        invitations.add(each)
    with pytest.raises(UsageError, match=r"expired at \d{4}-.* UTC"):
        invitations.take(late.name, hash_of(late.secret), KEY, NOW, lambda: 0)
    invitations.revoke(revoked.name)
    with pytest.raises(UsageError, match="was revoked; ask"):
        invitations.take(revoked.name, hash_of(revoked.secret), KEY, NOW, lambda: 0)
    invitations.take(used.name, hash_of(used.secret), KEY, NOW, lambda: 0)
    with pytest.raises(UsageError, match="was used by worker 0; it cannot be revoked"):
        invitations.revoke(used.name)
    with pytest.raises(UsageError, match="no invitation nobody to revoke"):
        invitations.revoke("nobody")
    assert [each.name for each in invitations.list()] == [late.name, revoked.name, used.name]


def test_what_happens_while_a_place_is_sought_counts() -> None:
    invitations, one = store(), invitation()
    invitations.add(one)

    def meanwhile() -> int:
        invitations.revoke(one.name)
        return 0

    with pytest.raises(UsageError, match="was revoked"):
        invitations.take(one.name, hash_of(one.secret), KEY, NOW, meanwhile)


def test_of_many_at_once_one_gets_the_place(tmp_path: Path) -> None:
    """Each over a connection of its own to the same file, as two processes would."""
    stores = [SqliteInvitations(sqlite3.connect(tmp_path / "ledger", check_same_thread=False)) for _ in range(6)]
    one, gate, taken, refused = invitation(), threading.Barrier(6), list[int](), list[str]()
    stores[0].add(one)

    def take(worker: int) -> None:
        gate.wait()
        try:
            taken.append(stores[worker].take(one.name, hash_of(one.secret), b"key %d" % worker, NOW, lambda: worker))
        except UsageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [stores[1].list()[0].worker]
    assert len(refused) == 5
    assert all(f"was used already, by worker {taken[0]}" in why for why in refused)
