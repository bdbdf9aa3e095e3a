"""A coordinator's desk on a real socket, for tests of both sides of enrolment."""

import json
import socket
import sqlite3
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from atoll.errors import UsageError
from atoll.peers.wide.credentials import DAY, Authority, request
from atoll.peers.wide.desk import Desk, EnrolmentService
from atoll.peers.wide.invitations import Invitation, SqliteInvitations

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


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
