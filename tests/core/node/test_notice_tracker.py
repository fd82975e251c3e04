"""Notice tracker: effective notices, messages to the coordinator, return of a released node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.node import notice_tracker
from elastic.core.node.notice_tracker import (
    Acknowledge,
    NoticeTracker,
    ProviderNotice,
    RejoinJob,
    SendNotice,
)
from elastic.core.protocol.messages import NoticeKind

LEAVE, HINT = NoticeKind.LEAVE, NoticeKind.HINT


def one(
    identity: str, deadline: float, kind: NoticeKind = LEAVE, *, final: bool = False
) -> ProviderNotice:
    return ProviderNotice(identity.partition(":")[0], identity, kind, deadline, "", final)


def test_a_notice_is_sent_once() -> None:
    tracker, actions = notice_tracker.source_read(NoticeTracker(), "aws", [one("aws:1", 100.0)])
    assert actions == (SendNotice(one("aws:1", 100.0)),)
    for deadline in (100.0, 99.5, 130.0):
        tracker, actions = notice_tracker.source_read(tracker, "aws", [one("aws:1", deadline)])
        assert actions == ()
    assert notice_tracker.resend(tracker) == (SendNotice(one("aws:1", 100.0)),)


def test_a_withdrawal_is_sent_again_at_each_reconnect() -> None:
    """The first message is lost if it is sent while no coordinator is connected."""
    assert notice_tracker.resend(NoticeTracker()) == ()
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "aws", [one("aws:1", 100.0)])
    tracker, lost = notice_tracker.source_read(tracker, "aws", [])
    assert lost == notice_tracker.resend(tracker) == (SendNotice(None),)


def test_the_soonest_deadline_is_effective_and_a_hint_only_alone() -> None:
    tracker, actions = notice_tracker.source_read(
        NoticeTracker(), "aws", [one("aws:r", 600.0, HINT)]
    )
    assert actions == (SendNotice(one("aws:r", 600.0, HINT)),)
    tracker, actions = notice_tracker.source_read(tracker, "file", [one("file:1", 700.0)])
    assert actions == (SendNotice(one("file:1", 700.0)),)
    tracker, actions = notice_tracker.source_read(tracker, "http", [one("http:1", 50.0)])
    assert actions == (SendNotice(one("http:1", 50.0)),)
    tracker, actions = notice_tracker.source_read(tracker, "http", [])
    assert actions == ()  # the other notice remains
    tracker, actions = notice_tracker.source_read(tracker, "file", [])
    assert actions == (SendNotice(None), SendNotice(one("aws:r", 600.0, HINT)))
    _, actions = notice_tracker.source_read(tracker, "aws", [])
    assert actions == (SendNotice(None),)


def test_a_final_notice_makes_all_final() -> None:
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "aws", [one("aws:1", 50.0)])
    _, (told,) = notice_tracker.source_read(tracker, "signal", [one("signal", 90.0, final=True)])
    assert isinstance(told, SendNotice) and told.notice == one("aws:1", 50.0, final=True)


def test_an_overdue_notice_is_false_and_ignored_until_it_is_withdrawn() -> None:
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "gcp", [one("gcp:preempted", 30.0)])
    assert notice_tracker.expire_overdue(tracker, 59.0, 30.0) == (tracker, ())
    tracker, actions = notice_tracker.expire_overdue(tracker, 61.0, 30.0)
    assert actions == (SendNotice(None),)
    for deadline in (30.0, 91.0):
        tracker, actions = notice_tracker.source_read(
            tracker, "gcp", [one("gcp:preempted", deadline)]
        )
        assert actions == ()
    _, actions = notice_tracker.source_read(
        tracker, "gcp", [one("gcp:preempted", 30.0), one("gcp:maintenance", 200.0)]
    )
    assert actions == (SendNotice(one("gcp:maintenance", 200.0)),)
    tracker, actions = notice_tracker.source_read(tracker, "gcp", [])
    assert actions == ()
    _, actions = notice_tracker.source_read(tracker, "gcp", [one("gcp:preempted", 300.0)])
    assert actions == (SendNotice(one("gcp:preempted", 300.0)),)


def test_a_released_node_rejoins_when_no_notice_is_left() -> None:
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "azure", [one("azure:e", 30.0)])
    tracker, actions = notice_tracker.node_released(tracker)
    assert tracker.parked and actions == (Acknowledge(one("azure:e", 30.0)),)
    tracker, actions = notice_tracker.source_read(tracker, "aws", [one("aws:1", 40.0)])
    assert actions == ()
    tracker, actions = notice_tracker.source_read(tracker, "azure", [])
    assert tracker.parked and actions == ()
    tracker, actions = notice_tracker.source_read(tracker, "aws", [])
    assert not tracker.parked and actions == (RejoinJob(),) and tracker.sent is None
    _, actions = notice_tracker.source_read(tracker, "aws", [one("aws:2", 90.0)])
    assert actions == (SendNotice(one("aws:2", 90.0)),)


def test_a_released_node_rejoins_when_the_notice_was_false() -> None:
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "gcp", [one("gcp:preempted", 30.0)])
    tracker, _ = notice_tracker.node_released(tracker)
    assert notice_tracker.expire_overdue(tracker, 45.0, 30.0)[1] == ()
    tracker, actions = notice_tracker.expire_overdue(tracker, 61.0, 30.0)
    assert actions == (RejoinJob(),) and not tracker.parked


def test_a_notice_withdrawn_before_the_release() -> None:
    tracker, _ = notice_tracker.source_read(NoticeTracker(), "file", [one("file:1", 30.0)])
    tracker, _ = notice_tracker.source_read(tracker, "file", [])
    tracker, actions = notice_tracker.node_released(tracker)
    assert actions == (RejoinJob(),) and not tracker.parked


def test_a_final_notice_is_never_false() -> None:
    tracker, _ = notice_tracker.source_read(
        NoticeTracker(), "signal", [one("signal", 30.0, final=True)]
    )
    assert notice_tracker.expire_overdue(tracker, 1e9, 30.0) == (tracker, ())


def test_the_message_has_seconds_from_now() -> None:
    said = notice_tracker.notice_message("node1", "i", one("aws:1", 100.0), 40.0)
    assert (said.kind, said.deadline_s, said.provider) == (LEAVE, 60.0, "aws")
    assert notice_tracker.notice_message("node1", "i", one("aws:1", 100.0), 140.0).deadline_s == 0.0
    assert notice_tracker.notice_message("node1", "i", None, 0.0).kind is NoticeKind.NONE


HEARD = st.builds(
    one,
    st.sampled_from(["aws:1", "aws:2", "gcp:1"]),
    st.floats(0, 100),
    st.sampled_from([LEAVE, HINT]),
    final=st.booleans(),
)
EVENT = st.one_of(
    st.tuples(st.sampled_from(["aws", "gcp", "file"]), st.lists(HEARD, max_size=2)),
    st.floats(0, 300),
    st.none(),
)


@given(st.lists(EVENT, max_size=20))
def test_the_coordinator_always_knows_the_effective_notice(events: list[object]) -> None:
    """A parked node sends nothing, and rejoins once no notice keeps it away."""
    tracker, told = NoticeTracker(), None
    for event in events:
        was = tracker
        if isinstance(event, tuple):
            tracker, actions = notice_tracker.source_read(tracker, event[0], event[1])
        elif isinstance(event, float):
            tracker, actions = notice_tracker.expire_overdue(tracker, event, 30.0)
        else:
            tracker, actions = notice_tracker.node_released(tracker)
        for action in actions:
            assert not (isinstance(action, SendNotice) and tracker.parked)
            if isinstance(action, RejoinJob):
                told = None
            elif isinstance(action, SendNotice):
                told = action.notice
        strongest = tracker.effective
        assert tracker.parked is False or (strongest is not None and strongest.kind is LEAVE)
        if not tracker.parked:
            assert (told is None) == (strongest is None)
            assert told is None or strongest is None or told.kind is strongest.kind
        assert was.parked or tracker.parked or tracker.sent == told
