"""The coordinator's directory and process: credentials, invitations, ledger, and the services that use them.

    RUN/run.json          the run's id, and where islands reach the coordinator
    RUN/credentials/      the run's authority, and the coordinator's own certificate
    RUN/ledger.sqlite     what was decided, and invitations
    RUN/log.txt           what was said
    RUN/status.json       how the run stands, written anew each second

Whoever has this directory has the run: keep it to yourself, and a copy of credentials/ somewhere else.
"""

import itertools
import json
import re
import secrets
import socket
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atoll import __version__
from atoll.errors import GroupError, UsageError
from atoll.files import write_json
from atoll.peers.wide.credentials import Authority
from atoll.peers.wide.desk import Desk, EnrolmentService
from atoll.peers.wide.invitations import Invitation, Invited, SqliteInvitations
from atoll.peers.wide.ledger import PLACES, Ledger
from atoll.peers.wide.link import COORDINATOR, ZenohLink
from atoll.peers.wide.server import Server
from atoll.peers.wide.status import status

NAME = "coordinator"
PORT, LAST_PORT = 7447, 65534
"""Of links; the next one is for enrolment."""
LOCKED_S = 10.0
"""How long to wait for another process that writes the ledger."""


@dataclass(frozen=True)
class Home:
    """A run as its coordinator knows it.

    Args: folder: the directory. run: the run's id. address: by which islands reach this machine; port: of the links,
    and the next one of enrolment.
    """

    folder: Path
    run: str
    address: str
    port: int

    @classmethod
    def open(cls, folder: Path, *, address: str | None = None, port: int | None = None) -> "Home":
        """The run in a directory, made there if there is none.

        Args: address: found out for a new run if left out. port: `PORT` for a new run if left out; it stays.
        Raises: UsageError if the directory holds something else, or cannot be written.
        """
        path = folder / "run.json"
        if address and (":" in address.rpartition("]")[2] or "/" in address or " " in address):
            raise UsageError(
                f"--address was {address}, but it is a name or a number alone, as in coordinator.example.org; give the "
                "port as --port"
            )
        if port and port > LAST_PORT:
            raise UsageError(f"--port was {port}, but the next one is used too; give {LAST_PORT} or less")
        if path.exists():
            home = cls._kept(folder, address, port)
        else:
            home = cls(folder, _name(folder.resolve()), address or outward_address(), port or PORT)
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UsageError(
                    f"{folder} holds something that is no run; give the coordinator a directory of its own"
                )
            home._keep()
        authority = home.authority()
        if not (home.credentials / "cert.pem").exists():
            authority.equip(home.credentials, NAME, time.time())
        return home

    @classmethod
    def _kept(cls, folder: Path, address: str | None, port: int | None) -> "Home":
        path = folder / "run.json"
        try:
            saved = json.loads(path.read_text())
            home = cls(folder, saved["run"], saved["address"], saved["port"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} cannot be read ({error}); bring it back, or give another directory") from None
        if port not in (None, home.port):
            raise UsageError(
                f"--port was {port}, but the islands of the run in {folder} know it by port {home.port}; leave --port "
                "out"
            )
        if address not in (None, home.address):
            home = replace(home, address=address)
            home._keep()
        return home

    def _keep(self) -> None:
        try:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_json(self.folder / "run.json", {"run": self.run, "address": self.address, "port": self.port})
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written ({error.strerror}); give another directory") from None

    @property
    def credentials(self) -> Path:
        """Where the certificates are."""
        return self.folder / "credentials"

    def authority(self) -> Authority:
        """Who signs this run's certificates."""
        return Authority.open(self.credentials, self.run, time.time())

    def invite(self, count: int, expires_s: float) -> list[Invitation]:
        """New invitations, each for one island."""
        certificate = (self.credentials / "ca.pem").read_text()
        der = ssl.PEM_cert_to_DER_cert(certificate)
        addresses = (f"{self.address}:{self.port + 1}",)
        made = [Invitation(self.run, addresses, der, time.time() + expires_s) for _ in range(count)]
        with self._invitations() as invitations:
            for invitation in made:
                invitations.add(invitation)
        return made

    def invited(self) -> Sequence[Invited]:
        """All invitations that were made."""
        with self._invitations() as invitations:
            return invitations.list()

    def revoke(self, name: str) -> None:
        """An invitation that nobody has used is worth nothing any more.

        Raises: UsageError if there is none of this name.
        """
        with self._invitations() as invitations:
            invitations.revoke(name)

    @contextmanager
    def _invitations(self) -> Generator[SqliteInvitations]:
        path = self.folder / "ledger.sqlite"
        with closing(sqlite3.connect(path, check_same_thread=False, timeout=LOCKED_S)) as connection:
            try:
                yield SqliteInvitations(connection)
            except sqlite3.Error as error:
                raise GroupError(
                    f"invitations could not be kept in {path} ({error}); make room, or bring the file back, and try "
                    "again"
                ) from error

    @contextmanager
    def serve(
        self, islands: int, lease: float, say: Callable[[str], None], *, recovers: bool = False
    ) -> Generator[Server]:
        """Coordinate, until the block ends. `recovers`: the ledger was lost, and is to be filled by the islands.

        Raises: UsageError if a port is taken, or a ledger that was lost is there.
        """
        path = self.folder / "ledger.sqlite"
        if recovers and path.exists() and Ledger(path).epochs():
            raise UsageError(f"{path} is there, so nothing has to be recovered; leave --recover out")
        ledger = Ledger(path)
        lock = threading.Lock()

        def log(sentence: str) -> None:
            with lock, suppress(OSError), (self.folder / "log.txt").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {sentence}\n")
            say(sentence)

        def place(wanted: int | None) -> int:
            with closing(Ledger(ledger.path)) as own:
                taken: list[int] = own.fact(PLACES) or []
                if wanted in taken:
                    raise UsageError(
                        f"an island was to be worker {wanted}, but another one is; give the directory that it had as "
                        "--out, or take any number"
                    )
                number = next(each for each in itertools.count() if each not in taken) if wanted is None else wanted
                own.note(PLACES, [*taken, number])
                return number

        endpoint = f"{self.address}:{self.port}"
        with self._invitations() as invitations:
            told = {"version": __version__, "lease_s": lease}
            desk = Desk(self.authority(), invitations, place, [endpoint], log, open=told)
            with closing(EnrolmentService(desk, self.credentials, f"0.0.0.0:{self.port + 1}")):
                link = ZenohLink(
                    self.run, COORDINATOR, self.credentials, listen=[f"0.0.0.0:{self.port}"], lease_s=lease
                )
                server = Server(link, ledger, self.run, __version__, log, islands, lease, recovers)
                stop = threading.Event()
                watch = threading.Thread(target=self._watch, args=(server, stop), daemon=True)
                watch.start()
                try:
                    yield server
                finally:
                    stop.set()
                    watch.join(2.0)
                    server.close()

    def _watch(self, server: Server, stop: threading.Event) -> None:
        while not stop.wait(1.0):
            with suppress(Exception):  # a full disk must not stop what it only shows
                write_json(self.folder / "status.json", dict(server.look(status)))


def _name(folder: Path) -> str:
    """A new run's id, which tells people what it is."""
    called = folder.parent.name if folder.name == NAME else folder.name
    words = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")[:40].strip("-") or "run"
    return f"{words}-{secrets.token_hex(3)}"


def outward_address() -> str:
    """The address of this machine on the way to the internet, for others on the same network; nothing is sent."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
