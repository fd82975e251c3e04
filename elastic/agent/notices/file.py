"""Notices that a person or an in-house scheduler writes: their format, and the file source.

A notice is empty, a number of seconds, or {"deadline_s": 120, "reason": "..."}.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.agent.notices.source import Source, make_notice
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.domain import codec
from elastic.domain.errors import FieldError

log = logging.getLogger("elastic.agent.notices")
DEFAULT_DEADLINE_S = 30.0
MAX_DEADLINE_S = 30 * 86400.0
MAX_REASON_CHARS = 200
MAX_FILE_BYTES = 4096
FILE_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class WrittenNotice:
    """Content of a written notice: seconds until the node is taken away, and the reason."""

    deadline_s: float = DEFAULT_DEADLINE_S
    reason: str = ""


def parse_notice(text: bytes) -> WrittenNotice:
    """Parse a written notice. Raises FieldError for a malformed one."""
    if not text.strip():
        return WrittenNotice()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        remedy = 'must be seconds, or {"deadline_s": 120, "reason": "..."}'
        raise FieldError("notice", text[:40], remedy) from None
    value = value if isinstance(value, dict) else {"deadline_s": value}
    notice = codec.decode(WrittenNotice, value, "notice")
    if not 0 <= notice.deadline_s <= MAX_DEADLINE_S:
        remedy = f"must be from 0 to {MAX_DEADLINE_S:g} seconds"
        raise FieldError("notice.deadline_s", notice.deadline_s, remedy)
    printable = "".join(c for c in notice.reason[:MAX_REASON_CHARS] if c.isprintable())
    return replace(notice, reason=printable)


class NoticeFile(Source):
    """Reads a notice from the file at `path`. The deadline counts from the file's last change; each
    change is a new notice. Malformed content means DEFAULT_DEADLINE_S."""

    every_s = FILE_POLL_S

    def __init__(self, path: str) -> None:
        self.name = f"file:{path}"
        self._path, self._malformed = Path(path), 0

    def read(self) -> tuple[ProviderNotice, ...]:
        try:
            changed_ns = self._path.stat().st_mtime_ns
            with self._path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return ()
        try:
            notice = parse_notice(text)
        except FieldError as error:
            notice = WrittenNotice()
            if self._malformed != changed_ns:
                log.warning("%s: %s; the deadline is %g s", self._path, error, DEFAULT_DEADLINE_S)
            self._malformed = changed_ns
        left_s = notice.deadline_s - max(0.0, time.time() - changed_ns / 1e9)
        what, detail = f"{self._path}@{changed_ns}", notice.reason or str(self._path)
        return (make_notice("file", what, left_s, detail),)
