"""The rule for slow nodes: re-plan so that they get fewer layers or micro-batches; a spare that makes the step shorter
still takes their place. Nobody is evicted for being slow alone: who is replaced stays as a spare.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from elastic.core.health.compute_speed import Pace, found
from elastic.core.health.diagnosis import AWAY, Finding, Kind, Remedy
from elastic.core.job import epoch_change as epoch_change
from elastic.core.job.quarantine import add_finding, clear_finding, record_of
from elastic.core.job.state import Cause, CauseKind, JobAction, JobState, JobTransition, LogEntry
from elastic.core.job.stragglers import profile_for, slowdowns, speed_of
from elastic.core.policy.remediation import spare_nodes
from elastic.domain.errors import InfeasiblePlan
from elastic.planning.cost.predict import predict
from elastic.planning.search.search import make_plan

GAIN = 0.05
"""A new plan must be predicted to shorten the step by this share."""


def rebalance_stragglers(state: JobState, now: float) -> JobTransition | None:
    """If nodes were found to have another speed, count with it, and change the plan if that gains enough.

    What was found becomes what plans count with, so the same evidence is weighed once.
    """
    assert state.plan is not None
    if not state.paces:
        return None
    shown = [(node, speed_of(state, node), found(speed_of(state, node))) for node in state.plan.nodes()]
    changed = [
        (node, pace, factor)
        for node, pace, factor in shown
        if factor is not None and not _common(state, node, pace, factor)
    ]
    if not changed:
        return None
    paces = dict(state.paces)
    for node, pace, factor in changed:
        paces[state.members[node].report.info.incarnation] = replace(pace, factor=factor)
    state = state.of(paces=paces)
    text = ", ".join(_told(state, node, factor) for node, _, factor in changed)
    cause = Cause(CauseKind.SLOW, text, tuple(node for node, _, _ in changed))
    notes: tuple[JobAction, ...] = tuple(_note(node, pace, factor) for node, pace, factor in changed)
    gain, why = _gain(state)
    away, instead = _replacing(state, tuple(node for node, _, factor in changed if factor > 1.0))
    state, told = _tell(state, changed, gain, f"{why}{instead}", away, now)
    notes = (*notes, *told)
    if away:
        state, actions, reason = epoch_change.begin_change(
            state, replace(cause, text=f"{text}; replaced"), now, boundary=True
        )
        return state, (*notes, *actions), f"{reason}{instead}"
    if gain < GAIN:
        return state, notes, f"{text}; the plan stays: {why}"
    state, actions, reason = epoch_change.begin_change(state, cause, now, boundary=True)
    return state, (*notes, *actions), f"{reason}; {why}"


def _common(state: JobState, node: str, pace: Pace, factor: float) -> bool:
    """Whether the others got slower as well: what slows all nodes is a busy machine, and no plan helps against it."""
    assert state.plan is not None
    others = [speed_of(state, other) for other in state.plan.nodes() if other != node]
    now = [one.ratio / one.unit / one.factor for one in others if one.unit and one.ratio]
    common = max(1.0, median(now)) if now else 1.0
    return factor > pace.factor and factor / pace.factor < pace.change * common


def _tell(
    state: JobState,
    changed: list[tuple[str, Pace, float]],
    gain: float,
    why: str,
    away: tuple[str, ...],
    now: float,
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Class and action of each node whose speed changed."""
    actions: list[JobAction] = []
    for node, pace, factor in changed:
        known = record_of(state, node).finding(Kind.HOST)
        if factor == 1.0:
            well = known is not None and known.action is Remedy.REBALANCE
            state, more = (
                clear_finding(state, node, Kind.HOST, "as fast as before", now) if well else (state, ())
            )
        else:
            changes = Remedy.REBALANCE if gain >= GAIN else Remedy.NONE
            action = Remedy.REPLACE if node in away else changes
            steps = {f"step_{step}": round(ratio / pace.unit, 3) for step, ratio in pace.samples}
            reason = f"{_told(state, node, factor)}; {why}"
            finding = Finding(
                Kind.HOST, action, reason, {"slow": factor, "before": pace.factor, **steps}, now
            )
            state, more = add_finding(state, node, finding)
        actions += more
    return state, tuple(actions)


def _replacing(state: JobState, nodes: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The slow nodes, if spares in their places make the step shorter than less work for them does, and why."""
    if (
        not nodes
        or not spare_nodes(state)
        or any(one.action in AWAY for n in nodes for one in record_of(state, n).findings)
    ):
        return (), ""
    request = epoch_change.plan_request(state, state.epoch + 1)
    try:
        plans = make_plan(request), make_plan(replace(request, dead=frozenset(nodes)))
    except InfeasiblePlan:
        return (), ""
    profile, infos = profile_for(state), tuple(mb.report.info for mb in state.members.values())
    lighter, other = (predict(plan, profile, infos, slowdowns(state)).step_s for plan in plans)
    if other > lighter * (1 - GAIN):
        return (), ""
    return nodes, f"; with spares in place of {' '.join(nodes)} {other:.4g} s"


def _gain(state: JobState) -> tuple[float, str]:
    """Share of the step that the best plan for the speeds as they are now saves, and that in words."""
    assert state.plan is not None
    request = epoch_change.plan_request(state, state.epoch + 1)
    try:
        plan = make_plan(request)
    except InfeasiblePlan as error:
        return 0.0, str(error)
    profile, nodes = profile_for(state), tuple(mb.report.info for mb in state.members.values())
    here = predict(state.plan, profile, nodes, slowdowns(state)).step_s
    then = predict(plan, profile, nodes, slowdowns(state)).step_s
    gain = 1 - then / here if here > 0 else 0.0
    return gain, f"the best plan takes {then:.4g} s a step instead of {here:.4g} s ({gain:+.1%})"


def _told(state: JobState, node: str, factor: float) -> str:
    measure = "profiled" if state.policy.profile is not None else "before"
    return (
        f"{node} computes {factor:.1f}x slower than {measure}"
        if factor != 1.0
        else f"{node} is as fast as {measure}"
    )


def _note(node: str, pace: Pace, factor: float) -> LogEntry:
    """The evidence: steps and their factors."""
    steps = {str(step): round(ratio / pace.unit, 3) for step, ratio in pace.samples}
    return LogEntry("pace", {"node": node, "slow": factor, "before": pace.factor, "steps": steps})
