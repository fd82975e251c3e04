"""Sessions whose words count: what `elastic.core.coordinator.authorization` objects to is refused, counted, and goes no further."""

from __future__ import annotations

from typing import Any

from elastic.core.coordinator.authorization import objection
from elastic.core.job.membership import occupied
from elastic.core.job.state import JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import Refused
from elastic.core.protocol.messages import NodePhase
from elastic.rpc.control.server import ClientSession
from elastic.rpc.security.rejections import REJECTIONS, Reason

PORT = "coordinator"


class Speakers:
    """Who may speak for a node. Remembers who waits for a name that is taken, and how often it asked."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[str, int]] = {}
        self._known: tuple[tuple[str, str], ...] = ()
        self._retired: frozenset[tuple[str, str]] = frozenset()

    def admit(self, state: JobState, session: ClientSession, message: Any) -> bool:
        """Whether the message is taken; who is no member (any more), or not yet, is told so, on its own session."""
        if state.retired is not self._known:
            self._known, self._retired = state.retired, frozenset(state.retired)
        problem = objection(state, session.sender, message, self._retired)
        if problem is not None:
            REJECTIONS.count(PORT, Reason(problem.reason), session, problem.text)
            if problem.fence:
                session.send(_farewell(message, problem.text), state.epoch)
            return False
        waits = self._waits(state, message) if isinstance(message, m.NodeReport) else None
        if waits is None:
            return True
        REJECTIONS.count(PORT, Reason.STALE, session, waits.reason)
        session.send(waits, state.epoch)
        return False

    def note(self, state: JobState, report: m.NodeReport) -> None:
        """A report that was admitted: if its node waited for the name, it waits no more."""
        if self._asked.get(report.info.node, ("", 0))[0] == report.info.incarnation:
            del self._asked[report.info.node]

    def _waits(self, state: JobState, report: m.NodeReport) -> Refused | None:
        """What is said to a node whose name is taken; no connected member is put out for it."""
        node, incarnation = report.info.node, report.info.incarnation
        former, asked = self._asked.get(node, ("", 0))
        asked = asked if former == incarnation else 0
        waits = occupied(state, report, state.ticked, asked)
        if waits is not None:
            self._asked[node] = incarnation, asked + 1
        return waits


def _farewell(message: Any, text: str) -> m.Fenced | m.Released:
    """An agent that holds nothing answers a fence with its report, which would be fenced again: it is to join anew."""
    nothing = isinstance(message, m.NodeReport) and message.phase is NodePhase.EMPTY
    return m.Released(text) if nothing else m.Fenced(text)
