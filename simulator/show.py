"""What a replay says in the terminal and in JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from simulator.account import Use
from simulator.policies.base import About
from simulator.replay import Mean, Summary

USES = tuple(use.value for use in Use)


def as_json(trace: str, model: str, found: Sequence[Summary], **more: Any) -> dict[str, Any]:
    """{"trace", "model", "policies": {P: {"samples_per_s", "goodput", "cost", "time": {..}, ...}}}. Figures are means
    over seeds; `margins` holds half the widths of their 95 % intervals. Time is in shares of all node-seconds."""
    return {
        "trace": trace,
        "model": model,
        **more,
        "policies": {one.policy: _policy(one) for one in found},
    }


def _policy(one: Summary) -> dict[str, Any]:
    figures = {
        "samples_per_s": one.samples_per_s,
        "goodput": one.goodput,
        "cost": one.cost,
        "cost_per_million": one.cost_per_million,
    }
    return {
        **{name: finite(mean.value) for name, mean in figures.items()},
        "margins": {name: finite(mean.margin) for name, mean in figures.items()},
        "time": one.time,
        "seeds": [run.seed for run in one.runs],
        "node_s": sum(sum(run.time.values()) for run in one.runs) / len(one.runs),
    }


def finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def table(found: Sequence[Summary]) -> str:
    """A row a policy: figures with intervals, and the shares of node time."""
    head = ["policy", "samples/s", "goodput", "cost $", "$/M samples", *(f"{use} %" for use in USES)]
    rows = [
        [
            one.policy,
            str(one.samples_per_s),
            three(one.goodput),
            f"{one.cost.value:.0f}",
            f"{one.cost_per_million.value:.4g}",
            *(f"{100 * one.time[use]:.1f}" for use in USES),
        ]
        for one in found
    ]
    return aligned([head, *rows])


def three(mean: Mean) -> str:
    return f"{mean.value:.3f}" + (f" ± {mean.margin:.3f}" if mean.margin else "")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; the first one to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def policies(found: Sequence[About]) -> str:
    """A paragraph each: what it is, and where its rules and constants come from."""
    lines = []
    for about in found:
        mark = "" if about.ours or about.name in ("oracle", "ceiling") else " (a model of it)"
        lines += [f"{about.name}{mark}", f"    {about.what}", f"    {about.source}"]
    return "\n".join(lines)
