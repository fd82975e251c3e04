"""The page of a sweep: goodput over failure rates, a table of goodput, and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_sim.replay.replay import ORACLE, PolicySummary
from elastic_sim.report import assumptions, charts
from elastic_sim.report.assumptions import about
from elastic_sim.report.durations import duration
from elastic_sim.report.pages import chart, page
from elastic_sim.report.replay_page import format_cost, lead
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep.sweep import SweepRow, policies_of


def sweep_page(rows: Sequence[SweepRow], seeds: int, command: str) -> str:
    """Return the page; the same sweep gives the same bytes."""
    names = policies_of(rows)
    models = {row.scenario.model for row in rows}
    kinds = ", ".join(rows[0].scenario.nodes_of)
    title = (
        f"{_counted(len(models), 'model')}, {_counted(len(rows), 'scenario')}, "
        f"{_counted(len(names), 'policy', 'policies')} on {kinds} nodes"
    )
    curves = [
        (model, chart(figure, f"failure-rates-{i}", f"goodput of {model} over failure rates"))
        for i, (model, figure) in enumerate(_failure_rates(rows, names))
    ]
    labels = [_label(row.scenario) for row in rows]
    oracles = [str(row.of(ORACLE).samples_per_s) for row in rows]
    costs = [[_cost(row.of(name)) for name in names] for row in rows]
    settings = [assumptions.setting(row.scenario, row.scenario.world()) for row in rows]
    heat: Any = ""
    if names:
        goodputs = [[row.of(name).goodput for name in names] for row in rows]
        figure = charts.heat(labels, names, goodputs)
        heat = chart(figure, "goodput", "goodput by scenario and policy")
    return page(
        "sweep.html",
        {
            "title": title,
            "headline": _headline(rows),
            "names": names,
            "curves": curves,
            "heat": heat,
            "costs": list(zip(labels, oracles, costs, strict=True)),
            "settings": list(zip(labels, settings, strict=True)),
            "constants": assumptions.constants(rows[0].scenario.world().physics),
            "abouts": [about(name) for name in (*names, ORACLE)],
            "seeds": seeds,
            "command": command,
        },
    )


def _counted(n: int, one: str, several: str = "") -> str:
    return f"{n} {one if n == 1 else several or one + 's'}"


def _label(scenario: Scenario) -> str:
    model = Path(scenario.model).name if "model" in scenario.files() else scenario.model
    if scenario.market is None:
        return f"{model}, {scenario.name()}"
    return f"{model}, a loss every {duration(scenario.market.mtbf_s)}"


def _headline(rows: Sequence[SweepRow]) -> str:
    """Return a sentence: in how many scenarios our policy is ahead of all others, or behind."""
    names = [one.policy for one in rows[0].found]
    ours = next((name for name in names if about(name).ours), None)
    others = [name for name in names if about(name).model]
    if ours is None or not others:
        return "Goodput of each policy, as a share of what the oracle makes with the same nodes."
    won = lost = 0
    for row in rows:
        best = max((row.of(name) for name in others), key=lambda one: one.goodput.value)
        if all(run.samples for run in best.runs):
            ratio = lead(row.of(ours), best)
            won += ratio.value - ratio.margin > 0 and len(best.runs) > 1
            lost += ratio.value + ratio.margin < 0 and len(best.runs) > 1
        else:
            won += row.of(ours).goodput.value > 0
    goodputs = [row.of(ours).goodput.value for row in rows]
    reach = f"{100 * min(goodputs):.1f} to {100 * max(goodputs):.1f} %"
    return (
        f"Our policy reaches {reach} of the oracle's samples. Against the best of our models of "
        f"{_counted(len(others), 'other system')} it makes more in {won} of "
        f"{_counted(len(rows), 'scenario')}, less in {lost}; "
        f"in {len(rows) - won - lost} the seeds do not decide."
    )


def _failure_rates(rows: Sequence[SweepRow], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (model, figure) for each model with failure rates."""
    groups: dict[str, dict[float, SweepRow]] = {}
    for row in rows:
        if row.scenario.market is not None and names:
            groups.setdefault(row.scenario.model, {})[row.scenario.market.mtbf_s] = row
    found = []
    for model, by_rate in groups.items():
        goodputs = {name: [row.of(name).goodput for row in by_rate.values()] for name in names}
        figure = charts.failure_rates(list(by_rate), goodputs)
        found.append((Path(model).name if "/" in model else model, figure))
    return found


def _cost(one: PolicySummary) -> str:
    if math.isfinite(one.cost_per_million.value):
        return format_cost(one.cost_per_million)
    return "none made in some runs" if any(run.samples for run in one.runs) else "none made"
