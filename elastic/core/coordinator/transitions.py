"""What the coordinator decides, as one pure transition.

Every event first updates what is known (`EVENT_HANDLERS`), then the rule of the current phase (`RULES`) is applied until it has
nothing more to say. Rules look at conditions, not at messages: an event that was lost, repeated or reordered, or
a coordinator that took over in between, leads to the same decisions.

    WAITING -> LAUNCHED -> HALTING -> INSTALLING -> RUNNING -> FINISHED
                            ^  |  ^        |           |
                            |  v  +--------+-----------+   a fault, a joining or a leaving node: the next epoch
                          PAUSED                           no plan fits the nodes at hand
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.core.coordinator.event_handlers import EVENT_HANDLERS
from elastic.core.job import epoch_change as epoch_change
from elastic.core.job import quarantine
from elastic.core.job.join_policy import count_node_seconds, record_pause
from elastic.core.job.membership import launch_nodes
from elastic.core.job.state import (
    Cause,
    CauseKind,
    ChangeCompleted,
    JobAction,
    JobFinished,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    LossKind,
    Member,
    Send,
)
from elastic.core.policy import drain as notices
from elastic.core.policy import remediation as remedies
from elastic.core.policy import restart_policy as returning
from elastic.core.policy.backup_policy import change_backup
from elastic.core.policy.straggler_policy import rebalance_stragglers
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.planning.backup.peer_assignment import natural

SCRIPT_S = 30.0
"""Workers that have not attached by then run a script that does not use elastic."""
LATE_WORKERS_S = 90.0
"""With the minimum of nodes ready, the others' workers are waited for this long; then they join later."""
Rule = Callable[[JobState, float], JobTransition | None]


def transition(state: JobState, event: Any, now: float) -> JobTransition:
    """Return the job's next state, what to do, and why: `record_event`, then `apply_rules`."""
    state, actions, reason = _know(_held_up(state, now), event, now)
    return _settle(state, now, list(actions), [reason] if reason else [])


def record_event(state: JobState, event: Any, now: float) -> JobTransition:
    """Take note of an event alone. `apply_rules` is to follow within the limit of a held-up coordinator."""
    if now - state.updated_at > state.limits.starved_s:
        state = _held_up(state, now)
    return _know(state, event, now)


def _know(state: JobState, event: Any, now: float) -> JobTransition:
    know, seen = EVENT_HANDLERS.get(type(event)), state.seen
    state, actions, reason = know(state, event, now) if know else (state, (), "")
    if state.timeouts is None or state.seen is not seen:
        state, told = notices.retimed(state)
        actions = (*actions, *told)
    return state, actions, reason


def apply_rules(state: JobState, now: float) -> JobTransition:
    """Apply the rules to what is known; many events may be learned before."""
    return _settle(_held_up(state, now), now, [], [])


def _held_up(state: JobState, now: float) -> JobState:
    """A coordinator that was itself held up does not count that time against the members."""
    late = now - state.updated_at - state.limits.starved_s if state.updated_at else 0.0
    if late > 0:
        members = {
            n: replace(mb, seen=mb.seen + late, closed_at=mb.closed_at + late)
            for n, mb in state.members.items()
        }
        state = state.of(members=members)
    return state.of(updated_at=now)


def _settle(state: JobState, now: float, actions: list[JobAction], reasons: list[str]) -> JobTransition:
    """Apply rules until none has anything to say."""
    for _ in range(16):
        result = None
        for rule in (_endings, _losses, *RULES[state.phase][0]):
            result = rule(state, now)
            if result is not None:
                break
        if result is None:
            break
        before = state.phase
        state, more, reason = result
        actions += more
        reasons += [reason] if reason else []
        if state.phase is not before:
            actions.append(
                LogEntry("phase", {"phase": state.phase.value, "epoch": state.epoch, "reason": reason})
            )
    return state, tuple(actions), "; ".join(reasons)


# ---- rules of every phase ----


def _losses(state: JobState, now: float) -> JobTransition | None:
    """Drop members that are gone: closed and not back in time, accused by their neighbours, or silent.

    Who leaves when the job is over is not lost. A coordinator that is behind waits so much longer, for a lease at
    most: what is still on its way to it, it cannot have heard.
    """
    if state.ending is not None:
        return None
    behind_s = min(state.late_s, state.policy.lease_s)
    suspects = {s for mb in state.members.values() for s in mb.report.suspects}
    for node, member in state.members.items():
        why, loss = "", LossKind.CLOSED
        if not member.connected and now >= member.closed_at:
            accused = node in suspects and member.closed_at <= now
            if now - member.closed_at >= state.policy.grace_s + behind_s or accused:
                why = "connection closed" + (" and neighbours lost contact" if accused else "")
        if not why and now - member.seen > state.policy.lease_s + behind_s:
            why, loss = f"silent for {now - member.seen:.1f} s", LossKind.SILENT
        if why:
            state = count_node_seconds(state, now, left=1)
            members = {n: mb for n, mb in state.members.items() if n != node}
            note = LogEntry("lost", {"node": node, "loss": loss.value, "why": why})
            actions = (note, Send(node, m.Fenced(f"lost: {why}")))
            state, told = remedies.node_lost(state.of(members=members), node, why, now)
            return state, (*actions, *told), f"{node} lost: {why}"
    return None


def _endings(state: JobState, now: float) -> JobTransition | None:
    if state.phase in (JobPhase.FINISHED, JobPhase.FAILED):
        return None
    broken = [mb.report for mb in state.members.values() if mb.report.elastic]
    if broken and len(broken) == len(state.members) and all(r.phase is NodePhase.FAILED for r in broken):
        return _end(state, JobPhase.FAILED, 1, f"workers crash on every node: {broken[0].cause}")
    for member in state.members.values():
        failed, finished = member.report.failed, member.report.finished
        if failed is not None:
            return _end(state, JobPhase.FAILED, failed.exit_code, f"{member.node}: {failed.message}")
        if finished is not None and finished.params_sha256:
            return _end(
                state, JobPhase.FINISHED, 0, f"all {finished.step} steps done", finished.params_sha256
            )
    return None


def _end(state: JobState, phase: JobPhase, code: int, reason: str, sha: str = "") -> JobTransition:
    over = _recovered(state)  # its figures belong to the summary, however soon the job ended after it
    state, told, _ = over if over is not None else (state, (), "")
    stops: list[JobAction] = [Send(node, m.Stop(code, reason)) for node in state.members]
    finish = JobFinished(code, reason, sha)
    return state.of(phase=phase, ending=finish), (*told, *stops, finish), reason


# ---- rules of single phases ----


def _waiting(state: JobState, now: float) -> JobTransition | None:
    here = [n for n, mb in state.members.items() if mb.connected]
    if len(here) < state.policy.min_nodes:
        return (state.of(enough_since=0.0), (), "nodes went away") if state.enough_since else None
    if not state.enough_since:
        return state.of(enough_since=now), (), "the minimum of nodes is here"
    if len(here) < state.policy.max_nodes and now - state.enough_since < state.policy.last_call_s:
        return None
    nodes = tuple(sorted(here, key=natural))[: state.policy.max_nodes]
    state, actions = launch_nodes(state, nodes)
    return (
        state.of(phase=JobPhase.LAUNCHED, launched_at=now, enough_since=0.0),
        actions,
        f"{len(here)} of {state.policy.min_nodes} nodes are here",
    )


def _launched(state: JobState, now: float) -> JobTransition | None:
    launched = [mb for mb in state.members.values() if mb.rank >= 0]
    if not launched:
        return state.of(phase=JobPhase.WAITING, next_rank=0), (), "every launched node is gone"
    if state.spec is not None:
        late = tuple(n for n, mb in state.members.items() if mb.rank < 0)
        if late:
            state, actions = launch_nodes(state, late)
            return state, actions, "launch late nodes"
        settled = all(mb.report.able or mb.report.phase is NodePhase.FAILED for mb in launched)
        enough = sum(mb.report.able for mb in launched) >= state.policy.min_nodes
        if settled or (enough and now - state.launched_at > LATE_WORKERS_S):
            return epoch_change.begin_change(
                state.of(start_s=now - state.launched_at), Cause(CauseKind.START, "start"), now
            )
        return None
    if any(mb.report.elastic for mb in launched):
        return None  # the script uses elastic: its workers are started again
    return _script(state, launched, now)


def _script(state: JobState, launched: list[Member], now: float) -> JobTransition | None:
    """A script that does not use elastic: torchrun's rules."""
    done = [mb for mb in launched if mb.report.restart == state.restart]
    failed = [mb for mb in done if mb.report.phase is NodePhase.FAILED]
    missing = state.next_rank > len(launched)
    more = any(mb.rank < 0 for mb in state.members.values()) and len(launched) < state.policy.max_nodes
    grown = more and now - state.launched_at > SCRIPT_S
    if failed and state.restart >= state.policy.max_restarts:
        return _end(
            state, JobPhase.FAILED, 1, f"{failed[0].report.cause} (restarts used up: {state.restart})"
        )
    if failed or missing or grown:
        why = failed[0].report.cause if failed else "membership changed"
        policy = state.policy if failed else replace(state.policy, max_restarts=state.policy.max_restarts + 1)
        members = {n: replace(mb, rank=-1, launch=None) for n, mb in state.members.items()}
        state = state.of(members=members, next_rank=0, restart=state.restart + 1, policy=policy)
        return state.of(phase=JobPhase.WAITING), (LogEntry("restart", {"why": why}),), f"group restart: {why}"
    if done and len(done) == len(launched) and all(mb.report.phase is NodePhase.FINISHED for mb in done):
        return _end(state, JobPhase.FINISHED, 0, "all workers ended")
    return None


def _halting(state: JobState, now: float) -> JobTransition | None:
    change = state.change
    assert change is not None
    if change.boundary:
        why = trouble(state, now) or _deadline(state, now)
        if why is not None:
            return epoch_change.begin_change(state, why, now)
    there = {
        n for n, mb in state.members.items() if mb.connected and mb.report.epoch >= state.epoch and mb.halted
    }
    waiting = [n for n in state.members if n not in there]
    if waiting or returning.is_waiting(state, now):
        return None
    return returning.decide_wait(state, now) or epoch_change.decide_plan(state, now)


def _deadline(state: JobState, now: float) -> Cause | None:
    """A draining node whose notice runs out before the step's end leaves at once."""
    for member in state.members.values():
        if member.draining and now > member.drain_deadline - state.limits.leave_s:
            return Cause(CauseKind.NOTICE, f"notice of {member.node} runs out", (member.node,))
    return None


def _installing(state: JobState, now: float) -> JobTransition | None:
    why = trouble(state, now)
    if why is not None:
        over = _recovered(state.of(trained=True))
        return over if over is not None else epoch_change.begin_change(state, why, now)
    assert state.plan is not None
    members = [state.members[n] for n in state.plan.nodes()]
    ready = (NodePhase.RUNNING, NodePhase.FINISHED)
    if all(mb.report.epoch == state.epoch and mb.report.phase in ready for mb in members):
        return state.of(phase=JobPhase.RUNNING, trained=True), (), "every node of the plan is ready"
    return None


def _running(state: JobState, now: float) -> JobTransition | None:
    over = _recovered(state)
    if over is not None:  # told before what follows it; a coordinator that is behind learns of both at once
        return over
    why = trouble(state, now)
    if why is not None:
        return epoch_change.begin_change(state, why, now)
    assert state.plan is not None
    members = [state.members[n] for n in state.plan.nodes()]
    if state.trimmed < state.epoch and all(mb.report.protected >= state.epoch for mb in members):
        step = state.assignment.step if state.assignment is not None else -1
        sends = tuple(Send(n, m.Trim(state.epoch, step)) for n in state.members)
        return (
            state.of(trimmed=state.epoch),
            (*sends, LogEntry("protected", {"epoch": state.epoch})),
            "protected",
        )
    planned = (
        _leaving(state, now)
        or notices.replace_hinted_nodes(state, now)
        or remedies.apply_remedies(state, now)
        or _joining(state, now)
    )
    return planned or _relieving(state, now) or change_backup(state, now)


def _recovered(state: JobState) -> JobTransition | None:
    """The first micro-batch of the epoch was computed: its change is complete."""
    if state.change is None or state.plan is None:
        return None
    nodes = state.plan.nodes()
    reports = [state.members[n].report for n in nodes if n in state.members]
    resumed = [r.resumed_at for r in reports if r.resumed_at and r.epoch == state.epoch]
    if not resumed:
        return None
    ready = [told for r in reports for told in r.ready if told.epoch == state.epoch]
    action = ChangeCompleted(
        change=state.change,
        nodes_after=len(nodes),
        transfer_s=max((told.transfer_s for told in ready), default=0.0),
        rebuild_s=max((told.rebuild_s for told in ready), default=0.0),
        resumed_at=min(resumed),
        since=state.recovered_at,
    )
    state = record_pause(state, state.change, min(resumed)).of(change=None, recovered_at=min(resumed))
    return state, (action,), "training goes on"


def _leaving(state: JobState, now: float) -> JobTransition | None:
    assert state.plan is not None
    for node, member in state.members.items():
        if not member.draining:
            continue
        if node in state.plan.nodes() or any(node == peer for _, peer in state.plan.peers):
            in_time = now < member.drain_deadline - state.limits.leave_s
            return epoch_change.begin_change(state, notices.drain_cause(state), now, boundary=in_time)
        if state.trimmed >= state.epoch and member.connected:  # who does not hear it would come back
            state = count_node_seconds(state, now, left=1)
            members = {n: mb for n, mb in state.members.items() if n != node}
            actions = (notices.release_order(member), LogEntry("drained", {"node": node}))
            return state.of(members=members), actions, f"{node} holds nothing any more and may leave"
    return None


def _joining(state: JobState, now: float) -> JobTransition | None:
    """Let idle nodes that the planner wants pull state first, then enter at the end of a step."""
    if state.change is not None or state.trimmed < state.epoch:
        return None
    if state.joining:
        here = [n for n in state.joining if n in state.members]
        waiting = [n for n in here if state.members[n].report.prefetched < state.epoch]
        if waiting and now - state.joining_since < state.limits.prefetch_s:
            return None
        return (
            epoch_change.begin_change(
                state, Cause(CauseKind.JOIN, f"join {' '.join(here)}", tuple(here)), now, boundary=True
            )
            if here
            else (state.of(joining=()), (), "the joining node is gone")
        )
    return epoch_change.consider_joining(state, now)


def _relieving(state: JobState, now: float) -> JobTransition | None:
    """Nodes that turned slow get less to do."""
    if state.change is not None or state.trimmed < state.epoch or state.joining:
        return None
    return rebalance_stragglers(state, now)


def _paused(state: JobState, now: float) -> JobTransition | None:
    return quarantine.release_expired(state, now) or epoch_change.resume_if_feasible(state, now)


def trouble(state: JobState, now: float) -> Cause | None:
    """Return why the running plan cannot go on; None if it can."""
    assert state.plan is not None
    for node in state.plan.nodes():
        member = state.members.get(node)
        if member is None:
            return Cause(CauseKind.LOST, f"{node} lost", (node,))
        if member.report.phase in (NodePhase.STARTING, NodePhase.FAILED, NodePhase.EMPTY):
            return _down(member.report, "workers are gone")
        if member.report.phase is NodePhase.IDLE:
            return _down(member.report, "workers were started anew")
    for node, peer in state.plan.peers:
        if peer not in state.members:
            return Cause(CauseKind.LOST, f"{peer} lost, which kept the backups of {node}", (peer,))
    if state.suspected_since and now - state.suspected_since > state.limits.contact_s:
        suspects = sorted({s for mb in state.members.values() for s in mb.report.suspects})
        if suspects:
            return Cause(CauseKind.CONTACT, f"contact lost with {' '.join(suspects)}", tuple(suspects))
    return None


def _down(report: NodeReport, text: str) -> Cause:
    """Workers crashed or hung; `text` if their agent gives no cause."""
    kind = CauseKind.HANG if report.hung else CauseKind.WORKER
    return Cause(kind, f"{report.info.node}: {report.cause or text}", (report.info.node,))


def _nothing(state: JobState, now: float) -> JobTransition | None:
    return None


RULES: dict[JobPhase, tuple[tuple[Rule, ...], tuple[JobPhase, ...]]] = {
    JobPhase.WAITING: ((_waiting,), (JobPhase.LAUNCHED,)),
    JobPhase.LAUNCHED: (
        (_launched,),
        (JobPhase.HALTING, JobPhase.WAITING, JobPhase.FINISHED, JobPhase.FAILED),
    ),
    JobPhase.HALTING: (
        (_halting,),
        (JobPhase.INSTALLING, JobPhase.PAUSED, JobPhase.HALTING, JobPhase.FINISHED, JobPhase.FAILED),
    ),
    JobPhase.INSTALLING: (
        (_installing,),
        (JobPhase.RUNNING, JobPhase.HALTING, JobPhase.FINISHED, JobPhase.FAILED),
    ),
    JobPhase.RUNNING: ((_running,), (JobPhase.HALTING, JobPhase.FINISHED, JobPhase.FAILED)),
    JobPhase.PAUSED: ((_paused,), (JobPhase.HALTING, JobPhase.FAILED)),
    JobPhase.FINISHED: ((_nothing,), ()),
    JobPhase.FAILED: ((_nothing,), ()),
}
"""Per phase: its rules in order, and the phases that may follow. docs/design/states.md is drawn from this table."""
