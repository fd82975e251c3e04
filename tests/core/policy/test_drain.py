"""Notices of nodes: drains in time, together, withdrawn; hints with and without a spare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.authorization import check_message
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.epoch_change import begin_change, plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState, LogEntry, Send
from elastic.core.node import notice_tracker
from elastic.core.node.notice_tracker import NoticeTracker, ProviderNotice
from elastic.core.policy import drain
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase, NoticeKind
from elastic.domain.codec import dumps, loads
from elastic.domain.errors import InfeasiblePlan
from elastic.planning.search.search import PlanRequest
from tests.core.coordinator.test_transitions import halt, running, send_report, sent
from tests.core.health.test_diagnosis import planned, short_of_memory
from tests.core.state_access import change_of, plan_of

LEAVE, HINT, NONE = NoticeKind.LEAVE, NoticeKind.HINT, NoticeKind.NONE


def notice(
    state: JobState, node: str, kind: NoticeKind = LEAVE, deadline_s: float = 60.0, **more: object
) -> m.Notice:
    incarnation = state.members[node].report.info.incarnation
    return m.Notice(node, incarnation, kind, "aws", deadline_s, **more)  # type: ignore[arg-type]


def entries(actions: tuple[job.JobAction, ...], kind: str) -> list[dict[str, object]]:
    return [a.data for a in actions if isinstance(a, LogEntry) and a.kind == kind]


def test_a_node_with_a_notice_is_drained_at_the_end_of_the_step() -> None:
    state = running()
    after, actions, reason = transition(state, notice(state, "node1"), state.updated_at)
    assert reason == "node1 leaves within 60 s (aws); epoch 2: drain node1 (aws)"
    assert sent(actions, m.Halt) == [m.Halt(2, boundary=True)] * 3
    (note,) = entries(actions, "notice")
    assert (note["node"], note["provider"], note["notice"], note["deadline_s"]) == (
        "node1",
        "aws",
        "leave",
        60.0,
    )
    assert after.members["node1"].draining
    assert entries(actions, "drain") == [{"node": "node1", "deadline_s": 60.0}]


def test_short_notice_does_not_wait_for_the_end_of_the_step() -> None:
    state = running()
    _, actions, _ = transition(state, notice(state, "node1", deadline_s=1.0), state.updated_at)
    assert sent(actions, m.Halt) == [m.Halt(2)] * 3


def test_the_margin_grows_with_the_measured_pauses() -> None:
    state = running()
    state = state.of(seen=state.seen.grown(pause_s=4.0), timeouts=None)
    state, *_ = transition(state, job.Tick(), state.updated_at)
    assert state.limits.leave_s == 10.0
    _, actions, _ = transition(state, notice(state, "node1", deadline_s=9.0), state.updated_at)
    assert sent(actions, m.Halt) == [m.Halt(2)] * 3


def test_a_repeated_notice_changes_nothing_and_a_sooner_one_moves_the_deadline() -> None:
    state = running()
    state, *_ = transition(state, notice(state, "node1"), state.updated_at)
    for deadline_s in (60.0, 59.9, 300.0):
        after, actions, reason = transition(
            state, notice(state, "node1", deadline_s=deadline_s), state.updated_at
        )
        assert after == state and actions == () and "known" in reason
    after, actions, _ = transition(state, notice(state, "node1", deadline_s=20.0), state.updated_at)
    assert after.members["node1"].drain_deadline == pytest.approx(state.updated_at + 20.0)
    assert len(entries(actions, "notice")) == 1 and after.epoch == state.epoch


def test_many_notices_lead_to_one_change() -> None:
    state = running()
    state, *_ = transition(state, notice(state, "node1"), state.updated_at)
    state, _, reason = transition(state, notice(state, "node2"), state.updated_at)
    assert state.epoch == 2 and "epoch" not in reason
    for node in ("node0", "node1", "node2"):
        state = halt(state, node)
    assert state.phase is JobPhase.INSTALLING and state.plan is not None
    assert state.plan.nodes() == ("node0",)


def drained(state: JobState, node: str) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """State after a notice of `node` and the change to a plan without it."""
    assert state.plan is not None
    first = state.plan.pipelines[0]
    stages = tuple(
        replace(s, unit=replace(s.unit, node="node0")) if s.unit.node == node else s
        for s in first.stages
    )
    rest = tuple(p for p in state.plan.pipelines[1:] if all(s.unit.node != node for s in p.stages))
    plan = replace(state.plan, pipelines=(replace(first, stages=stages), *rest), peers=())
    state, actions, _ = transition(state.of(plan=plan), job.Tick(), state.updated_at)
    return state, actions


@pytest.mark.parametrize(("final", "word"), [(False, m.Released), (True, m.Stop)])
def test_a_drained_node_waits_or_ends(final: bool, word: type) -> None:
    state = running()
    noticed, *_ = transition(state, notice(state, "node2", final=final), state.updated_at)
    after, actions = drained(state.of(members=noticed.members), "node2")
    assert "node2" not in after.members
    assert [type(a.message) for a in actions if isinstance(a, Send) and a.node == "node2"] == [word]
    assert entries(actions, "drained") == [{"node": "node2"}]


@pytest.mark.parametrize(("final", "word"), [(False, m.Released), (True, m.Stop)])
def test_a_drained_node_that_missed_its_release_gets_it_again(final: bool, word: type) -> None:
    """The coordinator died before it sent the order, or the connection broke."""
    state = running()
    noticed, *_ = transition(state, notice(state, "node2", final=final), state.updated_at)
    after, _ = drained(state.of(members=noticed.members), "node2")
    after, _, _ = transition(
        loads(JobState, dumps(after)), job.CoordinatorFailover(), after.updated_at + 1.0
    )
    report = state.members["node2"].report
    beat = m.Heartbeat("node2", report.info.incarnation, report.step, 0)
    rejection = check_message(after, "node2", beat)
    assert rejection is not None and not rejection.fence, "its report comes next"
    assert transition(after, beat, after.updated_at)[1] == ()
    assert check_message(after, "node2", report) is None
    again, actions, reason = transition(after, report, after.updated_at)
    (order,) = actions
    assert isinstance(order, Send) and isinstance(order.message, word)
    assert reason == "node2: released before" and "node2" not in dict(again.absent)
    other = replace(report, info=replace(report.info, incarnation="next"))
    _, actions, _ = transition(after, other, after.updated_at)
    assert sent(actions, m.Fenced)
    joined, _, _ = transition(after, m.NodeReport(other.info, NodePhase.EMPTY, 0), after.updated_at)
    rejection = check_message(joined, "node2", report)
    assert rejection is not None and rejection.fence, "the next incarnation must not get the order"


def test_the_newest_released_nodes_are_remembered() -> None:
    state, known = running(), drain.RELEASED
    state = state.of(released=tuple((f"node{n}", "x", True) for n in range(5, 5 + known)))
    noticed, *_ = transition(state, notice(state, "node2"), state.updated_at)
    after, _ = drained(state.of(members=noticed.members), "node2")
    assert len(after.released) == known
    incarnation = state.members["node2"].report.info.incarnation
    assert after.released[-1] == ("node2", incarnation, False)


def test_a_drained_node_whose_disk_is_behind_is_not_released() -> None:
    """Parts of older checkpoints wait in its queue, and no part of them was reported yet."""
    state, *_ = transition(running(), job.DrainRequested("node2", 60.0), 4.0)
    for node in state.members:
        state = halt(state, node)
    state, *_ = send_report(state, "node2", writing=True, epoch=state.epoch)
    ready = {"phase": NodePhase.RUNNING, "resumed_at": 9.0, "protected": state.epoch}
    for node in plan_of(state).nodes():
        state, actions, _ = send_report(state, node, **ready)
    assert "node2" in state.members and not entries(actions, "drained")
    state, actions, _ = send_report(state, "node2", writing=False)
    assert "node2" not in state.members and entries(actions, "drained")


def test_a_withdrawn_notice_ends_the_drain() -> None:
    state = running()
    state, *_ = transition(state, notice(state, "node2"), state.updated_at)
    state, actions, reason = transition(state, notice(state, "node2", NONE), state.updated_at)
    assert "node2 stays after all" in reason and entries(actions, "notice")[0]["notice"] == "none"
    for node in ("node0", "node1", "node2"):
        state = halt(state, node)
    assert state.plan is not None and set(state.plan.nodes()) == {"node0", "node1", "node2"}
    _, actions, reason = transition(state, notice(state, "node2", NONE), state.updated_at)
    assert entries(actions, "notice") == [] and "none to take back" in reason


def test_a_paused_job_continues_when_the_notices_are_withdrawn() -> None:
    state = running()
    for node in ("node0", "node1", "node2"):
        state, *_ = transition(state, notice(state, node, deadline_s=1.0), state.updated_at)
    for node in ("node0", "node1", "node2"):
        state = halt(state, node)
    assert state.phase is JobPhase.PAUSED
    state, _, _ = transition(state, notice(state, "node1", NONE), state.updated_at)
    assert state.phase is JobPhase.HALTING


@pytest.mark.parametrize("hint", [False, True])
def test_a_notice_withdrawn_while_no_coordinator_is_connected_ends_the_drain(hint: bool) -> None:
    """The withdrawal, and a hint that follows it, reach the coordinator with the reconnect."""
    state = running()
    info, now = state.members["node1"].report.info, state.updated_at
    state, *_ = transition(state, notice(state, "node1"), now)
    assert state.members["node1"].drain_deadline
    told = (ProviderNotice("aws", "aws:1", LEAVE, now + 60.0),)
    left = (ProviderNotice("aws", "aws:2", HINT, now + 600.0),) if hint else ()
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "aws", told)
    tracker, _ = notice_tracker.source_read(tracker, "aws", left)
    for action in notice_tracker.resend(tracker):
        assert isinstance(action, notice_tracker.SendNotice)
        again = notice_tracker.notice_message("node1", info.incarnation, action.notice, now)
        state, *_ = transition(state, again, now)
    member = state.members["node1"]
    assert not member.draining and not member.drain_deadline
    assert member.expected_end == pytest.approx(now + 600.0 if hint else 0.0)


# ---- drains of nodes that the job needs --------------------------------------------------------


def two_of_three() -> tuple[JobState, job.Member]:
    """Two nodes train, which are both needed, and a third one that may join."""
    state = short_of_memory(3)
    third = state.members["node2"]
    two = {node: mb for node, mb in state.members.items() if node != "node2"}
    return planned(state.of(members=two)), third


def ticked(state: JobState, seconds: float) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The state after a while, in which all nodes are heard."""
    actions: tuple[job.JobAction, ...] = ()
    until = state.updated_at + seconds
    while state.updated_at < until:
        now = min(until, state.updated_at + 0.4)
        beats = tuple(
            job.Heartbeat(node, mb.report.info.incarnation, mb.report.step, 0, signs=int(now * 9))
            for node, mb in state.members.items()
        )
        state, more, _ = transition(state, job.Heartbeats(beats), now)
        actions += more
    return state, actions


@pytest.mark.parametrize("user", [True, False])
def test_a_drain_of_a_needed_node_waits_until_its_deadline(user: bool) -> None:
    state, _ = two_of_three()
    drain = job.DrainRequested("node1", 60.0) if user else notice(state, "node1")
    state, actions, reason = transition(state, drain, state.updated_at)
    assert "drain of node1 waits" in reason and state.phase is JobPhase.RUNNING
    asked, waits = entries(actions, "drain")
    assert "waits" not in asked and waits["node"] == "node1" and "memory" in str(waits["waits"])
    epoch, left_s = state.epoch, state.limits.leave_s
    state, actions = ticked(state, 59.0 - left_s)
    assert (state.phase, state.epoch, actions) == (JobPhase.RUNNING, epoch, ())
    state, actions = ticked(state, 1.5)
    assert sent(actions, m.Halt)[0] == m.Halt(epoch + 1) and state.members["node1"].draining


def test_a_drain_that_waits_begins_when_a_node_comes() -> None:
    state, third = two_of_three()
    state, _, _ = transition(state, job.DrainRequested("node1", 600.0), state.updated_at)
    state = state.of(members={**state.members, "node2": third})
    state, actions = ticked(state, 0.4)
    assert sent(actions, m.Halt)[0] == m.Halt(state.epoch, boundary=True)
    assert change_of(state).causes[-1].text == "drain node1"


def test_a_fault_during_the_wait_of_a_drain_pauses_no_job() -> None:
    """Workers of the other node crash. The plan still has the node."""
    state, _ = two_of_three()
    state, _, _ = transition(state, job.DrainRequested("node1", 600.0), state.updated_at)
    state, _, _ = transition(state, crashed(state, "node0"), state.updated_at + 0.1)
    assert state.phase is JobPhase.HALTING
    assert plan_if_feasible(plan_request(state, state.epoch)) is None, "its workers start"
    member = state.members["node0"]
    back = replace(member, report=replace(member.report, phase=NodePhase.IDLE, able=True))
    state = state.of(members={**state.members, "node0": back})
    assert plan_if_feasible(plan_request(state, state.epoch)) is not None


def test_a_planned_change_does_not_hide_the_deadline_of_a_drain_that_waits() -> None:
    """The change waits for the end of a long step."""
    state, _ = two_of_three()
    state, _, _ = transition(state, job.DrainRequested("node1", 60.0), state.updated_at)
    cause = Cause(CauseKind.BACKUP, "another scheme is better")
    state, _, _ = begin_change(state, cause, state.updated_at, boundary=True)
    epoch, left_s = state.epoch, state.limits.leave_s
    state, actions = ticked(state, 59.0 - left_s)
    assert (state.epoch, actions) == (epoch, ())
    state, actions = ticked(state, 1.5)
    assert sent(actions, m.Halt)[0] == m.Halt(epoch + 1)
    assert change_of(state).causes[-1].text == "notice of node1 runs out"


def test_a_node_that_came_while_nodes_halted_lets_the_drain_begin_with_the_next_plan() -> None:
    """So the leaving node gets no layers that the epoch after would move away."""
    state, third = two_of_three()
    state, _, _ = transition(state, job.DrainRequested("node1", 60.0), state.updated_at)
    cause = Cause(CauseKind.CONTACT, "contact lost")
    state, _, _ = begin_change(state, cause, state.updated_at)
    state = state.of(members={**state.members, "node2": third})
    for node in state.members:
        state = halt(state, node)
    assert state.phase is JobPhase.INSTALLING
    assert state.members["node1"].draining and set(plan_of(state).nodes()) == {"node0", "node2"}


def crashed(state: JobState, node: str) -> m.NodeReport:
    report = state.members[node].report
    return replace(report, phase=NodePhase.STARTING, able=False, crash_count=1, cause="signal 9")


def test_of_several_drains_those_begin_that_can() -> None:
    """The one with the earlier deadline. The other one waits for its turn."""
    state = planned(short_of_memory(3))
    first, second = plan_of(state).nodes()
    spare = next(node for node in state.members if node not in (first, second))
    late, *_ = transition(state, notice(state, first, deadline_s=600.0), state.updated_at)
    assert late.members[first].draining and late.phase is JobPhase.HALTING
    both, *_ = transition(
        late.of(phase=JobPhase.RUNNING, change=None),
        notice(late, second, deadline_s=60.0),
        late.updated_at,
    )
    waits = {node: not mb.draining and mb.drain_deadline > 0 for node, mb in both.members.items()}
    assert waits == {first: True, second: False, spare: False}


def test_a_needed_node_holds_back_no_drain_of_another_one() -> None:
    """No plan fits without the large node, which has the earliest deadline."""
    state = with_memory(running(), {"node0": 400, "node1": 60, "node2": 60})
    state = planned(state.of(policy=replace(state.policy, shape="auto")))
    state, *_ = transition(state, notice(state, "node0", deadline_s=600.0), state.updated_at)
    assert not state.members["node0"].draining and state.phase is JobPhase.RUNNING
    state, _, reason = transition(
        state, notice(state, "node1", deadline_s=3600.0), state.updated_at
    )
    assert state.members["node1"].draining and "drain node1 (aws)" in reason
    assert state.phase is JobPhase.HALTING and not state.members["node0"].draining


def with_memory(state: JobState, memory: dict[str, int]) -> JobState:
    """The job with members that have this memory, and are otherwise alike."""
    (like, *_) = state.members.values()
    members = {}
    for rank, (node, size) in enumerate(memory.items()):
        info = replace(like.report.info, node=node, incarnation=f"{node}.1", memory_bytes=size)
        members[node] = replace(like, report=replace(like.report, info=info), rank=rank)
    return state.of(members=members)


class Searches:
    """Searches for plans: one fits if the nodes have `needed` bytes of memory together."""

    def __init__(self, needed: int) -> None:
        self.needed, self.count = needed, 0

    def __call__(self, request: PlanRequest) -> None:
        self.count += 1
        if not self.fits(info.memory_bytes for info in request.nodes):
            raise InfeasiblePlan("memory is short")

    def fits(self, memory: Iterable[int]) -> bool:
        return sum(memory) >= self.needed


def notices_of_all(
    memory: dict[str, int], searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """The nodes that stay when all get a notice, in this order of their deadlines."""
    state = with_memory(running(), memory).of(phase=JobPhase.HALTING)
    members = {
        node: replace(mb, drain_deadline=state.updated_at + 600.0 + mb.rank, draining=True)
        for node, mb in state.members.items()
    }
    monkeypatch.setattr(drain, "make_plan", searches)
    settled = drain.settle(state.of(members=members), state.updated_at)
    assert settled is not None
    return {node for node, mb in settled[0].members.items() if not mb.draining}


@given(memory=st.lists(st.integers(1, 4), min_size=1, max_size=12), needed=st.integers(1, 30))
def test_each_node_leaves_with_which_a_plan_still_fits(memory: list[int], needed: int) -> None:
    nodes, searches = {f"node{i}": size for i, size in enumerate(memory)}, Searches(needed)
    with pytest.MonkeyPatch.context() as patched:
        stays = notices_of_all(nodes, searches, patched)
    rest = dict(nodes)
    for node in nodes:
        if searches.fits(size for other, size in rest.items() if other != node):
            del rest[node]
    assert stays == set(rest) and searches.count < 2 * len(nodes)


@pytest.mark.parametrize(
    ("needed", "most"), [(1, 8), (4 * 32, 12), (4 * 63, 16), (4 * 64, 8), (4 * 65, 8)]
)
def test_notices_of_many_like_nodes_take_few_searches_for_plans(
    needed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches(needed)
    stays = notices_of_all({f"node{i}": 4 for i in range(64)}, searches, monkeypatch)
    assert len(stays) == min(64, -(-needed // 4)) and searches.count <= most


def test_notices_of_all_nodes_pause_no_job_before_a_deadline() -> None:
    """All notices come while the nodes halt for the first one. One of the drains waits."""
    state = running()
    for node in ("node0", "node1", "node2"):
        state, *_ = transition(state, notice(state, node), state.updated_at)
    for node in ("node0", "node1", "node2"):
        state = halt(state, node)
    assert state.phase is JobPhase.INSTALLING
    (last,) = plan_of(state).nodes()
    assert [node for node, mb in state.members.items() if not mb.draining] == [last]


def test_a_drain_of_the_user_can_be_shortened() -> None:
    state, _ = two_of_three()
    state, _, _ = transition(state, job.DrainRequested("node1", 600.0), state.updated_at)
    _, actions, reason = transition(state, job.DrainRequested("node1", 900.0), state.updated_at)
    assert "already draining" in reason and not actions
    state, _, _ = transition(state, job.DrainRequested("node1", 60.0), state.updated_at)
    assert state.members["node1"].drain_deadline == pytest.approx(state.updated_at + 60.0)
    assert state.phase is JobPhase.RUNNING, "it waits"
    state, actions, _ = transition(state, job.DrainRequested("node1", 0.0), state.updated_at)
    assert sent(actions, m.Halt)[0] == m.Halt(state.epoch)


def test_a_notice_of_a_node_whose_drain_waits_can_be_taken_back() -> None:
    state, _ = two_of_three()
    state, *_ = transition(state, notice(state, "node1"), state.updated_at)
    after, actions, reason = transition(state, notice(state, "node1"), state.updated_at)
    assert "known" in reason and not actions and after == state
    state, _, reason = transition(state, notice(state, "node1", NONE), state.updated_at)
    assert "stays after all" in reason and not state.members["node1"].drain_deadline


def test_a_notice_does_not_change_a_drain_of_the_user() -> None:
    state = running()
    asked, *_ = transition(state, job.DrainRequested("node2", 60.0), state.updated_at)
    for kind in NoticeKind:
        after, *_ = transition(asked, notice(asked, "node2", kind, 90.0), asked.updated_at)
        assert after.members["node2"].draining and after.members["node2"].notice is None
    noticed, *_ = transition(state, notice(state, "node2"), state.updated_at)
    asked, actions, _ = transition(noticed, job.DrainRequested("node2", 600.0), noticed.updated_at)
    assert asked.members["node2"].notice is None and entries(actions, "drain")
    assert asked.members["node2"].drain_deadline == pytest.approx(state.updated_at + 60.0)


def test_a_hint_without_a_spare_only_sets_the_expected_end() -> None:
    state = running()
    state, actions, reason = transition(
        state, notice(state, "node1", HINT, 600.0), state.updated_at
    )
    assert state.epoch == 1 and "node1 is expected to go within 600 s" in reason
    assert state.members["node1"].expected_end == pytest.approx(state.updated_at + 600.0)
    assert entries(actions, "notice")[0]["notice"] == "hint"
    state, actions, _ = transition(state, notice(state, "node1", HINT, 600.0), state.updated_at)
    assert actions == ()
    state, *_ = transition(state, notice(state, "node1", NONE), state.updated_at)
    assert state.members["node1"].expected_end == 0.0


def with_spare() -> JobState:
    """State with node3 as a spare."""
    state = running()
    state = state.of(policy=replace(state.policy, max_nodes=3))
    like = state.members["node2"]
    info = replace(like.report.info, node="node3", incarnation="n3.1", vault="node3:1")
    report = replace(
        like.report, info=info, phase=NodePhase.IDLE, able=True, ready=(), resumed_at=0.0
    )
    spare = replace(like, report=report, rank=3)
    return state.of(members={**state.members, "node3": spare}, considered=("n3.1",))


def test_a_spare_replaces_a_node_with_a_hint() -> None:
    state = with_spare()
    away = replace(state.members["node3"], connected=False)
    after, _, _ = transition(
        state.of(members={**state.members, "node3": away}),
        notice(state, "node1", HINT, 600.0),
        state.updated_at,
    )
    assert after.phase is JobPhase.RUNNING, "the spare may be gone"
    state, actions, reason = transition(
        state, notice(state, "node1", HINT, 600.0), state.updated_at
    )
    assert "node1 may go, node3 can step in" in reason
    assert sent(actions, m.Halt)[0] == m.Halt(2, boundary=True)
    for node in ("node0", "node1", "node2"):
        state = halt(state, node)
    state, *_ = send_report(state, "node3", phase=NodePhase.HALTED, epoch=2)
    assert state.phase is JobPhase.INSTALLING and state.plan is not None
    assert (
        set(state.plan.nodes()) == {"node0", "node2", "node3"}
        and "node1 left aside" in state.plan.reason
    )
    assert "node1" in state.members, "it stays a spare"


def test_a_second_spare_replaces_the_second_node_with_a_hint() -> None:
    """Two nodes have a hint when the first spare comes. It replaces the one that goes first."""
    state = with_spare()
    spare = state.members["node3"]
    state = state.of(members={n: mb for n, mb in state.members.items() if n != "node3"})
    for node, end_s in (("node1", 900.0), ("node2", 600.0)):
        state, *_ = transition(state, notice(state, node, HINT, end_s), state.updated_at)
    state = state.of(members={**state.members, "node3": spare})
    state, _, reason = transition(state, job.Tick(), state.updated_at)
    assert "node2 may go, node3 can step in" in reason
    used = [node for node, mb in state.members.items() if mb.hint_used]
    assert used == ["node2"], "the hint of node1 counts for the next spare"


def test_notices_of_unknown_and_former_members_change_nothing() -> None:
    state = running()
    for event in (m.Notice("nobody", "x", LEAVE), m.Notice("node1", "former", LEAVE)):
        after, actions, _ = transition(state, event, state.updated_at)
        assert after == state and actions == ()
    over = state.of(ending=job.JobFinished(0, "done"), phase=JobPhase.FINISHED)
    _, actions, _ = transition(over, m.Notice("node9", "x", LEAVE), state.updated_at)
    assert actions == (Send("node9", m.Stop(0, "done")),)
