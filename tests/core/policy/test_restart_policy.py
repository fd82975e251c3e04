"""Waiting for restarting workers of a healthy node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.job.join_policy import record_pause
from elastic.core.job.state import Cause, CauseKind, EpochChange, JobPhase, JobState, LogEntry
from elastic.core.policy import restart_policy
from elastic.core.protocol.messages import NodePhase
from elastic.planning.cost.profile import LinkProfile
from tests.core.policy.test_straggler_policy import profile, running
from tests.core.state_access import change_of

NOW, BEGAN = 100.0, 99.5


def crashed(*, bytes_per_s: float, start_s: float = 3.0) -> JobState:
    """State after a crash of node1's workers.

    Two nodes hold two layers each, without backups: 24 bytes of state and 8 of gradient per layer.
    """
    state = running()
    assert state.plan is not None and state.spec is not None
    state = state.of(
        plan=replace(state.plan, n_layers=4, peers=()),
        spec=replace(state.spec, layers=profile().layers),
    )
    link = replace(profile(), link=LinkProfile(bytes_per_s, 0.0))
    member = state.members["node1"]
    starting = replace(member, report=replace(member.report, phase=NodePhase.STARTING, able=False))
    change = EpochChange(
        epoch=state.epoch + 1,
        causes=(Cause(CauseKind.WORKER, "node1: worker 0 ended with signal 9"),),
        boundary=False,
        lost=("node1",),
        nodes_before=2,
        began=BEGAN,
        old_plan=state.plan,
        step=3,
        microbatch=1,
    )
    return state.of(
        policy=replace(state.policy, profile=link),
        members={**state.members, "node1": starting},
        phase=JobPhase.HALTING,
        epoch=state.epoch + 1,
        change=change,
        start_s=start_s,
        pauses=(0.2,),
    )


def test_with_slow_links_the_others_wait() -> None:
    """64 bytes at 1 byte/s take longer than the 3 s until the workers are back."""
    result = restart_policy.decide_wait(crashed(bytes_per_s=1.0), NOW)
    assert result is not None
    state, (note,), reason = result
    assert restart_policy.is_waiting(state, NOW + 1) and not restart_policy.is_waiting(
        state, NOW + 6.1
    ), "twice as long at most"
    assert (
        isinstance(note, LogEntry) and note.data["wait"] is True and note.data["nodes"] == ["node1"]
    )
    assert (
        reason.startswith("node1 back in 3 s; going on without: ")
        and "64 s to move layers" in reason
    )
    assert restart_policy.decide_wait(state, NOW + 1) is None, "considered once"


def test_with_fast_links_the_others_continue() -> None:
    result = restart_policy.decide_wait(crashed(bytes_per_s=1e9, start_s=30.0), NOW)
    assert result is not None
    state, (note,), _ = result
    assert isinstance(note, LogEntry) and note.data["wait"] is False
    assert (
        not restart_policy.is_waiting(state, NOW) and restart_policy.decide_wait(state, NOW) is None
    )


@pytest.mark.parametrize(
    "kind", ["another node is gone", "planned", "nobody starts", "draining", "another drains"]
)
def test_there_is_no_useless_wait(kind: str) -> None:
    state = crashed(bytes_per_s=1.0)
    assert state.change is not None
    members = dict(state.members)
    if kind == "another node is gone":
        del members["node0"]
    elif kind == "planned":
        state = state.of(change=replace(state.change, boundary=True))
    elif kind == "draining":
        members["node1"] = replace(members["node1"], draining=True)
    elif kind == "another drains":
        members["node0"] = replace(members["node0"], draining=True)
    else:
        report = replace(members["node1"].report, phase=NodePhase.FAILED)
        members["node1"] = replace(members["node1"], report=report)
    assert restart_policy.decide_wait(state.of(members=members), NOW) is None


def test_the_wait_ends_when_the_workers_are_back() -> None:
    result = restart_policy.decide_wait(crashed(bytes_per_s=1.0), NOW)
    assert result is not None
    state = result[0]
    back = replace(state.members["node1"].report, phase=NodePhase.HALTED, able=True)
    members = {**state.members, "node1": replace(state.members["node1"], report=back)}
    assert restart_policy.is_waiting(state, NOW) and not restart_policy.is_waiting(
        state.of(members=members), NOW
    )


def test_the_coordinator_decides_when_the_wait_is_over() -> None:
    """Ticks change nothing during the wait. After it the others continue."""
    state = crashed(bytes_per_s=1.0)
    members = {}
    for node, member in state.members.items():
        phase = NodePhase.STARTING if node == "node1" else NodePhase.HALTED
        report = replace(member.report, phase=phase, epoch=state.epoch, able=node != "node1")
        members[node] = replace(member, report=report, seen=NOW + 60)
    state = state.of(members=members, updated_at=NOW)
    state, _, reason = transition(state, None, NOW)
    assert state.phase is JobPhase.HALTING and "back in 3 s" in reason
    state, actions, reason = transition(state, None, NOW + 0.1)
    assert state.phase is JobPhase.HALTING and actions == () and reason == ""
    state, _, _ = transition(state.of(updated_at=NOW + 6.2), None, NOW + 6.2)
    assert state.phase is not JobPhase.HALTING


def test_there_is_no_second_wait_in_the_same_step() -> None:
    """The step itself may cause the crash."""
    result = restart_policy.decide_wait(crashed(bytes_per_s=1.0), NOW)
    assert result is not None and result[0].change is not None
    state = result[0].of(change=replace(result[0].change, wait_until=0.0))
    again = restart_policy.decide_wait(state, NOW + 10)
    assert again is not None and again[0].change is not None
    assert again[0].change.wait_until == -1 and again[2].startswith(
        "node1 crashed again in step 3; "
    )
    later = state.of(change=replace(change_of(state), step=4))
    assert (found := restart_policy.decide_wait(later, NOW + 10)) is not None
    assert restart_policy.is_waiting(found[0], NOW + 11)


def test_a_wait_does_not_count_as_a_pause() -> None:
    """Otherwise each wait would make the next one look cheaper."""
    state = crashed(bytes_per_s=1.0)
    assert state.change is not None
    for until, pauses in ((NOW + 6, (0.2,)), (-1.0, (0.2, 10.5))):
        assert (
            record_pause(state, replace(state.change, wait_until=until), BEGAN + 10.5).pauses
            == pauses
        )
