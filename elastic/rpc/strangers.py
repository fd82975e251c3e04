"""Connections that have not shown yet whose they are: places of their own, so that they take none of the members'.

A member shows itself within milliseconds, a stranger never: where the places are all taken, the one that came first
leaves for the one that comes. Of one address there are fewer places than in all, so that it puts out its own alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Strangers(Generic[C]):
    """Who holds a place, in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[C, str] = {}
        self._of: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def enter(self, connection: C, address: str) -> None:
        """Give it a place, whether there is room or not."""
        self._held[connection] = address
        self._of.setdefault(address, {})[connection] = None

    def crowded(self, address: str, most: int) -> C | None:
        """The first from `address`, if that has no place for another one."""
        mine = self._of.get(address, {})
        return next(iter(mine)) if len(mine) >= most and not _loopback(address) else None

    def full(self, most: int) -> C | None:
        """The first of all, if there is no place for another one."""
        return next(iter(self._held)) if len(self._held) >= most else None

    def leave(self, connection: C) -> str:
        """It is none of them any more; its address ("": it was none of them)."""
        address = self._held.pop(connection, "")
        if not address:
            return ""
        mine = self._of[address]
        del mine[connection]
        if not mine:
            del self._of[address]
        return address


def _loopback(address: str) -> bool:
    """Of this machine, where all nodes of a job may be."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
