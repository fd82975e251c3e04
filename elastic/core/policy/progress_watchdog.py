"""Watchdog on the progress of the whole job, and the back-off for epochs that fail.

The rules of `elastic.core.coordinator.transitions` call it with every event and tick.

**Stalls** (`check_progress`). While a plan is feasible, the job waits for nodes: for those that
have not acknowledged the order to halt, that have not installed the plan, or that train. The job is
stalled if the phase, the epoch and the finished step stay, and none of these nodes shows a sign of
progress for `Timeouts.progress_s` (`Timeouts.stuck_s` before the first step). Each stall that is
acted on doubles the bound until a step is finished or a new node joins. At half of the bound, and
when a node reconnects, missed orders are repeated. At the bound, the evidence decides:

    evidence                                          remedy
    has not acknowledged the order to halt            its workers are restarted, and plans leave
    its worker spins: CPU time without progress         the node out for a while (quarantine)
    its workers did not restart when ordered twice    the node is dropped
    the same on more than half of the nodes           it is reported twice; then their workers are
                                                        restarted, and no node is left out
    all wait for each other                           after `stuck_s` a new epoch; in the next
                                                        stall it leaves out the node that others
                                                        accuse, or the node that stopped first
    a worker has not attached, and uses no CPU time   its workers are restarted, in every phase;
                                                        the pauses grow until they attach

A node that is not heard is no evidence: its lease decides about it. If only the commit of the last
checkpoint is missing, the job waits for no node. If parts of this checkpoint are missing,
`elastic.core.policy.final_checkpoint` decides about nodes that wait. While the coordinator doubts
its own network (`elastic.core.job.liveness`), nothing counts as a stall, and the bound begins anew
afterwards.

Long phases report progress themselves: agents count CPU time as progress until the first step of a
process or epoch is done, and workers count the layers that they load. A restart that was ordered is
no crash (`elastic.core.policy.remediation`).

**Failed epochs** (`epoch_began`, `retry`). An epoch that ends by a fault without a finished step
has failed. `PAUSES_S` are the pauses before the next attempts: at most five epochs per minute. The
first pause is left out, or ends, if a bad path explains the failures (`EXPLAINED_ATTEMPT`). A node
that is blamed alone for two failed epochs is left out; of several that are blamed equally often,
one in turn. Nobody is blamed for an epoch that a bad path or a crash explains: the crashes of a
node are counted elsewhere (`elastic.core.policy.remediation`). If all nodes report the same error,
the job ends with its text: after `MAX_ATTEMPTS` attempts if the error lasts, after
`PATIENT_ATTEMPTS` if it may not. A lost or leaving node is no failure: a node that is lost again
and again is quarantined. A node that joins clears only its own blame. One with a new name also ends
the pause, as does the loss of a node that took part, but at most `MOST_FAILED` epochs fail within a
minute.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.job import scope
from elastic.core.job.absent_nodes import with_absent
from elastic.core.job.epoch_change import begin_change, plan_request
from elastic.core.job.join_policy import plan_if_feasible, without_member
from elastic.core.job.liveness import is_heard
from elastic.core.job.membership import end_job
from elastic.core.job.quarantine import SUSPECTED, add_finding, is_quarantined
from elastic.core.job.state import (
    Cause,
    CauseKind,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    LossKind,
    Member,
    ProgressSign,
    ProgressWatch,
    RestartOrders,
    Send,
)
from elastic.core.policy import final_checkpoint
from elastic.core.policy.remediation import node_lost
from elastic.core.policy.restart_policy import is_waiting
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import EXIT_FAILURE, Unanswered, VaultUnreachable

T = TypeVar("T")
PAUSES_S = (0.0, 0.0, 0.0, 10.0, 60.0)
"""Pause before the next attempt, by the number of failed epochs; the last one repeats."""
MOST_FAILED = 5
"""Most epochs that may fail within 60 s, whatever ends the pauses between them."""
EXPLAINED_ATTEMPT = 4
"""This attempt is made without its pause if a bad path was found in the attempt before, or once one
is found during the pause: the next plan is another one. The pause after it is so long that there
still are five epochs per minute."""
BLAMED_EPOCHS = 2
"""A node that is blamed for this many failed epochs, more than any other node, is left out."""
TIED_EPOCHS = 4
"""If several nodes are blamed equally often, for this many failed epochs, one is left out, in turn;
first the host of the workers' store."""
MAX_ATTEMPTS, PATIENT_ATTEMPTS = 4, 8
"""The job ends after this many failed epochs with the same error on all nodes: the first number for
an error that lasts (`LASTING`), the second, with several minutes of pauses, for another."""
LASTING = re.compile(
    "No space left|Cannot allocate|Read-only file system|Permission denied|VaultFull|SlotError"
)
"""Errors that another attempt does not remove."""
CONTACT = ("LinkFailed", VaultUnreachable.__name__, Unanswered.__name__)
"""Beginnings of errors of contact, which never end the job: the network may come back, and expired
certificates may be renewed."""
MAX_DOUBLINGS = 6
"""The bound on a stall grows to at most 2 to this power times the first bound."""
START_FACTOR = 2.0
"""A worker that starts may be quiet for this multiple of the time that the first one needed."""
DISOBEYED = 2
"""A node that was sent the order to restart its workers this often, and did not, is dropped."""
REPEATED = "the job makes no progress, and the order to restart may be lost"
SPIN_SHARE = 0.1
"""A worker spins if its main thread ran, or waited for a processor, for this share of the time
without progress."""
LAST_STEP_FACTOR = 10
"""Factor on the bound when all steps are done, and the last checkpoint is written."""
MAX_NAMED = 3
"""Number of nodes that the reason of a stall names."""
NO_FAILURE = (
    CauseKind.START,
    CauseKind.LOST,
    CauseKind.DRAIN,
    CauseKind.NOTICE,
    CauseKind.JOIN,
    CauseKind.RESUME,
)
"""Causes that end an epoch, or a pause of the job, without a failure."""
CRASHES = (CauseKind.WORKER, CauseKind.HANG)
"""Causes that explain why the workers of other nodes lost contact."""
UNWATCHED = (JobPhase.WAITING, JobPhase.FINISHED, JobPhase.FAILED)
READY = (NodePhase.RUNNING, NodePhase.FINISHED)


# ---- signs of progress ----


def observe(state: JobState, now: float) -> JobState:
    """Record a finished step or a change of phase or epoch. Call this before the rules."""
    if state.doubt_since:
        state = restarted(state, now)
    watch, step = state.watch, state.newest_step
    mark = f"{state.phase.value} {state.epoch} {step}"
    if mark == watch.mark:
        return state
    watch = replace(watch, mark=mark, since=now, reminded=False)
    if step > watch.step:
        watch = _progressed(state, watch)
    return state.of(watch=replace(watch, step=step))


def member_joined(state: JobState, node: str, now: float, *, known: bool) -> JobState:
    """Forget the past of the node. A node that is not `known` ends the pause as well, because the
    next attempt may succeed with it."""
    watch = state.watch
    here = {name: sign for name, sign in watch.signs.items() if name in state.members}
    watch = replace(
        watch,
        signs={**here, node: ProgressSign(now)},
        orders=_without(watch.orders, node),
        blamed=_without(watch.blamed, node),
        failures=_without(watch.failures, node),
    )
    if not known:
        watch = replace(watch, attempts=0, retry_at=_earliest(watch.failed_times), stalls=0)
        watch = replace(watch, only_reported=0)
    return state.of(watch=watch)


def member_lost(state: JobState, node: str, now: float) -> JobState:
    """End the pause before the next attempt if a node that took part in the failed epoch is lost:
    another cluster may succeed at once. In other phases the loss begins an epoch, which does it."""
    watch, plan, change = state.watch, state.plan, state.change
    planned = change is not None and change.boundary
    if state.phase is not JobPhase.HALTING or planned or plan is None or not is_paused(state, now):
        return state
    if node not in {*plan.nodes(), *(peer for _, peer in plan.peers)}:
        return state
    retry_at = min(watch.retry_at, _earliest(watch.failed_times))
    return state.of(watch=replace(watch, retry_at=retry_at))


def _without(table: dict[str, T], node: str) -> dict[str, T]:
    return {name: value for name, value in table.items() if name != node}


def _progressed(state: JobState, watch: ProgressWatch) -> ProgressWatch:
    """Forget stalls and failures. Orders to workers that still start are kept."""
    starting = {n for n, mb in state.members.items() if mb.report.phase is NodePhase.STARTING}
    return ProgressWatch(
        mark=watch.mark,
        since=watch.since,
        step=watch.step,
        signs=watch.signs,
        orders={node: orders for node, orders in watch.orders.items() if node in starting},
        final=watch.final,
    )


def heartbeats_seen(state: JobState, beats: Iterable[m.Heartbeat], now: float) -> JobState:
    """Record the signs of progress in heartbeats of members."""
    changed = dict[str, ProgressSign]()
    for beat in beats:
        sign = changed.get(beat.node) or state.watch.signs.get(beat.node)
        if sign is None or beat.signs != sign.count:
            changed[beat.node] = ProgressSign(now, beat.signs, beat.activity, beat.spun_s)
        elif (beat.activity, beat.spun_s) != (sign.activity, sign.spun_s):
            changed[beat.node] = replace(sign, activity=beat.activity, spun_s=beat.spun_s)
    if not changed:
        return state
    return state.of(watch=_with_signs(state, {**state.watch.signs, **changed}))


def report_seen(
    state: JobState, before: m.NodeReport, report: m.NodeReport, now: float
) -> JobState:
    """Record a change in a node's report, which is a sign of progress. Orders to restart workers
    are forgotten once new workers are attached."""

    def progress_of(one: m.NodeReport) -> tuple[Any, ...]:
        workers = one.restart, one.crash_count, len(one.ready)
        return one.phase, one.epoch, one.protected, one.prefetched, workers

    node = report.info.node
    known = state.watch.orders.get(node)
    if known is not None and report.able and report.crash_count > known.crash_count:
        state = state.of(watch=replace(state.watch, orders=_without(state.watch.orders, node)))
    if progress_of(before) == progress_of(report):
        return state
    sign = state.watch.signs.get(node, ProgressSign(now))
    return state.of(watch=_with_signs(state, {**state.watch.signs, node: replace(sign, at=now)}))


def _with_signs(state: JobState, signs: dict[str, ProgressSign]) -> ProgressWatch:
    return replace(state.watch, signs=signs)


def excused(state: JobState, seconds: float) -> JobState:
    """Add time for which the coordinator did not run, or could not send orders, to the bound."""
    watch = state.watch
    signs = {node: replace(sign, at=sign.at + seconds) for node, sign in watch.signs.items()}
    since = watch.since + seconds if watch.since else 0.0
    final = watch.final and replace(watch.final, since=watch.final.since + seconds)
    return state.of(watch=replace(watch, since=since, signs=signs, final=final))


def restarted(state: JobState, until: float) -> JobState:
    """Forget all signs, after a failover of the coordinator or while it doubts its own network.
    Nodes have `until` to report again."""
    final = state.watch.final and replace(state.watch.final, since=until)
    return state.of(watch=replace(state.watch, since=until, signs={}, reminded=False, final=final))


def orders_held(state: JobState, now: float) -> JobState:
    """Begin the bounds anew, because no order reaches a node while the store is away."""
    final = state.watch.final and replace(state.watch.final, since=now)
    return state.of(watch=replace(state.watch, since=now, final=final))


# ---- stalls ----


def check_progress(state: JobState, now: float) -> JobTransition | None:
    """Act on a stall of the job, or on a worker that does not attach; None: all is well."""
    if state.spec is None or state.ending is not None or state.phase in UNWATCHED:
        return None
    if state.doubt_since:
        return None
    starting = _silent_starter(state, now)
    if starting is not None:
        return starting
    watch, bound_s = state.watch, _bound_s(state)
    if now - watch.since < bound_s / 2:
        return None
    awaited = _awaited(state, now)
    if not any(is_heard(state, state.members[node], now) for node in awaited):
        return None
    quiet_s = now - max(watch.since, *(sign_at(state, node) for node in awaited))
    if quiet_s >= bound_s:
        return _end_stall(state, awaited, quiet_s, now)
    if quiet_s >= bound_s / 2 and not watch.reminded:
        return _remind(state, awaited, now)
    return None


def _bound_s(state: JobState) -> float:
    limits = state.limits
    first_s = limits.progress_s if state.seen.step_s else max(limits.progress_s, limits.stuck_s)
    return first_s * _patience(state)


def _patience(state: JobState) -> float:
    """Return the factor on the bound. A stall that is only reported leaves it as it is, so that
    three times the bound passes until workers that all spin are restarted."""
    watch = state.watch
    return 2.0 ** min(watch.stalls - watch.only_reported, MAX_DOUBLINGS)


def _patient_s(state: JobState) -> float:
    """Return the bound for a stall in which all nodes wait."""
    assert state.spec is not None
    last = state.newest_step + 1 >= state.spec.n_steps
    bound_s = max(state.limits.progress_s, state.limits.stuck_s) * (LAST_STEP_FACTOR if last else 1)
    return bound_s * _patience(state)


def sign_at(state: JobState, node: str) -> float:
    """Return the time of the newest sign of progress of a node, such as the end of its workers; 0:
    none is known."""
    sign = state.watch.signs.get(node)
    return sign.at if sign is not None else 0.0


def _activity(state: JobState, node: str) -> str:
    sign = state.watch.signs.get(node)
    return sign.activity if sign is not None else ""


def _awaited(state: JobState, now: float) -> tuple[str, ...]:
    """Return the nodes for which the job waits; () if it waits for none."""
    members, plan = state.members, state.plan
    match state.phase:
        case JobPhase.HALTING:
            if is_waiting(state, now):
                return ()
            return tuple(node for node, mb in members.items() if not scope.has_answered(state, mb))
        case JobPhase.INSTALLING if plan is not None:
            nodes = [node for node in plan.nodes() if node in members]
            return tuple(node for node in nodes if not _installed(state, members[node]))
        case JobPhase.RUNNING if plan is not None and not final_checkpoint.awaits_commit(state):
            return tuple(node for node in plan.nodes() if node in members)
    return ()


def _halts_at_once(state: JobState) -> bool:
    """Return whether all nodes must halt now, and not at the end of the step."""
    change = state.change
    return state.phase is JobPhase.HALTING and change is not None and not change.boundary


def _installed(state: JobState, member: Member) -> bool:
    return member.report.epoch == state.epoch and member.report.phase in READY


def _remind(state: JobState, awaited: tuple[str, ...], now: float) -> JobTransition:
    """Repeat the orders that nodes have missed."""
    change, sends = state.change, tuple[JobAction, ...]()
    for node in awaited:
        member = state.members[node]
        report = member.report
        known = _orders(state, member)
        due = known is not None and now - known.at >= _bound_s(state) / 2
        if due and is_heard(state, member, now) and _unanswered(state, member):
            state, sends = _restart(state, member, REPEATED, now, sends)
        if state.phase is JobPhase.HALTING and change is not None:
            sends = (*sends, Send(node, scope.halt_order(state)))
        elif report.phase is NodePhase.HALTED and state.assignment is not None:
            sends = (*sends, Send(node, m.Install(state.epoch, state.assignment)))
    reason = f"orders repeated to {' '.join(awaited)}" if sends else ""
    return state.of(watch=replace(state.watch, reminded=True)), sends, reason


def _end_stall(
    state: JobState, awaited: tuple[str, ...], quiet_s: float, now: float
) -> JobTransition | None:
    """Act on the evidence; None: all wait for each other, and have more time."""
    heard = [node for node in awaited if is_heard(state, state.members[node], now)]
    found = {node: why for node in heard if (why := _evidence(state, node, now))}
    busy = [node for node in heard if _activity(state, node) not in ("", "wait", "idle")]
    oldest = min(found or busy or heard, key=lambda node: (sign_at(state, node), node))
    if found:
        common = _is_common(state, found)
        if common and state.watch.stalls < 2:
            return _report(state, found, "wait", quiet_s, now)
        return _blame(state, found, quiet_s, now, common=common)
    parts_missing = state.phase is JobPhase.RUNNING and final_checkpoint.late_writers(state)
    if parts_missing or quiet_s < _patient_s(state):
        return None
    suspects = _suspects(state, heard, oldest)
    if _halts_at_once(state):
        return _blame(state, suspects, quiet_s, now)  # nothing but its answer is missing
    return _new_epoch(state, suspects, quiet_s, now)


def _is_common(state: JobState, found: Collection[str]) -> bool:
    """Return whether the same was found of most nodes, so that they are not the cause."""
    return len(found) > max(1, len(state.members) // 2)


def _evidence(state: JobState, node: str, now: float) -> str:
    """Return the evidence that the job waits because of this node; "": there is none."""
    member, sign = state.members[node], state.watch.signs.get(node)
    if sign is None or not sign.count:
        return ""  # its agent does not count signs of progress
    if sign.activity not in ("wait", "idle") and sign.spun_s > SPIN_SHARE * (now - sign.at):
        return f"its worker uses CPU time without progress ({sign.activity})"
    if _halts_at_once(state) and not scope.has_answered(state, member):
        return f"it has not halted ({member.report.phase.value}, {sign.activity or 'no worker'})"
    return ""


def _suspects(state: JobState, heard: Collection[str], oldest: str) -> dict[str, str]:
    """Return the nodes that are probably the cause if all wait, and why."""
    accused = [one for mb in state.members.values() for one in mb.report.suspects]
    most = max(sorted(set(accused) & set(heard)), key=accused.count, default="")
    if most:
        return {most: "others lost contact with it"}
    return {oldest: f"it stopped first ({_activity(state, oldest) or 'activity unknown'})"}


def _entry(state: JobState, found: dict[str, str], action: str, quiet_s: float) -> LogEntry:
    data = {
        "phase": state.phase.value,
        "epoch": state.epoch,
        "quiet_s": round(quiet_s, 3),
        "suspects": list(found),
        "evidence": found,
        "action": action,
    }
    return LogEntry("stalled", data)


def _acted(state: JobState, now: float) -> JobState:
    watch = state.watch
    return state.of(watch=replace(watch, since=now, stalls=watch.stalls + 1, reminded=False))


def _report(
    state: JobState, found: dict[str, str], action: str, quiet_s: float, now: float
) -> JobTransition:
    text = "; ".join(f"{node}: {why}" for node, why in found.items())
    reason = f"no progress for {quiet_s:.1f} s: {text}"
    state = _acted(state, now)
    watch = replace(state.watch, only_reported=state.watch.only_reported + 1)
    return state.of(watch=watch), (_entry(state, found, action, quiet_s),), reason


def _blame(
    state: JobState, found: dict[str, str], quiet_s: float, now: float, *, common: bool = False
) -> JobTransition:
    """Restart the workers of the suspects; drop the nodes that disobey. Leave the nodes out, unless
    what was found is `common`. Begin a new epoch, unless all nodes halt already."""
    actions: list[JobAction] = []
    reasons: list[str] = []
    for node, why in found.items():
        member = state.members[node]
        text = f"no progress of the job for {quiet_s:.1f} s: {why}"
        if _unanswered(state, member) >= DISOBEYED:
            state, more = _drop(state, node, text, now)
            verb = "drop"
        else:
            state, more = (state, ()) if common else _leave_out(state, node, text, now)
            state, more = _restart(state, member, text, now, more)
            verb = "restart"
        actions += [_entry(state, {node: why}, verb, quiet_s), *more]
        reasons.append(f"{node}: {text}")
    state, reason = _acted(state, now), "; ".join(reasons)
    if _halts_at_once(state):
        return state, tuple(actions), reason
    cause = Cause(CauseKind.STALLED, reason, tuple(found))
    state, orders, reason = begin_change(state, cause, now)
    return state, (*actions, *orders), reason


def _restart(
    state: JobState,
    member: Member,
    why: str,
    now: float,
    actions: tuple[JobAction, ...] = (),
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Order the node to restart its workers, after `actions`. `why`: REPEATED repeats an order."""
    node, count = member.node, member.report.crash_count
    known, unanswered = _orders(state, member), _unanswered(state, member)
    sent = (known.sent if known is not None else 0) + (why != REPEATED)
    incarnation = member.report.info.incarnation
    orders = RestartOrders(incarnation, count, now, unanswered + 1, sent)
    watch = replace(state.watch, orders={**state.watch.orders, node: orders})
    return state.of(watch=watch), (*actions, Send(node, m.RestartWorkers(why, count)))


def _orders(state: JobState, member: Member) -> RestartOrders | None:
    """Return the orders to restart that this incarnation of the node was sent, or None."""
    known = state.watch.orders.get(member.node)
    same = known is not None and known.incarnation == member.report.info.incarnation
    return known if same else None


def _unanswered(state: JobState, member: Member) -> int:
    """Return how often the present workers of the node were ordered to restart."""
    known = _orders(state, member)
    same = known is not None and known.crash_count == member.report.crash_count
    return known.unanswered if known is not None and same else 0


def missed_restart(state: JobState, member: Member) -> tuple[JobAction, ...]:
    """Return the order to restart, for a node that reconnects and has not obeyed it."""
    if not _unanswered(state, member):
        return ()
    return (Send(member.node, m.RestartWorkers(REPEATED, member.report.crash_count)),)


def _drop(
    state: JobState, node: str, why: str, now: float
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Drop a member whose agent does not obey. Its vault may live."""
    entry = LogEntry("lost", {"node": node, "loss": LossKind.STALLED.value, "why": why})
    fence = Send(node, m.Fenced(f"lost: {why}"))
    state, findings = node_lost(without_member(state, node, now, left=1), node, why, now)
    state = with_absent(member_lost(state, node, now), node, now)
    return state, (entry, fence, *findings)


def _leave_out(
    state: JobState, node: str, why: str, now: float
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Quarantine the node, unless no plan fits without it."""
    if is_quarantined(state, node) or not _feasible_without(state, node):
        return state, ()
    finding = Finding(FaultClass.HOST, HealthAction.QUARANTINE, why, {SUSPECTED: True}, now)
    return add_finding(state, node, finding)


def _feasible_without(state: JobState, node: str) -> bool:
    request = replace(plan_request(state, state.epoch + 1), dead=frozenset({node}))
    return plan_if_feasible(request) is not None


def _new_epoch(
    state: JobState, suspects: dict[str, str], quiet_s: float, now: float
) -> JobTransition:
    """Begin a new epoch; in a second stall without the suspects, unless most nodes are suspects."""
    named = "; ".join(f"suspect {node}: {why}" for node, why in suspects.items())
    text = f"no progress for {quiet_s:.1f} s; {named}"
    actions: tuple[JobAction, ...] = ()
    for node in suspects if state.watch.stalls and not _is_common(state, suspects) else ():
        state, more = _leave_out(state, node, text, now)
        actions += more
    action = "leave-out" if actions else "new-epoch"
    entry, state = _entry(state, suspects, action, quiet_s), _acted(state, now)
    cause = Cause(CauseKind.STALLED, text, tuple(suspects))
    state, orders, reason = begin_change(state, cause, now)
    return state, (entry, *actions, *orders), reason


def _silent_starter(state: JobState, now: float) -> JobTransition | None:
    """Restart workers that have not attached and use no CPU time. The order is repeated after
    growing pauses, because it may be lost, or the new workers may need more time."""
    limits = state.limits
    bound_s = max(limits.silent_s, START_FACTOR * state.start_s)
    if not state.start_s:
        bound_s = limits.stuck_s
    for node, member in state.members.items():
        sign = state.watch.signs.get(node)
        if member.report.phase is not NodePhase.STARTING or sign is None or not sign.count:
            continue
        quiet_s, known = now - sign.at, _orders(state, member)
        doublings = min(known.sent, MAX_DOUBLINGS) if known is not None else 0
        if not is_heard(state, member, now) or quiet_s < bound_s * 2.0**doublings:
            continue
        why = f"its worker did not attach, and showed no activity for {quiet_s:.1f} s"
        state, actions = _restart(state, member, why, now)
        return state, (_entry(state, {node: why}, "restart", quiet_s), *actions), f"{node}: {why}"
    return None


# ---- failed epochs ----


def epoch_began(state: JobState, now: float) -> tuple[JobState, tuple[JobAction, ...]]:
    """Record the cause of a new epoch, and the pause before its plan is installed."""
    change = state.change
    if change is None or change.boundary or change.continued:
        return state, ()
    cause, watch = change.causes[-1], state.watch
    if cause.kind in NO_FAILURE:  # another cluster may succeed at once
        return state.of(watch=replace(watch, retry_at=0.0)), ()
    attempts, failed = watch.attempts + 1, (*watch.failed_times, now)[-MOST_FAILED:]
    pause_s = PAUSES_S[min(attempts, len(PAUSES_S)) - 1]
    explained = _found_bad_path(state, watch.retry_at)
    if explained and attempts == EXPLAINED_ATTEMPT:
        pause_s = 0.0
    pause_s = max(pause_s, _earliest(failed) - now)
    # The former blame may come from other bad paths, which are found a moment later.
    blamed = {} if explained else dict(watch.blamed)
    for node in () if explained or cause.kind in CRASHES else _blamed(state):
        blamed[node] = blamed.get(node, 0) + 1
    # Only nodes that took part in the epoch could repeat their former error.
    took_part = state.plan.nodes() if state.plan is not None else ()
    former = {node: text for node, text in watch.failures.items() if node not in took_part}
    watch = replace(
        watch,
        attempts=attempts,
        retry_at=now + pause_s,
        failed_times=failed,
        cause=cause.text,
        blamed=blamed,
        failures={**former, **_failures(state)},
    )
    data = {
        "epoch": state.epoch,
        "attempt": attempts,
        "cause": cause.text,
        "pause_s": round(pause_s, 3),
        "next_at": round(now + pause_s, 3),
    }
    entries = (LogEntry("retry", data),) if attempts > 1 else ()
    return state.of(watch=watch), entries


def _earliest(failed_times: tuple[float, ...]) -> float:
    """Return the time before which no other attempt may be made."""
    return failed_times[-MOST_FAILED] + 60.0 if len(failed_times) >= MOST_FAILED else 0.0


def _failures(state: JobState) -> dict[str, str]:
    """Return the error of each node that accuses no other node."""
    reports = [mb.report for mb in state.members.values()]
    return {r.info.node: r.failures[0] for r in reports if r.failures and not _named(r)}


def _found_bad_path(state: JobState, since: float) -> bool:
    """Return whether a bad path was found after `since`."""
    return any(fault.since > since for fault in state.paths if not fault.well_since)


def accuses_path(report: m.NodeReport) -> bool:
    """Return whether a bad path may be the cause of the failures in a report."""
    return bool(_named(report)) or any(text.startswith(CONTACT) for text in report.failures)


def _named(report: m.NodeReport) -> tuple[str, ...]:
    """Return the nodes that a report accuses."""
    return tuple(node for node in report.suspects if node != report.info.node)


def _blamed(state: JobState) -> tuple[str, ...]:
    """Return the nodes that failed without accusing others; if there are none, the node that most
    others accuse, or all of these."""
    alone = tuple(_failures(state))
    if alone:
        return alone
    reports = [mb.report for mb in state.members.values()]
    accused = [node for report in reports for node in _named(report) if node in state.members]
    most = max((accused.count(node) for node in accused), default=0)
    return tuple(sorted({node for node in accused if accused.count(node) == most}))


def retry(state: JobState, now: float) -> JobTransition | None:
    """Before another attempt: end the job if it cannot succeed, leave out a node that is to blame,
    or end the pause. None: go on, unless `is_paused`."""
    watch = state.watch
    if not watch.attempts:
        return None
    failed_at = watch.failed_times[-1] if watch.failed_times else 0.0
    explains = watch.attempts <= EXPLAINED_ATTEMPT and _found_bad_path(state, failed_at)
    if explains and is_paused(state, now) and now >= _earliest(watch.failed_times):
        text = "the pause ends: a bad path was found"
        return state.of(watch=replace(watch, retry_at=now)), (), text
    text = _common_failure(state)
    if text and watch.attempts >= (MAX_ATTEMPTS if LASTING.search(text) else PATIENT_ATTEMPTS):
        reason = f"{text} (on every node, in {watch.attempts} attempts)"
        state, actions = end_job(state, JobPhase.FAILED, EXIT_FAILURE, reason)
        return state, actions, reason
    culprit = _culprit(state)
    tied = () if culprit else _tied(state)
    if tied:
        culprit = tied[0]
    if not culprit:
        return None
    why = f"{watch.blamed[culprit]} epochs failed because of it: {watch.cause}"
    blamed = {node: count for node, count in watch.blamed.items() if node != culprit}
    if tied:  # the others need new evidence
        blamed = {node: min(count, BLAMED_EPOCHS - 1) for node, count in blamed.items()}
    state = state.of(watch=replace(watch, blamed=blamed))
    state, actions = _leave_out(state, culprit, why, now)
    return state, actions, f"{culprit} is left out: {why}" if actions else ""


def is_paused(state: JobState, now: float) -> bool:
    """Return whether the next attempt must wait."""
    return now < state.watch.retry_at


def _culprit(state: JobState) -> str:
    """Return the node that is blamed more than any other, often enough; "": none."""
    here = {node: count for node, count in state.watch.blamed.items() if node in state.members}
    most = max(here.values(), default=0)
    nodes = [node for node, count in here.items() if count == most]
    return nodes[0] if most >= BLAMED_EPOCHS and len(nodes) == 1 else ""


def _tied(state: JobState) -> tuple[str, ...]:
    """Return the nodes of which one must be left out, because they are blamed equally often."""
    here = {
        node: count
        for node, count in state.watch.blamed.items()
        if node in state.members and not is_quarantined(state, node)
    }
    most = max(here.values(), default=0)
    if most < TIED_EPOCHS:
        return ()
    host = state.plan.units()[0].node if state.plan is not None else ""
    nodes = [node for node, count in here.items() if count == most]
    return tuple(sorted(nodes, key=lambda node: (node != host, node)))


def _common_failure(state: JobState) -> str:
    """Return the error that all nodes reported, each in its newest epoch, apart from numbers in it;
    "": there is none, or it is one of contact. Nodes whose workers crash for ever do not count."""
    failed = {node for node, mb in state.members.items() if mb.report.phase is NodePhase.FAILED}
    texts = [state.watch.failures.get(node, "") for node in state.members if node not in failed]
    same = {re.sub(r"\d+", "#", text) for text in texts}
    contact = any(text.startswith(CONTACT) for text in texts)
    return texts[0] if len(same) == 1 and texts[0] and not contact else ""


# ---- for people ----


def quiet(state: JobState, now: float) -> tuple[float, str] | None:
    """Return the time since which no node for which the job waits shows a sign of progress, and
    what is known about these nodes; None: it waits for none."""
    awaited = _awaited(state, now)
    if not awaited:
        return None
    found = {node: why for node in awaited if (why := _evidence(state, node, now))}
    oldest = min(awaited, key=lambda node: (sign_at(state, node), node))
    found = found or _suspects(state, awaited, oldest)
    text = "; ".join(f"{node}: {why}" for node, why in sorted(found.items())[:MAX_NAMED])
    return max(state.watch.since, *(sign_at(state, node) for node in awaited)), text


def is_troubled(state: JobState) -> bool:
    """Return whether a stall was acted on, or several epochs failed, since the last finished
    step."""
    return state.watch.stalls > 0 or state.watch.attempts > 1


def attention(state: JobState) -> str:
    """Return the text about a long wait for the last checkpoint; "": there is none."""
    return final_checkpoint.attention(state)


def summary(state: JobState, now: float) -> dict[str, Any]:
    """Return the part of the status about stalls and failed epochs; {} if all is well."""
    watch = state.watch
    if not watch.attempts and not watch.stalls:
        return {}
    return {
        "attempts": watch.attempts,
        "stalls": watch.stalls,
        "cause": watch.cause,
        "next_attempt_in_s": round(max(0.0, watch.retry_at - now), 1),
        "left_out": sorted(node for node in state.members if is_quarantined(state, node)),
    }
