"""Epoch changes: begin a change, decide its plan and assignment, consider nodes that joined.

The plan changes after a fault, or for a planned change of the cluster:

1. `begin_change` raises the epoch and orders every node to halt. After the loss of a node, nodes
   of other pipelines may stay outside: they halt when they have finished their micro-batches
   (`elastic.core.job.scope`).
2. When all nodes have halted and reported, `decide_plan` makes the plan, decides from which copies
   each layer's state comes (`elastic.core.recovery.recovery`) and sends the assignment.
3. The change is complete when a micro-batch of the epoch was computed, and all nodes outside have
   entered the epoch (`elastic.core.coordinator.transitions`).

**A second fault during a recovery.** If a node is lost while nodes halt after a fault,
`decide_plan` adds it to the lost nodes of the same change. If a node is lost while the plan is
being installed, or during a planned halt, `begin_change` is called again for the next epoch. The
new change inherits from an unfinished recovery the causes, lost nodes, old plan, start time and
micro-batches to replay. From a planned change, whose step may still be running, it inherits
nothing.

**Micro-batches**: `Assignment.todo` and `Assignment.partial` list the micro-batches that each
pipeline runs in the resumed step; the solver derives them from the ledgers in the inventory. The
workers add the gradients and extend the ledgers (`elastic.worker.replica.replica`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job import (
    absent_nodes,
    checkpoints,
    join_policy,
    quarantine,
    reachability,
    scope,
)
from elastic.core.job.goodput import evaluation_entries, nonfinite_entries, step_entry
from elastic.core.job.measured_conditions import backup_conditions, fetch_time
from elastic.core.job.membership import end_job
from elastic.core.job.reachability import CopyPlace
from elastic.core.job.state import (
    Cause,
    CauseKind,
    EpochChange,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    Member,
    Send,
)
from elastic.core.job.stragglers import slowdowns
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.recovery import divergence, lineage, partial_replay, recovery
from elastic.domain.errors import EXIT_UNRECOVERABLE, FieldError, InfeasiblePlan, Unrecoverable
from elastic.domain.types import (
    GRADIENT,
    REDUCED,
    Copy,
    EvaluationResult,
    NodeInfo,
    Plan,
    StepRecord,
)
from elastic.planning.plan.schemes import state_of
from elastic.planning.search.repair import repair
from elastic.planning.search.search import PlanRequest, make_plan

FOR_SPEED = "another plan is faster"
"""Beginning of the cause of a change that replaces a repaired plan."""
MAX_SOLUTIONS = 16
"""Maximum number of attempts to find copies that no node fetches over a bad path."""


def begin_change(
    state: JobState, cause: Cause, now: float, *, boundary: bool = False
) -> JobTransition:
    """Raise the epoch and halt all nodes: at once, or (boundary) after the running step. Nodes that
    a loss does not touch may halt later, if the others can repair the plan.

    The new epoch is above every epoch that a member or one of its copies knows, also if the store
    lost its last writes.
    """
    reports = [mb.report for mb in state.members.values()]
    copies = (copy.epoch for report in reports for copy in report.inventory)
    epoch = max([state.epoch, *(report.epoch for report in reports), *copies]) + 1
    old = state.change if state.change is not None and not state.change.boundary else None
    plan = state.plan
    nodes = plan.nodes() if plan is not None else ()
    gone = tuple(
        node
        for node in nodes
        if _workers_gone(state, node) or state.members[node].report.phase is NodePhase.IDLE
    )
    found = [state.members[node].report.detect_s for node in gone if node in state.members]
    change = EpochChange(
        epoch=epoch,
        causes=(*(old.causes if old else ()), cause),
        boundary=boundary,
        lost=tuple(dict.fromkeys((*(old.lost if old else ()), *gone))),
        nodes_before=old.nodes_before if old else len(nodes),
        began=old.began if old else now,
        old_plan=old.old_plan if old else plan,
        step=max((mb.report.step for mb in state.members.values()), default=0),
        microbatch=max((mb.report.microbatch for mb in state.members.values()), default=0),
        detect_s=max(found, default=0.0),
        replayed=old.replayed if old else frozenset(),
        rerun=old.rerun if old else 0,
    )
    outside = () if boundary else scope.outside_nodes(state, cause, gone)
    if outside and _repaired(state, epoch, outside, change.lost) is not None:
        change = replace(change, outside=outside)
    state = state.of(
        epoch=epoch,
        phase=JobPhase.HALTING,
        change=change,
        suspected_since=0.0,
        joining=(),
        joining_sources=(),
    )
    entry = {
        "epoch": epoch,
        "cause": cause.text,
        "cause_kind": cause.kind.value,
        "cause_nodes": list(cause.nodes),
        "boundary": boundary,
    }
    if change.outside:
        entry["outside"] = list(change.outside)
    halt = scope.halt_order(state)
    sends = [Send(node, halt) for node in state.members]
    return state, (*sends, LogEntry("halt", entry)), f"epoch {epoch}: {cause.text}"


def _repaired(
    state: JobState, epoch: int, outside: tuple[str, ...], back: tuple[str, ...] = ()
) -> Plan | None:
    """Return a plan for `epoch` that leaves the pipelines of the nodes `outside` as they are; None:
    there is none.

    `back`: nodes whose workers are gone. Those that are members count as if their workers had been
    restarted already.
    """
    if not back:
        return repair(plan_request(state, epoch), outside)
    members = {
        node: replace(mb, report=replace(mb.report, able=True)) if node in back else mb
        for node, mb in state.members.items()
    }
    return repair(plan_request(state.of(members=members), epoch), outside)


def halt_all(state: JobState, why: str, now: float) -> JobTransition:
    """Begin the next epoch, for which all nodes halt at once, because of a change whose nodes
    outside cannot stay outside. It has the same causes."""
    before, halting = state.change, state.phase is JobPhase.HALTING
    assert before is not None
    state, actions, _ = repeat_halt(state, now)
    assert state.change is not None
    change = replace(state.change, continued=halting, wait_until=max(0.0, before.wait_until))
    return state.of(change=change), actions, f"all nodes halt: {why}"


def repeat_halt(state: JobState, now: float) -> JobTransition:
    """Raise the epoch of a change whose plan is not decided, for the same causes. All nodes halt at
    once: some may run the plan of a planned change already, if the store lost the last write. They
    would wait for the others in its first commit."""
    before = state.change
    assert before is not None
    state, actions, reason = begin_change(state, before.causes[-1], now)
    assert state.change is not None
    return state.of(change=replace(state.change, causes=before.causes)), actions, reason


def _workers_gone(state: JobState, node: str) -> bool:
    member = state.members.get(node)
    return member is None or member.workers_gone


def candidates(state: JobState) -> tuple[Member, ...]:
    """Return the members that can take a stage: nodes of the plan first, then by rank.

    A disconnected member can, until its agent has provably ended: it reconnects, or it is lost and
    no member any more. After a failover all members are disconnected, and reconnect one by one.
    """
    quarantined = quarantine.quarantined_nodes(state)
    able = [mb for mb in _able_members(state) if mb.node not in quarantined]
    out = reachability.left_out_now(state, [mb.node for mb in able])
    able = [mb for mb in able if mb.node not in out]
    held = set(state.plan.nodes()) if state.plan is not None else set()
    able.sort(key=lambda mb: (mb.node not in held, mb.rank, mb.node))
    return tuple(able)


def _able_members(state: JobState) -> list[Member]:
    """Return the members that can take a stage, also those in quarantine."""
    return [
        mb for mb in state.members.values() if mb.report.able and not mb.refused and not mb.draining
    ]


def plan_request(state: JobState, epoch: int) -> PlanRequest:
    """Return the planner's input for the available members."""
    assert state.spec is not None
    outlook = join_policy.outlook(state, state.updated_at)
    change = state.change
    # A change for new nodes, or for speed, was found to pay. Keeping the pipelines would undo it.
    joins = change is not None and not change.lost and _is_for_speed(change.causes[0])
    return PlanRequest(
        spec=state.spec,
        nodes=tuple(_with_keeping(state, mb.report.info) for mb in candidates(state)),
        max_nodes=state.policy.max_nodes,
        epoch=epoch,
        tp=state.spec.tp,
        shape=state.policy.shape,
        schedule=state.policy.schedule,
        current=state.plan,
        backup=state.policy.backup,
        profile=state.policy.profile,
        slow=slowdowns(state),
        hazard_per_s=outlook.hazard_per_s,
        pause_s=outlook.pause_in_s,
        keeps_pipelines=not joins,
        weighing=backup_conditions(state),
    )


def _is_for_speed(cause: Cause) -> bool:
    return cause.kind is CauseKind.JOIN or cause.text.startswith(FOR_SPEED)


def _with_keeping(state: JobState, info: NodeInfo) -> NodeInfo:
    """Return the description of a node; `keeps` is false if its vault refused copies."""
    return replace(info, keeps=False) if info.incarnation in state.poor_keepers else info


def decide_plan(state: JobState, now: float) -> JobTransition:
    """Send a new plan after all nodes have halted; pause, or end the job if its state is lost."""
    assert state.spec is not None and state.change is not None
    state, entries, fatal = _judge_divergence(state, now)
    if fatal:
        state, actions = end_job(state, JobPhase.FAILED, EXIT_UNRECOVERABLE, fatal)
        return state, (*entries, *actions), f"the job cannot go on: {fatal}"
    state, actions, reason = _decide_plan(state, now)
    return state, (*entries, *actions), reason


def _decide_plan(state: JobState, now: float) -> JobTransition:
    assert state.spec is not None and state.change is not None
    change = replace(state.change, halted=now, paused=state.step_finished_at)
    if change.old_plan is not None and not change.boundary:
        # Include nodes that were lost while the other nodes halted.
        gone = [node for node in change.old_plan.nodes() if _workers_gone(state, node)]
        change = replace(change, lost=tuple(dict.fromkeys((*change.lost, *gone))))
    if change.outside:
        return _decide_repair(state, change, now)
    try:
        state, choice, assignment = _choose(state, now)
    except InfeasiblePlan as error:
        freed = _free_nodes(state, now, error)
        if freed is not None:
            state, entries, _ = freed
            state, actions, reason = _decide_plan(state, now)
            return state, (*entries, *actions), reason
        entry = LogEntry("paused", {"epoch": state.epoch, "why": str(error)})
        change = replace(change, reason=str(error))
        blocked = _situation(state)
        state = state.of(phase=JobPhase.PAUSED, change=change, blocked=blocked, missing=None)
        return state, (entry,), f"paused: {error}"
    except Unrecoverable as error:
        return absent_nodes.wait_or_fail(state, change, error, now)
    except FieldError as error:
        state, actions = end_job(state, JobPhase.FAILED, error.exit_code, str(error))
        return state, actions, f"the job cannot go on: {error}"
    state, actions, reason = _install(state, replace(change, decided=now), assignment)
    if choice.retry_s < inf:
        state = state.of(reconsider_at=now + choice.retry_s)
    return state, (*actions, *_left_aside(choice)), reason


def _decide_repair(state: JobState, change: EpochChange, now: float) -> JobTransition:
    """Send a plan that repairs the damaged pipelines. If there is none that leaves the pipelines
    outside as they are, halt all nodes."""
    step = scope.promised_step(state)
    plan = _repaired(state, state.epoch, change.outside)
    work = scope.promised_work(state, plan) if plan is not None else None
    if plan is None or work is None:
        return halt_all(state, "no plan leaves the other pipelines as they are", now)
    if any(record.step >= step for record in _records(state)):
        return halt_all(state, f"a node has committed step {step}", now)
    promised = recovery.PromisedWork(work, _left_to_run(state, now))
    bad = "; ".join(fault.text for fault in reachability.bad_paths(state, state.members))
    try:
        assignment = _solve_over_good_paths(state, plan, bad, promised)
    except (InfeasiblePlan, Unrecoverable) as error:
        return halt_all(state, str(error), now)
    if assignment.step != step or _reads_checkpoint(assignment):
        return halt_all(state, f"step {step} cannot be resumed in the damaged pipelines", now)
    return _install(state.of(improve_at=now), replace(change, decided=now), assignment)


def _left_to_run(state: JobState, now: float) -> float:
    """Return the share of the running step that pipelines outside still have to compute."""
    usual = [seconds for _, seconds in state.durations]
    if not usual or not usual[-1] or not state.step_finished_at:
        return 1.0
    return max(0.0, 1.0 - (now - state.step_finished_at) / usual[-1])


def _free_nodes(state: JobState, now: float, error: InfeasiblePlan | None) -> JobTransition | None:
    """Free nodes that plans leave out as a precaution: those of paths that are well but on hold,
    else those in quarantine. None: there are none."""
    why = f"no plan without it: {error}"
    return reachability.end_holds(state, why) or quarantine.release_all(state, now, why)


def divergence_reports(state: JobState) -> list[m.Diverged]:
    """Return the reports of a divergence that was not judged yet."""
    epoch = state.plan.epoch if state.plan is not None else -1
    if any(entry.epoch == epoch for entry in state.distrusted):
        return []
    return [
        report
        for mb in state.members.values()
        for report in mb.report.diverged
        if report.epoch == epoch
    ]


def _judge_divergence(state: JobState, now: float) -> tuple[JobState, tuple[JobAction, ...], str]:
    """Decide once about a divergence that workers of the old plan report.

    Returns (state, entries of the event log, reason to end the job or "").
    """
    reports = divergence_reports(state)
    if not reports:
        return state, (), ""
    verdict = divergence.judge(reports, state.members.keys(), state.distrusted)
    step = verdict.distrust.step
    kept = [
        entry
        for entry in state.distrusted
        if entry.epoch >= state.trimmed or entry.step >= step or entry.suspects
    ]
    state = state.of(distrusted=(*kept, verdict.distrust))
    state, findings = _blame_divergence(state, verdict, now)
    actions: tuple[JobAction, ...] = ()
    if verdict.distrust.places and not verdict.fatal:
        wrong = {node for node, *_ in verdict.distrust.places}
        why = f"{' '.join(sorted(wrong))} wrote a part of it and had diverged"
        state, actions = checkpoints.distrust_parts(state, step, wrong, why)
    data = {
        "step": step,
        "epoch": verdict.distrust.epoch,
        "wrong": [list(place) for place in verdict.wrong],
        "reason": "; ".join(verdict.reasons),
        "fatal": bool(verdict.fatal),
    }
    return state, (LogEntry("divergence", data), *actions, *findings), verdict.fatal


def _blame_divergence(
    state: JobState, verdict: divergence.Verdict, now: float
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Leave out a node whose replica was proven wrong before: its device is not reliable."""
    actions: tuple[JobAction, ...] = ()
    for node in dict.fromkeys(node for node, _, _ in verdict.wrong):
        record = quarantine.record_of(state, node)
        record = replace(record, divergences=record.divergences + 1)
        state = quarantine.with_record(state, node, record)
        if record.divergences > 1 and node in state.members:
            reason = f"its replicas were wrong {record.divergences} times"
            evidence = {"divergences": record.divergences}
            finding = Finding(FaultClass.DEVICE, HealthAction.QUARANTINE, reason, evidence, now)
            state, entries = quarantine.add_finding(state, node, finding)
            actions += entries
    return state, actions


def _choose(
    state: JobState, now: float
) -> tuple[JobState, join_policy.JoinChoice, recovery.Assignment]:
    """Return (state, plan, assignment), with the best choice of nodes that are left out because of
    bad paths: the first one with which no step is lost, else the first one that is possible.

    Raises InfeasiblePlan or Unrecoverable, as for the best choice, if none is possible.
    """
    able = [mb.node for mb in candidates(state.of(paths=()))]
    options = reachability.covers(state, able)
    found, error = None, None
    for out in options:
        trial = state.of(left_out=tuple(sorted(out)), blocked=())
        try:
            choice, assignment = _plan_and_solve(trial, now)
        except (InfeasiblePlan, Unrecoverable) as problem:
            error = error or problem
            continue
        if not _reads_checkpoint(assignment):
            return trial, choice, assignment
        found = found or (trial, choice, assignment)
    if found is None:
        assert error is not None
        raise error
    return found


def _plan_and_solve(
    state: JobState, now: float
) -> tuple[join_policy.JoinChoice, recovery.Assignment]:
    """Return the plan without the nodes in `left_out`, and its assignment.

    Raises InfeasiblePlan, also if bad paths hide copies that are needed, and Unrecoverable.
    """
    if not candidates(state):
        raise InfeasiblePlan("no node can take a stage at present")
    choice = join_policy.plan_for_change(state, plan_request(state, state.epoch), now)
    assert choice.plan is not None
    bad = "; ".join(fault.text for fault in reachability.bad_paths(state, state.members))
    if state.left_out:
        why = f"{choice.plan.reason}; {' '.join(state.left_out)} left out: {bad}"
        choice = replace(choice, plan=replace(choice.plan, reason=why))
    assert choice.plan is not None
    return choice, _solve_over_good_paths(state, choice.plan, bad)


def _solve_over_good_paths(
    state: JobState, plan: Plan, bad: str, promised: recovery.PromisedWork | None = None
) -> recovery.Assignment:
    """Return the assignment for `plan` without the copies that would be fetched over a bad path.

    `bad` describes the paths. Raises InfeasiblePlan if they hide copies that are needed, and
    Unrecoverable if copies are missing anyway.
    """
    assignment, hidden = _solve(state, plan, promised=promised), frozenset[CopyPlace]()
    for _ in range(MAX_SOLUTIONS):
        forbidden = reachability.forbidden_fetches(state, assignment)
        if not forbidden:
            return assignment
        hidden |= forbidden
        try:
            assignment = _solve(state, plan, hidden, promised)
        except Unrecoverable as error:
            raise InfeasiblePlan(f"{bad}: {error}") from error
    raise InfeasiblePlan(f"{bad}: no copies were found that can all be fetched")


def _situation(state: JobState) -> tuple[str, ...]:
    """Return the members that can take part and the bad paths, to see whether they changed. Members
    in quarantine can: it ends if no plan fits without them. So does the hold of a path that is
    well."""
    able = sorted(mb.report.info.incarnation for mb in _able_members(state))
    bad = reachability.bad_paths(state, state.members)
    paths = (" ".join((*fault.nodes, *(["on hold"] if fault.well_since else []))) for fault in bad)
    return (*able, *paths) if bad else ()


def _solve(
    state: JobState,
    plan: Plan,
    hidden: frozenset[CopyPlace] = frozenset(),
    promised: recovery.PromisedWork | None = None,
) -> recovery.Assignment:
    """Return the assignment for `plan` from the reported copies, except those at the places
    `hidden`. Raises Unrecoverable."""
    assert state.spec is not None
    copies = (copy for mb in state.members.values() for copy in mb.report.inventory)
    reported = (copy for copy in copies if (copy.node, copy.key) not in hidden)
    proven = lineage.proven(reported, state.starts, newest_epoch=state.epoch, trimmed=state.trimmed)
    inventory = divergence.allowed(proven, state.distrusted)
    if promised is not None:
        inventory = tuple(copy for copy in inventory if not _is_overwritten(state, copy))
    solve = partial(
        recovery.solve,
        spec=state.spec,
        vaults=tuple((mb.node, mb.report.info.vault) for mb in state.members.values()),
        checkpoint=state.checkpoint,
        initial_allowed=state.newest_step < 0,
        live={mb.node: h.step for mb in state.members.values() for h in mb.report.halted},
        fetch_s=fetch_time(state),
        promised=promised,
    )
    assignment = solve(plan=plan, inventory=inventory, records=_records(state))
    reload = tuple(dict.fromkeys(place for entry in state.distrusted for place in entry.suspects))
    alone = _reads_checkpoint(assignment) and checkpoints.is_of_other_history(state)
    if alone:
        why = "all layers are read from it, because copies of this version were computed again"
        plan = replace(plan, reason=f"{assignment.plan.reason}; {why}")
        assignment = solve(plan=plan, inventory=(), records=())
        assignment = replace(assignment, plan=plan)
        reload = tuple((node, one.layer, one.shard) for node, one in assignment.recipes)
    return replace(
        assignment,
        store=state.members[plan.units()[0].node].report.store,
        reload=reload,
        rescued=checkpoints.copies_to_rescue(state, plan, assignment.step, inventory),
        checkpointed=checkpoints.newest_written(state),
        starts=checkpoints.starts_with(state, assignment.step, alone=alone),
        run=state.run,
    )


def _is_overwritten(state: JobState, copy: Copy) -> bool:
    """Return whether a worker outside may overwrite the copy while it goes on: gradients of the
    step before in its own slots. Those that a peer keeps stay."""
    return (
        copy.kind in (GRADIENT, REDUCED)
        and copy.node == copy.owner
        and scope.is_outside(state, copy.owner)
    )


def _reads_checkpoint(assignment: recovery.Assignment) -> bool:
    return any(recipe.checkpoint for _, recipe in assignment.recipes)


def _install(
    state: JobState, change: EpochChange, assignment: recovery.Assignment
) -> JobTransition:
    """Make the assignment the present one, send it to all members and log it."""
    plan = assignment.plan
    summary = recovery.summarize(assignment, change.old_plan, change.lost)
    change = _with_figures(state, change, assignment, summary)
    fallback = [recipe.checkpoint for _, recipe in assignment.recipes if recipe.checkpoint]
    first = assignment.step
    if fallback and checkpoints.is_of_other_history(state):
        first, state = first - 1, checkpoints.adopted_history(state, state.epoch)
    unlogged = None if fallback else _unlogged_step(state, assignment)
    entries = _entries_of(state, unlogged, change.decided) if unlogged is not None else ()
    newest = assignment.step - 1
    state = checkpoints.began_epoch(state, assignment).of(
        phase=JobPhase.INSTALLING,
        plan=plan,
        assignment=assignment,
        change=change,
        suspected_since=0.0,
        record=None if fallback else _record_before(state, assignment),
        considered=tuple(
            join_policy.member_key(mb) for mb in state.members.values() if mb.report.able
        ),
        reconsider_at=0.0,
        starts=lineage.with_start(state.starts, state.epoch, first),
        missing=None,
        logged_step=newest if unlogged else min(state.logged_step, newest),
        evaluation=_newest_evaluation(state, unlogged, assignment.step),
    )
    entry = {
        "epoch": state.epoch,
        "step": assignment.step,
        "plan": plan.reason,
        "reason": summary.text,
        "todo": [list(part) for part in assignment.todo],
        "partial": [[r.pipeline, r.microbatch, r.first, r.last] for r in assignment.partial],
    }
    if assignment.promised:
        entry["promised"] = [[pipeline, list(some)] for pipeline, some in assignment.promised]
    # A node outside gets the order when it has halted.
    here = [node for node, mb in state.members.items() if node not in change.outside or mb.halted]
    sends = [Send(node, m.Install(state.epoch, assignment)) for node in here]
    commits = checkpoints.commits_to_repeat(state)
    actions: list[JobAction] = [*sends, *entries, LogEntry("plan", entry), *commits]
    if fallback and state.trained:
        lost = {"from_step": assignment.step, "why": plan.reason, "checkpoint": fallback[0]}
        actions.append(LogEntry("lost-steps", lost))
    return state, tuple(actions), change.reason


def _record_before(state: JobState, assignment: recovery.Assignment) -> StepRecord | None:
    """Return the record of the newest known step before the assignment's first step; None: no such
    record is known. The record of a step that runs again proves nothing about its next run."""
    known = assignment.record or state.record
    return known if known is not None and known.step < assignment.step else None


def _with_figures(
    state: JobState,
    change: EpochChange,
    assignment: recovery.Assignment,
    summary: recovery.RecoverySummary,
) -> EpochChange:
    """Add the figures of the assignment to the change."""
    plan, step = assignment.plan, assignment.step
    halted = {mb.node: mb.report.halted[0] for mb in state.members.values() if mb.report.halted}
    replayed = change.replayed
    if change.old_plan is not None and change.lost and not change.boundary:
        replayed |= recovery.replayed_microbatches(
            change.old_plan,
            frozenset(change.lost),
            summary.todo | summary.partial,
            halted,
            step,
            orders=_orders(state, change.old_plan, step),
            covered=dict(assignment.covered),
        )
    started = [mb for h in halted.values() if h.step == step for mb in h.started]
    again = summary.todo | partial_replay.runs_beyond(assignment.partial, summary.lost_layers)
    return replace(
        change,
        step=step,
        microbatch=max(started, default=0),
        replayed=replayed,
        rerun=max(change.rerun, len(again & frozenset(started))),
        partial=len(summary.partial),
        state_source=summary.state_source,
        network_bytes=summary.network_bytes,
        reason=f"{plan.reason}; {summary.text}",
    )


def _unlogged_step(state: JobState, assignment: recovery.Assignment) -> StepRecord | None:
    """Return the record of the last finished step if its worker was lost before reporting it; None:
    it was reported, or its record is not known."""
    records = (*_records(state), *_records_of_copies(assignment))
    record = next((r for r in records if r.step == assignment.step - 1), None)
    return record if record is not None and state.logged_step < record.step else None


def _entries_of(state: JobState, record: StepRecord, now: float) -> tuple[LogEntry, ...]:
    """Return the log entries of a step that no worker has reported."""
    spec, evaluation, since = state.spec, record.evaluation, state.step_finished_at
    assert spec is not None
    seconds = now - since - (evaluation.seconds if evaluation is not None else 0.0)
    tokens = spec.n_microbatches * spec.tokens_per_microbatch
    took_s = max(0.0, seconds) if since else 0.0
    step = LogEntry("step", step_entry(m.StepDone(state.epoch - 1, record, took_s, 0.0, tokens)))
    return (*evaluation_entries(evaluation), step, *nonfinite_entries(record))


def _newest_evaluation(
    state: JobState, unlogged: StepRecord | None, step: int
) -> EvaluationResult | None:
    """Return the newest evaluation that training from `step` on does not undo."""
    newest = (unlogged.evaluation if unlogged is not None else None) or state.evaluation
    return newest if newest is not None and newest.step <= step else None


def _records_of_copies(assignment: recovery.Assignment) -> tuple[StepRecord, ...]:
    """Return the records in the copies that the assignment uses."""
    recipes = (recipe for _, recipe in assignment.recipes)
    copies = (copy for recipe in recipes for copy in (recipe.state, *recipe.updates))
    return tuple(copy.record for copy in copies if copy is not None and copy.record is not None)


def _orders(state: JobState, plan: Plan, step: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of `step` per pipeline of the old plan, in the order of running."""
    former = state.assignment
    if former is not None and former.step == step and len(former.todo) == len(plan.pipelines):
        parts = partial_replay.partial_orders(former.plan, former.partial)
        return tuple((*some, *whole) for some, whole in zip(parts, former.todo, strict=True))
    return tuple(pipeline.microbatches for pipeline in plan.pipelines)


def _records(state: JobState) -> tuple[StepRecord, ...]:
    """Return the known records of committed steps, oldest first."""
    reports = (halted for mb in state.members.values() for halted in mb.report.halted)
    halted = lineage.committed(reports, state.starts)
    installed = state.assignment.record if state.assignment is not None else None
    known = {r.step: r for r in (installed, state.record, *halted) if r is not None}
    return tuple(known[step] for step in sorted(known))


def consider_joining(state: JobState, now: float) -> JobTransition | None:
    """Let new nodes that the planner would use fetch state in the background. A disconnected node
    outside the plan takes no place from them: it may be dead. It is considered when it is back."""
    assert state.plan is not None
    used = frozenset(state.plan.nodes())
    if all(node in used for node in state.members):
        return None
    able = [mb for mb in candidates(state) if mb.connected or mb.node in used]
    if state.reconsider_at and now >= state.reconsider_at:
        state = state.of(considered=(), reconsider_at=0.0)
    considered = frozenset(state.considered)
    new = [mb for mb in able if mb.connected and join_policy.member_key(mb) not in considered]
    fresh = tuple(mb.node for mb in new if mb.node not in used)
    if not fresh:
        return None
    state = state.of(considered=(*state.considered, *map(join_policy.member_key, new)))
    try:
        request, here = plan_request(state, state.epoch + 1), {mb.node for mb in able}
        request = replace(request, nodes=tuple(n for n in request.nodes if n.node in here))
        choice = join_policy.plan_for_joining(state, request, fresh, now)
    except InfeasiblePlan as error:
        return state, (), f"{' '.join(fresh)} stay spare: {error}"
    if choice.retry_s < inf:
        state = state.of(reconsider_at=now + choice.retry_s)
    plan, entries = choice.plan, _left_aside(choice)
    if plan is None:
        return state, entries, choice.reason
    wanted = tuple(node for node in fresh if node in plan.nodes())
    sources = tuple((node, _sources(state, plan, node)) for node in wanted)
    state = state.of(joining=wanted, joining_sources=sources, joining_since=now)
    sends = [order for node in wanted for order in missed_prefetch(state, node)]
    reason = "; ".join(filter(None, (f"{' '.join(wanted)} pull state", choice.reason)))
    entry = LogEntry("prefetch", {"nodes": list(wanted)})
    return state, (*sends, entry, *entries), reason


def improve_plan(state: JobState, now: float) -> JobTransition | None:
    """Replace a plan that was only repaired at the end of the step, if another one is so much
    faster that it pays; None: not yet, or there is none."""
    if not state.improve_at or now < state.improve_at or not state.stable:
        return None
    assert state.plan is not None and state.spec is not None
    if state.newest_step + 2 >= state.spec.n_steps:  # it cannot pay any more
        return None
    request = replace(plan_request(state, state.epoch + 1), keeps_pipelines=False)
    verdict = join_policy.better_plan(state, request, now)
    if not verdict.use:
        later = now + verdict.again_s if verdict.again_s < inf else 0.0
        return state.of(improve_at=later), (), f"the repaired plan stays: {verdict.reason}"
    cause = Cause(CauseKind.OTHER, f"{FOR_SPEED}: {verdict.reason}")
    return begin_change(state.of(improve_at=0.0), cause, now, boundary=True)


def without_joining(state: JobState) -> JobState:
    """Let the nodes that were joining be considered again once they can take a stage."""
    members = [state.members[node] for node in state.joining if node in state.members]
    keys = frozenset(map(join_policy.member_key, members))
    considered = tuple(key for key in state.considered if key not in keys)
    return state.of(joining=(), joining_sources=(), considered=considered)


def missed_prefetch(state: JobState, node: str) -> tuple[JobAction, ...]:
    """Return the order to fetch state, for a joining node that has not obeyed it."""
    sources = dict(state.joining_sources).get(node)
    if sources is None or state.members[node].report.prefetched >= state.epoch:
        return ()
    vaults = tuple((mb.node, mb.report.info.vault) for mb in state.members.values())
    return (Send(node, m.Prefetch(state.epoch, sources, vaults)),)


def _left_aside(choice: join_policy.JoinChoice) -> tuple[LogEntry, ...]:
    if not choice.aside:
        return ()
    return (LogEntry("spare", {"nodes": list(choice.aside), "reason": choice.reason}),)


def _sources(state: JobState, plan: Plan, node: str) -> tuple[tuple[int, int, str], ...]:
    """Return `Prefetch.sources` for the layers that `node` has under `plan`: their holders now."""
    assert state.plan is not None
    sharded = state_of(state.plan.state).sharded
    return tuple(
        (layer, shard, unit.node)
        for _, _, stage in plan.stages()
        if stage.unit.node == node
        for layer in stage.layers
        for shard in range(plan.tp)
        for unit in state.plan.holders(layer)[: None if sharded else 1]
    )


def resume_if_feasible(state: JobState, now: float) -> JobTransition | None:
    """Begin a change if a plan fits the nodes that are not quarantined, with any choice of nodes
    that bad paths leave out; else free other nodes, so that the next call can use them
    (`_free_nodes`). Nothing is tried twice in the same situation."""
    if state.blocked and state.blocked == _situation(state):
        return None
    if not candidates(state):
        return quarantine.release_all(state, now, "nobody else is left")
    able, error = [mb.node for mb in candidates(state.of(paths=()))], None
    for out in reachability.covers(state, able):
        trial = state.of(left_out=tuple(sorted(out)))
        try:
            make_plan(plan_request(trial, state.epoch + 1))
            break
        except InfeasiblePlan as problem:
            error = error or problem
    else:
        return _free_nodes(state, now, error)
    missing = state.missing
    came = missing is None or bool(absent_nodes.returned_nodes(state))
    text = "nodes came" if came else f"the checkpoint of step {checkpoints.newest_step(state)} came"
    return begin_change(state, Cause(CauseKind.RESUME, text), now)
