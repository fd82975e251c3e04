"""SVG picture of a pipeline's timeline: a row per unit, and a box per compute action.

The text is plain SVG 1.1 without scripts, fonts or links, so that any viewer shows it. Every box
has a title with its action and time. The picture has a title and a description for screen readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from statistics import median

from elastic.planning.schedule.timeline import Span, Timeline

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0e442", "W": "#009e73"}
"""Colour of each kind of action; I and W are the two parts of a split backward pass."""
NAMES = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
OTHER = "#999999"
CHART, WIDEST, MARGIN, GUTTER = 1080.0, 6000.0, 16.0, 12.0
"""Widths in pixels: least and largest time axis, outer margin, gap between row names and boxes."""
COMFORT = 18.0
"""Minimum width of the median box; the time axis grows for it, up to `WIDEST`."""
ROW, BOX, HEAD, FOOT = 26.0, 22.0, 30.0, 30.0
"""Heights in pixels: row, box, title of a panel, axis."""
LETTER = 7.0
"""Approximate width of a letter."""
TICKS = 10
"""Maximum number of marks on the time axis."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The part of the picture that shows one pipeline."""

    title: str
    timeline: Timeline
    rows: tuple[str, ...]
    """Name of each unit."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the SVG text. All panels share one time scale that begins at the left edge."""
    until = max((panel.timeline.makespan_s for panel in panels), default=0.0) or 1.0
    left = (
        MARGIN
        + GUTTER
        + LETTER * max((len(row) for panel in panels for row in panel.rows), default=0)
    )
    chart = min(max(CHART, COMFORT * until / _median(panels)), WIDEST)
    scale = chart / until
    body: list[str] = []
    top = MARGIN + 2 * HEAD
    for panel in panels:
        body += _panel(panel, left, top, scale, until)
        top += HEAD + ROW * len(panel.rows) + FOOT
    width, height = left + chart + 2 * MARGIN, top + MARGIN
    shown = _text(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="title summary" '
            'font-family="sans-serif" font-size="12">',
            f'<title id="title">{shown}</title>',
            f'<desc id="summary">{_text(summary(panels))}</desc>',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{MARGIN:.0f}" y="{MARGIN + 12:.0f}" font-size="15" font-weight="bold">{shown}</text>',  # noqa: E501
            *_legend(panels, MARGIN + HEAD),
            *body,
            "</svg>",
            "",
        ]
    )


def summary(panels: Sequence[Panel]) -> str:
    """Return a description of the picture in words."""
    parts = []
    for panel in panels:
        found = panel.timeline
        busy = (
            sum(found.busy_s) / (len(found.busy_s) * found.makespan_s)
            if found.makespan_s > 0
            else 0.0
        )
        parts.append(
            f"{panel.title}: {len(panel.rows)} units, {seconds(found.makespan_s)}, {busy:.1%} of it computing"  # noqa: E501
        )
    return ". ".join(parts)


def seconds(value: float) -> str:
    """Return a duration with four digits and a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns" if value else "0 s"


def _median(panels: Sequence[Panel]) -> float:
    """Return the median duration of a box in seconds; 1.0 without boxes."""
    found = [span.end_s - span.start_s for panel in panels for span in panel.timeline.spans]
    return max(median(found), 1e-12) if found else 1.0


def _panel(panel: Panel, left: float, top: float, scale: float, until: float) -> Iterable[str]:
    bottom = top + HEAD + ROW * len(panel.rows)
    yield f"<g><title>{_text(panel.title)}</title>"
    yield f'<text x="{MARGIN:.0f}" y="{top + 18:.0f}" font-weight="bold">{_text(panel.title)}</text>'  # noqa: E501
    for mark in marks(until):
        x = left + mark * scale
        yield (
            f'<line x1="{x:.1f}" y1="{top + HEAD:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#dddddd"/>'  # noqa: E501
            f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle" fill="#555555">{seconds(mark)}</text>'  # noqa: E501
        )
    for row, name in enumerate(panel.rows):
        y = top + HEAD + ROW * row + 15
        yield f'<text x="{left - GUTTER:.1f}" y="{y:.1f}" text-anchor="end">{_text(name)}</text>'
    for span in panel.timeline.spans:
        row = panel.timeline.unit_of(span)
        yield _box(span, panel.rows[row], left, top + HEAD + ROW * row, scale)
    yield "</g>"


def _box(span: Span, unit: str, left: float, top: float, scale: float) -> str:
    kind, number = span.action.kind.value, str(span.action.microbatch)
    x, width = left + span.start_s * scale, (span.end_s - span.start_s) * scale
    told = f"{span.action} on {unit}: {seconds(span.start_s)} to {seconds(span.end_s)}"
    box = (
        f'<rect x="{x:.2f}" y="{top:.1f}" width="{max(width - 0.4, 0.2):.2f}" height="{BOX:.0f}" '
        f'fill="{COLOURS.get(kind, OTHER)}"><title>{_text(told)}</title></rect>'
    )
    if width < LETTER * len(number) + 2:
        return box
    return (
        f'{box}<text x="{x + width / 2:.2f}" y="{top + 15:.1f}" text-anchor="middle" font-size="11" '  # noqa: E501
        f'fill="#000000" pointer-events="none">{number}</text>'
    )


def _legend(panels: Sequence[Panel], top: float) -> Iterable[str]:
    used = {span.action.kind.value for panel in panels for span in panel.timeline.spans}
    x = MARGIN
    for kind, colour in COLOURS.items():
        if kind in used:
            yield f'<rect x="{x:.0f}" y="{top - 8:.0f}" width="14" height="14" fill="{colour}"/>'
            yield f'<text x="{x + 20:.0f}" y="{top + 4:.0f}">{NAMES[kind]}</text>'
            x += 40 + LETTER * len(NAMES[kind])
    yield f'<text x="{x:.0f}" y="{top + 4:.0f}" fill="#555555">numbers are micro-batches; white is waiting</text>'  # noqa: E501


def marks(until: float) -> list[float]:
    """Return at most `TICKS` round times up to `until`, in steps of 1, 2 or 5 times 10^n."""
    power = 10.0 ** floor(log10(until / TICKS))
    step = next(power * n for n in (1, 2, 5, 10, 20) if until / (power * n) <= TICKS - 1)
    return [i * step for i in range(int(until / step + 1e-9) + 1)]


def _text(text: str) -> str:
    """Return `text` escaped for XML, with spaces for characters that cannot be printed."""
    return escape("".join(char if char.isprintable() else " " for char in text))
