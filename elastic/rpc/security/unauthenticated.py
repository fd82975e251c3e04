"""Limits the number of connections that have not authenticated yet.

A member authenticates within milliseconds, an attacker never. When all places are taken, the oldest
connection leaves for the next one. One address may take only some of the places, and above that it
displaces only its own connections.
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
        """Give a connection a place, even if all places are taken."""
        self._held[connection] = address
        self._of.setdefault(address, {})[connection] = None

    def crowded(self, address: str, most: int) -> C | None:
        """Return the oldest connection of `address` if it has `most` places and is not loopback."""
        mine = self._of.get(address, {})
        return next(iter(mine)) if len(mine) >= most and not _loopback(address) else None

    def full(self, most: int) -> C | None:
        """Return the oldest connection of all if `most` places are taken, else None."""
        return next(iter(self._held)) if len(self._held) >= most else None

    def leave(self, connection: C) -> str:
        """Free the place of a connection. Return its address, or "" if it had no place."""
        address = self._held.pop(connection, "")
        if not address:
            return ""
        mine = self._of[address]
        del mine[connection]
        if not mine:
            del self._of[address]
        return address


def _loopback(address: str) -> bool:
    """Return whether an address is of this machine, where all nodes of a job may be."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
