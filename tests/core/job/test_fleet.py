"""Assignment of agents to machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.job import fleet as f
from elastic.domain.errors import EXIT_DRAINED, EXIT_JOB_FAILED, EXIT_OK


def machines(*names: str, reserved: int = 0) -> tuple[f.Machine, ...]:
    """Machines with these names. The first `reserved` of them have a reserved place."""
    return tuple(
        f.Machine(id=name, host=name, reserved=i if i < reserved else None)
        for i, name in enumerate(names)
    )


def look(
    fleet: f.Fleet, found: tuple[f.Machine, ...], now: float, unplaced: int = 0
) -> tuple[f.Fleet, list[str], str]:
    """Return (fleet, started nodes with their machines, reason)."""
    fleet, actions, reason = f.transition(fleet, f.ClusterObserved(found, unplaced), now)
    return (
        fleet,
        [f"{a.node}@{a.machine.id}" for a in actions if isinstance(a, f.StartAgent)],
        reason,
    )


def end(
    fleet: f.Fleet, node: str, code: int | None, now: float
) -> tuple[f.Fleet, tuple[f.FleetAction, ...], str]:
    return f.transition(fleet, f.AgentEnded(node, code), now)


def test_nothing_starts_before_the_gang_has_its_places() -> None:
    fleet, started, reason = look(f.Fleet(wanted=3), machines("a", "b"), 0.0, unplaced=3)
    assert started == [] and reason == "3 of 3 nodes are missing"
    _, started, reason = look(fleet, machines("a", "b", "c", reserved=2), 1.0)
    assert started == ["node0@a", "node1@b", "node2@c"]
    assert reason.endswith("node2 starts on c; no node is missing any more")


def test_the_number_of_spares_is_limited() -> None:
    fleet, started, reason = look(f.Fleet(wanted=2, spares=1), machines(*"abcd", reserved=2), 0.0)
    assert started == ["node0@a", "node1@b", "node2@c"] and "node2 starts on c as a spare" in reason
    assert look(fleet, machines(*"abcd", reserved=2), 1.0)[1] == []


def test_a_lost_machine_is_requested_and_returns_as_a_new_node() -> None:
    fleet, _, _ = look(f.Fleet(wanted=2), machines("a", "b", reserved=2), 0.0)
    fleet, actions, reason = f.transition(
        fleet, f.ClusterObserved(machines("a", reserved=1), 1), 1.0
    )
    assert actions == (f.ForgetAgent("node1"), f.RequestNodes(2))
    assert reason == "the machine of node1 is gone; 1 of 2 nodes are missing"
    found = (*machines("a", reserved=1), f.Machine(id="b", host="b"))
    fleet, started, _ = look(fleet, found, 2.0, unplaced=1)
    assert started == [], "the cluster puts the lost place somewhere first"
    _, started, reason = look(fleet, machines("a", "b", reserved=2), 3.0)
    assert started == ["node2@b"] and "no node is missing any more" in reason


def test_a_machine_without_room_gets_no_agent() -> None:
    full = f.Machine(id="a", host="a", room=False)
    assert look(f.Fleet(wanted=1), (full,), 0.0)[1] == []


def test_the_pause_before_the_next_agent_doubles() -> None:
    fleet, found = f.Fleet(wanted=2), machines("a", "b", reserved=2)
    fleet, _, _ = look(fleet, found, 0.0)
    now = 0.0
    for wait_s, node in ((1.0, "node1"), (2.0, "node2"), (4.0, "node3")):
        fleet, actions, reason = end(fleet, node, -9, now)
        assert (
            actions == ()
            and reason == f"{node} has ended; its machine may get another agent in {wait_s:g} s"
        )
        assert look(fleet, found, now + wait_s - 0.01)[1] == []
        now += wait_s
        fleet, started, _ = look(fleet, found, now)
        assert len(started) == 1
    now += f.STEADY_S
    _, _, reason = end(fleet, "node4", 1, now)
    assert reason.endswith("in 1 s"), "one that stayed is no failed attempt"


def test_an_unknown_exit_has_a_longer_pause() -> None:
    fleet, _, _ = look(f.Fleet(wanted=1), machines("a", reserved=1), 0.0)
    _, _, reason = end(fleet, "node0", None, 1.0)
    assert reason.endswith(f"in {f.LOST_BACKOFF_S:g} s")


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_DRAINED, EXIT_JOB_FAILED])
def test_a_machine_gets_no_agent_after_an_orderly_exit(code: int) -> None:
    found = machines("a", "b", reserved=2)
    fleet, _, _ = look(f.Fleet(wanted=2), found, 0.0)
    fleet, _, reason = end(fleet, "node1", code, 1.0)
    assert reason == "node1 has left in order"
    fleet, actions, _ = f.transition(fleet, f.ClusterObserved(found), 1000.0)
    assert actions == (f.RequestNodes(2),), "another machine may take its place"


def test_it_gives_up_when_no_machine_can_hold_an_agent() -> None:
    fleet, found, now = f.Fleet(wanted=2), machines("a", "b", reserved=2), 0.0
    given_up: list[f.FleetAction] = []
    for _ in range(f.MOST_FAILURES):
        fleet, started, _ = look(fleet, found, now)
        for node in [text.partition("@")[0] for text in started]:
            fleet, actions, _ = end(fleet, node, 2, now)
            given_up += actions
        now += f.LONGEST_BACKOFF_S
    assert given_up == [f.GiveUp("on every available machine 3 agents in a row have ended")]


def test_it_waits_longer_for_requested_machines() -> None:
    """The cluster has lost three of four machines, and agents end on the one that is left."""
    fleet, now, failures = f.Fleet(wanted=4), 0.0, 0
    fleet, _, _ = look(fleet, machines(*"abcd", reserved=4), now)
    fleet, _, _ = look(fleet, machines("a", reserved=1), now + 1000.0, unplaced=3)
    began = now = 1000.0
    given_up: tuple[f.FleetAction, ...] = ()
    node = "node0"
    while not given_up:
        fleet, given_up, _ = end(fleet, node, 1, now)
        failures, now = failures + 1, fleet.agents["a"].retry_at
        if failures == f.MOST_FAILURES:
            more, started, _ = look(fleet, machines("a", "e", reserved=2), now, unplaced=2)
            assert len(started) == 2, "a machine has come"
            assert not end(more, started[0].partition("@")[0], 1, now)[1]
        fleet, (started_node,), _ = look(fleet, machines("a", reserved=1), now, unplaced=3)
        node = started_node.partition("@")[0]
    assert failures == f.PATIENT_FAILURES and now - began > 240.0
    assert given_up == (f.GiveUp("on every available machine 10 agents in a row have ended"),)


def test_the_exit_of_a_forgotten_agent_changes_nothing() -> None:
    fleet, _, _ = look(f.Fleet(wanted=1), machines("a", reserved=1), 0.0)
    assert end(fleet, "node7", -9, 1.0) == (fleet, (), "")
    fleet, _, _ = end(fleet, "node0", -9, 1.0)
    assert end(fleet, "node0", -9, 2.0) == (fleet, (), "")


_machine = st.builds(
    f.Machine,
    id=st.sampled_from("abcdef"),
    reserved=st.none() | st.integers(0, 3),
    room=st.booleans(),
)
_looks = st.builds(
    f.ClusterObserved,
    st.lists(_machine, max_size=6, unique_by=lambda m: m.id).map(tuple),
    st.integers(0, 2),
)
_ends = st.builds(
    f.AgentEnded,
    st.integers(0, 12).map("node{}".format),
    st.sampled_from((EXIT_OK, 1, EXIT_DRAINED, -9, None)),
)


@given(st.integers(1, 4), st.integers(0, 2), st.lists(_looks | _ends, max_size=40))
def test_invariants_hold_for_random_events(
    wanted: int, spares: int, events: list[f.FleetEvent]
) -> None:
    """One agent per machine, never too many; unique names; a request only for missing nodes."""
    fleet, names, asked = f.Fleet(wanted=wanted, spares=spares), set[str](), 0
    for now, event in enumerate(events):
        fleet, actions, reason = f.transition(fleet, event, float(now))
        assert not actions or reason
        for action in actions:
            match action:
                case f.StartAgent(node, machine):
                    assert node not in names and (machine.reserved is not None or machine.room)
                    assert isinstance(event, f.ClusterObserved) and machine in event.machines
                    names.add(node)
                case f.RequestNodes(nodes):
                    assert nodes != asked and nodes in (0, wanted)
                    asked = nodes
        assert fleet.running <= wanted + spares and fleet.requested == asked
        if isinstance(event, f.ClusterObserved):
            assert set(fleet.agents) <= {machine.id for machine in event.machines}
