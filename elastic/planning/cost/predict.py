"""What a plan will take: the figures by which plans are compared, shown, and held against what is measured.

Pipelines are run against the clock action by action (`timeline`); only pipelines too long for that, thousands
of actions, are priced by the closed form, which the timeline never exceeds. The tail is that of the cost
model: all pipelines end, then every layer is reduced over its holders and updated, and the slowest unit ends
the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.profile import LinkProfile, Profile
from elastic.planning.plan.schemes import gradients_of
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of
from elastic.planning.schedule.timeline import StageTimes, makespan

MAX_CACHED_PROFILES = 16
"""Whose sums are remembered."""
MAX_SIMULATED_ACTIONS = 20_000
"""Micro-batches times stages of a pipeline above which the closed form is used."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step."""

    step_s: float
    pipelines: tuple[float, ...]
    """When the last micro-batch of each is done."""
    tail_s: float
    """Reduction over pipelines and update, after the last pipeline has ended."""
    stages: tuple[tuple[StageTimes, ...], ...]
    """Per pipeline, the times of each stage for one micro-batch."""


@dataclass(frozen=True, slots=True)
class _LayerSum:
    """Of a run of layers on a type of device: seconds, bytes."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    update_s: float
    gradient_bytes: int


class _LayerSums:
    """Sums over layers, each worked out once for a profile: plans are compared by the thousand."""

    remembered: ClassVar[dict[int, _LayerSums]] = {}

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._found: dict[tuple[str, int, int], _LayerSum] = {}

    @classmethod
    def of(cls, profile: Profile) -> _LayerSums:
        found = cls.remembered.get(id(profile))
        if found is None:  # what is kept here holds its profile, so that no other one can have the same id
            if len(cls.remembered) >= MAX_CACHED_PROFILES:
                cls.remembered.clear()
            found = cls.remembered[id(profile)] = cls(profile)
        return found

    def sum(self, device: str, first: int, last: int) -> _LayerSum:
        key = (device, first, last)
        found = self._found.get(key)
        if found is None:
            times = self.profile.device(device).layers[first:last]
            found = self._found[key] = _LayerSum(
                forward_s=sum(t.forward_s for t in times),
                backward_s=sum(t.backward_s for t in times),
                backward_input_s=sum(t.backward_input_s for t in times),
                backward_weight_s=sum(t.backward_weight_s for t in times),
                update_s=sum(t.update_s for t in times),
                gradient_bytes=sum(layer.gradient_bytes for layer in self.profile.layers[first:last]),
            )
        return found


class _StageLocations:
    """Where stages lie, and what lies between them."""

    def __init__(
        self, profile: Profile, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]]
    ) -> None:
        self.profile, self.slow = profile, dict(slow)
        self.sums = _LayerSums.of(profile)
        self.alike = not self.slow and len(profile.devices) == 1 and profile.across in (LinkProfile(), profile.link)
        """Nodes and links do not matter."""
        self.nodes = {info.node: info for info in nodes}

    def factor(self, unit: Unit) -> float:
        return self.slow.get(unit.node, 1.0)

    def device(self, unit: Unit) -> str:
        """The node's type; where the profile is a job's own figures, all nodes are alike."""
        only = self.profile.devices[0].name
        return self.nodes[unit.node].device if only else only

    def link(self, a: Unit, b: Unit) -> LinkProfile:
        """Between neighbouring stages."""
        if a == b:
            return LinkProfile()
        if a.node == b.node:
            return self.profile.inside
        apart = self.nodes[a.node].domain != self.nodes[b.node].domain
        return self.profile.across if apart and self.profile.across != LinkProfile() else self.profile.link


def predict(
    plan: Plan, profile: Profile, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]] = ()
) -> Prediction:
    """Predict a step of `plan` on `nodes` (all that hold stages must be there); `slow`: (node, factor)."""
    return Predictor(plan, profile, nodes, slow).prediction(plan.gradients)


class Predictor:
    """Predicts steps of one plan under several schemes. What these have in common is worked out once, and so are
    pipelines that are alike."""

    def __init__(
        self, plan: Plan, profile: Profile, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]] = ()
    ) -> None:
        """As for `predict`."""
        self._plan, self._places = plan, _StageLocations(profile, nodes, slow)
        unlike: dict[object, Pipeline] = {}
        keys: list[object] = []
        for number, pipeline in enumerate(plan.pipelines):
            keys.append(_equivalence_key(pipeline) if self._places.alike else number)
            unlike.setdefault(keys[-1], pipeline)
        self._unlike, self._keys = unlike, keys
        per_byte = _reduction(len(plan.pipelines), profile.link)
        self._tail_s = max(_tail(pipeline, plan.tp, per_byte, self._places) for pipeline in unlike.values())

    def prediction(self, gradients: str) -> Prediction:
        """With the scheme `gradients`, whatever the plan's own."""
        share = gradients_of(gradients).share if self._plan.peers else 0.0
        runs = {
            key: _run(pipeline, self._plan.tp, self._places, share) for key, pipeline in self._unlike.items()
        }
        times, finish = zip(*(runs[key] for key in self._keys), strict=True)
        return Prediction(max(finish) + self._tail_s, finish, self._tail_s, times)


def _equivalence_key(pipeline: Pipeline) -> object:
    """The same for pipelines that take the same time where all nodes are alike."""
    stages = tuple((stage.first, stage.last, stage.recompute) for stage in pipeline.stages)
    return pipeline.schedule, len(pipeline.microbatches), stages


def _run(pipeline: Pipeline, tp: int, places: _StageLocations, share: float) -> tuple[tuple[StageTimes, ...], float]:
    """(times of its stages, when its last micro-batch is done)."""
    times = tuple(_times(pipeline, s, tp, places, share) for s in range(len(pipeline.stages)))
    return times, _finish(pipeline, len(pipeline.microbatches), times)


def _tail(pipeline: Pipeline, tp: int, per_byte: float, places: _StageLocations) -> float:
    """Seconds of reduction and update of its slowest unit."""
    tails: dict[Unit, float] = {}
    for stage in pipeline.stages:
        tails[stage.unit] = tails.get(stage.unit, 0.0) + _stage_tail(stage, tp, per_byte, places)
    return max(tails.values(), default=0.0)


def pipeline_seconds(
    pipeline: Pipeline,
    profile: Profile,
    nodes: Sequence[NodeInfo],
    slow: Sequence[tuple[str, float]],
    tp: int,
) -> float:
    """Seconds of one pipeline, backups aside."""
    return pipeline_timer(pipeline, profile, nodes, slow, tp)(len(pipeline.microbatches))


def pipeline_timer(
    pipeline: Pipeline,
    profile: Profile,
    nodes: Sequence[NodeInfo],
    slow: Sequence[tuple[str, float]],
    tp: int,
) -> Callable[[int], float]:
    """As `pipeline_seconds`, for any number of micro-batches."""
    places = _StageLocations(profile, nodes, slow)
    times = tuple(_times(pipeline, s, tp, places, 0.0) for s in range(len(pipeline.stages)))
    return lambda microbatches: _finish(pipeline, microbatches, times)


def _times(pipeline: Pipeline, number: int, tp: int, places: _StageLocations, share: float) -> StageTimes:
    """Times of one stage. Streaming `share` of its gradient lengthens the backward pass by copying and contention, or
    to what that takes."""
    stage, profile = pipeline.stages[number], places.profile
    factor = places.factor(stage.unit)
    whole = places.sums.sum(places.device(stage.unit), stage.first, stage.last)
    forward = factor * whole.forward_s
    again = forward if stage.recompute else 0.0
    backward = factor * whole.backward_s + again
    entry = factor * whole.backward_input_s + again
    weight = factor * whole.backward_weight_s
    if share:
        sent = share * whole.gradient_bytes / tp
        x = profile.link.seconds(sent) - profile.link.latency_s
        copying = sent / profile.copy_bytes_per_s if profile.copy_bytes_per_s > 0 else 0.0
        parts = entry + weight if pipeline.schedule == ZERO_BUBBLE else backward
        more = max(profile.contention * x + copying, x - forward - parts)
        backward, weight = backward + more, weight + more
    hop = 0.0
    if number + 1 < len(pipeline.stages):
        link = places.link(stage.unit, pipeline.stages[number + 1].unit)
        hop = link.seconds(profile.layers[stage.last - 1].output_bytes)
    return StageTimes(
        forward_s=forward, backward_s=backward, backward_input_s=entry, backward_weight_s=weight, hop_s=hop
    )


def _finish(pipeline: Pipeline, microbatches: int, times: tuple[StageTimes, ...]) -> float:
    if microbatches * len(times) > MAX_SIMULATED_ACTIONS and pipeline.schedule != INTERLEAVED:
        return closed_form(pipeline.schedule, times, microbatches)
    return _makespan(pipeline.schedule, len(units_of(pipeline)), microbatches, times)


@lru_cache(maxsize=1024)
def _makespan(schedule: str, units: int, microbatches: int, times: tuple[StageTimes, ...]) -> float:
    """Pipelines that are alike are run once."""
    return makespan(schedule, units, microbatches, times)


def closed_form(schedule: str, times: Sequence[StageTimes], microbatches: int) -> float:
    """The cost model's time of a 1F1B or zero-bubble pipeline."""
    hops = [2 * t.hop_s for t in times]
    if schedule == ZERO_BUBBLE:
        taus = [
            t.forward_s + t.backward_input_s + t.backward_weight_s + h
            for t, h in zip(times, hops, strict=True)
        ]
        fills = [max(0.0, tau - 2 * t.backward_weight_s) for tau, t in zip(taus, times, strict=True)]
        return microbatches * max(taus) + sum(fills[:-1])
    taus = [t.forward_s + t.backward_s + h for t, h in zip(times, hops, strict=True)]
    return sum(taus) + (microbatches - 1) * max(taus)


def _reduction(pipelines: int, link: LinkProfile) -> float:
    """Seconds a byte in a ring over so many."""
    return 2 * (pipelines - 1) / pipelines / link.bytes_per_s if link.bytes_per_s > 0 else 0.0


def _stage_tail(stage: Stage, tp: int, per_byte: float, places: _StageLocations) -> float:
    whole = places.sums.sum(places.device(stage.unit), stage.first, stage.last)
    return places.factor(stage.unit) * whole.update_s + per_byte * whole.gradient_bytes / tp
