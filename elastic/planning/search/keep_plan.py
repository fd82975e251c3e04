"""Whether what the current plan still has is better kept than changed for the best plan."""

from __future__ import annotations

from dataclasses import replace

from elastic.domain.types import Pipeline, Plan
from elastic.planning.backup.amortization import Option, choose, horizon_s
from elastic.planning.backup.peer_assignment import natural
from elastic.planning.cost.predict import pipeline_pace, predict
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.schedule.microbatch_split import Cost, allot, deal
from elastic.planning.search.assemble import protect
from elastic.planning.search.request import PlanRequest

MOST_NODES = 256


def staying(request: PlanRequest, best: Plan) -> Plan:
    """Return `best`, or the pipelines of the current plan that are whole, if their shorter pause makes more
    progress until the next change. Weighed only where losses were observed and links are known: else changes
    cost alike."""
    current, profile = request.current, request.profile
    if current is None or profile is None or not profile.link.bytes_per_s or request.hazard_per_s <= 0:
        return best
    if request.shape != "auto" or len(request.nodes) > MOST_NODES or current.n_layers != best.n_layers:
        return best
    kept = _whole(request, current)
    if kept is None:
        return best
    links = links_of(profile, request.nodes)
    plans, options = [best, kept], []
    for plan in plans:
        moved = transition(current, plan, request.spec.layers, dead=request.dead, links=links, gradients=True)
        step_s = predict(plan, profile, request.nodes, request.slow).step_s
        options.append(Option(step_s, request.pause_s + moved.seconds))
    horizon = horizon_s(request.hazard_per_s, len(best.nodes()))
    chosen, why = choose(options, horizon)
    plan = plans[chosen]
    return replace(plan, reason=f"{plan.reason}; {why}") if why else plan


def _whole(request: PlanRequest, current: Plan) -> Plan | None:
    """The current pipelines that lost nothing, with all micro-batches shared out among them."""
    alive = {info.node for info in request.nodes} - request.dead
    whole = [p for p in current.pipelines if all(stage.unit.node in alive for stage in p.stages)]
    if not whole or len(whole) > request.spec.n_microbatches or request.profile is None:
        return None
    profile = request.profile

    def cost(pipeline: Pipeline) -> Cost:
        """Run against the clock for a few micro-batches; each further one takes as long as those before."""
        seconds = pipeline_pace(pipeline, profile, request.nodes, request.slow, current.tp)
        few = 2 * len(pipeline.stages)
        base, pace = seconds(few), (seconds(2 * few) - seconds(few)) / few
        return lambda m: seconds(m) if m < few else base + (m - few) * pace

    counts = allot(request.spec.n_microbatches, [cost(pipeline) for pipeline in whole])
    shares = deal(range(request.spec.n_microbatches), counts)
    pipelines = tuple(replace(p, microbatches=share) for p, share in zip(whole, shares, strict=True))
    used = {stage.unit.node for p in pipelines for stage in p.stages}
    plan = replace(
        current,
        epoch=request.epoch,
        n_microbatches=request.spec.n_microbatches,
        pipelines=pipelines,
        spares=tuple(sorted(alive - used, key=natural)),
        peers=(),
    )
    nodes = tuple(n for n in request.nodes if n.node in alive)
    plan, why = protect(plan, nodes, request.backup, request.schemes_by())
    return replace(plan, reason=f"the pipelines that are whole stay as they are; {why}")
