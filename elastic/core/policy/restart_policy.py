"""A node whose workers crashed comes back with its vault: whether everybody waits for it, or goes on without.

The agent starts the workers again, and their layers lie in the node's own memory: nothing goes over the network, and
the plan stays. Going on without costs the bytes that move, less speed until the node is back, and another pause then:

    wait     s                                    s: seconds until they are back, as long as the first start took
    go on    moved bytes / link + s (1 - v) + p   v: speed without the node over that with it, p: pause of its return

Who crashes again in the step that it was waited for in is not waited for: that step may be what it crashes of.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.job import epoch_change as epoch_change
from elastic.core.job import join_policy as stay
from elastic.core.job import quarantine
from elastic.core.job.measured_conditions import measured_profile
from elastic.core.job.state import JobState, JobTransition, LogEntry
from elastic.core.job.stragglers import slowdowns
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import LayerSpec
from elastic.planning.cost.predict import predict
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.search.search import make_plan

PATIENCE = 2.0
"""Times the expected start after which the others go on all the same."""


def restarting_nodes(state: JobState) -> tuple[str, ...]:
    """Nodes of the old plan whose agents live and whose workers are starting again."""
    change = state.change
    if change is None or change.boundary or change.old_plan is None:
        return ()
    members = [state.members.get(node) for node in change.old_plan.nodes()]
    if any(
        member is None or member.draining or quarantine.is_quarantined(state, member.node)
        for member in members
    ):
        return ()  # the plan changes anyway
    return tuple(mb.node for mb in members if mb and mb.report.phase is NodePhase.STARTING)


def decide_wait(state: JobState, now: float) -> JobTransition | None:
    """Decide once for each change whether to wait; None: that was done, or nobody comes back."""
    change, back = state.change, restarting_nodes(state)
    if change is None or change.wait_until or not back:
        return None
    left_s, again = state.start_s, [node for node in back if (node, change.step) in state.waited]
    go_on_s, why = _without(state, left_s)
    wait = 0 < left_s < go_on_s and not again
    until = now + PATIENCE * left_s if wait else -1.0
    reason = f"{' '.join(back)} back in {left_s:.3g} s; going on without: {go_on_s:.3g} s ({why})"
    if again:
        reason = f"{' '.join(again)} crashed again in step {change.step}; {reason}"
    note = LogEntry("wait", {"nodes": list(back), "wait": wait, "reason": reason})
    waited = tuple((node, change.step) for node in back) if wait else state.waited
    return state.of(change=replace(change, wait_until=until), waited=waited), (note,), reason


def is_waiting(state: JobState, now: float) -> bool:
    """Somebody is worth waiting for, and not yet overdue."""
    return state.change is not None and now < state.change.wait_until and bool(restarting_nodes(state))


def _without(state: JobState, left_s: float) -> tuple[float, str]:
    """Seconds that going on at once costs, and of what they are made."""
    assert state.change is not None and state.change.old_plan is not None and state.spec is not None
    old = state.change.old_plan
    try:
        plan = make_plan(epoch_change.plan_request(state, state.epoch))
    except InfeasiblePlan as error:
        return float("inf"), str(error)
    profile, infos = measured_profile(state), tuple(mb.report.info for mb in state.members.values())
    layers: tuple[LayerSpec, ...] = state.spec.layers
    moving_s = transition(old, plan, layers, links=links_of(profile, infos), gradients=True).seconds
    with_s, without_s = (predict(p, profile, infos, slowdowns(state)).step_s for p in (old, plan))
    lost = max(0.0, 1 - with_s / without_s) if without_s > 0 else 0.0
    pause_s = stay.outlook(state, state.updated_at).pause_in_s
    return moving_s + left_s * lost + pause_s, (
        f"{moving_s:.3g} s to move layers, {lost:.0%} less speed, a pause of {pause_s:.3g} s"
    )
