"""The event log and the text logs of a run."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

from elastic.background import ends_within
from elastic.domain import codec
from elastic.domain.errors import FieldError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_S, LAST_WORDS_S = 3.0, 3.0
"""Longest waits for the disk of the log, and for that of the last words, at the end of a
process."""


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


class _LogFile:
    """Writes records to the file `path` on a thread of its own.

    It is no `logging.FileHandler`: the interpreter takes the locks of all handlers when it ends,
    and waits for ever for one that is held while the disk hangs.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._formatter = logging.Formatter(LOG_FORMAT)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the queued records and end. Wait for it up to LOG_S, because the disk may hang."""
        self.records.put(None)
        self._thread.join(LOG_S)

    def _run(self) -> None:
        while (record := self.records.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk loses lines
                line = f"{self._formatter.format(record)}\n".encode(errors="replace")
                while line:
                    line = line[os.write(self._fd, line) :]


class _LogQueue(QueueHandler):
    """Queues the records. One that cannot be formatted is reported in the log, too: logging prints
    such errors to standard error, which may be a console that nobody reads."""

    def handleError(self, record: logging.LogRecord) -> None:
        where, error = f"{record.pathname}:{record.lineno}", sys.exc_info()[1]
        text = f"a line of {where} cannot be logged: {error!r}"
        values = {"name": record.name, "levelname": "ERROR", "levelno": logging.ERROR, "msg": text}
        self.enqueue(logging.makeLogRecord(values))


def configure_logging(path: Path) -> Callable[[], None]:
    """Send all logs and warnings of this process to the file `path`, creating its folder.

    A thread writes the file, so that nobody waits for its disk. An exception that ends a thread, or
    that Python ignores, is logged. Nothing is printed to standard error. Returns a function that
    writes the queued lines and ends the log, as the end of the interpreter does.
    """
    file = _LogFile(path)
    handler = _LogQueue(file.records)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)
    logging.captureWarnings(True)
    atexit.register(file.stop)
    threading.excepthook, sys.unraisablehook = _log_thread_error, _log_ignored_error
    return file.stop


def _log_thread_error(error: threading.ExceptHookArgs) -> None:
    name = error.thread.name if error.thread is not None else "?"
    found = (error.exc_type, error.exc_value or error.exc_type(), error.exc_traceback)
    logging.getLogger("elastic").error("the thread %s has ended by an error", name, exc_info=found)


def _log_ignored_error(error: sys.UnraisableHookArgs) -> None:
    found = (error.exc_type, error.exc_value or error.exc_type(), error.exc_traceback)
    what = error.err_msg or "an error is ignored in"
    logging.getLogger("elastic").error("%s %r", what, error.object, exc_info=found)


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
