"""Encodes a message to many nodes once.

An epoch change sends every node the same `Halt` and nearly the same `Install`. The recipes are by
far the largest part of an `Install`, and each recipe is for a single node; a node receives only its
own. The rest is encoded and deflated once. Otherwise a job of thousands of nodes would send a
gigabyte, and heartbeats would wait behind it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from elastic.core.protocol.messages import Install
from elastic.domain.types import Assignment, Recipe
from elastic.rpc.control.envelope import Envelope, encode_body, pack


class BroadcastEncoder:
    """Encodes messages to nodes. Keeps the newest encoded message, to send it to further nodes.

    Any thread may call `pack`, but all `Install` messages must come from the same thread.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], Envelope] = ((), Envelope(0, 0, "", b""))
        """Key and envelope, replaced together: another thread may pack between two reads."""
        self._assignment: Assignment | None = None
        self._common = b""
        self._recipes: dict[str, list[tuple[str, Recipe]]] = {}

    def pack(self, message: Any, *, term: int, epoch: int, node: str) -> Envelope:
        """Return an envelope with a message for `node`; "": for any node."""
        if isinstance(message, Install) and node:
            return self._install(message, term, epoch, node)
        key = (type(message), message, term, epoch)
        known, envelope = self._last
        if key != known:
            envelope = pack(message, term=term, epoch=epoch)
            self._last = key, envelope
        return envelope

    def _install(self, message: Install, term: int, epoch: int, node: str) -> Envelope:
        if message.assignment is not self._assignment:
            self._prepare(message)
        own = encode_body("Install", self._recipes.get(node, []))
        return Envelope(term, max(epoch, 0), "Install", own, common=self._common)

    def _prepare(self, message: Install) -> None:
        """Encode the common part, and sort the recipes by node."""
        assignment = message.assignment
        self._recipes = {}
        for node, recipe in assignment.recipes:
            self._recipes.setdefault(node, []).append((node, recipe))
        common = encode_body(
            "Install", replace(message, assignment=replace(assignment, recipes=()))
        )
        self._common, self._assignment = zlib.compress(common), assignment
