"""Health in the job's state: what nodes tell becomes findings, and findings become changes of the plan.

Observations come with reports (crashes, hangs), losses, health reports (devices, disks, memory, clock, links) and
measured paces (`elastic.core.policy.straggler_policy`). Each is classified and gets an action by `elastic.core.health.diagnosis`; actions that
need another plan are carried out at the end of a step, like every planned change. Nobody is put aside without whom no
plan fits, and nobody for what happens to the others as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.core.health import diagnosis as health
from elastic.core.health import link_speed as linkpace
from elastic.core.health.compute_speed import NORMAL
from elastic.core.health.diagnosis import AWAY, Finding, Kind, Record, Remedy
from elastic.core.job import epoch_change as epoch_change
from elastic.core.job import quarantine
from elastic.core.job.quarantine import add_finding, clear_finding, record_of, with_record
from elastic.core.job.state import (
    Cause,
    CauseKind,
    HealthReported,
    JobAction,
    JobFinished,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    Send,
)
from elastic.core.job.stragglers import compute_slowdown
from elastic.core.policy.slow_link import LinkDecision, choose_link_remedy
from elastic.core.protocol.device_errors import of_device
from elastic.core.protocol.health_report import Check, HealthReport, Refused
from elastic.core.protocol.messages import NodePhase, NodeReport, Stop
from elastic.domain.errors import EXIT_FAILURE, InfeasiblePlan
from elastic.planning.search.search import make_plan

Told = tuple[JobState, tuple[JobAction, ...]]
DURATIONS = 32
"""Steps whose durations are kept."""
WELL = 2.0
"""A slow link is well again when it carries more than what it did before, over this."""
KEPT_MORE = 64
"""Records of nodes that are not there, besides as many as there are members."""


# ---- crashes, hangs, losses ----


def workers_failed(state: JobState, was: NodeReport, report: NodeReport, now: float) -> Told:
    """A node's workers crashed or hung, if its report says so: restart them; if that does not help, put it aside."""
    if report.fallen <= was.fallen or state.spec is None or state.ending is not None:
        return state, ()
    node, limits = report.info.node, state.policy.health
    record = health.crashed(record_of(state, node), now, limits, report.fallen - was.fallen, _reached(state))
    state = with_record(state, node, record)
    hopeless = _hopeless(state, node)
    if hopeless:
        return _give_up(state, f"{hopeless}; {node}: {report.cause}")
    evidence: dict[str, Any] = {
        "cause": report.cause,
        "crashes": len(record.crashes),
        "window_s": limits.window_s,
    }
    if report.detect_s:
        evidence["detect_s"] = round(report.detect_s, 3)
    loops = health.crash_loops(record, limits) or report.phase is NodePhase.FAILED
    device = of_device(report.cause)
    if not loops or record.quarantined:
        why = f"{report.cause}: its workers are started again"
        kind = Kind.DEVICE if device and not record.quarantined else Kind.PROCESS
        return add_finding(state, node, Finding(kind, Remedy.RESTART, why, evidence, now))
    excuse = _excuse(state, node, lambda one: len(one.crashes) >= 2)
    if excuse:
        return add_finding(state, node, Finding(Kind.PROCESS, Remedy.RESTART, excuse, evidence, now))
    known = record.finding(Kind.DEVICE)
    device = device or (known is not None and known.action is not Remedy.RESTART)
    why = f"its workers went down {len(record.crashes)} times: starting them again does not help"
    kind = Kind.DEVICE if device else Kind.HOST
    return add_finding(state, node, Finding(kind, _away(state, node), why, evidence, now))


def _reached(state: JobState) -> int:
    """The newest step that the job finished; -1: none."""
    return state.record.step if state.record is not None else -1


def _hopeless(state: JobState, node: str) -> str:
    """Why it is of no use to start the workers of `node` once more, or ""."""
    limits, reached = state.policy.health, _reached(state)
    stuck = {name: one.stuck for name, one in state.health.items() if one.stuck and one.stuck_at >= reached}
    looping = sorted(name for name, times in stuck.items() if times >= limits.crashes)
    if len(looping) >= limits.hopeless_nodes:
        return f"workers crash on {' '.join(looping)}, and no step is finished between"
    times = stuck.get(node, 0)
    excuse = _excuse(state, node, lambda one: len(one.crashes) >= 2) if times >= limits.hopeless else ""
    return f"workers crashed {times} times, and no step was finished between; {excuse}" if excuse else ""


def _give_up(state: JobState, why: str) -> Told:
    finish = JobFinished(EXIT_FAILURE, why)
    stops: list[JobAction] = [Send(name, Stop(EXIT_FAILURE, why)) for name in state.members]
    return state.of(phase=JobPhase.FAILED, ending=finish), (*stops, finish)


def node_lost(state: JobState, node: str, why: str, now: float) -> Told:
    """A node was lost. One that comes back only to be lost again is put aside when it comes back."""
    limits = state.policy.health
    record = health.departed(record_of(state, node), now, limits)
    state = _forget(with_record(state, node, record), now)
    if not state.trained or record.quarantined or not health.flaps(record, limits):
        return state, ()
    if _excuse(state, node, lambda one: len(one.departures) >= 2):
        return state, ()
    times = len(record.departures)
    evidence = {"departures": times, "window_s": limits.window_s, "last": why}
    reason = f"it was lost {times} times in {limits.window_s:g} s"
    return add_finding(state, node, Finding(Kind.HOST, _away(state, node), reason, evidence, now))


def _excuse(state: JobState, node: str, too: Callable[[Record], bool]) -> str:
    """Why `node` is not put aside for what happened to it, or ""."""
    others = [other for other in state.members if other != node]
    same = [other for other in others if too(record_of(state, other))]
    if same and 2 * len(same) >= len(others):
        return f"the same happens on {' '.join(same)}: it is not this node"
    return "" if _feasible(state, node) else "no plan fits without it"


def _feasible(state: JobState, *nodes: str) -> bool:
    """Whether a plan fits the nodes at hand but these."""
    if state.spec is None:
        return False
    try:
        make_plan(replace(epoch_change.plan_request(state, state.epoch + 1), dead=frozenset(nodes)))
    except InfeasiblePlan:
        return False
    return True


def spare_nodes(state: JobState) -> tuple[str, ...]:
    """Nodes that could take a stage, and hold none."""
    held = state.plan.nodes() if state.plan is not None else ()
    return tuple(mb.node for mb in epoch_change.candidates(state) if mb.node not in held)


def _away(state: JobState, node: str) -> Remedy:
    held = state.plan.nodes() if state.plan is not None else ()
    there = [spare for spare in spare_nodes(state) if spare != node]
    return Remedy.REPLACE if there and node in held else Remedy.QUARANTINE


def _forget(state: JobState, now: float) -> JobState:
    """Records of nodes that went long ago go, once they are many."""
    if len(state.health) <= len(state.members) + KEPT_MORE:
        return state
    limits = state.policy.health
    kept = {
        node: record
        for node, record in state.health.items()
        if node in state.members or not health.forgettable(record, now, limits)
    }
    return state.of(health=kept)


# ---- health reports ----


def health_reported(state: JobState, event: HealthReported, now: float) -> JobTransition:
    """Take note of how a node is."""
    report = event.report
    member = state.members.get(report.node)
    if member is None or member.report.info.incarnation != report.incarnation or state.ending is not None:
        return state, (), ""
    node, record = report.node, record_of(state, report.node)
    clock = (*record.clock, round(now - report.at, 4))[-health.CLOCKS :]
    state = with_record(state, node, replace(record, report=report, clock=clock))
    actions: list[JobAction] = []
    for look in (_device, _storage, _host, _link):
        state, more = look(state, node, report, now)
        actions += more
    reasons = [
        f"{note.data['node']}: {note.data['reason']}" for note in actions if isinstance(note, LogEntry)
    ]
    return state, tuple(actions), "; ".join(reasons)


def _device(state: JobState, node: str, report: HealthReport, now: float) -> Told:
    record = record_of(state, node)
    sick, hot = health.sick_device(record, report.devices), health.hot_device(report.devices)
    known = record.finding(Kind.DEVICE)
    if sick is not None:
        reason, evidence = sick
        errors = max(record.errors, sum(device.errors for device in report.devices))
        state = with_record(state, node, replace(record, errors=errors))
        excuse = "" if _feasible(state, node) else "no plan fits without it"
        action = Remedy.NONE if excuse else _away(state, node)
        why = f"{reason}; {excuse}" if excuse else reason
        return add_finding(state, node, Finding(Kind.DEVICE, action, why, evidence, now))
    if known is not None and known.action in AWAY:
        return state, ()
    if hot is not None:
        reason, evidence = hot
        slower = compute_slowdown(state, node)
        action = Remedy.REBALANCE if slower >= NORMAL else Remedy.NONE
        return add_finding(
            state, node, Finding(Kind.DEVICE, action, reason, {**evidence, "slow": slower}, now)
        )
    if known is not None and known.action is Remedy.RESTART:
        return state, ()  # it was told of by a crash, not by the driver
    return clear_finding(state, node, Kind.DEVICE, "its devices are well again", now)


def _storage(state: JobState, node: str, report: HealthReport, now: float) -> Told:
    found, known = health.full_disk(report, state.policy.health), record_of(state, node).finding(Kind.STORAGE)
    if found is None:
        if known is None or known.action in AWAY or "error" in known.evidence:
            return state, ()
        return clear_finding(state, node, Kind.STORAGE, "there is room again", now)
    reason, evidence, failed = found
    if known is not None and not failed:
        return state, ()
    others = tuple(
        one.report
        for name, one in state.health.items()
        if name in state.members and name != node and one.report
    )
    path = next((disk.path for disk in report.disks if str(evidence["path"]).startswith(disk.path)), "")
    action, why = Remedy.NONE, "training goes on, without new checkpoints" if failed else "nothing failed yet"
    if failed and not health.own_disk(path, report, others):
        why += "; the disk is not this node's alone"
    elif failed and spare_nodes(state) and _feasible(state, node):
        action, why = _away(state, node), "the disk is its own, and a spare is at hand"
    return add_finding(state, node, Finding(Kind.STORAGE, action, f"{reason}; {why}", evidence, now))


def checkpoint_written(state: JobState, now: float) -> Told:
    """A checkpoint is whole: whatever was refused before is written now."""
    actions: list[JobAction] = []
    for node, record in state.health.items():
        known = record.finding(Kind.STORAGE)
        if known is not None and known.action not in AWAY:
            state, more = clear_finding(state, node, Kind.STORAGE, "checkpoints are written again", now)
            actions += more
    return state, tuple(actions)


def _host(state: JobState, node: str, report: HealthReport, now: float) -> Told:
    record, limits = record_of(state, node), state.policy.health
    known = record.finding(Kind.HOST)
    if known is not None and known.action is not Remedy.NONE:
        return state, ()
    found = health.short_of_memory(report, limits) or health.clock_off(record, limits)
    if found is None:
        return clear_finding(state, node, Kind.HOST, "memory and clock are well again", now)
    return add_finding(state, node, Finding(Kind.HOST, Remedy.NONE, found[0], found[1], now))


def _link(state: JobState, node: str, report: HealthReport, now: float) -> Told:
    if not report.links or state.plan is None or report.epoch != state.plan.epoch:
        return state, ()
    busiest, limits, record = (
        max(report.links, key=lambda link: link.nbytes),
        state.policy.health,
        record_of(state, node),
    )
    size = busiest.nbytes / max(busiest.sends, 1)
    rate, by, windows = busiest.best_bytes_per_s, limits.link_factor, limits.link_windows
    pace = linkpace.observe(record.link, busiest.peer, rate, size, by, windows)
    state = with_record(state, node, replace(record, link=pace))
    others = {name: record_of(state, name).link for name in state.members if name != node}
    slower = linkpace.slowness(pace, tuple(others.values()), by, windows, limits.link_least_s)
    if not slower:
        return _link_well(state, node, now) if len(pace.recent) == windows else (state, ())
    known = record_of(state, node).finding(Kind.LINK)
    spare = any(one != node for one in spare_nodes(state))
    relieved = known is not None and known.action is Remedy.REBALANCE and spare
    if not _stable(state) or (known is not None and known.action is not Remedy.NONE and not relieved):
        return state, ()
    evidence: dict[str, Any] = {
        "peer": busiest.peer,
        "bytes_per_s": round(pace.now),
        "usual_bytes_per_s": round(pace.usual),
        "factor": round(slower, 2),
        "sends": busiest.sends,
        "bytes": busiest.nbytes,
        "load": round(report.load, 2),
        "others_bytes_per_s": round(max((other.now for other in others.values()), default=0.0)),
    }
    verdict = choose_link_remedy(state, node, spare=spare)
    if relieved:
        verdict = LinkDecision(Remedy.REPLACE, "a spare came", record_of(state, node).loaded)
    if verdict is None:
        return state, ()  # too few steps since to tell what it costs
    evidence["steps_slower"] = round(verdict.slowdown, 2)
    if verdict.action is Remedy.REBALANCE:
        state = with_record(state, node, replace(record_of(state, node), loaded=verdict.slowdown))
        state = state.of(rebalance=f"link of {node} to {busiest.peer} is {slower:.1f}x slower")
    reason = f"copies to {busiest.peer} go {slower:.1f}x slower than usual; {verdict.reason}"
    return add_finding(state, node, Finding(Kind.LINK, verdict.action, reason, evidence, now))


def _link_well(state: JobState, node: str, now: float) -> Told:
    record = record_of(state, node)
    known = record.finding(Kind.LINK)
    if known is None or known.action in AWAY:
        return state, ()
    before = known.evidence.get("usual_bytes_per_s") or known.evidence.get("others_bytes_per_s", 0)
    if record.link.now * WELL < float(before):
        return state, ()  # with other copies the link is measured anew, but it is still the same link
    if record.loaded != 1.0:
        state = with_record(state, node, replace(record, loaded=1.0))
        state = state.of(rebalance=f"link of {node} is well again")
    return clear_finding(state, node, Kind.LINK, "its link is as fast as before", now)


# ---- the rule of a running job ----


def _stable(state: JobState) -> bool:
    return (
        state.phase is JobPhase.RUNNING
        and state.change is None
        and state.trimmed >= state.epoch
        and not state.joining
    )


def apply_remedies(state: JobState, now: float) -> JobTransition | None:
    """Change the plan for what was found, at the end of the step; let out whose quarantine is over."""
    over = quarantine.release_expired(state, now)
    if over is not None:
        return over
    if not _stable(state) or state.plan is None:
        return None
    used = (*state.plan.nodes(), *(peer for _, peer in state.plan.peers))
    out = [node for node in dict.fromkeys(used) if quarantine.is_quarantined(state, node)]
    if out:
        node = out[0]
        found = next((one for one in record_of(state, node).findings if one.action in AWAY), None)
        text = f"{node} is put aside: {found.reason}" if found else f"{node} is put aside"
        cause = Cause(CauseKind.OTHER, text, (node,))
        return epoch_change.begin_change(state.of(rebalance=""), cause, now, boundary=True)
    if state.rebalance:
        cause = Cause(CauseKind.OTHER, state.rebalance)
        return epoch_change.begin_change(state.of(rebalance=""), cause, now, boundary=True)
    return quarantine.restart_failed_node(state, now)


def record_step_time(state: JobState, seconds: float) -> JobState:
    """Note how long a step took, as who computed it tells: many may be heard of at once."""
    if state.plan is None:
        return state
    known = tuple(one for one in state.durations if one[0] == state.plan.epoch)
    return state.of(durations=(*known, (state.plan.epoch, round(seconds, 5)))[-DURATIONS:])


# ---- pre-flight ----


def admit(state: JobState, report: NodeReport, now: float) -> tuple[JobState, tuple[JobAction, ...], bool]:
    """What the pre-flight of a node that asks to join tells: (state, news, whether it is taken)."""
    flight, node, limits = report.preflight, report.info.node, state.policy.health
    if flight is None:
        return state, (), True
    failed = (*flight.failed, *([] if flight.mode != "strict" else _lame(state, node, flight.score)))
    told: dict[str, Any] = {
        "node": node,
        "ok": not failed,
        "seconds": round(flight.seconds, 3),
        "score": round(flight.score, 2),
        "figures": {c.name: round(c.value, 6) for c in flight.checks},
    }
    record = record_of(state, node)
    if not failed:
        warnings = [c.remedy for c in flight.checks if not c.ok]
        state = with_record(state, node, replace(record, refusals=0, refused_until=0.0, preflight=flight))
        return state, (LogEntry("preflight", {**told, "warnings": warnings}),), True
    reason = "; ".join(f"{c.name}: {c.remedy}" for c in failed)
    again = now < record.refused_until
    record, retry_s = health.refused(record, now, limits)
    refused = Send(node, Refused(reason, round(retry_s, 3)))
    news = LogEntry("preflight", {**told, "reason": reason, "retry_s": round(retry_s, 3)})
    return with_record(state, node, record), (refused,) if again else (news, refused), False


def _lame(state: JobState, node: str, score: float) -> tuple[Check, ...]:
    """Where pre-flight is strict: a node much slower than the others of its kind of device is not taken."""
    kinds = {mb.report.info.device for mb in state.members.values()}
    known = sorted(s for name in state.members if name != node and (s := standing_score(state, name)) > 0)
    middle = known[len(known) // 2] if known else 0.0
    if score <= 0 or len(kinds) > 1 or score >= state.policy.health.lame * middle:
        return ()
    text = f"{score:.3g} where the others have {middle:.3g}: look for a busy or throttled device"
    return (Check("score", score, "", False, True, text),)


def standing_score(state: JobState, node: str) -> float:
    """Score of a node's newest pre-flight; 0: there was none."""
    flight = record_of(state, node).preflight
    return flight.score if flight is not None else 0.0
