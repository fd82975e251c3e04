"""The clock of a coordinator that takes the job over is behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.health.diagnosis import NodeHealth
from elastic.core.job import clock
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from tests.core.coordinator.test_transitions import halt, running

BASE_S = 1e6
"""Times of real jobs are far from zero."""
OTHER = {
    "EpochChange": {"detect_s"},
    "JobState": {
        "evaluation",
        "finished",
        "recovered_at",  # on the clocks of nodes
        "start_s",
        "late_s",
        "node_seconds",
        "backup_figures",
        "pauses",
        "durations",
        "minority_s",
        "policy",
        "seen",
        "timeouts",
        "paces",
        "profile_error",
        "gauges",
        "record",
        "spec",
        "plan",
        "assignment",
        "certificates",  # the time of the calendar
        "distrusted",
    },
    "ProgressSign": {"spun_s"},
    "JobFailure": {"failed"},
    "LossHistory": {"events", "node_seconds"},
    "NodeHealth": {"clock", "report", "preflight", "link", "loaded"},
    "Member": {"report", "notice", "launch", "excused_s"},
}
"""Fields with floats that are no times on the coordinator's clock."""


def types_in(hint: Any) -> Iterator[Any]:
    """All types in an annotation."""
    if get_origin(hint) is None and not isinstance(hint, UnionType):
        yield hint
    for part in get_args(hint):
        yield from types_in(part)


def has_floats(kind: Any) -> bool:
    """Whether values of this type have floats."""
    if kind is float:
        return True
    if not is_dataclass(kind):
        return False
    hints = get_type_hints(kind)
    inner = (part for field in fields(kind) for part in types_in(hints[field.name]))
    return any(has_floats(part) for part in inner if part is not kind)


@pytest.mark.parametrize("kind", clock.TIMES, ids=lambda kind: kind.__name__)
def test_every_time_in_the_state_is_known(kind: type) -> None:
    hints = get_type_hints(kind)
    found = {name for name, hint in hints.items() if any(map(has_floats, types_in(hint)))}
    other = OTHER.get(kind.__name__, set())
    assert found - other == set(clock.TIMES[kind]), "enter it in clock.TIMES, or in OTHER"


def takeover(state: JobState, behind_s: float) -> JobState:
    """Another coordinator takes over; its clock is behind. All nodes reconnect."""
    state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at - behind_s)
    for member in tuple(state.members.values()):
        state, _, _ = transition(state, member.report, state.updated_at + 0.01)
    return state


def pass_time(state: JobState, seconds: float) -> JobState:
    """Time passes with heartbeats."""
    until = state.updated_at + seconds
    while state.updated_at < until and state.ending is None:
        beats = tuple(
            job.Heartbeat(node, mb.report.info.incarnation, mb.report.step, 0)
            for node, mb in state.members.items()
        )
        state, _, _ = transition(state, job.Heartbeats(beats), state.updated_at + 0.25)
    return state


def halted() -> JobState:
    """The next plan waits for 10 s, because epochs failed."""
    state = clock.shifted(running(), BASE_S)
    report = state.members["node2"].report
    report = replace(report, phase=NodePhase.STARTING, able=False, cause="oops")
    state = state.of(watch=replace(state.watch, attempts=3, step=state.newest_step))
    state, _, _ = transition(state, report, state.updated_at + 0.01)
    assert state.phase is JobPhase.HALTING
    assert state.watch.retry_at == pytest.approx(state.updated_at + 10.0)
    return state


@pytest.mark.parametrize("behind_s", [0.0, 60.0, 3600.0])
def test_the_pause_before_an_attempt_does_not_grow(behind_s: float) -> None:
    state = takeover(halted(), behind_s)
    for node in tuple(state.members):
        state = halt(state, node)
    state = pass_time(state, 8.0)
    assert state.phase is JobPhase.HALTING
    assert pass_time(state, 3.0).phase is JobPhase.INSTALLING


@pytest.mark.parametrize("behind_s", [0.0, 60.0, 3600.0])
def test_lost_contact_ends_the_epoch_in_time(behind_s: float) -> None:
    state = clock.shifted(running(), BASE_S)
    report = replace(state.members["node1"].report, suspects=("node0",), failures=("gone",))
    state, _, _ = transition(state, report, state.updated_at + 0.01)
    assert state.phase is JobPhase.RUNNING and state.suspected_since
    assert pass_time(takeover(state, behind_s), 1.0).phase is JobPhase.HALTING


@pytest.mark.parametrize("behind_s", [0.0, 60.0, 3600.0])
def test_a_silent_node_is_lost_in_time(behind_s: float) -> None:
    """The same coordinator's clock is set back."""
    state = clock.shifted(running(), BASE_S)
    state, _, _ = transition(state, job.Tick(), state.updated_at - behind_s)
    until = state.updated_at + 2 * state.limits.lease_s
    while state.updated_at < until:
        beats = tuple(
            job.Heartbeat(node, state.members[node].report.info.incarnation, 0, 0)
            for node in ("node0", "node1")
        )
        state, _, _ = transition(state, job.Heartbeats(beats), state.updated_at + 0.25)
    assert set(state.members) == {"node0", "node1"}


def test_the_difference_to_the_clocks_of_nodes_follows() -> None:
    record = NodeHealth(crashes=(BASE_S, BASE_S + 1.0), clock=(-2.0, 3.0))
    state = running().of(health={"node0": record}, absent=(("node7", BASE_S),))
    state = clock.shifted(state, -60.0)
    assert state.health["node0"].crashes == (BASE_S - 60.0, BASE_S - 59.0)
    assert state.health["node0"].clock == (-62.0, -57.0)
    assert state.absent == (("node7", BASE_S - 60.0),)
    assert state.health["node0"].until == 0.0, "zero is no time"


def test_a_failed_job_waits_no_longer_for_its_checkpoint() -> None:
    state = clock.shifted(running(), BASE_S)
    failure = job.JobFailure("node0", m.Failed("wrong", 1), state.updated_at)
    state = clock.shifted(state.of(failure=failure), -3600.0)
    assert state.failure is not None and state.failure.at == state.updated_at
