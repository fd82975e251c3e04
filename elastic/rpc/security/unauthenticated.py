"""Places for connections that have not authenticated yet, apart from those of members.

A member authenticates within milliseconds, an attacker never. When all places are taken, the oldest
connection leaves for the next one. One address has fewer places than all together, so it displaces
only its own connections.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class UnauthenticatedConnections(Generic[C]):
    """Connections that hold a place, oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[C, str] = {}
        self._of: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def enter(self, connection: C, address: str) -> None:
        """Give a connection a place, whether there is room or not."""
        self._held[connection] = address
        self._of.setdefault(address, {})[connection] = None

    def crowded(self, address: str, most: int) -> C | None:
        """The oldest connection from `address` if that has `most` places, unless it is loopback."""
        mine = self._of.get(address, {})
        return next(iter(mine)) if len(mine) >= most and not _loopback(address) else None

    def full(self, most: int) -> C | None:
        """The oldest connection of all if `most` places are taken."""
        return next(iter(self._held)) if len(self._held) >= most else None

    def leave(self, connection: C) -> str:
        """Free the place of a connection. Returns its address, "" if it had no place."""
        address = self._held.pop(connection, "")
        if not address:
            return ""
        mine = self._of[address]
        del mine[connection]
        if not mine:
            del self._of[address]
        return address


def _loopback(address: str) -> bool:
    """Whether an address is of this machine, where all nodes of a job may be."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
