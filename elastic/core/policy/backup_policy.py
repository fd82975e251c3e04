"""The rule for `--backup auto`: look at the pair of schemes again when enough was measured, or when that has changed.

What a pair costs and which one is best is `elastic.planning.backup.backup_cost`, what is known `elastic.core.job.measured_conditions`; here
stands whether another pair is worth the pause of changing to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.core.health.backup_metrics import Gauge
from elastic.core.job import epoch_change as epoch_change
from elastic.core.job.measured_conditions import backup_conditions
from elastic.core.job.state import Cause, CauseKind, JobState, JobTransition, LogEntry
from elastic.planning.backup.amortization import horizon_s
from elastic.planning.backup.backup_cost import Estimate, Weighing, choose, estimate, estimates

MIN_STEPS = 16
"""Steps of an epoch that every node of the plan must have measured."""
CHECK_INTERVAL_S = 10.0
"""Between two looks."""
CHANGED = 1.5
"""Factor by which a figure must have changed to be worth another look."""
GAIN = 0.01
"""Share of the expected time that another pair must save."""


def change_backup(state: JobState, now: float) -> JobTransition | None:
    """Change the schemes at the end of a step, if others are expected to save enough."""
    if not _due(state, now):
        return None
    state = state.of(weighed_at=now)
    by = backup_conditions(state)
    if by is None or not _changed(state.weighed, by.figures):
        return state, (), ""
    state, plan = state.of(weighed=by.figures), state.plan
    assert plan is not None
    nodes = tuple(mb.report.info for mb in state.members.values())
    found = estimates(plan, by, nodes)
    here = estimate(plan, f"{plan.gradients}+{plan.state}", by, nodes)
    best, _ = choose(found, by.room_bytes)
    saved = 1 - best.expected_s / here.expected_s if here.expected_s > 0 else 0.0
    # A change that did not bring the pair is not made for it again.
    worth = best.pair != state.wanted or best.pair == here.pair
    worth = worth and saved >= GAIN and saved * horizon_s(by.hazard_per_s, len(plan.nodes())) > by.pause_s
    why = f"{here}; {best}: {saved:+.1%} of the expected time"
    note = _note(here, best, worth, why, by, found)
    if not worth:
        return state, (note,), f"backup stays: {why}"
    state, cause = state.of(wanted=best.pair), Cause(CauseKind.BACKUP, f"backup {best.pair}")
    state, actions, reason = epoch_change.begin_change(state, cause, now, boundary=True)
    return state, (note, *actions), f"{reason}; {why}"


def _due(state: JobState, now: float) -> bool:
    """Whether it is time to look: the running plan is protected, and every node of it has measured enough."""
    plan = state.plan
    if state.policy.backup != "auto" or plan is None or not plan.peers or state.change is not None:
        return False
    if state.trimmed < state.epoch or state.joining or now - state.weighed_at < CHECK_INTERVAL_S:
        return False
    members = [state.members[node] for node in plan.nodes() if node in state.members]
    known = [state.gauges.get(mb.report.info.incarnation, Gauge()) for mb in members]
    return all(gauge.epoch == plan.epoch and gauge.steps >= MIN_STEPS for gauge in known)


def _changed(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    return not before or any(
        max(a, b) > CHANGED * min(a, b) for a, b in zip(before, after, strict=True) if max(a, b) > 0
    )


def _note(
    here: Estimate, best: Estimate, worth: bool, why: str, by: Weighing, found: Sequence[Estimate]
) -> LogEntry:
    """The evidence: all pairs, and the figures that they were weighed by."""
    profile = by.profile
    data = {
        "now": here.pair,
        "best": best.pair,
        "changed": worth,
        "reason": why,
        "weighed": [str(one) for one in found],
        "link_bytes_per_s": round(profile.link.bytes_per_s),
        "copy_bytes_per_s": round(profile.copy_bytes_per_s),
        "contention": round(profile.contention, 3),
        "losses_per_node_hour": round(by.hazard_per_s * 3600, 4),
    }
    return LogEntry("backup", data)
