"""A trace at a glance, as a page: nodes over time, how long nodes stay, how many go at once, and at which hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from elastic_sim.report.charts import Mark, Scale, area, steps_path, time_marks, value_marks
from elastic_sim.report.pages import page
from elastic_sim.steps.physics import stays
from elastic_sim.traces.statistics import counts, statistics
from elastic_sim.traces.trace import ADD, Trace

LEFT, RIGHT, TOP, BASE = 48.0, 560.0, 14.0, 190.0
WIDE = 1150.0


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart: a step curve, or bars."""

    title: str
    note: str
    width: float
    right: float
    across: tuple[Mark, ...]
    up: tuple[Mark, ...]
    path: str = ""
    filled: str = ""
    bars: tuple[tuple[float, float, float, str], ...] = ()
    """(x, y, width, what it says)."""


def trace_page(trace: Trace, name: str) -> str:
    """The page. The same trace gives the same bytes."""
    found = statistics(trace)
    told = [(key.replace("_", " "), f"{value:.4g}") for key, value in asdict(found).items()]
    plots = [_nodes(trace), _lifetimes(trace), _bulks(trace), _hours(trace)]
    lead = (
        f"{found.nodes_mean:.1f} nodes on average ({found.nodes_least} to {found.nodes_most}) over {found.hours:.4g} "
        f"hours; {found.losses} losses in {found.loss_events} events, {found.losses_per_node_hour:.3g} a node-hour."
    )
    return page(
        "trace.html",
        {"title": name, "lead": lead, "origin": trace.origin, "told": told, "plots": plots,
         "top": TOP, "base": BASE, "left": LEFT, "version": f"elastic-sim {version('elastic-runtime')}"},
    )  # fmt: skip


def _nodes(trace: Trace) -> Plot:
    rows = counts(trace)
    across = Scale(0.0, trace.end_s, LEFT, WIDE)
    return _steps("Nodes over time", "", rows, across, time_marks(trace.end_s, across), WIDE)


def _lifetimes(trace: Trace) -> Plot:
    """Of the nodes that were lost, the share that stayed longer."""
    ended = sorted(gone.seconds - came.seconds for came, gone in stays(trace) if gone is not None)
    longest = ended[-1] if ended else 1.0
    rows = [(0.0, 100.0), *((length, 100.0 * (1 - (i + 1) / len(ended))) for i, length in enumerate(ended))]
    across = Scale(0.0, longest, LEFT, RIGHT)
    note = "percent of the nodes that were lost"
    return _steps("Still there after", note, rows, across, time_marks(longest, across, 8), RIGHT)


def _steps(
    title: str,
    note: str,
    rows: Sequence[tuple[float, float]],
    across: Scale,
    marks: Sequence[Mark],
    right: float,
) -> Plot:
    most = max((value for _, value in rows), default=0.0)
    up = Scale(0.0, most or 1.0, BASE, TOP)
    points = [(across.at(x), up.at(y)) for x, y in rows]
    return Plot(
        title, note, right + 20, right, tuple(marks), tuple(value_marks(most, up)),
        steps_path(points, right), area(points, right, BASE),
    )  # fmt: skip


def _bulks(trace: Trace) -> Plot:
    moments = Counter(event.seconds for event in trace.events if event.kind != ADD)
    sizes = Counter(moments.values())
    most = max(sizes, default=1)
    return _bars("Nodes lost at once", "events", [(str(n), sizes[n]) for n in range(1, min(most, 24) + 1)])


def _hours(trace: Trace) -> Plot:
    hours = Counter(int(event.seconds // 3600) % 24 for event in trace.events if event.kind != ADD)
    return _bars(
        "Losses by hour",
        "of the day, counted from the trace's start",
        [(str(h), hours[h]) for h in range(24)],
    )


def _bars(title: str, note: str, rows: Sequence[tuple[str, int]]) -> Plot:
    high = max((value for _, value in rows), default=0)
    up = Scale(0.0, high or 1.0, BASE, TOP)
    width = (RIGHT - LEFT) / len(rows)
    bars = tuple(
        (round(LEFT + i * width + 1, 1), up.at(value), round(width - 2, 1), f"{name}: {value}")
        for i, (name, value) in enumerate(rows)
    )
    every = -(-len(rows) // 12)
    marks = tuple(
        Mark(round(LEFT + (i + 0.5) * width, 1), name) for i, (name, _) in enumerate(rows) if i % every == 0
    )
    return Plot(title, note, RIGHT + 20, RIGHT, marks, tuple(value_marks(high, up)), bars=bars)
