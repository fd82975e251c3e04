"""Downloads recorded traces from their authors' repositories and verifies them.

published_traces.csv lists the files with their pinned commits and SHA-256 sums.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

from elastic.command_line import reason_of
from elastic.domain.errors import FieldError

HOST = "https://raw.githubusercontent.com"
TIMEOUT_S = 60.0
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PublishedTrace:
    """A trace file in a public repository."""

    name: str
    path: str
    """Path at the host: owner/repository/commit/path."""
    sha256: str
    format: str
    """One of `elastic_sim.traces.importers.FORMATS`."""


with Path(__file__).with_name("published_traces.csv").open(newline="") as _file:
    PUBLISHED_TRACES = {row["name"]: PublishedTrace(**row) for row in csv.DictReader(_file)}


def fetch(original: PublishedTrace, directory: Path, host: str = HOST) -> Path:
    """Download a trace into `directory`, unless it is there already, and return its path.

    Raises FieldError, and writes nothing, if the file is not reachable or has other content.
    """
    target = directory / Path(original.path).name
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    _check_host(host)
    try:
        if directory.exists() and not directory.is_dir():
            raise FileExistsError(errno.EEXIST, "")
        if target.is_file() and _sha256(target.read_bytes()) == original.sha256:
            return target
        data = _download(host, original.path)
        if (found := _sha256(data)) != original.sha256:
            remedy = f"{original.path} has changed there: its SHA-256 is {found}, and should be "
            raise FieldError("--host", host, f"{remedy}{original.sha256}")
        directory.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        remedy = f"{reason_of(error)}; name a folder that can be written"
        raise FieldError("--to", str(directory), remedy) from error
    return target


def _check_host(host: str) -> None:
    """Raise FieldError if `host` is not an address of the web."""
    try:
        parts = urllib.parse.urlsplit(host)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises ValueError
    except ValueError:
        usable = False
    if not usable or any(char.isspace() or not char.isprintable() for char in host):
        raise FieldError("--host", host, f"write an address as {HOST}")


def _download(host: str, path: str) -> bytes:
    """Return the content of a file. Raises FieldError."""
    try:
        with urllib.request.urlopen(f"{host}/{path}", timeout=TIMEOUT_S) as response:
            data: bytes = response.read(MAX_BYTES + 1)
            if response.length and len(data) <= MAX_BYTES:
                raise http.client.IncompleteRead(data, response.length)
    except (http.client.HTTPException, OSError, ValueError) as error:
        remedy = f"{_fault(error, path)}; name a mirror, or use the generated traces in traces/"
        raise FieldError("--host", host, remedy) from error
    if len(data) > MAX_BYTES:
        remedy = f"{path} has more than {MAX_BYTES} bytes there, and a trace is smaller"
        raise FieldError("--host", host, remedy)
    return data


def _fault(error: Exception, path: str) -> str:
    """Return in plain words why a download failed."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} ({error.reason}) to the request for {path}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLError):
        return "it cannot be reached: its TLS certificate is not valid, or it does not use TLS"
    if isinstance(cause, OSError):
        return f"it cannot be reached: {reason_of(cause)}"
    return f"its answer to the request for {path} is incomplete or damaged"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
