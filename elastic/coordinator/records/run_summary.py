"""Computes the summary of a run (summary.json) from its event log alone.

So a coordinator that took over during the run can write the summary of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic.domain.types import Plan
from elastic.planning.plan.plan import format_plan


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run, from the entries of its event log."""
    steps: dict[int, dict[str, Any]] = {}
    recoveries, plan, backup, end, checkpoints = [], "", {}, {}, []
    nonfinite: dict[int, dict[str, Any]] = {}
    divergences, ledgers, wrong = [], 0, {"double": 0, "missing": 0}
    first = last = 0.0
    for entry in events:
        at = float(entry.get("at", 0.0))
        first, last = first or at, at
        match entry.get("kind"):
            case "step":
                steps[entry["step"]] = entry
            case "recovery":
                recoveries.append(_fields(entry))
            case "job":
                ledgers = entry.get("ledgers", 0)
            case "nonfinite":
                nonfinite[entry["step"]] = _fields(entry)
            case "divergence":
                divergences.append(_fields(entry))
            case "ledger":
                wrong = {name: wrong[name] + entry[name] for name in wrong}
            case "plan":
                plan, backup = entry["text"], entry["backup"]
            case "checkpoint":
                checkpoints.append(entry["step"])
            case "lost-steps":
                lost = entry["from_step"]
                steps = {step: kept for step, kept in steps.items() if step < lost}
                nonfinite = {step: kept for step, kept in nonfinite.items() if step < lost}
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
            **wrong,
            "proved": sum(0 < ledgers == entry.get("ledgers", 0) for entry in ordered),
        },
        "nonfinite": [nonfinite[step] for step in sorted(nonfinite)],
        "divergences": divergences,
        "checkpoints": checkpoints,
        "recoveries": recoveries,
    }


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("at", "kind")}


def plan_entry(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan in the event log."""
    return {
        "text": format_plan(plan),
        "backup": {"gradients": plan.gradients, "state": plan.state, "reason": plan.reason},
    }


def plan_shape(plan: Plan) -> str:
    """Return the number of stages of each pipeline, such as 3+1."""
    return "+".join(str(len(p.stages)) for p in plan.pipelines)
