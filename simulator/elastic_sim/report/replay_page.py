"""DOC"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.domain.types import Pipeline, Plan
from elastic.planning.capacity.report import PipelineReport, report
from elastic.planning.capacity.svg import Panel
from elastic.planning.cost.predict import predict
from elastic.planning.schedule.schedule import actions_of
from elastic.planning.schedule.timeline import Timeline, simulate
from elastic_sim.replay.replay import ORACLE, Mean, Run, Summary, mean_of
from elastic_sim.replay.watch import Seen
from elastic_sim.report import assumptions as facts
from elastic_sim.report import charts
from elastic_sim.report.command_line import replay_command
from elastic_sim.report.durations import clock, duration, round_step
from elastic_sim.report.pages import chart, page
from elastic_sim.steps.engine import Outcome
from elastic_sim.steps.scenario import Scenario
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import World
from elastic_sim.traces.statistics import counts
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


def replay_page(
    scenario: Scenario, found: Sequence[Summary], policies: Sequence[str], seeds: int
) -> str:
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
                (
                    one.title,
                    one.told,
                    chart(charts.pipelines(one.panels), f"pipelines-{i}", one.told),
                )
                for i, one in enumerate(pictures(world, ours))
            ],
            "setting": facts.setting(scenario, world),
            "constants": facts.constants(world.physics),
            "abouts": [
                (told, facts.is_model(told)) for told in (facts.about(name) for name in policies)
            ],
            "seeds": seeds,
            "command": replay_command(scenario, policies, seeds),
            "version": facts.PROGRAM,
        },
    )


# ---- the table ----


def lines(found: Sequence[Summary]) -> list[Line]:
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


def goodput(found: Sequence[Summary]) -> Any:
    return charts.goodput_bars(
        [one.policy for one in found],
        [100 * one.goodput.value for one in found],
        [100 * one.goodput.margin for one in found],
    )


def uses(found: Sequence[Summary]) -> Any:
    shares = [{use: 100 * one.time[use.value] for use in Use} for one in found]
    return charts.time_bars([one.policy for one in found], shares)


def over_time(trace: Trace, runs: Sequence[Run], window_s: float) -> Any:
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
    return charts.over_time(trace.end_s, window_s, counts(trace), losses(trace), rows, oracle)


def losses(trace: Trace) -> list[tuple[float, str]]:
    """Return the moments of losses: (seconds, text)."""
    found: dict[float, list[str]] = {}
    for event in trace.events:
        if event.kind != ADD:
            found.setdefault(event.seconds, []).append(event.node)
    return [(at, f"{' '.join(names)} lost") for at, names in found.items()]


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
    return Choices(run.policy, charts.colour(run.policy, index), len(decisions), tuple(rows))


def headline(found: Sequence[Summary]) -> str:
    """How ours does against the oracle and against the best other policy, seed by seed."""
    real = [one for one in found if one.policy not in (ORACLE, "ceiling")]
    if not real:
        return f"The {found[0].policy} makes {found[0].samples_per_s.value:.4g} samples/s."
    ours = [one for one in real if facts.about(one.policy).ours]
    first = max(ours or real, key=lambda one: one.goodput.value)
    name = "Our policy" if ours else f"Our model of {first.policy}"
    text = (
        f"{name} makes {first.samples_per_s.value:.4g} samples/s, {percent(first.goodput.value)} of what the oracle "
        "makes with the same nodes"
    )
    others = [one for one in real if one is not first and not (ours and one in ours)]
    if not others:
        return f"{text}."
    return f"{text}; {compared(first, max(others, key=lambda one: one.goodput.value))}."


def compared(first: Summary, other: Summary) -> str:
    """Samples of one over those of the other, in pairs of the same seed."""
    name = (
        other.policy
        if not facts.is_model(facts.about(other.policy))
        else f"our model of {other.policy}"
    )
    pairs = [(a.samples, b.samples) for a, b in zip(first.runs, other.runs, strict=True)]
    if not all(b for _, b in pairs):
        return f"{name}, the next best, makes none in some runs"
    ratio = ahead(first, other)
    word = "more" if ratio.value >= 0 else "less"
    text = f"that is {percent(abs(ratio.value))} {word} than {name}, the best of the others"
    if len(pairs) < 2:
        return text + " (one seed: no interval)"
    low, high = ratio.value - ratio.margin, ratio.value + ratio.margin
    sure = "" if low > 0 or high < 0 else ", so either may be ahead"
    return f"{text} (95 % interval over {len(pairs)} seeds: {percent(low, '+')} to {percent(high, '+')}{sure})"


def ahead(first: Summary, other: Summary) -> Mean:
    """By which part one makes more than the other, in pairs of the same seed."""
    return mean_of([a.samples / b.samples - 1 for a, b in zip(first.runs, other.runs, strict=True)])


def percent(share: float, sign: str = "") -> str:
    """91.1 %, without a break."""
    return f"{100 * share:{sign}.1f}\u00a0%"


def throughput(outcome: Outcome, window_s: float) -> list[float]:
    """Samples a second that counted in the end, by window: useful time, at the pace of the setup of that moment."""
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
    return [
        samples / length * 1000 if length > 0 else 0.0
        for samples, length in zip(found, lengths, strict=True)
    ]


def _spread(found: list[float], at: float, until: float, per_ms: float, width: float) -> None:
    """Add a rate over [at, until) to the windows that it touches."""
    while at < until:
        i = int(at // width)
        edge = min(until, (i + 1) * width)
        found[i] += (edge - at) * per_ms
        at = edge


DRAWN = 6
"""Micro-batches beyond twice a pipeline's depth are left out of its picture."""
NAMED = 4
"""Most pipelines that a title names."""


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    told: str
    panels: tuple[Panel, ...]


def pictures(world: World, run: Run | None) -> list[Picture]:
    """Of a run whose plans were kept; none for others."""
    if run is None or run.outcome is None:
        return []
    decisions = run.outcome.decisions
    ends = [*(decision.at for decision in decisions[1:]), run.outcome.ended]
    lasted: dict[str, int] = {}
    first: dict[str, Seen] = {}
    for decision, seen, end in zip(decisions, run.seen, ends, strict=True):
        if seen is not None and decision.change.setup is not None:
            text = decision.change.setup.text
            lasted[text] = lasted.get(text, 0) + end - decision.at
            first.setdefault(text, seen)
    if not lasted:
        return []
    start, longest = next(iter(lasted)), max(lasted, key=lambda text: lasted[text])
    share = lasted[longest] / max(1, run.outcome.ended)
    titles = {start: "First plan"}
    titles[longest] = f"Longest-lived plan ({share:.0%} of the time)"
    if start == longest:
        titles = {start: f"First plan, and the longest-lived one ({share:.0%} of the time)"}
    return [_picture(world, title, text, first[text]) for text, title in titles.items()]


def _picture(world: World, title: str, text: str, seen: Seen) -> Picture:
    found = report(seen.plan, world.profile, seen.nodes, samples=world.training.microbatch)
    told = (
        f"{len(seen.plan.nodes())} nodes, pipelines of depth {text}; the planner expects a step of "
        f"{found.step_s:.4g} s, bubbles {found.bubble:.1%} of it"
    )
    return Picture(title, told, tuple(_panels(world, seen, found.pipelines)))


def _panels(world: World, seen: Seen, reports: tuple[PipelineReport, ...]) -> Iterable[Panel]:
    """Pipelines that are alike are drawn once, with so few micro-batches that boxes can be seen."""
    alike: dict[object, list[int]] = {}
    for p, pipeline in enumerate(seen.plan.pipelines):
        alike.setdefault(_shape(pipeline), []).append(p)
    for numbers in alike.values():
        pipeline, told = seen.plan.pipelines[numbers[0]], reports[numbers[0]]
        named = ", ".join(map(str, numbers[:NAMED]))
        named += f" and {len(numbers) - NAMED} more" * (len(numbers) > NAMED)
        title = (
            f"pipeline{'s' * (len(numbers) > 1)} {named}: {pipeline.schedule}, {told.microbatches} micro-batches, "
            f"bubble {told.bubble:.1%}"
        )
        timeline, drawn = told.timeline, min(told.microbatches, 2 * len(pipeline.stages) + DRAWN)
        if drawn < told.microbatches:
            timeline = _short(world, seen, pipeline, drawn)
            title += f"; drawn as if it had {drawn}"
        yield Panel(title, timeline, tuple(f"{unit.unit} [{unit.layers}]" for unit in told.units))


def _shape(pipeline: Pipeline) -> object:
    cuts = tuple((stage.first, stage.last, stage.recompute) for stage in pipeline.stages)
    return pipeline.schedule, len(pipeline.microbatches), cuts


def _short(world: World, seen: Seen, pipeline: Pipeline, drawn: int) -> Timeline:
    few = replace(pipeline, microbatches=tuple(range(drawn)))
    plan: Plan = replace(
        seen.plan, pipelines=(few,), n_microbatches=drawn, peers=(), gradients="none", state="none"
    )
    return simulate(actions_of(few), predict(plan, world.profile, seen.nodes).stages[0])
