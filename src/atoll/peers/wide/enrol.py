"""The island's side of enrolment: an invitation becomes a certificate, in one request and one reply (`desk`).

The island writes what it can before it asks: the key above all, since it is what uses the invitation up. If the reply
is lost, whoever asks again from the same folder has the same key, and gets the same number. cert.pem comes last, and
where it is, the island has enrolled.
"""

import json
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from atoll.errors import GroupError, UsageError
from atoll.peers.wide import credentials as papers
from atoll.peers.wide.credentials import CA, CA_KEY, CERT, KEY, shown, worker_name
from atoll.peers.wide.desk import MAX_REPLY, PATIENCE_S, PROTOCOL, read_line
from atoll.peers.wide.invitations import Invitation, split

JOINED = "joined.json"
_NOT_YET, _EXPIRED, _OTHER_NAME = 9, 10, 62  # OpenSSL's numbers of reasons to refuse a certificate


@dataclass(frozen=True)
class Enrolled:
    """What an island knows once it has enrolled. endpoints: "host:port" of the coordinator's links."""

    run: str
    worker: int
    endpoints: tuple[str, ...]


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
    authority = ssl.DER_cert_to_PEM_cert(asked.authority).encode()
    kept = _kept(folder, authority)
    key, certify = papers.request(kept)
    said = {"protocol": PROTOCOL, "name": asked.name, "secret": asked.secret, "request": certify.decode()}
    line = json.dumps(said | {"worker": worker, "time": now()}).encode() + b"\n"
    with _undone(folder, BaseException, unless=kept):
        papers.write_private(folder, {CA: authority, KEY: key})
        call, until = _reached(asked, patience_s)
    with call:
        reply = _answered(call, line, until)
    with _undone(folder, UsageError, unless=kept):
        enrolled, certificate = _understood(reply, asked, certify)
    joined = {"worker": enrolled.worker, "endpoints": enrolled.endpoints}
    papers.write_private(folder, {JOINED: json.dumps(joined).encode(), CERT: certificate})
    return enrolled


def _kept(folder: Path, authority: bytes) -> bytes | None:
    """The key with which this folder has asked before: the reply may be lost, or the certificate have expired."""
    with suppress(OSError):
        if (folder / CA).read_bytes() == authority:
            return (folder / KEY).read_bytes()
    return None


@contextmanager
def _undone(folder: Path, ended: type[BaseException], *, unless: bytes | None) -> Generator[None]:
    """If it ends so, nothing was used up, and what was written is removed, unless an earlier reply may be due to it."""
    try:
        yield
    except ended:
        for name in () if unless else (KEY, CA):
            with suppress(OSError):
                (folder / name).unlink()
        raise


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
    known, _ = read_enrolled(folder)
    if worker not in (None, known.worker) or name != worker_name(known.worker):
        raise UsageError(f"{folder} holds the credentials of {name}; give another island a folder of its own")
    return known


def read_enrolled(folder: Path) -> tuple[Enrolled, float]:
    """What an island's folder holds, and until when its certificate is valid.

    Raises: UsageError if that cannot be read.
    """
    certificate = papers.read_certificate(folder / CERT)
    run, _ = papers.identity(certificate)
    try:
        joined = json.loads((folder / JOINED).read_bytes())
        known = Enrolled(run, joined["worker"], tuple(joined["endpoints"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds {CERT} without a readable {JOINED}; enrol into an empty folder") from error
    return known, certificate.not_valid_after_utc.timestamp()


def _reached(asked: Invitation, patience_s: float) -> tuple[ssl.SSLSocket, float]:
    """The first address at which the run's coordinator is, and until when to wait for what it says."""
    context, whys = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), list[str]()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=asked.authority)
    for address in asked.addresses:
        until = time.monotonic() + patience_s
        try:
            way = socket.create_connection(split(address), patience_s)
            name = papers.host_name(asked.run, papers.COORDINATOR_NAME)
            return context.wrap_socket(way, server_hostname=name), until
        except OSError as error:
            whys.append(f"{address} {unreached(error)}")
    raise GroupError(f"the coordinator of run {asked.run} could not be asked: {'; '.join(whys)}")


def _answered(call: ssl.SSLSocket, line: bytes, until: float) -> bytes:
    try:
        call.sendall(line)
        return read_line(call, MAX_REPLY, until)
    except OSError as error:
        raise GroupError(
            "the coordinator was asked, but the connection ended before its reply; enrol again into the same folder, "
            "with the same invitation"
        ) from error


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


def unreached(error: OSError) -> str:
    """What is the matter with an address, and what to do."""
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
