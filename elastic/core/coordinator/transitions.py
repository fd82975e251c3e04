"""The coordinator's pure transition: (state, event, now) -> (state, actions, reason).

Each event first updates the state (`event_handlers.EVENT_HANDLERS`). Then the rules of the present
phase (`RULES`) are applied until no rule has a result. Rules depend on the state, not on single
messages, so they decide the same if events are lost, repeated or reordered, or if another
coordinator takes over.

    WAITING -> LAUNCHED -> HALTING -> INSTALLING -> RUNNING -> FINISHED
                            ^  |  ^        |           |
                            |  v  +--------+-----------+   a fault, a joining or a leaving node:
                          PAUSED                           the next epoch

In PAUSED no plan fits the available nodes. A fault in HALTING or INSTALLING is a second fault
during a recovery (`elastic.core.job.epoch_change`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.core.coordinator.event_handlers import EVENT_HANDLERS
from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job import absent_nodes, checkpoints, clock, liveness, quarantine, scope
from elastic.core.job.epoch_change import (
    begin_change,
    candidates,
    consider_joining,
    decide_plan,
    divergence_reports,
    halt_all,
    improve_plan,
    plan_request,
    resume_if_feasible,
    without_joining,
)
from elastic.core.job.goodput import evaluation_entries, nonfinite_entries
from elastic.core.job.join_policy import (
    last_resumption,
    plan_if_feasible,
    record_pause,
    without_member,
)
from elastic.core.job.membership import end_job, launch_nodes
from elastic.core.job.quarantine import SUSPECTED
from elastic.core.job.reachability import path_cause, review_paths
from elastic.core.job.state import (
    Cause,
    CauseKind,
    ChangeCompleted,
    JobAction,
    JobFailure,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    Member,
    Send,
)
from elastic.core.policy import drain, final_checkpoint, progress_watchdog, restart_policy
from elastic.core.policy.backup_policy import change_backup
from elastic.core.policy.certificate_warnings import expired_of
from elastic.core.policy.remediation import apply_remedies, node_lost
from elastic.core.policy.straggler_policy import rebalance_stragglers
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.core.protocol.timeouts import budget
from elastic.domain.errors import EXIT_FAILURE, EXIT_OK, EXIT_UNRECOVERABLE, EXIT_USAGE
from elastic.planning.backup.peer_assignment import natural

SCRIPT_S = 30.0
"""If no worker has attached after this time, the script does not use elastic. Until then a failed
node does not end the job while workers of others run."""
LATE_WORKERS_S = 10.0
"""When the minimum of nodes is ready, the job waits for the others so long, and at least as long as
the minimum needed. Then it starts without them; they join later."""
DEPARTURES = 64
"""Number of lost members whose reasons are kept."""
CONTACT_FACTOR = 4.0
"""Factor on the time from lost contact to the next epoch, per failed epoch. A bad path is known
before the attempts without a pause are used up (`progress_watchdog.PAUSES_S`)."""
PATH_FACTOR = 1.5
"""A bad path is known after this multiple of `path_s`: the time of the attempt that finds it, and
of the report, is added."""
SHOWN_FAILURES = 3
"""Number of nodes whose errors a cause quotes."""
UNEXPLAINED = "no reason was reported; see the node's logs in the run directory"
OVER = (JobPhase.FINISHED, JobPhase.FAILED)
CHANGING = (JobPhase.HALTING, JobPhase.INSTALLING, JobPhase.RUNNING, JobPhase.PAUSED)
"""Phases in which an epoch change can begin at any time."""
INSTALLED = (NodePhase.INSTALLING, NodePhase.RUNNING, NodePhase.FINISHED)
"""Phases of a node that has an assignment of its epoch."""
Rule = Callable[[JobState, float], JobTransition | None]


def transition(state: JobState, event: Any, now: float) -> JobTransition:
    """Return (state, actions, reason): `record_event`, then `apply_rules`."""
    state, actions, reason = record_event(_excuse_delay(state, now), event, now)
    state, more, why = apply_rules(state, now)
    return state, (*actions, *more), "; ".join(filter(None, (reason, why)))


def record_event(state: JobState, event: Any, now: float) -> JobTransition:
    """Run the event's handler, and update the limits on waiting if a longer time was measured.

    Call `apply_rules` within `limits.starved_s` to decide.
    """
    if now - state.updated_at > state.limits.starved_s:
        state = _excuse_delay(state, now)
    handler, seen = EVENT_HANDLERS.get(type(event)), state.seen
    state, actions, reason = handler(state, event, now) if handler else (state, (), "")
    if state.timeouts is not None and state.seen is seen:
        return state, actions, reason
    limits = budget(state.policy.lease_s, heartbeat_s=state.policy.heartbeat_s, seen=state.seen)
    before = state.timeouts
    if limits == before:
        return state, actions, reason
    new = {name: getattr(limits, name) for name in limits.__slots__}
    changed = {name: s for name, s in new.items() if s != getattr(before, name, None)}
    measured = {name: getattr(state.seen, name) for name in state.seen.__slots__}
    entry = LogEntry("timeouts", changed | {"measured": measured})
    return state.of(timeouts=limits), (*actions, entry), reason


def _excuse_delay(state: JobState, now: float) -> JobState:
    """Add the time for which the coordinator itself did not run to the deadlines of others.

    Messages that came in the meantime are read one member's after the other's. So the time also
    counts as `late_s` until the next tick that is on time.
    """
    late = now - state.updated_at - state.limits.starved_s if state.updated_at else 0.0
    if late > 0:
        members = {
            node: replace(member, seen=member.seen + late, closed_at=member.closed_at + late)
            for node, member in state.members.items()
        }
        state = state.of(members=members, late_s=max(state.late_s, late))
        state = progress_watchdog.excused(state, late)
        if state.failure is not None:
            state = state.of(failure=replace(state.failure, at=state.failure.at + late))
        if state.missing is not None:
            state = state.of(missing=replace(state.missing, since=state.missing.since + late))
        if state.finished_at:
            state = state.of(finished_at=state.finished_at + late)
    return clock.set_clock(state, now)


def apply_rules(state: JobState, now: float) -> JobTransition:
    """Decide about all recorded events."""
    state = _excuse_delay(state, now)
    actions: list[JobAction] = []
    reasons: list[str] = []
    for _ in range(16):
        state = progress_watchdog.observe(state, now)
        rules: tuple[Rule | None, ...] = (
            _end,
            _drop_lost_members,
            _regain_epoch,
            review_paths,
            RULES[state.phase][0],
            _last_checkpoint,
            progress_watchdog.check_progress,
        )
        if state.failure is not None or state.finished is not None:
            rules = (_end,)
        results = (rule(state, now) for rule in rules if rule is not None)
        result = next((found for found in results if found is not None), None)
        if result is None:
            break
        before, epoch = state.phase, state.epoch
        state, more, reason = result
        actions += more
        if state.epoch > epoch:
            state, more = progress_watchdog.epoch_began(state, now)
            actions += more
        reasons += [reason] if reason else []
        if state.phase is not before:
            data = {"phase": state.phase.value, "epoch": state.epoch, "reason": reason}
            actions.append(LogEntry("phase", data))
    return state, tuple(actions), "; ".join(reasons)


# ---- rules of every phase ----


def _drop_lost_members(state: JobState, now: float) -> JobTransition | None:
    """Drop the members that are lost (`elastic.core.job.liveness`). After the end of the job no
    member is lost."""
    if state.ending is not None:
        return None
    found = liveness.survey(state, now)
    doubt = liveness.judge_own_network(state, found, now)
    if doubt is not None:
        return doubt
    believed = liveness.believed_losses(state, found, now)
    if not believed:
        return None
    actions: list[JobAction] = []
    reasons: list[str] = []
    for loss in believed:
        node, error = loss.node, state.members[loss.node].agent_error
        why = loss.why + (f"; its agent failed: {error}" if error else "")
        why += expired_of(state, node, now)
        state = state.of(departures=(*state.departures, (node, why))[-DEPARTURES:])
        reasons.append(f"{node} lost: {why}")
        entry = LogEntry("lost", {"node": node, "loss": loss.kind.value, "why": why})
        state, findings = node_lost(without_member(state, node, now, left=1), node, why, now)
        state = progress_watchdog.member_lost(state, node, now)
        if not loss.proven:
            state = liveness.without_doubt(absent_nodes.with_absent(state, node, now))
        actions += [entry, Send(node, m.Fenced(f"lost: {why}")), *findings]
    return state, tuple(actions), "; ".join(reasons)


def _regain_epoch(state: JobState, now: float) -> JobTransition | None:
    """Begin a change above the epoch of the nodes if the store lost its last writes.

    Then nodes know an epoch that the saved state does not have, or have an assignment of an epoch
    for which the saved state has none. A second assignment for that epoch would mix two plans.
    """
    if state.phase not in CHANGING or state.spec is None:
        return None
    for node, member in state.members.items():
        report = member.report
        installed = report.able and report.phase in INSTALLED and state.phase is JobPhase.HALTING
        if member.connected and report.epoch >= state.epoch + (0 if installed else 1):
            text = f"the store lost its last writes: {node} is {report.phase} in epoch "
            text += f"{report.epoch}, the saved state is {state.phase} in epoch {state.epoch}"
            return begin_change(state, Cause(CauseKind.STORE, text, (node,)), now)
    return None


def _end(state: JobState, now: float) -> JobTransition | None:
    """End the job if its workers finished or failed."""
    if state.phase in OVER:
        return None
    if state.failure is not None:
        return _end_with_error(state, state.failure, now)
    if state.finished is not None:
        return _finished(state, state.finished, now)
    reports = [mb.report for mb in state.members.values()]
    crashing = [r for r in reports if r.elastic and r.phase is NodePhase.FAILED]
    everywhere = all(r.phase is NodePhase.FAILED for r in reports)
    if crashing and everywhere and not absent_nodes.are_awaited(state, now):
        text = f"workers crash on every node; {_crash(crashing[0])}"
        return _end_job(state, JobPhase.FAILED, 1, text)
    for report in reports:
        failed, finished = report.failed, report.finished
        if failed is not None:
            return _fail(state, JobFailure(report.info.node, failed, now), now)
        if finished is not None and finished.params_sha256:
            return _finished(state, finished, now)
    return None


def _fail(state: JobState, failure: JobFailure, now: float) -> JobTransition:
    """Keep the first failure, and end the job unless it must wait for a checkpoint."""
    state, entries = state.of(failure=failure), _evidence(failure.failed)
    ended = _end_with_error(state, failure, now)
    if ended is None:
        wait = f"waiting for the checkpoint of step {checkpoints.due_at_failure(state)}"
        return state, entries, f"{_error(failure)}; {wait}"
    state, actions, reason = ended
    return state, (*entries, *actions), reason


def _end_with_error(state: JobState, failure: JobFailure, now: float) -> JobTransition | None:
    """End the job once the checkpoint that is due is durable or given up, or after `save_s`."""
    due = checkpoints.due_at_failure(state)
    if checkpoints.is_awaited(state, due) and now - failure.at < state.limits.save_s:
        return None
    return _end_job(state, JobPhase.FAILED, failure.failed.exit_code, _error(failure))


def _error(failure: JobFailure) -> str:
    return f"{failure.node}: {failure.failed.message or UNEXPLAINED}"


def _evidence(failed: m.Failed) -> tuple[LogEntry, ...]:
    """Return the log entries of the wrong ledger or the gradient that made a worker fail."""
    evaluation = failed.record.evaluation if failed.record is not None else None
    entries = (*evaluation_entries(evaluation), *nonfinite_entries(failed.record, stops=True))
    if failed.doubled or failed.missing:
        counts = {"double": failed.doubled, "missing": failed.missing}
        entries = (*entries, LogEntry("ledger", counts))
    return entries


def _finished(state: JobState, finished: m.Finished, now: float) -> JobTransition | None:
    """End the job once the checkpoint of its last step is durable, if one is due. Older ones are
    awaited for `limits.disk_s` while nodes write them."""
    text = f"all {finished.step} steps done"
    if not checkpoints.is_final_missing(state):
        late = checkpoints.being_written(state, now)
        if late and not state.finished_at:
            limit_s = state.limits.disk_s
            entries = tuple(checkpoints.late_entry(step, limit_s) for step in late)
            state = state.of(finished=finished, finished_at=now)
            return state, entries, f"{text}; older checkpoints are written"
        if late and now - state.finished_at < state.limits.disk_s:
            return None
        return _end_evaluated(state, finished, JobPhase.FINISHED, EXIT_OK, text)
    problem = final_checkpoint.problem(state)
    if problem:
        text = f"{text}, but {problem}"
        return _end_evaluated(state, finished, JobPhase.FAILED, EXIT_FAILURE, text)
    return final_checkpoint.replace_writers(state, now)


def _end_evaluated(
    state: JobState, finished: m.Finished, phase: JobPhase, code: int, text: str
) -> JobTransition:
    """End the job, and log the evaluation of its final parameters."""
    evaluation = finished.evaluation
    entries = evaluation_entries(evaluation)
    state = state.of(evaluation=evaluation or state.evaluation)
    state, actions, reason = _end_job(state, phase, code, text, finished.params_sha256)
    return state, (*entries, *actions), reason


def _last_checkpoint(state: JobState, now: float) -> JobTransition | None:
    """Wait for the parts of the last checkpoint for a limited time."""
    problem = final_checkpoint.hopeless(state, now)
    if problem:
        return _end_job(state, JobPhase.FAILED, EXIT_FAILURE, f"all steps done, but {problem}")
    return final_checkpoint.check(state, now)


def _end_job(
    state: JobState, phase: JobPhase, code: int, reason: str, sha: str = ""
) -> JobTransition:
    # The summary must include a change that became complete just before the end of the job.
    state, completed, _ = _complete_change(state) or (state, (), "")
    unfinished = checkpoints.unfinished(state)
    state, ended = end_job(state, phase, code, reason, sha)
    return state, (*completed, *unfinished, *ended), reason


# ---- rules of single phases ----


def _waiting(state: JobState, now: float) -> JobTransition | None:
    policy = state.policy
    here = [node for node, mb in state.members.items() if mb.connected]
    if len(here) < policy.min_nodes:
        return (state.of(enough_since=0.0), (), "nodes left") if state.enough_since else None
    if not state.enough_since:
        return state.of(enough_since=now), (), "the minimum of nodes is here"
    if len(here) < policy.max_nodes and now - state.enough_since < policy.last_call_s:
        return None
    nodes = tuple(sorted(here, key=natural))[: policy.max_nodes]
    state, actions = launch_nodes(state, nodes)
    state = state.of(phase=JobPhase.LAUNCHED, launched_at=now, enough_since=0.0)
    return state, actions, f"{len(here)} of {policy.min_nodes} nodes are here"


def _launched(state: JobState, now: float) -> JobTransition | None:
    launched = [mb for mb in state.members.values() if mb.rank >= 0]
    if not launched:
        state = state.of(phase=JobPhase.WAITING, next_rank=0, enough_since=0.0)
        return state, (), "every launched node is gone"
    if state.spec is None:
        if any(mb.report.elastic for mb in launched):
            return None  # the script uses elastic, so the agents restart its workers
        return _plain_script(state, launched, now)
    late = tuple(node for node, mb in state.members.items() if mb.rank < 0)
    if late:
        state, actions = launch_nodes(state, late)
        return state, actions, "launch late nodes"
    settled = all(mb.report.able or mb.report.phase is NodePhase.FAILED for mb in launched)
    able, since = sum(mb.report.able for mb in launched), now - state.launched_at
    enough = able >= state.policy.min_nodes
    if settled or (enough and _is_overdue(state, now)):
        state = state.of(start_s=since, enough_since=0.0)
        return begin_change(state, Cause(CauseKind.START, "start"), now)
    start_s = since if able and not state.start_s else state.start_s
    began = (state.enough_since or now) if enough else 0.0
    if (start_s, began) == (state.start_s, state.enough_since):
        return None
    return state.of(start_s=start_s, enough_since=began), (), ""


def _is_overdue(state: JobState, now: float) -> bool:
    """Return whether the nodes that are not ready have had their time after the minimum was."""
    if not state.enough_since:
        return False
    needed_s = state.enough_since - state.launched_at
    return now - state.enough_since > max(LATE_WORKERS_S, needed_s)


def _plain_script(state: JobState, launched: list[Member], now: float) -> JobTransition | None:
    """Apply torchrun's rules to a script that does not use elastic.

    If only some nodes fail within `SCRIPT_S`, the workers of the others may attach later: then the
    script uses elastic, and training begins without the nodes that failed. If the store lost the
    last writes, nodes have a later restart than the saved state, so all restart once more.
    """
    policy, newest = state.policy, max(mb.report.restart for mb in launched)
    done = [mb for mb in launched if mb.report.restart == state.restart]
    failed = [mb for mb in done if mb.report.phase is NodePhase.FAILED]
    ended = [mb for mb in done if mb.report.phase in (NodePhase.FAILED, NodePhase.FINISHED)]
    if len(ended) < len(launched) and now - state.launched_at < SCRIPT_S:
        failed = []
    missing = state.next_rank > len(launched)
    more = any(mb.rank < 0 for mb in state.members.values()) and len(launched) < policy.max_nodes
    grown = more and now - state.launched_at > SCRIPT_S
    failed.sort(key=lambda mb: progress_watchdog.sign_at(state, mb.node))  # the cause comes first
    if failed and state.restart >= policy.max_restarts:
        used_up = f" (restarts used up: {state.restart})" if state.restart else ""
        text = f"{_crash(failed[0].report)}{used_up}"
        return _end_job(state, JobPhase.FAILED, 1, text)
    lost = newest > state.restart
    if failed or missing or grown or lost:
        changed = "the store lost its last writes" if lost else "membership changed"
        why = _crash(failed[0].report) if failed else changed
        restart = max(state.restart, newest) + 1
        free = restart - state.restart - bool(failed)  # only restarts after a failure count
        policy = replace(policy, max_restarts=policy.max_restarts + free)
        members = {n: replace(mb, rank=-1, launch=None) for n, mb in state.members.items()}
        state = state.of(phase=JobPhase.WAITING, members=members, next_rank=0, policy=policy)
        state = state.of(restart=restart)
        data = {"why": why, "restart": state.restart}
        return state, (LogEntry("restart", data),), f"group restart: {why}"
    finished = all(mb.report.phase is NodePhase.FINISHED for mb in done)
    if done and len(done) == len(launched) and finished:
        return _end_job(state, JobPhase.FINISHED, 0, "all workers ended")
    return None


def _halting(state: JobState, now: float) -> JobTransition | None:
    change = state.change
    assert change is not None
    if change.boundary:
        cause = _fault(state, now) or _notice_ends(state, now)
        if cause is not None:
            return begin_change(state, cause, now)
    apart = _outside_problem(state, now)
    if apart is not None:
        return apart
    halted = all(mb.connected and scope.has_answered(state, mb) for mb in state.members.values())
    if not halted or restart_policy.is_waiting(state, now):
        return None
    settled = drain.settle(state, now)
    if settled is not None:
        return settled
    if not change.boundary:
        verdict = progress_watchdog.retry(state, now)
        if verdict is not None or progress_watchdog.is_paused(state, now):
            return verdict
    return restart_policy.decide_wait(state, now) or decide_plan(state, now)


def _outside_problem(state: JobState, now: float) -> JobTransition | None:
    """Halt all nodes at once if those outside the change cannot stay outside, or a node must leave
    before they have finished."""
    if not scope.is_any_awaited(state):
        return None
    notice = _notice_ends(state, now)
    why = scope.problem(state) or (notice.text if notice is not None else "")
    if not why and divergence_reports(state):
        why = "holders of a layer disagree"
    return halt_all(state, why, now) if why else None


def _notice_ends(state: JobState, now: float) -> Cause | None:
    """Return the cause to halt at once if the deadline of a drain is too near, else None. The drain
    may wait."""
    for member in state.members.values():
        if member.drain_deadline and drain.must_leave(state, member, now):
            return Cause(CauseKind.NOTICE, f"notice of {member.node} runs out", (member.node,))
    return None


def _installing(state: JobState, now: float) -> JobTransition | None:
    unreadable = checkpoints.unreadable(state)
    if unreadable is not None:
        node, found = unreadable
        alone = _leave_out_blind(state, node, found.detail, now) if found.missing else None
        return alone or _fall_back(state, found.detail, now)
    cause = _fault(state, now)
    if cause is not None:
        # If a micro-batch of this epoch was computed before the fault, the change is complete and
        # the epoch has run. The next call of this rule then begins a new change for the fault. But
        # as long as nodes run the old plan, the change is not complete.
        whole = not scope.is_any_awaited(state)
        completed = _complete_change(state.of(trained=True)) if whole else None
        return completed or begin_change(state, cause, now)
    apart = _outside_problem(state, now)
    if apart is not None:
        return apart
    assert state.plan is not None
    reports = [state.members[node].report for node in state.plan.nodes()]
    ready = (NodePhase.RUNNING, NodePhase.FINISHED)
    if all(r.epoch == state.epoch and r.phase in ready for r in reports):
        state = state.of(phase=JobPhase.RUNNING, trained=True)
        return state, (), "every node of the plan is ready"
    return None


def _leave_out_blind(state: JobState, node: str, why: str, now: float) -> JobTransition | None:
    """Leave out a node that does not see the checkpoint's files. None: it is not the first such
    node, or no plan fits without it."""
    if set(state.checkpoint_blind) - {node}:
        return None
    request = replace(plan_request(state, state.epoch + 1), dead=frozenset({node}))
    if plan_if_feasible(request) is None:
        return None
    state = state.of(checkpoint_blind=(node,))
    reason = f"it cannot read the checkpoint: {why}"
    finding = Finding(FaultClass.STORAGE, HealthAction.QUARANTINE, reason, {SUSPECTED: True}, now)
    state, entries = quarantine.add_finding(state, node, finding)
    cause = Cause(CauseKind.OTHER, f"{node} cannot read the checkpoint: {why}", (node,))
    state, actions, told = begin_change(state, cause, now)
    return state, (*entries, *actions), told


def _fall_back(state: JobState, why: str, now: float) -> JobTransition:
    """Continue from an older checkpoint, because the newest one cannot be read."""
    excused: list[JobAction] = []
    for node in state.checkpoint_blind:
        found = quarantine.pardon(state, node, now, 0.0, "other nodes cannot read it either")
        state, entries, _ = found or (state, (), "")
        excused += entries
    state, entry = checkpoints.without_newest(state, why)
    if state.checkpoint is not None:
        text = f"{why}; continuing from the checkpoint of step {state.checkpoint[1]}"
        state, actions, reason = begin_change(state, Cause(CauseKind.OTHER, text), now)
        return state, (*excused, entry, *actions), reason
    code = EXIT_UNRECOVERABLE if state.trained else EXIT_USAGE
    state, actions, reason = _end_job(
        state, JobPhase.FAILED, code, f"{why}; there is no older checkpoint"
    )
    return state, (entry, *actions), reason


def _running(state: JobState, now: float) -> JobTransition | None:
    completed = _complete_change(state)
    if completed is not None:  # first, because a fault may have been recorded at the same time
        return completed
    cause = _fault(state, now)
    if cause is not None:
        return begin_change(state, cause, now)
    assert state.plan is not None
    members = [state.members[node] for node in state.plan.nodes()]
    protected = all(mb.report.protected >= state.epoch for mb in members)
    if state.trimmed < state.epoch and protected:
        step = state.assignment.step if state.assignment is not None else -1
        sends = [Send(node, m.Trim(state.epoch, step)) for node in state.members]
        entry = LogEntry("protected", {"epoch": state.epoch})
        # The workers of this plan have no wrong replicas; those of other nodes keep theirs.
        distrusted = tuple(one.repaired(state.plan.nodes()) for one in state.distrusted)
        state = state.of(trimmed=state.epoch, absent=(), distrusted=distrusted)
        return state, (*sends, entry), "protected"
    return (
        _drain(state, now)
        or drain.replace_hinted_nodes(state, now)
        or apply_remedies(state, now)
        or _join(state, now)
        or rebalance_stragglers(state, now)
        or change_backup(state, now)
        or improve_plan(state, now)
    )


def _complete_change(state: JobState) -> JobTransition | None:
    """Complete the change if a micro-batch of its epoch was computed, else return None."""
    if state.change is None or state.plan is None:
        return None
    nodes = state.plan.nodes()
    reports = [state.members[node].report for node in nodes if node in state.members]
    resumed = [r.resumed_at for r in reports if r.resumed_at and r.epoch == state.epoch]
    if not resumed:
        return None
    ready = [one for report in reports for one in report.ready if one.epoch == state.epoch]
    action = ChangeCompleted(
        change=state.change,
        nodes_after=len(nodes),
        transfer_s=max((one.transfer_s for one in ready), default=0.0),
        rebuild_s=max((one.rebuild_s for one in ready), default=0.0),
        resumed_at=min(resumed),
        since=state.recovered_at,
    )
    state = record_pause(state, state.change, last_resumption(state, state.plan, state.change))
    return state.of(change=None, recovered_at=min(resumed)), (action,), "training goes on"


def _drain(state: JobState, now: float) -> JobTransition | None:
    """Move layers and backups away from draining nodes. Then release these nodes, after the
    checkpoints that they may be writing."""
    assert state.plan is not None
    settled = drain.settle(state, now)
    if settled is not None:
        return settled
    used = {*state.plan.nodes(), *(peer for _, peer in state.plan.peers)}
    for node, member in state.members.items():
        if not member.draining:
            continue
        if node in used:
            in_time = not drain.must_leave(state, member, now)
            return begin_change(state, drain.drain_cause(state), now, boundary=in_time)
        writing = member.report.writing or checkpoints.may_be_writing(state)
        writes = writing and not drain.must_leave(state, member, now)
        # A disconnected node would miss the order and join again.
        if state.trimmed >= state.epoch and member.connected and not writes:
            state, actions = drain.release(state, member, now)
            return state, actions, f"{node} holds nothing any more and may leave"
    return None


def _join(state: JobState, now: float) -> JobTransition | None:
    """Let nodes that the planner would use fetch state, then change the plan at a step's end. After
    the last step no node joins: one that was left out may have the disk that hangs."""
    changing = state.change is not None or state.trimmed < state.epoch
    if changing or final_checkpoint.is_last_step_done(state):
        return None
    if not state.joining:
        return consider_joining(state, now)
    usable = {member.node for member in candidates(state)}
    here = tuple(node for node in state.joining if node in usable)
    if not here:
        return without_joining(state), (), "the joining node is gone"
    members = [state.members[node] for node in here]
    fetching = any(member.report.prefetched < state.epoch for member in members)
    # A disconnected node is back soon, or lost. The change would wait for it, and training with it.
    away = not all(member.connected for member in members)
    if away or (fetching and now - state.joining_since < state.limits.prefetch_s):
        return None
    cause = Cause(CauseKind.JOIN, f"join {' '.join(here)}", here)
    return begin_change(state, cause, now, boundary=True)


def _paused(state: JobState, now: float) -> JobTransition | None:
    if not absent_nodes.is_worth_a_retry(state):
        return absent_nodes.end_if_hopeless(state, now)
    return (
        quarantine.release_expired(state, now)
        or quarantine.restart_failed_node(state, now)
        or drain.settle(state, now)
        or resume_if_feasible(state, now)
        or quarantine.restart_needed_node(state, now)
    )


def _fault(state: JobState, now: float) -> Cause | None:
    """Return the fault because of which the epoch must end at once, or None."""
    assert state.plan is not None
    for node in state.plan.nodes():
        member = state.members.get(node)
        if member is None:
            return Cause(CauseKind.LOST, f"{node} lost{_departure(state, node)}", (node,))
        if member.workers_gone:
            return _workers_down(member.report, "workers are gone")
        if member.report.phase is NodePhase.IDLE:
            return _workers_down(member.report, "workers were started anew")
    for node, peer in state.plan.peers:
        if peer not in state.members:
            text = f"{peer} lost, which kept the backups of {node}{_departure(state, peer)}"
            return Cause(CauseKind.LOST, text, (peer,))
    for diverged in divergence_reports(state)[:1]:
        text = "; ".join(one.text for one in diverged.found)
        return Cause(CauseKind.DIVERGENCE, f"step {diverged.step}: {text}")
    unreachable = path_cause(state) or checkpoints.cause_to_write_again(state)
    if unreachable is not None:
        return unreachable
    if state.suspected_since and now - state.suspected_since > _contact_s(state):
        return _contact_lost(state)
    return None


def _contact_s(state: JobState) -> float:
    """Return the seconds from a report of lost contact to the next epoch.

    They grow with each epoch that fails before a step is finished. So there is time to find the bad
    path that may be the cause.
    """
    reports = [mb.report for mb in state.members.values() if mb.report.epoch == state.epoch]
    limits, failed = state.limits, min(state.watch.attempts, 30)
    suspects = {node for report in reports for node in report.suspects}
    if any(liveness.may_return(state, node) for node in suspects):
        # It is lost soon, or back. The evidence is complete with the next heartbeat of another one.
        return max(limits.contact_s, limits.closed_s + limits.heartbeat_s)
    if not failed or not any(map(progress_watchdog.accuses_path, reports)):
        return limits.contact_s
    found_s = PATH_FACTOR * limits.path_s
    return max(limits.contact_s, min(limits.contact_s * CONTACT_FACTOR**failed, found_s))


def _contact_lost(state: JobState) -> Cause | None:
    """Return the cause with the reported suspects and errors, or None if nobody reports any now."""
    reports = [mb.report for mb in state.members.values() if mb.report.epoch == state.epoch]
    suspects = tuple(sorted({node for report in reports for node in report.suspects}))
    failures = [f"{r.info.node}: {text}" for r in reports for text in r.failures[:1]]
    if not suspects and not failures:
        return None
    more = len(failures) - SHOWN_FAILURES
    errors = "; ".join([*failures[:SHOWN_FAILURES], *([f"{more} more"] if more > 0 else [])])
    if not suspects:
        return Cause(CauseKind.CONTACT, errors)
    text = f"contact lost with {' '.join(suspects)}" + (f" ({errors})" if errors else "")
    return Cause(CauseKind.CONTACT, text, suspects)


def _departure(state: JobState, node: str) -> str:
    """Return why the node was lost, as the end of a cause; "": it is not known."""
    why = dict(state.departures).get(node, "")
    return f": {why}" if why else ""


def _crash(report: NodeReport) -> str:
    """Return the node and the cause of its workers' crash."""
    return f"{report.info.node}: {report.cause or UNEXPLAINED}"


def _workers_down(report: NodeReport, text: str) -> Cause:
    """Return the cause for crashed or hung workers; `text` is used if their agent gave none."""
    kind = CauseKind.HANG if report.hung else CauseKind.WORKER
    node = report.info.node
    return Cause(kind, f"{node}: {report.cause or text}", (node,))


RULES: dict[JobPhase, tuple[Rule | None, tuple[JobPhase, ...]]] = {
    JobPhase.WAITING: (_waiting, (JobPhase.LAUNCHED,)),
    JobPhase.LAUNCHED: (_launched, (JobPhase.HALTING, JobPhase.WAITING, *OVER)),
    JobPhase.HALTING: (_halting, (JobPhase.INSTALLING, JobPhase.PAUSED, JobPhase.HALTING, *OVER)),
    JobPhase.INSTALLING: (_installing, (JobPhase.RUNNING, JobPhase.HALTING, *OVER)),
    JobPhase.RUNNING: (_running, (JobPhase.HALTING, *OVER)),
    JobPhase.PAUSED: (_paused, (JobPhase.HALTING, JobPhase.FAILED)),
    JobPhase.FINISHED: (None, ()),
    JobPhase.FAILED: (None, ()),
}
"""For each phase: its rule, and the phases that may follow. docs/design/states.md is drawn from
this table."""
