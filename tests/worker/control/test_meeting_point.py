"""Orders to halt meet a worker before, at and after the end of its micro-batches."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from elastic.core.protocol.messages import Halt, Promise
from elastic.worker.control.meeting_point import AtMeetingPoint, MeetingPoint
from elastic.worker.transport.cancellation import EpochAbandoned, LinkFailed
from tests.patience import LONG_S

OUTSIDE = Halt(3, outside=("a", "b"), lost=("c",))
PROMISE = Promise(3, 2, 7)


def meeting_point(*calls: Callable[[MeetingPoint], None]) -> MeetingPoint:
    """Return a meeting point of node a in epoch 2 after `calls`."""
    meeting = MeetingPoint("a")
    meeting.begin_epoch(2)
    for call in calls:
        call(meeting)
    return meeting


def depart(meeting: MeetingPoint) -> None:
    meeting.depart(7)


def arrive(meeting: MeetingPoint) -> None:
    meeting.arrive()


def accept(meeting: MeetingPoint) -> None:
    meeting.accept()


def test_a_worker_that_computes_promises_and_goes_on_until_it_arrives() -> None:
    meeting = meeting_point(depart)
    assert meeting.order(OUTSIDE) == PROMISE
    assert not meeting.arrived and not meeting.kept(3)
    with pytest.raises(AtMeetingPoint, match="epoch 3"):
        meeting.arrive()
    assert meeting.arrived and meeting.kept(3) and meeting.kept() and not meeting.kept(4)


def test_a_worker_that_has_arrived_promises_and_does_not_commit() -> None:
    meeting = meeting_point(depart, arrive)
    assert meeting.arrived and not meeting.kept()
    assert meeting.order(OUTSIDE) == PROMISE
    assert meeting.kept(3)
    with pytest.raises(EpochAbandoned, match="epoch 3"):
        meeting.accept()
    assert meeting.kept(3)


@pytest.mark.parametrize("calls", [(), (depart, arrive, accept)], ids=["before", "after"])
def test_a_worker_elsewhere_halts_at_once(
    calls: tuple[Callable[[MeetingPoint], None], ...],
) -> None:
    meeting = meeting_point(*calls)
    assert meeting.order(OUTSIDE) is None
    assert not meeting.kept()
    depart(meeting)  # the main thread has not seen the order yet
    assert meeting.order(Halt(4, outside=("a",))) is None, "it is about to leave"


@pytest.mark.parametrize("halt", [Halt(3), Halt(3, outside=("b",))], ids=["all", "others outside"])
@pytest.mark.parametrize("calls", [(depart,), (depart, arrive)], ids=["computing", "arrived"])
def test_a_worker_in_the_scope_halts_at_once(
    calls: tuple[Callable[[MeetingPoint], None], ...], halt: Halt
) -> None:
    meeting = meeting_point(*calls)
    assert meeting.order(halt) is None
    assert meeting.order(Halt(4, outside=("a",))) is None


@pytest.mark.parametrize("later", [Halt(4), Halt(4, outside=("a",))])
def test_a_promise_is_not_renewed(later: Halt) -> None:
    meeting = meeting_point(depart)
    assert meeting.order(OUTSIDE) == PROMISE
    assert meeting.order(later) is None
    with pytest.raises(AtMeetingPoint):
        meeting.arrive()
    assert meeting.kept(3) and not meeting.kept(4)


def test_an_old_order_changes_nothing() -> None:
    meeting = meeting_point(depart)
    assert meeting.order(Halt(2, outside=("a",))) is None
    assert meeting.order(OUTSIDE) == PROMISE


def test_a_new_epoch_forgets_the_promise() -> None:
    meeting = meeting_point(depart)
    meeting.order(OUTSIDE)
    meeting.begin_epoch(3)
    assert not meeting.kept() and not meeting.arrived
    meeting.depart(7)
    meeting.arrive()
    meeting.accept()
    meeting.depart(8)
    assert meeting.order(Halt(4, outside=("a",))) == Promise(4, 3, 8)


@pytest.mark.parametrize(
    ("calls", "error", "at_meeting_point"),
    [
        ((depart,), LinkFailed((1,), "broken"), False),
        ((depart,), EpochAbandoned("epoch 3"), False),
        ((depart, arrive), LinkFailed((1,), "broken"), True),
        ((depart, arrive), EpochAbandoned("epoch 3"), True),
        ((depart, arrive), ValueError("wrong"), False),
        ((depart, arrive, accept), LinkFailed((1,), "broken"), False),
    ],
)
def test_how_the_epoch_ends(
    calls: tuple[Callable[[MeetingPoint], None], ...], error: Exception, at_meeting_point: bool
) -> None:
    """After a failed collective the worker can still promise; its sums are complete."""
    meeting = meeting_point(*calls)
    with pytest.raises(type(error)), meeting:
        raise error
    assert meeting.arrived is at_meeting_point
    assert (meeting.order(OUTSIDE) is not None) is at_meeting_point
    assert meeting.kept(3) is at_meeting_point


def test_a_promise_is_broken_if_the_run_fails() -> None:
    meeting = meeting_point(depart)
    assert meeting.order(OUTSIDE) == PROMISE
    with pytest.raises(LinkFailed), meeting:
        raise LinkFailed((1,), "broken")
    assert not meeting.kept(3)


def test_either_the_promise_or_the_commit() -> None:
    """The order comes at about the same time as the result of the commit."""
    outcomes = set[tuple[bool, bool]]()
    for _ in range(200):
        meeting, both = meeting_point(depart, arrive), threading.Barrier(2, timeout=LONG_S)
        promises = list[Promise | None]()

        def receive(
            meeting: MeetingPoint = meeting,
            both: threading.Barrier = both,
            promises: list[Promise | None] = promises,
        ) -> None:
            both.wait()
            promises.append(meeting.order(OUTSIDE))

        thread = threading.Thread(target=receive)
        thread.start()
        both.wait()
        try:
            meeting.accept()
            accepted = True
        except AtMeetingPoint:
            accepted = False
        thread.join()
        outcomes.add((accepted, promises == [PROMISE]))
        assert meeting.kept(3) is not accepted
    assert outcomes <= {(True, False), (False, True)}
