"""Join policy: the nodes that a plan uses, given the time for which they will probably stay.

A pause must pay off before the next change (`elastic.planning.backup.amortization`). It is compared

- for nodes that joined, before the running plan is changed for them: both pauses count;
- for nodes that are expected to leave, whenever a plan is made anyway (a loss, a drain, the start):
  only the pause of their departure counts.

A node that was rejected for its short stay can therefore be used once other nodes are lost. It is
always used if no plan fits without it. A node is considered again when its expected stay changes.
If the only reason was a cluster that changes too often, it is considered again after enough time
without a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from elastic.core.job.state import EpochChange, JobState, Member
from elastic.core.job.stragglers import predicted_step_s
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import Plan
from elastic.planning.backup.amortization import DEFAULT_PAUSE_S, Outlook, Verdict, worth
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.search.search import PlanRequest, make_plan

MAX_PAUSES = 9
"""Number of the newest pauses whose median is the expected pause."""


def count_node_seconds(state: JobState, now: float, left: int = 0) -> JobState:
    """Add up node-seconds. Call it before members join, or before `left` of them leave."""
    since = len(state.members) * max(0.0, now - state.counted_at) if state.counted_at else 0.0
    node_seconds, losses = state.node_seconds + since, state.losses + left
    return state.of(node_seconds=node_seconds, counted_at=now, losses=losses)


def without_member(state: JobState, node: str, now: float, left: int = 0) -> JobState:
    """Remove a member. `left`: 1 if it counts as one that left."""
    members = {name: mb for name, mb in state.members.items() if name != node}
    return count_node_seconds(state, now, left).of(members=members)


def with_expected_end(member: Member, now: float) -> Member:
    """The member with the end of the lifetime that its agent announced."""
    lifetime_s = member.report.info.lifetime_s
    return replace(member, expected_end=now + lifetime_s if lifetime_s > 0 else 0.0)


def member_key(member: Member) -> str:
    """Key of a considered node. It changes with the node's expected stay."""
    info = member.report.info
    return f"{info.incarnation}/{info.lifetime_s:g}" if info.lifetime_s > 0 else info.incarnation


def record_pause(state: JobState, change: EpochChange, resumed_at: float) -> JobState:
    """Remember the pause of a change, except at the start and after a wait for crashed workers."""
    if change.old_plan is None or change.wait_until > 0:
        return state
    planned = change.boundary and change.paused
    since = change.paused if planned else change.began - change.detect_s
    pause_s = max(0.0, resumed_at - since)
    pauses = (*state.pauses, pause_s)[-MAX_PAUSES:]
    return state.of(pauses=pauses, seen=state.seen.grown(pause_s=pause_s))


def outlook(state: JobState, now: float, *, anyway: bool = False) -> Outlook:
    """Expected losses and pauses. `anyway`: training pauses in any case."""
    pause_s = median(state.pauses) if state.pauses else DEFAULT_PAUSE_S
    return Outlook(
        losses=state.losses,
        node_seconds=count_node_seconds(state, now).node_seconds,
        pause_in_s=0.0 if anyway else pause_s,
        pause_out_s=pause_s,
    )


@dataclass(frozen=True, slots=True)
class JoinChoice:
    """A plan for some of the available nodes."""

    plan: Plan | None
    """None: no plan is worth a change."""
    aside: tuple[str, ...] = ()
    """Rejected nodes."""
    reason: str = ""
    """Reason of the rejection."""
    retry_s: float = inf
    """Time after which the nodes should be considered again."""


def plan_for_change(state: JobState, request: PlanRequest, now: float) -> JoinChoice:
    """Plan for a change that is made anyway.

    It leaves out nodes that will go before they are worth a second pause. Raises InfeasiblePlan if
    there is no plan with all available nodes.
    """
    request = replace(request, pause_s=0.0)
    plan = make_plan(request)
    ahead = outlook(state, now, anyway=True)
    aside: list[str] = []
    reasons: list[str] = []
    while True:
        nodes, left_s = _first_to_go(state, plan.nodes(), now)
        if left_s == inf:
            break
        fewer = _without(request, nodes)
        other = plan_if_feasible(fewer)
        if other is None:
            break
        used, speedup = len(plan.nodes()), _speedup(state, other, plan)
        verdict = worth(ahead, speedup=speedup, lifetime_s=left_s, nodes=used)
        if verdict.use:
            break
        request, plan = fewer, other
        aside += nodes
        reasons.append(f"{' '.join(nodes)} left aside: {verdict.reason}")
    if not aside:
        return JoinChoice(plan)
    why = "; ".join(reasons)
    plan = replace(plan, spares=(*plan.spares, *aside), reason=f"{plan.reason}; {why}")
    return JoinChoice(plan, tuple(aside), why)


def plan_for_joining(
    state: JobState, request: PlanRequest, fresh: Sequence[str], now: float
) -> JoinChoice:
    """Plan with those of the `fresh` nodes that are worth a change; None if no node is.

    Raises InfeasiblePlan if no plan fits the available nodes.
    """
    reasons: list[str] = []
    aside: list[str] = []
    retry_s = inf
    while True:
        plan = make_plan(request)
        wanted = [node for node in fresh if node in plan.nodes()]
        if not wanted:
            rest = " ".join(node for node in fresh if node not in aside)
            if rest:
                reasons.append(f"{rest} stay spare: {plan.reason}")
            return JoinChoice(None, tuple(fresh), "; ".join(reasons), retry_s)
        verdict, left = _evaluate(state, request, plan, wanted, now)
        if verdict.use:
            return JoinChoice(plan, tuple(aside), "; ".join(reasons), retry_s)
        retry_s = min(retry_s, verdict.again_s)
        reasons.append(f"{' '.join(left)} stay spare: {verdict.reason}")
        aside += left
        request = _without(request, left)


def _evaluate(
    state: JobState, request: PlanRequest, plan: Plan, wanted: Sequence[str], now: float
) -> tuple[Verdict, list[str]]:
    """Return (whether to change to `plan` for `wanted`, the first of them to leave)."""
    assert state.plan is not None and state.spec is not None
    ahead = outlook(state, now)
    nodes, left_s = _first_to_go(state, wanted, now)
    if not state.plan.peers and left_s == inf:
        return Verdict(True, "nobody keeps backups now"), []
    if not state.pauses:
        links = links_of(state.policy.profile, request.nodes)
        moving_s = transition(state.plan, plan, state.spec.layers, links=links).seconds
        pause_in_s, pause_out_s = ahead.pause_in_s + moving_s, ahead.pause_out_s + moving_s
        ahead = replace(ahead, pause_in_s=pause_in_s, pause_out_s=pause_out_s)
    speedup = _speedup(state, state.plan, plan)
    return worth(ahead, speedup=speedup, lifetime_s=left_s, nodes=len(plan.nodes())), nodes


def _first_to_go(state: JobState, nodes: Sequence[str], now: float) -> tuple[list[str], float]:
    """Return (nodes that are expected to leave first, seconds until then)."""
    ends = {node: state.members[node].expected_end for node in nodes}
    left_s = {node: max(0.0, end - now) if end else inf for node, end in ends.items()}
    least = min(left_s.values(), default=inf)
    return [node for node in nodes if left_s[node] == least], least


def _speedup(state: JobState, without: Plan, plan: Plan) -> float:
    """Predicted step time of `without` over that of `plan`."""
    here, then = (predicted_step_s(state, one) for one in (without, plan))
    return here / then if then > 0 else 1.0


def plan_if_feasible(request: PlanRequest) -> Plan | None:
    """The best plan; None if no plan fits the nodes."""
    try:
        return make_plan(request)
    except InfeasiblePlan:
        return None


def _without(request: PlanRequest, nodes: Sequence[str]) -> PlanRequest:
    return replace(request, nodes=tuple(info for info in request.nodes if info.node not in nodes))
