"""What a plan is expected to do, in figures for people: seconds, samples, bubbles, memory, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core.types import NodeInfo, Pipeline, Plan, Stage
from elastic.planning.dryrun import peak
from elastic.planning.predict import Prediction, predict
from elastic.planning.profile import Link, Profile
from elastic.planning.schedule import actions_of, units_of
from elastic.planning.svg import Panel, draw
from elastic.planning.timeline import StageTimes, Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """One unit of a pipeline."""

    pipeline: int
    unit: str
    device: str
    layers: str
    """Its ranges of layers, FIRST:LAST with commas between them."""
    compute_s: float
    """For one micro-batch, forward and backward, recomputation included."""
    hop_s: float
    """To the next stage and back, for one micro-batch, over all its stages."""
    busy: float
    """Share of the pipeline's time that it computes."""
    memory_bytes: int
    """Of a worker, at its peak."""
    limit_bytes: int
    """0: unknown."""
    recompute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """One pipeline."""

    schedule: str
    microbatches: int
    finish_s: float
    """When its last micro-batch is done."""
    bubble: float
    """Share of its units' time in which they wait."""
    timeline: Timeline
    units: tuple[UnitReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan and what is expected of it."""

    plan: Plan
    step_s: float
    tail_s: float
    """Of `step_s`: reduction over pipelines, and update, after the last micro-batch."""
    samples_per_s: float
    """0: how many samples a micro-batch has is not known."""
    tokens_per_s: float
    pipelines: tuple[PipelineReport, ...]

    @property
    def bubble(self) -> float:
        """Share of the step, on all units that hold stages, in which nothing is computed; the tail counts as such."""
        busy = sum(sum(p.timeline.busy_s) for p in self.pipelines)
        units = sum(len(p.units) for p in self.pipelines)
        return 1 - busy / (units * self.step_s) if self.step_s > 0 else 0.0


class _Figures:
    """Looks up what stages cost on the nodes that they are on."""

    def __init__(
        self, plan: Plan, profile: Profile, nodes: tuple[NodeInfo, ...], slow: Mapping[str, float]
    ) -> None:
        self.plan, self.profile, self.slow = plan, profile, slow
        self.nodes = {info.node: info for info in nodes}

    def times(self, pipeline: Pipeline, number: int) -> StageTimes:
        stage = pipeline.stages[number]
        info, factor = self.nodes[stage.unit.node], self.slow.get(stage.unit.node, 1.0)
        layers = self.profile.device(info.device).layers[stage.first : stage.last]
        forward = factor * sum(t.forward_s for t in layers)
        again = forward if stage.recompute else 0.0
        return StageTimes(
            forward_s=forward,
            backward_s=factor * sum(t.backward_s for t in layers) + again,
            backward_input_s=factor * sum(t.backward_input_s for t in layers) + again,
            backward_weight_s=factor * sum(t.backward_weight_s for t in layers),
            hop_s=self._hop(pipeline, number),
        )

    def _hop(self, pipeline: Pipeline, number: int) -> float:
        """Seconds of one message from this stage to the next."""
        if number + 1 == len(pipeline.stages):
            return 0.0
        stage, after = pipeline.stages[number], pipeline.stages[number + 1]
        link = self._link(stage, after)
        return link.seconds(self.profile.layers[stage.last - 1].output_bytes)

    def _link(self, a: Stage, b: Stage) -> Link:
        if a.unit == b.unit:
            return Link()
        if a.unit.node == b.unit.node:
            return self.profile.inside
        apart = self.nodes[a.unit.node].domain != self.nodes[b.unit.node].domain
        known = self.profile.across != Link()
        return self.profile.across if apart and known else self.profile.link

    def memory(self, pipeline: Pipeline, unit: int) -> int:
        """Peak bytes of a worker: parameters, state and gradients, and activations as the schedule holds them."""
        lists, layers = actions_of(pipeline), self.profile.layers
        total, weights = 0.0, {}
        for number in range(unit, len(pipeline.stages), len(lists)):
            stage = pipeline.stages[number]
            held = [layers[i] for i in stage.layers]
            fixed = sum(la.param_bytes + la.state_bytes + la.gradient_bytes for la in held)
            whole = sum(la.activation_bytes for la in held)
            entry = layers[stage.first - 1].output_bytes if stage.first else 0
            total += fixed / self.plan.tp + (whole if stage.recompute else 0)
            weights[number if len(pipeline.stages) > len(lists) else -1] = entry if stage.recompute else whole
        return round(total + peak(lists[unit], weights))


def report(
    plan: Plan,
    profile: Profile,
    nodes: tuple[NodeInfo, ...],
    *,
    slow: tuple[tuple[str, float], ...] = (),
    samples: int = 0,
) -> Report:
    """Work out what `plan` does on `nodes`. `samples`: of one micro-batch. Raises FieldError."""
    found = predict(plan, profile, nodes, slow)
    figures = _Figures(plan, profile, nodes, dict(slow))
    per_s = plan.n_microbatches / found.step_s if found.step_s > 0 else 0.0
    return Report(
        plan=plan,
        step_s=found.step_s,
        tail_s=found.tail_s,
        samples_per_s=samples * per_s,
        tokens_per_s=profile.tokens_per_microbatch * per_s,
        pipelines=tuple(_pipeline(figures, found, p) for p in range(len(plan.pipelines))),
    )


def _pipeline(figures: _Figures, found: Prediction, index: int) -> PipelineReport:
    pipeline = figures.plan.pipelines[index]
    times = [figures.times(pipeline, number) for number in range(len(pipeline.stages))]
    timeline = simulate(actions_of(pipeline), times)
    n_units, whole = len(timeline.busy_s), timeline.makespan_s or 1.0
    return PipelineReport(
        schedule=pipeline.schedule,
        microbatches=len(pipeline.microbatches),
        finish_s=found.pipelines[index],
        bubble=1 - sum(timeline.busy_s) / (n_units * whole),
        timeline=timeline,
        units=tuple(
            _unit(figures, index, u, times[u::n_units], timeline.busy_s[u] / whole) for u in range(n_units)
        ),
    )


def _unit(figures: _Figures, index: int, unit: int, times: list[StageTimes], busy: float) -> UnitReport:
    pipeline = figures.plan.pipelines[index]
    where = units_of(pipeline)[unit]
    stages = [stage for stage in pipeline.stages if stage.unit == where]
    info = figures.nodes[where.node]
    split = pipeline.schedule == "zero-bubble"
    return UnitReport(
        pipeline=index,
        unit=where.node + (f"/{where.group}" if info.workers > figures.plan.tp else ""),
        device=info.device,
        layers=",".join(f"{stage.first}:{stage.last}" for stage in stages),
        compute_s=sum(
            t.forward_s + (t.backward_input_s + t.backward_weight_s if split else t.backward_s) for t in times
        ),
        hop_s=sum(2 * t.hop_s for t in times),
        busy=busy,
        memory_bytes=figures.memory(pipeline, unit),
        limit_bytes=info.memory_bytes or figures.profile.device(info.device).memory_bytes,
        recompute=any(stage.recompute for stage in stages),
    )


def picture(found: Report, title: str) -> str:
    """The timelines of all pipelines as one SVG text."""
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
