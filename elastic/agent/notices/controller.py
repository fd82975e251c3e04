"""Follows the notices of a node for its agent; the rules are in `elastic.core.node.notice_tracker`.

Sources are read by threads of their own; everything else happens on the agent's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class NoticesRead:
    """All notices that one source has now."""

    source: str
    found: tuple[ProviderNotice, ...]


@dataclass(frozen=True, slots=True)
class CloudDetected:
    """`--notice auto` has found the cloud and its sources."""

    sources: tuple[Source, ...]


class NoticeController:
    """Passes events to `put`, which must lead to a call of `take` on the agent's thread. `send`
    sends to the coordinator; `rejoin` is called when a drained node is not taken away after all."""

    def __init__(
        self,
        config: JobConfig,
        node: str,
        put: Callable[[Any], object],
        send: Callable[[Any], object],
        rejoin: Callable[[], object],
    ) -> None:
        """Raises FieldError if a source cannot be opened."""
        self._node, self._put, self._send, self._rejoin = node, put, send, rejoin
        self._grace_s, self._overdue_s = config.grace_s, config.timeouts.overdue_s
        self._tracker, self.incarnation = NoticeTracker(), ""
        self._watchers: list[SourceWatcher] = []
        for wanted in config.notices:
            self._watch(sources_of(wanted, config, node))
            if wanted.kind is SourceKind.AUTO:
                detect(config, node, lambda sources: put(CloudDetected(sources)))

    @property
    def parked(self) -> bool:
        """The node was drained and is no member; it waits until it is taken away or rejoins."""
        return self._tracker.parked

    def take(self, event: NoticesRead | CloudDetected) -> None:
        """Handle an event that came through `put`."""
        if isinstance(event, CloudDetected):
            known = {watcher.source.name for watcher in self._watchers}
            self._watch(tuple(source for source in event.sources if source.name not in known))
            return
        before = {one.identity for one in self._tracker.active}
        self._follow(core.source_read(self._tracker, event.source, event.found))
        for one in self._tracker.active:
            if one.identity not in before:
                log.info("notice of %s: %s, %s", one.provider, one.kind, one.detail)

    def signalled(self) -> None:
        """Treat a signal to end as a notice. May be called from a signal handler."""
        deadline = time.monotonic() + self._grace_s
        notice = ProviderNotice(
            SIGNAL, SIGNAL, NoticeKind.LEAVE, deadline, "told to end", final=True
        )
        event = NoticesRead(SIGNAL, (notice,))
        threading.Thread(target=self._put, args=(event,), name="signalled", daemon=True).start()

    def released(self, leave: Callable[[], object]) -> None:
        """The coordinator needs nothing of this node any more; `leave` empties the node."""
        self._tracker = replace(self._tracker, parked=True)
        leave()
        self._follow(core.node_released(self._tracker))

    def poll(self) -> None:
        """Act on deadlines that have passed."""
        if self._tracker.by_source:
            self._follow(core.expire_overdue(self._tracker, time.monotonic(), self._overdue_s))

    def resend(self) -> None:
        """Send the notices again, to a coordinator that may not know them."""
        for action in core.resend(self._tracker):
            self._act(action)

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.close()

    def _watch(self, sources: tuple[Source, ...]) -> None:
        self._watchers += [
            SourceWatcher(source, lambda name, found: self._put(NoticesRead(name, found)))
            for source in sources
        ]

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
