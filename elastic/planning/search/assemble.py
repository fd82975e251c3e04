"""Turns a solution into a plan: assigns nodes, cuts, schedules and backups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.backup.backup_cost import Weighing, choose_pair, estimates, is_replicated
from elastic.planning.backup.peer_assignment import choose_peers
from elastic.planning.cost.cost_model import CostModel
from elastic.planning.cost.node_kinds import NodeKinds
from elastic.planning.cost.predict import pipeline_timer
from elastic.planning.cost.profile import Profile
from elastic.planning.placement.placement import Holdings, Host, Slot, assign, recut
from elastic.planning.plan.schemes import REDUCE, REPLICA, SNAPSHOT, gradients_of, streamed
from elastic.planning.schedule.interleave import can_interleave, scheduled
from elastic.planning.schedule.microbatch_split import deal
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of
from elastic.planning.search.evaluate import largest_tail
from elastic.planning.search.layer_partition import LayerPartitioner, partitioner_of
from elastic.planning.search.problem import TIME_TOLERANCE, PipelineShape, Solution
from elastic.planning.search.request import PlanRequest

MAX_NODES_TO_RECUT = 128
"""Maximum number of nodes for which pipelines are cut again to move less."""
MAX_INTERLEAVED_RATIO = 0.99
"""Interleaving must take less than this fraction of the time: it sends twice the messages."""
MAX_PIPELINES_TO_INTERLEAVE = 64


def build_pipelines(
    request: PlanRequest,
    solution: Solution,
    kinds: NodeKinds,
    model: CostModel,
    active: Sequence[NodeInfo],
    kept: Sequence[tuple[Pipeline, PipelineShape]] = (),
) -> tuple[Pipeline, ...]:
    """Return all pipelines, with nodes assigned to the shapes so that the fewest bytes move.

    `kept`: pipelines that stay on their nodes, with their shapes; they come first.
    """
    shapes = sorted(solution.shapes, key=lambda shape: -shape.depth)
    everything = [*(shape for _, shape in kept), *shapes]
    counts = [shape.microbatches for shape in everything]
    shares = deal(range(request.spec.n_microbatches), counts)
    staying = [_kept(*pair, share, model) for pair, share in zip(kept, shares, strict=False)]
    if not shapes:
        return tuple(staying)
    layers = request.spec.layers
    full = [la.param_bytes + la.state_bytes + la.gradient_bytes for la in layers]
    used = {stage.unit.node for pipeline in staying for stage in pipeline.stages}
    holdings = Holdings.of(request.current, layers)
    slots = [slot for p, shape in enumerate(shapes) for slot in _slots(shape, p)]
    hosts = [
        Host(info.node, kinds.index_of[info.node], info.domain)
        for info in active
        if info.node not in used
    ]
    names = iter(assign(slots, hosts, holdings, full))
    tail = inf if model.has_no_tail else largest_tail(model, everything)
    pipelines = []
    for shape, share in zip(shapes, shares[len(staying) :], strict=True):
        owners = [next(names) for _ in shape.kinds]
        partitioner = partitioner_of(model, shape)
        cuts = shape.cuts
        if holdings.live and len(active) <= MAX_NODES_TO_RECUT:
            allowed = model.tails(shape.kinds[0], len(everything)) <= tail * (1 + TIME_TOLERANCE)
            cuts = _recut(partitioner, shape, owners, holdings, full, allowed)
        stages = _stages(shape, owners, cuts, partitioner)
        pipelines.append(Pipeline(stages, share, shape.schedule))
    return (*staying, *pipelines)


def _kept(
    pipeline: Pipeline, shape: PipelineShape, share: tuple[int, ...], model: CostModel
) -> Pipeline:
    """Return `pipeline` with micro-batches `share`; their number decides which stages recompute."""
    again = recomputing_stages(model, shape)
    stages = tuple(
        stage if stage.recompute == r else replace(stage, recompute=r)
        for stage, r in zip(pipeline.stages, again, strict=True)
    )
    return replace(pipeline, stages=stages, microbatches=share)


@lru_cache(maxsize=512)
def recomputing_stages(model: CostModel, shape: PipelineShape) -> tuple[bool, ...]:
    """Return, for each stage of a shape, whether it has to recompute."""
    pairs = zip(partitioner_of(model, shape).tables, pairwise(shape.cuts), strict=True)
    return tuple(bool(table.recompute[a, b]) for table, (a, b) in pairs)


def _slots(shape: PipelineShape, pipeline: int) -> list[Slot]:
    """Return a slot per node, with the layers of its stages."""
    ends = pairwise(accumulate(shape.stages, initial=0))
    return [
        Slot(kind, range(shape.cuts[a], shape.cuts[b]), pipeline)
        for kind, (a, b) in zip(shape.kinds, ends, strict=True)
    ]


def _stages(
    shape: PipelineShape, owners: Sequence[str], cuts: Sequence[int], partitioner: LayerPartitioner
) -> tuple[Stage, ...]:
    hosts = zip(owners, shape.stages, strict=True)
    units = [Unit(node, group) for node, n in hosts for group in range(n)]
    return tuple(
        Stage(unit, a, b, bool(table.recompute[a, b]))
        for unit, table, (a, b) in zip(units, partitioner.tables, pairwise(cuts), strict=True)
    )


def _recut(
    partitioner: LayerPartitioner,
    shape: PipelineShape,
    owners: Sequence[str],
    holdings: Holdings,
    full: Sequence[int],
    allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> tuple[int, ...]:
    """Return cuts that are as fast as those of `shape` and move less, or its own cuts.

    New cuts are tried only if no stage recomputes and all nodes are of one kind, so that no layer
    is faster on another node. `allowed`: stages within the limit on the tail, [L + 1, L + 1].
    """
    pairs = list(pairwise(shape.cuts))
    tables = partitioner.tables
    recomputes = any(t.recompute[a, b] for t, (a, b) in zip(tables, pairs, strict=True))
    if len(set(shape.kinds)) > 1 or recomputes:
        return shape.cuts
    hosts = [node for node, n in zip(owners, shape.stages, strict=True) for _ in range(n)]
    if all(holdings.holds(node, range(a, b)) for node, (a, b) in zip(hosts, pairs, strict=True)):
        return shape.cuts
    fill, slowest = partitioner.fill_and_slowest(shape.cuts)
    moved = {node: holdings.missing(node, full) for node in set(hosts)}
    limit = slowest * (1 + TIME_TOLERANCE)
    reach = [_reach((table.tau <= limit) & ~table.recompute & allowed) for table in tables]
    cuts = recut(reach, [moved[node] for node in hosts], shape.cuts)
    as_fast = partitioner.fill_and_slowest(cuts)[0] <= fill * (1 + TIME_TOLERANCE)
    return cuts if as_fast else shape.cuts


def _reach(able: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[int]:
    """Return, per first layer, the largest end up to which all ends are able."""
    size = able.shape[0]
    stops = np.ones((size, size + 1), dtype=bool)
    stops[:, :size] = np.triu(~able, 1)
    return [int(stop) - 1 for stop in stops.argmax(axis=1)]


def apply_schedule(
    request: PlanRequest, profile: Profile, pipelines: tuple[Pipeline, ...], limited: bool
) -> tuple[Pipeline, ...]:
    """Return the pipelines under the requested schedule; auto interleaves if the slowest one gains.

    `limited`: memory is limited; then auto does not interleave, which needs more memory.
    """

    def with_schedule(schedule: str) -> tuple[Pipeline, ...]:
        return tuple(scheduled(p, schedule, _seconds(request, profile, p)) for p in pipelines)

    def slowest(found: Sequence[Pipeline]) -> float:
        return max(
            pipeline_timer(p, profile, request.nodes, request.slow, request.workers)(
                len(p.microbatches)
            )
            for p in found
        )

    if request.schedule in (INTERLEAVED, ZERO_BUBBLE):
        return with_schedule(request.schedule)
    if request.schedule != "auto" or request.profile is None or limited:
        return pipelines
    if len(pipelines) > MAX_PIPELINES_TO_INTERLEAVE or not all(
        can_interleave(p.stages[-1].last, len(units_of(p))) for p in pipelines
    ):
        return pipelines
    others = with_schedule(INTERLEAVED)
    return others if slowest(others) < MAX_INTERLEAVED_RATIO * slowest(pipelines) else pipelines


def _seconds(request: PlanRequest, profile: Profile, pipeline: Pipeline) -> list[list[float]]:
    """Return, per unit, the seconds of each layer on it."""
    nodes: dict[str, NodeInfo] = {info.node: info for info in request.nodes}
    slow = dict(request.slow)
    rows = []
    for unit in units_of(pipeline):
        device = nodes[unit.node].device if request.profile is not None else ""
        factor = slow.get(unit.node, 1.0)
        rows.append([factor * (t.forward_s + t.backward_s) for t in profile.device(device).layers])
    return rows


def assign_backups(
    plan: Plan, nodes: tuple[NodeInfo, ...], backup: str, weighing: Weighing | None = None
) -> tuple[Plan, str]:
    """Return the plan with peers and backup schemes, and the reason for these.

    `weighing`: input to the choice for `auto`; None: stream, with replica if all layers have one.
    """
    layers: dict[str, frozenset[int]] = {}
    for _, _, stage in plan.stages():
        layers[stage.unit.node] = layers.get(stage.unit.node, frozenset()) | {*stage.layers}
    peers = choose_peers(nodes, layers, plan.spares)
    if not peers:
        gradients, state = ("stream+snapshot" if backup == "auto" else backup).split("+")
        alone = replace(plan, gradients=streamed(gradients), state=state)
        return alone, "copies stay on their own node: no peer"
    replicated, reason = is_replicated(plan, nodes)
    plan = replace(plan, peers=peers)
    if backup == "auto" and weighing is not None:
        found = estimates(plan, weighing, nodes)
        best, why = choose_pair(found, weighing.room_bytes)
        return replace(plan, gradients=best.gradients, state=best.state), f"backup {why}; {reason}"
    if backup == "auto":
        backup = f"stream+{REPLICA if replicated else SNAPSHOT}"
    gradients, state = backup.split("+")
    if not replicated:
        names = (gradients_of(gradients).name, state)
        unfit = [name for name in names if name in (REDUCE, REPLICA)]
        if unfit:
            reason = f"{reason}, so {' and '.join(unfit)} would not do"
        gradients, state = streamed(gradients), SNAPSHOT if state == REPLICA else state
    reason = f"backup {gradients}+{state}: {reason}"
    return replace(plan, gradients=gradients, state=state), reason
