"""Admission to a job: pre-flight, refusals, names in use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator.event_handlers import RETIRED
from elastic.core.coordinator.transitions import record_event, transition
from elastic.core.job import quarantine
from elastic.core.job.state import (
    ConnectionClosed,
    CoordinatorFailover,
    Heartbeat,
    Heartbeats,
    JobState,
    Send,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import JoinRefused, Preflight, PreflightCheck
from elastic.core.protocol.messages import NodePhase
from tests.core.health.test_diagnosis import health_notes, running


def join_report(flight: Preflight, node: str = "new") -> m.NodeReport:
    info = replace(running().members["node0"].report.info, node=node, incarnation=f"{node}.1")
    return m.NodeReport(info, NodePhase.EMPTY, 0, preflight=flight)


BAD = PreflightCheck(
    "disk:memory", 0.0, "bytes", False, True, "/dev/shm has 0 bytes left: make room"
)
WARN = PreflightCheck(
    "disk:checkpoints", 0.0, "bytes", False, False, "/c has 0 bytes left: make room"
)


def test_a_node_that_fails_its_preflight_is_refused_and_may_try_again() -> None:
    state = running()
    waits = []
    for _ in range(3):
        state, actions, reason = transition(
            state, join_report(Preflight("on", 0.1, (BAD,))), state.updated_at + 0.01
        )
        assert "new" not in state.members and "refused" in reason
        (note,) = health_notes(actions, "preflight")
        assert note["ok"] is False and "make room" in note["reason"]
        (answer,) = [a.message for a in actions if isinstance(a, Send) and a.node == "new"]
        assert isinstance(answer, JoinRefused) and answer.retry_s == note["retry_s"]
        waits.append(answer.retry_s)
        state = state.of(updated_at=state.updated_at + answer.retry_s)
    assert waits == [5.0, 10.0, 20.0]
    state, actions, _ = transition(
        state, join_report(Preflight("on", 0.1, (WARN,), 9.0)), state.updated_at + 0.01
    )
    assert "new" in state.members and health_notes(actions, "preflight")[0]["warnings"] == [
        WARN.remedy
    ]
    assert quarantine.record_of(state, "new").refusals == 0


@pytest.mark.parametrize(("number", "fits"), [(4, False), (5, True), (6, True), (8, False)])
def test_all_members_are_of_neighbouring_versions(number: int, fits: bool) -> None:
    """The coordinator may understand both N-1 and N+1, but these two exchange data, too."""
    state = running()
    members = {
        node: replace(mb, report=replace(mb.report, info=replace(mb.report.info, protocol=6)))
        for node, mb in state.members.items()
    }
    info = replace(join_report(Preflight("on", 0.1)).info, protocol=number, release="9.9")
    report = m.NodeReport(info, NodePhase.EMPTY, 0)
    now = state.updated_at + 0.01
    after, actions, _ = transition(state.of(members=members), report, now)
    assert ("new" in after.members) is fits
    if not fits:
        (note,) = health_notes(actions, "preflight")
        assert note["ok"] is False and f"elastic 9.9 with protocol {number}" in note["reason"]
        assert "protocol 6" in note["reason"] and "install the same version" in note["reason"]
        assert any(
            isinstance(a, Send) and a.message == JoinRefused(note["reason"], note["retry_s"])
            for a in actions
        )


def test_a_retry_before_the_pause_is_over_does_not_count() -> None:
    state, _, _ = transition(running(), join_report(Preflight("on", 0.1, (BAD,))), 10.0)
    again, actions, _ = transition(state, join_report(Preflight("on", 0.1, (BAD,))), 10.5)
    assert (
        not health_notes(actions, "preflight") and quarantine.record_of(again, "new").refusals == 1
    )
    assert any(isinstance(a, Send) and isinstance(a.message, JoinRefused) for a in actions)


def test_a_strict_preflight_refuses_warnings_and_slow_devices() -> None:
    state = running()
    assert Preflight("strict", 0.1, (WARN,)).failed and not Preflight("on", 0.1, (WARN,)).failed
    for node in state.members:
        record = replace(
            quarantine.record_of(state, node), preflight=Preflight("strict", 0.1, (), 100.0)
        )
        state = quarantine.with_record(state, node, record)
    for score, taken in ((49.0, False), (51.0, True)):
        after, _, _ = transition(
            state, join_report(Preflight("strict", 0.1, (), score)), state.updated_at
        )
        assert ("new" in after.members) is taken
    after, _, _ = transition(state, join_report(Preflight("on", 0.1, (), 49.0)), state.updated_at)
    assert "new" in after.members


def test_spares_with_the_best_standing_are_used_first() -> None:
    from elastic.planning.search.request import PlanRequest, select_nodes

    info = running().members["node0"].report.info
    nodes = tuple(replace(info, node=f"node{i}", standing=s) for i, s in enumerate((3, 9, 0, 5)))
    spec = running().spec
    assert spec is not None
    request = PlanRequest(spec=spec, nodes=nodes, epoch=1, max_nodes=2)
    assert [one.node for one in select_nodes(request)[0]] == ["node1", "node3"]


# ---- names ----


def rejoin_report(state: JobState, incarnation: str, node: str = "node1") -> m.NodeReport:
    info = replace(state.members[node].report.info, incarnation=incarnation)
    return m.NodeReport(info, NodePhase.EMPTY, 0)


def without_lease(state: JobState) -> JobState:
    return state.of(policy=replace(state.policy, lease_s=1e9))


def test_a_second_agent_of_a_name_does_not_displace_a_connected_member() -> None:
    state = without_lease(running())
    after, actions, reason = transition(state, rejoin_report(state, "other"), state.updated_at)
    assert (
        after.members == state.members
        and after.epoch == state.epoch
        and not health_notes(actions, "lost")
    )
    (answer,) = [a.message for a in actions if isinstance(a, Send)]
    assert isinstance(answer, JoinRefused) and 0 < answer.retry_s <= 1 and "is connected" in reason


def test_a_disconnected_node_may_join_as_a_new_incarnation() -> None:
    state = without_lease(running())
    former = state.members["node1"].report.info.incarnation
    state, _, _ = transition(state, ConnectionClosed("node1", former), state.updated_at)
    state, actions, _ = transition(state, rejoin_report(state, "other"), state.updated_at)
    assert state.members["node1"].report.info.incarnation == "other"
    assert health_notes(actions, "lost") == [
        {"node": "node1", "loss": "replaced", "why": "came back as a new incarnation"}
    ]
    assert state.retired == (("node1", former),)


def test_a_silent_members_name_is_free_after_the_lease() -> None:
    state = running()
    state = state.of(policy=replace(state.policy, lease_s=3.0))
    start = max(mb.seen for mb in state.members.values())
    waited, now = 0, start
    while (
        state.members.get("node1") is None
        or state.members["node1"].report.info.incarnation != "other"
    ):
        now += 0.5
        beats = tuple(
            Heartbeat(n, mb.report.info.incarnation, mb.report.step, 0)
            for n, mb in state.members.items()
            if n != "node1"
        )
        state, _, _ = transition(state, Heartbeats(beats), now)
        newcomer = rejoin_report(running(), "other")
        state, actions, _ = transition(state, newcomer, now)
        waited += any(isinstance(a, Send) and isinstance(a.message, JoinRefused) for a in actions)
    assert 5 <= waited <= 7 and now - start <= 4.0


def test_after_a_failover_members_have_time_to_reconnect_before_their_names_are_free() -> None:
    state = without_lease(running())
    state, _, _ = transition(state, CoordinatorFailover(), state.updated_at)
    after, actions, _ = transition(state, rejoin_report(state, "other"), state.updated_at + 0.4)
    assert after.members["node1"] == state.members["node1"]
    assert any(isinstance(a, Send) and isinstance(a.message, JoinRefused) for a in actions)
    newcomer, start = rejoin_report(state, "other"), state.updated_at
    while (
        state.members.get("node1") is None
        or state.members["node1"].report.info.incarnation != "other"
    ):
        state, _, _ = transition(state, newcomer, state.updated_at + 0.1)
    assert 2.0 <= state.updated_at - start <= 2.5, "it did not come back"


def test_the_newest_replaced_incarnations_are_remembered() -> None:
    state = without_lease(running())
    for number in range(RETIRED + 3):
        former = state.members["node1"].report.info.incarnation
        state, _, _ = record_event(state, ConnectionClosed("node1", former), state.updated_at)
        state, _, _ = record_event(state, rejoin_report(state, f"i{number}"), state.updated_at)
    assert len(state.retired) == RETIRED and state.retired[-1] == ("node1", f"i{RETIRED + 1}")
