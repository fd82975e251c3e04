"""The times of a job's state, after a change of the coordinator's clock.

Times in the state are seconds on the clock of the coordinator that wrote it. The clock of another
coordinator may be behind. Without a correction all of these times would lie in the future, and
every wait would last for the whole difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.health.diagnosis import Finding, NodeHealth
from elastic.core.health.path_fault import PathFault
from elastic.core.job.state import (
    EpochChange,
    FinalWait,
    JobFailure,
    JobState,
    Member,
    MissingCopies,
    ProgressSign,
    ProgressWatch,
    RestartOrders,
)
from elastic.planning.backup.loss_history import LossHistory

TIMES: dict[type, tuple[str, ...]] = {
    JobState: (
        "members",
        "change",
        "step_finished_at",
        "finished_at",
        "enough_since",
        "launched_at",
        "joining_since",
        "updated_at",
        "failure",
        "suspected_since",
        "backup_checked_at",
        "counted_at",
        "history",
        "reconsider_at",
        "improve_at",
        "health",
        "paths",
        "doubt_since",
        "minority_since",
        "adopted_until",
        "yielded_at",
        "absent",
        "missing",
        "watch",
    ),
    Member: ("seen", "closed_at", "drain_deadline", "expected_end"),
    EpochChange: ("began", "paused", "halted", "decided", "wait_until"),
    MissingCopies: ("since",),
    ProgressSign: ("at",),
    RestartOrders: ("at",),
    ProgressWatch: ("since", "signs", "orders", "retry_at", "failed_times", "final"),
    FinalWait: ("since",),
    JobFailure: ("at",),
    LossHistory: ("counted_at", "event_at"),
    NodeHealth: (
        "crashes",
        "link_crashes",
        "departures",
        "until",
        "quarantine_changed_at",
        "slow_until",
        "keeps_after",
        "refused_until",
        "findings",
    ),
    Finding: ("at",),
    PathFault: ("since", "well_since"),
}
"""Fields that are times on the coordinator's clock, or contain such times. Zero and negative values
are no times."""


def set_clock(state: JobState, now: float) -> JobState:
    """Return the state at `now`. If the clock is behind that of the state, the newest transition
    counts as done just now."""
    behind_s = state.updated_at - now
    return (shifted(state, -behind_s) if behind_s > 0 else state).of(updated_at=now)


def shifted(state: JobState, seconds: float) -> JobState:
    """Return the state with all its times shifted."""
    result: JobState = _shifted(state, seconds)
    return result


def _shifted(value: Any, seconds: float) -> Any:
    """Return `value` with all its times shifted."""
    if type(value) is float:
        return value + seconds if value > 0 else value
    if isinstance(value, dict):
        return {key: _shifted(inner, seconds) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_shifted(inner, seconds) for inner in value)
    names = TIMES.get(type(value))
    if names is None:
        return value
    changes = {name: _shifted(getattr(value, name), seconds) for name in names}
    if isinstance(value, NodeHealth):  # differences between this clock and the node's
        changes["clock"] = tuple(one + seconds for one in value.clock)
    return replace(value, **changes)
