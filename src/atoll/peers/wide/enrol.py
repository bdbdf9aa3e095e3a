"""How an invitation becomes a certificate: one request and one reply, each a line of JSON, over TLS.

    island          {protocol, name, secret, request, worker, time}       worker: the number it wants, or null
    coordinator     {certificate, worker, endpoints}  or  {error: a sentence}

The island knows the coordinator by the authority in its invitation and the name in the certificate, for a member's
certificate would do otherwise; the coordinator knows the island by the secret. `Desk` decides without I/O;
`EnrolmentService` serves it to whoever comes, and strangers may come: a caller has `PATIENCE_S` and `MAX_REQUEST` for
all that it says, and of `CALLERS` the one that waits longest makes room for the next.

The island writes what it can before it asks, since an invitation is good for one reply; cert.pem comes last, and where
it is, the island has enrolled.
"""

import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from atoll.errors import AtollError, GroupError, UsageError
from atoll.peers.wide import credentials as papers
from atoll.peers.wide.credentials import CA, CA_KEY, CERT, KEY, Authority, Invitation, Invitations, shown, worker_name

PROTOCOL = 1
PATIENCE_S = 10.0
CALLERS = 32
MAX_REQUEST, MAX_REPLY = 8 << 10, 64 << 10
JOINED = "joined.json"
_NOT_YET, _EXPIRED, _OTHER_NAME = 9, 10, 62  # OpenSSL's numbers of reasons to refuse a certificate


@dataclass(frozen=True)
class Enrolled:
    """What an island knows once it has enrolled. endpoints: "host:port" of the coordinator's links."""

    run: str
    worker: int
    endpoints: tuple[str, ...]


@dataclass(frozen=True)
class Desk:
    """Decides requests.

    Args:
        place: the worker number for an island that wants one or any (None); raises UsageError if it cannot have it.
        endpoints: where the coordinator's links listen, as islands reach it.
        log: told each decision, as a sentence.
        now: seconds since 1970.
    """

    authority: Authority
    invitations: Invitations
    place: Callable[[int | None], int]
    endpoints: Sequence[str]
    log: Callable[[str], None]
    now: Callable[[], float] = time.time
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def answer(self, line: bytes, caller: str) -> bytes:
        """The reply to a request; every error becomes one."""
        try:
            with self._turn:
                reply = self._enrol(line, caller)
        except AtollError as error:
            self.log(f"{caller} was not enrolled: {error}")
            reply = {"error": str(error)}
        except Exception as error:  # a full disk, a ledger that is locked: the service must outlive it
            self.log(f"{caller} could not be enrolled: {type(error).__name__}: {error}")
            reply = {
                "error": "the coordinator met an error of its own, which its log tells; try again once it is mended"
            }
        return json.dumps(reply).encode() + b"\n"

    def _enrol(self, line: bytes, caller: str) -> dict[str, Any]:
        name, secret, asked, wanted, there = _parsed(line)
        now = self.now()
        if abs(there - now) >= papers.HOUR:
            raise UsageError(
                f"the island's clock shows {shown(there)} and the coordinator's {shown(now)}, but certificates need "
                "clocks that agree within an hour; set the wrong one and enrol again with the same invitation"
            )
        public = papers.requested(asked.encode())
        worker = self.invitations.take(name, papers.hash_of(secret), now, lambda: self.place(wanted))
        certificate = self.authority.certify(public, worker_name(worker), now)
        self.log(f"{caller} enrolled as worker {worker} with invitation {name}")
        return {"certificate": papers.pem(certificate).decode(), "worker": worker, "endpoints": list(self.endpoints)}


class EnrolmentService:
    """Listens for islands until it is closed.

    Args:
        folder: the coordinator's cert.pem and key.pem, which `Authority.equip` writes.
        listen: "host:port"; port 0 takes a free one.
        patience_s: how long a caller may take.
    Raises: UsageError for an address that cannot be listened at, and files that cannot be used.
    """

    def __init__(self, desk: Desk, folder: Path, listen: str, patience_s: float = PATIENCE_S) -> None:
        self._desk, self._patience_s = desk, patience_s
        self._context = _server_context(folder)
        self._listener = _listener(listen)
        self._waiting: dict[ssl.SSLSocket, str] = {}
        self._lock, self._slots, self._closing = threading.Lock(), threading.Semaphore(CALLERS), threading.Event()
        self._thread = threading.Thread(target=self._accept, name="atoll-enrol", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens at."""
        return self._listener.getsockname()[1]

    def close(self) -> None:
        """Stop listening and hang up on who has not asked yet."""
        self._closing.set()
        self._thread.join()
        self._listener.close()
        while self._hang_up():
            pass

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                way, caller = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._desk.log(f"nobody can enrol now ({error.strerror}); if this lasts, start the coordinator anew")
                self._closing.wait(1.0)
                continue
            if not self._slots.acquire(blocking=False):
                self._hang_up()
                while not self._slots.acquire(timeout=0.2):
                    if self._closing.is_set():
                        way.close()
                        return
            try:
                with way:
                    way.getpeername()  # raises if the caller is gone, whom wrap_socket would leave open
                    call = self._context.wrap_socket(way, server_side=True, do_handshake_on_connect=False)
            except OSError:
                self._slots.release()
                continue
            with self._lock:
                self._waiting[call] = caller[0]
            threading.Thread(target=self._serve, args=(call, caller[0]), name="atoll-enrol", daemon=True).start()

    def _hang_up(self) -> bool:
        """End the oldest call from where most of those come from that have not asked yet."""
        with self._lock:
            calls = Counter(self._waiting.values())
            oldest = max(self._waiting, key=lambda call: calls[self._waiting[call]], default=None)
            if oldest is None:
                return False
            del self._waiting[oldest]
            with suppress(OSError):  # the caller hung up before
                # not SSLSocket's own, which would let its thread go on in plain text
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            return True

    def _serve(self, call: ssl.SSLSocket, caller: str) -> None:
        until = time.monotonic() + self._patience_s
        try:
            with call:
                try:
                    call.settimeout(self._patience_s)
                    call.do_handshake()
                    line = _read_line(call, MAX_REQUEST, until)
                finally:
                    with self._lock:
                        kept = self._waiting.pop(call, None)
                if kept:
                    call.settimeout(self._patience_s)
                    call.sendall(self._desk.answer(line, caller))
        except OSError as error:
            self._desk.log(f"{caller} called to enrol but {_ended(error)}")
        finally:
            self._slots.release()


def enrol(
    invitation: str,
    folder: Path,
    *,
    worker: int | None = None,
    now: Callable[[], float] = time.time,
    patience_s: float = 3 * PATIENCE_S,
) -> Enrolled:
    """Turn an invitation into credentials in `folder`; an island that has them already does not use it.

    Args:
        invitation: the line of text.
        folder: where ca.pem, cert.pem and key.pem go.
        worker: the number that the island wants, or None for any.
        now: seconds since 1970; TLS itself goes by the machine's clock.
        patience_s: how long to wait for each address.
    Raises: UsageError for an invitation that is garbled or that the coordinator refuses, and for a folder that holds
        other credentials or cannot be written; GroupError if no coordinator of the run can be asked.
    """
    asked = Invitation.parse(invitation)
    if known := _known(folder, asked, worker, now()):
        return known
    key, certify = papers.request()
    try:
        papers.write_private(folder, {KEY: key, CA: ssl.DER_cert_to_PEM_cert(asked.authority).encode()})
        said = {"protocol": PROTOCOL, "name": asked.name, "secret": asked.secret, "request": certify.decode()}
        line = json.dumps(said | {"worker": worker, "time": now()}).encode() + b"\n"
        enrolled, certificate = _understood(_ask(asked, line, patience_s), asked, certify)
        joined = {"worker": enrolled.worker, "endpoints": enrolled.endpoints}
        papers.write_private(folder, {JOINED: json.dumps(joined).encode(), CERT: certificate})
    except BaseException:
        for name in (KEY, CA, JOINED):
            with suppress(OSError):
                (folder / name).unlink()
        raise
    return enrolled


def _known(folder: Path, asked: Invitation, worker: int | None, now: float) -> Enrolled | None:
    """What the folder holds from before, or None where it is to be written."""
    if isfile(folder / CA_KEY):
        raise UsageError(f"{folder} holds the authority of a run; give the island a folder of its own")
    if not isfile(folder / CERT):
        return None
    certificate = papers.read_certificate(folder / CERT)
    run, name = papers.identity(certificate)
    if not _issued(certificate, asked):
        what = f"{folder} holds credentials of another run ({run}) than the invitation is for ({asked.run})"
        raise UsageError(f"{what}; give another folder")
    if certificate.not_valid_after_utc.timestamp() <= now:
        return None
    try:
        joined = json.loads((folder / JOINED).read_bytes())
        known = Enrolled(run, joined["worker"], tuple(joined["endpoints"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds {CERT} without a readable {JOINED}; enrol into an empty folder") from error
    if worker not in (None, known.worker) or name != worker_name(known.worker):
        raise UsageError(f"{folder} holds the credentials of {name}; give another island a folder of its own")
    return known


def _ask(asked: Invitation, line: bytes, patience_s: float) -> bytes:
    """The reply of the first address at which the run's coordinator is."""
    context, whys = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), list[str]()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=asked.authority)
    for address in asked.addresses:
        until = time.monotonic() + patience_s
        try:
            way = socket.create_connection(papers.split(address), patience_s)
            call = context.wrap_socket(way, server_hostname=papers.host_name(asked.run, papers.COORDINATOR_NAME))
        except OSError as error:
            whys.append(f"{address} {_unreached(error)}")
            continue
        with call:
            try:
                call.sendall(line)
                return _read_line(call, MAX_REPLY, until)
            except OSError as error:
                what = f"the coordinator at {address} was asked, but the connection ended before its reply"
                raise GroupError(f"{what}; enrol again, with a new invitation if this one was used by that") from error
    raise GroupError(f"the coordinator of run {asked.run} could not be asked: {'; '.join(whys)}")


def _understood(reply: bytes, asked: Invitation, certify: bytes) -> tuple[Enrolled, bytes]:
    """What a reply gives, and the certificate (PEM)."""
    try:
        said = json.loads(reply)
        if "error" in said:
            raise UsageError(said["error"])
        enrolled = Enrolled(asked.run, said["worker"], tuple(said["endpoints"]))
        certificate = x509.load_pem_x509_certificate(said["certificate"].encode())
        same_key = certificate.public_key() == papers.requested(certify)
        if not same_key or papers.identity(certificate) != (asked.run, worker_name(enrolled.worker)):
            raise ValueError("another's certificate")
        if not _issued(certificate, asked):
            raise ValueError("another authority's certificate")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the coordinator of run {asked.run} replied with no certificate for this island ({error})"
        raise GroupError(f"{what}; install the same version of Atoll on both") from error
    return enrolled, papers.pem(certificate)


def _issued(certificate: x509.Certificate, asked: Invitation) -> bool:
    with suppress(ValueError, TypeError, InvalidSignature):
        certificate.verify_directly_issued_by(x509.load_der_x509_certificate(asked.authority))
        return True
    return False


def _parsed(line: bytes) -> tuple[str, str, str, int | None, float]:
    """Name, secret, certificate request, wanted number and time of a request."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    match said:
        case {"protocol": int(version)} if version != PROTOCOL:
            versions = f"version {min(version, 1 << 31)} of enrolment and the coordinator {PROTOCOL}"
            raise UsageError(f"the island speaks {versions}; install the same version of Atoll on both")
        case {
            "protocol": int(),
            "name": str(name),
            "secret": str(secret),
            "request": str(asked),
            "worker": int() | None as worker,
            "time": int() | float() as there,
        } if (
            (name + secret + asked).isascii() and name.isalnum() and 0 <= there < 1e11 and 0 <= (worker or 0) < 1 << 31
        ):
            return name, secret, asked, worker, there
        case _:
            raise UsageError("what was sent is no request to enrol; enrol with `atoll join`")


def _read_line(call: ssl.SSLSocket, limit: int, until: float) -> bytes:
    """Raises: OSError if it is too long, late or not all there."""
    line = bytearray()
    while not line.endswith(b"\n"):
        call.settimeout(max(until - time.monotonic(), 1e-3))
        part = call.recv(limit + 1 - len(line))
        line += part
        if not part or len(line) > limit:
            raise ConnectionError("sent too much" if part else "hung up")
    return bytes(line)


def _server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    try:
        context.load_cert_chain(folder / CERT, folder / KEY)
    except OSError as error:
        what = f"{CERT} and {KEY} of the coordinator in {folder} cannot be used ({error.strerror})"
        raise UsageError(f"{what}; give the folder in which the coordinator was started") from error
    return context


def _listener(listen: str) -> socket.socket:
    host, port = papers.split(listen)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        what = f"islands were to enrol at {listen}, but the coordinator cannot listen there ({why})"
        raise UsageError(f"{what}; give a free port, and this machine's address or 0.0.0.0 for all it has") from error
    listener.settimeout(0.2)
    return listener


def _unreached(error: OSError) -> str:
    match error:
        case ssl.SSLCertVerificationError(verify_code=code) if code in (_NOT_YET, _EXPIRED):
            state = "has expired" if code == _EXPIRED else "is not valid yet"
            what = f"has a certificate that {state} by this machine's clock, which shows {shown(time.time())}"
            return f"{what}; set the clock, or, if it is right, set the coordinator's and start that again"
        case ssl.SSLCertVerificationError(verify_code=code) if code == _OTHER_NAME:
            return (
                "answers with the certificate of a member of the run that is not its coordinator; trust it with nothing"
            )
        case ssl.SSLCertVerificationError():
            return "is not of this run, by its certificate; ask for an invitation with the run's address of today"
        case ssl.SSLError():
            return f"does not speak TLS as a coordinator does ({error.reason}); check the port"
        case TimeoutError():
            return "does not answer; check that it runs, and that no firewall is between"
        case socket.gaierror():
            return f"has a name that cannot be resolved here ({error.strerror}); check this machine's network"
        case _:
            return f"cannot be reached ({error.strerror or error}); check that the coordinator runs there"


def _ended(error: OSError) -> str:
    match error:
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return "hung up"
        case ssl.SSLError() if "ALERT" in (error.reason or ""):
            what = f"refused this coordinator's certificate ({error.reason})"
            return f"{what}: its invitation is of another run, or one of the two clocks is wrong"
        case ssl.SSLError():
            return f"did not speak TLS as an island does ({error.reason})"
        case TimeoutError():
            return "did not say all in time"
        case _:
            return error.strerror or str(error)
