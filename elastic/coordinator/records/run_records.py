"""What a run leaves behind: events.jsonl, progress.jsonl, summary.json, exit.json.

Decisions do not wait for these files. What their disk refuses is kept, up to a bound, and written later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.coordinator.records.run_directory import overwrite, replace
from elastic.coordinator.records.run_summary import plan_entry, summarize
from elastic.core.job.goodput import recovery_entry
from elastic.core.job.state import ChangeCompleted, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.election import retry_s
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec, Plan
from elastic.telemetry import EventLog, event_line, read_events

log = logging.getLogger("elastic.coordinator")
TOLD = ("step", "reason", "todo", "partial")
"""What events.jsonl keeps of a new plan, besides the plan itself."""
KEPT_BYTES = 16 << 20
"""Of events that a full disk refuses; beyond, the oldest are dropped."""
DRAFT_BYTES = 4096
"""Room that is taken at the start, for what has to be said at the end."""


class PatientLog:
    """An event log that outlives a full disk: events that it refuses are written in their order once it takes them."""

    def __init__(self, path: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self.path, self._kept_bytes = path, kept_bytes
        self._log: EventLog | None = None
        self._waiting, self._nbytes, self._dropped = deque[bytes](), 0, 0
        self._failures, self._again, self._since = 0, 0.0, 0.0
        self._closed = False
        self.retry()

    def append(self, kind: str, fields: Mapping[str, Any], at: float | None = None) -> None:
        """As of `EventLog`, but raises no OSError."""
        self._wait(event_line(kind, fields, at))
        self.retry()

    def retry(self, at_once: bool = False) -> None:
        """Write what waits, if it is time to try."""
        if self._closed or not (at_once or time.monotonic() >= self._again):
            return
        try:
            self._log = self._log or EventLog(self.path)
            while self._waiting:
                self._log.write(self._waiting[0])
                self._nbytes -= len(self._waiting.popleft())
        except OSError as error:
            self._refused(error)
        else:
            if self._failures:
                self._back()

    def close(self) -> None:
        """Idempotent."""
        self.retry(at_once=True)
        if self._waiting and not self._closed:
            log.error("%s lacks its last %d events", self.path, len(self._waiting))
        self._closed = True
        self._release()

    def _release(self) -> None:
        found, self._log = self._log, None
        if found is not None:
            with contextlib.suppress(OSError):
                found.close()

    def _wait(self, line: bytes) -> None:
        self._waiting.append(line)
        self._nbytes += len(line)
        while self._nbytes > self._kept_bytes:
            self._nbytes -= len(self._waiting.popleft())
            self._dropped += 1

    def _refused(self, error: OSError) -> None:
        self._release()  # opened again, it is mended
        self._failures += 1
        self._again = time.monotonic() + retry_s(self._failures)
        if self._failures == 1:
            self._since = time.monotonic()
            log.warning("events wait: %s cannot be written: %s", self.path, error)

    def _back(self) -> None:
        refused_s, dropped = round(time.monotonic() - self._since, 3), self._dropped
        self._failures, self._again, self._dropped = 0, 0.0, 0
        log.warning("%s is written again after %.1f s; %d events are missing", self.path, refused_s, dropped)
        self.append("records-late", {"refused_s": refused_s, "dropped": dropped})


class Records:
    """Files of one run directory. Only the coordinator writes them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._events = PatientLog(run_dir / "events.jsonl")
        self._progress = PatientLog(run_dir / "progress.jsonl")
        self._last_beat = (0, 0)
        self._draft = run_dir / "exit.draft"
        _tried(self._draft, lambda: replace(self._draft, " " * DRAFT_BYTES))

    def close(self) -> None:
        """Another coordinator writes from now on. Idempotent."""
        self._events.close()
        self._progress.close()

    def event(self, kind: str, data: dict[str, Any]) -> None:
        self._events.append(kind, data)

    def refused(
        self, node: str, port: str, reason: str, peer: str, detail: str, count: int, total: int
    ) -> None:
        """`node`, or the coordinator, refused something at its `port`."""
        told = {"node": node, "port": port, "reason": str(reason), "peer": peer, "detail": detail}
        self.event("refused", {**told, "count": count, "total": total})

    def decision(self, state: JobState, reason: str) -> None:
        self.event("decision", {"phase": state.phase.value, "epoch": state.epoch, "reason": reason})

    def plan(self, plan: Plan, told: Mapping[str, Any]) -> None:
        """`told`: what the coordinator's note says of it."""
        self.event("plan", {**plan_entry(plan), "epoch": plan.epoch, **{k: told[k] for k in TOLD}})

    def step(self, done: m.StepDone, state: JobState) -> None:
        entry = {
            "epoch": done.epoch,
            "step": done.record.step,
            "loss": done.record.loss,
            "grad_norm": done.record.grad_norm,
            "clip": done.record.clip,
            "lr": done.lr,
            "seconds": round(done.seconds, 5),
            "tokens": done.tokens,
            "doubled": done.doubled,
            "missing": done.missing,
        }
        self.event("step", entry)
        self.progress(state, done)

    def progress(self, state: JobState, done: m.StepDone | None = None) -> None:
        """One line for whoever shows how far the job is."""
        plan = state.plan
        reports = [mb.report for mb in state.members.values()]
        entry: dict[str, Any] = {
            "step": done.record.step + 1 if done else max((r.step for r in reports), default=0),
            "microbatch": 0 if done else max((r.microbatch for r in reports), default=0),
            "steps": state.spec.n_steps if state.spec else 0,
            "nodes": len(plan.nodes()) if plan else len(state.members),
            "plan": shape(plan) if plan else "",
            "phase": state.phase.value,
            "epoch": state.epoch,
        }
        if done is not None:
            entry |= {
                "loss": done.record.loss,
                "tokens_per_s": round(done.tokens / max(done.seconds, 1e-9), 1),
            }
        self._progress.append("progress", entry)

    def job(self, spec: JobSpec) -> None:
        """What is trained, once a worker has told it."""
        entry = {
            "steps": spec.n_steps,
            "microbatches": spec.n_microbatches,
            "tokens_per_microbatch": spec.tokens_per_microbatch,
            "tp": spec.tp,
            "tied": spec.tied,
            "checkpoint_every": spec.checkpoint_every,
        }
        self.event("job", entry)

    def beat(self, here: tuple[int, int], state: JobState) -> None:
        """Progress between steps, as a heartbeat tells it: (step, micro-batch); at most once a micro-batch."""
        self._events.retry()
        self._progress.retry()
        if here > self._last_beat:
            self._last_beat = here
            self.progress(state)

    def recovered(self, event: ChangeCompleted) -> dict[str, Any]:
        """Note an epoch change; return its figures."""
        entry = recovery_entry(event, self._fault_time(event))
        self.event("recovery", entry)
        return entry

    def _fault_time(self, event: ChangeCompleted) -> float | None:
        """When the first injected fault since the recovery before was carried out."""
        times = [p.stat().st_mtime for p in (self.run_dir / "faults").glob("*.fired")]
        recent = [t for t in times if event.since < t <= event.change.began]
        return min(recent, default=None)

    def end(self, code: int, reason: str, params_sha256: str) -> None:
        """The job is over: write the summary, then the exit record that the launcher waits for."""
        for fired in sorted((self.run_dir / "faults").glob("*.fired"), key=lambda p: int(p.stem)):
            self._events.append("fault", {"number": int(fired.stem)}, at=fired.stat().st_mtime)
        self.event("end", {"code": code, "reason": reason, "params_sha256": params_sha256})
        self._events.retry(at_once=True)
        _tried(self.run_dir / "summary.json", self._summarize)
        text = json.dumps({"code": code, "reason": reason}) + "\n"
        _tried(self.run_dir / "exit.json", lambda: self._verdict(text))

    def _summarize(self) -> None:
        summary = summarize(read_events(self.run_dir / "events.jsonl"))
        replace(self.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")

    def _verdict(self, text: str) -> None:
        """In the room that was taken at the start: a full disk must not hide how the job ended."""
        try:
            overwrite(self._draft, text)
            self._draft.replace(self.run_dir / "exit.json")
        except OSError:
            replace(self.run_dir / "exit.json", text)


def shape(plan: Plan) -> str:
    """Depths of the pipelines, as in 3+1."""
    return "+".join(str(len(p.stages)) for p in plan.pipelines)


def _tried(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except (OSError, FieldError) as error:
        log.error("%s cannot be written: %s", path, error)
