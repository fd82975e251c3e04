"""Certificates that must be refused, clients that stay silent, and counters to wait for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from elastic.launcher.flags.certs import make_certificates
from elastic.rpc.security import rejections
from elastic.rpc.security.rejections import REJECTIONS, Reason, RejectionNotice
from elastic.rpc.security.tls import SecuritySettings
from tests.patience import LONG_S

TOKEN = "0123456789abcdef0123456789abcdef"
WRONG = "fedcba9876543210fedcba9876543210"
WAIT_S = LONG_S


class Authority:
    """Directories for --certs under `root`."""

    def __init__(self, root: Path) -> None:
        make_certificates(root / "ours", [["localhost"], ["other"]])
        make_certificates(root / "theirs", [["localhost"]])
        make_certificates(root / "ours", [["expired"]], days=-1)
        self.good, self.other = root / "ours" / "localhost", root / "ours" / "other"
        self.expired, self.foreign = root / "ours" / "expired", root / "theirs" / "localhost"
        self.root = root


def secure(certs: Path | None, token: str = TOKEN) -> SecuritySettings:
    return SecuritySettings(certs, "", token)


@contextmanager
def silent(where: tuple[str, int], count: int, source: str = "") -> Iterator[list[socket.socket]]:
    """`count` connections (from the address `source`) that say nothing; closed with the block."""
    mine = (source, 0) if source else None
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(where, timeout=LONG_S, source_address=mine)
            )
            for _ in range(count)
        ]


def rejected(reason: Reason, port: str) -> int:
    """Number of rejections at `port` for `reason`."""
    return REJECTIONS.counts().get((port, reason), 0)


@contextmanager
def refused(reason: Reason, port: str, times: int = 1) -> Iterator[None]:
    """Inside, `port` refuses for `reason`, at least `times` times within the deadline."""
    enough = threading.Event()
    wanted = rejected(reason, port) + times

    def heard(notice: RejectionNotice) -> None:
        if rejected(reason, port) >= wanted:
            enough.set()

    former, rejections.EVERY_S = rejections.EVERY_S, 0.0
    REJECTIONS.subscribe(heard)
    try:
        yield
        assert enough.wait(WAIT_S), f"{reason} at {port}: {dict(REJECTIONS.counts())}"
    finally:
        REJECTIONS.unsubscribe(heard)
        rejections.EVERY_S = former
