"""Straggler policy: give slow nodes fewer layers or micro-batches.

A spare takes the place of a slow node if the step is then shorter than with less work for the slow
node. The replaced node stays a member, as a spare.

Only nodes with layers are measured. A slow node that has none counts as normal again after a pause,
so that plans can try it; so does a node with a slow link, which sends no copies then. The pauses
grow as those of quarantines.

Nodes are slow by their *slow factor*; `elastic.core.health.compute_speed` defines it and the ratio.

If all nodes are slower than the user's profile says, the profile is wrong, and not the nodes: it
was measured alone, or on other machines. They are then judged as without a profile, until one of
them is as fast as profiled.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import median
from typing import NamedTuple

from elastic.core.health.compute_speed import (
    CHANGED,
    CHANGED_UNPROFILED,
    SAMPLES,
    ComputeSpeed,
    changed_factor,
)
from elastic.core.health.diagnosis import (
    EXCLUDING_ACTIONS,
    FaultClass,
    Finding,
    HealthAction,
    record_slowdown,
)
from elastic.core.job.epoch_change import begin_change, plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.quarantine import (
    Findings,
    add_finding,
    clear_finding,
    record_of,
    with_record,
    without_considered,
)
from elastic.core.job.state import Cause, CauseKind, JobAction, JobState, JobTransition, LogEntry
from elastic.core.job.stragglers import judges_by_profile, predicted_step_s, speed_of
from elastic.core.policy.remediation import spare_nodes
from elastic.domain.errors import InfeasiblePlan
from elastic.planning.search.search import make_plan

GAIN = 0.05
"""Fraction of the step that a new plan must be predicted to save."""


class SpeedChange(NamedTuple):
    """Change of a node's slow factor."""

    node: str
    pace: ComputeSpeed
    """The node's speed, with the slow factor that plans used until now."""
    factor: float
    """New slow factor; 1: normal speed."""


def rebalance_stragglers(state: JobState, now: float) -> JobTransition | None:
    """Update the slow factors that plans use, and change the plan if a better one saves enough.

    The new slow factors are stored, so the same measurements lead to one decision only.
    """
    if state.plan is None or not state.stable:
        return None
    again = _try_again(state, now)
    if again is not None:
        return again
    if not state.paces or (judges_by_profile(state) and _is_partly_measured(state)):
        return None
    former, nodes = state, state.plan.nodes()
    state, notes, text = _review_profile(state, now)
    changed = []
    for node in nodes:
        pace = speed_of(state, node)
        factor = changed_factor(pace)
        if factor is not None and not _all_slowed(state, node, pace, factor):
            changed.append(SpeedChange(node, pace, factor))
    freed = [node for node in nodes if _factor_differs(former, state, node)]
    if not changed and not freed:
        return (state, notes, text) if notes else None
    new = {
        state.members[node].report.info.incarnation: with_factor(pace, factor)
        for node, pace, factor in changed
    }
    state = state.of(paces={**state.paces, **new})
    for node, pace, factor in changed:
        if pace.factor == 1.0 and factor > 1.0:
            record = record_slowdown(record_of(state, node), now, state.policy.health)
            state = with_record(state, node, record)
    best_s, gain, why = _gain(state)
    slow = tuple(node for node, _, factor in changed if factor > 1.0)
    away, instead = _replaceable(state, slow, best_s)
    state, entries = _add_findings(state, changed, gain, f"{why}{instead}", away, now)
    text = ", ".join(_text(state, node, factor) for node, _, factor in changed) or text
    entries = (*notes, *entries)
    if not away and gain < GAIN:
        return state, entries, f"{text}; the plan stays: {why}"
    concerned = tuple(dict.fromkeys([*(node for node, _, _ in changed), *freed]))
    cause = Cause(CauseKind.SLOW, f"{text}; replaced" if away else text, concerned)
    state, actions, reason = begin_change(state, cause, now, boundary=True)
    reason += instead if away else f"; {why}"
    return state, (*entries, *actions), reason


def _measured(state: JobState) -> dict[str, list[float]]:
    """Return the ratios of the newest steps in this epoch, at most SAMPLES, per node of the plan
    that has finished a step."""
    assert state.plan is not None
    paces = {node: speed_of(state, node) for node in state.plan.nodes()}
    return {
        node: [ratio for _, ratio in pace.samples[-SAMPLES:]]
        for node, pace in paces.items()
        if pace.epoch == state.plan.epoch
    }


def _is_partly_measured(state: JobState) -> bool:
    """Return whether a node lacks steps by which it shows whether the profile is wrong."""
    return any(len(ratios) < SAMPLES for ratios in _measured(state).values())


def _factor_differs(former: JobState, state: JobState, node: str) -> bool:
    return speed_of(former, node).factor != speed_of(state, node).factor


def _review_profile(state: JobState, now: float) -> tuple[JobState, tuple[JobAction, ...], str]:
    """Find out whether the user's profile is wrong for all nodes, or right again. Return the state,
    entries of the event log, and the reason."""
    assert state.plan is not None
    measured, nodes = _measured(state), state.plan.nodes()
    if state.policy.profile is None or _is_partly_measured(state):
        return state, (), ""
    if state.profile_error:
        if not any(max(ratios) < CHANGED for ratios in measured.values()):
            return state, (), ""
        why = "a node is as fast as profiled"
        state, entries = _with_profile_error(state, 0.0, why, now)
        return state, (LogEntry("profile-right", {}), *entries), why
    fastest = min(map(median, measured.values()), default=0.0)
    if len(measured) < len(nodes) or fastest < CHANGED_UNPROFILED:
        return state, (), ""
    slow = {node: round(median(ratios), 2) for node, ratios in measured.items()}
    entry = LogEntry("profile-wrong", {"slow": round(fastest, 2), "nodes": slow})
    why = "all nodes are slower than profiled"
    state, entries = _with_profile_error(state, round(fastest, 2), why, now)
    return state, (entry, *entries), why


def _with_profile_error(state: JobState, error: float, why: str, now: float) -> Findings:
    """Judge all nodes by the profile (`error` 0) or as without one. No node of the plan counts as
    slow then, until it is measured again; others are tried again after their pauses."""
    assert state.plan is not None
    nodes = state.plan.nodes()
    used = {state.members[node].report.info.incarnation for node in nodes}

    def anew(pace: ComputeSpeed, factor: float) -> ComputeSpeed:
        kept, unit = -1 if error else -SAMPLES, 0.0 if error else 1.0
        pace = replace(pace, samples=pace.samples[kept:], times=pace.times[kept:])
        return replace(pace, profiled=not error, unit=unit, factor=factor, former=0.0)

    paces = {
        key: anew(pace, 1.0 if key in used else pace.factor) for key, pace in state.paces.items()
    }
    state, entries = state.of(profile_error=error, paces=paces), list[JobAction]()
    for node in nodes:
        state, more = _without_finding(state, node, FaultClass.HOST, why, now)
        entries += more
    return state, tuple(entries)


def _without_finding(
    state: JobState, node: str, kind: FaultClass, reason: str, now: float
) -> Findings:
    """Remove the finding that the node is slow, if there is one."""
    known = record_of(state, node).finding(kind)
    if known is None:
        return state, ()
    told = known.action is HealthAction.NONE and "slow" in known.evidence  # no plan was better
    if not told and known.action is not HealthAction.REBALANCE:
        return state, ()
    return clear_finding(state, node, kind, reason, now)


def with_factor(pace: ComputeSpeed, factor: float) -> ComputeSpeed:
    """Return the speed with a new slow factor. A slow node keeps its reference ratio."""
    return replace(pace, factor=factor, former=pace.unit if factor > 1.0 else 0.0)


def _try_again(state: JobState, now: float) -> JobTransition | None:
    """Forget that a node is slow which has no layers, after its pause. None: there is none."""
    assert state.plan is not None
    used = set(state.plan.nodes())
    for node in [node for node in state.members if node not in used]:
        pace, record = speed_of(state, node), record_of(state, node)
        factor = pace.factor * record.loaded
        if factor == 1.0 or now < record.slow_until:
            continue
        if pace.factor != 1.0:
            fresh = replace(pace, factor=1.0, samples=(), times=())
            incarnation = state.members[node].report.info.incarnation
            state = state.of(paces={**state.paces, incarnation: fresh})
        state = without_considered(with_record(state, node, replace(record, loaded=1.0)), node)
        reason = f"it was {factor:.1f}x slower, and is tried again"
        entries: tuple[JobAction, ...] = ()
        for kind in (FaultClass.HOST, FaultClass.LINK):
            state, more = _without_finding(state, node, kind, reason, now)
            entries += more
        return state, entries, f"{node}: {reason}"
    return None


def _all_slowed(state: JobState, node: str, pace: ComputeSpeed, factor: float) -> bool:
    """Return whether the other nodes slowed down equally, so that no other plan helps."""
    assert state.plan is not None
    others = [speed_of(state, other) for other in state.plan.nodes() if other != node]
    now = [one.ratio / one.unit / one.factor for one in others if one.unit and one.ratio]
    common = max(1.0, median(now)) if now else 1.0
    return factor > pace.factor and factor / pace.factor < pace.change * common


def _add_findings(
    state: JobState,
    changed: list[SpeedChange],
    gain: float,
    why: str,
    away: tuple[str, ...],
    now: float,
) -> Findings:
    """Record a finding for each node in `changed`; clear the finding of a node at normal speed."""
    paces: list[JobAction] = []
    actions: list[JobAction] = []
    for node, pace, factor in changed:
        ratios = {step: round(ratio / pace.unit, 3) for step, ratio in pace.samples}
        data = {"node": node, "slow": factor, "before": pace.factor}
        paces.append(LogEntry("pace", {**data, "steps": {str(s): r for s, r in ratios.items()}}))
        if factor == 1.0:
            state, more = _without_finding(state, node, FaultClass.HOST, "as fast as before", now)
        else:
            action = HealthAction.REBALANCE if gain >= GAIN else HealthAction.NONE
            action = HealthAction.REPLACE if node in away else action
            steps = {f"step_{step}": ratio for step, ratio in ratios.items()}
            evidence = {"slow": factor, "before": pace.factor, **steps}
            reason = f"{_text(state, node, factor)}; {why}"
            finding = Finding(FaultClass.HOST, action, reason, evidence, now)
            state, more = add_finding(state, node, finding)
        actions += more
    return state, (*paces, *actions)


def _replaceable(
    state: JobState, nodes: tuple[str, ...], best_s: float
) -> tuple[tuple[str, ...], str]:
    """Return (nodes to replace, reason): all of `nodes` if spares in their place are faster.
    `best_s`: predicted seconds per step if the slow nodes get less work instead. If no node is to
    be replaced, the result is ((), "")."""
    findings = (one for node in nodes for one in record_of(state, node).findings)
    excluded = any(one.action in EXCLUDING_ACTIONS for one in findings)
    if not nodes or excluded or not spare_nodes(state):
        return (), ""
    request = replace(plan_request(state, state.epoch + 1), dead=frozenset(nodes))
    swapped = plan_if_feasible(request)
    seconds = predicted_step_s(state, swapped) if swapped is not None else inf
    if seconds > best_s * (1 - GAIN):
        return (), ""
    return nodes, f"; with spares in place of {' '.join(nodes)} {seconds:.4g} s"


def _gain(state: JobState) -> tuple[float, float, str]:
    """Return (seconds per step of the best plan now, fraction of the step that it saves, reason).
    If no plan fits, both numbers are 0."""
    assert state.plan is not None
    try:
        plan = make_plan(plan_request(state, state.epoch + 1))
    except InfeasiblePlan as error:
        return 0.0, 0.0, str(error)
    here, then = predicted_step_s(state, state.plan), predicted_step_s(state, plan)
    gain = 1 - then / here if here > 0 else 0.0
    text = f"the best plan takes {then:.4g} s per step instead of {here:.4g} s ({gain:+.1%})"
    return then, gain, text


def _text(state: JobState, node: str, factor: float) -> str:
    measure = "profiled" if judges_by_profile(state) else "before"
    if factor == 1.0:
        return f"{node} is as fast as {measure}"
    return f"{node} computes {factor:.1f}x slower than {measure}"
