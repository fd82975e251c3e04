"""What a process proves itself with, and what it asks of others: certificates and the join token.

One setting a process (`use`, `current`): every port and every connection of a job goes by it. Certificates are read
again when their files change, for connections made from then on: they can be replaced under a running job.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elastic.domain.errors import FieldError
from elastic.rpc.refusals import Reason

log = logging.getLogger(__name__)
CA, CERT, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of a certificate directory: as in a Kubernetes secret of type kubernetes.io/tls with its authority."""
TOKEN_FILE = "join.token"
"""Of a run directory, mode 0600: how the token reaches services, workers and commands of this machine."""
LEAST_TOKEN_CHARS = 16
WORKERS = (
    "what workers send each other (gloo or NCCL, and their rendezvous store) is not encrypted: this torch has no TLS "
    "for it; keep those ports in a private network (docs/operate/security.md)"
)
"""Said at the start of every job that uses certificates."""
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Security:
    """Nothing given: plain text, everybody welcome."""

    certs: Path | None = None
    """Directory with CA, CERT and KEY; connections are mutual TLS."""
    name: str = ""
    """Name that peers' certificates must carry; "": the host or address that was dialled."""
    token: str = field(default="", repr=False)
    """Whoever opens a session, calls or connects to a vault must know it; "": anybody may."""

    def __post_init__(self) -> None:
        if self.certs is not None:
            object.__setattr__(self, "_contexts", Contexts(self.certs))

    @property
    def contexts(self) -> Contexts | None:
        """None: no TLS."""
        return getattr(self, "_contexts", None)


class Contexts:
    """TLS settings from a certificate directory, made anew when its files have changed. Thread-safe."""

    def __init__(self, certs: Path) -> None:
        """Raises FieldError if the files are not there or do not belong together."""
        self.certs = certs
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Stamp, ssl.SSLContext]] = {}
        self._pem: tuple[bytes, bytes, bytes] | None = None
        self.server()
        self.pem()

    def server(self, alpn: str = "") -> ssl.SSLContext:
        """For ports: TLS 1.3, a certificate of the job's authority is asked of whoever connects."""

        def make() -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.num_tickets = 0  # every connection shows its certificate: none is taken up again without
            if alpn:
                context.set_alpn_protocols([alpn])
            return context

        return self._get(f"server {alpn}", make)

    def client(self) -> ssl.SSLContext:
        """For connections: TLS 1.3, the server's certificate must be of the authority and carry its name."""
        return self._get("client", lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """(authority, certificate chain, key) as they are now; as they were, while a file is missing."""
        try:
            ca, cert, key = (self._path(name).read_bytes() for name in (CA, CERT, KEY))
        except OSError as error:
            if self._pem is None:
                raise FieldError("--certs", str(self.certs), f"it cannot be read ({error})") from None
            return self._pem
        self._pem = ca, cert, key
        return self._pem

    def stamp(self) -> Stamp:
        """Changes whenever a file does; () while one is missing."""
        try:
            found = [os.stat(self._path(name)) for name in (CA, CERT, KEY)]
        except OSError:
            return ()
        return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in found)

    def _get(self, kind: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        stamp = self.stamp()
        with self._lock:
            known = self._made.get(kind)
            if known is not None and known[0] == stamp:
                return known[1]
            try:
                context = self._filled(make())
            except FieldError as error:
                if known is None:
                    raise
                log.warning("the certificates that were read before stay in use: %s", error)
                return known[1]
            if known is not None:
                log.info("certificates in %s were read again", self.certs)
            self._made[kind] = stamp, context
            return context

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        try:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._path(CA))
            context.load_cert_chain(self._path(CERT), self._path(KEY))
        except (OSError, ssl.SSLError) as error:
            remedy = f"{CA}, {CERT} and {KEY}, as `elastic certs` makes them, are needed ({error})"
            raise FieldError("--certs", str(self.certs), remedy) from None
        return context

    def _path(self, name: str) -> Path:
        return self.certs / name


_current = Security()


def use(security: Security) -> Security:
    """Let the whole process go by `security`; returns what it went by before."""
    global _current
    former, _current = _current, security
    return former


def current() -> Security:
    return _current


def load(run_dir: str | Path, certs: str, name: str = "") -> Security:
    """What a process of the job in `run_dir` goes by. Raises FieldError."""
    return Security(Path(certs) if certs else None, name, read_token(Path(run_dir) / TOKEN_FILE))


def read_token(path: Path, flag: str = "") -> str:
    """The token in a file; "" if there is none and no `flag` asks for it. Raises FieldError naming the flag."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if not flag and isinstance(error, FileNotFoundError):
            return ""
        raise FieldError(flag or TOKEN_FILE, str(path), f"it cannot be read ({error})") from None
    return check_token(flag or TOKEN_FILE, text, str(path))


def check_token(field_name: str, token: str, shown: str) -> str:
    """`token`, if it is one; `shown` stands for it in the error, which never tells it."""
    if len(token) < LEAST_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        remedy = (
            f"a token of {LEAST_TOKEN_CHARS} printable characters or more, as `openssl rand -hex 32` makes"
        )
        raise FieldError(field_name, shown, remedy)
    return token


def write_token(path: Path, token: str) -> None:
    """Keep the token in a file for this user alone."""
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
"""OpenSSL's codes for a certificate that is not valid yet, or any more."""


def why(error: BaseException) -> Reason:
    """What a failed handshake was about."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Reason.EXPIRED if error.verify_code in _DATES else Reason.WRONG_CA
    if isinstance(error, ssl.SSLError):
        return _ABOUT.get(error.reason or "", Reason.HANDSHAKE)
    return Reason.HANDSHAKE
