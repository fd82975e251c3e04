"""Sessions whose words count: what `elastic.core.speech` objects to is refused, counted, and goes no further."""

from __future__ import annotations

from typing import Any

from elastic.core import messages as m
from elastic.core.job import JobState
from elastic.core.speech import objection
from elastic.rpc.refusals import REFUSALS, Reason
from elastic.rpc.server import Session

PORT = "coordinator"


class Speakers:
    """Remembers incarnations that were replaced, which never come back."""

    def __init__(self) -> None:
        self._retired: set[tuple[str, str]] = set()

    def admit(self, state: JobState, session: Session, message: Any) -> bool:
        """Whether the message is taken; who is no member any more is told so, on its own session."""
        problem = objection(state, session.sender, message, self._retired)
        if problem is None:
            return True
        REFUSALS.count(PORT, Reason(problem.reason), session, problem.text)
        if problem.fence:
            session.send(m.Fenced(problem.text), state.epoch)
        return False

    def note(self, state: JobState, report: m.NodeReport) -> None:
        """A report that was admitted: if it begins a new incarnation of a member, the former is over."""
        member = state.members.get(report.info.node)
        if member is not None and member.report.info.incarnation != report.info.incarnation:
            self._retired.add((report.info.node, member.report.info.incarnation))
