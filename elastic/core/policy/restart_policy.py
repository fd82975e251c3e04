"""Restart policy: whether all nodes wait for a node whose workers crashed and are restarting.

If they wait, nothing moves over the network and the plan stays, because the layers of the crashed
workers are still in the memory of their node. If training continues without the node, layers move,
steps take longer until the node is back, and training pauses again for its return. Seconds lost:

    wait       s
    continue   moved bytes / bandwidth + s (1 - v) + p

s: seconds until the workers are back, measured at the first start; v: step time with the node
divided by step time without the node; p: pause for the node's return.

Nodes do not wait twice for a node that crashes again in the same step, because that step may be
the cause.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastic.core.job import join_policy, quarantine
from elastic.core.job.epoch_change import plan_request
from elastic.core.job.measured_conditions import measured_profile
from elastic.core.job.state import JobState, JobTransition, LogEntry
from elastic.core.job.stragglers import slowdowns
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import InfeasiblePlan
from elastic.planning.cost.predict import predict
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.search.search import make_plan

PATIENCE = 2.0
"""Longest wait, as a multiple of the expected start time of the workers."""


def restarting_nodes(state: JobState) -> tuple[str, ...]:
    """Return the nodes of the old plan with restarting workers; () if the plan must change."""
    change = state.change
    if change is None or change.boundary or change.old_plan is None:
        return ()
    members = [mb for node in change.old_plan.nodes() if (mb := state.members.get(node))]
    if len(members) < len(change.old_plan.nodes()):
        return ()
    if any(mb.draining or quarantine.is_quarantined(state, mb.node) for mb in members):
        return ()
    return tuple(mb.node for mb in members if mb.report.phase is NodePhase.STARTING)


def decide_wait(state: JobState, now: float) -> JobTransition | None:
    """Decide whether to wait; None if this change has a decision already or no node restarts."""
    change, nodes = state.change, restarting_nodes(state)
    if change is None or change.wait_until or not nodes:
        return None
    start_s = state.start_s
    again = [node for node in nodes if (node, change.step) in state.waited]
    without_s, why = _cost_of_continuing(state, start_s)
    wait = 0 < start_s < without_s and not again
    until = now + PATIENCE * start_s if wait else -1.0
    names = " ".join(nodes)
    reason = f"{names} back in {start_s:.3g} s; going on without: {without_s:.3g} s ({why})"
    if again:
        reason = f"{' '.join(again)} crashed again in step {change.step}; {reason}"
    entry = LogEntry("wait", {"nodes": list(nodes), "wait": wait, "reason": reason})
    waited = tuple((node, change.step) for node in nodes) if wait else state.waited
    return state.of(change=replace(change, wait_until=until), waited=waited), (entry,), reason


def is_waiting(state: JobState, now: float) -> bool:
    """Return whether nodes still wait for restarting workers."""
    change = state.change
    return change is not None and now < change.wait_until and bool(restarting_nodes(state))


def _cost_of_continuing(state: JobState, start_s: float) -> tuple[float, str]:
    """Return (seconds lost by continuing at once, explanation); infinity if no plan fits."""
    assert state.change is not None and state.change.old_plan is not None
    assert state.spec is not None
    old = state.change.old_plan
    try:
        plan = make_plan(plan_request(state, state.epoch))
    except InfeasiblePlan as error:
        return inf, str(error)
    profile, infos = measured_profile(state), state.infos
    links = links_of(profile, infos)
    moving_s = transition(old, plan, state.spec.layers, links=links, gradients=True).seconds
    with_s, without_s = (predict(p, profile, infos, slowdowns(state)).step_s for p in (old, plan))
    lost = max(0.0, 1 - with_s / without_s) if without_s > 0 else 0.0
    pause_s = join_policy.outlook(state, state.updated_at).pause_in_s
    parts = f"{moving_s:.3g} s to move layers, {lost:.0%} less speed, a pause of {pause_s:.3g} s"
    return moving_s + start_s * lost + pause_s, parts
