"""Injected fault that drops the packets from this node to another one, by a route of the kernel.

    ip route add blackhole ADDRESS

Open connections stay open, and their packets are lost; new connections fail. It needs the right to
change routes, as root has it in a container or network namespace of its own. An agent that is
killed leaves the route behind.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import time

from elastic.domain.errors import FieldError
from elastic.rpc.bulk.transfer import split_address

log = logging.getLogger(__name__)


class NetworkCut:
    """The routes that this agent has blocked. One thread uses it."""

    def __init__(self, host: str) -> None:
        """`host`: address of this node."""
        self._host = host
        self._until: dict[str, float] = {}
        """Time at which each blocked address is open again."""

    def begin(self, peer: str, vault: str, duration_s: float) -> None:
        """Drop packets to the node with this vault (host:port) for `duration_s`. A cut that is not
        possible is logged."""
        try:
            address = socket.gethostbyname(split_address(vault)[0])
            if address == socket.gethostbyname(self._host):
                log.error("injected fault: %s has the address of this node: not cut", peer)
                return
        except (OSError, FieldError) as error:
            log.error("injected fault: the address of %s is unknown: %s", peer, error)
            return
        log.warning("injected fault: cut off from %s (%s) for %g s", peer, address, duration_s)
        if address in self._until or _route("add", address):
            self._until[address] = time.monotonic() + duration_s

    def heal(self, *, all_cuts: bool = False) -> None:
        """Open the paths whose time is over, or all."""
        now = time.monotonic()
        for address in [a for a, until in self._until.items() if all_cuts or now >= until]:
            del self._until[address]
            log.warning("injected fault: the cut off from %s ends", address)
            _route("del", address)


def _route(what: str, address: str) -> bool:
    """Add or delete a route that drops packets; return whether that was possible."""
    command = ["ip", "route", what, "blackhole", address]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"") or str(error).encode()
        text = "injected fault: the route to %s cannot be changed: %s"
        log.error(text, address, why.decode(errors="replace").strip())
        return False
    return True
