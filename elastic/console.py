"""Writes output on threads of their own, because a console or a disk may take nothing for hours.

Nobody reads the console while a pager shows its first page, after Ctrl-S, while the launcher is
stopped, or when the cable of an ssh session is pulled. Neither launcher, coordinator, agent nor
worker waits for it.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf

from elastic.config import STDERR, STDOUT
from elastic.logs import LogSource
from elastic.rpc.control.event_loop import run_callback

log = logging.getLogger(__name__)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
CONSOLE_LOGGER = "elastic.console"
"""Logger of lines for people, where they are JSON lines."""
MAX_WAITING_BYTES = 16 << 20
"""Output is dropped while more than this waits."""
ROOM_BYTES = 1 << 20
"""Output is accepted again when there is room for so many bytes."""
ROOM_S = 1.0
"""Longest wait for this room, once. A reader or a disk that only is slow loses no output."""
STALL_S = 1.0
"""A reader or a disk that takes nothing for this time is not waited for at the end."""
ITEM_BYTES = 512
"""Memory of a queued write, besides its data."""


class BoundedWriter:
    """Runs writes that may hang on one thread, in order. At most MAX_WAITING_BYTES wait."""

    def __init__(self, name: str) -> None:
        self._writes: deque[tuple[int, Callable[[], object]]] = deque()
        self._waiting_bytes, self._behind, self._ended = 0, False, False
        self._written = 0
        """Number of writes that are done."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, write: Callable[[], object], nbytes: int, wait_s: float = 0.0) -> bool:
        """Queue a write of `nbytes`; return False if too many bytes wait. Wait for room up to
        `wait_s`, unless an earlier call has waited in vain for it."""
        nbytes += ITEM_BYTES
        with self._changed:
            if self._waiting_bytes + nbytes > MAX_WAITING_BYTES and not self._behind:
                self._behind = not self._changed.wait_for(self._has_room, wait_s)
            if self._behind and not self._has_room():
                return False
            self._behind = False
            self._queue(nbytes, write)
            return True

    def end(self, last: Callable[[], object] = lambda: None) -> None:
        """End the thread after the queued writes and `last`. Do not wait for it."""
        with self._changed:
            self._queue(0, last)
            self._ended = True

    def flush(self, timeout_s: float, stall_s: float = inf) -> bool:
        """Wait until everything is written; return False after `timeout_s`, or when no write ends
        for `stall_s`."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._writes:
                written, wait_s = self._written, min(stall_s, until - time.monotonic())
                if not self._changed.wait_for(lambda: self._written != written, wait_s):  # noqa: B023
                    return False
            return True

    def _queue(self, nbytes: int, write: Callable[[], object]) -> None:
        """Add a write. The caller holds the lock."""
        self._waiting_bytes += nbytes
        self._writes.append((nbytes, write))
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._waiting_bytes <= MAX_WAITING_BYTES - ROOM_BYTES

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._ended)
                if not self._writes:
                    return
                nbytes, write = self._writes[0]
            run_callback(write)
            with self._changed:  # only now is it written
                self._writes.popleft()
                self._waiting_bytes -= nbytes
                self._written += 1
                self._changed.notify_all()


class _Stream:
    """One of the two output streams of the console. Any thread may call `put`."""

    def __init__(self, descriptor: int, name: str, line: Callable[[str], bytes]) -> None:
        """`line(text)` returns a text for people as a line."""
        self._descriptor, self._writer = descriptor, BoundedWriter(name)
        self._line = line
        self._lock, self._lost = threading.Lock(), 0
        self._given, self._handled = 0, 0
        """Bytes that were given to the writer, and those that it has printed or dropped."""
        self._dropping = False
        """Whether the writer drops what it gets."""
        self.flush = self._writer.flush
        self._writer.start()

    def put(self, data: bytes, wait_s: float) -> None:
        with self._lock:
            lost, self._lost = self._lost, 0
        posted = self._writer.post(partial(self._write, data, lost), len(data), wait_s)
        with self._lock:
            if posted:
                self._given += lost + len(data)
            else:
                self._lost += lost + len(data)

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all is printed, as long as somebody reads. Then drop the
        rest, and print its size if somebody still reads."""
        if self.flush(timeout_s, STALL_S):
            return
        with self._lock:
            missing = self._given - self._handled + self._lost
        log.warning("the console lacks its last %d bytes", missing)
        self._dropping = True
        self._writer.end(self._print_lost)
        self.flush(STALL_S)

    def _write(self, data: bytes, lost: int) -> None:
        nbytes = lost + len(data)
        if self._dropping:
            with self._lock:
                self._lost += nbytes
        else:
            self._print(self._note(lost) + data if lost else data)
        with self._lock:
            self._handled += nbytes

    def _print_lost(self) -> None:
        """Print the size of what was dropped at the end."""
        self._dropping = False
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            self._print(self._note(lost))

    def _note(self, lost: int) -> bytes:
        note = f"{lost} bytes of output are missing here, because nobody read them"
        return b"\n" + self._line(note)

    def _print(self, data: bytes) -> None:
        try:
            while data and self._descriptor >= 0:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another process has made it non-blocking
                    select.select([], [self._descriptor], [])
        except OSError as error:
            if error.errno not in _NO_ROOM:  # a console that is a file may have room later
                self._descriptor = -1  # nobody reads the console; the log file has everything


class Console:
    """Standard output and standard error of this process, for itself and its workers.

    Nothing waits until it is printed. Output that nobody reads is dropped in the end, and its size
    is printed when somebody reads again. Errors are ignored, except that of a full disk, which is
    tried again with the next output.
    """

    def __init__(
        self,
        descriptors: tuple[int, int] | None = None,
        program: str = "elastic agent",
        source: LogSource | None = None,
    ) -> None:
        """`descriptors`: those of the two streams; -1: none; None: those of this process.
        `program`: prefix of lines for the user. `source`: all lines are JSON lines of it, on
        standard output; None: they are text."""
        out, err = _own_descriptors() if descriptors is None else descriptors
        self._program, self.source = program, source
        first = _Stream(out, "console-out", self._line)
        # two threads would tear lines of each other where both write to one pipe
        second = first if _is_same_file(out, err) else _Stream(err, "console-err", self._line)
        self._streams = {STDOUT: first, STDERR: second}

    def put(self, stream: int, data: bytes) -> None:
        """Print to STDOUT or STDERR. Wait at most ROOM_S for a reader that is slow."""
        self._streams[stream].put(data, ROOM_S)

    def put_at_once(self, stream: int, data: bytes) -> None:
        """Print to STDOUT or STDERR. Never wait."""
        self._streams[stream].put(data, 0.0)

    def say(self, text: str) -> None:
        """Print a line for people to standard error, or a JSON line to standard output. Never
        wait."""
        self.put_at_once(STDERR if self.source is None else STDOUT, self._line(text))

    def _line(self, text: str) -> bytes:
        if self.source is not None:
            return self.source.note(text, CONSOLE_LOGGER)
        return f"{self._program}: {text}\n".encode(errors="replace")

    def flush(self, timeout_s: float) -> bool:
        """Wait until all output is printed; return False if that takes longer than `timeout_s`."""
        until = time.monotonic() + timeout_s
        return all(
            stream.flush(max(0.0, until - time.monotonic())) for stream in self._streams.values()
        )

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a reader that is slow, and STALL_S for one that does not
        read. Then drop the rest. Only for the end of this process."""
        until = time.monotonic() + timeout_s
        for stream in dict.fromkeys(self._streams.values()):
            stream.finish(max(0.0, until - time.monotonic()))


def _own_descriptors() -> tuple[int, int]:
    """Return the descriptors of standard output and error. The number of a stream that was closed
    before this process began may be that of another file now; -1 stands for it."""
    return -1 if sys.__stdout__ is None else 1, -1 if sys.__stderr__ is None else 2


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one of them is closed
        return False
