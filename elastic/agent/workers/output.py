"""Copies the output of workers to log files and, as torchrun does, to the console.

    neither flag   log file, and the console unchanged (torchrun: inherited)
    --redirects    log file only
    --tee          log file, and the console line by line with a prefix

One thread per group of workers copies output that goes to both places. With `--redirects` a worker
writes to the log file itself. On a full disk the log file loses lines, but no worker waits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import string
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from elastic.config import STDERR, STDOUT, JobConfig

log = logging.getLogger("elastic.agent")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16
_LAST_BYTES = 4096
LAST_OUTPUT_S = 0.5
"""Upper limit of the wait for the last output of a failed worker."""


@dataclass
class _Pipe:
    """Copies one pipe of a worker to `log` and to the descriptor `console` (-1: none)."""

    log: IO[bytes]
    console: int
    prefix: bytes
    rest: bytes = field(default=b"")
    """The last, unfinished line."""
    dropped: int = 0
    """Bytes that the log file has lost since writing began to fail; 0: writing succeeds."""
    ended: threading.Event = field(default_factory=threading.Event)

    def feed(self, data: bytes) -> None:
        self._keep(data)
        if not self.prefix:
            return self._show(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE_BYTES:
            lines, self.rest = [*lines, self.rest], b""
        self._show(b"".join(self.prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        if self.rest:
            self._show(self.prefix + self.rest + b"\n")
        if self.dropped:
            log.warning("%s lacks its last %d bytes", self.log.name, self.dropped)
        with contextlib.suppress(OSError):  # a full disk, already logged
            self.log.close()
        self.ended.set()

    def _keep(self, data: bytes) -> None:
        """Write to the log file; drop data while its disk fails."""
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

    def _show(self, data: bytes) -> None:
        try:
            while data and self.console >= 0:
                data = data[os.write(self.console, data) :]
        except OSError as error:
            if error.errno not in _NO_ROOM:  # a console that is a file may have room later
                self.console = -1  # nobody reads the console; the log file has everything


class Output:
    """Log files and console of one group of workers."""

    def __init__(self, config: JobConfig, console: tuple[int, int] = (1, 2)) -> None:
        """`console`: descriptors of the console's standard output and error."""
        self._config, self._console = config, console
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._pipes: dict[Path, _Pipe] = {}
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
        self._thread.start()

    def last_error_line(self, folder: Path) -> str:
        """Return the last line that an ended worker wrote to stderr; "": none.

        Waits until all output is in the file, at most LAST_OUTPUT_S if a descendant of the worker
        keeps the pipe open.
        """
        path = folder / "stderr.log"
        if path in self._pipes:
            self._pipes[path].ended.wait(LAST_OUTPUT_S)
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def finish(self, timeout_s: float = 1.0) -> None:
        """Copy the output that is still in the pipes, then stop. Wait up to `timeout_s` for
        descendants that hold a pipe open."""
        with contextlib.suppress(BrokenPipeError):  # every pipe has ended already
            os.write(self._wake_write, b".")
        os.close(self._wake_write)
        self._thread.join(timeout_s)

    def _route(self, path: Path, local_rank: int, bit: int, names: dict[str, str]) -> int:
        config, log = self._config, path.open("ab", buffering=0)
        tee, redirect = (
            values[local_rank % len(values)] & bit for values in (config.tee, config.redirects)
        )
        hidden = bool(config.local_ranks_filter) and local_rank not in config.local_ranks_filter
        if hidden or (redirect and not tee):
            descriptor = os.dup(log.fileno())
            log.close()
            return descriptor
        read, write = os.pipe()
        os.set_blocking(read, False)
        prefix = string.Template(config.log_line_prefix).substitute(names).encode() if tee else b""
        pipe = _Pipe(log, self._console[bit - 1], prefix)
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
