"""The checkpoint of the last step: a job succeeds only once it is durable.

The workers wait until their parts of this checkpoint are on disk. If a node cannot write its part,
the node is quarantined, and the others write the whole checkpoint in a new epoch.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job.epoch_change import begin_change, plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.quarantine import add_finding
from elastic.core.job.state import Cause, CauseKind, JobAction, JobPhase, JobState, JobTransition


def problem(state: JobState) -> str:
    """Return the reason why no node can write the checkpoint of the last step; "": there may be
    one."""
    errors = state.checkpoint_errors
    if not errors or state.phase is not JobPhase.RUNNING or _others_can_write(state):
        return ""
    return f"the checkpoint of the last step could not be written: {_describe(errors)}"


def replace_writers(state: JobState, now: float) -> JobTransition | None:
    """Leave out the nodes that could not write their part of the last checkpoint. None: no part has
    failed, so wait for the parts."""
    errors = state.checkpoint_errors
    if not errors or state.phase is not JobPhase.RUNNING:
        return None
    entries: tuple[JobAction, ...] = ()
    for node, why in errors:
        reason = f"it cannot write the checkpoint of the last step: {why}"
        finding = Finding(FaultClass.STORAGE, HealthAction.QUARANTINE, reason, {"error": why}, now)
        state, more = add_finding(state, node, finding)
        entries += more
    nodes = tuple(node for node, _ in errors)
    text = f"the checkpoint of the last step could not be written: {_describe(errors)}"
    state, actions, reason = begin_change(state, Cause(CauseKind.OTHER, text, nodes), now)
    return state, (*entries, *actions), reason


def _others_can_write(state: JobState) -> bool:
    """Return whether a plan fits the nodes without a failure. A failed commit is nobody's fault,
    so nobody can do better."""
    failed = frozenset(node for node, _ in state.checkpoint_errors)
    if "" in failed:
        return False
    request = replace(plan_request(state, state.epoch + 1), dead=failed)
    return plan_if_feasible(request) is not None


def _describe(errors: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{node}: {why}" if node else why for node, why in errors)
