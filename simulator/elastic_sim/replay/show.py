"""Formats results for the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from elastic_sim.replay.advise import Offer
from elastic_sim.replay.replay import Mean, PolicySummary
from elastic_sim.steps.policies.base import PolicyDescription
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use


def as_json(
    scenario: Scenario, scenario_json: dict[str, Any], found: Sequence[PolicySummary]
) -> dict[str, Any]:
    """Return {"trace", "model", "scenario", "policies": {P: {"samples_per_s", "goodput", ...}}}.

    Figures are means over seeds; `margins` has half the widths of their 95 % intervals. Times are
    fractions of all node-seconds.
    """
    return {
        "trace": scenario.name(),
        "model": scenario.model,
        "scenario": scenario_json,
        "policies": {one.policy: _policy(one) for one in found},
    }


def _policy(one: PolicySummary) -> dict[str, Any]:
    figures = _figures(one, "samples_per_s", "goodput", "cost", "cost_per_million")
    return {
        **{name: mean["value"] for name, mean in figures.items()},
        "margins": {name: mean["margin"] for name, mean in figures.items()},
        "time": one.time,
        "seeds": [run.seed for run in one.runs],
        "node_s": sum(run.node_s for run in one.runs) / len(one.runs),
    }


def _figures(one: PolicySummary | Offer, *names: str) -> dict[str, dict[str, float | None]]:
    """Return {"value", "margin"} of each `Mean` named."""
    means: dict[str, Mean] = {name: getattr(one, name) for name in names}
    return {
        name: {"value": _finite(mean.value), "margin": _finite(mean.margin)}
        for name, mean in means.items()
    }


def _finite(value: float) -> float | None:
    """Return the value, or None if it is infinite, which JSON cannot express."""
    return value if math.isfinite(value) else None


def table(found: Sequence[PolicySummary]) -> str:
    """Return a table by policy: figures with intervals, fractions of node time. "-": no prices."""
    shares = (f"{use} %" for use in Use)
    head = ["policy", "samples/s", "goodput", "cost $", "$/M samples", *shares]
    rows = [
        [
            one.policy,
            str(one.samples_per_s),
            f"{one.goodput:.3f}",
            f"{one.cost.value:.0f}" if one.cost.value else "-",
            f"{one.cost_per_million.value:.4g}" if one.cost.value else "-",
            *(f"{100 * one.time[use]:.1f}" for use in Use),
        ]
        for one in found
    ]
    return aligned([head, *rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows with aligned columns. The first column is left-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def policies(found: Sequence[PolicyDescription]) -> str:
    """Return a paragraph per policy: name, behaviour, source."""
    lines = []
    for about in found:
        mark = " (a model of it)" if about.model else ""
        lines += [f"{about.name}{mark}", f"    {about.what}", f"    {about.source}"]
    return "\n".join(lines)


def advice(found: Sequence[Offer], budget: float) -> str:
    """Return the best offer in words, and all offers in a table. `found`: best first."""
    head = "mix", "policy", "samples/s", "goodput", "$/h", "$/M samples", "$/M tokens", "idle %", ""
    rows = [
        [
            str(one.mix),
            one.policy,
            str(one.samples_per_s),
            f"{one.goodput:.3f}",
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
    """Return the offers as JSON values, in the given order."""
    return [
        {
            "on_demand": one.mix.on_demand,
            "spot": one.mix.spot,
            "policy": one.policy,
            "within_budget": one.within,
            "idle": one.idle,
            "by_trace": {
                name: {"samples_per_s": rate, "per_million_tokens": _finite(cost)}
                for name, rate, cost in one.by_trace
            },
            **_figures(one, "samples_per_s", "goodput", "dollars_per_h"),
            **_figures(one, "per_million_samples", "per_million_tokens"),
            "spares": one.spares,
            "backup": one.backup,
            "backup_share": one.backup_share,
        }
        for one in found
    ]
