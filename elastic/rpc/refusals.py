"""What this process refused at its ports: counted by port and reason, logged and told at a bounded rate.

Whoever sends rubbish must not fill the disk, or drown the news that matter: of each (port, reason) one line and one
notice are given every `EVERY_S` at most; the counts are exact all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)
EVERY_S = 5.0
DETAIL_CHARS = 200


class Reason(StrEnum):
    """Why something was refused."""

    PLAIN_TEXT = "plain-text"
    """No TLS where TLS is needed."""
    NO_CERTIFICATE = "no-certificate"
    WRONG_CA = "wrong-ca"
    """The certificate is not of the job's authority."""
    EXPIRED = "expired"
    """The certificate is not valid any more, or not yet."""
    HANDSHAKE = "handshake"
    """The TLS handshake failed otherwise, or took too long."""
    TOKEN = "token"
    """The join token is missing or wrong."""
    REPLAYED = "replayed"
    """Something that was said before came again."""
    OVERSIZE = "oversize"
    MALFORMED = "malformed"
    STALE = "stale"
    """Of an older term, or of a former member."""
    FORGED = "forged"
    """The sender may not say this: it is of another node, or not for nodes to say."""
    TOO_MANY = "too-many"
    """There are too many connections."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One notice: what was refused last, and how often."""

    port: str
    """coordinator | vault: whose port it was."""
    reason: Reason
    peer: str
    """Who sent it, as far as known."""
    detail: str
    count: int
    """Refused since the notice before."""
    total: int
    """Refused by this process for this reason at this port."""


class Refusals:
    """Counters of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._counts: dict[tuple[str, Reason], int] = {}
        self._told: dict[tuple[str, Reason], tuple[float, int]] = {}
        self._hearers: list[Callable[[Refusal], object]] = []

    def count(self, port: str, reason: Reason, peer: object = "", detail: object = "") -> None:
        """One more. `peer` and `detail` come from outside: they are shortened and quoted."""
        key, now = (port, reason), self._clock()
        with self._lock:
            total = self._counts[key] = self._counts.get(key, 0) + 1
            when, before = self._told.get(key, (-EVERY_S, 0))
            if now - when < EVERY_S:
                return
            self._told[key] = now, total
            hearers = tuple(self._hearers)
        notice = Refusal(port, reason, _plain(peer), _plain(detail), total - before, total)
        log.warning(
            "%s port refused (%s, %d since last told) from %s: %s",
            port,
            reason,
            notice.count,
            notice.peer or "?",
            notice.detail,
        )
        for hearer in hearers:
            hearer(notice)

    def counts(self) -> Mapping[tuple[str, Reason], int]:
        """How often each (port, reason) was met; for metrics."""
        with self._lock:
            return dict(self._counts)

    def by_reason(self) -> Mapping[str, int]:
        """The same over all ports."""
        found: dict[str, int] = {}
        for (_, reason), number in self.counts().items():
            found[reason.value] = found.get(reason.value, 0) + number
        return found

    def total(self, reason: Reason, port: str = "") -> int:
        """How often something was refused for `reason`, at `port` or at any."""
        return sum(n for (where, why), n in self.counts().items() if why is reason and port in ("", where))

    def subscribe(self, hearer: Callable[[Refusal], object]) -> None:
        """`hearer` gets every notice, from whichever thread refused; it must not block."""
        with self._lock:
            self._hearers.append(hearer)

    def unsubscribe(self, hearer: Callable[[Refusal], object]) -> None:
        with self._lock:
            if hearer in self._hearers:
                self._hearers.remove(hearer)


REFUSALS = Refusals()
"""Of this process."""


def _plain(text: object) -> str:
    """One printable line."""
    return str(text)[:DETAIL_CHARS].encode("ascii", "backslashreplace").decode().replace("\n", "\\n")
