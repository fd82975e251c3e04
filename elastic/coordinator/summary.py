"""What a run was, told from its event log alone: RUN_DIR/summary.json is a fold over RUN_DIR/events.jsonl.

A coordinator that took over in the middle therefore reports the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic.core.job import Recovered
from elastic.core.types import Plan
from elastic.planning.plan import format_plan


def recovery_entry(event: Recovered, fault_at: float | None) -> dict[str, Any]:
    """Figures of one epoch change. `fault_at`: when the fault was injected, if it was; seconds since 1970.

    detect_s: fault to the coordinator's decision to halt; decide_s: until the plan was sent (halting included);
    transfer_s and rebuild_s: the slowest worker's; total_s: fault to the first micro-batch computed. pause_s, of a
    planned change: from the end of the last step before it to the first micro-batch computed after it.
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


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Fold event-log entries into the summary of the run."""
    steps: dict[int, dict[str, Any]] = {}
    recoveries, plan, backup, end, checkpoints = [], "", {}, {}, []
    first = last = 0.0
    for entry in events:
        at = float(entry.get("at", 0.0))
        first, last = first or at, at
        match entry.get("kind"):
            case "step":
                steps[entry["step"]] = entry
            case "recovery":
                recoveries.append({k: v for k, v in entry.items() if k not in ("at", "kind")})
            case "plan":
                plan, backup = entry["text"], entry["backup"]
            case "checkpoint":
                checkpoints.append(entry["step"])
            case "lost-steps":
                for step in [s for s in steps if s >= entry["from_step"]]:
                    del steps[step]
            case "end":
                end = entry
    ordered = [steps[step] for step in sorted(steps)]
    seconds = sum(entry["seconds"] for entry in ordered)
    tokens = sum(entry["tokens"] for entry in ordered)
    return {
        "steps": len(ordered),
        "loss": [entry["loss"] for entry in ordered],
        "grad_norm": [entry["grad_norm"] for entry in ordered],
        "params_sha256": end.get("params_sha256", ""),
        "exit_code": end.get("code"),
        "reason": end.get("reason", ""),
        "wall_s": round(last - first, 3),
        "tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        "step_s": [entry["seconds"] for entry in ordered],
        "plan": plan,
        "backup": backup,
        "ledger": {
            "double": sum(entry["doubled"] for entry in ordered),
            "missing": sum(entry["missing"] for entry in ordered),
        },
        "checkpoints": checkpoints,
        "recoveries": recoveries,
    }


def plan_entry(plan: Plan) -> dict[str, Any]:
    """What the event log keeps of a plan."""
    return {
        "text": format_plan(plan),
        "backup": {"gradients": plan.gradients, "state": plan.state, "reason": plan.reason},
    }
