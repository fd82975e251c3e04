"""The page of a sweep: goodput over failure rates, a heat table, costs; the same sweep, the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from elastic_sim.replay.replay import ORACLE, Mean, Summary
from elastic_sim.report import facts
from elastic_sim.report.charts import Mark, Scale, duration, log_marks, value_marks
from elastic_sim.report.headline import ahead
from elastic_sim.report.pages import page
from elastic_sim.report.report import mean
from elastic_sim.steps.scenario import Scenario
from elastic_sim.sweep.sweep import Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 540.0, 300.0, 46.0, 18.0, 12.0, 44.0
"""Of a chart, in pixels."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A policy in a chart."""

    name: str
    index: int
    path: str
    points: tuple[tuple[float, float, float, float, str], ...]
    """(x, y, end of the interval, its other end, text)"""


@dataclass(frozen=True, slots=True)
class Chart:
    """One model."""

    title: str
    width: float
    height: float
    left: float
    right: float
    top: float
    base: float
    curves: tuple[Curve, ...]
    rates: tuple[Mark, ...]
    shares: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Of the heat table and the table of costs."""

    text: str
    shade: int
    """Percent."""
    best: bool
    cost: str


def sweep_report(rows: Sequence[Row], seeds: int, command: str) -> str:
    """The page."""
    names = list(dict.fromkeys(one.policy for row in rows for one in row.found if one.policy != ORACLE))
    colours = {name: i for i, name in enumerate(names)}
    models = {row.scenario.model for row in rows}
    kinds = ", ".join(rows[0].scenario.nodes_of)
    return page(
        "sweep.html",
        {
            "title": f"{counted(len(models), 'model')}, {counted(len(rows), 'scenario')}, "
            f"{counted(len(names), 'policy', 'policies')} on {kinds} nodes",
            "headline": headline(rows),
            "names": [(name, colours[name], facts.about(name).ours) for name in names],
            "charts": charts(rows, colours),
            "table": [(label(row.scenario), samples(row), cells(row, names)) for row in rows],
            "settings": [
                (label(row.scenario), facts.setting(row.scenario, row.scenario.world())) for row in rows
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


def charts(rows: Sequence[Row], colours: dict[str, int]) -> list[Chart]:
    """One a model that has failure rates."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.scenario.market is not None:
            found.setdefault(row.scenario.model, []).append(row)
    return [_chart(model, group, colours) for model, group in found.items()]


def _chart(model: str, rows: Sequence[Row], colours: dict[str, int]) -> Chart:
    rates = [_rate(row) for row in rows]
    low, high = log10(min(rates)), log10(max(rates))
    around = 0.0 if high > low else 1.0
    across = Scale(low - around, high + around, LEFT + 14, WIDTH - RIGHT - 14)
    most = max([1.0, *(one.goodput.value for row in rows for one in row.found)])
    base = HEIGHT - FOOT
    up = Scale(0.0, most, base, TOP)
    return Chart(
        title=Path(model).name if "/" in model else model,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        base=base,
        curves=tuple(_curve(name, i, rows, across, up, most) for name, i in colours.items()),
        rates=tuple(log_marks(rates, across)),
        shares=tuple(Mark(mark.at, f"{100 * float(mark.text):g}") for mark in value_marks(most, up, 5)),
    )


def _rate(row: Row) -> float:
    assert row.scenario.market is not None
    return row.scenario.market.mtbf_s


def _curve(name: str, index: int, rows: Sequence[Row], across: Scale, up: Scale, most: float) -> Curve:
    points = []
    for row in rows:
        found = row.of(name).goodput
        ends = max(0.0, found.value - found.margin), min(most, found.value + found.margin)
        text = f"{name}, {label(row.scenario)}: {_percent(found)} %"
        points.append(
            (across.at(log10(_rate(row))), up.at(found.value), up.at(ends[0]), up.at(ends[1]), text)
        )
    path = "L".join(f"{x:g},{y:g}" for x, y, *_ in points)
    return Curve(name, index, f"M{path}", tuple(points))


# ---- tables ----


def samples(row: Row) -> str:
    return mean(row.of(ORACLE).samples_per_s)


def cells(row: Row, names: Sequence[str]) -> list[Cell]:
    found = [row.of(name) for name in names]
    best = max((one.goodput.value for one in found), default=0.0)
    return [
        Cell(
            text=_percent(one.goodput),
            shade=round(70 * min(1.0, max(0.0, one.goodput.value)) ** 2),
            best=one.goodput.value == best and best > 0,
            cost=_cost(one),
        )
        for one in found
    ]


def _cost(one: Summary) -> str:
    value = one.cost_per_million
    if math.isfinite(value.value):
        return mean(value, 0 if value.value >= 100 else 2, "", "$")
    return "none made in some runs" if any(run.samples for run in one.runs) else "none made"


def _percent(value: Mean) -> str:
    return f"{100 * value.value:.1f}" + (f" ± {100 * value.margin:.1f}" if value.margin else "")
