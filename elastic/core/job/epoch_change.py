"""Epoch changes: begin one, decide the new plan and assignment, consider nodes that came."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastic.core.job import join_policy as stay
from elastic.core.job import quarantine
from elastic.core.job.measured_conditions import backup_conditions
from elastic.core.job.state import (
    Cause,
    CauseKind,
    EpochChange,
    JobAction,
    JobFinished,
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
from elastic.core.recovery import partial_replay as partial
from elastic.core.recovery import recovery
from elastic.domain.errors import FieldError, InfeasiblePlan, Unrecoverable
from elastic.domain.types import Copy, Plan, StepRecord
from elastic.planning.plan.schemes import state_of
from elastic.planning.search.search import PlanRequest, make_plan


def begin_change(state: JobState, cause: Cause, now: float, *, boundary: bool = False) -> JobTransition:
    """Raise the epoch and halt everybody: at once, or (boundary) after the running step."""
    epoch = state.epoch + 1
    old = state.change if state.change is not None and not state.change.boundary else None
    plan = state.plan
    nodes = plan.nodes() if plan is not None else ()
    gone = tuple(
        n for n in nodes if _workers_gone(state, n) or state.members[n].report.phase is NodePhase.IDLE
    )
    found = [state.members[n].report.detect_s for n in gone if n in state.members]
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
    state = state.of(epoch=epoch, phase=JobPhase.HALTING, change=change, suspected_since=0.0, joining=())
    sends: list[JobAction] = [Send(node, m.Halt(epoch, boundary)) for node in state.members]
    told = {"cause": cause.text, "cause_kind": cause.kind.value, "cause_nodes": list(cause.nodes)}
    note = LogEntry("halt", {"epoch": epoch, **told, "boundary": boundary})
    return state, (*sends, note), f"epoch {epoch}: {cause.text}"


def _workers_gone(state: JobState, node: str) -> bool:
    member = state.members.get(node)
    return member is None or member.report.phase in (NodePhase.STARTING, NodePhase.FAILED, NodePhase.EMPTY)


def candidates(state: JobState) -> tuple[Member, ...]:
    """Members that could take a stage now: old holders first, then by rank."""
    able = [mb for mb in state.members.values() if mb.report.able and mb.connected and not mb.draining]
    able = [mb for mb in able if not quarantine.is_quarantined(state, mb.node)]
    held = set(state.plan.nodes()) if state.plan is not None else set()
    able.sort(key=lambda mb: (mb.node not in held, mb.rank, mb.node))
    return tuple(able)


def plan_request(state: JobState, epoch: int) -> PlanRequest:
    """What the planner is asked, for the members at hand."""
    assert state.spec is not None
    return PlanRequest(
        spec=state.spec,
        nodes=tuple(mb.report.info for mb in candidates(state)),
        max_nodes=state.policy.max_nodes,
        epoch=epoch,
        tp=state.spec.tp,
        shape=state.policy.shape,
        schedule=state.policy.schedule,
        current=state.plan,
        backup=state.policy.backup,
        profile=state.policy.profile,
        slowdowns=slowdowns(state),
        hazard_per_s=stay.outlook(state, state.updated_at).hazard_per_s,
        pause_s=stay.outlook(state, state.updated_at).pause_in_s,
        backup_conditions=backup_conditions(state),
    )


def decide_plan(state: JobState, now: float) -> JobTransition:
    """Everybody has halted: make the plan and tell everybody, or pause, or fall back."""
    assert state.spec is not None and state.change is not None
    change = replace(state.change, halted=now, paused=state.step_finished_at)
    if change.old_plan is not None and not change.boundary:
        # Also whose loss became known while the others halted.
        gone = [node for node in change.old_plan.nodes() if _workers_gone(state, node)]
        change = replace(change, lost=tuple(dict.fromkeys((*change.lost, *gone))))
    try:
        if not candidates(state):
            raise InfeasiblePlan("no node can take a stage at present")
        choice = stay.plan_for_change(state, plan_request(state, state.epoch), now)
        assert choice.plan is not None
        plan = choice.plan
        assignment = recovery.solve(
            plan=plan,
            spec=state.spec,
            inventory=_inventory(state),
            records=_records(state),
            vaults=tuple((mb.node, mb.report.info.vault) for mb in state.members.values()),
            checkpoint=state.checkpoint,
            initial_allowed=state.record is None,
            live={mb.node: h.step for mb in state.members.values() for h in mb.report.halted},
        )
    except InfeasiblePlan as error:
        freed = quarantine.release_all(state, now, f"no plan without it: {error}")
        if freed is not None:
            state, notes, _ = freed
            state, actions, reason = decide_plan(state, now)
            return state, (*notes, *actions), reason
        note = LogEntry("paused", {"epoch": state.epoch, "why": str(error)})
        return state.of(phase=JobPhase.PAUSED, change=change), (note,), f"paused: {error}"
    except (Unrecoverable, FieldError) as error:
        stops: list[JobAction] = [Send(n, m.Stop(error.exit_code, str(error))) for n in state.members]
        finish = JobFinished(error.exit_code, str(error))
        return (
            state.of(phase=JobPhase.FAILED, ending=finish),
            (*stops, finish),
            f"the job cannot go on: {error}",
        )
    store = state.members[plan.units()[0].node].report.store
    assignment = replace(assignment, store=store)
    state, actions, reason = _install(state, replace(change, decided=now), assignment.plan, assignment)
    return state, (*actions, *_left_aside(choice)), reason


def _install(
    state: JobState, change: EpochChange, plan: Plan, assignment: recovery.Assignment
) -> JobTransition:
    halted = {mb.node: mb.report.halted[0] for mb in state.members.values() if mb.report.halted}
    replayed = change.replayed
    told = recovery.explain(assignment, change.old_plan, change.lost)
    todo = told.todo | told.partial
    if change.old_plan is not None and change.lost and not change.boundary:
        replayed |= recovery.replayed(
            change.old_plan,
            frozenset(change.lost),
            todo,
            halted,
            assignment.step,
            orders=_orders(state, change.old_plan, assignment.step),
            covered=dict(assignment.covered),
        )
    started = [mb for h in halted.values() if h.step == assignment.step for mb in h.started]
    gone = [st.layers for _, _, st in (change.old_plan or plan).stages() if st.unit.node in change.lost]
    again = told.todo | partial.outside(
        assignment.partial, frozenset(layer for part in gone for layer in part)
    )
    change = replace(
        change,
        step=assignment.step,
        microbatch=max(started, default=0),
        replayed=replayed,
        rerun=max(change.rerun, len(again & frozenset(started))),
        partial=len(told.partial),
        state_source=told.state_source,
        network_bytes=told.network_bytes,
        reason=f"{plan.reason}; {told.text}",
    )
    state = state.of(
        phase=JobPhase.INSTALLING,
        plan=plan,
        assignment=assignment,
        change=change,
        suspected_since=0.0,
        record=None if any(recipe.checkpoint for _, recipe in assignment.recipes) else state.record,
        considered=tuple(stay.member_key(mb) for mb in state.members.values() if mb.report.able),
        parts=tuple(part for part in state.parts if part[0] <= assignment.step),
        reconsider_at=0.0,
    )
    sends: list[JobAction] = [Send(node, m.Install(state.epoch, assignment)) for node in state.members]
    untold = _untold(state, assignment, change.decided)
    sends += untold
    state = state.of(told=assignment.step - 1 if untold else min(state.told, assignment.step - 1))
    note = LogEntry(
        "plan",
        {"epoch": state.epoch, "step": assignment.step, "plan": plan.reason, "reason": told.text,
         "todo": [list(part) for part in assignment.todo],
         "partial": [[run.pipeline, run.microbatch, run.first, run.last] for run in assignment.partial]},
    )  # fmt: skip
    fallback = [recipe for _, recipe in assignment.recipes if recipe.checkpoint]
    if fallback and state.trained:
        lost = {"from_step": assignment.step, "why": plan.reason, "checkpoint": fallback[0].checkpoint}
        return state, (*sends, note, LogEntry("lost-steps", lost)), change.reason
    return state, (*sends, note), change.reason


def _untold(state: JobState, assignment: recovery.Assignment, now: float) -> list[JobAction]:
    """A step that was finished, but whose teller was lost before it told of it."""
    spec = state.spec
    record = next((r for r in _records(state) if r.step == assignment.step - 1), None)
    if record is None or spec is None or state.told >= record.step:
        return []
    if any(recipe.checkpoint for _, recipe in assignment.recipes):
        return []
    entry = {
        "epoch": state.epoch - 1,
        "step": record.step,
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "clip": record.clip,
        "lr": 0.0,
        "seconds": round(max(0.0, now - state.step_finished_at), 5) if state.step_finished_at else 0.0,
        "tokens": spec.n_microbatches * spec.tokens_per_microbatch,
        "doubled": 0,
        "missing": 0,
    }
    return [LogEntry("step", entry)]


def _orders(state: JobState, plan: Plan, step: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches that each pipeline of the former plan ran in `step`, whole or in part, in order."""
    former = state.assignment
    if former is not None and former.step == step and len(former.todo) == len(plan.pipelines):
        parts = partial.orders_of(former.plan, former.partial)
        return tuple((*some, *whole) for some, whole in zip(parts, former.todo, strict=True))
    return tuple(pipeline.microbatches for pipeline in plan.pipelines)


def _inventory(state: JobState) -> tuple[Copy, ...]:
    return tuple(copy for mb in state.members.values() for copy in mb.report.inventory)


def _records(state: JobState) -> tuple[StepRecord, ...]:
    found = {h.record.step: h.record for mb in state.members.values() for h in mb.report.halted if h.record}
    known = (state.record, state.assignment.record if state.assignment is not None else None)
    for record in [r for r in known if r is not None]:
        found.setdefault(record.step, record)
    return tuple(found[step] for step in sorted(found))


def consider_joining(state: JobState, now: float) -> JobTransition | None:
    """If idle nodes came that the planner would use, let them pull state in the background."""
    assert state.plan is not None
    able, used = candidates(state), frozenset(state.plan.nodes())
    if state.reconsider_at and now >= state.reconsider_at:
        state = state.of(considered=(), reconsider_at=0.0)
    considered = frozenset(state.considered)
    new = [mb for mb in able if stay.member_key(mb) not in considered]
    fresh = tuple(mb.node for mb in new if mb.node not in used)
    if not fresh:
        return None
    state = state.of(considered=(*state.considered, *(stay.member_key(mb) for mb in new)))
    try:
        choice = stay.plan_for_joining(state, plan_request(state, state.epoch + 1), fresh, now)
    except InfeasiblePlan as error:
        return state, (), f"{' '.join(fresh)} stay spare: {error}"
    if choice.again_s < inf:
        state = state.of(reconsider_at=now + choice.again_s)
    plan, notes = choice.plan, _left_aside(choice)
    if plan is None:
        return state, notes, choice.reason
    wanted = tuple(node for node in fresh if node in plan.nodes())
    sends = tuple(Send(node, _prefetch(state, plan, node)) for node in wanted)
    reason = "; ".join(text for text in (f"{' '.join(wanted)} pull state", choice.reason) if text)
    note = LogEntry("prefetch", {"nodes": list(wanted)})
    return state.of(joining=wanted, joining_since=now), (*sends, note, *notes), reason


def _left_aside(choice: stay.JoinChoice) -> tuple[LogEntry, ...]:
    """What the event log says of nodes that were left aside."""
    return (
        (LogEntry("spare", {"nodes": list(choice.aside), "reason": choice.reason}),) if choice.aside else ()
    )


def _prefetch(state: JobState, plan: Plan, node: str) -> m.Prefetch:
    assert state.plan is not None
    layers = [layer for _, _, stage in plan.stages() if stage.unit.node == node for layer in stage.layers]
    every = state_of(state.plan.state).sharded
    sources = tuple(
        (layer, shard, unit.node)
        for layer in layers
        for shard in range(plan.tp)
        for unit in state.plan.holders(layer)[: None if every else 1]
    )
    vaults = tuple((mb.node, mb.report.info.vault) for mb in state.members.values())
    return m.Prefetch(state.epoch, sources, vaults)


def resume_if_feasible(state: JobState, now: float) -> JobTransition | None:
    """While paused: go on as soon as a plan fits the nodes at hand."""
    if not candidates(state):
        return quarantine.release_all(state, now, "nobody else is left")
    try:
        make_plan(plan_request(state, state.epoch + 1))
    except InfeasiblePlan as error:
        return quarantine.release_all(state, now, f"no plan without it: {error}")
    return begin_change(state, Cause(CauseKind.RESUME, "nodes came"), now)
