"""The page of a replay: one self-contained file, and the same bytes for the same replay."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from elastic.domain.types import Pipeline, Plan
from elastic.planning.capacity.report import PipelineReport
from elastic.planning.capacity.report import report as plan_report
from elastic.planning.capacity.svg import Panel
from elastic.planning.cost.predict import predict
from elastic.planning.schedule.timeline import Timeline, simulate
from elastic_sim.replay.replay import Mean, PolicySummary, mean_of
from elastic_sim.report import assumptions, charts
from elastic_sim.report.assumptions import about
from elastic_sim.report.command_line import replay_command
from elastic_sim.report.durations import clock, duration, round_step
from elastic_sim.report.pages import chart, page
from elastic_sim.steps.engine import PlanInForce, SimulationResult
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld

MAX_WINDOWS = 150
"""Largest number of windows of a throughput curve."""
MAX_DECISIONS = 300
"""Largest number of decisions shown per policy."""
DRAWN_MICROBATCHES = 6
"""Number of micro-batches drawn of a pipeline, in addition to twice its depth."""
NAMED_PIPELINES = 4
"""Largest number of pipelines that a title names."""


def replay_page(
    scenario: Scenario, found: Sequence[PolicySummary], policies: Sequence[str], seeds: int
) -> str:
    """Return the page. `found`: summaries of all `policies`, whose first runs have outcomes."""
    world = scenario.world()
    first = [one.runs[0] for one in found]
    outcomes = {run.policy: run.outcome for run in first if run.outcome is not None}
    trace = scenario.trace_of(first[0].seed)
    window = round_step(trace.end_s, MAX_WINDOWS)
    ours = next((run.outcome for run in first if about(run.policy).ours), None)
    goodput = charts.goodput_bars({one.policy: one.goodput for one in found})
    uses = charts.time_bars({one.policy: one.time for one in found})
    curves = charts.over_time(
        trace,
        window,
        {policy: throughput(outcome, window) for policy, outcome in outcomes.items()},
        {policy: _changes(outcome) for policy, outcome in outcomes.items()},
    )
    pictures = [
        (title, label, chart(charts.pipelines(panels), f"pipelines-{i}", label))
        for i, (title, label, panels) in enumerate(_pictures(world, ours) if ours else ())
    ]
    return page(
        "replay.html",
        {
            "title": assumptions.title(scenario, world),
            "headline": headline(found),
            "lines": _rows(found),
            "goodput": chart(goodput, "goodput", "goodput of each policy"),
            "uses": chart(uses, "uses", "node time by use, for each policy"),
            "over_time": chart(curves, "over-time", "nodes and throughput over time"),
            "seed": first[0].seed,
            "window": duration(window),
            "choices": [_decisions(i, *one) for i, one in enumerate(outcomes.items())],
            "pipelines": pictures,
            "setting": assumptions.setting(scenario, world),
            "constants": assumptions.constants(world.physics),
            "abouts": [about(policy) for policy in policies],
            "seeds": seeds,
            "command": replay_command(scenario, policies, seeds),
        },
    )


def _real(found: Sequence[PolicySummary]) -> list[PolicySummary]:
    """Return the summaries of policies that a real system could follow."""
    return [one for one in found if not about(one.policy).bound]


def _rows(found: Sequence[PolicySummary]) -> list[dict[str, Any]]:
    """Return the rows of the table, as the template reads them."""
    real = _real(found)
    best = max((one.goodput.value for one in real), default=0.0)
    rows = []
    for i, one in enumerate(found):
        rows.append(
            {
                "name": one.policy,
                "colour": charts.colour(one.policy, i),
                "ours": about(one.policy).ours,
                "model": about(one.policy).model,
                "samples_per_s": str(one.samples_per_s),
                "goodput": f"{one.goodput.percent:.1f} %",
                "cost": f"${one.cost:,.0f}",
                "per_million": format_cost(one.cost_per_million),
                "best": one in real and one.goodput.value == best,
                "changes": f"{sum(run.changes for run in one.runs) / len(one.runs):.0f}",
            }
        )
    return rows


def format_cost(value: Mean) -> str:
    """Format dollars, without cents from 100 up; "none made" if there are no samples."""
    if not math.isfinite(value.value):
        return "none made"
    return f"${value:,.0f}" if value.value >= 100 else f"${value:,.2f}"


def _changes(outcome: SimulationResult) -> list[tuple[float, str]]:
    """Return (seconds, reason) of each change of plan."""
    return [
        (decision.at / 1000, decision.change.reason or "another plan")
        for decision in outcome.decisions[1:]
    ]


def _decisions(index: int, policy: str, outcome: SimulationResult) -> dict[str, Any]:
    """Return the decisions of a policy, as the template reads them."""
    rows = []
    for decision in outcome.decisions[:MAX_DECISIONS]:
        change = decision.change
        pause = ", ".join(f"{use.value} {ms / 1000:.1f} s" for use, ms in change.pauses)
        if change.back_to >= 0:
            pause += "; " * bool(pause) + f"back to step {change.back_to}"
        plan = change.setup.text if change.setup is not None else "nothing runs"
        rows.append((clock(decision.at / 1000), decision.nodes, plan, pause, change.reason))
    colour = charts.colour(policy, index)
    return {"name": policy, "colour": colour, "count": len(outcome.decisions), "rows": rows}


def headline(found: Sequence[PolicySummary]) -> str:
    """Return a sentence that compares our policy with the oracle and the best other policy."""
    real = _real(found)
    if not real:
        return f"The {found[0].policy} makes {found[0].samples_per_s.value:.4g} samples/s."
    ours = [one for one in real if about(one.policy).ours]
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
    """Return a comparison of the samples of equal seeds, with its 95 % interval."""
    model = about(other.policy).model
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
    """Format a fraction as percent, with a non-breaking space."""
    return f"{100 * share:{sign}.1f}\u00a0%"


def throughput(outcome: SimulationResult, window_s: float) -> list[float]:
    """Return the samples per second in each window, without samples that were lost later."""
    width = window_s * 1000
    n = max(1, -(-outcome.ended // round(width)))
    found = [0.0] * n
    useful = [span for span in outcome.account.spans if span.use is Use.USEFUL]
    ends = [span.ended for span in useful]
    for decision, until in outcome.decision_spans():
        setup = decision.change.setup
        if setup is None:
            continue
        for span in useful[bisect_right(ends, decision.at) :]:
            if span.began >= until:
                break
            per_ms = setup.samples / setup.step_ms
            _spread(found, max(span.began, decision.at), min(span.ended, until), per_ms, width)
    lengths = [min(width, outcome.ended - i * width) for i in range(n)]
    both = zip(found, lengths, strict=True)
    return [samples / length * 1000 if length > 0 else 0.0 for samples, length in both]


def _spread(found: list[float], at: float, until: float, per_ms: float, width: float) -> None:
    """Add the samples of a rate over [at, until) milliseconds to the windows in `found`."""
    while at < until:
        i = int(at // width)
        edge = min(until, (i + 1) * width)
        found[i] += (edge - at) * per_ms
        at = edge


def _pictures(
    world: SimulatedWorld, outcome: SimulationResult
) -> list[tuple[str, str, tuple[Panel, ...]]]:
    """Return (title, label, panels) of our first plan and of our longest-lived plan."""
    lasted, first = Counter[str](), dict[str, PlanInForce]()
    for decision, end in outcome.decision_spans():
        setup, seen = decision.change.setup, decision.change.in_force
        if setup is not None and seen is not None:
            lasted[setup.text] += end - decision.at
            first.setdefault(setup.text, seen)
    if not lasted:
        return []
    start, ((longest, ms),) = next(iter(lasted)), lasted.most_common(1)
    share = f"({ms / max(1, outcome.ended):.0%} of the time)"
    if start == longest:
        titles = {start: f"First plan, and the longest-lived one {share}"}
    else:
        titles = {start: "First plan", longest: f"Longest-lived plan {share}"}
    return [(title, *_picture(world, text, first[text])) for text, title in titles.items()]


def _picture(world: SimulatedWorld, text: str, seen: PlanInForce) -> tuple[str, tuple[Panel, ...]]:
    found = plan_report(seen.plan, world.profile, seen.nodes, samples=world.training.microbatch)
    label = (
        f"{len(seen.plan.nodes())} nodes, pipelines of depth {text}; the planner expects a step of "
        f"{found.step_s:.4g} s, bubbles {found.bubble:.1%} of it"
    )
    return label, tuple(_panels(world, seen, found.pipelines))


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
