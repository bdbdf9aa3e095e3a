"""The coordinator's directory and process: credentials, invitations, ledger, and the services that use them.

    RUN/run.json          the run's id, and where islands reach the coordinator
    RUN/credentials/      the run's authority, and the coordinator's own certificate
    RUN/ledger.sqlite     what was decided, and invitations
    RUN/log.txt           what was said
    RUN/status.json       how the run stands, written anew each second

Whoever has this directory has the run: keep it to yourself, and a copy of credentials/ somewhere else.
"""

import json
import re
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll import __version__
from atoll.errors import UsageError
from atoll.files import write_json
from atoll.peers.wide.credentials import Authority
from atoll.peers.wide.desk import Desk, EnrolmentService
from atoll.peers.wide.invitations import Invitation, Invited, SqliteInvitations
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.link import COORDINATOR, ZenohLink
from atoll.peers.wide.server import Server
from atoll.peers.wide.status import status

NAME = "coordinator"
PLACES = "places"


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
    def open(cls, folder: Path, *, address: str | None = None, port: int = 7447) -> "Home":
        """The run in a directory, made there if there is none.

        Raises: UsageError if the directory holds something else, or cannot be written.
        """
        path = folder / "run.json"
        if path.exists():
            try:
                saved = json.loads(path.read_text())
                home = cls(folder, saved["run"], address or saved["address"], saved["port"])
            except (OSError, ValueError, KeyError) as error:
                raise UsageError(f"{path} cannot be read ({error}); bring it back, or give another directory") from None
        else:
            words = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:40] or "run"
            home = cls(folder, f"{words}-{secrets.token_hex(3)}", address or outward_address(), port)
            if folder.exists() and any(folder.iterdir()):
                raise UsageError(
                    f"{folder} holds something that is no run; give the coordinator a directory of its own"
                )
            try:
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)
                write_json(path, {"run": home.run, "address": home.address, "port": home.port})
            except OSError as error:
                raise UsageError(f"{folder} cannot be written ({error.strerror}); give another directory") from None
        authority = home.authority()
        if not (home.credentials / "cert.pem").exists():
            authority.equip(home.credentials, NAME, time.time())
        return home

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
        import ssl

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
        with closing(sqlite3.connect(self.folder / "ledger.sqlite", check_same_thread=False)) as connection:
            yield SqliteInvitations(connection)

    @contextmanager
    def serve(self, islands: int, lease: float, say: Callable[[str], None]) -> Generator[Server]:
        """Coordinate, until the block ends.

        Raises: UsageError if a port is taken.
        """
        ledger = Ledger(self.folder / "ledger.sqlite")
        lock = threading.Lock()

        def log(sentence: str) -> None:
            with lock, suppress(OSError), (self.folder / "log.txt").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {sentence}\n")
            say(sentence)

        def place(wanted: int | None) -> int:
            with closing(Ledger(ledger.path)) as own:
                given = own.fact(PLACES) or 0
                if wanted is not None and wanted < given:
                    return wanted
                own.note(PLACES, given + 1)
                return given

        endpoint = f"{self.address}:{self.port}"
        with self._invitations() as invitations:
            desk = Desk(self.authority(), invitations, place, [endpoint], log)
            with closing(EnrolmentService(desk, self.credentials, f"0.0.0.0:{self.port + 1}")):
                link = ZenohLink(
                    self.run, COORDINATOR, self.credentials, listen=[f"0.0.0.0:{self.port}"], lease_s=lease
                )
                server = Server(link, ledger, self.run, __version__, log, islands, lease)
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


def outward_address() -> str:
    """The address of this machine on the way to the internet, for others on the same network; nothing is sent."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
