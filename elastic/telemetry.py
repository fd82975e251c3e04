"""The event log of a run, and the errors that end its services."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic.background import ends_within
from elastic.domain import codec
from elastic.domain.errors import FieldError

LAST_WORDS_S = 3.0
"""Longest wait for the disk of the last words, at the end of a process."""


class EventLog:
    """Append-only file of events: JSON lines {"at": seconds since 1970, "kind": ..., fields ...}.

    Each line is written by one system call. Opening the log removes a last line that a crash cut
    short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _drop_torn_line(self._fd)
        except OSError:
            self.close()
            raise

    def write(self, line: bytes) -> None:
        """Append a line made by `event_line`.

        Raises OSError if the disk is full; the log stays readable.
        """
        written = os.write(self._fd, line)
        if written != len(line):
            _drop_torn_line(self._fd)
            raise OSError(f"{self.path}: wrote only {written} of {len(line)} bytes")

    def tail(self, nbytes: int) -> bytes:
        """Return the last `nbytes` of the file, or all of a shorter one."""
        return os.pread(self._fd, nbytes, max(0, os.fstat(self._fd).st_size - nbytes))

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        """Yield the file from its start in pieces of `nbytes`."""
        at = 0
        while piece := os.pread(self._fd, nbytes, at):
            yield piece
            at += len(piece)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def event_line(kind: str, fields: Mapping[str, Any], at: float | None = None) -> bytes:
    """Return an event as a line of a log. `codec` encodes the values; `at` None: now."""
    record = {"at": time.time() if at is None else at, "kind": kind} | codec.encode(dict(fields))
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return all events of a log, without a last line that is still being written (no newline).

    Raises FieldError, which names file and line, for any other line that is not an event.
    """
    try:
        whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    except OSError as error:
        raise FieldError(
            "events", str(path), f"a readable file is needed: {error.strerror}"
        ) from error
    return [_parse(f"{path}:{i}", line) for i, line in enumerate(whole.split(b"\n"), 1) if line]


def last_words_of(run_dir: str | Path, name: str) -> Path:
    """Return the file with the error that ended the service `name`; it may not exist."""
    return Path(run_dir) / "logs" / f"{name}.error"


def write_last_words(run_dir: str | Path, name: str, error: str) -> bool:
    """Keep the error that ends the service `name` for its launcher; "": remove an older one. A full
    disk loses the error. Return False if the disk hangs."""
    path = last_words_of(run_dir, name)

    def write() -> None:
        with contextlib.suppress(OSError):
            if error:
                path.write_text(f"{error}\n")
            else:
                path.unlink(missing_ok=True)

    return ends_within(LAST_WORDS_S, "last-words", write)


def read_last_words(run_dir: str | Path, name: str) -> str:
    """Return the error that ended the service `name`; "": none was written."""
    try:
        return last_words_of(run_dir, name).read_text().strip()
    except OSError:
        return ""


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise FieldError(where, line[:80], f"not JSON: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        raise FieldError(where, line[:80], 'an object with "kind" is needed')
    return event


def _drop_torn_line(fd: int) -> None:
    """Cut the file after its last newline."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
