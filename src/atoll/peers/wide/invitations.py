"""Invitations: one line of text that someone hands to whoever runs an island, which lets it enrol once.

    atoll1. + base64url(size of head (2 bytes) | head (JSON) | the authority's certificate (DER) | checksum (8 bytes))

The checksum finds typing errors, not forgeries. Whoever holds the line may enrol, so it is a secret until then. It is
used up by a key, not by a request: whoever asks again with the same key, since the reply was lost, is the same island.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.errors import UsageError
from atoll.peers.wide.credentials import shown

PREFIX = "atoll1."
_CHECKSUM = 8


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

    def take(self, name: str, secret_hash: bytes, key_hash: bytes, now: float, place: Callable[[], int]) -> int:
        """Use it up for the worker that `place` names, or name that worker again, if the same key asks once more.

        `place` is asked only if it holds; if that raises, it still holds.

        Raises: UsageError if it is unknown, was used by another key or revoked, or has expired.
        """
        ...

    def why_not(self, name: str, secret_hash: bytes, now: float) -> str:
        """Why nobody new could use it now, in a sentence; "" if somebody could."""
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
            "expires REAL NOT NULL, revoked INTEGER NOT NULL DEFAULT 0, worker INTEGER, key_hash BLOB)"
        )

    def add(self, invitation: Invitation) -> None:
        row = (invitation.name, hash_of(invitation.secret), invitation.expires)
        self._do("INSERT INTO invitations (name, secret_hash, expires) VALUES (?, ?, ?)", *row)

    def take(self, name: str, secret_hash: bytes, key_hash: bytes, now: float, place: Callable[[], int]) -> int:
        self._known(name, secret_hash)
        if (before := self._holds(name, key_hash, now)) is not None:
            return before
        worker = place()
        # it may have been used or revoked meanwhile: this statement decides
        taken = "UPDATE invitations SET worker = ?, key_hash = ? WHERE name = ? AND worker IS NULL AND NOT revoked"
        if self._do(taken, worker, key_hash, name)[1]:
            return worker
        meanwhile = self._holds(name, key_hash, now)
        assert meanwhile is not None
        return meanwhile

    def why_not(self, name: str, secret_hash: bytes, now: float) -> str:
        try:
            self._known(name, secret_hash)
            self._holds(name, b"", now)
        except UsageError as error:
            return str(error)
        return ""

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

    def _known(self, name: str, secret_hash: bytes) -> None:
        kept = self._do("SELECT secret_hash FROM invitations WHERE name = ?", name)[0]
        if not kept or not hmac.compare_digest(kept[0][0], secret_hash):
            raise UsageError(f"this run has no invitation {name} with this secret; ask its coordinator for a new one")

    def _holds(self, name: str, key_hash: bytes, now: float) -> int | None:
        """None if it can be used, and the worker if the owner of this key has used it. Raises: UsageError otherwise."""
        row = "SELECT expires, revoked, worker, key_hash FROM invitations WHERE name = ?"
        expires, revoked, worker, used_by = self._do(row, name)[0][0]
        if worker is not None and used_by != key_hash:
            why = f"was used already, by worker {worker}"
        elif revoked:
            why = "was revoked"
        elif now >= expires:
            why = f"expired at {shown(expires)}"
        else:
            return worker
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
