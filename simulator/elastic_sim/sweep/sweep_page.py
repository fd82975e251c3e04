"""The page of a sweep: goodput over failure rates, a heat table, costs; the same sweep, the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_sim.replay.replay import ORACLE, Mean, Summary
from elastic_sim.report import assumptions as facts
from elastic_sim.report import charts
from elastic_sim.report.durations import duration
from elastic_sim.report.pages import chart, page
from elastic_sim.report.replay_page import ahead, mean
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep.sweep import Row


def sweep_page(rows: Sequence[Row], seeds: int, command: str) -> str:
    """The page."""
    names = list(
        dict.fromkeys(one.policy for row in rows for one in row.found if one.policy != ORACLE)
    )
    models = {row.scenario.model for row in rows}
    kinds = ", ".join(rows[0].scenario.nodes_of)
    return page(
        "sweep.html",
        {
            "title": f"{counted(len(models), 'model')}, {counted(len(rows), 'scenario')}, "
            f"{counted(len(names), 'policy', 'policies')} on {kinds} nodes",
            "headline": headline(rows),
            "names": names,
            "curves": [
                (
                    title,
                    chart(figure, f"failure-rates-{i}", f"goodput of {title} over failure rates"),
                )
                for i, (title, figure) in enumerate(failure_rates(rows, names))
            ],
            "heat": chart(heat(rows, names), "goodput", "goodput by scenario and policy")
            if names
            else "",
            "costs": [
                (label(row.scenario), samples(row), [_cost(row.of(name)) for name in names])
                for row in rows
            ],
            "settings": [
                (label(row.scenario), facts.setting(row.scenario, row.scenario.world()))
                for row in rows
            ],
            "constants": facts.constants(rows[0].scenario.world().physics),
            "abouts": [(told, facts.is_model(told)) for told in map(facts.about, [*names, ORACLE])],
            "seeds": seeds,
            "command": command,
            "version": facts.PROGRAM,
        },
    )


def counted(n: int, one: str, more: str = "") -> str:
    return f"{n} {one if n == 1 else more or one + 's'}"


def label(scenario: Scenario) -> str:
    """A scenario in a table."""
    model = Path(scenario.model).name if "model" in scenario.files() else scenario.model
    if scenario.market is None:
        return f"{model}, {scenario.name()}"
    return f"{model}, a loss every {duration(scenario.market.mtbf_s)}"


def headline(rows: Sequence[Row]) -> str:
    """Where ours is ahead of all others, seed by seed, and where it is not."""
    names = [one.policy for one in rows[0].found]
    ours = next((name for name in names if facts.about(name).ours), None)
    others = [name for name in names if facts.is_model(facts.about(name))]
    if ours is None or not others:
        return "Goodput of each policy, as a share of what the oracle makes with the same nodes."
    won = lost = 0
    for row in rows:
        rivals = [row.of(name) for name in others]
        best = max(rivals, key=lambda one: one.goodput.value)
        if all(run.samples for run in best.runs):
            by = ahead(row.of(ours), best)
            won += by.value - by.margin > 0 and len(best.runs) > 1
            lost += by.value + by.margin < 0 and len(best.runs) > 1
        else:
            won += row.of(ours).goodput.value > 0
    goodputs = [row.of(ours).goodput.value for row in rows]
    unsure = len(rows) - won - lost
    reach = f"{100 * min(goodputs):.1f} to {100 * max(goodputs):.1f} %"
    return (
        f"Our policy reaches {reach} of the oracle's samples. Against the best of our models of "
        f"{counted(len(others), 'other system')} it makes more in {won} of {counted(len(rows), 'scenario')}, less in "
        f"{lost}; in {unsure} the seeds do not decide."
    )


# ---- charts ----


def failure_rates(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (model, figure) for each model that has failure rates."""
    found: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        if row.scenario.market is not None:
            found.setdefault(row.scenario.model, []).append((row.scenario.market.mtbf_s, row))
    return [
        (
            Path(model).name if "/" in model else model,
            charts.failure_rates([_curve(name, group) for name in names]),
        )
        for model, group in found.items()
        if names
    ]


def _curve(name: str, rows: Sequence[tuple[float, Row]]) -> charts.Curve:
    found = [row.of(name).goodput for _, row in rows]
    return charts.Curve(
        policy=name,
        rates_s=[rate for rate, _ in rows],
        goodput=[100 * one.value for one in found],
        margin=[100 * one.margin for one in found],
    )


def heat(rows: Sequence[Row], names: Sequence[str]) -> Any:
    """Goodput of each scenario and policy."""
    found = [[row.of(name).goodput for name in names] for row in rows]
    return charts.heat(
        [label(row.scenario) for row in rows],
        names,
        [[100 * one.value for one in line] for line in found],
        [[_percent(one) for one in line] for line in found],
    )


# ---- tables ----


def samples(row: Row) -> str:
    return mean(row.of(ORACLE).samples_per_s)


def _cost(one: Summary) -> str:
    value = one.cost_per_million
    if math.isfinite(value.value):
        return mean(value, 0 if value.value >= 100 else 2, "", "$")
    return "none made in some runs" if any(run.samples for run in one.runs) else "none made"


def _percent(value: Mean) -> str:
    return f"{100 * value.value:.1f}" + (f" ± {100 * value.margin:.1f}" if value.margin else "")
