"""Formats results for the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from elastic_sim.replay.advise import Offer
from elastic_sim.replay.replay import Mean, PolicySummary
from elastic_sim.steps.policies.base import PolicyDescription
from elastic_sim.steps.time_accounting import Use

USES = tuple(use.value for use in Use)


def as_json(trace: str, model: str, found: Sequence[PolicySummary], **more: Any) -> dict[str, Any]:
    """{"trace", "model", "policies": {P: {"samples_per_s", "goodput", "cost", "time": {..}, ...}}}.

    Figures are means over seeds; `margins` has half the widths of their 95 % intervals. Times are
    shares of all node-seconds.
    """
    return {
        "trace": trace,
        "model": model,
        **more,
        "policies": {one.policy: _policy(one) for one in found},
    }


def _policy(one: PolicySummary) -> dict[str, Any]:
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
    """The value, or None if it is infinite, which JSON cannot express."""
    return value if math.isfinite(value) else None


def table(found: Sequence[PolicySummary]) -> str:
    """One row per policy: figures with intervals, and shares of node time. No costs without
    prices."""
    head = [
        "policy",
        "samples/s",
        "goodput",
        "cost $",
        "$/M samples",
        *(f"{use} %" for use in USES),
    ]
    rows = [
        [
            one.policy,
            str(one.samples_per_s),
            three(one.goodput),
            f"{one.cost.value:.0f}" if one.cost.value else "-",
            f"{one.cost_per_million.value:.4g}" if one.cost.value else "-",
            *(f"{100 * one.time[use]:.1f}" for use in USES),
        ]
        for one in found
    ]
    return aligned([head, *rows])


def three(mean: Mean) -> str:
    return f"{mean.value:.3f}" + (f" ± {mean.margin:.3f}" if mean.margin else "")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the first one is left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def policies(found: Sequence[PolicyDescription]) -> str:
    """A paragraph per policy: name, behaviour, source."""
    lines = []
    for about in found:
        mark = "" if about.ours or about.name in ("oracle", "ceiling") else " (a model of it)"
        lines += [f"{about.name}{mark}", f"    {about.what}", f"    {about.source}"]
    return "\n".join(lines)


def advice(found: Sequence[Offer], budget: float) -> str:
    """The best offer in words, and all offers in a table. `found`: best first."""
    head = [
        "mix",
        "policy",
        "samples/s",
        "goodput",
        "$/h",
        "$/M samples",
        "$/M tokens",
        "idle %",
        "",
    ]
    rows = [
        [
            str(one.mix),
            one.policy,
            str(one.samples_per_s),
            three(one.goodput),
            str(one.dollars_per_h),
            str(one.per_million_samples),
            str(one.per_million_tokens),
            f"{100 * one.idle:.1f}",
            "" if one.within else "over the budget",
        ]
        for one in found
    ]
    best = found[0]
    if not best.within:
        least = min(found, key=lambda one: one.dollars_per_h.value)
        text = (
            f"Nothing fits {budget:g} dollars per hour: the cheapest, {least.mix}, costs "
            f"{least.dollars_per_h}."
        )
    elif math.isinf(best.per_million_samples.value):
        text = "None of these mixes ever has enough nodes for the model."
    else:
        text = (
            f"Rent {best.mix}, with {best.policy}: {best.samples_per_s} samples/s for "
            f"{best.dollars_per_h} dollars per hour, {best.per_million_tokens} dollars per million "
            f"tokens (± 95 % over {'traces' if len(best.by_trace) > 1 else 'seeds'})."
        )
        if len(best.by_trace) > 1:
            text += "".join(
                f"\n  {name}: {rate:.4g} samples/s, {cost:.4g} dollars per million tokens"
                for name, rate, cost in best.by_trace
            )
    return f"{text}\n\n{aligned([head, *rows])}"


def offers_json(found: Sequence[Offer]) -> list[dict[str, Any]]:
    """The offers as JSON, in the given order."""
    return [
        {
            "on_demand": one.mix.on_demand,
            "spot": one.mix.spot,
            "policy": one.policy,
            "within_budget": one.within,
            "idle": one.idle,
            "by_trace": {
                name: {"samples_per_s": rate, "per_million_tokens": finite(cost)}
                for name, rate, cost in one.by_trace
            },
            **{
                name: {"value": finite(mean.value), "margin": finite(mean.margin)}
                for name, mean in (
                    ("samples_per_s", one.samples_per_s),
                    ("goodput", one.goodput),
                    ("dollars_per_h", one.dollars_per_h),
                    ("per_million_samples", one.per_million_samples),
                    ("per_million_tokens", one.per_million_tokens),
                )
            },
        }
        for one in found
    ]
