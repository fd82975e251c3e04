"""What waits for a busy coordinator was said in time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from elastic.coordinator import inbox as module
from elastic.coordinator.inbox import Inbox
from elastic.core.coordinator import learn, settle
from elastic.core.job import Beat, JobPhase, JobState, Note, Policy, Reported, Tick
from elastic.core.messages import NodePhase, NodeReport
from elastic.core.types import NodeInfo

START, MOST = 1000.0, 10_000


class Hands:
    """A clock that is moved by hand, and an inbox whose network thread is, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._timers = START, list[tuple[float, Any, float]]()
        monkeypatch.setattr(module, "event_loop", lambda: self)
        monkeypatch.setattr(module, "WAIT_S", 0.01)
        self.inbox = Inbox(lambda: self.now, lambda: 0.25)
        self.inbox.start()

    def call_soon_threadsafe(self, call: Any, due: float) -> None:
        call(due)

    def call_later(self, after_s: float, call: Any, due: float) -> None:
        self._timers.append((self.now + after_s, call, due))

    def wait(self, seconds: float, held_up: bool = False) -> None:
        """Timers go off, unless the network thread is held up; those that are over then go off late."""
        end = self.now + seconds
        while not held_up and self._timers and self._timers[0][0] <= end:
            at, call, due = self._timers.pop(0)
            self.now = max(self.now, at)
            call(due)
        self.now = end

    def taken(self) -> list[tuple[float, Any]]:
        return list(self.inbox.take(MOST))


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hands]:
    made = Hands(monkeypatch)
    yield made
    made.inbox.close()


def test_what_comes_has_the_time_at_which_it_came(hands: Hands) -> None:
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


def test_no_more_are_taken_than_are_asked_for(hands: Hands) -> None:
    for number in range(5):
        hands.inbox.put(number)
    assert [item for _, item in hands.inbox.take(3)][1:] == [0, 1] and len(hands.inbox) == 3
    assert [item for _, item in islice(hands.inbox.take(MOST), 1)] == [2]
    assert len(hands.inbox) == 2


def test_heartbeats_go_with_what_comes_next(hands: Hands) -> None:
    hands.taken()
    hands.inbox.hear("beat", soon=False)
    assert not hands.taken() and len(hands.inbox) == 0, "nobody is woken for it"
    hands.inbox.hear("beat again", soon=False)
    hands.inbox.hear("a report", soon=True)
    hands.inbox.hear("the last beat", soon=False)
    assert [item for _, item in hands.taken()] == ["beat", "beat again", "a report"]
    hands.wait(0.25)
    *before, last = hands.taken()
    assert [item for _, item in before] == ["the last beat"] and isinstance(last[1], Tick)


def test_a_closed_inbox_ticks_no_more(hands: Hands) -> None:
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
        state, _, _ = learn(state, Reported(report), START)
    state, _, _ = settle(state, START)
    assert state.phase is JobPhase.WAITING and set(state.members) == set(nodes)
    return state


def worked_off(state: JobState, hands: Hands, together: int = MOST) -> tuple[JobState, list[str]]:
    """As the coordinator does it; and who was lost."""
    lost: list[str] = []
    now = state.ticked
    while batch := list(hands.inbox.take(together)):
        for at, event in batch:
            now = max(now, at)
            state, _, _ = learn(state, event, now)
        state, actions, _ = settle(state, now)
        lost += [a.data["node"] for a in actions if isinstance(a, Note) and a.kind == "lost"]
    return state, lost


@pytest.mark.parametrize("together", [3, MOST])
def test_nobody_is_lost_while_the_coordinator_plans(hands: Hands, together: int) -> None:
    """It is busy for four leases, while one node speaks on, and another one falls silent."""
    state = job_of("speaks", "silent")
    for _ in range(24):
        hands.wait(0.5)
        hands.inbox.hear(Beat("speaks", "speaks-1", 0, 0), soon=False)
    state, lost = worked_off(state, hands, together)
    assert lost == ["silent"] and set(state.members) == {"speaks"}
    hands.wait(7.0)
    assert worked_off(state, hands)[1] == ["speaks"], "of whom nothing was heard since"


def test_a_network_thread_that_is_held_up_accuses_nobody(hands: Hands) -> None:
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
        state, _, _ = learn(state, Tick(late_s), at)
        state, actions, _ = settle(state, at)
        told = [at - START for a in actions if isinstance(a, Note) and a.kind == "lost"]
    assert told[0] == pytest.approx(silence_s, abs=0.11)
