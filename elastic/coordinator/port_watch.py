"""Finds out whether the agent of a disconnected node has ended.

A process that ends frees its ports, and its machine then refuses connections to them. A network
that fails refuses nothing. So the watch connects to the node's vault again and again, until the
node is back, is no longer a member, or its port refuses the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from elastic.core.job.state import PortRefused
from elastic.rpc.control.event_loop import event_loop

FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.5
"""First and longest pause between two attempts; it doubles."""
ATTEMPT_S = 2.0
"""Time limit of one attempt."""
MAX_ATTEMPTS = 64
"""Attempts at the same time."""


class PortWatch:
    """Watches the ports of disconnected nodes. `put(event)` is called, on the network thread, with
    a `PortRefused`. `is_away(node, incarnation)` tells whether the member is still disconnected."""

    def __init__(
        self, put: Callable[[PortRefused], object], is_away: Callable[[str, str], bool]
    ) -> None:
        self._put, self._is_away = put, is_away
        self._limit = asyncio.Semaphore(MAX_ATTEMPTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def watch(self, node: str, incarnation: str, vault: str) -> None:
        """Watch the port of `vault` (host:port). Any thread may call this."""
        event_loop().call_soon_threadsafe(self._begin, node, incarnation, vault)

    def close(self) -> None:
        """Stop all watches."""
        self._closed = True

    def _begin(self, node: str, incarnation: str, vault: str) -> None:
        task = event_loop().create_task(self._watch(node, incarnation, vault))
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, node: str, incarnation: str, vault: str) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed and self._is_away(node, incarnation):
            async with self._limit:
                refused = await is_refused(vault)
            if refused:
                self._put(PortRefused(node, incarnation))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)


async def is_refused(address: str, timeout_s: float = ATTEMPT_S) -> bool:
    """Return whether a connection to `address` (host:port) is refused."""
    host, _, port = address.rpartition(":")
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(opening, timeout_s)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # no route, no answer or no address: this shows nothing
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
