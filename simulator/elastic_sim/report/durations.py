"""Durations as text, and round lengths for axes."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1.0, "s"))
ROUND = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(minutes * MINUTE for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * HOUR for hours in (1, 2, 3, 4, 6, 12)),
    *(days * DAY for days in (1, 2, 7, 14, 30, 60, 180, 365)),
)
"""Round durations in seconds, ascending."""


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that needs at most two decimals: 600 is 10 min."""
    for unit, name in UNITS[:-1]:
        if seconds >= unit and round(seconds / unit, 2) * unit == seconds:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def clock(seconds: float) -> str:
    """Format seconds as days and time of day: 1 d 02:03:04."""
    days, rest = divmod(int(seconds), 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def round_step(length_s: float, most: int) -> float:
    """Return the shortest round duration that fits at most `most` times into a length."""
    return next((step for step in ROUND if length_s / step <= most), ROUND[-1])


def axis_unit(length_s: float) -> tuple[float, str]:
    """Return the unit for an axis of this length: (seconds per unit, name)."""
    return next((unit for unit in UNITS if length_s >= 2 * unit[0]), UNITS[-1])
