"""One number, and what follows from it: in this order, whatever it is and whatever was measured."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.notices.source import MAX_RETRY_S
from elastic.config import Command, JobConfig
from elastic.coordinator.queries import policy_of, status
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobState, Note, Policy
from elastic.core.node.node import Said
from elastic.core.node.node import transition as at_node
from elastic.core.node.node_state import NodeState, Worker, hung
from elastic.core.protocol import messages as m
from elastic.core.protocol.timeouts import BEATS, DEFAULT, NOTHING, Seen, Timeouts, budget, coarse
from elastic.domain.types import NodeInfo, StepRecord
from elastic.rpc.control.channel_options import RETRY_MAX_S

SILENCES = st.floats(0.06, 86400.0)
TIMES = st.floats(0.0, 1e5)
SEEN = st.builds(lambda a, b, c: Seen().grown(step_s=a, microbatch_s=b, pause_s=c), TIMES, TIMES, TIMES)


@given(SILENCES, SEEN)
def test_whoever_knows_more_decides_first(silence_s: float, seen: Seen) -> None:
    t = budget(silence_s, seen=seen)
    assert t.lease_s == t.silence_s == silence_s
    assert 2 * t.heartbeat_s < t.lease_s, "one lost heartbeat loses nobody"
    assert t.closed_s < t.contact_s <= t.lease_s, "a closed connection tells before silence"
    assert t.starved_s < t.lease_s
    assert t.adopt_s >= 2 * min(RETRY_MAX_S, 0.5), "a restarted coordinator hears everybody who lives"
    assert t.lease_s < 2 * t.keepalive_s, "the lease tells before the transport"
    assert t.lease_s < t.bulk_s < t.serve_s, "a lost node is known before its transfers fail"
    assert t.lease_s < t.silent_s < t.stuck_s, "being slow is never enough"
    assert t.stuck_s >= 20 * seen.microbatch_s
    assert t.link_s >= max(budget(silence_s).stuck_s, t.serve_s)
    assert t.sibling_s > t.contact_s
    assert t.lease_s < t.overdue_s
    assert t.leave_s >= min(20.0, 2 * seen.pause_s)
    assert t.alone_s >= t.lease_s + t.closed_s
    assert all(getattr(t, field.name) > 0 for field in fields(Timeouts))


@given(SILENCES, st.integers(0, 100_000))
def test_many_nodes_say_less_often_that_they_live(silence_s: float, nodes: int) -> None:
    few, many = budget(silence_s), budget(silence_s, nodes=nodes)
    assert replace(many, heartbeat_s=few.heartbeat_s) == few, "nothing else depends on them"
    assert few.heartbeat_s <= many.heartbeat_s and 3 * many.heartbeat_s <= silence_s * (1 + 1e-9)
    assert nodes / many.heartbeat_s <= BEATS * (1 + 1e-9) or many.heartbeat_s == silence_s / 3


def test_two_thousand_nodes() -> None:
    assert [budget(3.0, nodes=n).heartbeat_s for n in (1000, 1500, 2000)] == [0.5, 0.75, 1.0]


@given(SILENCES, SILENCES, SEEN)
def test_more_tolerance_shortens_nothing(one: float, other: float, seen: Seen) -> None:
    low, high = sorted((one, other))
    short, long = budget(low, seen=seen), budget(high, seen=seen)
    assert all(getattr(short, field.name) <= getattr(long, field.name) for field in fields(Timeouts))


@given(SILENCES, SEEN)
def test_what_is_measured_only_lengthens(silence_s: float, seen: Seen) -> None:
    before, after = budget(silence_s), budget(silence_s, seen=seen)
    assert all(getattr(before, field.name) <= getattr(after, field.name) for field in fields(Timeouts))


def test_the_limits_of_three_seconds() -> None:
    assert (DEFAULT.heartbeat_s, DEFAULT.lease_s, DEFAULT.closed_s, DEFAULT.adopt_s) == (0.5, 3.0, 0.15, 2.0)
    assert (DEFAULT.silent_s, DEFAULT.stuck_s, DEFAULT.bulk_s, DEFAULT.keepalive_s) == (15.0, 60.0, 10.0, 5.0)


@given(st.floats(1e-5, 1e11))
def test_coarse_rounds_up_by_less_than_three(seconds: float) -> None:
    assert seconds <= coarse(seconds) * (1 + 1e-9) and coarse(seconds) < 2.6 * seconds
    assert coarse(coarse(seconds)) == pytest.approx(coarse(seconds))


def test_what_is_no_news_makes_nothing_new() -> None:
    seen = NOTHING.grown(step_s=0.7)
    assert seen.step_s == 1.0 and seen.grown(step_s=0.9) is seen and coarse(0.0) == 0.0


def config(**changes: object) -> JobConfig:
    made = JobConfig(
        job_id="j", run_dir="/r", memory_dir="/m", checkpoint_dir="/c", command=Command(script="s.py")
    )
    return made.of(**changes)


def test_policy_and_configuration_tell_the_same() -> None:
    for silence_s in (0.5, 3.0, 30.0):
        made = config(lease_s=silence_s, heartbeat_s=budget(silence_s).heartbeat_s)
        policy, limits = policy_of(made), made.timeouts
        assert (policy.lease_s, policy.heartbeat_s) == (limits.lease_s, limits.heartbeat_s)
        assert (policy.grace_s, policy.adopt_s) == (limits.closed_s, limits.adopt_s)
        assert JobState(policy=policy).limits == limits
        assert status(JobState(policy=policy))["timeouts"]["bulk_s"] == limits.bulk_s
    assert config(lease_s=9.0, heartbeat_s=4.0).timeouts.heartbeat_s == 4.0


def test_limits_are_told_at_the_start_and_whenever_they_change() -> None:
    state = JobState(policy=Policy(lease_s=3.0))
    state, actions, _ = transition(state, job.Tick(), 1.0)
    (note,) = [a for a in actions if isinstance(a, Note) and a.kind == "timeouts"]
    assert note.data["silence_s"] == 3.0 and note.data["stuck_s"] == 60.0
    _, actions, _ = transition(state, job.Tick(), 1.1)
    assert actions == ()
    slow = job.Stepped(StepRecord(0, 1.0, 1.0, 1.0), 90.0)
    state, actions, _ = transition(state, slow, 1.2)
    (note,) = [a for a in actions if isinstance(a, Note) and a.kind == "timeouts"]
    assert note.data == {
        "prefetch_s": 500.0,
        "measured": {"step_s": 100.0, "microbatch_s": 0.0, "pause_s": 0.0},
    }
    assert state.limits.prefetch_s == 500.0
    _, actions, _ = transition(state, slow, 1.3)
    assert actions == ()


def test_a_worker_with_long_microbatches_is_given_longer() -> None:
    """What was measured on this node stretches when a worker is taken for hung."""
    state = NodeState(NodeInfo("n", "i", "v:1"), workers=(Worker(alive=True),))
    measured = m.Measured(1, 0, 0, 3.0, 6.0)
    state, _, _ = at_node(state, Said(0, m.Progress(1, "compute", 0, 0, measured)), 10.0)
    assert state.limits.stuck_s == 200.0
    worker = state.workers[0]
    beating = Worker(alive=True, progress=worker.progress, seen=99.0, moved=0.0)
    assert hung(beating, False, 100.0) and not hung(beating, False, 100.0, state.limits)
    beating = Worker(alive=True, progress=worker.progress, seen=200.5, moved=0.0)
    assert hung(beating, False, 201.0, state.limits)


def test_a_source_in_trouble_is_read_again_before_its_notice_is_taken_for_false() -> None:
    assert DEFAULT.overdue_s >= MAX_RETRY_S
