"""Repairs the damaged pipelines of a plan, and leaves the others alone.

It is the planner's part of a recovery in which the others go on computing meanwhile
(docs/design/local-recovery.md).

The others keep their nodes, cuts and schedules. The nodes that no whole pipeline uses, spares among
them, form new pipelines in the place of the damaged ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import NodeInfo, Pipeline, Plan
from elastic.planning.backup.backup_cost import is_replicated
from elastic.planning.backup.peer_assignment import choose_peers, natural
from elastic.planning.cost.predict import pipeline_timer
from elastic.planning.plan.schemes import REDUCE, REPLICA, gradients_of, state_of
from elastic.planning.schedule.microbatch_split import Cost, allot, deal
from elastic.planning.search.request import PlanRequest, select_nodes
from elastic.planning.search.search import make_plan


def repair(request: PlanRequest, stay: Collection[str] = ()) -> Plan | None:
    """Return a plan in which new pipelines replace those of the current plan that lost a node.

    There are as many new pipelines as damaged ones if the free nodes suffice, else fewer, at least
    one. The backup schemes stay; micro-batches are dealt anew, for the steps after the present one.

    `stay`: nodes whose pipelines must stay as they are, because they go on meanwhile. With it, all
    pipelines may stay, if the workers of a damaged one were restarted; and a damaged one may go
    without a new one in its place.

    None: the current plan has no whole pipeline, or none that is damaged; a pipeline cannot stay;
    the free nodes cannot form a pipeline; or the plan would not have the copies that its backup
    schemes need.
    """
    current = request.current
    if current is None or not _can_stay(current, request):
        return None
    active, _ = select_nodes(request)
    whole = _whole_pipelines(current, {info.node for info in active})
    damaged = [pipeline for pipeline in current.pipelines if pipeline not in whole]
    if any(_nodes_of(pipeline) & set(stay) for pipeline in damaged):
        return None
    if not damaged and stay:
        return _with_backups(request, current, _with_shares(request, current, current.pipelines))
    if not damaged or not whole:
        return None
    used = {node for pipeline in whole for node in _nodes_of(pipeline)}
    free = [info for info in active if info.node not in used]
    made = _new_pipelines(request, damaged, free)
    if not made and not stay:
        return None
    fresh = iter(made)
    slots = (one if one in whole else next(fresh, None) for one in current.pipelines)
    pipelines = [pipeline for pipeline in slots if pipeline is not None]
    return _with_backups(request, current, _with_shares(request, current, pipelines))


def _whole_pipelines(current: Plan, here: set[str]) -> list[Pipeline]:
    """Return the pipelines that lost no node, and share none with a pipeline that did. A node halts
    in all its pipelines, so a shared node damages both."""
    whole = [pipeline for pipeline in current.pipelines if _nodes_of(pipeline) <= here]
    while True:
        damaged = {n for p in current.pipelines if p not in whole for n in _nodes_of(p)}
        left = [pipeline for pipeline in whole if not _nodes_of(pipeline) & damaged]
        if len(left) == len(whole):
            return left
        whole = left


def _can_stay(current: Plan, request: PlanRequest) -> bool:
    """Return whether pipelines of the current plan can stay as they are in a plan for `request`."""
    same = current.n_layers == request.spec.n_layers and current.tp == request.workers
    return same and current.n_microbatches == request.spec.n_microbatches


def _nodes_of(pipeline: Pipeline) -> set[str]:
    return {stage.unit.node for stage in pipeline.stages}


def _new_pipelines(
    request: PlanRequest, damaged: Sequence[Pipeline], free: Sequence[NodeInfo]
) -> tuple[Pipeline, ...]:
    """Return as many pipelines on `free` nodes as are damaged, or as many as fit; (): none fits."""
    missing = sum(len(pipeline.microbatches) for pipeline in damaged)
    for number in range(min(len(damaged), len(free)), 0, -1):
        spec = replace(request.spec, n_microbatches=max(missing, number))
        part = replace(
            request,
            spec=spec,
            nodes=tuple(free),
            max_nodes=0,
            shape=str(number),
            backup="auto",
            weighing=None,
        )
        try:
            found = make_plan(part)
        except InfeasiblePlan:
            continue
        if len(found.pipelines) == number:
            return found.pipelines
    return ()


def _with_shares(request: PlanRequest, current: Plan, pipelines: Sequence[Pipeline]) -> Plan:
    """Return the plan of these pipelines, with micro-batches dealt so that all finish together."""
    profile, total = request.effective_profile(), request.spec.n_microbatches

    def cost(pipeline: Pipeline) -> Cost:
        """Return the finish time: simulated for few micro-batches, extrapolated for more."""
        seconds = pipeline_timer(pipeline, profile, request.nodes, request.slow, current.tp)
        few = 2 * len(pipeline.stages)
        base, each = seconds(few), (seconds(2 * few) - seconds(few)) / few
        return lambda m: seconds(m) if m < few else base + (m - few) * each

    counts = allot(total, [cost(pipeline) for pipeline in pipelines])
    shares = deal(range(total), counts)
    dealt = tuple(replace(p, microbatches=m) for p, m in zip(pipelines, shares, strict=True))
    used = {node for pipeline in dealt for node in _nodes_of(pipeline)}
    spares = (info.node for info in request.nodes if info.node not in used | request.dead)
    return replace(
        current, epoch=request.epoch, pipelines=dealt, spares=tuple(sorted(spares, key=natural))
    )


def _with_backups(request: PlanRequest, current: Plan, plan: Plan) -> Plan | None:
    """Return the plan with a peer for each node: the present one where it is left.

    None: the schemes of the current plan need more holders.
    """
    state = state_of(plan.state)
    if state.sharded and len(plan.pipelines) != len(current.pipelines):
        return None  # portions would have other bounds, also those of the pipelines that stay
    alive = tuple(info for info in request.nodes if info.node not in request.dead)
    needs = state.name == REPLICA or gradients_of(plan.gradients).name == REDUCE
    if needs and not is_replicated(plan, alive)[0]:
        return None
    layers: dict[str, frozenset[int]] = {}
    for _, _, stage in plan.stages():
        layers[stage.unit.node] = layers.get(stage.unit.node, frozenset()) | {*stage.layers}
    keepers = {info.node for info in alive if info.keeps} & {*layers, *plan.spares}
    before = {node: peer for node, peer in current.peers if peer in keepers}
    chosen = dict(choose_peers(alive, layers, plan.spares))
    peers = tuple((n, before.get(n, chosen[n])) for n in layers if n in before or n in chosen)
    stay = sum(
        any((p.stages, p.schedule) == (one.stages, one.schedule) for one in current.pipelines)
        for p in plan.pipelines
    )
    reason = f"{len(plan.pipelines) - stay} pipelines made anew, {stay} stay as they are"
    return replace(plan, peers=peers, reason=reason)
