"""The coordinator's side of enrolment: one request and one reply, each a line of JSON, over TLS.

    island          {protocol, name, secret, request, worker, time}       worker: the number it wants, or null
    coordinator     {certificate, worker, endpoints}  or  {error: a sentence}

    island          {protocol, ask: "time"}, and name and secret of an invitation, which is not used up
    coordinator     {time, endpoints, ...}, and why the invitation cannot be used, "" if it can

The island knows the coordinator by the authority in its invitation and the name in the certificate, for a member's
certificate would do otherwise; the coordinator knows the island by the secret. `Desk` decides without I/O;
`EnrolmentService` serves it to whoever comes, and strangers may come: a caller has `PATIENCE_S` and `MAX_REQUEST` for
all that it says, and of `CALLERS` the one that waits longest makes room for the next.
"""

import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, UsageError
from atoll.peers.wide.credentials import CERT, HOUR, KEY, Authority, key_hash, pem, requested, shown, worker_name
from atoll.peers.wide.invitations import Invitations, hash_of, split

PROTOCOL = 1
PATIENCE_S, CALLERS = 10.0, 32
MAX_REQUEST, MAX_REPLY = 8 << 10, 64 << 10


@dataclass(frozen=True)
class Desk:
    """Decides requests.

    Args:
        place: the worker number for an island that wants one or any (None); raises UsageError if it cannot have it.
        endpoints: where the coordinator's links listen, as islands reach it.
        log: told each decision, as a sentence.
        open: what anybody may know who asks for the time.
        now: seconds since 1970.
    """

    authority: Authority
    invitations: Invitations
    place: Callable[[int | None], int]
    endpoints: Sequence[str]
    log: Callable[[str], None]
    now: Callable[[], float] = time.time
    open: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def answer(self, line: bytes, caller: str) -> bytes:
        """The reply to a request; every error becomes one."""
        try:
            with self._turn:
                reply = self._time(line) or self._enrol(line, caller)
        except AtollError as error:
            self.log(f"{caller} was not enrolled: {error}")
            reply = {"error": str(error)}
        except Exception as error:  # a full disk, a ledger that is locked: the service must outlive it
            self.log(f"{caller} could not be enrolled: {type(error).__name__}: {error}")
            why = "the coordinator met an error of its own, which its log tells; try again once it is mended"
            reply = {"error": why}
        return json.dumps(reply).encode() + b"\n"

    def _time(self, line: bytes) -> dict[str, Any] | None:
        """The reply to who only asks for the time, and perhaps whether an invitation could be used."""
        match _json(line):
            case {"protocol": int(version), "ask": "time", **rest} if version == PROTOCOL:
                now = self.now()
                told = {"time": now, "endpoints": list(self.endpoints), **self.open}
                match rest:
                    case {"name": str(name), "secret": str(secret)} if (name + secret).isascii():
                        return told | {"holds": self.invitations.why_not(name, hash_of(secret), now)}
                    case _:
                        return told
            case _:
                return None

    def _enrol(self, line: bytes, caller: str) -> dict[str, Any]:
        name, secret, asked, wanted, there = _parsed(line)
        now = self.now()
        if abs(there - now) >= HOUR:
            raise UsageError(
                f"the island's clock shows {shown(there)} and the coordinator's {shown(now)}, but certificates need "
                "clocks that agree within an hour; set the wrong one and enrol again with the same invitation"
            )
        public = requested(asked.encode())
        owner = key_hash(public)
        worker = self.invitations.take(name, hash_of(secret), owner, now, lambda: self.place(wanted))
        if wanted not in (None, worker):
            raise UsageError(f"invitation {name} made this island worker {worker} before; enrol again as that one")
        certificate = self.authority.certify(public, worker_name(worker), now)
        self.log(f"{caller} enrolled as worker {worker} with invitation {name}")
        return {"certificate": pem(certificate).decode(), "worker": worker, "endpoints": list(self.endpoints)}


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
                    line = read_line(call, MAX_REQUEST, until)
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


def _parsed(line: bytes) -> tuple[str, str, str, int | None, float]:
    """Name, secret, certificate request, wanted number and time of a request."""
    match _json(line):
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


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_line(call: ssl.SSLSocket, limit: int, until: float) -> bytes:
    """A line that a caller says. Raises: OSError if it is too long, late or not all there."""
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
    host, port = split(listen)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        what = f"islands were to enrol at {listen}, but the coordinator cannot listen there ({why})"
        raise UsageError(f"{what}; give a free port, and this machine's address or 0.0.0.0 for all it has") from error
    listener.settimeout(0.2)
    return listener


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
