"""A zenoh session under mutual TLS, or the sentence that says why there is none.

zenoh itself goes on trying in the background when a member cannot be reached or refuses the certificate, and tells no
one. So the files are checked before it starts, and an address that does not answer is asked again from here.
"""

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import zenoh

from atoll.errors import GroupError, UsageError

CONNECT_S = 10.0
"""How long to wait for the first of the addresses to answer."""
OPEN_S = 4.0
"""How long one attempt may take: some ten round trips of a long link that is busy. A session ends no sooner than it."""

# While a link ends on which a frame waits, zenoh blocks a thread of each of these kinds for as long as it lets a frame
# wait. By default there are one and two, for all links of the process: nothing would pass to anyone any more.
THREADS = 32
os.environ.setdefault("ZENOH_RUNTIME", f"(rx: (worker_threads: {THREADS}), tx: (worker_threads: {THREADS}))")

Event = TypeVar("Event", covariant=True)

_REFUSED = {
    "UNKNOWN_CA": "it does not accept this member's certificate: it belongs to another run",
    "CERTIFICATE_EXPIRED": "it does not accept this member's certificate, which has expired by its clock",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from this run's authority: another run answers there",
}


def open_session(credentials: Path, listen: Sequence[str], connect: Sequence[str], lease_s: float) -> zenoh.Session:
    """Listen, and connect to at least one address of `connect` if there are any; the others are tried for ever.

    Args: listen, connect: "host:port" each. lease_s: silence after which a member is dead.
    Raises: UsageError for addresses and files that cannot be used; GroupError if none of `connect` answers.
    """
    context = _context(credentials)
    for address in [*listen, *connect]:
        _resolve(address)
    try:
        session = zenoh.open(zenoh.Config.from_json5(json.dumps(_config(credentials, listen, connect, lease_s))))
    except zenoh.ZError as error:
        raise _cannot_listen(listen, str(error)) from error
    try:
        _await_one(session, connect, context)
    except BaseException:
        session.close()
        raise
    return session


class Source(Protocol[Event]):
    """What zenoh calls a subscriber or a listener."""

    def recv(self) -> Event: ...


def follow(source: Source[Event], act: Callable[[Event], object]) -> threading.Thread:
    """A thread that calls `act` with each event until the session is closed.

    zenoh would do that, too, but in threads without whose end no process ends. Wait for this one before the process
    ends: one that comes back from zenoh when Python is gone aborts it.
    """

    def loop() -> None:
        with suppress(zenoh.ZError):
            while True:
                act(source.recv())

    thread = threading.Thread(target=loop, name="atoll-hears", daemon=True)
    thread.start()
    return thread


def _config(credentials: Path, listen: Sequence[str], connect: Sequence[str], lease_s: float) -> dict[str, object]:
    files = {name: str(credentials / f"{name}.pem") for name in ("ca", "cert", "key")}
    tls = {
        "root_ca_certificate": files["ca"],
        "enable_mtls": True,
        "listen_certificate": files["cert"],
        "listen_private_key": files["key"],
        "connect_certificate": files["cert"],
        "connect_private_key": files["key"],
        # a member is known by its number and its run's authority, wherever it is
        "verify_name_on_connect": False,
    }
    tx = {
        "lease": round(lease_s * 1000),
        # zenoh drops a link on which one frame has waited so long, though it may only be slow: the lease decides that
        "queue": {
            "congestion_control": {"block": {"wait_before_close": round(10 * lease_s * 1e6)}},
            # in batches of 64 KiB, and zenoh's most: what Python is late with, the socket does not notice
            "size": {"data_high": 16, "data_low": 16},
        },
    }
    retry = {"period_init_ms": 200, "period_max_ms": 2000, "period_increase_factor": 2}
    return {
        "mode": "peer",
        "listen": {"endpoints": [f"tls/{address}" for address in listen]},
        "connect": {"endpoints": [f"tls/{address}" for address in connect], "retry": retry},
        "scouting": {"delay": 0, "multicast": {"enabled": False}, "gossip": {"enabled": True}},
        "transport": {
            # on one host it would carry frames past any link whose speed is to be measured
            "shared_memory": {"enabled": False},
            "unicast": {"open_timeout": round(OPEN_S * 1000), "accept_timeout": round(OPEN_S * 1000)},
            "link": {"protocols": ["tls"], "tls": tls, "tx": tx},
        },
    }


def _context(credentials: Path) -> ssl.SSLContext:
    """The same files for Python's TLS. Raises: UsageError if they are missing, broken or do not belong together."""
    files = [credentials / name for name in ("ca.pem", "cert.pem", "key.pem")]
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            raise UsageError(
                f"the credentials of this member were to be read from {file}, but {error.strerror or error}; give the "
                "folder that enrolling wrote"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    try:
        context.load_verify_locations(files[0])
        context.load_cert_chain(files[1], files[2])
        _meet_itself(context, files)
    except ssl.SSLError as error:
        raise UsageError(
            f"ca.pem, cert.pem and key.pem in {credentials} cannot be used together ({_said(error)}); they must be the "
            "three files of one invitation: enrol this member anew"
        ) from error
    return context


def _meet_itself(context: ssl.SSLContext, files: Sequence[Path]) -> None:
    """A handshake in memory with the same certificate on both sides: whether its own authority vouches for it now."""
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_verify_locations(files[0])
    listening.load_cert_chain(files[1], files[2])
    listening.verify_mode = ssl.CERT_REQUIRED
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [context.wrap_bio(back, there), listening.wrap_bio(there, back, server_side=True)]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass


def _resolve(address: str) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Where the address is. Raises: UsageError if it is none, or nobody knows the name."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not int(port) < 1 << 16:
        raise UsageError(
            f'{address!r} is no address to listen at or connect to; write "host:port", as in "10.0.0.1:7447"'
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"the name {host} of the address {address} cannot be resolved here ({error.strerror}); check its spelling, "
            "or give the number"
        ) from error
    return [(family, (str(where[0]), int(where[1]))) for family, _, _, _, where in found]


def _cannot_listen(listen: Sequence[str], said: str) -> UsageError:
    address = next((address for address in listen if f"listener on {address}" in said), " and ".join(listen))
    if "already in use" in said:
        return UsageError(f"the port of {address} is taken by another program; end that one, or listen at another port")
    if "Cannot assign requested address" in said:
        return UsageError(
            f"this machine has no address {address} to listen at; give one of its own, or 0.0.0.0 for all of them"
        )
    return UsageError(f"this member cannot listen at {address} ({said.partition(' at /')[0]}); give another address")


def _await_one(session: zenoh.Session, connect: Sequence[str], context: ssl.SSLContext) -> None:
    until = time.monotonic() + CONNECT_S
    while connect and not session.info.transports():
        if time.monotonic() > until:
            whys = "; ".join(f"{address}: {_why(address, context)}" for address in connect)
            raise GroupError(f"no member of the run answered within {CONNECT_S:g} s at {whys}")
        time.sleep(0.02)


def _why(address: str, context: ssl.SSLContext) -> str:
    """What happens when Python's TLS knocks at the address."""
    why = "nothing"
    for family, where in _resolve(address):
        try:
            with socket.socket(family) as way:
                way.settimeout(2.0)
                way.connect(where)
                with context.wrap_socket(way) as talk:
                    talk.recv(1)  # whether the other side took our certificate is said after the handshake
                return "it closed the connection"
        except ssl.SSLError as error:
            reason = next((sentence for word, sentence in _REFUSED.items() if word in (error.reason or "")), None)
            return reason or f"it does not speak this run's TLS ({_said(error)})"
        except TimeoutError:
            why = "nobody answers; check that it runs, and that no firewall is between"
        except OSError as error:
            why = f"{(error.strerror or str(error)).lower()}; check that it runs there"
    return why


def _said(error: ssl.SSLError) -> str:
    return str(getattr(error, "verify_message", None) or error.reason or error).replace("_", " ").lower()
