"""Who may take part in a run: its authority, the certificates that name roles in it, and invitations.

A certificate says "worker-3 of run R", wherever worker 3 is. The coordinator's folder holds the authority (ca.pem and
ca-key.pem); every member's folder holds ca.pem, its own cert.pem and its own key.pem, which is made there and never
leaves it. An invitation is one line of text that someone hands to whoever runs an island:

    atoll1. + base64url(size of head (2 bytes) | head (JSON) | the authority's certificate (DER) | checksum (8 bytes))

The checksum finds typing errors, not forgeries. Whoever holds the line may enrol once, so it is a secret until then.
All times are seconds since 1970.
"""

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os.path import isfile
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import UsageError
from atoll.files import write_whole

CA, CA_KEY, CERT, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"
HOUR = 3600.0
DAY = 24 * HOUR
LIFETIME = 90 * DAY
"""How long a member's certificate is valid; it begins an hour early, for clocks that differ."""
AUTHORITY_LIFETIME = 730 * DAY
COORDINATOR_NAME = "coordinator"
PREFIX = "atoll1."
_CHECKSUM = 8


def worker_name(worker: int) -> str:
    """The name that a certificate gives a worker."""
    return f"worker-{worker}"


def host_name(run: str, name: str) -> str:
    """The name by which TLS knows a member; no such host exists."""
    return f"{name}.{run}.atoll"


def shown(time: float) -> str:
    """A time for a person."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True)
class Authority:
    """A run's authority: the key that signs its members' certificates.

    Args: run: the run's id, of lower-case letters, digits and hyphens.
    """

    run: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def open(cls, folder: Path, run: str, now: float) -> "Authority":
        """The authority in `folder`, made there if there is none.

        Raises: UsageError for a run id that cannot be in a certificate, and for a folder that holds another run's
            authority, an island's credentials, an authority that has expired, or cannot be used.
        """
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", run):
            raise UsageError(
                f"the run was to be called {run!r}, but certificates carry the name; write up to 63 lower-case "
                "letters, digits and hyphens, as in my-run-2"
            )
        if not isfile(folder / CA):
            return cls._make(folder, run, now)
        certificate = read_certificate(folder / CA)
        theirs, _ = identity(certificate)
        if theirs != run:
            raise UsageError(f"{folder} holds the credentials of run {theirs}, not of {run}; give {run} another folder")
        if not isfile(folder / CA_KEY):
            raise UsageError(f"{folder} holds an island's credentials, without {CA_KEY}; give the coordinator's folder")
        if certificate.not_valid_after_utc.timestamp() <= now:
            raise UsageError(f"the authority of run {run} in {folder} has expired; start a new run in another folder")
        key = _read(folder / CA_KEY, lambda content: serialization.load_pem_private_key(content, None))
        if key.public_key() != certificate.public_key():
            raise UsageError(f"{CA} and {CA_KEY} in {folder} do not belong together; bring both back from a backup")
        return cls(run, certificate, key)

    @classmethod
    def _make(cls, folder: Path, run: str, now: float) -> "Authority":
        key, name = ec.generate_private_key(ec.SECP256R1()), _subject(run, "authority")
        builder = _builder(name, name, key.public_key(), (now, now + AUTHORITY_LIFETIME), ca=True)
        certificate = builder.sign(key, hashes.SHA256())
        write_private(folder, {CA_KEY: _pem_key(key), CA: pem(certificate)})
        return cls(run, certificate, key)

    def certify(self, public: ec.EllipticCurvePublicKey, name: str, now: float) -> x509.Certificate:
        """A certificate that the owner of `public` is `name` in this run, for both ends of a link."""
        until = min(now + LIFETIME, self.certificate.not_valid_after_utc.timestamp())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [x509.DNSName(host_name(self.run, name))]
        return (
            _builder(_subject(self.run, name), self.certificate.subject, public, (now, until), ca=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def equip(self, folder: Path, name: str, now: float) -> None:
        """Write a new key and certificate of `name` to `folder`, and ca.pem: for members on the authority's machine.

        Raises: UsageError if the folder cannot be written.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = pem(self.certify(key.public_key(), name, now))
        write_private(folder, {KEY: _pem_key(key), CA: pem(self.certificate), CERT: certificate})


def request() -> tuple[bytes, bytes]:
    """A new private key (PEM), and a request (PEM) that its owner be certified; who it is, the authority decides."""
    key = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _pem_key(key), asked.public_bytes(serialization.Encoding.PEM)


def requested(asked: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a request, whose sender has shown to own it.

    Raises: UsageError if it is no request, or not of a P-256 key.
    """
    try:
        request = x509.load_pem_x509_csr(asked)
        public = request.public_key()
        owned = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"the certificate request cannot be read ({type(error).__name__}); enrol anew") from error
    if not owned or not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise UsageError("the certificate request is not signed with a P-256 key of its own; enrol with `atoll join`")
    return public


def identity(certificate: x509.Certificate) -> tuple[str, str]:
    """The run and the name that a certificate states; ("", "") where it is not of an Atoll run."""
    found = {attribute.oid: str(attribute.value) for attribute in certificate.subject}
    return found.get(NameOID.ORGANIZATION_NAME, ""), found.get(NameOID.COMMON_NAME, "")


def read_certificate(path: Path) -> x509.Certificate:
    """Raises: UsageError if it cannot be read."""
    return _read(path, x509.load_pem_x509_certificate)


def pem(certificate: x509.Certificate) -> bytes:
    """As in a file."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def write_private(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner may read, in order, each whole or not there.

    Raises: UsageError if the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, lambda beside, content=content: _write_private(beside, content))
    except OSError as error:
        what = f"the credentials were to be written to {folder}, but cannot be ({error.strerror})"
        raise UsageError(f"{what}; make room, or give another folder") from error


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # one that was left there may be open to others
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _read(path: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is broken; bring it back from a backup, or begin with an empty folder") from error


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _subject(run: str, name: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, run), x509.NameAttribute(NameOID.COMMON_NAME, name)]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, span: tuple[float, float], ca: bool
) -> x509.CertificateBuilder:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **unused)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(int(span[0] - HOUR), UTC))
        .not_valid_after(datetime.fromtimestamp(int(span[1]), UTC))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


@dataclass(frozen=True)
class Invitation:
    """Leave for one island to enrol once.

    Args:
        run: the run's id.
        addresses: where the coordinator enrols islands, as "host:port", tried in order.
        authority: the certificate of the run's authority (DER), by which the island knows the coordinator.
        expires: when it ends.
        name: what the coordinator lists and revokes it by.
        secret: 256 random bits.
    Raises: UsageError for addresses that cannot be.
    """

    run: str
    addresses: tuple[str, ...]
    authority: bytes = field(repr=False)
    expires: float
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        if not self.addresses:
            raise UsageError("the invitation had no address; give at least one at which islands reach the coordinator")
        for address in self.addresses:
            split(address)

    def text(self) -> str:
        """The one line."""
        said = {"run": self.run, "to": self.addresses, "name": self.name, "secret": self.secret, "until": self.expires}
        head = json.dumps(said, separators=(",", ":")).encode()
        body = len(head).to_bytes(2, "big") + head + self.authority
        return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "Invitation":
        """What the line says; blanks and line ends that copying put in do not count.

        Raises: UsageError if it is no invitation, or not all of it.
        """
        line = "".join(text.split())
        if not line.startswith(PREFIX):
            other = re.match(r"atoll\d+\.", line)
            what = "of another version of Atoll" if other else f"none: one begins with {PREFIX}"
            raise UsageError(f"the invitation was {line[:12]!r}..., which is {what}; copy the whole line anew")
        coded = line.removeprefix(PREFIX)
        try:
            whole = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars="-_", validate=True)
            body, checksum = whole[:-_CHECKSUM], whole[-_CHECKSUM:]
            if checksum != _checksum(body):
                raise ValueError("checksum")
            size = 2 + int.from_bytes(body[:2], "big")
            said = json.loads(body[2:size])
            return cls(said["run"], tuple(said["to"]), body[size:], said["until"], said["name"], said["secret"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"the invitation ({len(line)} characters) has a part missing or mistyped"
            raise UsageError(f"{what}; copy the whole line anew") from error


class Invitations(Protocol):
    """The invitations of a run, kept by its coordinator."""

    def add(self, invitation: Invitation) -> None:
        """Let it be used, once."""
        ...

    def take(self, name: str, secret_hash: bytes, now: float, place: Callable[[], int]) -> int:
        """Use it up for the worker that `place` names. That is asked only if it holds; if it raises, it still holds.

        Raises: UsageError if it is unknown, was used or revoked, or has expired.
        """
        ...

    def revoke(self, name: str) -> None:
        """Let it not be used any more. Raises: UsageError if it is unknown or was used."""
        ...

    def list(self) -> "Sequence[Invited]":
        """All of them, the one that expires first in front."""
        ...


@dataclass(frozen=True)
class Invited:
    """What is known of an invitation. worker: who used it, or None."""

    name: str
    expires: float
    revoked: bool
    worker: int | None


class SqliteInvitations:
    """Invitations in a table of an SQLite file.

    Args: connection: one of its own, made with `check_same_thread=False`: it is committed here, from any thread.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._do(
            "CREATE TABLE IF NOT EXISTS invitations (name TEXT PRIMARY KEY, secret_hash BLOB NOT NULL, "
            "expires REAL NOT NULL, revoked INTEGER NOT NULL DEFAULT 0, worker INTEGER)"
        )

    def add(self, invitation: Invitation) -> None:
        row = (invitation.name, hash_of(invitation.secret), invitation.expires)
        self._do("INSERT INTO invitations (name, secret_hash, expires) VALUES (?, ?, ?)", *row)

    def take(self, name: str, secret_hash: bytes, now: float, place: Callable[[], int]) -> int:
        kept = self._do("SELECT secret_hash FROM invitations WHERE name = ?", name)[0]
        if not kept or not hmac.compare_digest(kept[0][0], secret_hash):
            raise UsageError(f"this run has no invitation {name} with this secret; ask its coordinator for a new one")
        self._check(name, now)
        worker = place()
        # it may have been used or revoked meanwhile: this statement decides
        taken = "UPDATE invitations SET worker = ? WHERE name = ? AND worker IS NULL AND NOT revoked"
        if not self._do(taken, worker, name)[1]:
            self._check(name, now)
        return worker

    def revoke(self, name: str) -> None:
        if self._do("UPDATE invitations SET revoked = 1 WHERE name = ? AND worker IS NULL", name)[1]:
            return
        used = next((each for each in self.list() if each.name == name), None)
        if not used:
            raise UsageError(f"there is no invitation {name} to revoke; list the run's invitations for their names")
        raise UsageError(f"invitation {name} was used by worker {used.worker}; it cannot be revoked any more")

    def list(self) -> Sequence[Invited]:
        rows, _ = self._do("SELECT name, expires, revoked, worker FROM invitations ORDER BY expires, name")
        return [Invited(name, expires, bool(revoked), worker) for name, expires, revoked, worker in rows]

    def _check(self, name: str, now: float) -> None:
        said = next(each for each in self.list() if each.name == name)
        if said.worker is not None:
            why = f"was used already, by worker {said.worker}"
        elif said.revoked:
            why = "was revoked"
        elif now >= said.expires:
            why = f"expired at {shown(said.expires)}"
        else:
            return
        raise UsageError(f"invitation {name} {why}; ask the run's coordinator for a new one")

    def _do(self, statement: str, *values: object) -> tuple[Sequence[tuple[Any, ...]], int]:
        """The rows that a statement gives, and how many it changed."""
        with self._lock, self._connection:
            done = self._connection.execute(statement, values)
            return done.fetchall(), done.rowcount


def split(address: str) -> tuple[str, int]:
    """Host and port of an address. Raises: UsageError if it is none."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not int(port) < 1 << 16:
        raise UsageError(f'{address!r} is no address; write "host:port", as in "10.0.0.1:7447"')
    return host.strip("[]"), int(port)


def hash_of(secret: str) -> bytes:
    """What is kept of a secret. It is random, so no slow hash is needed."""
    return hashlib.sha256(secret.encode()).digest()


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM]
