"""Where the nodes' time goes, as the coordinator sees it: every node is in one use at every moment.

node-seconds = useful + detect + plan + transfer + lost + idle, in the words of the simulator's account (it also knows
`redundant`: time that backups take inside of a step; here that is part of `useful`).

Whether time was useful is known afterwards. What nodes compute is put aside until the step is done (useful, or lost if
that step was done before and fell back to a checkpoint) or a fault ends it: then the last of it, from the fault to the
decision, is `detect`, and of the rest the share of the micro-batches that have to run again is `lost`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.core.job.state import ChangeCompleted, EpochChange, JobPhase, JobState

NODE_TIME_USES = ("useful", "detect", "plan", "transfer", "lost", "idle")


@dataclass(slots=True)
class NodeTimeAccount:
    """Adds up node-seconds. `step` and `fault` are told what happened, `advance` that time passes."""

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NODE_TIME_USES, 0.0))
    """Node-seconds by use; they only grow."""
    pending: float = 0.0
    """Node-seconds of computing of which it is not known yet what they were good for."""
    newest: int = -1
    """Newest step that was ever done."""
    _at: float = 0.0

    def advance(self, state: JobState, now: float) -> None:
        """Count the time up to `now`, through which the job was in `state`."""
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
        if use == "useful":
            self.pending += used * since
        else:
            self.totals[use] += used * since

    def forget(self) -> None:
        """Time passed of which nothing is known, and what was put aside with it."""
        self.pending, self._at = 0.0, 0.0

    def step(self, number: int) -> None:
        """Step `number` is done."""
        use = "useful" if number > self.newest else "lost"
        self.newest = max(self.newest, number)
        self._settle(use)

    def fault(self, change: EpochChange, detect_s: float) -> None:
        """Training was ended by a fault, not at the end of a step, `detect_s` before it was known."""
        late = min(self.pending, detect_s * change.nodes_before)
        self.totals["detect"] += late
        self.pending -= late

    def resumed(self, change: EpochChange) -> None:
        """The change is complete: of the step's computing before it, what runs again was lost."""
        begun = max(change.microbatch + 1, change.rerun)
        lost = 0.0 if change.boundary else self.pending * change.rerun / begun
        self.totals["lost"] += lost
        self.pending -= lost

    def _settle(self, use: str) -> None:
        self.totals[use] += self.pending
        self.pending = 0.0


def _use(state: JobState) -> str:
    """What nodes of the plan do."""
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


def recovery_entry(event: ChangeCompleted, fault_at: float | None) -> dict[str, Any]:
    """Figures of one epoch change. `fault_at`: when the fault was injected, if it was; seconds since 1970.

    detect_s: fault to the coordinator's decision to halt, as of when the news came to it; decide_s: until the plan was
    sent (halting included); transfer_s and rebuild_s: the slowest worker's; total_s: fault to the first micro-batch
    computed. pause_s, of a planned change: from the end of the last step before it to the first micro-batch computed
    after it.
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
