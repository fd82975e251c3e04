"""Writes the files of a run: events.jsonl, progress.jsonl, waiting.json, summary.json, exit.json.

Decisions do not wait for these files: a thread writes them, because the disk of the run directory
may hang. Lines that the disk refuses, or does not take yet, are kept up to a limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elastic.coordinator.records.recorded_steps import (
    RecordedLines,
    RecordedSteps,
    lines_in,
    recorded_in,
)
from elastic.coordinator.records.run_directory import (
    announce,
    overwrite_file,
    replace_file,
    try_write,
)
from elastic.coordinator.records.run_summary import plan_shape, steps_done, summarize
from elastic.coordinator.waiting import Waiting
from elastic.core.job.goodput import evaluation_entries, recovery_entry, step_entry
from elastic.core.job.state import ChangeCompleted, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.election import retry_s
from elastic.domain.errors import FieldError
from elastic.rpc.control.event_loop import Dispatcher
from elastic.telemetry import EventLog, event_line, read_events

log = logging.getLogger("elastic.coordinator")
KEPT_BYTES = 16 << 20
"""Maximum bytes of unwritten events; if there are more, the oldest are dropped."""
TAIL_BYTES = 1 << 20
"""The events of the last decision before a takeover are within the last bytes of events.jsonl."""
DRAFT_BYTES = 4096
"""Disk space reserved at the start for exit.json."""
ROOM_S = 30.0
"""At the end of the job, the last events and the summary wait this long for a disk that is full."""
ROOM_POLL_S = 0.5
"""Pause between two attempts meanwhile."""
CLOSE_S = 5.0
"""`RunRecords.close` waits this long for the disk."""


class RetryingEventLog:
    """An event log for a disk that may be full or hang: it keeps unwritten events, and writes them
    later. `post` runs a function on the thread that waits for the disk."""

    def __init__(
        self,
        path: Path,
        post: Callable[[Callable[[], object]], object],
        kept_bytes: int = KEPT_BYTES,
        former: Sequence[str] = (),
    ) -> None:
        """`former`: lines that are written first, unless the file ends with them. Steps that the
        file had at first are not written again."""
        self.path, self._post, self._kept_bytes = path, post, kept_bytes
        self._lock = threading.Lock()
        """Guards the events and their numbers; never held while the disk works."""
        self._unwritten, self._nbytes, self._dropped = deque[bytes](), 0, 0
        self._asked, self._retry_at = False, 0.0
        self._log: EventLog | None = None
        self._failures, self._failed_at, self._closed = 0, 0.0, False
        self._given_up, self._former = False, former
        self._former_lines: RecordedLines | None = None
        self._late_since, self.dropped = 0.0, 0
        """Time since which an event is not on disk; 0: all are. Number of events that were dropped
        for ever."""
        self._post(self.write)

    def append(self, kind: str, fields: Mapping[str, Any], at: float | None = None) -> None:
        """Append an event (`event_line`) without waiting for the disk."""
        self.append_line(event_line(kind, fields, at))

    def append_line(self, line: bytes) -> None:
        self._keep(line)
        self.retry()

    def retry(self) -> None:
        """Let the disk's thread write the unwritten events, unless a pause after a failure is not
        over."""
        with self._lock:
            if self._asked or not self._unwritten or time.monotonic() < self._retry_at:
                return
            self._asked = True
        self._post(self.write)

    @property
    def waits(self) -> bool:
        """Whether events are not written yet."""
        return bool(self._unwritten)

    @property
    def unwritten(self) -> int:
        """Number of events that wait for the disk."""
        return len(self._unwritten)

    @property
    def late_s(self) -> float:
        """Seconds for which the oldest event has waited for the disk; 0: all are written."""
        since = self._late_since
        return time.monotonic() - since if since else 0.0

    def give_up(self) -> None:
        """Write no further line, because another coordinator may write them now."""
        self._given_up = True

    # ---- on the thread of the disk ----

    def write(self) -> None:
        """Write the unwritten events, without raising OSError."""
        with self._lock:
            self._asked = False
        if self._closed:
            return
        try:
            self._log = self._log or EventLog(self.path)
            self._add_former(self._log)
            while not self._given_up and (line := self._take()):
                self._write_line(self._log, line)
        except OSError as error:
            self._failed(error)
        else:
            with self._lock:
                if not self._unwritten:
                    self._late_since = 0.0
            if self._failures:
                self._recovered()

    def close(self) -> None:
        """Try to write the unwritten events, and close the file. Idempotent."""
        self.write()
        if self._unwritten and not self._closed:
            log.error("%s lacks its last %d events", self.path, len(self._unwritten))
        self._closed = True
        self._release()

    def _add_former(self, file: EventLog) -> None:
        if self._former:
            tail, former = file.tail(TAIL_BYTES), map(str.encode, self._former)
            missing = [line for line in former if line not in tail]
            with self._lock:
                self._unwritten.extendleft(reversed(missing))
                self._nbytes += sum(map(len, missing))
            self._former = ()

    def _write_line(self, file: EventLog, line: bytes) -> None:
        try:
            if not self._is_former(file, line):
                file.write(line)
        except OSError:
            with self._lock:
                self._unwritten.appendleft(line)
                self._nbytes += len(line)
            raise

    def _is_former(self, file: EventLog, line: bytes) -> bool:
        """Return whether the line is a step or an evaluation that the file had before the first one
        was written."""
        found = recorded_in(line)
        if found is not None and self._former_lines is None:
            self._former_lines = RecordedLines()
            try:
                self._former_lines = RecordedLines(lines_in(file))
            except OSError as error:  # they may then be written twice
                log.warning("%s cannot be read: %s", self.path, error)
        return found is not None and found in (self._former_lines or ())

    def _take(self) -> bytes:
        """Return the oldest unwritten event; b"": there is none."""
        with self._lock:
            if not self._unwritten:
                return b""
            line = self._unwritten.popleft()
            self._nbytes -= len(line)
            return line

    def _release(self) -> None:
        found, self._log = self._log, None
        if found is not None:
            with contextlib.suppress(OSError):
                found.close()

    def _keep(self, line: bytes) -> None:
        with self._lock:
            self._unwritten.append(line)
            self._nbytes += len(line)
            self._late_since = self._late_since or time.monotonic()
            while self._nbytes > self._kept_bytes:
                self._nbytes -= len(self._unwritten.popleft())
                self._dropped += 1
                self.dropped += 1

    def _failed(self, error: OSError) -> None:
        self._release()  # opening the file again repairs a partial line
        self._failures += 1
        with self._lock:
            self._retry_at = time.monotonic() + retry_s(self._failures)
        if self._failures == 1:
            self._failed_at = time.monotonic()
            log.warning("events wait: %s cannot be written: %s", self.path, error)

    def _recovered(self) -> None:
        refused_s = round(time.monotonic() - self._failed_at, 3)
        with self._lock:
            dropped, self._dropped, self._retry_at = self._dropped, 0, 0.0
        self._failures = 0
        log.warning(
            "%s is written again after %.1f s; %d events are missing", self.path, refused_s, dropped
        )
        self._keep(event_line("records-late", {"refused_s": refused_s, "dropped": dropped}))
        self.write()


def write_waiting(path: Path, found: Waiting | None) -> None:
    """Write what is awaited, or {}, to a file that displays read while nothing else is printed."""
    text = json.dumps(found.entry() if found is not None else {}) + "\n"
    try_write(path, partial(replace_file, path, text))


class RunRecords:
    """The files of one run directory. Only the leading coordinator writes them."""

    def __init__(
        self,
        run_dir: Path,
        *,
        injected: bool = True,
        former: Sequence[str] = (),
        over: bool = False,
    ) -> None:
        """`injected`: faults are injected into this run, and its recoveries name them. `former`:
        lines of events.jsonl that the former coordinator may not have written. `over`: the job was
        over before this coordinator led."""
        self.run_dir, self._injected = run_dir, injected
        self._disk = Dispatcher("records")
        self._has_summary = True
        """Whether this run directory gets a summary. A standby that leads after the end has nothing
        to summarize, unless the former leader wrote events into the same directory."""
        if over:
            self._disk.post(self._look_for_events)
        self._events = RetryingEventLog(run_dir / "events.jsonl", self._disk.post, former=former)
        self._progress = RetryingEventLog(run_dir / "progress.jsonl", self._disk.post)
        self._last_position = (0, 0)
        self._steps, self._evaluations = RecordedSteps(), RecordedSteps()
        """Steps and evaluations that were recorded since this coordinator leads."""
        self._draft = run_dir / "exit.draft"
        self._closed = self._given_up = False
        self._closing = threading.Event()
        self.ended = threading.Event()
        """Set when the records of the end are written, or were refused."""
        draft = partial(replace_file, self._draft, " " * DRAFT_BYTES)
        self._disk.post(partial(try_write, self._draft, draft))

    def _look_for_events(self) -> None:
        try:
            self._has_summary = (self.run_dir / "events.jsonl").stat().st_size > 0
        except OSError:
            self._has_summary = False

    @property
    def unwritten(self) -> int:
        """Number of events that wait for the disk."""
        return self._events.unwritten

    @property
    def late_s(self) -> float:
        """Seconds for which the oldest event has waited for the disk; 0: all are written."""
        return self._events.late_s

    @property
    def dropped(self) -> int:
        """Number of events that the event log lacks for ever."""
        return self._events.dropped

    def flush(self, timeout_s: float) -> bool:
        """Wait until the disk has taken all records so far, or refused them; return whether it did
        so within `timeout_s`."""
        done = threading.Event()
        self._disk.post(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Close the files, after a limited time: what the disk has not taken then is not written,
        because another coordinator may write. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._disk.post(self._events.close)
        self._disk.post(self._progress.close)
        if not self.flush(CLOSE_S):
            log.error("%s lacks the last records: its disk does not answer", self.run_dir)
            self._given_up = True
            self._events.give_up()
            self._progress.give_up()
        self._disk.end()

    def announce(self, leader: dict[str, Any]) -> None:
        """Write coordinator.json (`run_directory.announce`)."""
        self._post(partial(announce, self.run_dir, leader))

    def _post(self, write: Callable[[], object]) -> None:
        """Write a file on the thread of the disk, unless the records are given up before."""
        self._disk.post(lambda: None if self._given_up else write())

    def event(self, kind: str, data: dict[str, Any]) -> None:
        self._events.append(kind, data)

    def line(self, line: bytes) -> None:
        """Record an event made by `event_line`."""
        self._events.append_line(line)

    def step(self, done: m.StepDone, state: JobState, at: float | None = None) -> None:
        """Record a finished step once, although several nodes report it, some of them again to each
        new coordinator. `at`: time of the report; None: now."""
        if self._steps.add(done.epoch, done.record.step):
            found = done.record.evaluation
            if found is not None and self._evaluations.add(found.epoch, found.step):
                for entry in evaluation_entries(found):
                    self._events.append(entry.kind, entry.data, at)
            self._events.append("step", step_entry(done), at)
            if done.record.step > state.logged_step:  # else nodes report it to a new coordinator
                self.progress(state, done)

    def progress(self, state: JobState, done: m.StepDone | None = None) -> None:
        """Write a line of progress.jsonl, which progress displays read."""
        plan = state.plan
        reports = [mb.report for mb in state.members.values()]
        entry: dict[str, Any] = {
            "step": done.record.step + 1 if done else steps_done(state),
            "microbatch": 0 if done else max((r.microbatch for r in reports), default=0),
            "steps": state.spec.n_steps if state.spec else 0,
            "nodes": len(plan.nodes()) if plan else len(state.members),
            "plan": plan_shape(plan) if plan else "",
            "phase": state.phase.value,
            "epoch": state.epoch,
        }
        if done is not None:
            entry |= {
                "loss": done.record.loss,
                "tokens_per_s": round(done.tokens / max(done.seconds, 1e-9), 1),
            }
        self._progress.append("progress", entry)

    def waiting(self, found: Waiting | None) -> None:
        """Write waiting.json: what the job waits for, or {}."""
        self._post(partial(write_waiting, self.run_dir / "waiting.json", found))

    def heartbeat(self, position: tuple[int, int], state: JobState) -> None:
        """Record progress from heartbeats if `position` (step, micro-batch) is the highest yet."""
        self._events.retry()
        self._progress.retry()
        if position > self._last_position:
            self._last_position = position
            self.progress(state)

    def recovery(self, event: ChangeCompleted) -> dict[str, Any]:
        """Return the fields of the event about a completed epoch change."""
        return recovery_entry(event, self._fault_time(event))

    def _fault_time(self, event: ChangeCompleted) -> float | None:
        """Return the time of the first injected fault since the previous recovery, or None."""
        if not self._injected:
            return None
        times = [p.stat().st_mtime for p in (self.run_dir / "faults").glob("*.fired")]
        recent = [t for t in times if event.since < t <= event.change.began]
        return min(recent, default=None)

    def checkpoints(self) -> frozenset[int]:
        """Return the steps of the checkpoints in the event log, as far as it can be read. It may
        lack the newest ones."""
        try:
            events = read_events(self.run_dir / "events.jsonl")
        except FieldError as error:
            log.warning("completed checkpoints are not known: %s", error)
            return frozenset()
        return frozenset(event["step"] for event in events if event["kind"] == "checkpoint")

    def end(self, code: int, reason: str, params_sha256: str) -> None:
        """Write the summary of a finished job, then exit.json, for which the launcher waits; then
        set `ended`."""
        self._post(partial(self._end, code, reason, params_sha256, time.time()))
        self._disk.post(self.ended.set)

    def _end(self, code: int, reason: str, params_sha256: str, at: float) -> None:
        for fired in sorted((self.run_dir / "faults").glob("*.fired"), key=lambda p: int(p.stem)):
            self._events.append("fault", {"number": int(fired.stem)}, at=fired.stat().st_mtime)
        end = {"code": code, "reason": reason, "params_sha256": params_sha256}
        self._events.append("end", end, at)
        self._write_last_records()
        text = json.dumps({"code": code, "reason": reason}) + "\n"
        try_write(self.run_dir / "exit.json", lambda: self._write_exit(text))

    def _write_last_records(self) -> None:
        """Write the last events and the summary. If the disk is full, try again for a while."""
        until, waits = time.monotonic() + ROOM_S, False
        while problem := self._try_last_records():
            if not waits:
                log.error("the end waits up to %g s for room: %s", ROOM_S, problem)
            waits = True
            if time.monotonic() > until or self._closing.wait(ROOM_POLL_S):
                log.error("%s", problem)
                return

    def _try_last_records(self) -> str:
        """Write the last events and the summary; return what a later attempt may still write, as an
        error text, or ""."""
        self._events.write()
        try:
            if self._has_summary:
                self._write_summary()
        except OSError as error:
            return f"summary.json cannot be written: {error}"
        except FieldError as error:
            log.error("summary.json cannot be written: %s", error)
        return f"{self._events.path} cannot be written" if self._events.waits else ""

    def _write_summary(self) -> None:
        summary = summarize(read_events(self.run_dir / "events.jsonl"))
        replace_file(self.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")

    def _write_exit(self, text: str) -> None:
        """Write exit.json in the reserved disk space, so that a full disk does not prevent it."""
        try:
            overwrite_file(self._draft, text)
            self._draft.replace(self.run_dir / "exit.json")
        except OSError:
            replace_file(self.run_dir / "exit.json", text)
