"""What waits for a busy coordinator was said in time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from elastic.coordinator import inbox as module
from elastic.coordinator.inbox import Inbox
from elastic.core.coordinator.transitions import apply_rules, record_event
from elastic.core.job.state import (
    ConnectionClosed,
    CoordinatorFailover,
    JobPhase,
    JobState,
    LogEntry,
    NodeReported,
    Policy,
    Tick,
)
from elastic.core.protocol.messages import Heartbeat, NodePhase, NodeReport
from elastic.domain.types import NodeInfo
from tests.coordinator.helpers import START, Hands

MOST = 10_000
BEAT = Heartbeat("a", "a-1", 0, 0)


class Bench(Hands):
    """With an inbox."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox(lambda: self.now, lambda: 0.25)

    def taken(self) -> list[tuple[float, Any]]:
        return list(self.inbox.take(MOST))


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(module, "event_loop", lambda: made)
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    made.inbox.start()
    yield made
    made.inbox.close()


def test_what_comes_has_the_time_at_which_it_came(hands: Bench) -> None:
    hands.wait(0.1)
    hands.inbox.put("a")
    hands.wait(0.2)
    hands.inbox.put("b")
    hands.wait(2.0)
    found = [(at - START, item) for at, item in hands.taken()]
    came = [(round(at, 6), item) for at, item in found if not isinstance(item, Tick)]
    assert came == [(0.1, "a"), (0.3, "b")]
    assert [at for at, _ in found] == sorted(at for at, _ in found), "and ticks lie between them"
    assert [item.late_s for at, item in found if isinstance(item, Tick)] == pytest.approx(
        [2.3 - 0.25 * number for number in range(10)]
    )


def test_no_more_are_taken_than_are_asked_for(hands: Bench) -> None:
    for number in range(5):
        hands.inbox.put(number)
    assert [item for _, item in hands.inbox.take(3)][1:] == [0, 1] and len(hands.inbox) == 3
    assert [item for _, item in islice(hands.inbox.take(MOST), 1)] == [2]
    assert len(hands.inbox) == 2


def test_heartbeats_go_with_what_comes_next(hands: Bench) -> None:
    hands.taken()
    hands.inbox.say("a", BEAT)
    assert not hands.taken() and len(hands.inbox) == 0, "nobody is woken for it"
    hands.inbox.say("b", BEAT)
    hands.inbox.say("a", "a report")
    hands.inbox.say("c", BEAT)
    assert [item for _, item in hands.taken()] == [("a", BEAT), ("b", BEAT), ("a", "a report")]
    hands.wait(0.25)
    *before, last = hands.taken()
    assert [item for _, item in before] == [("c", BEAT)] and isinstance(last[1], Tick)
    hands.inbox.say("c", BEAT)
    hands.inbox.say("c")
    assert [item for _, item in hands.taken()] == [("c", BEAT), ("c", None)], (
        "the end of a session comes last"
    )


def test_a_closed_inbox_ticks_no_more(hands: Bench) -> None:
    hands.inbox.close()
    hands.wait(1.0)
    hands.taken()
    hands.wait(1.0)
    assert not hands.taken()


# ---- with the rules ----


def job_of(*nodes: str) -> JobState:
    """Nodes that came at START; the job waits for one more."""
    state = JobState(policy=Policy(min_nodes=len(nodes) + 1))
    for node in nodes:
        report = NodeReport(NodeInfo(node, f"{node}-1", "h:1"), NodePhase.EMPTY, 0)
        state, _, _ = record_event(state, NodeReported(report), START)
    state, _, _ = apply_rules(state, START)
    assert state.phase is JobPhase.WAITING and set(state.members) == set(nodes)
    return state


def worked_off(state: JobState, hands: Bench, together: int = MOST) -> tuple[JobState, list[str]]:
    """As the coordinator does it; and who was lost."""
    lost: list[str] = []
    now = state.updated_at
    while batch := list(hands.inbox.take(together)):
        for at, event in batch:
            now = max(now, at)
            state, _, _ = record_event(state, event, now)
        state, actions, _ = apply_rules(state, now)
        lost += [a.data["node"] for a in actions if isinstance(a, LogEntry) and a.kind == "lost"]
    return state, lost


@pytest.mark.parametrize("together", [3, MOST])
def test_nobody_is_lost_while_the_coordinator_plans(hands: Bench, together: int) -> None:
    """It is busy for four leases, while one node speaks on, and another one falls silent."""
    state = job_of("speaks", "silent")
    for _ in range(24):
        hands.wait(0.5)
        hands.inbox.put(Heartbeat("speaks", "speaks-1", 0, 0))
    state, lost = worked_off(state, hands, together)
    assert lost == ["silent"] and set(state.members) == {"speaks"}
    hands.wait(7.0)
    assert worked_off(state, hands)[1] == ["speaks"], "of whom nothing was heard since"


def test_a_network_thread_that_is_held_up_accuses_nobody(hands: Bench) -> None:
    state = job_of("a")
    hands.wait(30.0, held_up=True)
    hands.wait(0.5)
    state, lost = worked_off(state, hands)
    assert not lost
    hands.wait(7.0)
    assert worked_off(state, hands)[1] == ["a"]


@pytest.mark.parametrize(("late_s", "silence_s"), [(0.0, 3.0), (1.0, 4.0), (60.0, 6.0)])
def test_who_is_behind_waits_longer_but_not_for_ever(late_s: float, silence_s: float) -> None:
    """Of what is still on its way nobody knows; a lease more, and the node is lost."""
    state, told, at = job_of("a"), list[float](), START
    while not told:
        at += 0.1
        state, _, _ = record_event(state, Tick(late_s), at)
        state, actions, _ = apply_rules(state, at)
        told = [at - START for a in actions if isinstance(a, LogEntry) and a.kind == "lost"]
    assert told[0] == pytest.approx(silence_s, abs=0.11)


def test_who_is_behind_waits_longer_for_who_may_come_back() -> None:
    state, _, _ = record_event(job_of("a", "b"), ConnectionClosed("a", "a-1"), START)
    for tenths in range(1, 20):
        state, _, _ = record_event(state, Tick(1.0), START + tenths / 10)
        state, _, _ = apply_rules(state, START + tenths / 10)
        assert ("a" in state.members) == (tenths / 10 < 1.15) and "b" in state.members


def test_a_coordinator_that_took_over_waits_longer_for_many() -> None:
    """All of them come at the same time."""
    few, many = job_of("a"), job_of(*(f"n{number}" for number in range(1000)))
    for state, longer_s in ((few, 0.0), (many, 0.5)):
        adopted, _, _ = record_event(state, CoordinatorFailover(), START)
        known, until = adopted, START + state.policy.adopt_s + longer_s
        for quarter in range(1, 20):
            known, _, _ = record_event(known, Tick(), START + quarter * 0.25)
            known, _, _ = apply_rules(known, START + quarter * 0.25)
            all_there = known.members.keys() == state.members.keys()
            assert all_there == (known.updated_at < until + state.policy.grace_s)
