"""Who may speak for a node: a second agent of its name waits, and what was replaced stays out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from elastic.coordinator.session_filter import Speakers
from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import Refused
from elastic.core.protocol.messages import NodePhase
from elastic.domain import codec
from elastic.rpc.control.server import ClientSession
from tests.core.health.test_diagnosis import running

NODE = "node1"


@dataclass
class Line:
    """A session that keeps what is sent on it."""

    sender: str = NODE
    told: list[Any] = field(default_factory=list)

    def send(self, message: Any, epoch: int) -> None:
        self.told.append(message)

    def last(self) -> Any:
        return self.told[-1]


def admit(speakers: Speakers, state: JobState, line: Line, message: Any) -> bool:
    return speakers.admit(state, cast(ClientSession, line), message)


def newcomer(state: JobState, incarnation: str) -> m.NodeReport:
    info = replace(state.members[NODE].report.info, incarnation=incarnation)
    return m.NodeReport(info, NodePhase.EMPTY, 0)


def closed(state: JobState) -> JobState:
    event = job.Closed(NODE, state.members[NODE].report.info.incarnation)
    return transition(state, event, state.ticked)[0]


def test_a_second_agent_of_a_connected_members_name_waits_and_asks_ever_less_often() -> None:
    state, speakers, line = running(), Speakers(), Line()
    waits = []
    for _ in range(6):
        assert not admit(speakers, state, line, newcomer(state, "other"))
        waits.append(line.last().retry_s)
        assert isinstance(line.last(), Refused) and "is connected" in line.last().reason
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert admit(speakers, state, Line(), state.members[NODE].report), "the member itself goes on"
    assert not admit(speakers, state, line, newcomer(state, "third")) and line.last().retry_s == 0.5


def test_an_agent_that_was_killed_and_started_again_gets_in_once_the_old_connection_is_closed() -> None:
    state, speakers, line = running(), Speakers(), Line()
    report = newcomer(state, "again")
    assert not admit(speakers, state, line, report), "the news of the end comes later"
    assert line.last().retry_s <= 0.5
    state = closed(state)
    assert admit(speakers, state, line, report)
    speakers.note(state, report)
    state, _, _ = transition(state, job.Reported(report, True), state.ticked)
    assert state.members[NODE].report.info.incarnation == "again"
    assert not admit(speakers, state, line, newcomer(state, "more")) and line.last().retry_s == 0.5


def test_what_was_replaced_stays_out_also_after_a_failover() -> None:
    state = closed(running())
    former = state.members[NODE].report
    state, _, _ = transition(state, job.Reported(newcomer(state, "again"), True), state.ticked)
    state = codec.loads(JobState, codec.dumps(state))
    state, _, _ = transition(state, job.Adopted(), state.ticked)
    line = Line()
    assert not admit(Speakers(), state, line, former) and isinstance(line.last(), m.Fenced)
    empty = replace(newcomer(state, former.info.incarnation))
    assert not admit(Speakers(), state, line, empty)
    assert isinstance(line.last(), m.Released), "it has nothing to give up: it joins anew"
