"""The checkpoint of the last step: a job succeeds only once it is durable.

The workers wait until their parts of this checkpoint are on disk. If a node cannot write its part,
the node is quarantined, and the others write the whole checkpoint in a new epoch. A disk may also
hang without an error: `late_writers` names the nodes whose parts are missing, and a commit has its
own limit (`elastic.coordinator.records.checkpoint_commit`).
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job import checkpoints
from elastic.core.job.epoch_change import begin_change, plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.quarantine import add_finding
from elastic.core.job.state import Cause, CauseKind, JobAction, JobPhase, JobState, JobTransition
from elastic.domain.types import Slot, slot_of, whole_slots
from elastic.planning.plan.schemes import portion_of


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


def awaits_commit(state: JobState) -> bool:
    """Return whether only the commit of the last checkpoint is missing: no node is waited for."""
    reports = [member.report for member in state.members.values()]
    done = any(r.finished is not None and r.finished.params_sha256 for r in reports)
    return done and checkpoints.is_final_missing(state) and _is_complete(state)


def late_writers(state: JobState) -> tuple[str, ...]:
    """Return the nodes whose parts of the last checkpoint are missing after the last step; (): no
    part is missing, or a step is."""
    spec, plan = state.spec, state.plan
    if spec is None or plan is None or not checkpoints.is_final_missing(state):
        return ()
    finished = any(member.report.finished is not None for member in state.members.values())
    if not finished and state.newest_step + 1 < spec.n_steps:
        return ()
    written, late = _written(state), dict.fromkeys(tuple[str, ...]())
    whole = whole_slots(written)
    for layer, rank in ((layer, rank) for layer in range(spec.n_layers) for rank in range(spec.tp)):
        for node in () if (layer, rank) in whole else checkpoints.writers_of(plan, layer):
            if slot_of(layer, rank, portion_of(plan, node, layer)) not in written:
                late[node] = None
    return tuple(late)


def _written(state: JobState) -> tuple[Slot, ...]:
    step = state.spec.n_steps if state.spec is not None else -1
    return dict(state.checkpoint_parts).get(step, ())


def _is_complete(state: JobState) -> bool:
    return checkpoints.is_complete(state, _written(state))


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
