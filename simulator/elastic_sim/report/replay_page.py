"""The page of a replay: one self-contained file, and the same bytes for the same replay."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.domain.types import Pipeline, Plan
from elastic.planning.capacity.report import PipelineReport
from elastic.planning.capacity.report import report as plan_report
from elastic.planning.capacity.svg import Panel
from elastic.planning.cost.predict import predict
from elastic.planning.schedule.timeline import Timeline, simulate
from elastic_sim.replay.replay import ORACLE, Mean, PlanInForce, PolicyRun, PolicySummary, mean_of
from elastic_sim.report import assumptions, charts
from elastic_sim.report.command_line import replay_command
from elastic_sim.report.durations import clock, duration, round_step
from elastic_sim.report.pages import chart, page
from elastic_sim.steps.engine import SimulationResult
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.statistics import node_counts
from elastic_sim.traces.trace import ADD, Trace

MAX_WINDOWS = 150
"""Windows of a throughput curve."""
MAX_DECISIONS = 300
"""Decisions per policy."""
DRAWN_MICROBATCHES = 6
"""Micro-batches in the picture of a pipeline, in addition to twice its depth."""
NAMED_PIPELINES = 4
"""Pipelines that a title names."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
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
class PolicyDecisions:
    """Decisions of a policy in one run."""

    name: str
    colour: str
    count: int
    rows: tuple[tuple[str, int, str, str, str], ...]
    """(time, nodes, plan, pause, reason)."""


@dataclass(frozen=True, slots=True)
class PipelinePicture:
    """The pipelines of one plan."""

    title: str
    label: str
    panels: tuple[Panel, ...]


def replay_page(
    scenario: Scenario, found: Sequence[PolicySummary], policies: Sequence[str], seeds: int
) -> str:
    """Return the page. `found`: summaries of runs with outcomes, with the oracle if requested."""
    world = scenario.world()
    first = [one.runs[0] for one in found]
    trace = scenario.trace_of(first[0].seed)
    window = round_step(trace.end_s, MAX_WINDOWS)
    ours = next((run for run in first if assumptions.about(run.policy).ours), None)
    curves = _over_time(trace, first, window)
    pictures = [
        (one.title, one.label, chart(charts.pipelines(one.panels), f"pipelines-{i}", one.label))
        for i, one in enumerate(_pictures(world, ours))
    ]
    return page(
        "replay.html",
        {
            "title": assumptions.title(scenario, world),
            "headline": headline(found),
            "lines": _rows(found),
            "goodput": chart(_goodput(found), "goodput", "goodput of each policy"),
            "uses": chart(_uses(found), "uses", "node time by use, for each policy"),
            "over_time": chart(curves, "over-time", "nodes and throughput over time"),
            "seed": first[0].seed,
            "window": duration(window),
            "choices": [_decisions(i, run) for i, run in enumerate(first)],
            "pipelines": pictures,
            "setting": assumptions.setting(scenario, world),
            "constants": assumptions.constants(world.physics),
            "abouts": assumptions.described(policies),
            "seeds": seeds,
            "command": replay_command(scenario, policies, seeds),
            "version": assumptions.PROGRAM,
        },
    )


def _real(found: Sequence[PolicySummary]) -> list[PolicySummary]:
    """Return the summaries of policies that a real system could follow."""
    return [one for one in found if one.policy not in assumptions.BOUNDS]


def _rows(found: Sequence[PolicySummary]) -> list[PolicyRow]:
    real = _real(found)
    best = max((one.goodput.value for one in real), default=0.0)
    rows = []
    for i, one in enumerate(found):
        about, goodput = assumptions.about(one.policy), one.goodput
        rows.append(
            PolicyRow(
                name=one.policy,
                colour=charts.colour(one.policy, i),
                ours=about.ours,
                model=assumptions.is_model(about),
                samples_per_s=format_mean(one.samples_per_s),
                goodput=format_mean(Mean(100 * goodput.value, 100 * goodput.margin), 1, " %"),
                cost=format_mean(one.cost, 0, "", "$"),
                per_million=format_cost(one.cost_per_million),
                best=one in real and goodput.value == best,
                changes=f"{sum(run.changes for run in one.runs) / len(one.runs):.0f}",
            )
        )
    return rows


def format_mean(value: Mean, digits: int | None = None, unit: str = "", before: str = "") -> str:
    """Format as 12.6 ± 0.3, with `digits` decimals or else four significant digits."""
    if not math.isfinite(value.value):
        return "none made"
    shown = f"{value.value:,.{digits}f}" if digits is not None else f"{value.value:.4g}"
    if not value.margin:
        return f"{before}{shown}{unit}"
    margin = f"{value.margin:,.{digits}f}" if digits is not None else f"{value.margin:.2g}"
    return f"{before}{shown} ± {margin}{unit}"


def format_cost(value: Mean) -> str:
    """Format dollars, without cents from 100 up."""
    return format_mean(value, 0 if value.value >= 100 else 2, "", "$")


def _goodput(found: Sequence[PolicySummary]) -> Any:
    values = [100 * one.goodput.value for one in found]
    margins = [100 * one.goodput.margin for one in found]
    return charts.goodput_bars([one.policy for one in found], values, margins)


def _uses(found: Sequence[PolicySummary]) -> Any:
    shares = [{use: 100 * one.time[use.value] for use in Use} for one in found]
    return charts.time_bars([one.policy for one in found], shares)


def _over_time(trace: Trace, runs: Sequence[PolicyRun], window_s: float) -> Any:
    """Return the chart of nodes and throughput, with losses and changes of plan."""
    rows = [
        charts.PolicyThroughput(
            policy=run.policy,
            colour=charts.colour(run.policy, i),
            rates=throughput(_outcome(run), window_s),
            changes=[
                (decision.at / 1000, decision.change.reason or "another plan")
                for decision in _outcome(run).decisions[1:]
            ],
        )
        for i, run in enumerate(runs)
    ]
    oracle = next((row.rates for row in rows if row.policy == ORACLE), ())
    losses: dict[float, list[str]] = {}
    for event in trace.events:
        if event.kind != ADD:
            losses.setdefault(event.seconds, []).append(event.node)
    marks = [(at, f"{' '.join(names)} lost") for at, names in losses.items()]
    return charts.over_time(trace.end_s, window_s, node_counts(trace), marks, rows, oracle)


def _outcome(run: PolicyRun) -> SimulationResult:
    assert run.outcome is not None, "replay(..., keep=True)"
    return run.outcome


def _decisions(index: int, run: PolicyRun) -> PolicyDecisions:
    decisions = _outcome(run).decisions
    rows = []
    for decision in decisions[:MAX_DECISIONS]:
        change = decision.change
        pauses = [f"{use.value} {ms / 1000:.1f} s" for use, ms in change.pauses]
        pause = ", ".join(pauses)
        if change.back_to >= 0:
            pause += "; " * bool(pause) + f"back to step {change.back_to}"
        plan = change.setup.text if change.setup is not None else "nothing runs"
        rows.append((clock(decision.at / 1000), decision.nodes, plan, pause, change.reason))
    colour = charts.colour(run.policy, index)
    return PolicyDecisions(run.policy, colour, len(decisions), tuple(rows))


def headline(found: Sequence[PolicySummary]) -> str:
    """Return a sentence that compares our policy with the oracle and the best other policy."""
    real = _real(found)
    if not real:
        return f"The {found[0].policy} makes {found[0].samples_per_s.value:.4g} samples/s."
    ours = [one for one in real if assumptions.about(one.policy).ours]
    first = max(ours or real, key=lambda one: one.goodput.value)
    name = "Our policy" if ours else f"Our model of {first.policy}"
    text = (
        f"{name} makes {first.samples_per_s.value:.4g} samples/s, "
        f"{_percent(first.goodput.value)} of what the oracle makes with the same nodes"
    )
    others = [one for one in real if one is not first and not (ours and one in ours)]
    if not others:
        return f"{text}."
    return f"{text}; {_comparison(first, max(others, key=lambda one: one.goodput.value))}."


def _comparison(first: PolicySummary, other: PolicySummary) -> str:
    """Compare samples in pairs of the same seed, without claims that the seeds do not allow."""
    model = assumptions.is_model(assumptions.about(other.policy))
    name = f"our model of {other.policy}" if model else other.policy
    if not all(run.samples for run in other.runs):
        return f"{name}, the next best, makes none in some runs"
    ratio = lead(first, other)
    word = "more" if ratio.value >= 0 else "less"
    text = f"that is {_percent(abs(ratio.value))} {word} than {name}, the best of the others"
    if len(first.runs) < 2:
        return text + " (one seed: no interval)"
    low, high = ratio.value - ratio.margin, ratio.value + ratio.margin
    sure = "" if low > 0 or high < 0 else ", so either may be ahead"
    interval = f"{_percent(low, '+')} to {_percent(high, '+')}"
    return f"{text} (95 % interval over {len(first.runs)} seeds: {interval}{sure})"


def lead(first: PolicySummary, other: PolicySummary) -> Mean:
    """Return the relative lead in samples, over pairs of runs with the same seed."""
    pairs = zip(first.runs, other.runs, strict=True)
    return mean_of([a.samples / b.samples - 1 for a, b in pairs])


def _percent(share: float, sign: str = "") -> str:
    """Format with a non-breaking space."""
    return f"{100 * share:{sign}.1f}\u00a0%"


def throughput(outcome: SimulationResult, window_s: float) -> list[float]:
    """Return the samples per second in each window, without samples that were lost later."""
    width = window_s * 1000
    n = max(1, -(-outcome.ended // round(width)))
    found = [0.0] * n
    starts = [decision.at for decision in outcome.decisions]
    for span in outcome.account.spans:
        if span.use is not Use.USEFUL:
            continue
        index = bisect_right(starts, span.began) - 1
        at = span.began
        while at < span.ended:
            until = min(span.ended, starts[index + 1] if index + 1 < len(starts) else span.ended)
            setup = outcome.decisions[index].change.setup if index >= 0 else None
            if setup is not None and until > at:
                _spread(found, at, until, setup.samples / setup.step_ms, width)
            at, index = max(at, until), index + 1
    lengths = [min(width, outcome.ended - i * width) for i in range(n)]
    both = zip(found, lengths, strict=True)
    return [samples / length * 1000 if length > 0 else 0.0 for samples, length in both]


def _spread(found: list[float], at: float, until: float, per_ms: float, width: float) -> None:
    """Add a rate over [at, until) to its windows, in place."""
    while at < until:
        i = int(at // width)
        edge = min(until, (i + 1) * width)
        found[i] += (edge - at) * per_ms
        at = edge


def _pictures(world: SimulatedWorld, run: PolicyRun | None) -> list[PipelinePicture]:
    """Return pictures of our first plan and of the longest-lived one."""
    if run is None or run.outcome is None:
        return []
    decisions = run.outcome.decisions
    ends = [*(decision.at for decision in decisions[1:]), run.outcome.ended]
    lasted: dict[str, int] = {}
    first: dict[str, PlanInForce] = {}
    for decision, seen, end in zip(decisions, run.seen, ends, strict=True):
        if seen is not None and decision.change.setup is not None:
            text = decision.change.setup.text
            lasted[text] = lasted.get(text, 0) + end - decision.at
            first.setdefault(text, seen)
    if not lasted:
        return []
    start, longest = next(iter(lasted)), max(lasted, key=lambda text: lasted[text])
    share = f"({lasted[longest] / max(1, run.outcome.ended):.0%} of the time)"
    if start == longest:
        titles = {start: f"First plan, and the longest-lived one {share}"}
    else:
        titles = {start: "First plan", longest: f"Longest-lived plan {share}"}
    return [_picture(world, title, text, first[text]) for text, title in titles.items()]


def _picture(world: SimulatedWorld, title: str, text: str, seen: PlanInForce) -> PipelinePicture:
    found = plan_report(seen.plan, world.profile, seen.nodes, samples=world.training.microbatch)
    label = (
        f"{len(seen.plan.nodes())} nodes, pipelines of depth {text}; the planner expects a step of "
        f"{found.step_s:.4g} s, bubbles {found.bubble:.1%} of it"
    )
    return PipelinePicture(title, label, tuple(_panels(world, seen, found.pipelines)))


def _panels(
    world: SimulatedWorld, seen: PlanInForce, reports: tuple[PipelineReport, ...]
) -> Iterable[Panel]:
    """Yield one panel per group of equal pipelines, with few enough micro-batches to see."""
    equal: dict[object, list[int]] = {}
    for p, pipeline in enumerate(seen.plan.pipelines):
        cuts = tuple((stage.first, stage.last, stage.recompute) for stage in pipeline.stages)
        shape = pipeline.schedule, len(pipeline.microbatches), cuts
        equal.setdefault(shape, []).append(p)
    for numbers in equal.values():
        pipeline, found = seen.plan.pipelines[numbers[0]], reports[numbers[0]]
        named = ", ".join(map(str, numbers[:NAMED_PIPELINES]))
        if len(numbers) > NAMED_PIPELINES:
            named += f" and {len(numbers) - NAMED_PIPELINES} more"
        title = (
            f"pipeline{'s' * (len(numbers) > 1)} {named}: {pipeline.schedule}, "
            f"{found.microbatches} micro-batches, bubble {found.bubble:.1%}"
        )
        timeline = found.timeline
        drawn = min(found.microbatches, 2 * len(pipeline.stages) + DRAWN_MICROBATCHES)
        if drawn < found.microbatches:
            timeline = _short_timeline(world, seen, pipeline, drawn)
            title += f"; drawn as if it had {drawn}"
        yield Panel(title, timeline, tuple(f"{unit.unit} [{unit.layers}]" for unit in found.units))


def _short_timeline(
    world: SimulatedWorld, seen: PlanInForce, pipeline: Pipeline, drawn: int
) -> Timeline:
    few = replace(pipeline, microbatches=tuple(range(drawn)))
    plan: Plan = replace(seen.plan, pipelines=(few,), n_microbatches=drawn, peers=())
    plan = replace(plan, gradients="none", state="none")
    return simulate(few, predict(plan, world.profile, seen.nodes).stages[0])
