"""Which addresses are this machine's."""

from __future__ import annotations

import errno
import os
import socket
import time
from enum import StrEnum

from elastic.domain.errors import FieldError

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets this variable in every container."""
NAMES_S, LOOK_S = 60.0, 0.5
"""In a pod: names of other pods are waited for, which start in any order; and how often they are looked up."""


class Owner(StrEnum):
    FREE = "free"
    """The address is this machine's, and nothing listens there."""
    TAKEN = "taken"
    """The address is this machine's, and somebody listens there."""
    ELSEWHERE = "elsewhere"


def owner(address: str) -> Owner:
    """Try to take `address` (host:port) for a moment. Raises FieldError when its host is unknown."""
    family, place = _resolve(address)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return Owner.ELSEWHERE
            if error.errno == errno.EADDRINUSE:
                return Owner.TAKEN
            raise FieldError("--rdzv-endpoint", address, f"it cannot be used: {error.strerror}") from error
    return Owner.FREE


def local_address(towards: str) -> str:
    """Address of this machine on the route to `towards` (host:port); nothing is sent."""
    family, place = _resolve(towards)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(place)
        except OSError:
            return "127.0.0.1"  # no route at all: only this machine can be meant
        return str(sock.getsockname()[0])


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + (NAMES_S if IN_A_POD in os.environ else 0.0)
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            break
        except socket.gaierror as error:
            if time.monotonic() >= end:
                remedy = f"the host is unknown: {error.strerror}"
                raise FieldError("--rdzv-endpoint", address, remedy) from error
            time.sleep(LOOK_S)
    family, _, _, _, place = min(found, key=lambda item: item[0] != socket.AF_INET)
    return family, (str(place[0]), int(place[1]))
