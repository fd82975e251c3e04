"""Addresses of this machine: is an address its own, and at which one do others reach it?"""

from __future__ import annotations

import errno
import os
import socket
import time
from enum import StrEnum

from elastic.domain.errors import FieldError

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets this variable in every container."""
ENDPOINT_FLAG = "--rdzv-endpoint"
"""Flag that usually gives the coordinator's address."""
RESOLVE_TIMEOUT_S, RESOLVE_INTERVAL_S = 60.0, 0.5
"""Limit and interval for retries of unknown host names in a pod: pods start in any order."""


class AddressState(StrEnum):
    FREE = "free"
    """The address belongs to this machine, and no process listens there."""
    TAKEN = "taken"
    """The address belongs to this machine, and a process listens there."""
    ELSEWHERE = "elsewhere"


def address_state(address: str, flag: str = ENDPOINT_FLAG) -> AddressState:
    """Bind `address` (host:port) briefly; return its state.

    Raises FieldError, which names `flag`, if the host is unknown.
    """
    family, place = _resolve(address, flag)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return AddressState.ELSEWHERE
            if error.errno == errno.EADDRINUSE:
                return AddressState.TAKEN
            remedy = f"it cannot be bound: {error.strerror}"
            raise FieldError(flag, address, remedy) from error
    return AddressState.FREE


def local_address(towards: str, flag: str = ENDPOINT_FLAG) -> str:
    """Return this machine's address on the route to `towards` (host:port). Nothing is sent."""
    family, place = _resolve(towards, flag)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(place)
        except OSError:
            return "127.0.0.1"  # there is no route, so the peer must be on this machine
        return str(sock.getsockname()[0])


def _resolve(address: str, flag: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + (RESOLVE_TIMEOUT_S if IN_A_POD in os.environ else 0.0)
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            break
        except UnicodeError as error:
            raise FieldError(flag, address, "it cannot be the name of a host") from error
        except socket.gaierror as error:
            if time.monotonic() >= end:
                remedy = f"the host is unknown: {error.strerror}"
                raise FieldError(flag, address, remedy) from error
            time.sleep(RESOLVE_INTERVAL_S)
    family, _, _, _, place = min(found, key=lambda item: item[0] != socket.AF_INET)
    return family, (str(place[0]), int(place[1]))
