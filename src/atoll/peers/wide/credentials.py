"""Who may take part in a run: its authority, and the certificates that name roles in it.

A certificate says "worker-3 of run R", wherever worker 3 is. The coordinator's folder holds the authority (ca.pem and
ca-key.pem); every member's folder holds ca.pem, its own cert.pem and its own key.pem, which is made there and never
leaves it. All times are seconds since 1970.
"""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os.path import isfile
from pathlib import Path
from typing import Any

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


def request(kept: bytes | None = None) -> tuple[bytes, bytes]:
    """A new private key (PEM), and a request (PEM) that its owner be certified; who it is, the authority decides.

    Args: kept: a key of before, to ask for again; one that cannot be used is replaced by a new one.
    """
    key = _usable(kept) or ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _pem_key(key), asked.public_bytes(serialization.Encoding.PEM)


def _usable(kept: bytes | None) -> ec.EllipticCurvePrivateKey | None:
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = serialization.load_pem_private_key(kept or b"", None)
        if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
            return key
    return None


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


def key_hash(public: ec.EllipticCurvePublicKey) -> bytes:
    """By which a key is known again."""
    encoded = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()


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
