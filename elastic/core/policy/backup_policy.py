"""Backup policy for `--backup auto`: change the pair of schemes if this saves more than its pause.

The pair is checked when enough was measured, and again when the measurements have changed much.
`elastic.planning.backup.backup_cost` has the costs of a pair,
`elastic.core.job.measured_conditions` the measurements.
"""

from __future__ import annotations

from elastic.core.health.backup_metrics import BackupMetrics
from elastic.core.job.epoch_change import begin_change
from elastic.core.job.measured_conditions import backup_conditions
from elastic.core.job.state import Cause, CauseKind, JobState, JobTransition, LogEntry
from elastic.planning.backup.amortization import horizon_s
from elastic.planning.backup.backup_cost import choose_pair, estimate, estimates

MIN_STEPS = 16
"""Least number of steps of the epoch that every node of the plan must have measured."""
CHECK_INTERVAL_S = 10.0
"""Least time between two checks."""
CHANGED = 1.5
"""The pair is checked if a measured figure has changed by more than this factor."""
GAIN = 0.01
"""Least fraction of the expected time that another pair must save."""


def change_backup(state: JobState, now: float) -> JobTransition | None:
    """Change the schemes at the end of the step, if another pair is expected to save enough."""
    if not _due(state, now):
        return None
    state = state.of(backup_checked_at=now)
    conditions = backup_conditions(state)
    if conditions is None or not _changed(state.backup_figures, conditions.figures):
        return state, (), ""
    state, plan = state.of(backup_figures=conditions.figures), state.plan
    assert plan is not None
    found = estimates(plan, conditions, state.infos)
    here = estimate(plan, f"{plan.gradients}+{plan.state}", conditions, state.infos)
    best, _ = choose_pair(found, conditions.room_bytes)
    saved = 1 - best.expected_s / here.expected_s if here.expected_s > 0 else 0.0
    saved_s = saved * horizon_s(conditions.hazard_per_s, len(plan.nodes()))
    # The pair for which the plan was changed last is not requested again if it was not installed.
    repeated = best.pair == state.requested_backup and best.pair != here.pair
    worth = not repeated and saved >= GAIN and saved_s > conditions.pause_s
    why = f"{here}; {best}: {saved:+.1%} of the expected time"
    profile = conditions.profile
    data = {
        "now": here.pair,
        "best": best.pair,
        "changed": worth,
        "reason": why,
        "weighed": [str(one) for one in found],
        "link_bytes_per_s": round(profile.link.bytes_per_s),
        "copy_bytes_per_s": round(profile.copy_bytes_per_s),
        "contention": round(profile.contention, 3),
        "losses_per_node_hour": round(conditions.hazard_per_s * 3600, 4),
    }
    entry = LogEntry("backup", data)
    if not worth:
        return state, (entry,), f"backup stays: {why}"
    cause = Cause(CauseKind.BACKUP, f"backup {best.pair}")
    state = state.of(requested_backup=best.pair)
    state, actions, reason = begin_change(state, cause, now, boundary=True)
    return state, (entry, *actions), f"{reason}; {why}"


def _due(state: JobState, now: float) -> bool:
    """Return whether to check the pair now: `--backup auto`, a stable job with peers, the interval
    is over, and every node of the plan has measured enough."""
    plan = state.plan
    if state.policy.backup != "auto" or plan is None or not plan.peers or not state.stable:
        return False
    if now - state.backup_checked_at < CHECK_INTERVAL_S:
        return False
    members = [state.members[node] for node in plan.nodes() if node in state.members]
    known = [state.gauges.get(mb.report.info.incarnation, BackupMetrics()) for mb in members]
    return all(gauge.epoch == plan.epoch and gauge.steps >= MIN_STEPS for gauge in known)


def _changed(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    return not before or any(
        max(pair) > CHANGED * min(pair) for pair in zip(before, after, strict=True) if max(pair) > 0
    )
