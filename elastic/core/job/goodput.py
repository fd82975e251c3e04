"""Goodput: the use of the nodes' time, and the figures of steps and epoch changes in the records.

node-seconds = useful + detect + plan + transfer + lost + idle. The simulator's account also has
`redundant`, the time of backups within a step; in this account it is part of `useful`.

Computing time is `pending` until its step is done. It then becomes `useful`, or `lost` if the same
step had been done before a fall-back to a checkpoint. If a fault ends the step, the time from the
fault to its detection becomes `detect`, and the part spent on micro-batches that must run again
becomes `lost`. Nodes outside an epoch change compute until they enter the new epoch
(`elastic.core.job.scope`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from elastic.core.job.scope import awaited
from elastic.core.job.state import ChangeCompleted, EpochChange, JobPhase, JobState, LogEntry
from elastic.core.protocol.messages import StepDone
from elastic.domain.types import EvaluationResult, OnNonfinite, StepRecord

NODE_TIME_USES = ("useful", "detect", "plan", "transfer", "lost", "idle")


@dataclass(slots=True)
class NodeTimeAccount:
    """Node-seconds by use. Every method changes the account."""

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NODE_TIME_USES, 0.0))
    """Node-seconds by use. They never decrease."""
    pending: float = 0.0
    """Node-seconds of computing whose use is not known yet."""
    newest: int = -1
    """Newest step that was done, also if a fall-back undid it."""
    _at: float = 0.0

    def advance(self, state: JobState, now: float) -> None:
        """Count the time up to `now`, during which the job was in `state`."""
        since, self._at = (max(0.0, now - self._at) if self._at else 0.0), now
        if not since or not state.members or state.ending is not None:
            return
        held = state.plan.nodes() if state.plan is not None else ()
        used = sum(node in state.members for node in held)
        idle = len(state.members) - used
        use = _use(state)
        if use == "idle" or state.plan is None:
            self.totals["plan" if use == "plan" else "idle"] += (used + idle) * since
            return
        self.totals["idle"] += idle * since
        computing = used if use == "useful" else awaited(state)
        self.pending += computing * since
        if use != "useful":
            self.totals[use] += (used - computing) * since

    def forget(self) -> None:
        """Drop the pending time, and do not count the time until the next `advance`."""
        self.pending, self._at = 0.0, 0.0

    def step(self, number: int) -> None:
        """Count the pending time as useful or lost, because step `number` is done."""
        self._move("useful" if number > self.newest else "lost", self.pending)
        self.newest = max(self.newest, number)

    def fault(self, change: EpochChange, detect_s: float) -> None:
        """Count the last `detect_s` before a fault was detected as `detect`, except for the nodes
        outside the change."""
        stopped = change.nodes_before - len(change.outside)
        self._move("detect", min(self.pending, detect_s * stopped))

    def resumed(self, change: EpochChange) -> None:
        """Count the micro-batches that run again as lost, because the change is complete."""
        if not change.boundary:
            begun = max(change.microbatch + 1, change.rerun)
            self._move("lost", self.pending * change.rerun / begun)

    def _move(self, use: str, node_seconds: float) -> None:
        """Count pending node-seconds as `use`."""
        self.totals[use] += node_seconds
        self.pending -= node_seconds


def _use(state: JobState) -> str:
    """Return the present use of the plan's nodes."""
    change = state.change
    match state.phase:
        case JobPhase.RUNNING:
            return "transfer" if change is not None else "useful"
        case JobPhase.HALTING:
            return "useful" if change is not None and change.boundary else "plan"
        case JobPhase.INSTALLING:
            return "transfer"
        case JobPhase.WAITING | JobPhase.LAUNCHED:
            return "plan"
        case _:
            return "idle"


def step_entry(done: StepDone) -> dict[str, Any]:
    """Return the figures of one step for the event log."""
    return {
        "epoch": done.epoch,
        "step": done.record.step,
        "loss": done.record.loss,
        "grad_norm": done.record.grad_norm,
        "clip": done.record.clip,
        "lr": done.lr,
        "seconds": round(done.seconds, 5),
        "tokens": done.tokens,
        "ledgers": done.record.ledgers,
    }


def evaluation_entries(evaluation: EvaluationResult | None) -> tuple[LogEntry, ...]:
    """Return the log entry of an evaluation; (): none was due."""
    if evaluation is None:
        return ()
    data = {
        "epoch": evaluation.epoch,
        "step": evaluation.step,
        "loss": evaluation.loss,
        "figures": {figure.name: figure.value for figure in evaluation.figures},
        "microbatches": evaluation.microbatches,
        "seconds": round(evaluation.seconds, 5),
    }
    return (LogEntry("evaluation", data),)


def nonfinite_entries(record: StepRecord | None, *, stops: bool = False) -> tuple[LogEntry, ...]:
    """Return the log entry of a step whose gradient norm is infinite or NaN; (): it is finite.

    `stops`: the job ends because of it.
    """
    if record is None or isfinite(record.grad_norm):
        return ()
    action = OnNonfinite.SKIP if record.skipped else OnNonfinite.CONTINUE
    data = {
        "step": record.step,
        "grad_norm": record.grad_norm,
        "loss": record.loss,
        "layers": list(record.nonfinite),
        "action": (OnNonfinite.STOP if stops else action).value,
    }
    return (LogEntry("nonfinite", data),)


def recovery_entry(event: ChangeCompleted, fault_at: float | None) -> dict[str, Any]:
    """Return the figures of one epoch change for summary.json.

    Args:
        event: the completed change.
        fault_at: time of the injected fault, in seconds since 1970; None: none was injected.

    detect_s: from the fault to the decision to halt. halt_s: from that decision until all nodes
    halted. decide_s: from that decision until the plan was sent. transfer_s, rebuild_s: of the
    slowest worker. total_s: from the fault to the first computed micro-batch. pause_s: from the end
    of the last step to the first micro-batch after a planned change; 0 for other changes.
    """
    change = event.change
    planned = change.boundary
    start = change.began - change.detect_s
    if fault_at is not None and fault_at <= change.began and not planned:
        start = fault_at
    return {
        "step": change.step,
        "microbatch": change.microbatch,
        "cause": change.cause,
        "cause_kinds": [cause.kind.value for cause in change.causes],
        "planned": planned,
        "epoch": change.epoch,
        "nodes_before": change.nodes_before,
        "nodes_after": event.nodes_after,
        "detect_s": round(change.began - start, 4),
        "decide_s": round(change.decided - change.began, 4),
        "halt_s": round(change.halted - change.began, 4),
        "transfer_s": round(event.transfer_s, 4),
        "rebuild_s": round(event.rebuild_s, 4),
        "total_s": round(event.resumed_at - start, 4),
        "pause_s": round(event.resumed_at - change.paused, 4) if planned and change.paused else 0.0,
        "microbatches_lost": len(change.replayed),
        "microbatches_replayed": len(change.replayed),
        "microbatches_rerun": change.rerun,
        "microbatches_partial": change.partial,
        "state_source": change.state_source,
        "network_bytes": change.network_bytes,
        "reason": change.reason,
    }
