"""Downloads recorded traces from their authors' repositories and verifies them.

published_traces.csv lists the files with their pinned commits and SHA-256 sums.
"""

from __future__ import annotations

import csv
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

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
    url = f"{host}/{original.path}"
    try:
        if directory.exists() and not directory.is_dir():
            raise NotADirectoryError("it is a file")
        if target.is_file() and _sha256(target.read_bytes()) == original.sha256:
            return target
        data = _download(url)
        if (found := _sha256(data)) != original.sha256:
            remedy = f"its SHA-256 should be {original.sha256}: the file has changed"
            raise FieldError(url, found, remedy)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        remedy = f"name a folder that can be written: {error}"
        raise FieldError("--to", str(directory), remedy) from error
    return target


def _download(url: str) -> bytes:
    """Return the content of a file. Raises FieldError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            data: bytes = response.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise FieldError(url, f"more than {MAX_BYTES} bytes", "a trace is smaller")
            if response.length:
                raise http.client.IncompleteRead(data, response.length)
            return data
    except http.client.InvalidURL as error:
        raise FieldError("--host", url, f"write an address as {HOST}: {error}"[:200]) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        shown = f"{type(error).__name__}: {error}".strip()[:120]
        raise FieldError(url, shown, "it must be reachable; traces/ has generated ones") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
