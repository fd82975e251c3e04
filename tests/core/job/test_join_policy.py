"""Short-lived nodes: rejected while a change costs more than they gain, used when it is free."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.job import epoch_change as change
from elastic.core.job import join_policy
from elastic.core.job import state as job
from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState, LogEntry, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.domain.types import NodeInfo
from elastic.planning.backup.loss_history import LossHistory
from elastic.planning.cost.profile import LinkProfile, profile_of
from elastic.planning.search.search import make_plan
from tests.core.state_access import plan_of
from tests.core.world.world import Fault, World

LONG_PAUSES = (50.0,) * 3
"""A third node halves the step, so it must stay for 150 s to be worth two such pauses."""


def running(nodes: int = 2) -> JobState:
    """State of a job in training on `nodes` nodes, with all copies protected."""
    world = World(5, nodes, steps=400)
    world.run(limit=4.0)
    state = world.coordinator.state
    assert state.phase is JobPhase.RUNNING and state.trimmed == state.epoch and state.change is None
    return state


def join(
    state: JobState, name: str, **info: Any
) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """Decision after a node has joined and its workers have attached."""
    new = NodeInfo(name, f"{name}.1", f"{name}:1", **info)
    now = state.updated_at + 0.01
    state, _, _ = transition(state, NodeReport(new, NodePhase.EMPTY, 0), now)
    ready = NodeReport(new, NodePhase.IDLE, 0, restart=0, able=True, elastic=True)
    return transition(state, ready, now + 0.01)


def spare_entries(actions: tuple[job.JobAction, ...]) -> list[LogEntry]:
    return [action for action in actions if isinstance(action, LogEntry) and action.kind == "spare"]


def test_a_node_expected_to_live_two_minutes_is_left_as_a_spare() -> None:
    state = running().of(pauses=LONG_PAUSES)
    after, actions, reason = join(state, "node9", lifetime_s=120.0)
    assert after.phase is JobPhase.RUNNING and not after.joining and after.plan == state.plan
    (note,) = spare_entries(actions)
    assert note.data["nodes"] == ["node9"]
    assert "node9 stay spare: expected to stay 120 s" in note.data["reason"]
    assert "pauses of 50 s in and 50 s out need 150 s to pay" in note.data["reason"]
    assert note.data["reason"] in reason
    again, actions, _ = transition(after, job.Tick(), after.updated_at + 30.0)
    assert not again.joining and not spare_entries(actions), "the same figures are considered once"


@pytest.mark.parametrize("lifetime_s", [0.0, 3000.0])
def test_a_node_that_stays_longer_is_used(lifetime_s: float) -> None:
    state = running().of(pauses=(20.0,), history=LossHistory(node_seconds=1e7))
    after, actions, _ = join(state, "node9", lifetime_s=lifetime_s)
    assert after.joining == ("node9",)
    assert any(isinstance(a, Send) and isinstance(a.message, m.Prefetch) for a in actions)


def test_two_minutes_are_enough_where_pauses_are_short() -> None:
    after, _, _ = join(running().of(pauses=(0.5,)), "node9", lifetime_s=120.0)
    assert after.joining == ("node9",)


def test_without_a_measured_pause_the_bytes_to_move_count() -> None:
    """A third of the layers moves in and out again over a link that needs a minute for it."""
    state = running().of(history=LossHistory(node_seconds=1e7))
    assert state.spec is not None and state.plan is not None
    # State so large that gradients and activations hardly count on the same link.
    heavy = tuple(replace(la, state_bytes=10**6 * la.state_bytes) for la in state.spec.layers)
    largest = max(la.param_bytes + la.state_bytes for la in heavy)
    slow = replace(profile_of(heavy), link=LinkProfile(bytes_per_s=largest / 60))
    spec, policy = replace(state.spec, layers=heavy), replace(state.policy, profile=slow)
    state = state.of(spec=spec, policy=policy)
    after, actions, _ = join(state, "node9", lifetime_s=120.0)
    assert not after.joining and "need" in spare_entries(actions)[0].data["reason"]
    known = join(state.of(pauses=(0.5,)), "node9", lifetime_s=120.0)[0]
    assert known.joining == ("node9",), "what was measured counts more"


def test_only_those_new_nodes_that_stay_are_used() -> None:
    """Both are considered together first."""
    state = running().of(pauses=LONG_PAUSES, history=LossHistory(node_seconds=1e7))
    state, _, _ = join(state, "node8", lifetime_s=120.0)
    state, _, _ = join(state, "node9")
    after, actions, _ = transition(
        state.of(considered=(), joining=()), job.Tick(), state.updated_at + 0.01
    )
    assert after.joining == ("node9",)
    (note,) = spare_entries(actions)
    assert note.data["nodes"] == ["node8"]


def test_a_new_node_is_used_although_another_one_dies_before_the_decision() -> None:
    """The plan has room for one of them. The dead one is a member until it is known to be lost."""
    state, _, _ = join(running(), "node8")
    dead = replace(state.members["node8"], connected=False)
    state = state.of(members={**state.members, "node8": dead}, joining=())
    state = state.of(policy=replace(state.policy, max_nodes=3))
    after, _, _ = join(state, "node9")
    assert "node8" in after.members and after.joining == ("node9",)


def test_a_changed_expected_stay_is_considered_again() -> None:
    calm = running().of(pauses=LONG_PAUSES, history=LossHistory(node_seconds=1e7))
    state, _, _ = join(calm, "node9", lifetime_s=120.0)
    report = state.members["node9"].report
    info = replace(report.info, lifetime_s=36000.0)
    after, _, _ = transition(state, replace(report, info=info), state.updated_at + 0.01)
    assert after.joining == ("node9",)


def test_after_many_losses_a_new_node_waits_for_a_calm_period() -> None:
    rough = running().of(pauses=LONG_PAUSES, history=LossHistory(50, 3600.0))
    state, actions, _ = join(rough, "node9")
    assert not state.joining
    assert "to the next change expected" in spare_entries(actions)[0].data["reason"]
    assert state.reconsider_at > state.updated_at
    early, _, _ = transition(state.of(updated_at=0.0), job.Tick(), state.reconsider_at - 1.0)
    assert not early.joining and early.reconsider_at == state.reconsider_at
    members = {name: replace(mb, seen=state.reconsider_at) for name, mb in state.members.items()}
    watch = replace(state.watch, since=state.reconsider_at)
    state = state.of(updated_at=0.0, members=members, watch=watch)
    after, _, _ = transition(state, job.Tick(), state.reconsider_at + 1.0)
    assert after.joining == ("node9",)


def test_a_node_that_is_idle_for_a_short_pause_is_used_in_calm_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a loss in rough times the planner keeps whole pipelines and leaves a node idle."""
    state = running(3)
    assert state.plan is not None
    now, request = state.updated_at, change.plan_request(state, state.epoch + 1)
    kept = make_plan(replace(request, nodes=request.nodes[:2]))
    rough = LossHistory(events=500.0, node_seconds=1000.0, counted_at=now)
    state = state.of(history=rough, pauses=(5.0,) * 3)
    with monkeypatch.context() as patch:
        patch.setattr(join_policy, "with_whole_pipelines", lambda request, best: kept)
        choice = join_policy.plan_for_change(state, request, now)
    assert choice.plan == kept and not choice.aside and 0 < choice.retry_s < inf
    considered = tuple(map(join_policy.member_key, state.members.values()))
    again_at = now + choice.retry_s
    state = state.of(plan=kept, considered=considered, reconsider_at=again_at)
    assert change.consider_joining(state, again_at - 1.0) is None
    found = change.consider_joining(join_policy.count_node_seconds(state, again_at), again_at)
    assert found is not None and len(found[0].joining) == 1, found


@pytest.mark.parametrize(("kind", "keeps"), [(CauseKind.JOIN, False), (CauseKind.DRAIN, True)])
def test_a_change_for_a_new_node_does_not_keep_the_pipelines_without_it(
    kind: CauseKind, keeps: bool
) -> None:
    """The pause was weighed before. Weighed again, it could lead to a change for nothing."""
    state = running(3)
    cause = Cause(kind, "node2", ("node2",))
    state, _, _ = change.begin_change(state, cause, state.updated_at, boundary=True)
    assert change.plan_request(state, state.epoch).keeps_pipelines is keeps


def away(state: JobState, node: str) -> JobState:
    """State after the connection of the node has broken."""
    event = job.ConnectionClosed(node, state.members[node].report.info.incarnation)
    return transition(state, event, state.updated_at + 0.01)[0]


def back(
    state: JobState, *nodes: str, **changes: Any
) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """State after these nodes have reported again, and the actions."""
    told: tuple[job.JobAction, ...] = ()
    for node in nodes:
        report = replace(state.members[node].report, **changes)
        state, actions, _ = transition(state, report, state.updated_at + 0.01)
        told += actions
    return state, told


def prefetches(actions: tuple[job.JobAction, ...]) -> list[Send]:
    return [a for a in actions if isinstance(a, Send) and isinstance(a.message, m.Prefetch)]


@pytest.mark.parametrize("cut", ["takeover", "reset"])
def test_a_node_that_reconnects_while_it_joins_is_used(cut: str) -> None:
    """Its order may be lost, so it is repeated. The order that it obeyed is not."""
    state, actions, _ = join(running().of(pauses=(0.5,)), "node9")
    (order,) = prefetches(actions)
    for fetched in (-1, state.epoch):
        if cut == "reset":
            after = away(state, "node9")
        else:
            after, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at + 1.0)
            after, _ = back(after, "node0", "node1")
        assert after.joining == ("node9",) and after.phase is JobPhase.RUNNING
        after, told = back(after, "node9", prefetched=fetched)
        assert prefetches(told) == ([order] if fetched < state.epoch else [])
        after, told = back(after, "node9", prefetched=state.epoch)
        assert after.phase is JobPhase.HALTING and after.change is not None
        assert after.change.cause == "join node9" and not prefetches(told)


def test_a_change_for_a_joining_node_does_not_begin_while_it_is_disconnected() -> None:
    state, _, _ = join(running().of(pauses=(0.5,)), "node9")
    state, _ = back(away(state, "node9"), "node0", "node1")
    state = state.of(joining_since=state.updated_at - 2 * state.limits.prefetch_s)
    while "node9" in state.members:
        assert state.phase is JobPhase.RUNNING and state.joining == ("node9",)
        beats = tuple(
            m.Heartbeat(node, state.members[node].report.info.incarnation, 0, 0)
            for node in ("node0", "node1")
        )
        state, _, _ = transition(state, job.Heartbeats(beats), state.updated_at + 0.2)
    assert state.phase is JobPhase.RUNNING and not state.joining and not state.joining_sources


@pytest.mark.parametrize("cut", ["takeover", "reset"])
def test_a_node_that_is_ready_while_others_reconnect_is_used(cut: str) -> None:
    state = running().of(pauses=(0.5,))
    new = NodeInfo("node9", "node9.1", "node9:1")
    state, _, _ = transition(state, NodeReport(new, NodePhase.EMPTY, 0), state.updated_at + 0.01)
    if cut == "reset":
        state = away(state, "node0")
    else:
        state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at + 1.0)
    state, told = back(state, "node9", phase=NodePhase.IDLE, restart=0, able=True, elastic=True)
    assert state.joining == ("node9",) and len(prefetches(told)) == 1


def test_a_node_that_is_disconnected_is_considered_when_it_is_back() -> None:
    state, _, _ = join(running().of(pauses=(0.5,)), "node9")
    state = change.without_joining(away(state, "node9"))
    state, _, _ = transition(state, job.Tick(), state.updated_at + 0.01)
    assert not state.joining and "node9.1" not in state.considered
    state, told = back(state, "node9")
    assert state.joining == ("node9",) and len(prefetches(told)) == 1


def test_a_node_whose_workers_crash_while_it_joins_is_considered_again() -> None:
    state, _, _ = join(running().of(pauses=(0.5,)), "node9")
    state, _ = back(state, "node9", phase=NodePhase.STARTING, able=False, cause="signal 11")
    assert not state.joining and "node9.1" not in state.considered
    state, told = back(state, "node9", phase=NodePhase.IDLE, able=True)
    assert state.joining == ("node9",) and len(prefetches(told)) == 1


def test_losses_node_seconds_and_pauses_are_counted() -> None:
    world = World(5, 3, steps=400)
    world.inject(Fault("kill", 3.0, 1))
    world.run(limit=6.0)
    state = world.coordinator.state
    assert state.history.events == pytest.approx(1, rel=1e-3)
    assert len(state.pauses) == 1 and 0 < state.pauses[0] < 2.0
    ahead = join_policy.outlook(state, world.now)
    assert ahead.pause_in_s == state.pauses[0] and ahead.events == pytest.approx(1, rel=1e-3)
    assert 3 * 2.5 + 2 * 2.5 < ahead.node_seconds < 3 * 6.0


def spare_job(lifetime_s: float) -> World:
    """Two nodes train, a third was rejected for its short stay, then node1 dies."""
    world = World(5, 2, steps=400)
    world.run(limit=2.0)
    world.coordinator.state = world.coordinator.state.of(pauses=LONG_PAUSES)
    world.lifetime_s = lifetime_s
    world.inject(Fault("join", 0.1))
    world.run(limit=3.0)
    assert (
        "node2" not in plan_of(world.coordinator.state).nodes()
        and not world.coordinator.state.joining
    )
    world.inject(Fault("kill", 0.1, 1))
    world.run(limit=6.0)
    assert world.coordinator.state.phase is JobPhase.RUNNING
    return world


def test_after_a_loss_the_spare_is_used_if_it_stays_long_enough() -> None:
    plan = spare_job(140.0).coordinator.state.plan
    assert plan is not None and set(plan.nodes()) == {"node0", "node2"}


def test_after_a_loss_the_spare_is_rejected_if_it_leaves_too_soon() -> None:
    plan = spare_job(30.0).coordinator.state.plan
    assert plan is not None and set(plan.nodes()) == {"node0"}
    assert plan.spares == ("node2",) and "node2 left aside: expected to stay" in plan.reason


def test_a_short_lived_spare_is_used_if_no_plan_fits_without_it() -> None:
    state = running().of(pauses=LONG_PAUSES)
    state, _, _ = join(state, "node9", lifetime_s=5.0)
    assert not state.joining
    gone = {name: mb for name, mb in state.members.items() if name == "node9"}
    choice = join_policy.plan_for_change(
        state,
        replace(change.plan_request(state, state.epoch + 1), nodes=(gone["node9"].report.info,)),
        state.updated_at,
    )
    assert choice.plan is not None and choice.plan.nodes() == ("node9",) and not choice.aside


def outlive(state: JobState, node: str) -> tuple[JobState, float]:
    """Wait until nobody knows any more when the node leaves; return that time."""
    unknown = state.members[node].expected_end + state.limits.overdue_s
    members = {name: replace(mb, seen=unknown) for name, mb in state.members.items()}
    watch = replace(state.watch, since=unknown)
    return state.of(updated_at=0.0, members=members, watch=watch), unknown


def test_a_spare_that_outlives_its_lifetime_is_used() -> None:
    """A moment after its expected end it may be late, and is not used yet."""
    state = running().of(pauses=LONG_PAUSES, history=LossHistory(node_seconds=1e7))
    state, _, _ = join(state, "node9", lifetime_s=120.0)
    state, unknown = outlive(state, "node9")
    early, _, _ = transition(state, job.Tick(), unknown - 1.0)
    assert not early.joining
    after, _, _ = transition(state, job.Tick(), unknown + 1.0)
    assert after.joining == ("node9",)
    rough = state.of(history=LossHistory(50, 3600.0))
    after, _, _ = transition(rough, job.Tick(), unknown + 1.0)
    assert not after.joining and after.reconsider_at > unknown + 60.0, "for another reason"


def test_a_change_leaves_no_node_aside_that_outlives_its_lifetime() -> None:
    state = spare_job(30.0).coordinator.state
    assert state.plan is not None and state.reconsider_at
    state, unknown = outlive(state, "node2")
    for now, aside in ((unknown - 1.0, ("node2",)), (unknown + 1.0, ())):
        request = change.plan_request(state, state.epoch + 1)
        assert join_policy.plan_for_change(state, request, now).aside == aside
    assert state.reconsider_at == pytest.approx(unknown)


def test_a_hint_counts_although_the_expected_end_has_passed() -> None:
    state = running().of(pauses=LONG_PAUSES)
    info, now = state.members["node1"].report.info, state.updated_at
    late = replace(state.members["node1"], expected_end=now - 1.0)
    hint = m.Notice("node1", info.incarnation, m.NoticeKind.HINT, "aws", 600.0)
    state, _, _ = transition(state.of(members={**state.members, "node1": late}), hint, now)
    assert state.members["node1"].expected_end == pytest.approx(now + 600.0)
