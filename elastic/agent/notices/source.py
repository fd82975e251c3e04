"""The interface of a source of notices, and the thread that reads a source."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Protocol

from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind

log = logging.getLogger("elastic.agent.notices")
MAX_RETRY_S = 30.0
"""Longest pause between two attempts to read a source that fails."""


class Source(Protocol):
    """Reads the notices of one provider. `read` and `acknowledge` run on different threads."""

    name: str
    every_s: float
    """Pause between two reads."""

    def read(self) -> tuple[ProviderNotice, ...]:
        """Return all notices that are in force; may wait for a change. Raises OSError,
        HTTPException or ValueError."""
        ...

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Tell the provider that it need not wait for the deadline; subclasses may override it."""
        return

    def close(self) -> None:
        """Called when the source is not needed any more; subclasses override it."""
        return


def make_notice(
    provider: str, what: str, left_s: float, detail: str, kind: NoticeKind = NoticeKind.LEAVE
) -> ProviderNotice:
    """Return a notice with a deadline in `left_s` seconds. `what` identifies it at its provider."""
    return ProviderNotice(provider, f"{provider}:{what}", kind, time.monotonic() + left_s, detail)


class SourceWatcher:
    """Reads a source on a thread of its own until it is closed.

    `put(name, notices)` is called after each read that returns notices, and once with () when they
    are gone. A failure is logged once until reading succeeds again; the last notices stay in force.
    """

    def __init__(
        self, source: Source, put: Callable[[str, tuple[ProviderNotice, ...]], object]
    ) -> None:
        self.source = source
        self._put, self._closed = put, threading.Event()
        name = f"notices-{source.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self.source.close()

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Acknowledge a notice on a new thread. A failure is only logged: the provider waits at
        most until the deadline."""
        threading.Thread(
            target=self._acknowledge, args=(heard,), name="acknowledge", daemon=True
        ).start()

    def _acknowledge(self, heard: ProviderNotice) -> None:
        try:
            self.source.acknowledge(heard)
        except (OSError, HTTPException, ValueError) as error:
            log.warning(
                "%s: %s cannot be acknowledged: %s", self.source.name, heard.identity, error
            )

    def _run(self) -> None:
        pause_s, failing, had_notices = 0.0, False, False
        while not self._closed.wait(pause_s):
            try:
                found = self.source.read()
            except Exception as error:  # noqa: BLE001 - the thread must not end
                if not failing:
                    log.warning("notices of %s cannot be read: %s", self.source.name, error)
                failing = True
                pause_s = min(MAX_RETRY_S, max(2 * pause_s, self.source.every_s))
                continue
            if failing:
                log.info("notices of %s can be read again", self.source.name)
            failing, pause_s = False, self.source.every_s
            if found or had_notices:
                self._put(self.source.name, found)
            had_notices = bool(found)
