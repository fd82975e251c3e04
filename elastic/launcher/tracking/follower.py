"""Reads the record of a run while it grows, and calls a callback.

The position up to which everything was told is kept in RUN_DIR/tracking, so a tracker that is
started again goes on there. If it was killed between telling and keeping, what it told last is told
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic.config import JobConfig
from elastic.domain.errors import EXIT_OK, ElasticError, FieldError, describe
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.rundir import LAUNCHER_EXIT, launcher_of
from elastic.launcher.tracking.callback import Callback, RunEvent, RunInfo
from elastic.launcher.tracking.record import Call, Record
from elastic.launcher.tracking.targets import Target

log = logging.getLogger(__name__)
FOLDER = "tracking"
POLL_S = 0.5
"""Interval between two looks at the record, and longest time between two keeps of the position."""
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""First and longest pause before a call is repeated; each is twice the one before."""
MOST_FAILURES = 3
"""Calls in a row that fail for another reason than a disk or a network; then the tracker ends."""
PIECE_BYTES = 1 << 20
TOLD_S = 15.0
"""Least time between two lines about what was told, and between two looks at the launcher."""
STOP_S = 3.0
"""Time after an interrupt within which the tracker still tells what the record has."""
REUSED = "the run directory is used by another run now; start the tracker again"
STEP = b'"kind":"step"'


@dataclass(slots=True)
class Position:
    """How far a tracker has come."""

    offset: int = 0
    """Bytes of events.jsonl that were told."""
    key: str = ""
    """What the callback's `on_start` returned."""
    ended: bool = False
    """Whether `on_end` was told."""


class Tracker:
    """Tells one callback what a run does, until the run or the tracker ends."""

    def __init__(
        self,
        config: JobConfig,
        run_dir: Path,
        target: Target,
        callback: Callback,
        say: Callable[[str], None],
        *,
        once: bool = False,
        quiet: bool = False,
        stop: threading.Event | None = None,
    ) -> None:
        """`say(text)` tells the user; `quiet`: of problems only. `once`: end after what the record
        has. `stop` is set by an interrupt."""
        self._run_dir, self._target, self._callback, self._say = run_dir, target, callback, say
        self._once, self._quiet, self._record = once, quiet, Record(config)
        self._place = run_dir / FOLDER / f"{target.kind}-{_digest(str(target).encode()).hex()}.json"
        self._position = Position()
        self._read = self._failures = self._steps = 0
        """Bytes of the record that were read; failed calls in a row; finished steps told."""
        self._kept_at = 0.0
        self._file: tuple[int, int] | None = None
        """Device and inode of the record."""
        self._seen: set[bytes] = set()
        """Digests of the lines besides steps: a coordinator that was paused may repeat some."""
        self._begun = self.ended = self._unreadable = False
        """Whether `on_start` was called, the end was told, and a line could not be read."""
        self.stop = stop or threading.Event()

    def run(self) -> int:
        """Follow the run to its end; return the exit code.

        Raises FieldError if another tracker of this run has the same target, and ElasticError if
        the callback fails again and again or another run uses the directory.
        """
        with self._alone():
            try:
                self._attempt("reading the position", self._load)
                return self._follow()
            finally:
                with contextlib.suppress(Exception):
                    self._callback.close()

    def _follow(self) -> int:
        told_at = time.monotonic()
        while True:
            stopped, over = self._once or self.stop.is_set(), self._result()
            before = self._read
            self._attempt("reading the record", self._pass_on)
            if over is not None and not self.ended:  # the coordinator was killed before its end
                self._end(over)
            if self.ended:
                self._tell("; the job has ended")
                return EXIT_OK
            if stopped:
                self._tell("")
                return EXIT_OK
            if time.monotonic() - told_at > TOLD_S:
                told_at = time.monotonic()
                if self._read == before and launcher_of(self._run_dir) is None:
                    self._tell("; the job does not run any more, and its record has no end")
                    return EXIT_OK
                self._tell("" if self._begun else "; waiting for the training to begin")
            self.stop.wait(POLL_S)

    def _tell(self, more: str) -> None:
        if not self._quiet:
            self._say(f"{self._target}: {self._steps} steps written{more}")

    def _result(self) -> dict[str, Any] | None:
        names = (LAUNCHER_EXIT, "exit.json")
        return next(filter(None, (read_object(self._run_dir / name) for name in names)), None)

    def _end(self, result: dict[str, Any]) -> None:
        if not self._position.ended:
            end = RunEvent(at=time.time(), step=self._record.next_step, fields=result)
            self._call(Call("on_end", end))
            self._keep()
        self.ended = True

    def _pass_on(self) -> None:
        """Tell everything that the record has by now."""
        until = STOP_S + time.monotonic()
        for end, line in self._lines():
            for call in self._calls(line):
                if end > self._position.offset or call.method == "on_start":
                    self._call(call)
                elif call.method == "on_end":
                    self.ended = True
            self._read = end
            now = time.monotonic()
            if now - self._kept_at > POLL_S:
                self._keep()
            until = until if self.stop.is_set() else STOP_S + now
            if now > until:
                break
        if self._read > self._position.offset:
            self._keep()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines that the record has now, from `_read` on, each with the offset of
        its end. Raises ElasticError if it is the record of another run."""
        try:
            file = (self._run_dir / "events.jsonl").open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            self._file = self._file or (found.st_dev, found.st_ino)
            if self._file != (found.st_dev, found.st_ino):
                raise ElasticError(f"{self._target}: {REUSED}")
            at, rest = self._read, b""
            file.seek(at)
            left = found.st_size - at
            while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
                left -= len(piece)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    at += len(line) + 1
                    yield at, line

    def _calls(self, line: bytes) -> list[Call]:
        if STEP not in line[:64]:
            if (digest := _digest(line)) in self._seen:
                return []
            self._seen.add(digest)
        try:
            return self._record.observe(json.loads(line))
        except (ElasticError, ValueError, KeyError, TypeError) as error:
            if not self._unreadable:
                self._say(f"warning: a line of events.jsonl cannot be read: {describe(error)}")
            self._unreadable = True
            return []

    def _call(self, call: Call) -> None:
        if call.method == "on_start":
            assert isinstance(call.argument, RunInfo)
            info = call.argument
            self._attempt("on_start", lambda: self._start(info))
            if not self._begun:
                raise ElasticError(f"{self._target} cannot begin")
            self._attempt("keeping the position", self._save)  # the key, before anything is told
            return
        self.ended = self.ended or call.method == "on_end"
        if not self._begun:
            return
        method = getattr(self._callback, call.method)
        self._attempt(call.method, lambda: method(call.argument))
        self._steps += call.method == "on_step"
        self._position.ended = self.ended

    def _start(self, info: RunInfo) -> None:
        self._position.key = self._callback.on_start(info, self._position.key) or ""
        self._begun = True

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        """Do something, again and again while a disk or a network is away.

        An error of the callback is told; the third in a row raises ElasticError, and so does one of
        its `flush`, because what was told before may be lost.
        """
        pause_s = PAUSE_S
        while True:
            try:
                action()
            except ElasticError:
                raise
            except OSError as error:
                if self.stop.is_set() or self._once:
                    raise ElasticError(f"{self._target}: {describe(error)}") from error
                self._say(f"{self._target}: {describe(error)}; next try in {pause_s:g} s")
                self.stop.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except (Exception, SystemExit) as error:  # of the user's code, or of a library
                log.exception("%s of %s failed", what, self._target)
                self._failures += 1
                text = f"{self._target}: {what} failed: {describe(error)}"
                if self._failures == MOST_FAILURES:
                    raise ElasticError(f"{text}; the tracker ends after three failures") from error
                if not what.startswith("on_"):
                    raise ElasticError(text) from error
                self._say(text)
                return
            else:
                self._failures = 0 if what.startswith("on_") else self._failures
                return

    def _keep(self) -> None:
        """Make what was told durable, then keep the position."""
        self._kept_at = time.monotonic()
        if not self._begun:
            return
        self._attempt("flush", self._callback.flush)
        self._position.offset = max(self._position.offset, self._read)
        self._attempt("keeping the position", self._save)

    def _save(self) -> None:
        if not self._place.parent.is_dir():
            raise ElasticError(f"{self._target}: {REUSED}")
        scratch = self._place.with_suffix(".tmp")
        with scratch.open("w") as file:
            file.write(json.dumps(asdict(self._position)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self._place)

    def _load(self) -> None:
        try:
            text = self._place.read_bytes()
        except FileNotFoundError:
            return
        try:
            found = json.loads(text)
            self._position = Position(
                int(found["offset"]), str(found["key"]), bool(found.get("ended"))
            )
        except (ValueError, KeyError, TypeError):
            self._say(f"warning: {self._place} is damaged: all is told again")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of this target. Raises FieldError if another tracker holds it."""
        self._place.parent.mkdir(exist_ok=True)
        with self._place.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "a tracker of this run writes there already; give another"
                raise FieldError("--to", str(self._target), remedy) from None
            yield


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]
