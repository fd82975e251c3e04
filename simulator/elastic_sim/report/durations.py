"""Durations as text, and round lengths for axes."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1.0, "s"))
ROUND = (
    1.0, 2.0, 5.0, 10.0, 15.0, 30.0, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
    HOUR, 2 * HOUR, 3 * HOUR, 4 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY,
    60 * DAY, 180 * DAY, 365 * DAY,
)  # fmt: skip
"""Round durations in seconds, ascending."""


def duration(seconds: float) -> str:
    """Format with the largest unit that fits: 600 is 10 min."""
    for unit, name in UNITS[:-1]:
        if seconds >= unit and round(seconds / unit, 2) * unit == seconds:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def clock(seconds: float) -> str:
    """Format as days and time of day: 1 d 02:03:04."""
    days, rest = divmod(int(seconds), 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def round_step(length_s: float, most: int) -> float:
    """Return the shortest round duration that fits at most `most` times into a length."""
    return next((step for step in ROUND if length_s / step <= most), ROUND[-1])


def axis_unit(length_s: float) -> tuple[float, str]:
    """Return the unit for an axis of this length: (seconds per unit, name)."""
    return next((unit for unit in UNITS if length_s >= 2 * unit[0]), UNITS[-1])
