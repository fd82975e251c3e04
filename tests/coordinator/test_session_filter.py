"""A second agent with a node's name waits; a replaced agent is not admitted again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from elastic.coordinator.session_filter import SessionFilter
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import JoinRefused
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from elastic.rpc.control.server import ClientSession
from tests.core.health.test_diagnosis import running

NODE = "node1"


@dataclass
class FakeSession:
    """Keeps the messages that are sent on it."""

    sender: str = NODE
    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any, epoch: int) -> None:
        self.sent.append(message)

    def last(self) -> Any:
        return self.sent[-1]


def made() -> SessionFilter:
    """A filter whose answers are sent at once."""
    return SessionFilter(lambda session, answer, epoch: session.send(answer, epoch))


def admit(filter: SessionFilter, state: JobState, session: FakeSession, message: Any) -> bool:
    return filter.admit(state, cast(ClientSession, session), message)


def newcomer(state: JobState, incarnation: str) -> m.NodeReport:
    info = replace(state.members[NODE].report.info, incarnation=incarnation)
    return m.NodeReport(info, NodePhase.EMPTY, 0)


def closed(state: JobState) -> JobState:
    event = job.ConnectionClosed(NODE, state.members[NODE].report.info.incarnation)
    return transition(state, event, state.updated_at)[0]


def test_a_second_agent_with_a_members_name_waits_with_growing_pauses() -> None:
    state, filter, session = running(), made(), FakeSession()
    waits = []
    for _ in range(6):
        assert not admit(filter, state, session, newcomer(state, "other"))
        waits.append(session.last().retry_s)
        assert isinstance(session.last(), JoinRefused) and "is connected" in session.last().reason
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert admit(filter, state, FakeSession(), state.members[NODE].report), (
        "the member itself is admitted"
    )
    assert (
        not admit(filter, state, session, newcomer(state, "third"))
        and session.last().retry_s == 0.5
    )


def test_a_restarted_agent_is_admitted_after_the_old_connection_closes() -> None:
    state, filter, session = running(), made(), FakeSession()
    report = newcomer(state, "again")
    assert not admit(filter, state, session, report), "the old connection is still open"
    assert session.last().retry_s <= 0.5
    state = closed(state)
    assert admit(filter, state, session, report)
    state, _, _ = transition(state, report, state.updated_at)
    assert state.members[NODE].report.info.incarnation == "again"
    assert (
        not admit(filter, state, session, newcomer(state, "more")) and session.last().retry_s == 0.5
    )


def test_a_replaced_agent_stays_out_after_a_failover() -> None:
    state = closed(running())
    former = state.members[NODE].report
    state, _, _ = transition(state, newcomer(state, "again"), state.updated_at)
    state = codec.loads(JobState, codec.dumps(state))
    state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at)
    session = FakeSession()
    assert not admit(made(), state, session, former) and isinstance(session.last(), m.Fenced)
    empty = replace(newcomer(state, former.info.incarnation))
    assert not admit(made(), state, session, empty)
    assert isinstance(session.last(), m.Released), "an empty agent is told to join anew"
