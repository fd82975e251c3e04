"""Logs of a process: a rotated text file, and JSON lines for collectors of logs.

    source = LogSource(job="demo", node="node0")
    logs = configure_logging(path, source, put)  # all loggers of this process
    source.line("node0 joined")                  # another JSON line, as bytes

Each JSON line is an object with `time` (UTC), `level`, `job`, `node` (or coordinator), `epoch`
(null where it is not known), `logger` and `message`. An exception adds `error`, its type and text,
and `traceback`. docs/operate/logs.md lists the loggers.

Nobody waits for a disk or a reader: threads write, and their queues are limited.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import logging
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

from elastic.config import JobConfig
from elastic.domain.errors import describe

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_S = 3.0
"""Longest wait for the disk of the log at the end of a process."""
LOG_BYTES, LOG_FILES = 16 << 20, 4
"""Largest size of a text log, and the number of its files: NAME.log, and NAME.log.1, which is the
newest of the older ones, up to NAME.log.3."""
MAX_LINES = 10_000
"""Lines that may wait for a disk or a reader; further ones are dropped, and their number is
logged."""
FILE_MODE = 0o600
"""Logs may contain what the script prints, so only their owner may read them."""
_WARNING = "warning: "


class LogSource:
    """Names the process that writes JSON lines: its job, node and present epoch."""

    def __init__(self, job: str, node: str) -> None:
        """`node`: name of the node or of the coordinator."""
        self.job, self.node = job, node
        self.epoch: Callable[[], int | None] = lambda: None
        """Returns the present epoch; None: it is not known. Called on any thread."""

    def line(self, message: str, *, logger: str, level: str = "info", **more: Any) -> bytes:
        """Return a line about something that happens now. `more`: further fields."""
        now = datetime.now(UTC).timestamp()
        return self.line_at(now, level, self.epoch(), logger, message, **more)

    def line_at(
        self, at: float, level: str, epoch: int | None, logger: str, message: str, **more: Any
    ) -> bytes:
        """Return a line. `at`: seconds since 1970."""
        record = {
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "job": self.job,
            "node": self.node,
            "epoch": epoch,
            "logger": logger,
            "message": message,
        }
        return json.dumps(record | more).encode() + b"\n"

    def note(self, text: str, logger: str) -> bytes:
        """Return a line for people; a text that begins with "warning: " has this level."""
        level = "warning" if text.startswith(_WARNING) else "info"
        return self.line(text.removeprefix(_WARNING), logger=logger, level=level)


def source_of(config: JobConfig, node: str) -> LogSource | None:
    """Return the source of the JSON lines of `node`; None: the job's lines are text."""
    return LogSource(config.log_name, node) if config.log_format == "json" else None


class RotatingFile:
    """A log file of limited size that only its owner may read.

    A file that would become larger than `max_bytes` becomes PATH.1, PATH.1 becomes PATH.2, and so
    on; `files` of them are kept. It is no `RotatingFileHandler`: the interpreter takes the locks of
    all handlers and buffers when it ends, and waits for ever for one that is held while the disk
    hangs.
    """

    def __init__(self, path: Path, max_bytes: int = LOG_BYTES, files: int = LOG_FILES) -> None:
        """Open the file, or create it. Raises OSError."""
        self.path, self.name = path, str(path)
        self._max_bytes, self._files = max_bytes, files
        self._fd, self._nbytes = self._open(path)

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> int:
        """Write at least the first part of `data`; return its length. Raises OSError."""
        if self._nbytes and self._nbytes + len(data) > self._max_bytes:
            self._rotate()
        written = os.write(self._fd, data)
        self._nbytes += written if self._is_regular else 0
        return written

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _open(self, path: Path) -> tuple[int, int]:
        """Return the descriptor and the size of a file."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(path, flags, FILE_MODE)
        found = os.fstat(fd)
        self._is_regular = stat.S_ISREG(found.st_mode)
        if self._is_regular:
            with contextlib.suppress(OSError):  # the file of another user
                os.fchmod(fd, FILE_MODE)
        return fd, found.st_size if self._is_regular else 0

    def _rotate(self) -> None:
        """Begin a new file. If it cannot be created, the present one is used further.

        It is created first, so that the older files are moved once for each new one.
        """
        new = self.path.with_name(f"{self.path.name}.new")
        with contextlib.suppress(OSError):
            fd, nbytes = self._open(new)
            self.close()
            self._fd, self._nbytes = fd, nbytes
            for number in range(self._files - 1, 0, -1):
                older = f"{self.path}.{number - 1}" if number > 1 else self.path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(older, f"{self.path}.{number}")
            os.replace(new, self.path)


class _LogWriter:
    """Formats and writes records on a thread of its own. At most MAX_LINES of them wait."""

    def __init__(
        self,
        name: str,
        line: Callable[[logging.LogRecord], bytes],
        write: Callable[[bytes], object],
    ) -> None:
        """`write` may raise OSError for a line that it refuses."""
        self._line, self._write = line, write
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._lost, self._lock = 0, threading.RLock()
        """Records that were dropped since one was queued, and a lock for them. Finalizers may log
        while their thread holds the lock, so it is reentrant."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it. Never wait."""
        with self._lock:
            if self._records.qsize() >= MAX_LINES:
                self._lost += 1
                return
            self._note_lost()
            self._records.put(record)

    def end(self) -> None:
        """Let the thread end after the queued records. Idempotent."""
        with self._lock:
            self._note_lost()
        self._records.put(None)

    def join(self) -> None:
        """Wait at most LOG_S until the lines are written, because the disk may hang. Call `end`
        first."""
        self._thread.join(LOG_S)

    def _note_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            why = "because too many lines waited to be written"
            self._records.put(_warning(f"{lost} lines are missing here, {why}"))

    def _run(self) -> None:
        refused = 0
        while (record := self._records.get()) is not None:
            try:
                if refused:
                    text = f"{refused} lines are missing here, because the disk refused them"
                    self._write(self._line(_warning(text)))
                    refused = 0
                self._write(self._line(record))
            except (OSError, ValueError):  # a full disk, or a line that cannot be formatted
                refused += 1


def _warning(text: str) -> logging.LogRecord:
    values = {"name": "elastic.logs", "levelname": "WARNING", "levelno": logging.WARNING}
    return logging.makeLogRecord(values | {"msg": text, "message": text})


class _LogQueue(QueueHandler):
    """Gives each record to all writers. One that cannot be formatted is reported in the log, too:
    logging prints such errors to standard error, which may be a console that nobody reads."""

    def __init__(self, writers: list[_LogWriter], source: LogSource | None) -> None:
        super().__init__(queue.SimpleQueue())  # not used: `enqueue` is overridden
        self._writers, self._source = writers, source

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy with the finished text, the epoch and the error. Objects that the caller
        has logged may change before the copy is written."""
        found = copy.copy(record)
        found.msg = found.message = record.getMessage()
        found.args, found.exc_info = None, None
        found.epoch = self._source.epoch() if self._source is not None else None
        if record.exc_info and record.exc_info[1] is not None:
            found.error = describe(record.exc_info[1])
            found.exc_text = logging.Formatter().formatException(record.exc_info)
        return found

    def enqueue(self, record: logging.LogRecord) -> None:
        for writer in self._writers:
            writer.post(record)

    def handleError(self, record: logging.LogRecord) -> None:
        where, error = f"{record.pathname}:{record.lineno}", sys.exc_info()[1]
        text = f"a line of {where} cannot be logged: {error!r}"
        values = {"name": record.name, "levelname": "ERROR", "levelno": logging.ERROR, "msg": text}
        self.enqueue(logging.makeLogRecord(values))


def json_line(source: LogSource, record: logging.LogRecord) -> bytes:
    """Return a record as a JSON line."""
    more = {"error": getattr(record, "error", ""), "traceback": record.exc_text}
    return source.line_at(
        record.created,
        record.levelname.lower(),
        getattr(record, "epoch", None),
        record.name,
        record.getMessage(),
        **{name: value for name, value in more.items() if value},
    )


class Logs:
    """The text log and the JSON lines of this process."""

    def __init__(self, file: RotatingFile, writers: list[_LogWriter]) -> None:
        self._file, self._text, self._json = file, writers[0], writers[1:]

    def end_json(self) -> None:
        """Give the queued JSON lines to their reader, before it ends; further ones are dropped."""
        for writer in self._json:
            writer.end()
        for writer in self._json:
            writer.join()

    def end(self) -> None:
        """Write the queued lines, and end the logs. Idempotent."""
        self._text.end()
        self._text.join()


def configure_logging(
    path: Path, source: LogSource | None = None, put: Callable[[bytes], object] = lambda line: None
) -> Logs:
    """Send all logs and warnings of this process to the file `path`, creating its folder.

    With a `source`, each record is also given to `put`, as a JSON line. Threads write, so that
    nobody waits for the disk. An exception that ends a thread, or that Python ignores, is logged.
    Nothing is printed to standard error. The end of the interpreter ends the logs, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, text = RotatingFile(path), logging.Formatter(LOG_FORMAT)

    def write(line: bytes) -> None:
        while line:
            line = line[file.write(line) :]

    def text_line(record: logging.LogRecord) -> bytes:
        return f"{text.format(record)}\n".encode(errors="replace")

    writers = [_LogWriter("log", text_line, write)]
    if source is not None:
        writers.append(_LogWriter("json-log", lambda record: json_line(source, record), put))
    logs = Logs(file, writers)
    handler = _LogQueue(writers, source)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)
    logging.captureWarnings(True)

    atexit.register(logs.end)
    threading.excepthook, sys.unraisablehook = _log_thread_error, _log_ignored_error
    return logs


def _log_thread_error(error: threading.ExceptHookArgs) -> None:
    name = error.thread.name if error.thread is not None else "?"
    found = (error.exc_type, error.exc_value or error.exc_type(), error.exc_traceback)
    logging.getLogger("elastic").error("the thread %s has ended by an error", name, exc_info=found)


def _log_ignored_error(error: sys.UnraisableHookArgs) -> None:
    found = (error.exc_type, error.exc_value or error.exc_type(), error.exc_traceback)
    what = error.err_msg or "an error is ignored in"
    logging.getLogger("elastic").error("%s %r", what, error.object, exc_info=found)
