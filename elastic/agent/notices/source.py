"""What a source of notices is, and the thread that reads it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.client import HTTPException
from typing import Protocol

from elastic.core.node.notice_tracker import ProviderNotice

log = logging.getLogger("elastic.agent.notices")
SLOWEST_S = 30.0
"""A source that cannot be read is tried this seldom at last."""


class Source(Protocol):
    """Reads one provider. Used by one thread; `acknowledge` by another."""

    name: str
    every_s: float
    """Pause between two reads."""

    def read(self) -> tuple[ProviderNotice, ...]:
        """All that stands there now; may wait for a change. Raises OSError, HTTPException or ValueError."""

    def acknowledge(self, heard: ProviderNotice) -> None:
        """The provider need not wait for the deadline. Raises as `read` does."""

    def close(self) -> None:
        """Nobody reads any more."""


class Watcher:
    """Reads a source until it is closed; `put(name, notices)` is called after every read that says something new.

    Trouble is logged once, until it is over; what stood before goes on standing.
    """

    def __init__(self, source: Source, put: Callable[[str, tuple[ProviderNotice, ...]], object]) -> None:
        self.source = source
        self._put, self._closed = put, threading.Event()
        threading.Thread(target=self._run, name=f"notices-{source.name}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self.source.close()

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Not waited for: it is a courtesy."""
        threading.Thread(target=self._acknowledge, args=(heard,), name="acknowledge", daemon=True).start()

    def _acknowledge(self, heard: ProviderNotice) -> None:
        try:
            self.source.acknowledge(heard)
        except (OSError, HTTPException, ValueError) as error:
            log.warning("%s cannot be told that %s may go on: %s", self.source.name, heard.identity, error)

    def _run(self) -> None:
        pause_s, trouble, said = 0.0, False, False
        while not self._closed.wait(pause_s):
            try:
                found = self.source.read()
            except (OSError, HTTPException, ValueError) as error:
                if not trouble:
                    log.warning("notices of %s cannot be read: %s", self.source.name, error)
                trouble = True
                pause_s = min(SLOWEST_S, max(2 * pause_s, self.source.every_s))
                continue
            if trouble:
                log.info("notices of %s can be read again", self.source.name)
            trouble, pause_s = False, self.source.every_s
            if found or said:
                self._put(self.source.name, found)
            said = bool(found)
