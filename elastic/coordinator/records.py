"""What a run leaves behind: events.jsonl, progress.jsonl, summary.json, exit.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.coordinator.summary import plan_entry, summarize
from elastic.core import messages as m
from elastic.core.figures import recovery_entry
from elastic.core.job import JobState, Recovered
from elastic.core.types import JobSpec, Plan
from elastic.telemetry import EventLog, read_events

TOLD = ("step", "reason", "todo", "partial")
"""What events.jsonl keeps of a new plan, besides the plan itself."""


class Records:
    """Files of one run directory. Only the coordinator writes them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._events = EventLog(run_dir / "events.jsonl")
        self._progress = EventLog(run_dir / "progress.jsonl")
        self._last_recovery = 0.0
        self._last_beat = (0, 0)

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
        if here > self._last_beat:
            self._last_beat = here
            self.progress(state)

    def recovered(self, event: Recovered) -> dict[str, Any]:
        """Note an epoch change; return its figures."""
        entry = recovery_entry(event, self._fault_time(event))
        self._last_recovery = event.resumed_at
        self.event("recovery", entry)
        return entry

    def _fault_time(self, event: Recovered) -> float | None:
        """When the newest injected fault since the last recovery was carried out."""
        times = [p.stat().st_mtime for p in (self.run_dir / "faults").glob("*.fired")]
        recent = [t for t in times if self._last_recovery < t <= event.change.began]
        return min(recent, default=None)

    def end(self, code: int, reason: str, params_sha256: str) -> None:
        """The job is over: write the summary, then the exit record that the launcher waits for."""
        for fired in sorted((self.run_dir / "faults").glob("*.fired"), key=lambda p: int(p.stem)):
            self._events.append("fault", {"number": int(fired.stem)}, at=fired.stat().st_mtime)
        self.event("end", {"code": code, "reason": reason, "params_sha256": params_sha256})
        summary = summarize(read_events(self.run_dir / "events.jsonl"))
        _replace(self.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        _replace(self.run_dir / "exit.json", json.dumps({"code": code, "reason": reason}) + "\n")


def shape(plan: Plan) -> str:
    """Depths of the pipelines, as in 3+1."""
    return "+".join(str(len(p.stages)) for p in plan.pipelines)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
    draft.write_text(text)
    os.replace(draft, path)
