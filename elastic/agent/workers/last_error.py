"""Finds the error that ended a worker: type, message and place.

torchrun's `@record` writes it to error.json. Other scripts leave only what they printed to standard
error, which ends with a traceback if nobody caught the error.
"""

from __future__ import annotations

import json
import re
from typing import Any

from elastic.domain.errors import place_of, placed

MAX_MESSAGE_LINES = 5
"""Most lines of a message that are joined."""
MAX_LINES_BELOW = 30
"""Most lines below a traceback that ended the script, such as warnings of libraries at exit."""
_FRAME = re.compile(r'  File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_RANK = re.compile(r"\[rank\d+\]: ?")
"""Prefix of torch for the traceback of a process of a process group."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""Python colors tracebacks if FORCE_COLOR is set."""


def recorded_error(text: bytes) -> str:
    """Return the error in torchrun's error.json, with its place; "": there is none."""
    try:
        message: Any = json.loads(text)["message"]
    except (ValueError, TypeError, KeyError):
        return ""
    stack = ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
        message = message.get("message", "")
    frames, _ = _traceback(stack.splitlines()) or ([], "")
    error = " ".join(str(message or "").split())
    return placed(error, place_of(frames))


def printed_error(text: bytes) -> str:
    """Return the error of the traceback at the end of `text`, with its place; else the last line.

    An error that the script caught and printed long before its end does not count.
    """
    lines = _COLOR.sub("", text.decode(errors="replace")).splitlines()
    found = _traceback(lines)
    if found is not None:
        frames, error = found
        return placed(error, place_of(frames))
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _traceback(lines: list[str]) -> tuple[list[tuple[str, int, str]], str] | None:
    """Return the frames and the error of the last traceback; None: there is none near the end."""
    plain = [_RANK.sub("", line, count=1) for line in lines]
    last = max((at for at, line in enumerate(plain) if _FRAME.match(line)), default=-1)
    if last < 0:
        return None
    begin, end = last, last + 1
    while begin > 0 and plain[begin - 1].startswith("  "):
        begin -= 1
    while end < len(plain) and plain[end].startswith("  "):
        end += 1
    if end == len(plain) or len(plain) - end > MAX_LINES_BELOW:
        return None
    prefixed = bool(_RANK.match(lines[last]))
    error: list[str] = []
    for raw, line in zip(lines[end:], plain[end:], strict=True):
        ended = not line.strip() or bool(_RANK.match(raw)) != prefixed
        if ended or len(error) == MAX_MESSAGE_LINES:
            break
        error.append(line)
    matches = filter(None, map(_FRAME.match, plain[begin:end]))
    frames = [(one["file"], int(one["line"]), one["function"] or "") for one in matches]
    return (frames, " ".join(" ".join(error).split())) if error else None
