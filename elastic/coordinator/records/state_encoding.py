"""The job's state as text, as `elastic.domain.codec` writes it, without encoding again what has not changed.

A state is never changed in place, so what is the same object is the same text. In a job of thousands of nodes a save
often follows a few reports, and the assignment alone has tens of thousands of recipes.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from typing import Any

from elastic.core.job.state import JobState, Member
from elastic.core.protocol.messages import NodeReport
from elastic.domain import codec


class StateText:
    """Remembers the texts of the newest state. One thread at a time."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[Any, str]] = {}
        self._known: dict[str, tuple[NodeReport, tuple[Any, ...], str, str]] = {}

    def dumps(self, state: JobState) -> str:
        """The same as `codec.dumps(state)`."""
        parts = []
        for field in dataclasses.fields(state):
            value = getattr(state, field.name)
            text = self._members(value) if field.name == "members" else self._text(field.name, value)
            parts.append(f'"{field.name}":{text}')
        return f"{{{','.join(parts)}}}"

    def _text(self, name: str, value: Any) -> str:
        known = self._fields.get(name)
        if known is None or known[0] is not value:
            known = self._fields[name] = (value, codec.dumps(value))
        return known[1]

    def _members(self, members: dict[str, Member]) -> str:
        for node in self._known.keys() - members.keys():
            del self._known[node]
        return f"{{{','.join([self._member(n, mb) for n, mb in members.items()])}}}"

    def _member(self, node: str, member: Member) -> str:
        """With its name. Heartbeats change one number of it, many times between two saves."""
        known, report, rest = self._known.get(node), member.report, _rest(member)
        if known is None or known[0] is not report or known[1] != rest:
            texts = {name: codec.dumps(value) for name, value in zip(REST, rest, strict=True)}
            before = f'{json.dumps(node)}:{{"report":{codec.dumps(report)},"seen":'
            after = "".join(f',"{name}":{text}' for name, text in texts.items()) + "}"
            known = self._known[node] = (report, rest, before, after)
        return f"{known[2]}{codec.dumps(member.seen)}{known[3]}"


REST = tuple(field.name for field in dataclasses.fields(Member))[2:]
"""What follows a member's report and when it was seen."""
_rest = operator.attrgetter(*REST)
