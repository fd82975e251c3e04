"""Reachability: plans never have both nodes of a pair that cannot reach each other.

The fewest nodes that are in all bad pairs are left out: they get no layers and keep no new copies.
They remain members and keep their vaults. A node that is left out is considered like a new member
once its paths have been well for a while (`elastic.core.health.path_fault`). A path that is well is
used at once if no plan fits without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.health.path_fault import Pair, PathFault, judge, minimum_covers, pair_of
from elastic.core.job import quarantine
from elastic.core.job.quarantine import Findings, record_of, with_record
from elastic.core.job.state import (
    Cause,
    CauseKind,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
)
from elastic.core.protocol.health_report import HealthReport, UnreachablePeer
from elastic.core.recovery.solver import copies_of
from elastic.domain.types import Assignment, Copy
from elastic.planning.backup.peer_assignment import natural

CopyPlace = tuple[str, str]
"""(node of the vault, `Copy.key`)"""
MAX_COVERS = 4
"""Maximum number of choices of nodes to leave out for which a plan is made."""
MAX_AGE_S = 90.0
"""An older health report says nothing about the present. A node whose path is bad sends one at
least every 20 s (`elastic.agent.health.monitor`)."""


# ---- evidence ----


def paths_reported(state: JobState, report: HealthReport, now: float) -> Findings:
    """Record the peers that a member cannot reach."""
    pairs = (pair_of(report.node, one.peer) for one in report.unreachable)
    return _judge(state, [pair for pair in pairs if pair[0] != pair[1]], now)


def review_paths(state: JobState, now: float) -> JobTransition | None:
    """Judge the known faults again: a path is well, its hold is over, or a node has left."""
    if not state.paths or state.ending is not None:
        return None
    after, actions = _judge(state, [fault.nodes for fault in state.paths], now)
    if after is state:
        return None
    reasons = (str(one.data["reason"]) for one in actions if isinstance(one, LogEntry))
    return after, actions, "; ".join(reasons)


def _judge(state: JobState, pairs: Iterable[Pair], now: float) -> Findings:
    """Update the faults of `pairs` from the newest reports of both nodes."""
    faults = {fault.nodes: fault for fault in state.paths}
    entries: list[JobAction] = []
    changed: list[Pair] = []
    for pair in dict.fromkeys(pairs):
        known = faults.pop(pair, None)
        fault = _fault_now(state, pair, known, now)
        if fault is not None:
            faults[pair] = fault
        if fault is not known:
            changed.append(pair)
            entries += _entries(known, fault)
        if fault is not None and fault.since == now:
            state, pardons = _pardoned(state, fault)
            entries += pardons
    if not changed:
        return state, ()
    return _with_faults(state, faults, changed), tuple(entries)


def _with_faults(
    state: JobState, faults: dict[Pair, PathFault], changed: Collection[Pair]
) -> JobState:
    """Set the known faults. Nodes of paths that are usable now are considered like new nodes."""
    freed = {node for pair in changed if pair not in faults or faults[pair].usable for node in pair}
    freed &= state.members.keys()
    keys = {state.members[node].report.info.incarnation for node in freed}
    state = state.of(
        paths=tuple(sorted(faults.values(), key=lambda fault: fault.nodes)),
        considered=tuple(key for key in state.considered if key.partition("/")[0] not in keys),
    )
    for node in sorted({node for pair in changed for node in pair}):
        state = _with_finding(state, node)
    return state


def end_holds(state: JobState, why: str) -> JobTransition | None:
    """Use all paths that are well but on hold, because no plan fits without them. None: no path is
    on hold."""
    faults = {fault.nodes: fault for fault in state.paths}
    held = [fault for fault in state.paths if fault.well_since and not fault.usable]
    if not held:
        return None
    entries: list[JobAction] = []
    for fault in held:
        faults[fault.nodes] = replace(fault, usable=True)
        entries += _entries(fault, faults[fault.nodes])
    names = ", ".join(" and ".join(fault.nodes) for fault in held)
    state = _with_faults(state, faults, [fault.nodes for fault in held])
    return state, tuple(entries), f"the path between {names} is used at once: {why}"


def _pardoned(state: JobState, fault: PathFault) -> Findings:
    """End the quarantines of nodes that were suspected before their bad path was known, and forget
    the failed epochs for which they were blamed."""
    actions: list[JobAction] = []
    blamed = {node: n for node, n in state.watch.blamed.items() if node not in fault.nodes}
    if blamed != state.watch.blamed:
        state = state.of(watch=replace(state.watch, blamed=blamed))
    for node in fault.nodes:
        since = fault.since - 2 * state.limits.path_s
        found = quarantine.pardon(state, node, fault.since, since, fault.text)
        if found is not None:
            state, entries, _ = found
            actions += entries
    return state, tuple(actions)


def _fault_now(
    state: JobState, pair: Pair, known: PathFault | None, now: float
) -> PathFault | None:
    """Return the pair's fault; None: there is none, or a node of the pair is not a member."""
    if not all(node in state.members for node in pair):
        return None
    good_s, lease_s = state.policy.health.good_s, state.policy.lease_s
    fault = judge(known, pair, _reports(state, pair, now), now, lease_s)
    forgotten = fault is not None and fault.usable and now - fault.well_since > good_s
    return None if forgotten else fault


def _reports(state: JobState, pair: Pair, now: float) -> tuple[tuple[str, UnreachablePeer], ...]:
    """Return (node, its report) for each node of the pair that now fails to reach the other."""
    found = []
    for node, other in (pair, pair[::-1]):
        record = record_of(state, node)
        report = record.report
        if report is None or report.incarnation != state.members[node].report.info.incarnation:
            continue
        arrived = report.at + (record.clock[-1] if record.clock else 0.0)
        if now - arrived > MAX_AGE_S:
            continue
        vault = state.members[other].report.info.vault
        found += [(node, u) for u in report.unreachable if (u.peer, u.vault) == (other, vault)]
    return tuple(found)


def _entries(known: PathFault | None, fault: PathFault | None) -> tuple[LogEntry, ...]:
    """Return the log entry of a change: a fault begins, spreads or ends."""
    shown = fault or known
    assert shown is not None
    first, second = shown.nodes
    evidence: dict[str, object] = {"peer": second, "times": shown.times}
    if fault is None or fault.usable:
        if known is None or known.usable:
            return ()
        evidence["well"] = True
        reason = f"{first} and {second} reach each other again"
        if fault is None:
            reason = f"{first} or {second} has left"
    elif fault.well_since:
        return ()
    else:
        evidence["directions"] = [f"{one} -> {other}" for one, other in fault.directions]
        reason = fault.text
    data = {
        "node": first,
        "class": FaultClass.PATH.value,
        "action": HealthAction.NONE.value,
        "evidence": evidence,
        "reason": reason,
    }
    return (LogEntry("health", data),)


def _with_finding(state: JobState, node: str) -> JobState:
    """Let the health record of the node show its bad paths."""
    record = record_of(state, node)
    bad = [fault for fault in state.paths if node in fault.nodes and not fault.usable]
    if not bad:
        known = record.finding(FaultClass.PATH) is not None
        return with_record(state, node, record.without(FaultClass.PATH)) if known else state
    peers = [other for fault in bad for other in fault.nodes if other != node]
    reason = "; ".join(fault.text for fault in bad)
    at = min(fault.since for fault in bad)
    finding = Finding(FaultClass.PATH, HealthAction.NONE, reason, {"peers": peers}, at)
    return with_record(state, node, record.found(finding))


# ---- decisions ----


def bad_paths(state: JobState, nodes: Collection[str]) -> tuple[PathFault, ...]:
    """Return the faults between two of `nodes`, also those that are on hold."""
    return tuple(
        fault
        for fault in state.paths
        if not fault.usable and all(node in nodes for node in fault.nodes)
    )


def path_cause(state: JobState) -> Cause | None:
    """Return the cause to end the epoch if its plan needs a bad path, else None.

    A plan needs the paths between all nodes with layers, and those to their backup peers. Its
    installation needs the paths to the vaults from which it reads, also of nodes without layers.
    """
    assert state.plan is not None
    if not state.paths:
        return None
    held = set(state.plan.nodes())
    needed = {pair_of(*pair) for pair in state.plan.peers}
    if state.phase is JobPhase.INSTALLING and state.assignment is not None:
        needed |= {pair_of(node, copy.node) for node, copy in _reads(state.assignment)}
    faults = (fault for fault in state.paths if not fault.usable)
    bad = [fault for fault in faults if held.issuperset(fault.nodes) or fault.nodes in needed]
    if not bad:
        return None
    nodes = dict.fromkeys(node for fault in bad for node in fault.nodes)
    return Cause(CauseKind.CONTACT, "; ".join(fault.text for fault in bad), tuple(nodes))


def covers(state: JobState, nodes: Collection[str]) -> tuple[frozenset[str], ...]:
    """Return the sets of `nodes` that may be left out because of bad paths, the best first.

    Each is as small as possible. Better is a set with nodes that are left out now, then one with
    few nodes of the plan, then one with the last nodes. (frozenset(),) if no path is bad.
    """
    pairs = frozenset(fault.nodes for fault in bad_paths(state, nodes))
    held = frozenset(state.plan.nodes() if state.plan is not None else ())
    out = frozenset(state.left_out)

    def last_nodes(cover: frozenset[str]) -> list[int]:
        order = sorted(nodes, key=natural, reverse=True)
        return sorted(order.index(node) for node in cover)

    def rank(cover: frozenset[str]) -> tuple[int, int, list[int]]:
        return -len(cover & out), len(cover & held), last_nodes(cover)

    return tuple(sorted(minimum_covers(pairs), key=rank)[:MAX_COVERS])


def left_out_now(state: JobState, nodes: Collection[str]) -> frozenset[str]:
    """Return the nodes that plans over `nodes` leave out because of bad paths."""
    return covers(state, nodes)[0] if state.paths else frozenset()


def forbidden_fetches(state: JobState, assignment: Assignment) -> frozenset[CopyPlace]:
    """Return the copies that `assignment` reads over a bad path."""
    bad = {fault.nodes for fault in state.paths if not fault.usable}
    if not bad:
        return frozenset()
    return frozenset(
        (copy.node, copy.key)
        for node, copy in _reads(assignment)
        if pair_of(node, copy.node) in bad
    )


def _reads(assignment: Assignment) -> list[tuple[str, Copy]]:
    """Return (node that reads, copy) for each copy that `assignment` uses."""
    reads = [(node, copy) for node, recipe in assignment.recipes for copy in copies_of(recipe)]
    for run in assignment.partial:
        stages = assignment.plan.pipelines[run.pipeline].stages
        readers = {s.unit.node for s in stages if s.first < run.last and s.last > run.first}
        reads += [(node, copy) for node in readers for copy in (*run.inputs, *run.gradients)]
    return reads
