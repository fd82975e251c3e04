"""Report on a plan for people: expected seconds, samples, bubbles and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.domain.types import NodeInfo, Plan, Stage
from elastic.planning.capacity.svg import Panel, draw
from elastic.planning.cost.predict import Prediction, predict
from elastic.planning.cost.profile import Profile
from elastic.planning.schedule.schedule import ZERO_BUBBLE, actions_of, peak, units_of
from elastic.planning.schedule.timeline import StageTimes, Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """One unit of a pipeline."""

    pipeline: int
    unit: str
    device: str
    layers: str
    """Ranges of layers of the unit's stages: FIRST:LAST, comma-separated."""
    compute_s: float
    """Seconds per micro-batch: forward and backward pass, recomputation and gradient streaming."""
    hop_s: float
    """Seconds per micro-batch of the messages between the unit's stages and the next ones."""
    busy: float
    """Fraction of the pipeline's time in which the unit computes."""
    memory_bytes: int
    """Peak memory of a worker of the unit."""
    limit_bytes: int
    """Memory that a worker may use; 0: unknown."""
    recompute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """One pipeline."""

    schedule: str
    microbatches: int
    finish_s: float
    """End of the last micro-batch, in seconds from the start of the step."""
    bubble: float
    """Fraction of the units' time in which they wait."""
    timeline: Timeline
    units: tuple[UnitReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan with its expected figures."""

    plan: Plan
    step_s: float
    tail_s: float
    """Part of `step_s` after the last micro-batch: reduction over pipelines, and update."""
    stream_s: float
    """Part of `step_s` that streaming gradients to peers adds."""
    samples_per_s: float
    """Samples per second; 0: unknown."""
    tokens_per_s: float
    pipelines: tuple[PipelineReport, ...]

    @property
    def bubble(self) -> float:
        """Fraction of the step in which units do not compute, tail included."""
        busy = sum(sum(p.timeline.busy_s) for p in self.pipelines)
        units = sum(len(p.units) for p in self.pipelines)
        return 1 - busy / (units * self.step_s) if self.step_s > 0 else 0.0


def report(
    plan: Plan,
    profile: Profile,
    nodes: tuple[NodeInfo, ...],
    *,
    slow: tuple[tuple[str, float], ...] = (),
    samples: int = 0,
) -> Report:
    """Return the report on `plan`. `samples`: samples per micro-batch. Raises FieldError."""
    found = predict(plan, profile, nodes, slow)
    infos = {info.node: info for info in nodes}
    per_s = plan.n_microbatches / found.step_s if found.step_s > 0 else 0.0
    return Report(
        plan=plan,
        step_s=found.step_s,
        tail_s=found.tail_s,
        stream_s=found.step_s
        - predict(replace(plan, gradients="none"), profile, nodes, slow).step_s,
        samples_per_s=samples * per_s,
        tokens_per_s=profile.tokens_per_microbatch * per_s,
        pipelines=tuple(
            _pipeline(plan, profile, infos, found, p) for p in range(len(plan.pipelines))
        ),
    )


def _pipeline(
    plan: Plan, profile: Profile, infos: Mapping[str, NodeInfo], found: Prediction, index: int
) -> PipelineReport:
    pipeline, times = plan.pipelines[index], found.stages[index]
    actions = actions_of(pipeline)
    timeline = simulate(pipeline, times)
    whole, n_units = timeline.makespan_s or 1.0, len(actions)
    units = []
    for u, unit in enumerate(units_of(pipeline)):
        stages, info = pipeline.stages[u::n_units], infos[unit.node]
        weights = _kept(stages, range(u, len(pipeline.stages), n_units), profile)
        units.append(
            UnitReport(
                pipeline=index,
                unit=unit.node + (f"/{unit.group}" if info.workers > plan.tp else ""),
                device=info.device,
                layers=",".join(f"{stage.first}:{stage.last}" for stage in stages),
                compute_s=sum(_compute(pipeline.schedule, t) for t in times[u::n_units]),
                hop_s=sum(2 * t.hop_s for t in times[u::n_units]),
                busy=timeline.busy_s[u] / whole,
                memory_bytes=round(_fixed(stages, profile, plan.tp) + peak(actions[u], weights)),
                limit_bytes=info.memory_bytes or profile.device(info.device).memory_bytes,
                recompute=any(stage.recompute for stage in stages),
            )
        )
    return PipelineReport(
        schedule=pipeline.schedule,
        microbatches=len(pipeline.microbatches),
        finish_s=found.pipelines[index],
        bubble=1 - sum(timeline.busy_s) / (n_units * whole),
        timeline=timeline,
        units=tuple(units),
    )


def _compute(schedule: str, times: StageTimes) -> float:
    """Return the compute seconds of a stage per micro-batch."""
    split = times.backward_input_s + times.backward_weight_s
    return times.forward_s + (split if schedule == ZERO_BUBBLE else times.backward_s)


def _fixed(stages: Sequence[Stage], profile: Profile, tp: int) -> float:
    """Return a worker's bytes without micro-batches in flight.

    A recomputing stage also needs room for the activations of one micro-batch.
    """
    layers = profile.layers
    held = [layers[i] for stage in stages for i in stage.layers]
    again = sum(
        layers[i].activation_bytes for stage in stages if stage.recompute for i in stage.layers
    )
    return sum(la.held_bytes for la in held) / tp + again


def _kept(stages: Sequence[Stage], numbers: Sequence[int], profile: Profile) -> dict[int, float]:
    """Return, for `peak`, each stage's bytes per micro-batch in flight: activations, or input."""
    layers, found = profile.layers, {}
    for stage, number in zip(stages, numbers, strict=True):
        entry = layers[stage.first - 1].output_bytes if stage.first else 0
        kept = entry if stage.recompute else sum(layers[i].activation_bytes for i in stage.layers)
        found[number if len(stages) > 1 else -1] = float(kept)
    return found


def picture(found: Report, title: str) -> str:
    """Return the timelines of all pipelines as one SVG text."""
    panels = [
        Panel(
            f"pipeline {index}: {pipeline.schedule}, {pipeline.microbatches} micro-batches, "
            f"bubble {pipeline.bubble:.1%}",
            pipeline.timeline,
            tuple(f"{unit.unit} [{unit.layers}]" for unit in pipeline.units),
        )
        for index, pipeline in enumerate(found.pipelines)
    ]
    return draw(title, panels)
