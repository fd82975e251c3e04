"""Rejects messages of unauthorized sessions, by `elastic.core.coordinator.authorization`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.core.coordinator.authorization import check_message
from elastic.core.job.membership import name_conflict
from elastic.core.job.state import JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import JoinRefused
from elastic.core.protocol.messages import NodePhase
from elastic.rpc.control.server import ClientSession
from elastic.rpc.security.rejections import REJECTIONS, Reason

PORT = "coordinator"


class SessionFilter:
    """Rejects messages that a session may not send. It counts the requests of each node that waits
    for a node name in use. `send(session, answer, epoch)` must wait until the state by which a
    message was judged is saved."""

    def __init__(self, send: Callable[[ClientSession, Any, int], object]) -> None:
        self._send = send
        self._waiting: dict[str, tuple[str, int]] = {}
        """(incarnation, number of requests) per node name."""

    def admit(self, state: JobState, session: ClientSession, message: Any) -> bool:
        """Return whether the message is accepted. A sender that is not a member gets an answer."""
        problem = check_message(state, session.sender, message)
        if problem is not None:
            REJECTIONS.count(PORT, Reason(problem.reason), session, problem.text)
            if problem.fence:
                self._send(session, _dismissal(message, problem.text), state.epoch)
            return False
        refusal = self._refusal(state, message) if isinstance(message, m.NodeReport) else None
        if refusal is None:
            return True
        REJECTIONS.count(PORT, Reason.STALE, session, refusal.reason)
        self._send(session, refusal, state.epoch)
        return False

    def _refusal(self, state: JobState, report: m.NodeReport) -> JoinRefused | None:
        """Return the answer to a node whose name another member uses; None: the name is free."""
        node, incarnation = report.info.node, report.info.incarnation
        former, requests = self._waiting.get(node, ("", 0))
        requests = requests if former == incarnation else 0
        refusal = name_conflict(state, report, state.updated_at, requests)
        if refusal is not None:
            self._waiting[node] = incarnation, requests + 1
        elif former == incarnation:
            del self._waiting[node]
        return refusal


def _dismissal(message: Any, text: str) -> m.Fenced | m.Released:
    """Return `Released` for an agent that has done nothing yet, else `Fenced`. Such an agent would
    answer `Fenced` with a report, which would be fenced again."""
    report = message if isinstance(message, m.NodeReport) else None
    new = report is not None and report.phase is NodePhase.EMPTY and report.epoch <= 0
    return m.Released(text) if new else m.Fenced(text)
