"""The job's state as text, as `elastic.core.codec` writes it, without encoding again what has not changed.

A state is never changed in place, so what is the same object is the same text. In a job of thousands of nodes a save
follows nearly every report, and the assignment alone has tens of thousands of recipes.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from elastic.core import codec
from elastic.core.job import JobState, Member
from elastic.core.messages import NodeReport

SEPARATORS = (",", ":")


class StateText:
    """Remembers the texts of the newest state. One thread at a time."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[Any, str]] = {}
        self._reports: dict[str, tuple[NodeReport, str]] = {}

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
        for node in self._reports.keys() - members.keys():
            del self._reports[node]
        return f"{{{','.join(f'{json.dumps(n)}:{self._member(n, mb)}' for n, mb in members.items())}}}"

    def _member(self, node: str, member: Member) -> str:
        known = self._reports.get(node)
        if known is None or known[0] is not member.report:
            known = self._reports[node] = (member.report, codec.dumps(member.report))
        rest = {f: codec.encode(getattr(member, f)) for f in REST}
        return f'{{"report":{known[1]},{json.dumps(rest, separators=SEPARATORS)[1:]}'


REST = tuple(field.name for field in dataclasses.fields(Member))[1:]
"""What follows a member's report."""
