"""Pictures of the pipelines that our policy ran: of its first plan, and of the one that it had longest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.domain.types import Pipeline, Plan
from elastic.planning.capacity.report import PipelineReport, report
from elastic.planning.capacity.svg import Panel
from elastic.planning.cost.predict import predict
from elastic.planning.schedule.schedule import actions_of
from elastic.planning.schedule.timeline import Timeline, simulate
from elastic_sim.replay.replay import PlanInForce, PolicyRun
from elastic_sim.steps.world import SimulatedWorld

DRAWN = 6
"""Micro-batches beyond twice a pipeline's depth are left out of its picture."""
NAMED = 4
"""Most pipelines that a title names."""


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    told: str
    panels: tuple[Panel, ...]


def pictures(world: SimulatedWorld, run: PolicyRun | None) -> list[Picture]:
    """Of a run whose plans were kept; none for others."""
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
    share = lasted[longest] / max(1, run.outcome.ended)
    titles = {start: "First plan"}
    titles[longest] = f"Longest-lived plan ({share:.0%} of the time)"
    if start == longest:
        titles = {start: f"First plan, and the longest-lived one ({share:.0%} of the time)"}
    return [_picture(world, title, text, first[text]) for text, title in titles.items()]


def _picture(world: SimulatedWorld, title: str, text: str, seen: PlanInForce) -> Picture:
    found = report(seen.plan, world.profile, seen.nodes, samples=world.training.microbatch)
    told = (
        f"{len(seen.plan.nodes())} nodes, pipelines of depth {text}; the planner expects a step of "
        f"{found.step_s:.4g} s, bubbles {found.bubble:.1%} of it"
    )
    return Picture(title, told, tuple(_panels(world, seen, found.pipelines)))


def _panels(world: SimulatedWorld, seen: PlanInForce, reports: tuple[PipelineReport, ...]) -> Iterable[Panel]:
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


def _short(world: SimulatedWorld, seen: PlanInForce, pipeline: Pipeline, drawn: int) -> Timeline:
    few = replace(pipeline, microbatches=tuple(range(drawn)))
    plan: Plan = replace(
        seen.plan, pipelines=(few,), n_microbatches=drawn, peers=(), gradients="none", state="none"
    )
    return simulate(actions_of(few), predict(plan, world.profile, seen.nodes).stages[0])
