"""Quarantine of nodes, and its end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import transition
from elastic.core.health import diagnosis as health
from elastic.core.health.diagnosis import NodeHealth
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, Send
from elastic.core.policy import remediation
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from tests.core.health.test_diagnosis import (
    LIMITS,
    crash_workers,
    finish_step,
    health_notes,
    planned,
    running,
)
from tests.core.state_access import change_of, plan_of


def test_quarantines_double_up_to_the_limit_and_are_forgiven() -> None:
    record, lengths, now = NodeHealth(), [], 0.0
    for _ in range(9):
        record, seconds = health.quarantine(record, now, LIMITS)
        lengths.append(seconds)
        now += seconds
        record = health.release(record, now)
    assert lengths == [min(30.0 * 2**i, LIMITS.quarantine_most_s) for i in range(9)]
    later, seconds = health.quarantine(record, now + 8 * LIMITS.good_s, LIMITS)
    assert seconds == 60.0 and later.quarantines == 2
    assert health.quarantine(record, now + 9 * LIMITS.good_s, LIMITS)[1] == 30.0


@given(st.lists(st.floats(0.0, 5000.0), max_size=12))
def test_a_quarantine_stays_within_its_limits(waits: list[float]) -> None:
    record, now = NodeHealth(), 0.0
    for wait in waits:
        now += wait
        record, seconds = health.quarantine(record, now, LIMITS)
        assert (
            LIMITS.quarantine_s <= seconds <= LIMITS.quarantine_most_s
            and record.until == now + seconds
        )
        record = health.release(record, record.until)
        now = record.quarantine_changed_at
        assert codec.loads(NodeHealth, codec.dumps(record)) == record


def test_a_node_is_considered_again_after_its_quarantine() -> None:
    state, _ = crash_workers(running(), "node1", "signal 11", LIMITS.crashes)
    record = quarantine.record_of(state, "node1")
    state = settled(
        state.of(considered=(state.members["node1"].report.info.incarnation,)), without="node1"
    )
    state, _, _ = transition(state, job.Tick(), record.until - 0.1)
    assert quarantine.is_quarantined(state, "node1") and state.considered
    state, actions, _ = transition(finish_step(state), job.Tick(), record.until + 0.1)
    assert not quarantine.is_quarantined(state, "node1") and state.joining == ("node1",)
    (note,) = health_notes(actions)
    assert note["action"] == "none" and "may be used again" in note["reason"]


def test_a_node_that_crashed_repeatedly_in_a_step_stays_out_until_the_step_is_finished() -> None:
    """If other nodes crash in the same step without it, the node was not the cause."""
    state, _ = crash_workers(running(), "node1", "signal 11", LIMITS.crashes)
    until = quarantine.record_of(state, "node1").until
    state = settled(state, without="node1")
    state, _, _ = transition(state, job.Tick(), until + 3600.0)
    assert quarantine.is_quarantined(state, "node1")
    state, _, _ = transition(finish_step(state), job.Tick(), state.updated_at + 0.1)
    assert not quarantine.is_quarantined(state, "node1")


def settled(state: JobState, without: str) -> JobState:
    """State after the change that removed `without`, whose workers are idle again."""
    from elastic.core.job.epoch_change import plan_request
    from elastic.planning.search.search import make_plan

    members = {}
    for node, mb in state.members.items():
        phase = NodePhase.IDLE if node == without else NodePhase.RUNNING
        mine = replace(mb.report, epoch=state.epoch, phase=phase, able=True, protected=state.epoch)
        members[node] = replace(mb, report=mine, seen=1e9)
    state = state.of(members=members, phase=JobPhase.RUNNING, change=None, trimmed=state.epoch)
    return state.of(plan=make_plan(plan_request(state, state.epoch)))


def test_a_quarantine_ends_if_no_other_node_is_left() -> None:
    """The other nodes are lost during the quarantine."""
    state, _ = crash_workers(running(2), "node1", "signal 11", LIMITS.crashes)
    state = settled(state, "node1")
    assert state.plan is not None and state.plan.nodes() == ("node0",)
    incarnation = state.members["node0"].report.info.incarnation
    for event in (job.ConnectionClosed, job.PortRefused):
        state, _, _ = transition(state, event("node0", incarnation), state.updated_at)
    assert state.phase is JobPhase.HALTING and "node0" not in state.members
    halted = replace(state.members["node1"].report, epoch=state.epoch, phase=NodePhase.HALTED)
    state, actions, _ = transition(state, halted, state.updated_at + 0.1)
    assert not quarantine.is_quarantined(state, "node1"), "it was let out"
    assert any(
        "no plan" in note["reason"] or "nobody" in note["reason"] for note in health_notes(actions)
    )


@pytest.mark.parametrize("former", [0, 6])
def test_a_failed_node_that_a_paused_job_needs_begins_anew_at_once(former: int) -> None:
    """It keeps its vault. Its quarantine lasts for half a minute, or for half an hour."""
    state = settled(running(2), "")
    record = replace(NodeHealth(), quarantines=former, quarantine_changed_at=state.updated_at)
    state = quarantine.with_record(state, "node1", record)
    report = replace(state.members["node1"].report, phase=NodePhase.FAILED, able=False)
    report = replace(report, crash_count=LIMITS.crashes + 1, cause="signal 11")
    state, _, _ = transition(state, report, state.updated_at + 0.01)
    record, began = quarantine.record_of(state, "node1"), state.updated_at
    assert record.quarantined and record.until == began + LIMITS.quarantine_s * 2.0**former
    change = change_of(state)
    state = state.of(phase=JobPhase.PAUSED, change=change, blocked=(), members={
        "node1": state.members["node1"], "node0": draining(state.members["node0"])
    })  # fmt: skip
    state, actions, reason = transition(state, job.Tick(), began + 0.1)
    assert "it begins anew" in reason and "node1" not in state.members
    fenced = [a for a in actions if isinstance(a, Send) and isinstance(a.message, m.Fenced)]
    assert [send.node for send in fenced] == ["node1"]
    assert [node for node, _ in state.absent] == ["node1"], "it will be back with its copies"


def test_a_failed_node_without_a_quarantine_begins_anew_at_once_in_a_paused_job() -> None:
    """No plan fitted without it when it crashed."""
    state = settled(running(2), "")
    report = replace(state.members["node1"].report, phase=NodePhase.FAILED, able=False)
    members = {
        "node0": draining(state.members["node0"]),
        "node1": replace(state.members["node1"], report=report),
    }
    began = state.updated_at
    record = replace(NodeHealth(), crashes=(began,), quarantine_changed_at=1.0)
    state = quarantine.with_record(state, "node1", record)
    state = state.of(phase=JobPhase.PAUSED, members=members, blocked=())
    state, _, reason = transition(state, job.Tick(), began + 0.1)
    assert "it begins anew" in reason and "node1" not in state.members
    assert quarantine.is_quarantined(state, "node1"), "so that the next pause is longer"


def test_a_node_that_fails_again_without_progress_begins_anew_after_a_pause() -> None:
    """No step was finished since it last began anew. A finished step ends the pause."""
    state = settled(running(2), "")
    began = state.updated_at
    record = replace(NodeHealth(), quarantined=True, until=began + 3600.0, crashes=(began + 100.0,))
    record = replace(record, quarantine_changed_at=began, anew_after=state.newest_step)
    state = quarantine.with_record(state, "node1", record)
    member = state.members["node1"]
    failed = replace(member.report, phase=NodePhase.FAILED, able=False)
    state = state.of(members={**state.members, "node1": replace(member, report=failed)})
    pause_s = LIMITS.quarantine_s
    assert quarantine.restart_needed_node(state, began + 100.0 + pause_s - 0.1) is None
    again = quarantine.restart_needed_node(state, began + 100.0 + pause_s + 0.1)
    assert again is not None and again[0].health["node1"].anew_after == state.newest_step
    assert quarantine.restart_needed_node(finish_step(state), began + 100.0) is not None


def test_spares_that_crash_for_ever_begin_anew_after_growing_pauses() -> None:
    """They crash at the same time, and training does not need them."""
    state = running(3, 1)
    state = state.of(plan=replace(plan_of(state), peers=()))  # they keep no backups
    (holder,) = plan_of(state).nodes()
    spares = [node for node in state.members if node != holder]
    begun: dict[str, list[float]] = {node: [] for node in spares}
    began = state.updated_at
    while state.updated_at - began < 400.0:
        state = finish_step(state)
        incarnation = state.members[holder].report.info.incarnation
        beat = job.Heartbeat(holder, incarnation, state.newest_step, 0, signs=state.newest_step)
        state, _, _ = transition(state, beat, state.updated_at + 0.1)
        for node in spares:
            was = state.members[node].report
            count = was.crash_count + 1
            phase = NodePhase.FAILED if count > LIMITS.crashes else NodePhase.STARTING
            report = replace(was, phase=phase, able=False, crash_count=count, cause="signal 11")
            report = report if was.phase is not NodePhase.FAILED else was
            state, actions, _ = transition(state, report, state.updated_at + 0.5)
            orders = [a for a in actions if isinstance(a, Send)]
            for name in (a.node for a in orders if isinstance(a.message, m.Fenced)):
                begun[name].append(state.updated_at - began)
                info = replace(was.info, node=name, incarnation=f"{name}.{len(begun[name])}")
                fresh = m.NodeReport(info, NodePhase.EMPTY, 0)
                state, _, _ = transition(state, fresh, state.updated_at)
        assert state.ending is None and state.phase is JobPhase.RUNNING
    for times in begun.values():
        pauses = [later - earlier for earlier, later in pairwise([0.0, *times])]
        wanted = [LIMITS.quarantine_s * 2.0**number for number in range(len(pauses))]
        assert len(pauses) == 3 and pauses == pytest.approx(wanted, abs=8.0)


def test_a_failed_node_that_is_excused_begins_anew_after_a_pause() -> None:
    """The others crashed at the same time, and train again."""
    state = planned(running(), "node1")
    record = replace(NodeHealth(), crashes=(state.updated_at,), quarantine_changed_at=1.0)
    failed = replace(state.members["node1"].report, phase=NodePhase.FAILED, able=False)
    members = {**state.members, "node1": replace(state.members["node1"], report=failed)}
    state = quarantine.with_record(state.of(members=members), "node1", record)
    began = state.updated_at
    state, actions, _ = transition(state, job.Tick(), began + 0.1)
    assert quarantine.is_quarantined(state, "node1") and "node1" in state.members
    (note,) = health_notes(actions)
    assert note["action"] == "quarantine" and "crashed too often" in note["reason"]
    state, _, reason = transition(state, job.Tick(), began + LIMITS.quarantine_s + 0.2)
    assert "it begins anew" in reason and "node1" not in state.members


def draining(member: job.Member) -> job.Member:
    """The node can take no stage, because it must leave now."""
    return replace(member, draining=True, drain_deadline=1.0)


@pytest.mark.parametrize("trained", [True, False])
def test_a_flapping_node_is_quarantined_when_it_returns(trained: bool) -> None:
    state, notes = running().of(trained=trained), []
    for _ in range(LIMITS.departures):
        state, more = remediation.node_lost(state, "node1", "connection closed", state.updated_at)
        notes += health_notes(more)
    (note,) = notes
    assert (note["class"], note["action"]) == ("host", "quarantine") and note["evidence"][
        "departures"
    ] == 3
    assert quarantine.is_quarantined(state, "node1")


def test_a_network_that_loses_all_nodes_leads_to_no_quarantine() -> None:
    state = running()
    for _ in range(LIMITS.departures + 1):
        for node in ("node0", "node1", "node2"):
            state, actions = remediation.node_lost(state, node, "silent", state.updated_at)
            assert not actions
    assert not any(record.quarantined for record in state.health.values())


def test_earlier_losses_of_another_node_excuse_no_flapping_node() -> None:
    state = running()
    for _ in range(2):
        state, _ = remediation.node_lost(state, "node1", "silent", state.updated_at)
    now = state.updated_at + 86400.0
    for number in range(LIMITS.departures):
        state, actions = remediation.node_lost(state, "node2", "silent", now + number)
    assert health_notes(actions)[-1]["action"] == "quarantine"
    assert quarantine.is_quarantined(state, "node2")


def test_records_of_departed_nodes_are_dropped() -> None:
    state = running()
    for number in range(500):
        state, _ = remediation.node_lost(
            state, f"spot-{number}", "gone", state.updated_at + 100.0 * number
        )
    assert len(state.health) <= len(state.members) + remediation.KEPT_MORE + 1
