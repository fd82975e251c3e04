"""Reads the record of a run while it grows, and calls a callback.

The position up to which everything was told is kept in RUN_DIR/tracking, so a tracker that is
started again goes on there. If it was killed between telling and keeping, what it told last is told
again.
"""

from __future__ import annotations

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
from elastic.launcher.run.rundir import LAUNCHER_EXIT
from elastic.launcher.tracking.callback import Callback, RunEvent, RunInfo
from elastic.launcher.tracking.record import Call, Record
from elastic.launcher.tracking.targets import Target

log = logging.getLogger(__name__)
FOLDER = "tracking"
POLL_S = 0.5
"""Interval between two looks at the record."""
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""First and longest pause before a call is repeated; each is twice the one before."""
MOST_FAILURES = 3
"""Calls in a row that fail for another reason than a disk or a network; then the tracker ends."""
BATCH = 500
"""Lines after which the position is kept."""
PIECE_BYTES = 1 << 20
TOLD_S = 15.0
"""Least time between two lines about what was told."""


@dataclass(slots=True)
class Position:
    """How far a tracker has come."""

    offset: int = 0
    """Bytes of events.jsonl that were told."""
    key: str = ""
    """What the callback's `on_start` returned."""


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
        quiet: bool = False,
    ) -> None:
        """`say(text)` tells the user; `quiet`: of problems only."""
        self._run_dir, self._target, self._callback, self._say = run_dir, target, callback, say
        self._quiet, self._record = quiet, Record(config)
        self._place = run_dir / FOLDER / f"{target.kind}-{_digest(str(target))}.json"
        self._position = Position()
        self._read = self._failures = self._steps = 0
        """Bytes of the record that were read; failed calls in a row; finished steps told."""
        self._begun = self.ended = self._unreadable = False
        """Whether `on_start` was called; whether `on_end` was; whether a line was unreadable."""
        self.stop = threading.Event()
        """Set to end after what the record has now."""

    def run(self) -> int:
        """Follow the run to its end; return the exit code. Raises FieldError if another tracker of
        this run has the same target, ElasticError if the callback fails again and again."""
        with self._alone():
            self._position = self._load()
            try:
                return self._follow()
            finally:
                self._callback.close()

    def _follow(self) -> int:
        told_at = time.monotonic()
        while True:
            stopped, over = self.stop.is_set(), self._result()
            self._pass_on()
            if not self.ended and over is not None:  # the coordinator was killed before its end
                self._call(Call("on_end", self._end_of(over)))
                self.ended = True
            if self.ended:
                self._tell("; the job has ended")
                return EXIT_OK
            if stopped:
                self._tell("")
                return EXIT_OK
            if time.monotonic() - told_at > TOLD_S:
                self._tell("" if self._begun else "; waiting for the training to begin")
                told_at = time.monotonic()
            self.stop.wait(POLL_S)

    def _tell(self, more: str) -> None:
        if not self._quiet:
            self._say(f"{self._target}: {self._steps} steps written{more}")

    def _result(self) -> dict[str, Any] | None:
        names = (LAUNCHER_EXIT, "exit.json")
        return next(filter(None, (read_object(self._run_dir / name) for name in names)), None)

    def _end_of(self, result: dict[str, Any]) -> RunEvent:
        return RunEvent(at=time.time(), step=self._record.next_step, fields=result)

    def _pass_on(self) -> None:
        """Tell everything that the record has by now."""
        told = 0
        for end, line in self._lines():
            for call in self._calls(line):
                if end > self._position.offset or call.method == "on_start":
                    self._call(call)
            self._read, told = end, told + 1
            if told % BATCH == 0:
                self._keep()
        if told:
            self._keep()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines of the record from `_read` on, each with the offset of its end."""
        try:
            file = (self._run_dir / "events.jsonl").open("rb")
        except FileNotFoundError:
            return
        with file:
            at = self._read
            file.seek(at)
            rest = b""
            while piece := file.read(PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    at += len(line) + 1
                    yield at, line

    def _calls(self, line: bytes) -> list[Call]:
        try:
            return self._record.observe(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
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

    def _start(self, info: RunInfo) -> None:
        self._position.key = self._callback.on_start(info, self._position.key) or ""
        self._begun = True

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        """Carry out an action of the callback, again and again while a disk or network is away."""
        pause_s = PAUSE_S
        while True:
            try:
                action()
            except OSError as error:
                if self.stop.is_set():
                    raise ElasticError(f"{self._target}: {describe(error)}") from error
                self._say(f"{self._target}: {describe(error)}; next try in {pause_s:g} s")
                self.stop.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except Exception as error:  # of the user's code, or of a library
                log.exception("%s of %s failed", what, self._target)
                self._failures += 1
                text = f"{self._target}: {what} failed: {describe(error)}"
                if self._failures == MOST_FAILURES:
                    raise ElasticError(f"{text}; the tracker ends after three failures") from error
                self._say(text)
                return
            else:
                self._failures = 0
                return

    def _keep(self) -> None:
        """Make what was told durable, then keep the position."""
        if not self._begun:
            return
        self._attempt("flush", self._callback.flush)
        self._position.offset = max(self._position.offset, self._read)
        self._attempt("keeping the position", self._save)

    def _save(self) -> None:
        scratch = self._place.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(self._position)))
        os.replace(scratch, self._place)

    def _load(self) -> Position:
        found = read_object(self._place) or {}
        offset, key = found.get("offset"), found.get("key")
        if isinstance(offset, int) and isinstance(key, str):
            return Position(offset, key)
        return Position()

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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
