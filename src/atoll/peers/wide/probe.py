"""How this machine reaches a run, without taking part in it: for whoever wants to know before training.

Nobody is disturbed: the invitation is not used up; a visitor has an address of its own, below all others, of which the
coordinator makes nothing, so an island with the same credentials trains on; and an island gives away only so much for
others to measure their way to it (`samples`), behind everything else.
"""

import json
import queue
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.errors import GroupError, UsageError
from atoll.peers.wide import credentials as papers
from atoll.peers.wide.desk import MAX_REPLY, PROTOCOL, read_line
from atoll.peers.wide.enrol import Enrolled, unreached
from atoll.peers.wide.invitations import Invitation, split
from atoll.peers.wide.link import Priority, ZenohLink
from atoll.peers.wide.messages import BadMessage, Bulk, Fetch, read, write
from atoll.peers.wide.offers import PIECE, SAMPLE, sample_key

VISITOR = -1000
"""The address of a visitor is as much below this as its worker number is above 0."""
KNOCK_S, ANSWER_S = 5.0, 20.0
"""How long to wait for a connection; for an answer of an island."""
SETTLED_S, ARRIVE_S = 1.0, 6.0
"""After so long without anybody new, and after so long in any case, all who are there have been seen."""
PINGS, FIRST, BULKS, QUICK_S = 5, 1 << 16, 4, 0.3
"""Round trips; bytes of the first sample; whole pieces that follow if that one took no longer than `QUICK_S`."""


@dataclass(frozen=True)
class Told:
    """What a coordinator tells. clock: of the coordinator's, ahead of this machine's, in seconds. holds: why the
    invitation cannot be used, or "" if it can; None if it was not asked for. rtt: seconds to it and back."""

    version: str
    lease_s: float
    endpoints: tuple[str, ...]
    clock: float
    holds: str | None
    rtt: float


@dataclass(frozen=True)
class Peer:
    """The way from an island to here: seconds there and back, and bytes per second; None where it did not answer."""

    worker: int
    rtt: float | None
    speed: float | None


@dataclass(frozen=True)
class Visit:
    """What a visitor saw. here: whether an island with the same credentials takes part already."""

    peers: tuple[Peer, ...]
    here: bool


def listenable(address: str) -> None:
    """Whether one can listen at "host:port" of this machine.

    Raises: UsageError that says why not.
    """
    host, port = split(address)
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f"the name {host} of the address {address} cannot be resolved here ({error.strerror}); check its spelling, "
            "or give the number"
        ) from error
    try:
        socket.create_server(where[:2], family=family).close()
    except OSError as error:
        raise UsageError(_not_listening(address, host, error)) from error


def _not_listening(address: str, host: str, error: OSError) -> str:
    why = str(error.strerror).partition(" (")[0].lower()
    if "in use" in why:
        return f"the port of {address} is taken by another program; end that one, or listen at another port"
    if "assign" in why:
        return (
            f"{host} is no address of this machine, so it cannot listen there; give one of its own, or 0.0.0.0 for all "
            "of them, or be --hidden if the others cannot reach any"
        )
    return f"this machine cannot listen at {address} ({why}); give another port"


def knock(address: str, run: str, authority: bytes) -> float:
    """Connect to a port of the run's coordinator; returns seconds there and back.

    Args: authority: the certificate of the run's authority (DER).
    Raises: GroupError that says what is in the way.
    """
    call, rtt = _called(address, run, authority)
    call.close()
    return rtt


def ask(address: str, run: str, authority: bytes, invitation: Invitation | None = None) -> Told:
    """Ask the coordinator's desk for its time, and whether an invitation could be used.

    Raises: GroupError if it cannot be reached, or does not know the question.
    """
    call, rtt = _called(address, run, authority)
    question: dict[str, Any] = {"protocol": PROTOCOL, "ask": "time"}
    if invitation:
        question |= {"name": invitation.name, "secret": invitation.secret}
    with call:
        try:
            before = time.time()
            call.sendall(json.dumps(question).encode() + b"\n")
            said = json.loads(read_line(call, MAX_REPLY, time.monotonic() + KNOCK_S))
            clock = said["time"] - (before + time.time()) / 2
            known = said["version"], float(said["lease_s"]), tuple(said["endpoints"])
            return Told(*known, clock, said.get("holds"), rtt)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GroupError(
                f"the coordinator at {address} answered, but not as one of this version of Atoll "
                f"({said_of(error)}); install the same version on both"
            ) from error


def said_of(error: Exception) -> str:
    """An error of another library in a few words."""
    return str(error) or type(error).__name__


def moved(enrolled: Enrolled, invitation: Invitation) -> Enrolled:
    """What an island knows that has enrolled, with the coordinator where an invitation of its run says.

    Raises: GroupError if that is another place than before, and nobody answers there.
    """
    hosts = {split(endpoint)[0] for endpoint in enrolled.endpoints}
    if hosts & {split(address)[0] for address in invitation.addresses}:
        return enrolled
    told = ask(invitation.addresses[0], invitation.run, invitation.authority)
    return replace(enrolled, endpoints=told.endpoints)


def _called(address: str, run: str, authority: bytes) -> tuple[ssl.SSLSocket, float]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    host, port = split(address)
    try:
        # a name is looked up first: it does not count as time on the way
        where = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        began = time.monotonic()
        way = socket.create_connection((where, port), KNOCK_S)
        rtt = time.monotonic() - began
        return context.wrap_socket(way, server_hostname=papers.host_name(run, papers.COORDINATOR_NAME)), rtt
    except OSError as error:
        raise GroupError(f"{address} {unreached(error)}") from error


def visit(enrolled: Enrolled, credentials: Path) -> Visit:
    """Open a link as a visitor, and measure the way from everybody who is there.

    Raises: UsageError for credentials that cannot be used, GroupError if no member of the run answers.
    """
    me = VISITOR - enrolled.worker
    with closing(ZenohLink(enrolled.run, me, credentials, connect=enrolled.endpoints)) as link:
        visitor = _Visitor(link)
        there = visitor.there()
        peers = tuple(visitor.measured(worker) for worker in sorted(there - {enrolled.worker}))
        return Visit(peers, enrolled.worker in there)


class _Visitor:
    def __init__(self, link: ZenohLink) -> None:
        self._link, self._asked = link, 0
        self._answers: queue.SimpleQueue[tuple[float, int, Bulk]] = queue.SimpleQueue()
        self._seen: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        link.start(self._hears, lambda address, alive: self._seen.put((address, alive)))

    def _hears(self, sender: int, frame: bytes) -> None:
        now = time.monotonic()
        try:
            message = read(frame)
        except BadMessage:
            return
        if isinstance(message, Bulk) and message.key.rule == SAMPLE:
            self._answers.put((now, sender, message))

    def there(self) -> set[int]:
        """The islands that are there."""
        found, end = set[int](), time.monotonic() + ARRIVE_S
        while (left := end - time.monotonic()) > 0:
            try:
                address, alive = self._seen.get(timeout=min(left, SETTLED_S if found else left))
            except queue.Empty:
                break
            (found.add if alive else found.discard)(address)
        return {address for address in found if address >= 0}

    def measured(self, worker: int) -> Peer:
        """The way from one of them."""
        trips = list[float]()
        for _ in range(PINGS):
            trips += [at for at, _ in self._round(worker, [0])]
            if not trips:
                return Peer(worker, None, None)
        rtt = min(trips)
        first = [at for at, count in self._round(worker, [FIRST]) if count]
        if not first:
            return Peer(worker, rtt, None)
        took = max(first[0] - rtt, 1e-6)
        if took > QUICK_S:
            return Peer(worker, rtt, FIRST / took)
        came = [at for at, count in self._round(worker, [PIECE] * BULKS) if count]
        # from one arrival to the next: connections begin slowly
        speed = PIECE * (len(came) - 1) / max(came[-1] - came[0], 1e-6) if len(came) > 1 else None
        return Peer(worker, rtt, speed or FIRST / took)

    def _round(self, worker: int, sizes: list[int]) -> list[tuple[float, int]]:
        """Ask for samples; seconds after which each came, and whether it was given."""
        self._asked += 1
        began = time.monotonic()
        for size in sizes:
            self._link.send(worker, write(Fetch(sample_key(self._asked), size)), Priority.CONTROL)
        return list(self._arriving(worker, len(sizes), began))

    def _arriving(self, worker: int, count: int, began: float) -> Iterator[tuple[float, int]]:
        end = began + ANSWER_S
        while count and (left := end - time.monotonic()) > 0:
            try:
                at, sender, bulk = self._answers.get(timeout=left)
            except queue.Empty:
                return
            if sender == worker and bulk.key == sample_key(self._asked):
                count -= 1
                yield at - began, bulk.version
