"""Nodes that are put aside for a while, and let out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import transition
from elastic.core.health import diagnosis as health
from elastic.core.health.diagnosis import Record
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, NodeReported
from elastic.core.policy import remediation as remedies
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from tests.core.health.test_diagnosis import LIMITS, fall, running, told


def test_quarantines_double_up_to_the_most_and_are_forgiven() -> None:
    record, lengths, now = Record(), [], 0.0
    for _ in range(9):
        record, seconds = health.quarantine(record, now, LIMITS)
        lengths.append(seconds)
        now += seconds
        record = health.released(record, now)
    assert lengths == [min(30.0 * 2**i, LIMITS.quarantine_most_s) for i in range(9)]
    later, seconds = health.quarantine(record, now + 8 * LIMITS.good_s, LIMITS)
    assert seconds == 60.0 and later.quarantines == 2
    assert health.quarantine(record, now + 9 * LIMITS.good_s, LIMITS)[1] == 30.0


@given(st.lists(st.floats(0.0, 5000.0), max_size=12))
def test_a_quarantine_is_never_outside_its_bounds(waits: list[float]) -> None:
    record, now = Record(), 0.0
    for wait in waits:
        now += wait
        record, seconds = health.quarantine(record, now, LIMITS)
        assert LIMITS.quarantine_s <= seconds <= LIMITS.quarantine_most_s and record.until == now + seconds
        record = health.released(record, record.until)
        now = record.offended
        assert codec.loads(Record, codec.dumps(record)) == record


def test_a_node_out_of_quarantine_is_considered_again() -> None:
    state, _ = fall(running(), "node1", "signal 11", LIMITS.crashes)
    record = quarantine.record_of(state, "node1")
    state = settled(state.of(considered=(state.members["node1"].report.info.incarnation,)), without="node1")
    state, _, _ = transition(state, job.Tick(), record.until - 0.1)
    assert quarantine.is_quarantined(state, "node1") and state.considered
    state, actions, _ = transition(state, job.Tick(), record.until + 0.1)
    assert not quarantine.is_quarantined(state, "node1") and state.joining == ("node1",)
    (note,) = told(actions)
    assert note["action"] == "none" and "may be used again" in note["reason"]


def settled(state: JobState, without: str) -> JobState:
    """As after the change that took `without` out: its workers are there again, and idle."""
    from elastic.core.job.epoch_change import plan_request
    from elastic.planning.search.search import make_plan

    members = {}
    for node, mb in state.members.items():
        phase = NodePhase.IDLE if node == without else NodePhase.RUNNING
        mine = replace(mb.report, epoch=state.epoch, phase=phase, able=True, protected=state.epoch)
        members[node] = replace(mb, report=mine, seen=1e9)
    state = state.of(members=members, phase=JobPhase.RUNNING, change=None, trimmed=state.epoch)
    return state.of(plan=make_plan(plan_request(state, state.epoch)))


def test_a_doubtful_node_is_better_than_none() -> None:
    """The others are lost while it is in quarantine: it is let out at once."""
    state, _ = fall(running(2), "node1", "signal 11", LIMITS.crashes)
    state = settled(state, "node1")
    assert state.plan is not None and state.plan.nodes() == ("node0",)
    state, _, _ = transition(
        state, job.ConnectionClosed("node0", state.members["node0"].report.info.incarnation), state.updated_at
    )
    state, _, _ = transition(state, job.Tick(), state.updated_at + 0.3)
    assert state.phase is JobPhase.HALTING and "node0" not in state.members
    halted = replace(state.members["node1"].report, epoch=state.epoch, phase=NodePhase.HALTED)
    state, actions, _ = transition(state, NodeReported(halted), state.updated_at + 0.1)
    assert not quarantine.is_quarantined(state, "node1"), "it was let out"
    assert any("no plan" in note["reason"] or "nobody" in note["reason"] for note in told(actions))


def test_a_flapping_node_is_put_aside_when_it_comes_back() -> None:
    state, notes = running(), []
    for _ in range(LIMITS.departures):
        state, more = remedies.node_lost(state, "node1", "connection closed", state.updated_at)
        notes += told(more)
    (note,) = notes
    assert (note["class"], note["action"]) == ("host", "quarantine") and note["evidence"]["departures"] == 3
    assert quarantine.is_quarantined(state, "node1")


def test_a_network_that_loses_everybody_puts_nobody_aside() -> None:
    state = running()
    for _ in range(LIMITS.departures + 1):
        for node in ("node0", "node1", "node2"):
            state, actions = remedies.node_lost(state, node, "silent", state.updated_at)
            assert not actions
    assert not any(record.quarantined for record in state.health.values())


def test_records_of_nodes_that_went_are_forgotten() -> None:
    state = running()
    for number in range(500):
        state, _ = remedies.node_lost(state, f"spot-{number}", "gone", state.updated_at + 100.0 * number)
    assert len(state.health) <= len(state.members) + remedies.KEPT_MORE + 1
