"""How long things last: what the coordinator saw of losses and pauses, and which nodes are worth using for a while.

Weighed are (`elastic.planning.backup.amortization`)

- nodes that came, before the running plan is changed for them: both pauses count;
- nodes that are expected to go, whenever a plan is made anyway (a loss, a drain, the start): only the pause of their
  going counts. So a node that was left aside because of its short stay is used once others are lost, if it stays long
  enough then; and always if no plan fits without it.

A node that was left aside only because the cluster changes too often is considered again when enough time will have
passed without a loss, and every node when its expected stay changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from elastic.core.job.state import EpochChange, JobState, Member
from elastic.core.job.stragglers import profile_for, slowdowns
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import NodeInfo, Plan
from elastic.planning.backup.amortization import DEFAULT_PAUSE_S, Outlook, Verdict, worth
from elastic.planning.cost.predict import predict
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.search.search import PlanRequest, make_plan

MAX_PAUSES = 9
"""Pauses that are remembered."""


def count_node_seconds(state: JobState, now: float, left: int = 0) -> JobState:
    """Add up node-seconds; to be called before members come or (`left` of them) go."""
    since = len(state.members) * max(0.0, now - state.counted_at) if state.counted_at else 0.0
    return state.of(node_seconds=state.node_seconds + since, counted_at=now, losses=state.losses + left)


def with_expected_end(member: Member, now: float) -> Member:
    """Note until when a node is expected to stay."""
    lifetime_s = member.report.info.lifetime_s
    return replace(member, until=now + lifetime_s if lifetime_s > 0 else 0.0)


def member_key(member: Member) -> str:
    """What was considered: a node with another expected stay is considered anew."""
    info = member.report.info
    return f"{info.incarnation}/{info.lifetime_s:g}" if info.lifetime_s > 0 else info.incarnation


def record_pause(state: JobState, change: EpochChange, resumed_at: float) -> JobState:
    """Remember how long training stood still; the start of the job is none, nor is a wait for workers that crashed."""
    if change.old_plan is None or change.wait_until > 0:
        return state
    since = change.paused if change.boundary and change.paused else change.began - change.detect_s
    pause_s = max(0.0, resumed_at - since)
    return state.of(pauses=(*state.pauses, pause_s)[-MAX_PAUSES:], seen=state.seen.grown(pause_s=pause_s))


def outlook(state: JobState, now: float, *, anyway: bool = False) -> Outlook:
    """What to expect. `anyway`: training pauses in any case."""
    pause_s = median(state.pauses) if state.pauses else DEFAULT_PAUSE_S
    counted = count_node_seconds(state, now)
    return Outlook(
        losses=state.losses,
        node_seconds=counted.node_seconds,
        pause_in_s=0.0 if anyway else pause_s,
        pause_out_s=pause_s,
    )


@dataclass(frozen=True, slots=True)
class JoinChoice:
    """A plan for some of the nodes at hand."""

    plan: Plan | None
    """None: nothing is worth a change."""
    aside: tuple[str, ...] = ()
    reason: str = ""
    """Why those are left aside."""
    again_s: float = inf
    """When to look again."""


def plan_for_change(state: JobState, request: PlanRequest, now: float) -> JoinChoice:
    """The plan for a change that is made anyway: without nodes that will go before they are worth a second pause.

    Raises InfeasiblePlan if there is no plan with all nodes at hand.
    """
    request = replace(request, pause_s=0.0)
    plan = make_plan(request)
    ahead = outlook(state, now, anyway=True)
    aside: list[str] = []
    told: list[str] = []
    while True:
        nodes, left_s = _first_to_go(state, plan.nodes(), now)
        if left_s == inf:
            break
        fewer = _without(request, nodes)
        try:
            other = make_plan(fewer)
        except InfeasiblePlan:
            break
        used = len(plan.nodes())
        verdict = worth(ahead, speedup=_speedup(state, request, other, plan), lifetime_s=left_s, nodes=used)
        if verdict.use:
            break
        request, plan = fewer, other
        aside += nodes
        told.append(f"{' '.join(nodes)} left aside: {verdict.reason}")
    if not aside:
        return JoinChoice(plan)
    why = "; ".join(told)
    plan = replace(plan, spares=(*plan.spares, *aside), reason=f"{plan.reason}; {why}")
    return JoinChoice(plan, tuple(aside), why)


def plan_for_joining(state: JobState, request: PlanRequest, fresh: Sequence[str], now: float) -> JoinChoice:
    """The plan with those of the `fresh` nodes that are worth a change of the running plan; None if none is.

    Raises InfeasiblePlan if no plan fits the nodes at hand.
    """
    assert state.plan is not None
    ahead = outlook(state, now)
    told: list[str] = []
    aside: list[str] = []
    again_s = inf
    while True:
        plan = make_plan(request)
        wanted = [node for node in fresh if node in plan.nodes()]
        if not wanted:
            rest = " ".join(node for node in fresh if node not in aside)
            why = [*told, *([f"{rest} stay spare: {plan.reason}"] if rest else [])]
            return JoinChoice(None, tuple(fresh), "; ".join(why), again_s)
        verdict, left = _weigh(state, request, ahead, plan, wanted, now)
        if verdict.use:
            return JoinChoice(plan, tuple(aside), "; ".join(told), again_s)
        again_s = min(again_s, verdict.again_s)
        told.append(f"{' '.join(left)} stay spare: {verdict.reason}")
        aside += left
        request = _without(request, left)


def _weigh(
    state: JobState, request: PlanRequest, ahead: Outlook, plan: Plan, wanted: Sequence[str], now: float
) -> tuple[Verdict, list[str]]:
    """Return (whether to change to `plan` for `wanted`, those to do without otherwise: the first to go)."""
    assert state.plan is not None
    nodes, left_s = _first_to_go(state, wanted, now)
    if not state.plan.peers and left_s == inf:
        return Verdict(True, "nobody keeps backups now"), []
    if not state.pauses:
        moving_s = _moving_s(state, request, plan)
        ahead = replace(
            ahead, pause_in_s=ahead.pause_in_s + moving_s, pause_out_s=ahead.pause_out_s + moving_s
        )
    speedup = _speedup(state, request, state.plan, plan)
    return worth(ahead, speedup=speedup, lifetime_s=left_s, nodes=len(plan.nodes())), nodes


def _moving_s(state: JobState, request: PlanRequest, plan: Plan) -> float:
    """Seconds to bring layers from the running plan's places to those of `plan`, as far as links are known."""
    assert state.spec is not None
    links = links_of(state.policy.profile, request.nodes)
    return transition(state.plan, plan, state.spec.layers, links=links).seconds


def _first_to_go(state: JobState, nodes: Sequence[str], now: float) -> tuple[list[str], float]:
    """Return (nodes that are expected to go first, seconds that they still stay)."""
    left_s = {n: max(0.0, mb.until - now) if mb.until else inf for n in nodes for mb in (state.members[n],)}
    least = min(left_s.values(), default=inf)
    return [node for node in nodes if left_s[node] == least], least


def _speedup(state: JobState, request: PlanRequest, without: Plan, plan: Plan) -> float:
    """Step time of `without` over that of `plan`."""
    infos: tuple[NodeInfo, ...] = tuple(mb.report.info for mb in state.members.values())
    profile, factors = profile_for(state), slowdowns(state)
    here, then = (predict(p, profile, infos, factors).step_s for p in (without, plan))
    return here / then if then > 0 else 1.0


def _without(request: PlanRequest, nodes: Sequence[str]) -> PlanRequest:
    return replace(request, nodes=tuple(info for info in request.nodes if info.node not in nodes))
