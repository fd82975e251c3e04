"""Remediation: findings about the health of nodes, and the changes of plan that follow.

Observations come from node reports (crashes, hangs), losses, health reports (devices, disks,
memory, clock, links) and measured compute speeds (`elastic.core.policy.straggler_policy`).
`elastic.core.health.diagnosis` classifies each observation. A remedy that needs another plan is
applied at the end of a step, like every planned change. A node that training needs is not
quarantined if no plan fits without the node, or if half of the other nodes have the same problem at
the same time.

**Crashes** end the job if the script is at fault, not the nodes. Then they follow the work. Within
one step, workers crash repeatedly

- on one node after another (`HealthLimits.fatal_nodes`): each began to crash under a plan without
  the nodes before. Nodes of a broken rack begin at the same time, so they count as one;
- or on most nodes. The same device error counts even once, if one node had it twice;
- or on a node that the job cannot do without.

A node that has no room or no descriptors for copies (`is_shortage`) is no evidence against the
script at first: for `SHORTAGE_S` its workers may crash repeatedly, because other processes of the
machine may let go of what is short.

Errors of links are no evidence against the node or the script that reports them, and do not count
at all if another node of the same plan was lost or crashed by another cause. If all nodes but one
report them, and one of them repeatedly within a step, that one is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import inf
from typing import Any

from elastic.core.health import diagnosis, link_speed
from elastic.core.health.compute_speed import MIN_SLOW_FACTOR
from elastic.core.health.diagnosis import (
    EXCLUDING_ACTIONS,
    FaultClass,
    Finding,
    HealthAction,
    NodeHealth,
)
from elastic.core.job import absent_nodes, quarantine
from elastic.core.job.epoch_change import begin_change, candidates, plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.membership import end_job
from elastic.core.job.quarantine import (
    Findings,
    add_finding,
    clear_finding,
    crashes_in_step,
    record_of,
    with_record,
)
from elastic.core.job.reachability import paths_reported
from elastic.core.job.state import (
    Cause,
    CauseKind,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
)
from elastic.core.job.stragglers import speed_of
from elastic.core.policy.certificate_warnings import warn
from elastic.core.policy.slow_link import LinkDecision, choose_link_remedy
from elastic.core.protocol.device_errors import is_device_error, is_link_error, is_shortage
from elastic.core.protocol.health_report import HealthReport
from elastic.core.protocol.messages import BackupNote, NodePhase, NodeReport
from elastic.domain.errors import EXIT_FAILURE

RECOVERED_LINK = 2.0
"""A slow link has recovered when its rate is at least its usual rate divided by this factor."""
SHORTAGE_S = 60.0
"""Workers that crash in one step for a lack of room or descriptors end the job only after this
time."""
KEPT_MORE = 64
"""Number of departed nodes, beyond the number of members, whose records are kept."""
ProblemTimes = Callable[[NodeHealth], tuple[float, ...]]
"""Returns the times at which a node had a problem."""


# ---- crashes, hangs, losses ----


def workers_failed(state: JobState, was: NodeReport, report: NodeReport, now: float) -> Findings:
    """Record crashed or hung workers, which their agent restarts; quarantine a node if its workers
    crash repeatedly; end the job if neither helps. A restart that was ordered is no crash."""
    over = state.ending is not None or state.failure is not None
    if report.crash_count <= was.crash_count or state.spec is None or over:
        return state, ()
    node, limits = report.info.node, state.policy.health
    crashes = report.crash_count - was.crash_count - _ordered_restarts(state, was, report)
    before, step = record_of(state, node), state.newest_step
    link, epoch = is_link_error(report.cause), state.plan.epoch if state.plan is not None else -1
    record = diagnosis.record_crash(before, now, limits, crashes, step, link, epoch)
    if not link:
        record = _with_fault(state, node, record)
    needed = _is_needed(state, node)
    if not needed:  # such crashes keep no step from being finished
        record = replace(record, stuck=before.stuck, stuck_at=before.stuck_at)
        record = replace(record, link_plans=before.link_plans)
    elif 0 < crashes == record.stuck:
        record = replace(record, stuck_moves=_moves(state))
    if crashes:
        record = replace(record, crash_cause=report.cause)
    state = with_record(state, node, record)
    accused = _accused_by_links(state, node)
    at_fault = ""
    if needed and not accused and not absent_nodes.are_majority(state):
        at_fault = _script_at_fault(state, node, now)
    if at_fault:
        reason = f"{at_fault}; {node}: {report.cause}"
        return end_job(state, JobPhase.FAILED, EXIT_FAILURE, reason)
    evidence: dict[str, Any] = {
        "cause": report.cause,
        "crashes": len(record.crashes),
        "window_s": limits.window_s,
    }
    if report.detect_s:
        evidence["detect_s"] = round(report.detect_s, 3)
    loops = _loops(state, node, needed) or report.phase is NodePhase.FAILED
    device = is_device_error(report.cause)
    if not loops or record.quarantined:
        why = f"{report.cause}: its workers are started again"
        kind = FaultClass.DEVICE if device and not record.quarantined else FaultClass.PROCESS
        return add_finding(state, node, Finding(kind, HealthAction.RESTART, why, evidence, now))
    if accused:
        reason = f"workers of all other nodes report errors of their links; {node}: {report.cause}"
        leave = Finding(FaultClass.DEVICE, _away(state, accused), reason, dict(evidence), now)
        state, left = add_finding(state, accused, leave)
        why = f"{report.cause}: {accused} is the likely cause"
        restart = Finding(FaultClass.DEVICE, HealthAction.RESTART, why, evidence, now)
        state, restarted = add_finding(state, node, restart)
        return state, (*restarted, *left)
    excuse = _excuse(state, node, _crash_times_of(report.cause), limits.crashes) if needed else ""
    if excuse:
        finding = Finding(FaultClass.PROCESS, HealthAction.RESTART, excuse, evidence, now)
        return add_finding(state, node, finding)
    known = record.finding(FaultClass.DEVICE)
    device = device or (known is not None and known.action is not HealthAction.RESTART)
    number = len(record.crashes)
    times = "its workers crashed" + (f" {number} times" if number > 1 else "")
    why = f"{times}: starting them again does not help; the last cause: {report.cause}"
    kind = FaultClass.DEVICE if device else FaultClass.HOST
    return add_finding(state, node, Finding(kind, _away(state, node), why, evidence, now))


def _with_fault(state: JobState, node: str, record: NodeHealth) -> NodeHealth:
    """Return the record with a fault of the node itself, if the present plan has the node."""
    if state.plan is None or node not in state.plan.nodes():
        return record
    return diagnosis.record_fault(record, state.plan.epoch)


def _loops(state: JobState, node: str, needed: bool) -> bool:
    """Return whether the node's workers crashed repeatedly.

    Errors of links count only if they repeat within one step, and if no fault of another node
    explains them.
    """
    number, record = state.policy.health.crashes, record_of(state, node)
    if needed and not quarantine.crash_looping_nodes(state, [node]):
        return diagnosis.own_crashes(record) >= number
    return len(record.crashes) >= number


def _ordered_restarts(state: JobState, was: NodeReport, report: NodeReport) -> int:
    """Return 1 if an ordered restart counts as a crash since the former report `was`, else 0."""
    orders = state.watch.orders.get(report.info.node)
    if orders is None or orders.incarnation != report.info.incarnation:
        return 0
    return int(was.crash_count <= orders.crash_count < report.crash_count)


def _is_needed(state: JobState, node: str) -> bool:
    """Return whether training needs the workers of `node`. Others may crash without end: this is no
    reason to end the job."""
    if state.plan is None:
        return True
    return node in state.plan.nodes() and not quarantine.is_quarantined(state, node)


def _crashed(state: JobState) -> dict[str, NodeHealth]:
    """Return the records of the members whose workers crashed since the newest step was finished,
    while training needed them."""
    return {node: record_of(state, node) for node in crashes_in_step(state, state.members)}


def _moves(state: JobState) -> int:
    """Return how often the crashes of this step have moved, for a node whose crashes begin now. The
    plan must be without the nodes whose workers crash repeatedly, else they may be the cause."""
    loops = _loops_of_own(state, state.health)
    if state.plan is None or not loops or any(node in loops for node in state.plan.nodes()):
        return 0
    return 1 + max(one.stuck_moves for one in loops.values())


def _loops_of_own(state: JobState, nodes: Iterable[str]) -> dict[str, NodeHealth]:
    """Return the records of the nodes whose workers crash repeatedly, and not by errors of
    links."""
    records = {
        node: record_of(state, node) for node in quarantine.crash_looping_nodes(state, nodes)
    }
    return {node: one for node, one in records.items() if not is_link_error(one.crash_cause)}


def _script_at_fault(state: JobState, node: str, now: float) -> str:
    """Return the reason to end the job instead of restarting the workers of `node`; "": none."""
    limits, record = state.policy.health, record_of(state, node)
    in_step = record.crashes[-record.stuck :] if record.stuck else ()
    known = len(in_step) == record.stuck > 0  # else the first one was long ago
    if known and is_shortage(record.crash_cause) and now - in_step[0] < SHORTAGE_S:
        return ""
    moved = record.stuck_moves >= limits.fatal_nodes - 1
    members = len(state.members)
    most = max(2, min(members, max(limits.fatal_nodes, members // 2 + 1)))
    loops = tuple(_loops_of_own(state, state.members))
    for text, nodes in (
        ("workers crash on", loops),
        ("the same device error occurs on", _with_the_same_device_error(state, record)),
    ):
        if node in nodes and (moved or len(nodes) >= most):
            return f"{text} {' '.join(sorted(nodes))}, and no step is finished between"
    times = crashes_in_step(state, [node]).get(node, 0)
    if times < limits.hopeless:
        return ""
    times_of = _crash_times_of(record.crash_cause)
    same = _with_the_same(state, node, times_of, limits.crashes)
    excuse = _excuse(_with_all_ready(state, same), node, times_of, limits.crashes)
    text = f"workers crashed {times} times, and no step was finished between; {excuse}"
    return text if excuse else ""


def _with_the_same_device_error(state: JobState, record: NodeHealth) -> tuple[str, ...]:
    """Return the nodes that had the device error of `record` in this step (numbers in its text may
    differ); (): it is no device error, or no node had it twice."""
    cause = record.crash_cause
    if not is_device_error(cause) or is_link_error(cause):
        return ()
    text, crashed = _without_numbers(cause), _crashed(state)
    same = {n: one for n, one in crashed.items() if _without_numbers(one.crash_cause) == text}
    return tuple(same) if any(one.stuck > 1 for one in same.values()) else ()


def _accused_by_links(state: JobState, node: str) -> str:
    """Return the only node of the plan whose workers report no error of a link, if those of all
    others do, and a plan fits without it; "": there is none. `node` is one of the others."""
    reports = {n for n, one in _crashed(state).items() if is_link_error(one.crash_cause)}
    if state.plan is None or node not in reports:
        return ""
    rest = [other for other in state.plan.nodes() if other not in reports]
    several = len(state.plan.nodes()) > len(rest) + 1
    if len(rest) != 1 or not several:
        return ""
    return rest[0] if _feasible_without(_with_all_ready(state, ()), rest[0]) else ""


def _with_all_ready(state: JobState, looping: Collection[str]) -> JobState:
    """Return the state as it will be when nodes that start or are cut off are ready, except nodes
    whose workers crash repeatedly."""
    members = {
        node: mb
        if node in looping or mb.report.phase is NodePhase.FAILED
        else replace(mb, refused=False, report=replace(mb.report, able=True))
        for node, mb in state.members.items()
    }
    return state.of(members=members)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def node_lost(state: JobState, node: str, why: str, now: float) -> Findings:
    """Record the loss of a node. A node that was lost repeatedly is quarantined when it returns."""
    limits = state.policy.health
    record = diagnosis.record_departure(record_of(state, node), now, limits)
    record = _with_fault(state, node, record)
    state = _without_old_records(with_record(state, node, record), now)
    times = len(record.departures)
    if record.quarantined or times < limits.departures:
        return state, ()
    if _excuse(state, node, _departure_times, limits.departures):
        return state, ()
    evidence = {"departures": times, "window_s": limits.window_s, "last": why}
    reason = f"it was lost {times} times in {limits.window_s:g} s"
    finding = Finding(FaultClass.HOST, _away(state, node), reason, evidence, now)
    return add_finding(state, node, finding)


def _excuse(state: JobState, node: str, times_of: ProblemTimes, number: int) -> str:
    """Return the reason not to quarantine `node`; "": none. Reasons: at least half of the other
    members have the same problem, or no plan fits without `node`."""
    same = _with_the_same(state, node, times_of, number)
    if same and 2 * len(same) >= len(state.members.keys() - {node}):
        return f"the same happens on {' '.join(same)}: it is not this node"
    return "" if _feasible_without(state, node) else "no plan fits without it"


def _with_the_same(
    state: JobState, node: str, times_of: ProblemTimes, number: int
) -> tuple[str, ...]:
    """Return the other members that had the problem twice while `node` had it `number` times."""
    since = min(times_of(record_of(state, node))[-number:], default=inf)
    others = {other: times_of(record_of(state, other)) for other in state.members if other != node}
    return tuple(other for other, times in others.items() if sum(at >= since for at in times) >= 2)


def _crash_times_of(cause: str) -> ProblemTimes:
    """Return a function that gives a node's crashes which excuse a crash by `cause` elsewhere. Any
    crash may lead to errors of links on other nodes, so those excuse only errors of links."""

    def times_of(record: NodeHealth) -> tuple[float, ...]:
        follows = is_link_error(record.crash_cause) and not is_link_error(cause)
        return () if follows else record.crashes

    return times_of


def _departure_times(record: NodeHealth) -> tuple[float, ...]:
    return record.departures


def _feasible_without(state: JobState, node: str) -> bool:
    if state.spec is None:
        return False
    request = replace(plan_request(state, state.epoch + 1), dead=frozenset({node}))
    return plan_if_feasible(request) is not None


def spare_nodes(state: JobState) -> tuple[str, ...]:
    """Return the connected nodes that hold no stage and can take one."""
    held = state.plan.nodes() if state.plan is not None else ()
    return tuple(mb.node for mb in candidates(state) if mb.connected and mb.node not in held)


def _away(state: JobState, node: str) -> HealthAction:
    """Return REPLACE if the node holds a stage and there is another spare, else QUARANTINE."""
    held = state.plan.nodes() if state.plan is not None else ()
    spare = any(spare != node for spare in spare_nodes(state))
    return HealthAction.REPLACE if spare and node in held else HealthAction.QUARANTINE


def _without_old_records(state: JobState, now: float) -> JobState:
    """Drop the health records of nodes that left long ago, once there are many records."""
    if len(state.health) <= len(state.members) + KEPT_MORE:
        return state
    kept = {
        node: record
        for node, record in state.health.items()
        if node in state.members or not diagnosis.is_forgettable(record, now, state.policy.health)
    }
    return state.of(health=kept)


# ---- health reports ----


def health_reported(state: JobState, report: HealthReport, now: float) -> JobTransition:
    """Record a health report and its findings."""
    member = state.members.get(report.node)
    former = member is None or member.report.info.incarnation != report.incarnation
    if former or state.ending is not None:
        return state, (), ""
    node, record = report.node, record_of(state, report.node)
    clock = (*record.clock, round(now - report.at, 4))[-diagnosis.CLOCK_SAMPLES :]
    state = with_record(state, node, replace(record, report=report, clock=clock))
    state, paths = paths_reported(state, report, now)
    actions: list[JobAction] = [*paths]
    for check in (_check_devices, _check_disks, _check_host, _check_link):
        state, more = check(state, node, report, now)
        actions += more
    entries = [action.data for action in actions if isinstance(action, LogEntry)]
    reasons = [f"{data['node']}: {data['reason']}" for data in entries]
    state, warnings = warn(state, node, report.certificates, now)
    reasons += [str(entry.data["reason"]) for entry in warnings]
    return state, (*actions, *warnings), "; ".join(reasons)


def _check_devices(state: JobState, node: str, report: HealthReport, now: float) -> Findings:
    record = record_of(state, node)
    sick = diagnosis.faulty_device(record, report.devices)
    hot = diagnosis.throttled_device(report.devices)
    known = record.finding(FaultClass.DEVICE)
    if sick is not None:
        reason, evidence = sick
        errors = max(record.errors, sum(device.errors for device in report.devices))
        state = with_record(state, node, replace(record, errors=errors))
        if _feasible_without(state, node):
            action = _away(state, node)
        else:
            action, reason = HealthAction.NONE, f"{reason}; no plan fits without it"
        return add_finding(state, node, Finding(FaultClass.DEVICE, action, reason, evidence, now))
    if known is not None and known.action in EXCLUDING_ACTIONS:
        return state, ()
    if hot is not None:
        reason, evidence = hot
        slower = speed_of(state, node).factor
        action = HealthAction.REBALANCE if slower >= MIN_SLOW_FACTOR else HealthAction.NONE
        finding = Finding(FaultClass.DEVICE, action, reason, {**evidence, "slow": slower}, now)
        return add_finding(state, node, finding)
    if known is not None and known.action is HealthAction.RESTART:
        return state, ()  # the finding came from a crash; the driver does not report such a fault
    return clear_finding(state, node, FaultClass.DEVICE, "its devices are well again", now)


def _check_disks(state: JobState, node: str, report: HealthReport, now: float) -> Findings:
    found = diagnosis.full_disk(report, state.policy.health)
    known = record_of(state, node).finding(FaultClass.STORAGE)
    if found is None:
        if known is None or known.action in EXCLUDING_ACTIONS or "error" in known.evidence:
            return state, ()
        return clear_finding(state, node, FaultClass.STORAGE, "there is room again", now)
    reason, evidence, failed = found
    if known is not None and not failed:
        return state, ()
    others = tuple(
        one.report
        for name, one in state.health.items()
        if name in state.members and name != node and one.report
    )
    action, why = HealthAction.NONE, "nothing failed yet"
    if failed:
        why = "training goes on, without new checkpoints"
        if not diagnosis.has_own_disk(str(evidence["path"]), report, others):
            why += "; the disk is not this node's alone"
        elif spare_nodes(state) and _feasible_without(state, node):
            action, why = _away(state, node), "the disk is its own, and a spare is available"
    finding = Finding(FaultClass.STORAGE, action, f"{reason}; {why}", evidence, now)
    return add_finding(state, node, finding)


def checkpoint_written(state: JobState, now: float) -> Findings:
    """Clear the findings about disks, because a whole checkpoint was written."""
    actions: list[JobAction] = []
    for node, record in state.health.items():
        known = record.finding(FaultClass.STORAGE)
        if known is not None and known.action not in EXCLUDING_ACTIONS:
            text = "checkpoints are written again"
            state, more = clear_finding(state, node, FaultClass.STORAGE, text, now)
            actions += more
    return state, tuple(actions)


def keeper_failed(state: JobState, note: BackupNote, now: float) -> Findings:
    """Record that a vault can store no copies. At the end of the step the plan is changed, and
    another node keeps the copies, if there is one. A note about a former vault has no effect."""
    member = state.members.get(note.keeper)
    if member is None or member.report.info.incarnation in state.poor_keepers:
        return state, ()
    if note.vault and note.vault != member.report.info.vault:
        return state, ()
    present = {mb.report.info.incarnation for mb in state.members.values()}
    known = tuple(one for one in state.poor_keepers if one in present)
    reason = f"it cannot keep copies of other nodes: {note.detail}"
    state = state.of(
        poor_keepers=(*known, member.report.info.incarnation), rebalance=f"{note.keeper}: {reason}"
    )
    evidence = {"owner": note.owner, "error": note.detail}
    finding = Finding(FaultClass.STORAGE, HealthAction.REBALANCE, reason, evidence, now)
    record = record_of(state, note.keeper)
    record = diagnosis.record_keeper_failure(record, now, state.policy.health)
    return add_finding(with_record(state, note.keeper, record), note.keeper, finding)


def _try_keepers_again(state: JobState, now: float) -> JobTransition | None:
    """Let vaults keep copies again after a pause, because memory may be free again. The plan is
    changed for it only if a node has no peer that keeps its copies."""
    due = {
        member.report.info.incarnation: node
        for node, member in state.members.items()
        if member.report.info.incarnation in state.poor_keepers
        and now >= record_of(state, node).keeps_after
    }
    if not due or state.plan is None:
        return None
    left = tuple(one for one in state.poor_keepers if one not in due)
    reason = f"{' '.join(due.values())} may keep copies of other nodes again"
    short = set(state.plan.nodes()) - {owner for owner, _ in state.plan.peers}
    state = state.of(poor_keepers=left, rebalance=reason if short else state.rebalance)
    entries: tuple[JobAction, ...] = ()
    for node in due.values():
        state, more = clear_finding(state, node, FaultClass.STORAGE, reason, now)
        entries += more
    return state, entries, reason


def _check_host(state: JobState, node: str, report: HealthReport, now: float) -> Findings:
    record, limits = record_of(state, node), state.policy.health
    known = record.finding(FaultClass.HOST)
    if known is not None and known.action is not HealthAction.NONE:
        return state, ()
    found = diagnosis.low_memory(report, limits) or diagnosis.clock_skew(record, limits)
    if found is None:
        if known is not None and "slow" in known.evidence:  # the straggler policy clears it
            return state, ()
        return clear_finding(state, node, FaultClass.HOST, "memory and clock are well again", now)
    return add_finding(
        state, node, Finding(FaultClass.HOST, HealthAction.NONE, found[0], found[1], now)
    )


def _check_link(state: JobState, node: str, report: HealthReport, now: float) -> Findings:
    """Compare the busiest link with its usual rate and with the links of the other nodes."""
    if not report.links or state.plan is None or report.epoch != state.plan.epoch:
        return state, ()
    busiest, limits = max(report.links, key=lambda link: link.nbytes), state.policy.health
    record, by, windows = record_of(state, node), limits.link_factor, limits.link_windows
    size, rate = busiest.nbytes / max(busiest.sends, 1), busiest.best_bytes_per_s
    pace = link_speed.record_rate(record.link, busiest.peer, rate, size, by, windows)
    state = with_record(state, node, replace(record, link=pace))
    others = tuple(record_of(state, name).link for name in state.members if name != node)
    slower = link_speed.slow_factor(pace, others, by, windows, limits.link_least_s)
    if not slower:
        return _link_well(state, node, now) if len(pace.recent) == windows else (state, ())
    evidence = {
        "peer": busiest.peer,
        "bytes_per_s": round(pace.now),
        "usual_bytes_per_s": round(pace.usual),
        "factor": round(slower, 2),
        "sends": busiest.sends,
        "bytes": busiest.nbytes,
        "load": round(report.load, 2),
        "others_bytes_per_s": round(max((other.now for other in others), default=0.0)),
    }
    return _link_slow(state, node, evidence, now)


def _link_slow(state: JobState, node: str, evidence: dict[str, Any], now: float) -> Findings:
    known = record_of(state, node).finding(FaultClass.LINK)
    spare = any(one != node for one in spare_nodes(state))
    relieved = known is not None and known.action is HealthAction.REBALANCE and spare
    handled = known is not None and known.action is not HealthAction.NONE and not relieved
    if state.phase is not JobPhase.RUNNING or not state.stable or handled:
        return state, ()
    decision = choose_link_remedy(state, node, spare=spare)
    if relieved:
        loaded = record_of(state, node).loaded
        decision = LinkDecision(HealthAction.REPLACE, "a spare came", loaded)
    if decision is None:
        return state, ()
    peer, slower = evidence["peer"], evidence["factor"]
    evidence = {**evidence, "steps_slower": round(decision.slowdown, 2)}
    if decision.action is HealthAction.REBALANCE:
        record = diagnosis.record_slowdown(record_of(state, node), now, state.policy.health)
        record = replace(record, loaded=decision.slowdown)
        text = f"link of {node} to {peer} is {slower:.1f}x slower"
        state = with_record(state, node, record).of(rebalance=text)
    reason = f"copies to {peer} go {slower:.1f}x slower than usual; {decision.reason}"
    return add_finding(
        state, node, Finding(FaultClass.LINK, decision.action, reason, evidence, now)
    )


def _link_well(state: JobState, node: str, now: float) -> Findings:
    record = record_of(state, node)
    known = record.finding(FaultClass.LINK)
    if known is None or known.action in EXCLUDING_ACTIONS:
        return state, ()
    evidence = known.evidence
    before = evidence.get("usual_bytes_per_s") or evidence.get("others_bytes_per_s", 0)
    if record.link.now * RECOVERED_LINK < float(before):
        return state, ()  # a new measurement for copies of another size; the link may still be slow
    if record.loaded != 1.0:
        state = with_record(state, node, replace(record, loaded=1.0))
        state = state.of(rebalance=f"link of {node} is well again")
    return clear_finding(state, node, FaultClass.LINK, "its link is as fast as before", now)


# ---- the rule of a running job ----


def apply_remedies(state: JobState, now: float) -> JobTransition | None:
    """End an expired quarantine, or change the plan at the end of the step because of findings."""
    over = quarantine.release_expired(state, now)
    if over is not None:
        return over
    if not state.stable or state.plan is None:
        return None
    again = _try_keepers_again(state, now)
    if again is not None:
        return again
    used = (*state.plan.nodes(), *(peer for _, peer in state.plan.peers))
    quarantined = quarantine.quarantined_nodes(state)
    node = next((node for node in used if node in quarantined), None)
    if node is not None:
        findings = record_of(state, node).findings
        why = next((f": {one.reason}" for one in findings if one.action in EXCLUDING_ACTIONS), "")
        cause = Cause(CauseKind.OTHER, f"{node} is quarantined{why}", (node,))
    elif state.rebalance:
        cause = Cause(CauseKind.OTHER, state.rebalance)
    else:
        return quarantine.restart_failed_node(state, now, used)
    return begin_change(state.of(rebalance=""), cause, now, boundary=True)
