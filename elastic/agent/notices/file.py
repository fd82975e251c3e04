"""Notices that a person or an in-house scheduler writes: their format, and the file source.

A notice is empty, a number of seconds, or {"deadline_s": 120, "reason": "..."}.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.notices.source import Source, make_notice
from elastic.core.node.notice_tracker import ProviderNotice
from elastic.domain.errors import FieldError

log = logging.getLogger("elastic.agent.notices")
DEFAULT_DEADLINE_S = 30.0
MAX_DEADLINE_S = 30 * 86400.0
MAX_REASON_CHARS = 200
MAX_FILE_BYTES = 4096
FILE_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class WrittenNotice:
    """Seconds until the node goes, and the reason."""

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
    if not isinstance(value, dict):
        value = {"deadline_s": value}
    unknown = sorted(set(value) - {"deadline_s", "reason"})
    if unknown:
        remedy = "the fields are deadline_s and reason"
        raise FieldError(f"notice.{unknown[0][:40]}", "...", remedy)
    deadline_s, reason = value.get("deadline_s", DEFAULT_DEADLINE_S), value.get("reason", "")
    number = isinstance(deadline_s, (int, float)) and not isinstance(deadline_s, bool)
    if not number or not math.isfinite(deadline_s):
        raise FieldError("notice.deadline_s", str(deadline_s)[:40], "must be a number of seconds")
    if not 0 <= deadline_s <= MAX_DEADLINE_S:
        remedy = f"must be from 0 to {MAX_DEADLINE_S:g} seconds"
        raise FieldError("notice.deadline_s", deadline_s, remedy)
    if not isinstance(reason, str):
        raise FieldError("notice.reason", str(reason)[:40], "must be a text")
    printable = "".join(c for c in reason[:MAX_REASON_CHARS] if c.isprintable())
    return WrittenNotice(float(deadline_s), printable)


class NoticeFile(Source):
    """A notice in the file at `path`. The deadline counts from the file's last change; each change
    is a new notice. A file with malformed content gives DEFAULT_DEADLINE_S."""

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
