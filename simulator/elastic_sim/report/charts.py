"""Geometry of charts: what happened when, over the width of a picture. Templates draw it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10

from elastic.planning.capacity.svg import marks
from elastic_sim.steps.engine import Outcome
from elastic_sim.steps.time_accounting import Use

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
STEPS = (
    1.0, 2.0, 5.0, 10.0, 15.0, 30.0, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
    HOUR, 2 * HOUR, 3 * HOUR, 4 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 30 * DAY,
    60 * DAY, 180 * DAY, 365 * DAY,
)  # fmt: skip
"""Round times."""
WINDOWS = 150
"""Of a throughput curve, at most."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Mark:
    """A value on an axis."""

    at: float
    text: str


def round_step(length_s: float, most: int) -> float:
    """The smallest round time of which at most so many fit into a length."""
    return next((step for step in STEPS if length_s / step <= most), STEPS[-1])


def time_marks(end_s: float, scale: Scale, most: int = 12) -> list[Mark]:
    step = round_step(end_s, most)
    unit, name = (DAY, "d") if step >= DAY else (HOUR, "h") if step >= HOUR / 2 else (MINUTE, "min")
    if step < MINUTE:
        unit, name = 1.0, "s"
    return [Mark(scale.at(i * step), f"{i * step / unit:g} {name}") for i in range(int(end_s / step) + 1)]


def value_marks(high: float, scale: Scale, most: int = 4) -> list[Mark]:
    """Round values from 0 up."""
    found = marks(high) if high > 0 else [0.0]
    while len(found) > most + 1:
        found = found[::2]
    return [Mark(scale.at(value), f"{value:g}") for value in found]


def log_marks(values: Iterable[float], scale: Scale) -> list[Mark]:
    """The values themselves, as times, on a scale of their logarithms."""
    return [Mark(scale.at(log10(value)), duration(value)) for value in sorted(set(values))]


def duration(seconds: float) -> str:
    """600 is 10 min."""
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= unit and round(seconds / unit, 2) * unit == seconds:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def steps_path(points: Sequence[tuple[float, float]], end: float) -> str:
    """A line that stays at each point's height until the next one's place; pixels."""
    if not points:
        return ""
    words = [f"M{points[0][0]:g},{points[0][1]:g}"]
    for x, y in points[1:]:
        words.append(f"H{x:g}V{y:g}")
    return "".join([*words, f"H{end:g}"])


def area(points: Sequence[tuple[float, float]], end: float, base: float) -> str:
    """The same, closed down to `base`."""
    return f"{steps_path(points, end)}V{base:g}H{points[0][0]:g}Z" if points else ""


def throughput(outcome: Outcome, window_s: float) -> list[float]:
    """Samples a second that counted in the end, by window: useful time, at the pace of the setup of that moment."""
    width = window_s * 1000
    n = max(1, -(-outcome.ended // round(width)))
    found = [0.0] * n
    starts = [decision.at for decision in outcome.decisions]
    for span in outcome.account.spans:
        if span.use is not Use.USEFUL:
            continue
        index = bisect_right(starts, span.began) - 1
        at = span.began
        while at < span.ended:
            until = min(span.ended, starts[index + 1] if index + 1 < len(starts) else span.ended)
            setup = outcome.decisions[index].change.setup if index >= 0 else None
            if setup is not None and until > at:
                _spread(found, at, until, setup.samples / setup.step_ms, width)
            at, index = max(at, until), index + 1
    lengths = [min(width, outcome.ended - i * width) for i in range(n)]
    return [
        samples / length * 1000 if length > 0 else 0.0 for samples, length in zip(found, lengths, strict=True)
    ]


def _spread(found: list[float], at: float, until: float, per_ms: float, width: float) -> None:
    """Add a rate over [at, until) to the windows that it touches."""
    while at < until:
        i = int(at // width)
        edge = min(until, (i + 1) * width)
        found[i] += (edge - at) * per_ms
        at = edge
