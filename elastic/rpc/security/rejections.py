"""Counts the rejections of this process by port and reason, and reports them at a bounded rate.

A sender of rubbish must neither fill the disk nor hide important news. Each pair of port and reason
gives one log line and one notice per `EVERY_S` at most. The counts are exact.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)
EVERY_S = 5.0
DETAIL_CHARS = 400


class Reason(StrEnum):
    """Why something was rejected."""

    PLAIN_TEXT = "plain-text"
    """The connection must use TLS but does not."""
    NO_CERTIFICATE = "no-certificate"
    WRONG_CA = "wrong-ca"
    """The certificate is not from the job's authority."""
    EXPIRED = "expired"
    """The certificate is no longer valid, or not yet."""
    HANDSHAKE = "handshake"
    """The TLS handshake failed or took too long. gRPC hides the cause, so on its port every failed
    handshake has this reason."""
    TOKEN = "token"
    """The join token is missing or wrong."""
    REPLAYED = "replayed"
    """A message or proof was received before."""
    OVERSIZE = "oversize"
    MALFORMED = "malformed"
    STALE = "stale"
    """The sender has an older term, or is a former member."""
    FORGED = "forged"
    """The sender may not send this message: it names another node, or nodes must not send it."""
    VERSION = "version"
    """The versions of both sides do not understand each other."""
    TOO_MANY = "too-many"
    """There are too many connections."""


@dataclass(frozen=True, slots=True)
class RejectionNotice:
    """Report of rejections at one port for one reason: the last rejection, and counts."""

    port: str
    """coordinator | vault | agent | metrics"""
    reason: Reason
    peer: str
    """The sender, as far as known."""
    detail: str
    count: int
    """Rejections since the last notice."""
    total: int
    """All rejections of this process for this reason at this port."""


class Rejections:
    """Counters of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._counts: dict[tuple[str, Reason], int] = {}
        self._reported: dict[tuple[str, Reason], tuple[float, int]] = {}
        self._subscribers: list[Callable[[RejectionNotice], object]] = []

    def count(self, port: str, reason: Reason, peer: object = "", detail: object = "") -> None:
        """Count one rejection. `peer` and `detail` come from outside; they are cut and escaped."""
        key, now = (port, reason), self._clock()
        with self._lock:
            total = self._counts[key] = self._counts.get(key, 0) + 1
            when, before = self._reported.get(key, (-EVERY_S, 0))
            if now - when < EVERY_S:
                return
            self._reported[key] = now, total
            subscribers = tuple(self._subscribers)
        notice = RejectionNotice(port, reason, _plain(peer), _plain(detail), total - before, total)
        log.warning(
            "%s port rejected (%s, %d since the last report) from %s: %s",
            port,
            reason,
            notice.count,
            notice.peer or "an unknown address",
            notice.detail,
        )
        for subscriber in subscribers:
            subscriber(notice)

    def counts(self) -> Mapping[tuple[str, Reason], int]:
        """Return the number of rejections per (port, reason)."""
        with self._lock:
            return dict(self._counts)

    def by_reason(self) -> Mapping[str, int]:
        """Return the number of rejections per reason, over all ports."""
        found = Counter[str]()
        for (_, reason), number in self.counts().items():
            found[reason.value] += number
        return found

    def subscribe(self, subscriber: Callable[[RejectionNotice], object]) -> None:
        """Call `subscriber` with every notice, on the thread of `count`; it must not block."""
        with self._lock:
            self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[RejectionNotice], object]) -> None:
        with self._lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)


REJECTIONS = Rejections()
"""The counters of this process."""


def _plain(text: object) -> str:
    """Return `text` shortened and escaped to one printable line."""
    line = str(text)[:DETAIL_CHARS].replace("\n", "\\n")
    return line.encode("ascii", "backslashreplace").decode()
