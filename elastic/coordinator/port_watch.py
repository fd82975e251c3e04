"""Finds out whether the agent of a disconnected node has ended.

A process that ends frees its ports, and its machine then refuses connections to them. A network
that fails refuses nothing. So the watch connects to the node's vault again and again, until the
node is back, is no longer a member, or its port refuses the connection.

A firewall may refuse connections, too. So a refusal counts only if this coordinator has reached the
same port before. It tries the port once when the node connects (`check`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import Any

from elastic.core.job.state import PortRefused
from elastic.rpc.control.event_loop import event_loop

FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.5
"""First and longest pause between two attempts; it doubles."""
ATTEMPT_S = 2.0
"""Time limit of one attempt."""
MAX_ATTEMPTS = 64
"""Attempts at the same time."""
UNREACHED = (
    "the vault of %s at %s cannot be reached from here, so a node whose agent ends is lost only "
    "after --silence: let the coordinators connect to the ports of vaults"
)
log = logging.getLogger(__name__)


class Answer(Enum):
    """Answer to a connection."""

    OPEN = auto()
    REFUSED = auto()
    NONE = auto()
    """No route, no answer or no address. This shows nothing."""


class PortWatch:
    """Watches the ports of disconnected nodes. `put(event)` is called, on the network thread, with
    a `PortRefused`. `is_away(node, incarnation)` tells whether the member is still disconnected."""

    def __init__(
        self, put: Callable[[PortRefused], object], is_away: Callable[[str, str], bool]
    ) -> None:
        self._put, self._is_away = put, is_away
        self._limit = asyncio.Semaphore(MAX_ATTEMPTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reached: set[str] = set()
        """Vaults to which a connection was made."""
        self._checked: set[str] = set()
        """Vaults that were tried when their nodes connected."""
        self._closed = self._warned = False

    def check(self, node: str, incarnation: str, vault: str) -> None:
        """Try the port of `vault` (host:port) of a connected node, if the vault is new. The first
        failure is logged."""
        if vault not in self._checked:
            self._checked.add(vault)
            self._begin(self._check(node, incarnation, vault))

    def watch(self, node: str, incarnation: str, vault: str) -> None:
        """Watch the port of `vault` (host:port). Any thread may call this."""
        self._begin(self._watch(node, incarnation, vault))

    def close(self) -> None:
        """Stop all watches."""
        self._closed = True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            task = event_loop().create_task(work)
            self._tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._tasks.discard)

        event_loop().call_soon_threadsafe(begin)

    async def _check(self, node: str, incarnation: str, vault: str) -> None:
        reached = await self._ask(vault) is Answer.OPEN
        if reached or self._warned or self._closed or self._is_away(node, incarnation):
            return
        self._warned = True
        log.warning(UNREACHED, node, vault)

    async def _watch(self, node: str, incarnation: str, vault: str) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed and self._is_away(node, incarnation):
            if await self._ask(vault) is Answer.REFUSED and vault in self._reached:
                self._reached.discard(vault)
                self._put(PortRefused(node, incarnation))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _ask(self, vault: str) -> Answer:
        async with self._limit:
            answer = await ask(vault)
        if answer is Answer.OPEN:
            self._reached.add(vault)
        return answer


async def ask(address: str, timeout_s: float = ATTEMPT_S) -> Answer:
    """Connect to `address` (host:port), and return the answer."""
    host, _, port = address.rpartition(":")
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(opening, timeout_s)
    except ConnectionRefusedError:
        return Answer.REFUSED
    except (OSError, ValueError):
        return Answer.NONE
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Answer.OPEN
