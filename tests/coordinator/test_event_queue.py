"""Events that wait for a busy coordinator count as of their arrival."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from elastic.coordinator import event_queue as module
from elastic.coordinator.event_queue import EventQueue
from elastic.core.coordinator.transitions import apply_rules, record_event
from elastic.core.job import state as job
from elastic.core.job.liveness import FEW
from elastic.core.job.state import JobPhase, JobState, Policy, Tick
from elastic.core.protocol.messages import Heartbeat, NodePhase, NodeReport
from elastic.core.protocol.timeouts import RECONNECTS_PER_S
from elastic.domain.types import NodeInfo
from tests.coordinator.helpers import START, ManualLoop

MOST = 10_000
BEAT = Heartbeat("a", "a-1", 0, 0)


class QueueLoop(ManualLoop):
    """With an event queue."""

    def __init__(self) -> None:
        super().__init__()
        self.events = EventQueue(lambda: self.now, lambda: 0.25)

    def taken(self) -> list[tuple[float, Any]]:
        return list(self.events.take(MOST))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[QueueLoop]:
    made = QueueLoop()
    monkeypatch.setattr(module, "event_loop", lambda: made)
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    made.events.start()
    yield made
    made.events.close()


def test_events_have_their_time_of_arrival(loop: QueueLoop) -> None:
    loop.advance(0.1)
    loop.events.put("a")
    loop.advance(0.2)
    loop.events.put("b")
    loop.advance(2.0)
    found = [(at - START, item) for at, item in loop.taken()]
    came = [(round(at, 6), item) for at, item in found if not isinstance(item, Tick)]
    assert came == [(0.1, "a"), (0.3, "b")]
    assert [at for at, _ in found] == sorted(at for at, _ in found), "and ticks lie between them"
    assert [item.late_s for at, item in found if isinstance(item, Tick)] == pytest.approx(
        [2.3 - 0.25 * number for number in range(10)]
    )


def test_take_respects_its_limit(loop: QueueLoop) -> None:
    for number in range(5):
        loop.events.put(number)
    assert [item for _, item in loop.events.take(3)][1:] == [0, 1] and len(loop.events) == 3
    assert [item for _, item in islice(loop.events.take(MOST), 1)] == [2]
    assert len(loop.events) == 2


def test_heartbeats_are_delivered_with_the_next_event(loop: QueueLoop) -> None:
    loop.taken()
    loop.events.receive("a", BEAT)
    assert not loop.taken() and len(loop.events) == 0, "a heartbeat wakes nobody"
    loop.events.receive("b", BEAT)
    loop.events.receive("a", "a report")
    loop.events.receive("c", BEAT)
    assert [item for _, item in loop.taken()] == [("a", BEAT), ("b", BEAT), ("a", "a report")]
    loop.advance(0.25)
    *before, last = loop.taken()
    assert [item for _, item in before] == [("c", BEAT)] and isinstance(last[1], Tick)
    loop.events.receive("c", BEAT)
    loop.events.receive("c")
    assert [item for _, item in loop.taken()] == [("c", BEAT), ("c", None)], (
        "the end of a session comes last"
    )


def test_a_closed_inbox_ticks_no_more(loop: QueueLoop) -> None:
    loop.events.close()
    loop.advance(1.0)
    loop.taken()
    loop.advance(1.0)
    assert not loop.taken()


# ---- with the rules ----


def waiting_job(*nodes: str) -> JobState:
    """A job whose nodes joined at START and that waits for one more."""
    state = JobState(policy=Policy(min_nodes=len(nodes) + 1))
    for node in nodes:
        report = NodeReport(NodeInfo(node, f"{node}-1", "h:1"), NodePhase.EMPTY, 0)
        state, _, _ = record_event(state, report, START)
    state, _, _ = apply_rules(state, START)
    assert state.phase is JobPhase.WAITING and set(state.members) == set(nodes)
    return state


def handle_all(
    state: JobState, loop: QueueLoop, together: int = MOST
) -> tuple[JobState, list[str]]:
    """Handle all events as the coordinator does. Return the state and the lost nodes."""
    lost: list[str] = []
    now = state.updated_at
    while batch := list(loop.events.take(together)):
        for at, event in batch:
            now = max(now, at)
            state, _, _ = record_event(state, event, now)
        state, actions, _ = apply_rules(state, now)
        lost += [
            a.data["node"] for a in actions if isinstance(a, job.LogEntry) and a.kind == "lost"
        ]
    return state, lost


@pytest.mark.parametrize("together", [3, MOST])
def test_nobody_is_lost_while_the_coordinator_plans(loop: QueueLoop, together: int) -> None:
    """It is busy for four lease times; two nodes send heartbeats, another one is silent."""
    state = waiting_job("speaks", "silent", "too")
    for _ in range(24):
        loop.advance(0.5)
        for node in ("speaks", "too"):
            loop.events.put(Heartbeat(node, f"{node}-1", 0, 0))
    state, lost = handle_all(state, loop, together)
    assert lost == ["silent"] and set(state.members) == {"speaks", "too"}
    for _ in range(14):
        loop.advance(0.5)
        loop.events.put(Heartbeat("too", "too-1", 0, 0))
    assert handle_all(state, loop)[1] == ["speaks"], "it was silent since then"


def test_a_delayed_network_thread_loses_no_node(loop: QueueLoop) -> None:
    state = waiting_job("a", "b")
    loop.advance(30.0, delayed=True)
    loop.advance(0.5)
    state, lost = handle_all(state, loop)
    assert not lost
    for _ in range(14):
        loop.advance(0.5)
        loop.events.put(Heartbeat("b", "b-1", 0, 0))
    assert handle_all(state, loop)[1] == ["a"]


@pytest.mark.parametrize(("late_s", "silence_s"), [(0.0, 3.0), (1.0, 4.0), (60.0, 6.0)])
def test_a_delayed_coordinator_waits_longer_but_not_forever(
    late_s: float, silence_s: float
) -> None:
    """Messages may be on their way, so the node is lost one lease time later."""
    state, lost_at, at = waiting_job("a", "b"), list[float](), START
    while not lost_at:
        at += 0.1
        state, _, _ = record_event(state, Tick(late_s), at)
        state, _, _ = record_event(state, Heartbeat("b", "b-1", 0, 0), at)
        state, actions, _ = apply_rules(state, at)
        lost_at = [at - START for a in actions if isinstance(a, job.LogEntry) and a.kind == "lost"]
    assert lost_at[0] == pytest.approx(silence_s, abs=0.11)


def test_a_delayed_coordinator_waits_longer_for_a_reconnect() -> None:
    state, _, _ = record_event(waiting_job("a", "b"), job.ConnectionClosed("a", "a-1"), START)
    report = replace(state.members["b"].report, suspects=("a",))
    for tenths in range(1, 25):
        state, _, _ = record_event(state, Tick(1.0), START + tenths / 10)
        state, _, _ = record_event(state, report, START + tenths / 10)
        state, _, _ = apply_rules(state, START + tenths / 10)
        assert ("a" in state.members) == (
            tenths / 10 < state.limits.closed_s + 0.95
        ) and "b" in state.members


def test_a_new_leader_waits_longer_for_many_nodes() -> None:
    """All nodes reconnect at the same time, one after the other."""
    few, many = waiting_job("a", "b"), waiting_job(*(f"n{number}" for number in range(200)))
    turns_s = (200 - FEW) / RECONNECTS_PER_S
    for state, longer_s, step_s in ((few, 0.0, 0.25), (many, 0.1 + turns_s, 0.5)):
        back = list(state.members.values())[: len(state.members) // 2]
        adopted, _, _ = record_event(state, job.CoordinatorFailover(), START)
        known, until = adopted, START + state.limits.adopt_s + longer_s
        while known.updated_at < until + 2 * step_s:
            now = known.updated_at + step_s
            known, _, _ = record_event(known, Tick(), now)
            for member in back:
                known, _, _ = record_event(known, member.report, now)
            known, _, _ = apply_rules(known, now)
            missing = state.members.keys() - known.members.keys()
            assert bool(missing) == (known.updated_at > until + 0.1)
            assert not missing & {member.node for member in back}
