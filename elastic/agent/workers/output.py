"""Copies the output of workers to log files and, as torchrun does, to the console.

    neither flag   log file, and the console unchanged (torchrun: inherited)
    --redirects    log file only
    --tee          log file, and the console line by line with a prefix

With --log-format json each line on the console is a JSON line of the logger `script`.

One thread per group of workers reads output that goes to both places, a second one writes it to the
log files, and the threads of `Console` print it. With `--redirects` a worker writes to the log file
itself. On a disk that is full or hangs the log file loses lines, and so does a console that nobody
reads, but no worker waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import string
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from elastic.agent.workers.last_error import printed_error, recorded_error
from elastic.background import BackgroundReading
from elastic.config import STDERR, STDOUT, JobConfig
from elastic.console import ROOM_S, STALL_S, BoundedWriter, Console
from elastic.logs import FILE_MODE, LogSource, RotatingFile

log = logging.getLogger("elastic.agent")
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16
_LAST_BYTES = 1 << 15
LOG_BYTES, LOG_FILES = 64 << 20, 4
"""Largest size of stdout.log and stderr.log, and the number of files that are kept of each. A file
that the worker itself writes (--redirects) is not limited."""
SCRIPT_LOGGER = "script"
"""Logger of the worker's output, where it is printed as JSON lines."""
_STREAMS = {STDOUT: "stdout", STDERR: "stderr"}
UNCAUGHT = 1
"""Exit code of Python after an error that nobody caught."""
LAST_OUTPUT_S = 0.5
"""Upper limit of the wait for the last output of a failed worker."""


@dataclass
class _Pipe:
    """Copies one pipe of a worker to `log` and to one stream of the console."""

    log: RotatingFile
    writer: BoundedWriter
    """Its thread writes to `log`."""
    console: Console
    stream: int
    line: Callable[[bytes], bytes] | None
    """Returns a line, given without its end, as it is printed; None: output is printed
    unchanged."""
    rest: bytes = field(default=b"")
    """The last, unfinished line."""
    last: bytes = b""
    """The newest output, at most _LAST_BYTES."""
    skipped: int = 0
    """Bytes that were not given to the writer since it accepted the last ones."""
    given: int = 0
    """Bytes that were given to the writer."""
    handled: int = 0
    """Those of them that it has written or dropped. Only the writer's thread changes it."""
    dropped: int = 0
    """Bytes that the log file has lost since writing began to fail; 0: writing succeeds. Only for
    the writer's thread."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when all output has been read."""

    def feed(self, data: bytes) -> None:
        self.last = (self.last + data)[-_LAST_BYTES:]
        self._keep(data)
        if self.line is None:
            return self.console.put(self.stream, data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE_BYTES:
            lines, self.rest = [*lines, self.rest], b""
        if lines:
            self.console.put(self.stream, b"".join(map(self.line, lines)))

    def end(self) -> None:
        if self.rest and self.line is not None:
            self.console.put(self.stream, self.line(self.rest))
        self.ended.set()

    def close(self) -> None:
        """Close the log file. Only for the writer's thread."""
        missing = self.dropped + self.skipped
        if missing:
            log.warning("%s lacks its last %d bytes", self.log.name, missing)
        with contextlib.suppress(OSError):  # a full disk, already logged
            self.log.close()

    def _keep(self, data: bytes) -> None:
        """Give data to the writer of the log file; drop it while the disk takes nothing."""
        if self.writer.post(partial(self._write, data, self.skipped), len(data), ROOM_S):
            self.skipped = 0
            self.given += len(data)
            return
        if not self.skipped:
            log.warning("output is lost: the disk of %s takes nothing", self.log.name)
        self.skipped += len(data)

    def _write(self, data: bytes, skipped: int) -> None:
        """Write to the log file; drop data while its disk fails."""
        self.dropped += skipped
        nbytes = len(data)
        try:
            while data:
                data = data[self.log.write(data) :]
        except OSError as error:
            if not self.dropped:
                log.warning("output is lost: %s cannot be written: %s", self.log.name, error)
            self.dropped += len(data)
        else:
            if self.dropped:
                log.warning(
                    "%s can be written again; %d bytes are missing", self.log.name, self.dropped
                )
                self.dropped = 0
        self.handled += nbytes


class Output:
    """Log files and console of one group of workers."""

    def __init__(self, config: JobConfig, console: Console) -> None:
        self._config, self._console = config, console
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._pipes: dict[Path, _Pipe] = {}
        self._writer = BoundedWriter("worker-logs")
        self._thread = threading.Thread(target=self._pump, name="worker-output", daemon=True)

    def open(self, folder: Path, local_rank: int, names: dict[str, str]) -> tuple[int, int]:
        """Create the log files in `folder`; return the descriptors for the worker's stdout and
        stderr.

        `names`: values for the template of the line prefix. The caller closes the descriptors after
        the worker has inherited them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        out = self._route(folder / "stdout.log", local_rank, STDOUT, names)
        return out, self._route(folder / "stderr.log", local_rank, STDERR, names)

    def start(self) -> None:
        self._writer.start()
        self._thread.start()

    def last_error(self, folder: Path, code: int) -> str:
        """Return the error that ended a worker with exit code `code`, as far as it is known: from
        error.json, else from the end of what it wrote to stderr.

        Waits until all output has been read, at most LAST_OUTPUT_S if a descendant of the worker
        keeps the pipe open, or if the disk of a log file hangs.
        """
        recorded = BackgroundReading("error-file", partial(_end_of, folder / "error.json"), b"")
        if error := recorded_error(recorded.read()):
            return error
        path = folder / "stderr.log"
        if path in self._pipes:
            self._pipes[path].ended.wait(LAST_OUTPUT_S)
            text = self._pipes[path].last
        else:
            text = BackgroundReading("last-error", partial(_end_of, path), b"").read()
        return printed_error(text) if code == UNCAUGHT else _last_line(text)

    def finish(self, timeout_s: float = 1.0) -> None:
        """Copy the output that is still in the pipes, then stop. Wait up to `timeout_s` for
        descendants that hold a pipe open, for the disk and for the console."""
        until = time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError):  # every pipe has ended already
            os.write(self._wake_write, b".")
        os.close(self._wake_write)
        self._thread.join(timeout_s)
        self._writer.flush(max(0.0, until - time.monotonic()))
        self._console.flush(max(0.0, until - time.monotonic()))

    def save(self, timeout_s: float) -> None:
        """After `finish`, wait up to `timeout_s` for a disk that is slow, and STALL_S for one that
        takes nothing. Then log how many bytes each log file lacks. Only for the end of this
        process: it ends the threads that write."""
        until = time.monotonic() + timeout_s
        if self._thread.is_alive():  # it waits for room, both in the log files and the console
            self._thread.join(min(timeout_s, 2 * ROOM_S))
        if not self._writer.flush(max(0.0, until - time.monotonic()), STALL_S):
            for pipe in self._pipes.values():
                missing = pipe.given - pipe.handled + pipe.dropped + pipe.skipped
                if missing:
                    log.warning("%s lacks its last %d bytes", pipe.log.name, missing)

    def _route(self, path: Path, local_rank: int, bit: int, names: dict[str, str]) -> int:
        config = self._config
        tee, redirect = (
            values[local_rank % len(values)] & bit for values in (config.tee, config.redirects)
        )
        hidden = bool(config.local_ranks_filter) and local_rank not in config.local_ranks_filter
        if hidden or (redirect and not tee):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            return os.open(path, flags, FILE_MODE)
        log = RotatingFile(path, LOG_BYTES, LOG_FILES)
        read, write = os.pipe()
        os.set_blocking(read, False)
        line: Callable[[bytes], bytes] | None = None
        if self._console.source is not None:
            line = partial(_json_line, self._console.source, _STREAMS[bit], int(names["rank"]))
            bit = STDOUT
        elif tee:
            prefix = string.Template(config.log_line_prefix).substitute(names).encode()
            line = partial(_prefixed, prefix)
        pipe = _Pipe(log, self._writer, self._console, bit, line)
        self._selector.register(read, selectors.EVENT_READ, pipe)
        self._pipes[path] = pipe
        return write

    def _pump(self) -> None:
        open_ends = True
        while open_ends:
            ready = self._selector.select()
            for key, _ in ready:
                if key.data is not None:
                    self._copy(key.fd, key.data)
            woken = any(key.data is None for key, _ in ready)
            idle = len(ready) == 1
            open_ends = len(self._selector.get_map()) > 1 and not (woken and idle)
        self._close()

    def _copy(self, descriptor: int, pipe: _Pipe) -> None:
        data = os.read(descriptor, _CHUNK_BYTES)
        if data:
            return pipe.feed(data)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        pipe.end()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Pipe):
                os.close(key.fd)
                key.data.end()
        self._selector.close()
        os.close(self._wake_read)
        self._writer.end(self._close_files)

    def _close_files(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()


def _prefixed(prefix: bytes, line: bytes) -> bytes:
    return prefix + line + b"\n"


def _json_line(source: LogSource, stream: str, rank: int, line: bytes) -> bytes:
    text = line.decode(errors="replace")
    return source.line(text, logger=SCRIPT_LOGGER, stream=stream, rank=rank)


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return file.read()
    except OSError:
        return b""


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
