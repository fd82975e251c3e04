"""From shapes to a plan: nodes for the slots, cuts that move less, backups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.backup.backup_cost import Weighing, choose, estimates, is_replicated
from elastic.planning.backup.peer_assignment import choose_peers
from elastic.planning.cost.cost_model import CostModel
from elastic.planning.cost.node_kinds import NodeKinds
from elastic.planning.cost.predict import pipeline_seconds
from elastic.planning.cost.profile import Profile
from elastic.planning.placement.exchange import Host, Slot
from elastic.planning.placement.placement import Holdings, assign, recut
from elastic.planning.plan.schemes import REDUCE, REPLICA, SNAPSHOT, gradients_of, streamed
from elastic.planning.schedule.interleave import can_interleave, scheduled
from elastic.planning.schedule.microbatch_split import deal
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of
from elastic.planning.search.evaluate import largest_tail
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.problem import TIME_TOLERANCE, PipelineShape, Solution
from elastic.planning.search.request import PlanRequest

MAX_NODES_TO_RECUT = 128
"""Nodes up to which pipelines are cut again to move less."""


def build_pipelines(
    request: PlanRequest,
    solution: Solution,
    kinds: NodeKinds,
    model: CostModel,
    active: Sequence[NodeInfo],
    kept: Sequence[tuple[Pipeline, PipelineShape]] = (),
) -> tuple[Pipeline, ...]:
    """Choose nodes for the slots of the shapes, such that as few bytes as possible move. `kept`: pipelines that stay
    on their nodes, with what they take; they come first."""
    shapes = sorted(solution.shapes, key=lambda shape: -shape.depth)
    everything = [*(shape for _, shape in kept), *shapes]
    shares = deal(range(request.spec.n_microbatches), [shape.microbatches for shape in everything])
    staying = [_kept(*pair, share, model) for pair, share in zip(kept, shares, strict=False)]
    layers = request.spec.layers
    full = [la.param_bytes + la.state_bytes + la.gradient_bytes for la in layers]
    used = {stage.unit.node for pipeline in staying for stage in pipeline.stages}
    free = [info for info in active if info.node not in used]
    if not shapes:
        return tuple(staying)
    holdings = Holdings.of(request.current, layers)
    slots = [slot for p, shape in enumerate(shapes) for slot in _slots(shape, p)]
    hosts = [Host(info.node, kinds.of[info.node], info.domain) for info in free]
    names = iter(assign(slots, hosts, holdings, full))
    tail = inf if model.has_no_tail else largest_tail(model, everything)
    pipelines = []
    for shape, share in zip(shapes, shares[len(staying) :], strict=True):
        owners = [next(names) for _ in shape.kinds]
        cutter = LayerPartitioner(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
        cuts = shape.cuts
        if holdings.live and len(active) <= MAX_NODES_TO_RECUT:
            cuts = _recut(cutter, shape, owners, holdings, full, model, tail, len(everything))
        pipelines.append(Pipeline(_stages(shape, owners, cuts, cutter), share, shape.schedule))
    return (*staying, *pipelines)


def _kept(pipeline: Pipeline, shape: PipelineShape, share: tuple[int, ...], model: CostModel) -> Pipeline:
    """The same stages on the same nodes; what is recomputed follows from the micro-batches now in flight."""
    again = recomputing_stages(model, shape)
    if any(again) or any(stage.recompute for stage in pipeline.stages):
        stages = tuple(replace(stage, recompute=r) for stage, r in zip(pipeline.stages, again, strict=True))
        return replace(pipeline, stages=stages, microbatches=share)
    return replace(pipeline, microbatches=share)


@lru_cache(maxsize=512)
def recomputing_stages(model: CostModel, shape: PipelineShape) -> tuple[bool, ...]:
    """Which stages of a shape have to recompute."""
    cutter = LayerPartitioner(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
    return tuple(
        bool(t.recompute[a, b]) for t, (a, b) in zip(cutter.tables, pairwise(shape.cuts), strict=True)
    )


def _slots(shape: PipelineShape, pipeline: int) -> list[Slot]:
    """One slot a node: the layers of its stages."""
    ends = list(accumulate(shape.stages, initial=0))
    return [
        Slot(kind, range(shape.cuts[a], shape.cuts[b]), pipeline)
        for kind, a, b in zip(shape.kinds, ends, ends[1:], strict=False)
    ]


def _stages(shape: PipelineShape, owners: Sequence[str], cuts: Sequence[int], cutter: LayerPartitioner) -> tuple[Stage, ...]:
    units = [Unit(node, group) for node, n in zip(owners, shape.stages, strict=True) for group in range(n)]
    return tuple(
        Stage(unit, a, b, bool(table.recompute[a, b]))
        for unit, table, a, b in zip(units, cutter.tables, cuts, cuts[1:], strict=False)
    )


def _recut(
    cutter: LayerPartitioner, shape: PipelineShape, owners: Sequence[str], holdings: Holdings, full: Sequence[int],
    model: CostModel, tail: float, pipelines: int,
) -> tuple[int, ...]:  # fmt: skip
    """Cuts that are as fast and move less. Only where all nodes are of a kind, so that no layer is faster elsewhere."""
    recomputes = any(
        bool(t.recompute[a, b]) for t, a, b in zip(cutter.tables, shape.cuts, shape.cuts[1:], strict=False)
    )
    if len(set(shape.kinds)) > 1 or recomputes:
        return shape.cuts
    hosts = [node for node, n in zip(owners, shape.stages, strict=True) for _ in range(n)]
    if all(
        holdings.holds(node, range(a, b)) for node, (a, b) in zip(hosts, pairwise(shape.cuts), strict=True)
    ):
        return shape.cuts
    fill, slowest = cutter.seconds(shape.cuts)
    moved = {node: holdings.missing(node, full) for node in set(hosts)}
    allowed = model.tails(shape.kinds[0], pipelines) <= tail * (1 + TIME_TOLERANCE)
    reach = [
        _reach((table.tau <= slowest * (1 + TIME_TOLERANCE)) & ~table.recompute & allowed) for table in cutter.tables
    ]
    cuts = recut(reach, [moved[node] for node in hosts], shape.cuts)
    return cuts if cutter.seconds(cuts)[0] <= fill * (1 + TIME_TOLERANCE) else shape.cuts


def _reach(able: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[int]:
    """For each first layer, the last layer + 1 up to which every end is able."""
    size = able.shape[0]
    stops = np.ones((size, size + 1), dtype=bool)
    stops[:, :size] = np.triu(~able, 1)
    return [int(stop) - 1 for stop in stops.argmax(axis=1)]


# ---- backups ----


def assign_backups(
    plan: Plan, nodes: tuple[NodeInfo, ...], backup: str, weighing: Weighing | None = None
) -> tuple[Plan, str]:
    """Return the plan with peers and backup schemes, and why these. `weighing`: what `auto` chooses by; without it, the
    pair that loses least."""
    layers: dict[str, frozenset[int]] = {}
    for _, _, stage in plan.stages():
        layers[stage.unit.node] = layers.get(stage.unit.node, frozenset()) | frozenset(stage.layers)
    peers = choose_peers(nodes, layers, plan.spares)
    if not peers:
        gradients, state = ("stream+snapshot" if backup == "auto" else backup).split("+")
        alone = replace(plan, gradients=streamed(gradients), state=state)
        return alone, "copies stay on their own node: no peer"
    replicated, reason = is_replicated(plan, nodes)
    plan = replace(plan, peers=peers)
    if backup == "auto" and weighing is not None:
        best, why = choose(estimates(plan, weighing, nodes, replicated=replicated), weighing.room_bytes)
        return replace(plan, gradients=best.gradients, state=best.state), f"backup {why}; {reason}"
    gradients, state = (
        ("stream", "replica" if replicated else "snapshot") if backup == "auto" else backup.split("+")
    )
    if not replicated:
        unfit = [name for name in (gradients_of(gradients).name, state) if name in (REDUCE, REPLICA)]
        if unfit:
            reason = f"{reason}, so {' and '.join(unfit)} would not do"
        gradients, state = streamed(gradients), SNAPSHOT if state == REPLICA else state
    return replace(plan, gradients=gradients, state=state), f"backup {gradients}+{state}: {reason}"


MAX_INTERLEAVED_RATIO = 0.99
"""Interleaving must be predicted to bring a pipeline down to this share of its time: it sends twice the messages."""
MAX_PIPELINES_TO_INTERLEAVE = 64


def apply_schedule(
    request: PlanRequest, profile: Profile, pipelines: tuple[Pipeline, ...], limited: bool
) -> tuple[Pipeline, ...]:
    """Put the schedule that was asked for on all pipelines; for auto, interleave where all pipelines gain by it.

    Where memory is limited only on demand: interleaved stages hold more micro-batches.
    """
    if request.schedule in (INTERLEAVED, ZERO_BUBBLE):
        return tuple(scheduled(p, request.schedule, _seconds(request, profile, p)) for p in pipelines)
    if request.schedule != "auto" or request.profile is None or limited or len(pipelines) > MAX_PIPELINES_TO_INTERLEAVE:
        return pipelines
    if not all(can_interleave(p.stages[-1].last, len(units_of(p))) for p in pipelines):
        return pipelines
    others = tuple(scheduled(p, INTERLEAVED, _seconds(request, profile, p)) for p in pipelines)

    def slowest(found: Sequence[Pipeline]) -> float:
        return max(pipeline_seconds(p, profile, request.nodes, request.slow, request.workers) for p in found)

    return others if slowest(others) < MAX_INTERLEAVED_RATIO * slowest(pipelines) else pipelines


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
