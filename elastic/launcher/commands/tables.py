"""What is expected of a plan, as JSON values and as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from elastic.planning.capacity.report import PipelineReport, Report, UnitReport
from elastic.planning.capacity.svg import seconds
from elastic.planning.plan.plan import format_plan

GIB = float(1 << 30)
Alternatives = tuple[tuple[str, float], ...]
"""(what else was considered, seconds of a step; inf if memory is short)."""
MOST_ROWS = 64
"""Of a table for people; JSON has them all."""


def as_data(found: Report, alternatives: Alternatives = ()) -> dict[str, Any]:
    """The report as JSON values; times in seconds, shares from 0 to 1."""
    return {
        "plan": format_plan(found.plan),
        "reason": found.plan.reason,
        "step_s": found.step_s,
        "samples_per_s": found.samples_per_s,
        "tokens_per_s": found.tokens_per_s,
        "tail_s": found.tail_s,
        "stream_s": found.stream_s,
        "bubble": found.bubble,
        "short": short(found),
        "pipelines": [
            {
                "pipeline": index,
                "schedule": pipeline.schedule,
                "units": len(pipeline.units),
                "microbatches": pipeline.microbatches,
                "finish_s": pipeline.finish_s,
                "bubble": pipeline.bubble,
            }
            for index, pipeline in enumerate(found.pipelines)
        ],
        "stages": [
            {name: getattr(unit, name) for name in UnitReport.__slots__}
            for pipeline in found.pipelines
            for unit in pipeline.units
        ],
        "alternatives": [
            {"plan": text, "step_s": step_s if isfinite(step_s) else None} for text, step_s in alternatives
        ],
    }


def as_tables(found: Report, alternatives: Alternatives = ()) -> dict[str, Any]:
    """The report as lines and tables, for `as_text`."""
    whole = found.step_s or 1.0
    rates = {"samples/s": f"{found.samples_per_s:.4g}" if found.samples_per_s else ""}
    rates["tokens/s"] = f"{found.tokens_per_s:.5g}" if found.tokens_per_s else ""
    return {
        "step": seconds(found.step_s),
        **rates,
        "idle": f"{found.bubble:.1%} of the units' time, bubbles and tail together",
        "tail": f"{seconds(found.tail_s)} ({found.tail_s / whole:.1%} of the step) for reduction and update",
        "backup": f"{_backup(found)} ({found.stream_s / whole:.1%} of the step)",
        "memory": "; ".join(short(found)) or "fits everywhere",
        "plan": format_plan(found.plan) + "\n",
        "pipelines": _most(_pipeline_row(index, pipeline) for index, pipeline in enumerate(found.pipelines)),
        "stages": _most(_unit_row(unit) for pipeline in found.pipelines for unit in pipeline.units),
        "alternatives": [{"alternative": text, "step": _time(step_s)} for text, step_s in alternatives],
    }


def _backup(found: Report) -> str:
    scheme = f"{found.plan.gradients}+{found.plan.state}"
    return f"{scheme}; streaming gradients adds {seconds(found.stream_s)}"


def short(found: Report) -> list[str]:
    """Which units lack how much memory."""
    return [
        f"{unit.unit} lacks {(unit.memory_bytes - unit.limit_bytes) / GIB:.2f} GiB a worker"
        for pipeline in found.pipelines
        for unit in pipeline.units
        if 0 < unit.limit_bytes < unit.memory_bytes
    ]


def _most(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rows, and in the last one how many were left out."""
    found = list(rows)
    if len(found) <= MOST_ROWS:
        return found
    blank = dict.fromkeys(found[0], "")
    first = next(iter(blank))
    return [*found[:MOST_ROWS], {**blank, first: f"... {len(found) - MOST_ROWS} more: --json"}]


def _pipeline_row(index: int, pipeline: PipelineReport) -> dict[str, Any]:
    return {
        "pipeline": index,
        "schedule": pipeline.schedule,
        "units": len(pipeline.units),
        "micro-batches": pipeline.microbatches,
        "done after": seconds(pipeline.finish_s),
        "bubble": f"{pipeline.bubble:.1%}",
    }


def _unit_row(unit: UnitReport) -> dict[str, Any]:
    limit = f" of {unit.limit_bytes / GIB:.1f}" if unit.limit_bytes else ""
    return {
        "pipeline": unit.pipeline,
        "unit": unit.unit,
        "device": unit.device,
        "layers": unit.layers,
        "compute": seconds(unit.compute_s),
        "hop": seconds(unit.hop_s),
        "busy": f"{unit.busy:.1%}",
        "memory GiB": f"{unit.memory_bytes / GIB:.1f}{limit}",
        "recompute": unit.recompute,
    }


def _time(step_s: float) -> str:
    return seconds(step_s) if isfinite(step_s) else "too little memory"
