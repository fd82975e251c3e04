"""Follows the notices of a node for its agent; the rules are in `elastic.core.node.notice_tracker`.

Sources are read by threads of their own; everything else happens on the agent's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from elastic.agent.notices.discovery import detect, sources_of
from elastic.agent.notices.source import Source, SourceWatcher
from elastic.config import JobConfig
from elastic.core.node import notice_tracker as core
from elastic.core.node.notice_tracker import NoticeTracker, ProviderNotice
from elastic.core.protocol.messages import NoticeKind
from elastic.core.protocol.notice_source import SourceKind

log = logging.getLogger("elastic.agent")
SIGNAL = "signal"


class NoticeController:
    """Tracks the notices of one node. All methods run on the agent's thread.

    `later(f)` returns a function that other threads may call; it runs `f` on the agent's thread.
    `send(message)` goes to the coordinator. `rejoin()` is called when a drained node is not taken
    away.
    """

    def __init__(
        self,
        config: JobConfig,
        node: str,
        later: Callable[[Callable[..., object]], Callable[..., None]],
        send: Callable[[Any], object],
        rejoin: Callable[[], object],
    ) -> None:
        """Raises FieldError if a source cannot be opened."""
        self._node, self._later, self._send, self._rejoin = node, later, send, rejoin
        self._grace_s, self._overdue_s = config.grace_s, config.timeouts.overdue_s
        self._tracker, self.incarnation = NoticeTracker(), ""
        self._watchers: list[SourceWatcher] = []
        for wanted in config.notices:
            self._watch(sources_of(wanted, config, node))
            if wanted.kind is SourceKind.AUTO:
                detect(config, node, later(self._watch_detected))

    @property
    def parked(self) -> bool:
        """Whether the node was drained and now waits until it is taken away or rejoins."""
        return self._tracker.parked

    def _source_read(self, source: str, found: tuple[ProviderNotice, ...]) -> None:
        """Record all notices that `source` has now, and act on the changes."""
        before = {one.identity for one in self._tracker.active}
        self._follow(core.source_read(self._tracker, source, found))
        for one in self._tracker.active:
            if one.identity not in before:
                log.info("notice of %s: %s, %s", one.provider, one.kind, one.detail)

    def signalled(self) -> None:
        """Treat a signal that tells the agent to end as a notice."""
        deadline = time.monotonic() + self._grace_s
        notice = ProviderNotice(
            SIGNAL, SIGNAL, NoticeKind.LEAVE, deadline, "told to end", final=True
        )
        self._source_read(SIGNAL, (notice,))

    def released(self, leave: Callable[[], object]) -> None:
        """Park the node, because the coordinator no longer needs it; `leave()` empties the node."""
        self._tracker = replace(self._tracker, parked=True)
        leave()
        self._follow(core.node_released(self._tracker))

    def poll(self) -> None:
        """Drop the notices whose deadline is long past: they were false."""
        if self._tracker.by_source:
            self._follow(core.expire_overdue(self._tracker, time.monotonic(), self._overdue_s))

    def resend(self) -> None:
        """Send the notices again, to a coordinator that may not know them."""
        for action in core.resend(self._tracker):
            self._act(action)

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.close()

    def _watch(self, sources: Iterable[Source]) -> None:
        read = self._later(self._source_read)
        self._watchers += [SourceWatcher(source, read) for source in sources]

    def _watch_detected(self, sources: tuple[Source, ...]) -> None:
        """Watch the sources of the cloud that `--notice auto` has found."""
        known = {watcher.source.name for watcher in self._watchers}
        self._watch(source for source in sources if source.name not in known)

    def _follow(self, result: core.TrackerTransition) -> None:
        self._tracker, actions = result
        for action in actions:
            self._act(action)

    def _act(self, action: core.TrackerAction) -> None:
        match action:
            case core.SendNotice(heard):
                message = core.notice_message(self._node, self.incarnation, heard, time.monotonic())
                self._send(message)
            case core.Acknowledge(heard):
                for watcher in self._watchers:
                    if watcher.source.name.partition("-")[0] == heard.provider:
                        watcher.acknowledge(heard)
            case core.RejoinJob():
                log.info("the notice was withdrawn or false: this node joins again")
                self._rejoin()
