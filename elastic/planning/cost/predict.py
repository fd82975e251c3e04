"""Predicts the step time of a plan, for comparing, showing and checking plans.

Pipelines are simulated action by action (`timeline`). A pipeline of many thousand actions that is
not interleaved is priced by the closed form, which the simulated time never exceeds. The tail
follows the last pipeline, as in the cost model: every layer is reduced over its holders and
updated. The tail ends with the slowest unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from operator import attrgetter

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.cost_model import pipeline_seconds
from elastic.planning.cost.profile import LayerTimes, LinkProfile, Profile
from elastic.planning.plan.schemes import gradients_of
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of
from elastic.planning.schedule.timeline import StageTimes, makespan

TIMES = tuple(field.name for field in fields(LayerTimes))
MAX_SIMULATED_ACTIONS = 20_000
"""Maximum micro-batches times stages of a pipeline that is simulated."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of a step."""

    step_s: float
    pipelines: tuple[float, ...]
    """End of the last micro-batch of each pipeline, seconds."""
    tail_s: float
    """Seconds of reduction over pipelines and update, after the last pipeline has ended."""
    stages: tuple[tuple[StageTimes, ...], ...]
    """Per pipeline, the times of each stage for one micro-batch."""


class _StageLocations:
    """Devices of stages, and links between them."""

    def __init__(
        self, profile: Profile, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]]
    ) -> None:
        self.profile, self.slow = profile, dict(slow)
        self._cached_sums = cache(self._sums)
        one_link = profile.across in (LinkProfile(), profile.link)
        self.uniform = not self.slow and len(profile.devices) == 1 and one_link
        """Whether all nodes are equal, and all links between nodes."""
        self.nodes = {info.node: info for info in nodes}

    def factor(self, unit: Unit) -> float:
        return self.slow.get(unit.node, 1.0)

    def sums(self, stage: Stage) -> tuple[LayerTimes, int]:
        """Return (seconds, gradient bytes) of the stage's layers on its device type."""
        only = self.profile.devices[0].name
        device = self.nodes[stage.unit.node].device if only else only
        return self._cached_sums(device, stage.first, stage.last)

    def _sums(self, device: str, first: int, last: int) -> tuple[LayerTimes, int]:
        times = self.profile.device(device).layers[first:last]
        seconds = LayerTimes(*(sum(map(attrgetter(name), times)) for name in TIMES))
        return seconds, sum(la.gradient_bytes for la in self.profile.layers[first:last])

    def link(self, a: Unit, b: Unit) -> LinkProfile:
        """Return the link between the units of neighbouring stages; free within a unit."""
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
    """Return the prediction. `nodes` has all that hold stages; `slow`: (node, factor)."""
    share = gradients_of(plan.gradients).share
    return Predictor(plan, profile, nodes, slow).prediction(share)


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
        k = len(plan.pipelines)
        per_byte = 2 * (k - 1) / k * profile.link.s_per_byte
        self._tail_s = max(
            _tail(pipeline, plan.tp, per_byte, self._locations)
            for pipeline in self._distinct.values()
        )

    def prediction(self, share: float) -> Prediction:
        """Return the prediction if nodes stream `share` of their gradient per micro-batch."""
        share = share if self._plan.peers else 0.0
        runs = {}
        for key, pipeline in self._distinct.items():
            times = _all_times(pipeline, self._plan.tp, self._locations, share)
            runs[key] = times, _finish(pipeline, len(pipeline.microbatches), times)
        stages, finish = zip(*(runs[key] for key in self._keys), strict=True)
        return Prediction(max(finish) + self._tail_s, finish, self._tail_s, stages)


def _equivalence_key(pipeline: Pipeline) -> object:
    """Return a key that is equal for pipelines of equal time, if all nodes are equal."""
    stages = tuple((stage.first, stage.last, stage.recompute) for stage in pipeline.stages)
    return pipeline.schedule, len(pipeline.microbatches), stages


def _tail(pipeline: Pipeline, tp: int, per_byte: float, locations: _StageLocations) -> float:
    """Return the seconds of reduction and update of the pipeline's slowest unit."""
    tails: dict[Unit, float] = {}
    for stage in pipeline.stages:
        layers, gradient_bytes = locations.sums(stage)
        tail_s = locations.factor(stage.unit) * layers.update_s + per_byte * gradient_bytes / tp
        tails[stage.unit] = tails.get(stage.unit, 0.0) + tail_s
    return max(tails.values(), default=0.0)


def pipeline_timer(
    pipeline: Pipeline,
    profile: Profile,
    nodes: Sequence[NodeInfo],
    slow: Sequence[tuple[str, float]],
    tp: int,
) -> Callable[[int], float]:
    """Return a function from micro-batches to the pipeline's seconds, without backups."""
    times = _all_times(pipeline, tp, _StageLocations(profile, nodes, slow), 0.0)
    return lambda microbatches: _finish(pipeline, microbatches, times)


def _all_times(
    pipeline: Pipeline, tp: int, locations: _StageLocations, share: float
) -> tuple[StageTimes, ...]:
    return tuple(_times(pipeline, s, tp, locations, share) for s in range(len(pipeline.stages)))


def _times(
    pipeline: Pipeline, number: int, tp: int, locations: _StageLocations, share: float
) -> StageTimes:
    """Return the times of one stage.

    Streaming `share` of the stage's gradient lengthens the backward pass: by copying and
    contention, or until it ends with the transfer if that takes longer.
    """
    stage, profile = pipeline.stages[number], locations.profile
    factor = locations.factor(stage.unit)
    layers, gradient_bytes = locations.sums(stage)
    forward = factor * layers.forward_s
    again = forward if stage.recompute else 0.0
    backward = factor * layers.backward_s + again
    backward_input = factor * layers.backward_input_s + again
    weight = factor * layers.backward_weight_s
    if share:
        sent = share * gradient_bytes / tp
        x = sent * profile.link.s_per_byte
        copying = sent * profile.copy_s_per_byte
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
    """Return the seconds of a 1F1B or zero-bubble pipeline by the cost model's closed form."""
    zero = schedule == ZERO_BUBBLE
    taus = [
        t.forward_s
        + (t.backward_input_s + t.backward_weight_s if zero else t.backward_s)
        + 2 * t.hop_s
        for t in times
    ]
    fills = taus
    if zero:
        fills = [
            max(0.0, tau - 2 * t.backward_weight_s)
            for tau, t in zip(taus[:-1], times, strict=False)
        ]
    return float(pipeline_seconds(schedule, sum(fills), max(taus), microbatches))
