"""What the coordinator says to many nodes at once, encoded once.

An epoch change sends every node the same `Halt` and nearly the same `Install`: the recipes, by far its largest part,
are for single nodes, and each node gets its own alone. The rest is deflated once: a job of thousands of nodes would
send a gigabyte otherwise, during which no heartbeat gets through.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from elastic.core.protocol.messages import Install
from elastic.domain import codec
from elastic.domain.types import Assignment, Recipe
from elastic.rpc.envelope import Envelope, check_size, pack


class Parcels:
    """Remembers the newest message. One thread at a time."""

    def __init__(self) -> None:
        self._last: tuple[Any, int, int, Envelope] | None = None
        self._assignment: Assignment | None = None
        self._common = b""
        self._recipes: dict[str, list[tuple[str, Recipe]]] = {}

    def pack(self, message: Any, *, term: int, epoch: int, node: str) -> Envelope:
        """As `elastic.rpc.envelope.pack`, for `node`; "": for anybody."""
        if isinstance(message, Install) and node:
            return self._install(message, term, epoch, node)
        last = self._last
        if (
            last is not None
            and last[1:3] == (term, epoch)
            and type(last[0]) is type(message)
            and last[0] == message
        ):
            return last[3]
        envelope = pack(message, term=term, epoch=epoch)
        self._last = (message, term, epoch, envelope)
        return envelope

    def _install(self, message: Install, term: int, epoch: int, node: str) -> Envelope:
        if message.assignment is not self._assignment:
            self._learn(message)
        own = codec.dumps(self._recipes.get(node, [])).encode()
        return Envelope(term, max(epoch, 0), "Install", own, common=self._common)

    def _learn(self, message: Install) -> None:
        """Encode what is common, and sort recipes by node."""
        assignment = message.assignment
        self._recipes = {}
        for node, recipe in assignment.recipes:
            self._recipes.setdefault(node, []).append((node, recipe))
        text = codec.dumps(replace(message, assignment=replace(assignment, recipes=()))).encode()
        check_size("Install", text)
        self._common, self._assignment = zlib.compress(text), assignment
