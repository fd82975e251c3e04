"""The page of a replay: one file, nothing loaded from elsewhere; the same replay, the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_sim.replay.replay import ORACLE, Mean, Run, Summary
from elastic_sim.report import facts
from elastic_sim.report.charts import (
    WINDOWS,
    Mark,
    Scale,
    area,
    duration,
    round_step,
    steps_path,
    throughput,
    time_marks,
    value_marks,
)
from elastic_sim.report.headline import headline
from elastic_sim.report.pages import page, trusted
from elastic_sim.report.pipelines import pictures
from elastic_sim.report.words import command_line
from elastic_sim.steps.engine import Outcome
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.traces.statistics import counts
from elastic_sim.traces.trace import ADD, Trace

WIDTH, LEFT, RIGHT = 1120.0, 150.0, 20.0
NODES_HIGH, ROW_HIGH, GAP, FOOT = 84.0, 62.0, 22.0, 32.0
"""Of the chart over time, in pixels."""
DECISIONS = 300
"""Of a policy, at most."""


@dataclass(frozen=True, slots=True)
class Line:
    """A policy in the table and the bars."""

    name: str
    index: int
    """Its colour."""
    ours: bool
    model: bool
    what: str
    samples_per_s: str
    goodput: str
    cost: str
    per_million: str
    best: bool
    bar: float
    low: float
    high: float
    """Goodput and its interval, as shares of the widest bar."""
    time: tuple[tuple[str, float], ...]
    """Percent by use."""
    changes: str


@dataclass(frozen=True, slots=True)
class Strip:
    """A policy in the chart over time."""

    name: str
    index: int
    top: float
    base: float
    path: str
    filled: str
    behind: str
    """The oracle's."""
    changes: tuple[tuple[float, str], ...]
    boxes: tuple[tuple[float, float, str], ...]
    """(left, width, text): of each window."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Of one seed."""

    seed: int
    width: float
    height: float
    left: float
    right: float
    base: float
    """Of the lowest row."""
    nodes: Strip
    nodes_marks: tuple[Mark, ...]
    losses: tuple[tuple[float, str], ...]
    strips: tuple[Strip, ...]
    rate_marks: tuple[Mark, ...]
    """Heights above a row's base."""
    times: tuple[Mark, ...]
    window: str


@dataclass(frozen=True, slots=True)
class Choices:
    """What a policy decided, in one run."""

    name: str
    index: int
    count: int
    rows: tuple[tuple[str, int, str, str, str], ...]
    """(when, nodes, plan, pause, reason)."""


def report(scenario: Scenario, found: Sequence[Summary], policies: Sequence[str], seeds: int) -> str:
    """The page. Runs must have kept their outcomes; `found` is without the oracle unless it was asked for."""
    world = scenario.world()
    first = [one.runs[0] for one in found]
    trace = scenario.trace_of(first[0].seed)
    ours = next((run for run in first if facts.about(run.policy).ours), None)
    return page(
        "replay.html",
        {
            "title": facts.title(scenario, world),
            "headline": headline(found),
            "lines": lines(found),
            "uses": [use.value for use in Use],
            "chart": chart(trace, first),
            "choices": [choices(i, run) for i, run in enumerate(first)],
            "pipelines": [
                (picture.title, picture.told, trusted(picture.svg), picture.least)
                for picture in pictures(world, ours)
            ],
            "setting": facts.setting(scenario, world),
            "constants": facts.constants(world.physics),
            "abouts": [(told, facts.is_model(told)) for told in (facts.about(name) for name in policies)],
            "seeds": seeds,
            "command": command_line(scenario, policies, seeds),
            "version": facts.PROGRAM,
        },
    )


# ---- the table ----


def lines(found: Sequence[Summary]) -> list[Line]:
    widest = max([1e-9, *(one.goodput.value + one.goodput.margin for one in found)])
    real = [one for one in found if one.policy not in (ORACLE, "ceiling")]
    best = max((one.goodput.value for one in real), default=0.0)
    made = []
    for i, one in enumerate(found):
        told, goodput = facts.about(one.policy), one.goodput
        made.append(
            Line(
                name=one.policy,
                index=i,
                ours=told.ours,
                model=facts.is_model(told),
                what=told.what,
                samples_per_s=mean(one.samples_per_s),
                goodput=mean(Mean(100 * goodput.value, 100 * goodput.margin), 1, " %"),
                cost=mean(one.cost, 0, "", "$"),
                per_million=mean(
                    one.cost_per_million, 0 if one.cost_per_million.value >= 100 else 2, "", "$"
                ),
                best=one in real and goodput.value == best,
                bar=goodput.value / widest,
                low=max(0.0, goodput.value - goodput.margin) / widest,
                high=(goodput.value + goodput.margin) / widest,
                time=tuple((use.value, round(100 * one.time[use.value], 2)) for use in Use),
                changes=f"{sum(run.changes for run in one.runs) / len(one.runs):.0f}",
            )
        )
    return made


def mean(value: Mean, digits: int | None = None, unit: str = "", before: str = "") -> str:
    """12.6 ± 0.3; with `digits` after the point, else with four in all."""
    if not math.isfinite(value.value):
        return "none made"
    shown = f"{value.value:,.{digits}f}" if digits is not None else f"{value.value:.4g}"
    margin = f"{value.margin:,.{digits}f}" if digits is not None else f"{value.margin:.2g}"
    return f"{before}{shown}{unit if not value.margin else ''}" + (
        f" ± {margin}{unit}" if value.margin else ""
    )


# ---- over time ----


def chart(trace: Trace, runs: Sequence[Run]) -> Chart:
    """Nodes, and a row a policy, under one axis of time."""
    across = Scale(0.0, trace.end_s, LEFT, WIDTH - RIGHT)
    window = round_step(trace.end_s, WINDOWS)
    rates = [throughput(kept(run), window) for run in runs]
    oracle = next((r for run, r in zip(runs, rates, strict=True) if run.policy == ORACLE), None)
    most = max((rate for row in rates for rate in row), default=0.0) or 1.0
    up = Scale(0.0, most, 0.0, ROW_HIGH)
    nodes = counts(trace)
    tallest = max(n for _, n in nodes) or 1
    top = 20.0
    level = Scale(0.0, tallest, top + NODES_HIGH, top)
    points = [(across.at(at), level.at(n)) for at, n in nodes]
    strip = Strip(
        "nodes", 0, top, top + NODES_HIGH, steps_path(points, WIDTH - RIGHT),
        area(points, WIDTH - RIGHT, top + NODES_HIGH), "", (), (),
    )  # fmt: skip
    strips = []
    top += NODES_HIGH + GAP
    for i, (run, row) in enumerate(zip(runs, rates, strict=True)):
        strips.append(_strip(i, run, row, oracle, across, up, window, top))
        top += ROW_HIGH + GAP
    return Chart(
        seed=runs[0].seed,
        width=WIDTH,
        height=top - GAP + FOOT,
        left=LEFT,
        right=WIDTH - RIGHT,
        base=top - GAP,
        nodes=strip,
        nodes_marks=tuple(value_marks(tallest, level, 3)),
        losses=tuple(_losses(trace, across)),
        strips=tuple(strips),
        rate_marks=tuple(value_marks(most, up, 3)),
        times=tuple(time_marks(trace.end_s, across)),
        window=duration(window),
    )


def _strip(
    index: int,
    run: Run,
    row: Sequence[float],
    oracle: Sequence[float] | None,
    across: Scale,
    up: Scale,
    window: float,
    top: float,
) -> Strip:
    base, end = top + ROW_HIGH, WIDTH - RIGHT
    points = [(across.at(i * window), round(base - up.at(rate), 1)) for i, rate in enumerate(row)]
    behind = [(across.at(i * window), round(base - up.at(rate), 1)) for i, rate in enumerate(oracle or ())]
    edges = [*(x for x, _ in points), end]
    return Strip(
        name=run.policy,
        index=index,
        top=top,
        base=base,
        path=steps_path(points, end),
        filled=area(points, end, base),
        behind=area(behind, end, base) if run.policy != ORACLE else "",
        changes=tuple(
            (
                across.at(decision.at / 1000),
                f"{clock(decision.at / 1000)}: {decision.change.reason or 'another plan'}"[:160],
            )
            for decision in kept(run).decisions[1:]
        ),
        boxes=tuple(
            (edges[i], round(edges[i + 1] - edges[i], 1), f"{clock(i * window)}: {rate:.4g} samples/s")
            for i, rate in enumerate(row)
        ),
    )


def _losses(trace: Trace, across: Scale) -> list[tuple[float, str]]:
    found: dict[float, list[str]] = {}
    for event in trace.events:
        if event.kind != ADD:
            found.setdefault(event.seconds, []).append(event.node)
    return [(across.at(at), f"{clock(at)}: {' '.join(names)} lost") for at, names in found.items()]


def clock(seconds: float) -> str:
    """1 d 02:03:04."""
    days, rest = divmod(int(seconds), 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def kept(run: Run) -> Outcome:
    assert run.outcome is not None, "replay(..., keep=True)"
    return run.outcome


def choices(index: int, run: Run) -> Choices:
    """Decisions of a run, the first ones of very many."""
    decisions = kept(run).decisions
    rows = []
    for decision in decisions[:DECISIONS]:
        change = decision.change
        pause = ", ".join(f"{use.value} {ms / 1000:.1f} s" for use, ms in change.pauses)
        if change.back_to >= 0:
            pause += "; " * bool(pause) + f"back to step {change.back_to}"
        plan = change.setup.text if change.setup is not None else "nothing runs"
        rows.append((clock(decision.at / 1000), decision.nodes, plan, pause, change.reason))
    return Choices(run.policy, index, len(decisions), tuple(rows))
