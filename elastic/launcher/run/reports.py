"""Entries of the event log and answers of the coordinator, as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PHASES = ("detect_s", "decide_s", "transfer_s", "rebuild_s", "total_s")


def recovery_line(event: dict[str, Any]) -> str:
    """One line for a recovery: where, why, how long each phase took, what was lost."""
    times = [f"{key[:-2]} {event[key]:.3f}" for key in _PHASES if isinstance(event.get(key), (int, float))]
    nodes = f"{event.get('nodes_before', '?')} -> {event.get('nodes_after', '?')} nodes"
    lost = f"{event.get('microbatches_lost', '?')} micro-batches lost"
    where = f"step {event.get('step', '?')}, micro-batch {event.get('microbatch', '?')}"
    return f"recovered at {where} ({event.get('cause', '')}): {nodes}, {lost}; seconds: {', '.join(times)}"


def short_line(event: dict[str, Any]) -> str:
    """One line where a peer has no room for copies."""
    who = f"{event.get('keeper', '?')} keeps no more copies of {event.get('owner', '?')}"
    return f"warning: {who}, training goes on without them: {event.get('detail', '')}"


def corrupt_line(event: dict[str, Any]) -> str:
    """One line for a copy that was found corrupt."""
    return f"warning: a copy of {event.get('owner', '?')} at {event.get('keeper', '?')}: {event.get('detail', '')}"


def health_line(event: dict[str, Any]) -> str:
    """One line for what is wrong with a node, and what is done about it."""
    if event.get("evidence", {}).get("well"):
        return f"{event.get('node', '?')} ({event.get('class', '?')}): {event.get('reason', '')}"
    done = event.get("action", "none")
    what = f"{event.get('node', '?')} ({event.get('class', '?')}): {event.get('reason', '')}"
    return f"warning: {what}" + ("" if done == "none" else f" [{done}]")


def preflight_line(event: dict[str, Any]) -> str:
    """One line for a node that is refused; nothing for one that is taken."""
    if event.get("ok"):
        return ""
    again = f"it looks again in {event.get('retry_s', '?')} s"
    return f"warning: {event.get('node', '?')} may not join: {event.get('reason', '')}; {again}"


LINES = {
    "recovery": recovery_line,
    "backup-short": short_line,
    "copy-corrupt": corrupt_line,
    "health": health_line,
    "preflight": preflight_line,
}
"""Events that the user sees whatever is asked for, and how; "": this one is not shown."""


def event_line(event: dict[str, Any]) -> str:
    """One event as key=value pairs."""
    return " ".join(f"{key}={value}" for key, value in event.items() if not isinstance(value, (dict, list)))


def as_text(answer: dict[str, Any]) -> str:
    """An answer as lines; lists of objects become tables, longer texts stand below."""
    lines, below = [], []
    for key, value in answer.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            below.append(table(value))
        elif isinstance(value, str) and "\n" in value:
            below.append(value.rstrip("\n"))
        elif isinstance(value, dict):
            lines.append(f"{key}: {', '.join(f'{name} {_cell(one)}' for name, one in value.items())}")
        elif value not in (None, "", []):
            lines.append(f"{key}: {value}")
    return "\n\n".join(part for part in ("\n".join(lines), *below) if part)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys under their names."""
    heads = list(rows[0])
    cells = [[_cell(row.get(head)) for head in heads] for row in rows]
    widths = [max(len(head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [heads, *cells]
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
