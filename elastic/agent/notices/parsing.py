"""What a person or an in-house scheduler writes: nothing, a number of seconds, or an object with a deadline."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from elastic.domain.errors import FieldError

DEFAULT_S = 30.0
"""What is given when nothing is said."""
LONGEST_S = 30 * 86400.0
MOST_REASON = 200


@dataclass(frozen=True, slots=True)
class Told:
    """Seconds that are left, and why."""

    deadline_s: float = DEFAULT_S
    reason: str = ""


def read_told(text: bytes) -> Told:
    """Read one notice. Raises FieldError naming what is wrong."""
    if not text.strip():
        return Told()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise FieldError("notice", text[:40], 'seconds, or {"deadline_s": 120, "reason": "..."}') from None
    if not isinstance(value, dict):
        value = {"deadline_s": value}
    unknown = sorted(set(value) - {"deadline_s", "reason"})
    if unknown:
        raise FieldError(f"notice.{unknown[0][:40]}", "...", "the fields are deadline_s and reason")
    deadline, reason = value.get("deadline_s", DEFAULT_S), value.get("reason", "")
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not math.isfinite(deadline):
        raise FieldError("notice.deadline_s", str(deadline)[:40], "a number of seconds")
    if not 0 <= deadline <= LONGEST_S:
        raise FieldError("notice.deadline_s", deadline, f"seconds from 0 to {LONGEST_S:g}")
    if not isinstance(reason, str):
        raise FieldError("notice.reason", str(reason)[:40], "a text")
    return Told(float(deadline), "".join(c for c in reason[:MOST_REASON] if c.isprintable()))
