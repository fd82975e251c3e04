"""Computes the summary of a run (summary.json) from its event log alone.

So a coordinator that took over during the run can write the summary of the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic.core.job.state import JobPhase, JobState
from elastic.domain.types import JobSpec, Plan
from elastic.planning.plan.plan import format_plan
from elastic.planning.plan.shape import nearest_shape

PLAN_FIELDS = ("step", "reason", "todo", "partial", "promised")
"""Fields of a `plan` log entry that events.jsonl keeps."""


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run, from the entries of its event log."""
    steps: dict[int, dict[str, Any]] = {}
    recoveries, plan, backup, end, checkpoints = [], "", {}, {}, []
    by_step: dict[str, dict[int, dict[str, Any]]] = {"nonfinite": {}, "evaluation": {}}
    divergences, ledgers, wrong = [], 0, {"double": 0, "missing": 0}
    first = last = flops = peak_tflops = 0.0
    possible: dict[int, float] = {}  # operations that the plan could do during each step
    for entry in _distinct(events):
        at = float(entry.get("at", 0.0))
        first, last = first or at, at
        match entry.get("kind"):
            case "step":
                steps[entry["step"]] = entry
                possible[entry["step"]] = entry["seconds"] * peak_tflops * 1e12
            case "recovery":
                recoveries.append(_fields(entry))
            case "job":
                ledgers = entry.get("ledgers", 0)
                flops = entry.get("flops_per_microbatch", 0.0) * entry.get("microbatches", 0)
            case ("nonfinite" | "evaluation") as kind:
                by_step[kind][entry["step"]] = _fields(entry)
            case "divergence":
                divergences.append(_fields(entry))
            case "ledger":
                wrong = {name: wrong[name] + entry[name] for name in wrong}
            case "plan":
                plan, backup = entry["text"], entry["backup"]
                peak_tflops = entry.get("peak_tflops", 0.0)
            case "checkpoint":
                checkpoints.append(entry["step"])
            case "lost-steps":
                lost = entry["from_step"]
                steps = _kept("step", steps, lost)
                by_step = {kind: _kept(kind, known, lost) for kind, known in by_step.items()}
            case "end":
                end = entry
    ordered = _in_order(steps)
    seconds = sum(entry["seconds"] for entry in ordered)
    tokens = sum(entry["tokens"] for entry in ordered)
    return {
        "steps": len(ordered),
        "loss": [entry["loss"] for entry in ordered],
        "grad_norm": [entry["grad_norm"] for entry in ordered],
        "evaluations": _in_order(by_step["evaluation"]),
        "params_sha256": end.get("params_sha256", ""),
        "exit_code": end.get("code"),
        "reason": end.get("reason", ""),
        "wall_s": round(last - first, 3),
        "tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        "mfu": _utilisation(flops, [possible[entry["step"]] for entry in ordered]),
        "step_s": [entry["seconds"] for entry in ordered],
        "plan": plan,
        "backup": backup,
        "ledger": {
            **wrong,
            "proved": sum(0 < ledgers == entry.get("ledgers", 0) for entry in ordered),
        },
        "nonfinite": _in_order(by_step["nonfinite"]),
        "divergences": divergences,
        "checkpoints": checkpoints,
        "recoveries": recoveries,
    }


def _utilisation(flops: float, possible: Sequence[float]) -> float:
    """Return the utilisation of the devices: the operations of all steps, `flops` each, divided by
    those that were possible in the time of each step. 0: it is unknown."""
    known = all(possible)
    return round(flops * len(possible) / sum(possible), 4) if known and possible else 0.0


def _kept(kind: str, entries: dict[int, dict[str, Any]], lost: int) -> dict[int, dict[str, Any]]:
    """Return the entries that a return to step `lost` does not undo. An evaluation at that step
    comes before it."""
    end = lost + (kind == "evaluation")
    return {step: entry for step, entry in entries.items() if step < end}


def _in_order(entries: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries in the order of their steps."""
    return [entries[step] for step in sorted(entries)]


def _distinct(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the entries without later equal ones: a coordinator that is paused after a save writes
    its events although a successor has written them. Steps are counted by their numbers."""
    known = set[str]()
    for entry in events:
        text = "" if entry.get("kind") == "step" else json.dumps(entry)
        if text not in known:
            known.update([text] if text else [])
            yield entry


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("at", "kind")}


def job_entry(spec: JobSpec) -> dict[str, Any]:
    """Return the dimensions of the job for the event log."""
    return {
        "steps": spec.n_steps,
        "microbatches": spec.n_microbatches,
        "tokens_per_microbatch": spec.tokens_per_microbatch,
        "flops_per_microbatch": spec.flops_per_microbatch,
        "tp": spec.tp,
        "ledgers": spec.n_layers * spec.tp,
        "tied": spec.tied,
        "checkpoint_every": spec.checkpoint_every,
        "evaluate_every": spec.evaluate_every,
    }


def plan_entry(
    plan: Plan, entry: Mapping[str, Any], pipelines: str, peak_tflops: float
) -> dict[str, Any]:
    """Return the fields of a new plan in the event log.

    `entry`: data of its log entry. `pipelines`: the requested shape; the field `instead_of` is this
    shape if the plan has another. `peak_tflops`: that of its devices; 0: unknown.
    """
    return {
        "shape": plan_shape(plan),
        "instead_of": pipelines if nearest_shape(pipelines, plan) else "",
        "text": format_plan(plan),
        "backup": {"gradients": plan.gradients, "state": plan.state, "reason": plan.reason},
        "epoch": plan.epoch,
        "peak_tflops": peak_tflops,
        **{name: entry[name] for name in PLAN_FIELDS if name in entry},
    }


def plan_shape(plan: Plan) -> str:
    """Return the depths of the pipelines as text; "3+1": one has three stages, the other one."""
    return "+".join(str(len(p.stages)) for p in plan.pipelines)


def steps_done(state: JobState) -> int:
    """Return the number of steps that are known to be done. The reports of nodes come later than
    those of finished steps."""
    if state.phase is JobPhase.FINISHED and state.spec is not None:
        return state.spec.n_steps
    known = state.newest_step + 1
    if state.phase is JobPhase.INSTALLING:  # nodes may report steps that a fall-back has undone
        return known
    return max([known, *(member.report.step for member in state.members.values())])
