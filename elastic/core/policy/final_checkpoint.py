"""The checkpoint of the last step: a job succeeds only once it is durable.

The workers wait until their parts of this checkpoint are on disk. If a node cannot write its part,
the node is quarantined, and the others write the whole checkpoint in a new epoch.

A disk may also hang without an error. The wait begins anew with each part, and with each sign of
progress of a node whose part is missing, such as a file of a part (`check`):

    after     what happens
    disk_s    the wait is reported: an event, and a text in the status
    return_s  a new epoch, once: the others write, unless most parts of most nodes are missing
    return_s  in that epoch: the job ends with exit code 1

`return_s` is the limit because it is as long as the job waits for the commit of a checkpoint, whose
disk may be the same one (`elastic.coordinator.records.checkpoint_commit`). The two waits together
are shorter than an agent waits for a coordinator (`orphan_s`). A new epoch does not make a disk
answer, so one is enough: it helps if a worker waits, or if other nodes have other disks. If the
disk answers meanwhile, the parts count, also those of the epoch before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job import checkpoints
from elastic.core.job.epoch_change import begin_change, plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.quarantine import SUSPECTED, add_finding
from elastic.core.job.state import (
    Cause,
    CauseKind,
    FinalWait,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
)
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


# ---- a disk that hangs ----

ATTEMPTS = 1
"""Number of new epochs that are begun because parts do not come."""


def check(state: JobState, now: float) -> JobTransition | None:
    """Watch the wait for the last checkpoint: report it, then let others write. None: wait on, or
    there is nothing to wait for. First look whether it is `hopeless`."""
    watch = state.watch
    if not is_last_step_done(state) or not checkpoints.is_final_missing(state):
        return (state.of(watch=replace(watch, final=None)), (), "") if watch.final else None
    if state.phase is not JobPhase.RUNNING or state.doubt_since:
        return None
    parts, wait = len(_written(state)), watch.final or FinalWait()
    mark = f"{state.epoch} {parts}"
    if mark != wait.mark:
        attempts = wait.attempts if parts <= wait.parts else 0
        wait = FinalWait(mark, now, parts, attempts=attempts)
        return state.of(watch=replace(watch, final=wait)), (), ""
    late, quiet_s = late_writers(state), _quiet_s(state, now)
    if not late or quiet_s < state.limits.disk_s:
        return None
    if quiet_s >= state.limits.return_s and wait.attempts < ATTEMPTS:
        return _let_others_write(state, late, quiet_s, now)
    if wait.reported:
        return None
    assert state.spec is not None
    limit_s, why = state.limits.return_s, _missing(late, quiet_s)
    data = {"step": state.spec.n_steps, "why": why, "patience_s": limit_s}
    watch = replace(watch, final=replace(wait, reported=True))
    return state.of(watch=watch), (LogEntry("checkpoint-late", data),), why


def hopeless(state: JobState, now: float) -> str:
    """Return why the job ends without the parts of its last checkpoint; "": it waits on."""
    wait, late = state.watch.final, late_writers(state)
    waits = state.phase is JobPhase.RUNNING and not state.doubt_since
    if wait is None or not late or not waits or wait.attempts < ATTEMPTS:
        return ""
    quiet_s = _quiet_s(state, now)
    if quiet_s < state.limits.return_s:
        return ""
    why = f"{_missing(late, quiet_s)}, in {wait.attempts + 1} attempts"
    return f"the checkpoint of the last step could not be written: {why}"


def attention(state: JobState) -> str:
    """Return the text about the wait for the last checkpoint, for people; "": there is none."""
    wait, spec, now = state.watch.final, state.spec, state.updated_at
    if wait is None or spec is None or now - wait.since < state.limits.disk_s:
        return ""
    late, what = (
        late_writers(state),
        f"all steps are done, but the checkpoint of step {spec.n_steps}",
    )
    if awaits_commit(state):
        return f"{what} waits for its commit for {now - wait.since:.0f} s: the disk may hang"
    quiet_s = _quiet_s(state, now)
    if not late or quiet_s < state.limits.disk_s:
        return ""
    left_s = max(0.0, state.limits.return_s - quiet_s)
    then = "the job ends with an error" if wait.attempts >= ATTEMPTS else "others write them"
    text = f"{what} is not written: {_missing(late, quiet_s)}"
    return f"{text}; the job ends when they are on disk; if not, {then} in {left_s:.0f} s"


def _let_others_write(
    state: JobState, late: Sequence[str], quiet_s: float, now: float
) -> JobTransition:
    """Begin a new epoch; without the late nodes, unless they are most nodes or no plan fits the
    others: many nodes may use the same disk."""
    wait = state.watch.final
    assert wait is not None
    why, entries = _missing(late, quiet_s), tuple[JobAction, ...]()
    few = len(late) <= max(1, len(state.members) // 2)
    request = replace(plan_request(state, state.epoch + 1), dead=frozenset(late))
    for node in late if few and plan_if_feasible(request) is not None else ():
        reason = f"its part of the last checkpoint is missing for {quiet_s:.0f} s"
        evidence = {SUSPECTED: True}
        finding = Finding(FaultClass.STORAGE, HealthAction.QUARANTINE, reason, evidence, now)
        state, more = add_finding(state, node, finding)
        entries += more
    final = replace(wait, attempts=wait.attempts + 1)
    state = state.of(watch=replace(state.watch, final=final))
    text = f"the checkpoint of the last step is not written: {why}"
    state, actions, reason = begin_change(state, Cause(CauseKind.STALLED, text, tuple(late)), now)
    return state, (*entries, *actions), reason


def _missing(late: Sequence[str], quiet_s: float) -> str:
    nodes, have = " ".join(late), "has" if len(late) == 1 else "have"
    return f"{nodes} {have} written no part for {quiet_s:.0f} s, a disk may hang"


def _quiet_s(state: JobState, now: float) -> float:
    """Return the time for which no part came, and no late node showed progress."""
    wait, signs = state.watch.final, state.watch.signs
    assert wait is not None
    moved = [signs[node].at for node in late_writers(state) if node in signs]
    return now - max(wait.since, *moved, 0.0)


def is_last_step_done(state: JobState) -> bool:
    """Return whether all steps of the job are committed."""
    spec = state.spec
    finished = any(member.report.finished is not None for member in state.members.values())
    return spec is not None and (finished or state.newest_step + 1 >= spec.n_steps)


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
    if not is_last_step_done(state):
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
