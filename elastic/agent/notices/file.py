"""A file that appears: the simplest notice of all. Empty, a number of seconds, or {"deadline_s": 120, "reason": "..."}.

Whatever is in it, a file that is there says that the node leaves: what cannot be read means DEFAULT_S.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from elastic.agent.notices.parsing import DEFAULT_S, read_told
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.core.protocol.messages import NoticeKind
from elastic.domain.errors import FieldError

log = logging.getLogger("elastic.agent.notices")
LOOK_EVERY_S = 0.25
MOST_BYTES = 4096


class NoticeFile:
    """The file at `path`. The deadline counts from its last change; a file written anew is a new notice."""

    name, every_s = "file", LOOK_EVERY_S

    def __init__(self, path: str) -> None:
        self._path, self._puzzled = Path(path), 0
        self.name = f"file:{path}"

    def read(self) -> tuple[ProviderNotice, ...]:
        try:
            changed = self._path.stat().st_mtime_ns
            with self._path.open("rb") as file:
                text = file.read(MOST_BYTES)
        except FileNotFoundError:
            return ()
        try:
            told = read_told(text)
            deadline_s, detail = told.deadline_s, told.reason
        except FieldError as error:
            deadline_s, detail = DEFAULT_S, ""
            if self._puzzled != changed:
                log.warning("%s: %s; %g s are given", self._path, error, DEFAULT_S)
            self._puzzled = changed
        past_s = max(0.0, time.time() - changed / 1e9)
        deadline = time.monotonic() + deadline_s - past_s
        return (
            ProviderNotice(
                "file", f"{self.name}@{changed}", NoticeKind.LEAVE, deadline, detail or str(self._path)
            ),
        )

    def acknowledge(self, heard: ProviderNotice) -> None:
        """Whoever wrote the file sees the node leave."""

    def close(self) -> None:
        """Nothing is kept open."""
