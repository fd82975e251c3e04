"""The last choice: whether interleaved stages run a pipeline faster than what the search has priced."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.domain.types import NodeInfo, Pipeline
from elastic.planning.cost.predict import pipeline_seconds
from elastic.planning.cost.profile import Profile
from elastic.planning.schedule.interleave import can_interleave, scheduled
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of
from elastic.planning.search.request import PlanRequest

GAIN = 0.99
"""Interleaving must be predicted to bring a pipeline down to this share of its time: it sends twice the messages."""
MOST_PIPELINES = 64


def refine(
    request: PlanRequest, profile: Profile, pipelines: tuple[Pipeline, ...], limited: bool
) -> tuple[Pipeline, ...]:
    """Put the schedule that was asked for on all pipelines; for auto, interleave where all pipelines gain by it.

    Where memory is limited only on demand: interleaved stages hold more micro-batches.
    """
    if request.schedule in (INTERLEAVED, ZERO_BUBBLE):
        return tuple(scheduled(p, request.schedule, _seconds(request, profile, p)) for p in pipelines)
    if request.schedule != "auto" or request.profile is None or limited or len(pipelines) > MOST_PIPELINES:
        return pipelines
    if not all(can_interleave(p.stages[-1].last, len(units_of(p))) for p in pipelines):
        return pipelines
    others = tuple(scheduled(p, INTERLEAVED, _seconds(request, profile, p)) for p in pipelines)

    def slowest(found: Sequence[Pipeline]) -> float:
        return max(pipeline_seconds(p, profile, request.nodes, request.slow, request.workers) for p in found)

    return others if slowest(others) < GAIN * slowest(pipelines) else pipelines


def _seconds(request: PlanRequest, profile: Profile, pipeline: Pipeline) -> list[list[float]]:
    """Per unit, the seconds of each layer on it."""
    nodes: dict[str, NodeInfo] = {info.node: info for info in request.nodes}
    slow = dict(request.slow)
    rows = []
    for unit in units_of(pipeline):
        device = nodes[unit.node].device if request.profile is not None else ""
        factor = slow.get(unit.node, 1.0)
        rows.append([factor * (t.forward_s + t.backward_s) for t in profile.device(device).layers])
    return rows
