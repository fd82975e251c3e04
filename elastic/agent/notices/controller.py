"""How a node hears that it goes, and what its agent does about it: a shell around `elastic.core.node.notice_tracker`.

Sources are read by threads of their own; everything else happens on the agent's thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.agent.notices.discovery import Surroundings, detect, sources_of
from elastic.agent.notices.source import Source, Watcher
from elastic.config import JobConfig
from elastic.core.node import notice_tracker as core
from elastic.core.node.notice_tracker import NoticeTracker, ProviderNotice
from elastic.core.protocol.messages import NoticeKind
from elastic.core.protocol.notice_source import SourceKind

log = logging.getLogger("elastic.agent")
TOKEN_VARIABLE = "ELASTIC_NOTICE_TOKEN"
SIGNAL = "signal"


@dataclass(frozen=True, slots=True)
class Read:
    """A source was read."""

    source: str
    found: tuple[ProviderNotice, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A cloud was recognised."""

    sources: tuple[Source, ...]


class Leaving:
    """`put` brings an event to the agent's thread, which calls `take` with it; `say` sends to the coordinator.

    `rejoin` is called when a node that was let go stays after all.
    """

    def __init__(
        self,
        config: JobConfig,
        node: str,
        put: Callable[[Any], object],
        say: Callable[[Any], object],
        rejoin: Callable[[], object],
    ) -> None:
        """Raises FieldError if a source cannot be had."""
        self._node, self._put, self._say, self._rejoin = node, put, say, rejoin
        self._grace_s, self._overdue_s = config.grace_s, config.timeouts.overdue_s
        self._desk, self.incarnation = NoticeTracker(), ""
        self._watchers: list[Watcher] = []
        around = Surroundings(
            node=node,
            silence_s=config.lease_s,
            cards=Path(config.run_dir) / "hooks",
            services=dict(config.metadata_services),
            token=os.environ.get(TOKEN_VARIABLE, ""),
        )
        for wanted in config.notices:
            self._watch(sources_of(wanted, around))
            if wanted.kind is SourceKind.AUTO:
                detect(around, lambda sources: self._put(Found(sources)))

    @property
    def parked(self) -> bool:
        """The node belongs to no job and waits for what becomes of it."""
        return self._desk.parked

    def take(self, event: Read | Found) -> None:
        """An event that came back through `put`."""
        if isinstance(event, Found):
            known = {watcher.source.name for watcher in self._watchers}
            self._watch(tuple(source for source in event.sources if source.name not in known))
            return
        before = {one.identity for one in self._desk.active}
        self._follow(core.source_read(self._desk, event.source, event.found))
        for one in self._desk.active:
            if one.identity not in before:
                log.info("notice of %s: %s, %s", one.provider, one.kind, one.detail)

    def signalled(self) -> None:
        """The launcher was told to end: as a notice. May be called from a signal handler."""
        deadline = time.monotonic() + self._grace_s
        found = (ProviderNotice(SIGNAL, SIGNAL, NoticeKind.LEAVE, deadline, "told to end", final=True),)
        threading.Thread(target=self._put, args=(Read(SIGNAL, found),), name="signalled", daemon=True).start()

    def released(self, leave: Callable[[], object]) -> None:
        """The coordinator needs nothing of the node any more; `leave` empties it."""
        self._desk = replace(self._desk, parked=True)
        leave()
        self._follow(core.node_released(self._desk))

    def look(self) -> None:
        """Time passed."""
        if self._desk.by_source:
            self._follow(core.expire_overdue(self._desk, time.monotonic(), self._overdue_s))

    def again(self) -> None:
        """Tell a coordinator that may not know it."""
        for action in core.resend(self._desk):
            self._act(action)

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.close()

    def _watch(self, sources: tuple[Source, ...]) -> None:
        self._watchers += [
            Watcher(source, lambda name, found: self._put(Read(name, found))) for source in sources
        ]

    def _follow(self, result: core.TrackerTransition) -> None:
        self._desk, actions = result
        for action in actions:
            self._act(action)

    def _act(self, action: core.TrackerAction) -> None:
        match action:
            case core.SendNotice(heard):
                self._say(core.notice_message(self._node, self.incarnation, heard, time.monotonic()))
            case core.Acknowledge(heard):
                for watcher in self._watchers:
                    if watcher.source.name.partition("-")[0] == heard.provider:
                        watcher.acknowledge(heard)
            case core.RejoinJob():
                log.info("the notice was taken back or false: this node joins again")
                self._rejoin()
