"""The time budget: order and monotony of all limits, and their use by coordinator and node."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.notices.source import MAX_RETRY_S
from elastic.config import JobConfig, WorkerCommand
from elastic.coordinator.queries import policy_of, status
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobState, LogEntry, Policy
from elastic.core.node.node import NodeState, WorkerMessage, WorkerState, hang_reason
from elastic.core.node.node import transition as at_node
from elastic.core.protocol import messages as m
from elastic.core.protocol.timeouts import (
    DEFAULT_TIMEOUTS,
    MAX_HEARTBEATS_PER_S,
    MOST_RTT_S,
    NO_DURATIONS,
    RECONNECT_TRIPS,
    LongestDurations,
    Timeouts,
    budget,
    round_up,
)
from elastic.domain.types import NodeInfo, StepRecord
from elastic.rpc.control.channel_options import RETRY_MAX_S

SILENCES = st.floats(0.06, 86400.0)
TIMES = st.floats(0.0, 1e5)
SEEN = st.builds(
    lambda a, b, c, d: NO_DURATIONS.grown(step_s=a, microbatch_s=b, pause_s=c, rtt_s=d),
    TIMES,
    TIMES,
    TIMES,
    st.floats(0.0, MOST_RTT_S),
)


@given(SILENCES, SEEN)
def test_limits_have_the_right_order(silence_s: float, seen: LongestDurations) -> None:
    t = budget(silence_s, seen=seen)
    assert t.silence_s == silence_s and t.lease_s == silence_s + RECONNECT_TRIPS * seen.rtt_s
    assert 2 * t.heartbeat_s < t.lease_s, "one lost heartbeat loses no node"
    assert t.contact_s <= t.lease_s
    assert t.closed_s + t.heartbeat_s < t.lease_s, "two pieces of evidence count before one"
    assert t.starved_s < t.lease_s < t.doubt_s < t.return_s
    assert min(t.closed_s, t.adopt_s) >= RECONNECT_TRIPS * seen.rtt_s, "time for a reconnect"
    assert t.adopt_s >= 2 * min(RETRY_MAX_S, 0.5), "a restarted coordinator hears every living node"
    assert t.silence_s < 2 * t.keepalive_s, "the lease ends before the transport gives up"
    assert t.silence_s < t.bulk_s < t.serve_s, "a lost node is known before its transfers fail"
    assert t.silence_s < t.silent_s < t.stuck_s, "a slow worker is not hung"
    assert t.stuck_s >= 20 * seen.microbatch_s
    assert t.link_s >= max(budget(silence_s).stuck_s, t.serve_s)
    assert t.silence_s < t.path_s < t.open_s, "a lost node is known before its paths are blamed"
    assert t.silence_s < t.overdue_s
    assert t.lease_s < t.preflight_s, "a lost peer is known before a join is refused because of it"
    assert t.leave_s >= min(20.0, 2 * seen.pause_s)
    near = budget(silence_s)
    assert near.alone_s >= near.lease_s + near.closed_s and near.sibling_s > near.contact_s
    assert t.lease_s < t.progress_s, "a silent node is lost before the job counts as stalled"
    assert t.progress_s >= max(20 * seen.microbatch_s, 5 * seen.step_s)
    assert t.orphan_s > 2 * t.adopt_s, "a coordinator that restarts finds its agents"
    assert t.orphan_s > t.return_s + t.doubt_s, "no agent destroys copies that a job waits for"
    assert t.save_s > t.adopt_s, "the agents report their parts to a new coordinator in time"
    assert all(getattr(t, field.name) > 0 for field in fields(Timeouts))


@given(SILENCES, st.integers(0, 100_000))
def test_many_nodes_send_fewer_heartbeats(silence_s: float, nodes: int) -> None:
    few, many = budget(silence_s), budget(silence_s, nodes=nodes)
    assert replace(many, heartbeat_s=few.heartbeat_s) == few, (
        "no other limit depends on the number of nodes"
    )
    assert few.heartbeat_s <= many.heartbeat_s and 3 * many.heartbeat_s <= silence_s * (1 + 1e-9)
    assert (
        nodes / many.heartbeat_s <= MAX_HEARTBEATS_PER_S * (1 + 1e-9)
        or many.heartbeat_s == silence_s / 3
    )


def test_two_thousand_nodes() -> None:
    assert [budget(3.0, nodes=n).heartbeat_s for n in (1000, 1500, 2000)] == [0.5, 0.75, 1.0]


@given(SILENCES, SILENCES, SEEN)
def test_a_longer_silence_shortens_no_limit(
    one: float, other: float, seen: LongestDurations
) -> None:
    low, high = sorted((one, other))
    short, long = budget(low, seen=seen), budget(high, seen=seen)
    assert all(
        getattr(short, field.name) <= getattr(long, field.name) for field in fields(Timeouts)
    )


@given(SILENCES, SEEN)
def test_measurements_only_lengthen_limits(silence_s: float, seen: LongestDurations) -> None:
    before, after = budget(silence_s), budget(silence_s, seen=seen)
    assert all(
        getattr(before, field.name) <= getattr(after, field.name) for field in fields(Timeouts)
    )


def test_the_limits_of_three_seconds() -> None:
    t = DEFAULT_TIMEOUTS
    assert (t.heartbeat_s, t.lease_s, t.closed_s, t.adopt_s) == (0.5, 3.0, 1.0, 2.0)
    assert (t.silent_s, t.stuck_s, t.bulk_s, t.keepalive_s) == (10.0, 60.0, 10.0, 5.0)


@given(st.floats(1e-5, 1e11))
def test_round_up_grows_by_less_than_three(seconds: float) -> None:
    assert seconds <= round_up(seconds) * (1 + 1e-9) and round_up(seconds) < 2.6 * seconds
    assert round_up(round_up(seconds)) == pytest.approx(round_up(seconds))


def test_shorter_measurements_keep_the_object() -> None:
    seen = NO_DURATIONS.grown(step_s=0.7)
    assert seen.step_s == 1.0 and seen.grown(step_s=0.9) is seen and round_up(0.0) == 0.0


def config(**changes: object) -> JobConfig:
    made = JobConfig(
        job_id="j",
        run_dir="/r",
        memory_dir="/m",
        checkpoint_dir="/c",
        command=WorkerCommand(script="s.py"),
    )
    return made.of(**changes)


def test_policy_and_configuration_agree() -> None:
    for silence_s in (0.5, 3.0, 30.0):
        made = config(lease_s=silence_s, heartbeat_s=budget(silence_s).heartbeat_s)
        policy, limits = policy_of(made), made.timeouts
        assert (policy.lease_s, policy.heartbeat_s) == (limits.lease_s, limits.heartbeat_s)
        assert JobState(policy=policy).limits == limits
        assert status(JobState(policy=policy))["timeouts"]["bulk_s"] == limits.bulk_s
    assert config(lease_s=9.0, heartbeat_s=4.0).timeouts.heartbeat_s == 4.0


def test_limits_are_logged_at_the_start_and_on_changes() -> None:
    state = JobState(policy=Policy(lease_s=3.0)).of(epoch=1)
    state, actions, _ = transition(state, job.Tick(), 1.0)
    (note,) = [a for a in actions if isinstance(a, LogEntry) and a.kind == "timeouts"]
    assert note.data["silence_s"] == 3.0 and note.data["stuck_s"] == 60.0
    _, actions, _ = transition(state, job.Tick(), 1.1)
    assert actions == ()
    slow = m.StepDone(1, StepRecord(0, 1.0, 1.0, 1.0), 90.0, 0.1)
    state, actions, _ = transition(state, slow, 1.2)
    (note,) = [a for a in actions if isinstance(a, LogEntry) and a.kind == "timeouts"]
    assert note.data == {
        "prefetch_s": 500.0,
        "measured": {"step_s": 100.0, "microbatch_s": 0.0, "pause_s": 0.0, "rtt_s": 0.0},
        "progress_s": 500.0,
    }
    assert state.limits.prefetch_s == 500.0
    _, actions, _ = transition(state, slow, 1.3)
    assert actions == ()


def test_long_microbatches_lengthen_the_limit_for_hangs() -> None:
    """Measurements of this node lengthen the time until a worker counts as hung."""
    state = NodeState(NodeInfo("n", "i", "v:1"), workers=(WorkerState(alive=True),))
    measured = m.MicrobatchTiming(1, 0, 0, 3.0, 6.0)
    state, _, _ = at_node(state, WorkerMessage(0, m.Progress(1, "compute", 0, 0, measured)), 10.0)
    assert state.limits.stuck_s == 200.0
    worker = state.workers[0]
    beating = WorkerState(alive=True, progress=worker.progress, seen=99.0, active_at=0.0)
    assert hang_reason(beating, False, 100.0) and not hang_reason(
        beating, False, 100.0, state.limits
    )
    beating = WorkerState(alive=True, progress=worker.progress, seen=200.5, active_at=0.0)
    assert hang_reason(beating, False, 201.0, state.limits)


def test_a_failing_source_is_read_again_before_its_notice_counts_as_false() -> None:
    assert DEFAULT_TIMEOUTS.overdue_s >= MAX_RETRY_S
