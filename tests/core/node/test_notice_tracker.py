"""The agent's desk: what stands, what the coordinator is told of it, and when a node that was let go returns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.node import notice_tracker as core
from elastic.core.node.notice_tracker import Acknowledge, Desk, Heard, Return, Tell
from elastic.core.protocol.messages import NoticeKind

LEAVE, HINT = NoticeKind.LEAVE, NoticeKind.HINT


def one(identity: str, deadline: float, kind: NoticeKind = LEAVE, *, final: bool = False) -> Heard:
    return Heard(identity.partition(":")[0], identity, kind, deadline, "", final)


def test_a_notice_is_told_once() -> None:
    desk, actions = core.heard(Desk(), "aws", [one("aws:1", 100.0)])
    assert actions == (Tell(one("aws:1", 100.0)),)
    for deadline in (100.0, 99.5, 130.0):
        desk, actions = core.heard(desk, "aws", [one("aws:1", deadline)])
        assert actions == ()
    assert core.again(desk) == (Tell(one("aws:1", 100.0)),)


def test_the_soonest_deadline_counts_and_a_hint_only_alone() -> None:
    desk, actions = core.heard(Desk(), "aws", [one("aws:r", 600.0, HINT)])
    assert actions == (Tell(one("aws:r", 600.0, HINT)),)
    desk, actions = core.heard(desk, "file", [one("file:1", 700.0)])
    assert actions == (Tell(one("file:1", 700.0)),)
    desk, actions = core.heard(desk, "http", [one("http:1", 50.0)])
    assert actions == (Tell(one("http:1", 50.0)),)
    desk, actions = core.heard(desk, "http", [])
    assert actions == ()  # it leaves all the same; later is no news
    desk, actions = core.heard(desk, "file", [])
    assert actions == (Tell(None), Tell(one("aws:r", 600.0, HINT)))
    _, actions = core.heard(desk, "aws", [])
    assert actions == (Tell(None),)


def test_a_final_notice_makes_all_final() -> None:
    desk, _ = core.heard(Desk(), "aws", [one("aws:1", 50.0)])
    _, (told,) = core.heard(desk, "signal", [one("signal", 90.0, final=True)])
    assert isinstance(told, Tell) and told.heard == one("aws:1", 50.0, final=True)


def test_a_notice_whose_deadline_is_long_past_was_false_and_is_not_heard_again() -> None:
    desk, _ = core.heard(Desk(), "gcp", [one("gcp:preempted", 30.0)])
    assert core.looked(desk, 59.0, 30.0) == (desk, ())
    desk, actions = core.looked(desk, 61.0, 30.0)
    assert actions == (Tell(None),)
    for deadline in (30.0, 91.0):
        desk, actions = core.heard(desk, "gcp", [one("gcp:preempted", deadline)])
        assert actions == ()
    _, actions = core.heard(desk, "gcp", [one("gcp:preempted", 30.0), one("gcp:maintenance", 200.0)])
    assert actions == (Tell(one("gcp:maintenance", 200.0)),)
    desk, actions = core.heard(desk, "gcp", [])
    assert actions == ()
    _, actions = core.heard(desk, "gcp", [one("gcp:preempted", 300.0)])
    assert actions == (Tell(one("gcp:preempted", 300.0)),)


def test_a_node_that_was_let_go_returns_when_nothing_stands() -> None:
    desk, _ = core.heard(Desk(), "azure", [one("azure:e", 30.0)])
    desk, actions = core.released(desk)
    assert desk.parked and actions == (Acknowledge(one("azure:e", 30.0)),)
    desk, actions = core.heard(desk, "aws", [one("aws:1", 40.0)])
    assert actions == ()
    desk, actions = core.heard(desk, "azure", [])
    assert desk.parked and actions == ()
    desk, actions = core.heard(desk, "aws", [])
    assert not desk.parked and actions == (Return(),) and desk.told is None
    _, actions = core.heard(desk, "aws", [one("aws:2", 90.0)])
    assert actions == (Tell(one("aws:2", 90.0)),)


def test_a_node_that_was_let_go_returns_when_the_notice_was_false() -> None:
    desk, _ = core.heard(Desk(), "gcp", [one("gcp:preempted", 30.0)])
    desk, _ = core.released(desk)
    assert core.looked(desk, 45.0, 30.0)[1] == ()
    desk, actions = core.looked(desk, 61.0, 30.0)
    assert actions == (Return(),) and not desk.parked


def test_a_notice_taken_back_while_the_node_is_let_go() -> None:
    desk, _ = core.heard(Desk(), "file", [one("file:1", 30.0)])
    desk, _ = core.heard(desk, "file", [])
    desk, actions = core.released(desk)
    assert actions == (Return(),) and not desk.parked


def test_a_final_notice_is_never_false() -> None:
    desk, _ = core.heard(Desk(), "signal", [one("signal", 30.0, final=True)])
    assert core.looked(desk, 1e9, 30.0) == (desk, ())


def test_seconds_from_now_go_to_the_coordinator() -> None:
    said = core.message("node1", "i", one("aws:1", 100.0), 40.0)
    assert (said.kind, said.deadline_s, said.provider) == (LEAVE, 60.0, "aws")
    assert core.message("node1", "i", one("aws:1", 100.0), 140.0).deadline_s == 0.0
    assert core.message("node1", "i", None, 0.0).kind is NoticeKind.NONE


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
def test_whatever_comes_the_coordinator_knows_what_counts(events: list[object]) -> None:
    """A parked node says nothing and returns once nothing keeps it away; a member's last word is what counts."""
    desk, told = Desk(), None
    for event in events:
        was = desk
        if isinstance(event, tuple):
            desk, actions = core.heard(desk, event[0], event[1])
        elif isinstance(event, float):
            desk, actions = core.looked(desk, event, 30.0)
        else:
            desk, actions = core.released(desk)
        for action in actions:
            assert not (isinstance(action, Tell) and desk.parked)
            if isinstance(action, Return):
                told = None
            elif isinstance(action, Tell):
                told = action.heard
        strongest = desk.strongest
        assert desk.parked is False or (strongest is not None and strongest.kind is LEAVE)
        if not desk.parked:
            assert (told is None) == (strongest is None)
            assert told is None or strongest is None or told.kind is strongest.kind
        assert was.parked or desk.parked or desk.told == told
