"""Predicts the step time of a plan, for comparing, showing and checking plans.

Pipelines are simulated action by action (`timeline`). Pipelines of many thousand actions are
priced by the closed form, which the simulated time never exceeds. The tail is that of the cost
model: after the last pipeline, every layer is reduced over its holders and updated; the slowest
unit ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.profile import LinkProfile, Profile
from elastic.planning.plan.schemes import gradients_of
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of
from elastic.planning.schedule.timeline import StageTimes, makespan

MAX_CACHED_PROFILES = 16
MAX_SIMULATED_ACTIONS = 20_000
"""Micro-batches times stages of a pipeline above which the closed form is used."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of a step."""

    step_s: float
    pipelines: tuple[float, ...]
    """End of the last micro-batch of each pipeline."""
    tail_s: float
    """Reduction over pipelines and update, after the last pipeline has ended."""
    stages: tuple[tuple[StageTimes, ...], ...]
    """Per pipeline, the times of each stage for one micro-batch."""


@dataclass(frozen=True, slots=True)
class _LayerSum:
    """Seconds and bytes of a range of layers on a device type."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    update_s: float
    gradient_bytes: int


class _LayerSums:
    """Sums over layer ranges of one profile, cached: thousands of plans are compared."""

    by_profile_id: ClassVar[dict[int, _LayerSums]] = {}

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.sum = cache(self._sum)

    @classmethod
    def of(cls, profile: Profile) -> _LayerSums:
        """The sums of a profile by its id. The cache holds the profile, so its id stays unique."""
        found = cls.by_profile_id.get(id(profile))
        if found is None:
            if len(cls.by_profile_id) >= MAX_CACHED_PROFILES:
                cls.by_profile_id.clear()
            found = cls.by_profile_id[id(profile)] = cls(profile)
        return found

    def _sum(self, device: str, first: int, last: int) -> _LayerSum:
        times = self.profile.device(device).layers[first:last]
        return _LayerSum(
            forward_s=sum(t.forward_s for t in times),
            backward_s=sum(t.backward_s for t in times),
            backward_input_s=sum(t.backward_input_s for t in times),
            backward_weight_s=sum(t.backward_weight_s for t in times),
            update_s=sum(t.update_s for t in times),
            gradient_bytes=sum(la.gradient_bytes for la in self.profile.layers[first:last]),
        )


class _StageLocations:
    """Devices of stages, and links between them."""

    def __init__(
        self, profile: Profile, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]]
    ) -> None:
        self.profile, self.slow = profile, dict(slow)
        self.sums = _LayerSums.of(profile)
        one_link = profile.across in (LinkProfile(), profile.link)
        self.uniform = not self.slow and len(profile.devices) == 1 and one_link
        """All nodes and links between nodes are equal."""
        self.nodes = {info.node: info for info in nodes}

    def factor(self, unit: Unit) -> float:
        return self.slow.get(unit.node, 1.0)

    def layer_sum(self, stage: Stage) -> _LayerSum:
        """Sums of the stage's layers. An unnamed device type stands for all nodes."""
        only = self.profile.devices[0].name
        device = self.nodes[stage.unit.node].device if only else only
        return self.sums.sum(device, stage.first, stage.last)

    def link(self, a: Unit, b: Unit) -> LinkProfile:
        """The link between neighbouring stages."""
        if a == b:
            return LinkProfile()
        if a.node == b.node:
            return self.profile.inside
        apart = self.nodes[a.node].domain != self.nodes[b.node].domain
        across = self.profile.across
        return across if apart and across != LinkProfile() else self.profile.link


def predict(
    plan: Plan, profile: Profile, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]] = ()
) -> Prediction:
    """Predict a step of `plan`. `nodes` includes all that hold stages; `slow`: (node, factor)."""
    return Predictor(plan, profile, nodes, slow).prediction(plan.gradients)


class Predictor:
    """Predicts steps of one plan under several backup schemes.

    Arguments are those of `predict`. Equal pipelines are simulated once.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        nodes: Sequence[NodeInfo],
        slow: Sequence[tuple[str, float]] = (),
    ) -> None:
        self._plan, self._locations = plan, _StageLocations(profile, nodes, slow)
        self._distinct: dict[object, Pipeline] = {}
        self._keys: list[object] = []
        for number, pipeline in enumerate(plan.pipelines):
            key = _equivalence_key(pipeline) if self._locations.uniform else number
            self._keys.append(key)
            self._distinct.setdefault(key, pipeline)
        per_byte = _reduction(len(plan.pipelines), profile.link)
        self._tail_s = max(
            _tail(pipeline, plan.tp, per_byte, self._locations)
            for pipeline in self._distinct.values()
        )

    def prediction(self, gradients: str) -> Prediction:
        """The prediction with the scheme `gradients` instead of the plan's own."""
        share = gradients_of(gradients).share if self._plan.peers else 0.0
        runs = {}
        for key, pipeline in self._distinct.items():
            times = _all_times(pipeline, self._plan.tp, self._locations, share)
            runs[key] = times, _finish(pipeline, len(pipeline.microbatches), times)
        stages, finish = zip(*(runs[key] for key in self._keys), strict=True)
        return Prediction(max(finish) + self._tail_s, finish, self._tail_s, stages)


def _equivalence_key(pipeline: Pipeline) -> object:
    """Equal for pipelines that take the same time if all nodes are equal."""
    stages = tuple((stage.first, stage.last, stage.recompute) for stage in pipeline.stages)
    return pipeline.schedule, len(pipeline.microbatches), stages


def _tail(pipeline: Pipeline, tp: int, per_byte: float, locations: _StageLocations) -> float:
    """Seconds of reduction and update of the pipeline's slowest unit."""
    tails: dict[Unit, float] = {}
    for stage in pipeline.stages:
        layers = locations.layer_sum(stage)
        tail_s = locations.factor(stage.unit) * layers.update_s
        tail_s += per_byte * layers.gradient_bytes / tp
        tails[stage.unit] = tails.get(stage.unit, 0.0) + tail_s
    return max(tails.values(), default=0.0)


def pipeline_timer(
    pipeline: Pipeline,
    profile: Profile,
    nodes: Sequence[NodeInfo],
    slow: Sequence[tuple[str, float]],
    tp: int,
) -> Callable[[int], float]:
    """A function from a number of micro-batches to the pipeline's seconds, without backups."""
    times = _all_times(pipeline, tp, _StageLocations(profile, nodes, slow), 0.0)
    return lambda microbatches: _finish(pipeline, microbatches, times)


def _all_times(
    pipeline: Pipeline, tp: int, locations: _StageLocations, share: float
) -> tuple[StageTimes, ...]:
    return tuple(_times(pipeline, s, tp, locations, share) for s in range(len(pipeline.stages)))


def _times(
    pipeline: Pipeline, number: int, tp: int, locations: _StageLocations, share: float
) -> StageTimes:
    """Times of one stage.

    Streaming `share` of its gradient lengthens the backward pass by copying and contention, or up
    to the time of the transfer.
    """
    stage, profile = pipeline.stages[number], locations.profile
    factor = locations.factor(stage.unit)
    layers = locations.layer_sum(stage)
    forward = factor * layers.forward_s
    again = forward if stage.recompute else 0.0
    backward = factor * layers.backward_s + again
    backward_input = factor * layers.backward_input_s + again
    weight = factor * layers.backward_weight_s
    if share:
        sent = share * layers.gradient_bytes / tp
        x = profile.link.seconds(sent) - profile.link.latency_s
        copying = sent / profile.copy_bytes_per_s if profile.copy_bytes_per_s > 0 else 0.0
        parts = backward_input + weight if pipeline.schedule == ZERO_BUBBLE else backward
        more = max(profile.contention * x + copying, x - forward - parts)
        backward, weight = backward + more, weight + more
    hop = 0.0
    if number + 1 < len(pipeline.stages):
        link = locations.link(stage.unit, pipeline.stages[number + 1].unit)
        hop = link.seconds(profile.layers[stage.last - 1].output_bytes)
    return StageTimes(
        forward_s=forward,
        backward_s=backward,
        backward_input_s=backward_input,
        backward_weight_s=weight,
        hop_s=hop,
    )


def _finish(pipeline: Pipeline, microbatches: int, times: tuple[StageTimes, ...]) -> float:
    many = microbatches * len(times) > MAX_SIMULATED_ACTIONS
    if many and pipeline.schedule != INTERLEAVED:
        return closed_form(pipeline.schedule, times, microbatches)
    return _makespan(pipeline.schedule, len(units_of(pipeline)), microbatches, times)


_makespan = lru_cache(maxsize=1024)(makespan)


def closed_form(schedule: str, times: Sequence[StageTimes], microbatches: int) -> float:
    """Seconds of a 1F1B or zero-bubble pipeline under the cost model."""
    hops = [2 * t.hop_s for t in times]
    if schedule == ZERO_BUBBLE:
        taus = [
            t.forward_s + t.backward_input_s + t.backward_weight_s + hop
            for t, hop in zip(times, hops, strict=True)
        ]
        fills = [max(0.0, a - 2 * t.backward_weight_s) for a, t in zip(taus, times, strict=True)]
        return microbatches * max(taus) + sum(fills[:-1])
    taus = [t.forward_s + t.backward_s + hop for t, hop in zip(times, hops, strict=True)]
    return sum(taus) + (microbatches - 1) * max(taus)


def _reduction(pipelines: int, link: LinkProfile) -> float:
    """Seconds per byte in a ring over `pipelines`."""
    return 2 * (pipelines - 1) / pipelines / link.bytes_per_s if link.bytes_per_s > 0 else 0.0
