"""Decisions about bad paths: evidence, the nodes that are left out, pauses and returns."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction
from elastic.core.health.path_fault import PathFault, pair_of
from elastic.core.job import quarantine, reachability
from elastic.core.job import state as job
from elastic.core.job.epoch_change import (
    _solve_over_good_paths,
    candidates,
    resume_if_feasible,
)
from elastic.core.job.reachability import covers, forbidden_fetches
from elastic.core.job.state import CauseKind, JobPhase, JobState, LogEntry
from elastic.core.protocol.health_report import HealthReport, UnreachablePeer
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from elastic.domain.types import STATE, Copy, PartialRun, Recipe
from tests.core.health.test_diagnosis import planned, short_of_memory
from tests.core.state_access import assignment_of, change_of, plan_of
from tests.core.world.world import World


@functools.cache
def running(nodes: int = 4, max_nodes: int = 9) -> JobState:
    """A job of one pipeline in its first epoch, whose copies are protected."""
    world = World(7, nodes, shape="1", max_nodes=max_nodes, min_nodes=min(nodes, max_nodes))
    found: list[JobState] = []

    def look() -> None:
        state = world.coordinator.state
        if state.phase is JobPhase.RUNNING and state.stable and not found:
            found.append(state)
        world.at(0.01, look)

    look()
    world.run()
    return found[0]


def report(state: JobState, node: str, *peers: str, **changes: Any) -> HealthReport:
    """A health report of `node` that names `peers` as unreachable."""
    info = state.members[node].report.info
    vault = changes.pop("vault", "")
    bad = tuple(
        UnreachablePeer(peer, vault or state.members[peer].report.info.vault, 4.0, "timed out")
        for peer in peers
    )
    return replace(
        HealthReport(node, info.incarnation, state.updated_at, unreachable=bad), **changes
    )


def after(state: JobState, *events: Any, seconds: float = 0.1) -> tuple[JobState, list[LogEntry]]:
    """Apply events, `seconds` apart; return the state and the log."""
    log: list[LogEntry] = []
    for event in events:
        state, actions, _ = transition(state, event, state.updated_at + seconds)
        log += [action for action in actions if isinstance(action, LogEntry)]
    return state, log


def wait(state: JobState, seconds: float) -> JobState:
    """Let time pass; the members send heartbeats."""
    end = state.updated_at + seconds
    while state.updated_at < end:
        for node, member in list(state.members.items()):
            beat = job.Heartbeat(node, member.report.info.incarnation, 1, 0)
            state = transition(state, beat, state.updated_at)[0]
        state = transition(state, job.Tick(), state.updated_at + 0.25)[0]
    return state


@pytest.mark.parametrize(("evidence", "ago_s", "excused"), [
    ({quarantine.SUSPECTED: True}, 5.0, True),
    ({quarantine.SUSPECTED: True}, 500.0, False),
    ({}, 5.0, False),
])  # fmt: skip
def test_a_bad_path_excuses_a_node_that_was_suspected_before(
    evidence: dict[str, bool], ago_s: float, excused: bool
) -> None:
    state = running().of(updated_at=1000.0)
    members = {node: replace(mb, seen=1000.0) for node, mb in state.members.items()}
    node, peer = sorted(plan_of(state).nodes())[:2]
    finding = Finding(FaultClass.HOST, HealthAction.QUARANTINE, "x", evidence, 1000.0 - ago_s)
    state, _ = quarantine.add_finding(state.of(members=members), node, finding)
    held = replace(quarantine.record_of(state, node), until=2000.0)
    state = quarantine.with_record(state, node, held)
    state, log = after(state, report(state, node, peer))
    assert quarantine.is_quarantined(state, node) is not excused
    assert any("may be used again" in str(entry.data.get("reason")) for entry in log) is excused


def test_a_bad_path_excuses_the_failed_epochs_of_its_nodes() -> None:
    state = running()
    node, peer = sorted(plan_of(state).nodes())[:2]
    state = state.of(watch=replace(state.watch, blamed={node: 1, peer: 2, "node9": 1}))
    state, _ = after(state, report(state, node, peer))
    assert state.watch.blamed == {}, "node9 may suffer from another bad path"


def test_a_bad_path_of_the_plan_ends_the_epoch_and_is_named() -> None:
    state = running()
    first, second = sorted(plan_of(state).nodes())[:2]
    state, log = after(state, report(state, first, second), report(state, second, first))
    assert state.phase is JobPhase.HALTING and not change_of(state).boundary
    (cause,) = change_of(state).causes
    assert cause.kind is CauseKind.CONTACT and cause.nodes == (first, second)
    assert f"{first} and {second} cannot reach each other" in cause.text
    events = [entry.data for entry in log if entry.kind == "health"]
    assert [event["class"] for event in events] == ["path", "path"]
    assert events[-1]["evidence"]["directions"] == [f"{first} -> {second}", f"{second} -> {first}"]
    for node in (first, second):
        assert [one.kind.value for one in state.health[node].findings] == ["path"]
    assert codec.loads(JobState, codec.dumps(state)) == state


@pytest.mark.parametrize("changes", [{"vault": "former:1"}, {"incarnation": "former"}])
def test_former_evidence_counts_for_nothing(changes: dict[str, str]) -> None:
    state = running()
    first, second = plan_of(state).nodes()[:2]
    after_, log = after(state, report(state, first, second, **changes))
    assert not after_.paths and after_.phase is JobPhase.RUNNING and not log


def test_a_report_counts_until_the_next_one_is_due() -> None:
    """A node whose path is bad reports at least every 20 s."""
    state = running()
    first, second = sorted(plan_of(state).nodes())[:2]
    state, _ = after(state, report(state, first, second))
    state = wait(state, 25.0)
    (fault,) = reachability.bad_paths(state, state.members)
    assert fault.well_since == 0.0


def test_a_node_that_stopped_reporting_accuses_nobody_for_ever() -> None:
    state = running()
    first, second = sorted(plan_of(state).nodes())[:2]
    state, _ = after(state, report(state, first, second))
    assert reachability.left_out_now(state, [first, second])
    later = state.updated_at + reachability.MAX_AGE_S + 1.0
    reviewed = reachability.review_paths(state, later)
    assert reviewed is not None
    state = reviewed[0]
    assert all(fault.well_since == later for fault in state.paths) and state.paths


def test_reports_about_nobody_and_oneself_change_nothing() -> None:
    state = running()
    first = plan_of(state).nodes()[0]
    info = state.members[first].report.info
    for peer in (first, "nobody"):
        bad = UnreachablePeer(peer, info.vault, 4.0, "")
        odd = replace(report(state, first), unreachable=(bad,))
        assert not after(state, odd)[0].paths


def test_a_spare_that_cannot_reach_a_stage_changes_no_plan() -> None:
    state = running(4, 3)
    held = plan_of(state).nodes()
    (spare,) = state.members.keys() - set(held)
    for other in held:
        bad, log = after(state, report(state, spare, other))
        assert [entry.kind for entry in log][:1] == ["health"]
        assert spare not in {member.node for member in candidates(bad)}, "the spare is left out"
        backup = (other, spare) in plan_of(state).peers
        assert (bad.phase is JobPhase.HALTING) == backup, "only a backup needs the path"


def test_one_node_that_reaches_nobody_is_left_out_itself() -> None:
    state = running()
    names = sorted(state.members)
    state, _ = after(state, report(state, names[0], *names[1:]))
    assert covers(state, names) == (frozenset((names[0],)),)


def test_the_same_node_stays_out_while_another_pair_becomes_bad() -> None:
    state = running()
    a, b, c, d = sorted(state.members)
    state, _ = after(state, report(state, a, b))
    out = covers(state, [a, b, c, d])[0]
    state = state.of(left_out=tuple(out))
    state, _ = after(state, report(state, c, d))
    assert out <= covers(state, [a, b, c, d])[0]


def test_a_path_is_on_hold_before_it_is_used() -> None:
    state = running()
    a, b = sorted(state.members)[:2]
    lease_s = state.policy.lease_s
    state, _ = after(state, report(state, a, b), report(state, a))
    state = wait(state, lease_s - 1.0)
    assert not state.paths[0].usable and len(candidates(state)) == 3
    state = wait(state, 2.0)
    assert state.paths[0].usable and len(candidates(state)) == 4
    assert not state.health[a].findings and not state.health[b].findings
    keys = {state.members[node].report.info.incarnation for node in (a, b)}
    assert not keys & set(state.considered), "both are considered like new nodes"


def halted(state: JobState) -> tuple[JobState, list[LogEntry]]:
    """Let all members acknowledge the order to halt; return the state and the log."""
    reports = [mb.report for mb in state.members.values()]
    halt: dict[str, Any] = {"epoch": state.epoch, "phase": NodePhase.HALTED}
    return after(state, *(replace(report, **halt) for report in reports))


@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize("paused", [False, True])
def test_a_path_on_hold_is_used_at_once_if_no_plan_fits_without_it(
    times: int, paused: bool
) -> None:
    """Two nodes, and both are needed: the job pauses while the path is bad, and no longer."""
    state = short_of_memory(3)
    members = {node: mb for node, mb in state.members.items() if node != "node2"}
    pair, now = ("node0", "node1"), state.updated_at
    former = PathFault(pair, (pair,), "no answer", now - 90, now - 60, usable=True, times=times)
    state = planned(state.of(members=members)).of(paths=(former,), record=None)
    state, _ = after(state, report(state, *pair))
    if paused:
        state, _ = halted(state)
        assert state.phase is JobPhase.PAUSED
        state, _ = after(state, *[job.Tick()] * 10)
        assert state.phase is JobPhase.PAUSED, "the path is bad"
    state, log = after(state, report(state, "node0"))
    assert state.phase is JobPhase.HALTING and state.paths[0].usable is paused
    state, more = halted(state)
    assert state.phase is JobPhase.INSTALLING and not state.left_out
    assert set(plan_of(state).nodes()) == set(pair)
    assert state.paths[0].usable and state.paths[0].times == times + 1, "the next hold is longer"
    assert any("reach each other again" in str(one.data.get("reason")) for one in (*log, *more))


def test_a_bad_path_is_forgotten_with_a_node_or_after_a_good_while() -> None:
    state = running()
    a, b, *_ = sorted(state.members)
    bad, _ = after(state, report(state, a, b))
    gone, _ = after(bad.of(members={n: mb for n, mb in bad.members.items() if n != b}), job.Tick())
    assert not gone.paths and not gone.health[a].findings
    well, _ = after(bad, report(state, a))
    well = wait(well, 2 * state.policy.lease_s)
    assert well.paths and well.paths[0].usable
    later = well.of(
        members={n: replace(mb, seen=mb.seen + 9999) for n, mb in well.members.items()},
        updated_at=well.updated_at + 9999,
    )
    assert not after(later, job.Tick())[0].paths


def test_fetches_over_a_bad_path_are_seen() -> None:
    state = running()
    assignment = assignment_of(state)
    node, other, third = assignment.plan.nodes()[:3]
    copy = Copy(
        kind=STATE,
        layer=0,
        shard=0,
        step=1,
        epoch=1,
        owner=other,
        sequence=1,
        nbytes=8,
        checksum="",
        node=other,
    )
    recipe = Recipe(layer=0, shard=0, version=1, state=copy)
    run = PartialRun(0, 0, 0, assignment.plan.n_layers, inputs=(copy,))
    bad, _ = after(state, report(state, node, other))
    for changed, hidden in (
        (replace(assignment, recipes=((node, recipe),)), {(other, copy.key)}),
        (replace(assignment, recipes=((third, recipe), (other, recipe))), set()),
        (replace(assignment, recipes=(), partial=(run,)), {(other, copy.key)}),
    ):
        assert forbidden_fetches(bad, changed) == hidden
        assert forbidden_fetches(state, changed) == frozenset()


def test_copies_behind_a_bad_path_are_fetched_from_another_node() -> None:
    """Each node takes layers of which it has no copy: their holder and its keeper, the next node,
    have them."""
    world = World(5, 4, steps=400, shape="1", backup="stream+snapshot")
    world.run(limit=4.0)
    state = world.coordinator.state
    members = {
        node: replace(mb, report=replace(mb.report, inventory=world.agents[node].inventory()))
        for node, mb in state.members.items()
    }
    state, plan = state.of(members=members), plan_of(state)
    stages = plan.pipelines[0].stages
    moved = tuple(replace(one, unit=stages[at - 2].unit) for at, one in enumerate(stages))
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=moved),))
    chosen = _solve_over_good_paths(state, plan, "")
    fetches = {(node, one.node) for node, recipe in chosen.recipes for one in recipe.states}
    assert len(fetches) >= 4 and all(node != holder for node, holder in fetches)
    for fetch in fetches:
        fault = PathFault(pair_of(*fetch), (fetch,), "no answer", state.updated_at)
        bad = state.of(paths=(fault,))
        assert forbidden_fetches(bad, chosen)
        other = _solve_over_good_paths(bad, plan, "a bad path")
        assert other.step == chosen.step and not forbidden_fetches(bad, other)


def test_a_paused_job_tries_every_choice_of_nodes_to_leave_out() -> None:
    """The first choice keeps two small nodes, which have no room for the model."""
    world = World(5, 3, steps=400, shape="auto", backup="stream+snapshot", min_nodes=2)
    world.run(limit=5.0)
    state = world.coordinator.state
    memory = {"node0": 40, "node1": 40, "node2": 104}
    members = {}
    for node, member in state.members.items():
        info = replace(member.report.info, memory_bytes=memory[node])
        members[node] = replace(member, report=replace(member.report, info=info))
    fault = PathFault(("node0", "node2"), (("node0", "node2"),), "no answer", state.updated_at)
    state = state.of(members=members, paths=(fault,), plan=None, phase=JobPhase.PAUSED)
    assert covers(state, list(members)) == (frozenset({"node2"}), frozenset({"node0"}))
    resumed = resume_if_feasible(state, state.updated_at)
    assert resumed is not None and resumed[0].phase is JobPhase.HALTING
    small = {n: mb for n, mb in members.items() if n != "node2"}
    assert resume_if_feasible(state.of(members=small), state.updated_at) is None


def test_a_job_that_pauses_because_of_a_path_releases_a_node_that_becomes_ready() -> None:
    """No plan fits the two nodes, which cannot reach each other, and the third one still starts. It
    would be in quarantine for an hour."""
    state = planned(short_of_memory(3), "node2")
    found = Finding(FaultClass.HOST, HealthAction.QUARANTINE, "it crashed", {}, state.updated_at)
    record = replace(quarantine.record_of(state, "node2"), quarantined=True, until=1e9)
    state = quarantine.with_record(state, "node2", record.found(found))
    state, _ = after(state, report(state, "node0", "node1"))
    assert state.phase is JobPhase.HALTING and state.paths
    for node, phase in (("node2", NodePhase.STARTING), ("node0", NodePhase.HALTED),
                        ("node1", NodePhase.HALTED)):  # fmt: skip
        mine = replace(state.members[node].report, epoch=state.epoch, phase=phase)
        state, _ = after(state, mine)
    assert state.phase is JobPhase.PAUSED and quarantine.is_quarantined(state, "node2")
    state, _ = after(state, *[job.Tick()] * 10)
    assert state.phase is JobPhase.PAUSED, "nothing has changed"
    ready = replace(state.members["node2"].report, phase=NodePhase.IDLE, able=True)
    state, _ = after(state, ready, job.Tick())
    assert state.phase is JobPhase.HALTING and not quarantine.is_quarantined(state, "node2")


@pytest.mark.parametrize(
    ("phase", "ends"), [(JobPhase.INSTALLING, True), (JobPhase.RUNNING, False)]
)
def test_an_installation_that_reads_over_a_bad_path_ends(phase: JobPhase, ends: bool) -> None:
    """The copy is in the vault of a node without layers. A running plan has read it already."""
    state = running()
    reader, other = plan_of(state).nodes()[:2]
    copy = Copy(
        kind=STATE, layer=0, shard=0, step=1, epoch=1, owner=other, sequence=1, nbytes=8,
        checksum="", node="node9",
    )  # fmt: skip
    recipe = Recipe(layer=0, shard=0, version=1, state=copy)
    assignment = replace(assignment_of(state), recipes=((reader, recipe),))
    fault = PathFault(pair_of(reader, "node9"), (), "no answer", state.updated_at)
    found = reachability.path_cause(state.of(phase=phase, assignment=assignment, paths=(fault,)))
    assert (found is not None) is ends
    if found is not None:
        assert "cannot reach each other" in found.text and set(found.nodes) == {reader, "node9"}
