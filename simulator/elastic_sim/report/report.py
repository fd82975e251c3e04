"""The page of a replay: one file, nothing loaded from elsewhere; the same replay, the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_sim.replay.replay import ORACLE, Mean, PolicyRun, PolicySummary
from elastic_sim.report import charts, facts
from elastic_sim.report.durations import clock, duration, round_step
from elastic_sim.report.headline import headline
from elastic_sim.report.pages import chart, page
from elastic_sim.report.pipelines import pictures
from elastic_sim.report.throughput import throughput
from elastic_sim.report.words import command_line
from elastic_sim.steps.engine import SimulationResult
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.traces.statistics import node_counts
from elastic_sim.traces.trace import ADD, Trace

WINDOWS = 150
"""Most windows of a throughput curve."""
DECISIONS = 300
"""Of a policy, at most."""


@dataclass(frozen=True, slots=True)
class Line:
    """A policy in the table."""

    name: str
    colour: str
    ours: bool
    model: bool
    samples_per_s: str
    goodput: str
    cost: str
    per_million: str
    best: bool
    changes: str


@dataclass(frozen=True, slots=True)
class Choices:
    """What a policy decided, in one run."""

    name: str
    colour: str
    count: int
    rows: tuple[tuple[str, int, str, str, str], ...]
    """(when, nodes, plan, pause, reason)."""


def report(scenario: Scenario, found: Sequence[PolicySummary], policies: Sequence[str], seeds: int) -> str:
    """The page. Runs must have kept their outcomes; `found` is without the oracle unless it was asked for."""
    world = scenario.world()
    first = [one.runs[0] for one in found]
    trace = scenario.trace_of(first[0].seed)
    window = round_step(trace.end_s, WINDOWS)
    ours = next((run for run in first if facts.about(run.policy).ours), None)
    return page(
        "replay.html",
        {
            "title": facts.title(scenario, world),
            "headline": headline(found),
            "lines": lines(found),
            "goodput": chart(goodput(found), "goodput", "goodput of each policy"),
            "uses": chart(uses(found), "uses", "node time by use, for each policy"),
            "over_time": chart(
                over_time(trace, first, window), "over-time", "nodes and throughput over time"
            ),
            "seed": first[0].seed,
            "window": duration(window),
            "choices": [choices(i, run) for i, run in enumerate(first)],
            "pipelines": [
                (one.title, one.told, chart(charts.pipelines(one.panels), f"pipelines-{i}", one.told))
                for i, one in enumerate(pictures(world, ours))
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


def lines(found: Sequence[PolicySummary]) -> list[Line]:
    real = [one for one in found if one.policy not in (ORACLE, "ceiling")]
    best = max((one.goodput.value for one in real), default=0.0)
    made = []
    for i, one in enumerate(found):
        told, goodput = facts.about(one.policy), one.goodput
        made.append(
            Line(
                name=one.policy,
                colour=charts.colour(one.policy, i),
                ours=told.ours,
                model=facts.is_model(told),
                samples_per_s=mean(one.samples_per_s),
                goodput=mean(Mean(100 * goodput.value, 100 * goodput.margin), 1, " %"),
                cost=mean(one.cost, 0, "", "$"),
                per_million=mean(
                    one.cost_per_million, 0 if one.cost_per_million.value >= 100 else 2, "", "$"
                ),
                best=one in real and goodput.value == best,
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


# ---- charts ----


def goodput(found: Sequence[PolicySummary]) -> Any:
    return charts.goodput_bars(
        [one.policy for one in found],
        [100 * one.goodput.value for one in found],
        [100 * one.goodput.margin for one in found],
    )


def uses(found: Sequence[PolicySummary]) -> Any:
    shares = [{use: 100 * one.time[use.value] for use in Use} for one in found]
    return charts.time_bars([one.policy for one in found], shares)


def over_time(trace: Trace, runs: Sequence[PolicyRun], window_s: float) -> Any:
    """Nodes and throughput, with losses and changes of plan."""
    rates = [throughput(kept(run), window_s) for run in runs]
    rows = [
        charts.Throughput(
            policy=run.policy,
            colour=charts.colour(run.policy, i),
            rates=row,
            changes=[
                (decision.at / 1000, decision.change.reason or "another plan")
                for decision in kept(run).decisions[1:]
            ],
        )
        for i, (run, row) in enumerate(zip(runs, rates, strict=True))
    ]
    oracle = next((r for run, r in zip(runs, rates, strict=True) if run.policy == ORACLE), ())
    return charts.over_time(trace.end_s, window_s, node_counts(trace), losses(trace), rows, oracle)


def losses(trace: Trace) -> list[tuple[float, str]]:
    """Return the moments of losses: (seconds, text)."""
    found: dict[float, list[str]] = {}
    for event in trace.events:
        if event.kind != ADD:
            found.setdefault(event.seconds, []).append(event.node)
    return [(at, f"{' '.join(names)} lost") for at, names in found.items()]


def kept(run: PolicyRun) -> SimulationResult:
    assert run.outcome is not None, "replay(..., keep=True)"
    return run.outcome


def choices(index: int, run: PolicyRun) -> Choices:
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
    return Choices(run.policy, charts.colour(run.policy, index), len(decisions), tuple(rows))
