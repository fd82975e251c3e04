"""Certificates and join token of a process, and of the job that it belongs to.

Each process has one `SecuritySettings` (`use`, `current`) for all its ports and connections.
Changed certificate files are read again for new connections, so that they can be replaced while a
job runs.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from elastic.background import BackgroundReading
from elastic.domain.errors import FieldError
from elastic.rpc.security.rejections import Reason

log = logging.getLogger(__name__)
CA, CERT, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of a certificate directory, named as in a Kubernetes secret of type kubernetes.io/tls."""
TOKEN_FILE = "join.token"
"""File of a run directory, mode 0600: services, workers and commands of this machine read the token
here."""
LEAST_TOKEN_CHARS, MOST_TOKEN_CHARS = 16, 4096
WORKERS = (
    "traffic between workers (gloo or NCCL, and their rendezvous store) is not encrypted: this "
    "torch has no TLS for it; keep those ports in a private network (docs/operate/security.md)"
)
"""Warning at the start of every job that uses certificates."""
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class SecuritySettings:
    """Certificates and token of a process. The default: plain text, no token."""

    certs: Path | None = None
    """Directory with CA, CERT and KEY: connections use mutual TLS. None: no TLS."""
    name: str = ""
    """Name that peers' certificates must carry. Empty: the host or address of the connection."""
    token: str = field(default="", repr=False)
    """Join token, required for sessions, calls and vault connections. Empty: none is required."""
    certificates: Certificates | None = field(init=False, repr=False, compare=False)
    """The files in `certs`; None: no TLS."""

    def __post_init__(self) -> None:
        made = Certificates(self.certs) if self.certs is not None else None
        object.__setattr__(self, "certificates", made)


@dataclass(frozen=True)
class _Files:
    """What was made of the files of a certificate directory."""

    stamp: Stamp
    pem: tuple[bytes, bytes, bytes]
    server: ssl.SSLContext
    client: ssl.SSLContext


class Certificates:
    """TLS contexts from a certificate directory. Changed files are read again. Thread-safe.

    The directory may be on a disk that hangs, and the network threads of a process ask for
    contexts. So a thread looks at the files, and the former ones stay in use meanwhile.
    """

    def __init__(self, certs: Path) -> None:
        """Raises FieldError if the files are missing or do not belong together."""
        self.certs = certs
        self._newest = self._read(self._stamp())
        self._reading = BackgroundReading("certificates", self._read_again, self._newest)

    def server(self) -> ssl.SSLContext:
        """Return the context of ports: TLS 1.3; a client needs a certificate of the job."""
        return self._reading.read().server

    def client(self) -> ssl.SSLContext:
        """Return the context of clients: TLS 1.3; a server's certificate must carry its name."""
        return self._reading.read().client

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """Return (authority, certificate chain, key) as PEM; former ones if a file is missing."""
        return self._reading.read().pem

    def stamp(self) -> Stamp:
        """Return a value that changes when other files are in use."""
        return self._reading.read().stamp

    def _read_again(self) -> _Files:
        """Return the present files, or the former ones if they have not changed or are not usable.
        Called on the thread of `_reading`."""
        stamp = self._stamp()
        if stamp != self._newest.stamp:
            try:
                self._newest = self._read(stamp)
                log.info("certificates in %s were read again", self.certs)
            except FieldError as error:
                log.warning("the former certificates stay in use: %s", error)
        return self._newest

    def _stamp(self) -> Stamp:
        """Return a value that changes when a file does; () while a file is missing."""
        try:
            found = [os.stat(self._path(name)) for name in (CA, CERT, KEY)]
        except OSError:
            return ()
        return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in found)

    def _read(self, stamp: Stamp) -> _Files:
        try:
            ca, cert, key = (self._path(name).read_bytes() for name in (CA, CERT, KEY))
            server = self._context(ssl.PROTOCOL_TLS_SERVER)
            server.num_tickets = 0  # no resumption: every connection shows its certificate
            client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ssl.SSLError) as error:
            remedy = f"{CA}, {CERT} and {KEY}, as `elastic certs` makes them, are needed ({error})"
            raise FieldError("--certs", str(self.certs), remedy) from None
        return _Files(stamp, (ca, cert, key), server, client)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._path(CA))
        context.load_cert_chain(self._path(CERT), self._path(KEY))
        return context

    def _path(self, name: str) -> Path:
        return self.certs / name


_current = SecuritySettings()


def use(settings: SecuritySettings) -> SecuritySettings:
    """Set the settings of this process; return the former ones."""
    global _current
    former, _current = _current, settings
    return former


def current() -> SecuritySettings:
    return _current


def load(run_dir: str | Path, certs: str, name: str = "") -> SecuritySettings:
    """Return the settings of a process of the job in `run_dir`. Raises FieldError."""
    return SecuritySettings(
        Path(certs) if certs else None, name, read_token(Path(run_dir) / TOKEN_FILE)
    )


def read_token(path: Path, flag: str = "") -> str:
    """Return the token in the file `path`. Raises FieldError.

    `flag`: option that named the file; "": none did, and the token is "" if the file is missing.
    """
    try:
        with path.open() as file:
            text = file.read(MOST_TOKEN_CHARS + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        if not flag and isinstance(error, FileNotFoundError):
            return ""
        raise FieldError(flag or TOKEN_FILE, str(path), f"it cannot be read ({error})") from None
    return check_token(flag or TOKEN_FILE, text, str(path))


def check_token(field_name: str, token: str, shown: str) -> str:
    """Return `token`. If it is too short or not printable, raise FieldError with `shown` in its
    place."""
    fits = LEAST_TOKEN_CHARS <= len(token) <= MOST_TOKEN_CHARS
    if not fits or not token.isascii() or not token.isprintable():
        remedy = (
            f"a token of {LEAST_TOKEN_CHARS} to {MOST_TOKEN_CHARS} printable characters, "
            "as `openssl rand -hex 32` makes"
        )
        raise FieldError(field_name, shown, remedy)
    return token


def write_token(path: Path, token: str) -> None:
    """Write a secret to a file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")


_ABOUT = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": Reason.NO_CERTIFICATE,
    "HTTP_REQUEST": Reason.PLAIN_TEXT,
    "WRONG_VERSION_NUMBER": Reason.PLAIN_TEXT,
    "UNKNOWN_PROTOCOL": Reason.PLAIN_TEXT,
    "PACKET_LENGTH_TOO_LONG": Reason.PLAIN_TEXT,
    "RECORD_LAYER_FAILURE": Reason.PLAIN_TEXT,
    "TLSV1_ALERT_UNKNOWN_CA": Reason.WRONG_CA,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": Reason.EXPIRED,
}
_DATES = (9, 10)
"""OpenSSL's codes for a certificate that is not valid yet, and one that has expired."""


def rejection_reason(error: BaseException) -> Reason:
    """Return the reason why a TLS handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Reason.EXPIRED if error.verify_code in _DATES else Reason.WRONG_CA
    if isinstance(error, ssl.SSLError):
        return _ABOUT.get(error.reason or "", Reason.HANDSHAKE)
    return Reason.HANDSHAKE
