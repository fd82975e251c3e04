"""Join policy: the nodes that a plan uses, given the time for which they will probably stay.

A node is used only if the time that it saves exceeds the pauses that it causes
(`elastic.planning.backup.amortization`). The policy checks

- nodes that joined, before the plan is changed for them: the pauses of their entry and of their
  departure count;
- nodes that are expected to leave, whenever a plan must change for another reason (a loss, a drain,
  the start): only the pause of their departure counts.

So a node that was left aside for its short stay may be used after a loss of other nodes. A node is
always used if no plan fits without it. A node is considered again when its expected stay changes,
or, if the cluster changed too often, after enough time without a loss. So no node is idle for long
while it could help.
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
from elastic.planning.search.search import PlanRequest, make_plan, with_whole_pipelines

MAX_PAUSES = 9
"""Number of the newest pauses whose median is the expected pause."""


def count_node_seconds(state: JobState, now: float, left: int = 0) -> JobState:
    """Add up node-seconds. Call this before members join, or before `left` members leave."""
    nodes = len(state.members)
    history = state.history.with_losses(now, nodes) if left else state.history.at(now, nodes)
    return state.of(history=history)


def without_member(state: JobState, node: str, now: float, left: int = 0) -> JobState:
    """Remove a member. `left`: 1 if it counts as a loss for the expected stay of nodes, else 0."""
    members = {name: mb for name, mb in state.members.items() if name != node}
    return count_node_seconds(state, now, left).of(members=members)


def with_expected_end(member: Member, now: float) -> Member:
    """Set the member's expected end from the lifetime that its agent announced."""
    lifetime_s = member.report.info.lifetime_s
    return replace(member, expected_end=now + lifetime_s if lifetime_s > 0 else 0.0)


def member_key(member: Member) -> str:
    """Return the member's key in `JobState.considered`; it changes with the expected stay."""
    info = member.report.info
    return f"{info.incarnation}/{info.lifetime_s:g}" if info.lifetime_s > 0 else info.incarnation


def record_pause(state: JobState, change: EpochChange, resumed_at: float) -> JobState:
    """Record the pause of a change, unless the job started or nodes waited for crashed workers."""
    if change.old_plan is None or change.wait_until > 0:
        return state
    planned = change.boundary and change.paused
    since = change.paused if planned else change.began - change.detect_s
    pause_s = max(0.0, resumed_at - since)
    pauses = (*state.pauses, pause_s)[-MAX_PAUSES:]
    return state.of(pauses=pauses, seen=state.seen.grown(pause_s=pause_s))


def last_resumption(state: JobState, plan: Plan, change: EpochChange) -> float:
    """Return the time at which the last pipeline resumed.

    A pipeline that has not computed yet has resumed when its nodes were ready; one that is not
    ready resumes now. Pipelines outside the change did not pause.
    """
    times = []
    for pipeline in plan.pipelines:
        nodes = {stage.unit.node for stage in pipeline.stages}
        if nodes <= set(change.outside):
            continue
        reports = [state.members[node].report for node in nodes if node in state.members]
        reports = [report for report in reports if report.epoch == state.epoch]
        resumed = [report.resumed_at for report in reports if report.resumed_at]
        lasted = [one.transfer_s + one.rebuild_s for report in reports for one in report.ready]
        times.append(min(resumed) if resumed else change.decided + max(lasted, default=inf))
    return min(max(times, default=change.decided), state.updated_at)


def outlook(state: JobState, now: float, *, anyway: bool = False) -> Outlook:
    """Return the expected losses and pauses. `anyway`: training pauses now in any case."""
    pause_s = median(state.pauses) if state.pauses else DEFAULT_PAUSE_S
    history = state.history.at(now, len(state.members))
    return Outlook(
        events=history.events,
        node_seconds=history.node_seconds,
        pause_in_s=0.0 if anyway else pause_s,
        pause_out_s=pause_s,
    )


@dataclass(frozen=True, slots=True)
class JoinChoice:
    """A plan for some of the available nodes."""

    plan: Plan | None
    """None: no plan is worth a change."""
    aside: tuple[str, ...] = ()
    """Nodes that the plan leaves aside."""
    reason: str = ""
    """Reason to leave these nodes aside."""
    retry_s: float = inf
    """Seconds after which these nodes should be considered again."""


def plan_for_change(state: JobState, request: PlanRequest, now: float) -> JoinChoice:
    """Return the plan for a change that must be made in any case.

    The plan leaves aside nodes whose departure will cost more than they save until then. If it
    keeps whole pipelines for the sake of a short pause, and so leaves nodes idle, `retry_s` says
    when using them will pay. Raises InfeasiblePlan if no plan fits all available nodes.
    """
    request = replace(request, pause_s=0.0)
    best = make_plan(replace(request, keeps_pipelines=False))
    plan = with_whole_pipelines(request, best) if request.keeps_pipelines else best
    ahead = outlook(state, now, anyway=True)
    aside: list[str] = []
    reasons: list[str] = []
    retry_s = _calm_until_use_s(state, request, plan, best, now)
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
        retry_s = min(retry_s, _unknown_in_s(state, nodes, now))
        reasons.append(f"{' '.join(nodes)} left aside: {verdict.reason}")
    if not aside:
        return JoinChoice(plan, retry_s=retry_s)
    why = "; ".join(reasons)
    plan = replace(plan, spares=(*plan.spares, *aside), reason=f"{plan.reason}; {why}")
    return JoinChoice(plan, tuple(aside), why, retry_s)


def _calm_until_use_s(
    state: JobState, request: PlanRequest, plan: Plan, best: Plan, now: float
) -> float:
    """Return the seconds without a loss after which the nodes that `plan` leaves idle are worth a
    change to `best`; infinity: never."""
    idle = set(best.nodes()) - set(plan.nodes())
    if not idle:
        return inf
    verdict = _worth_a_change(state, request, plan, best, inf, now)
    return 0.0 if verdict.use else verdict.again_s


def _worth_a_change(
    state: JobState, request: PlanRequest, plan: Plan, best: Plan, lifetime_s: float, now: float
) -> Verdict:
    """Return whether `best` is worth a change from `plan`, with the transfers of the change.

    `lifetime_s`: seconds until the first node of `best` leaves; infinity: unknown.
    """
    assert state.spec is not None
    ahead = outlook(state, now)
    links = links_of(request.profile, request.nodes)
    moving_s = transition(plan, best, state.spec.layers, links=links).seconds
    ahead = replace(ahead, pause_in_s=ahead.pause_in_s + moving_s)
    speedup, used = _speedup(state, plan, best), len(best.nodes())
    return worth(ahead, speedup=speedup, lifetime_s=lifetime_s, nodes=used)


def plan_for_joining(
    state: JobState, request: PlanRequest, fresh: Sequence[str], now: float
) -> JoinChoice:
    """Return a plan with those of the `fresh` nodes that are worth a change, if any are.

    The planner does not weigh the pause against the time to the next loss, because this function
    does. Raises InfeasiblePlan if no plan fits the available nodes.
    """
    request = replace(request, keeps_pipelines=False)
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
        retry_s = min(retry_s, verdict.again_s, _unknown_in_s(state, left, now))
        reasons.append(f"{' '.join(left)} stay spare: {verdict.reason}")
        aside += left
        request = _without(request, left)


def _evaluate(
    state: JobState, request: PlanRequest, plan: Plan, wanted: Sequence[str], now: float
) -> tuple[Verdict, list[str]]:
    """Return (whether `plan` is worth a change, nodes of `wanted` that will leave first)."""
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


def better_plan(state: JobState, request: PlanRequest, now: float) -> Verdict:
    """Return whether the best plan for `request` is worth a change of the running plan."""
    assert state.plan is not None
    best = plan_if_feasible(request)
    if best is None:
        return Verdict(False, "no other plan fits")
    _, left_s = _first_to_go(state, best.nodes(), now)
    return _worth_a_change(state, request, state.plan, best, left_s, now)


def _first_to_go(state: JobState, nodes: Sequence[str], now: float) -> tuple[list[str], float]:
    """Return (nodes that are expected to leave first, seconds until then; infinity: unknown)."""
    left_s = {node: _expected_stay_s(state, node, now) for node in nodes}
    least = min(left_s.values(), default=inf)
    return [node for node in nodes if left_s[node] == least], least


def _expected_stay_s(state: JobState, node: str, now: float) -> float:
    """Return the seconds until the node is expected to leave; infinity: unknown, also if it is
    still here `overdue_s` after its expected end."""
    end = state.members[node].expected_end
    return max(0.0, end - now) if _unknown_in_s(state, [node], now) < inf else inf


def _unknown_in_s(state: JobState, nodes: Sequence[str], now: float) -> float:
    """Return the seconds until the expected stay of one of `nodes` becomes unknown; infinity: it is
    unknown already for all of them."""
    ends = (end for node in nodes if (end := state.members[node].expected_end))
    left_s = (end + state.limits.overdue_s - now for end in ends)
    return min((seconds for seconds in left_s if seconds > 0), default=inf)


def _speedup(state: JobState, without: Plan, plan: Plan) -> float:
    """Return the predicted step time of `without` divided by that of `plan`."""
    here, then = (predicted_step_s(state, one) for one in (without, plan))
    return here / then if then > 0 else 1.0


def plan_if_feasible(request: PlanRequest) -> Plan | None:
    """Return the best plan; None if no plan fits the nodes."""
    try:
        return make_plan(request)
    except InfeasiblePlan:
        return None


def _without(request: PlanRequest, nodes: Sequence[str]) -> PlanRequest:
    return replace(request, nodes=tuple(info for info in request.nodes if info.node not in nodes))
