"""The page of a trace: nodes over time, lifetimes, sizes and hours of losses."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from elastic_sim.report import charts
from elastic_sim.report.pages import chart, page
from elastic_sim.traces.statistics import lifetimes, node_counts, statistics
from elastic_sim.traces.trace import ADD, Trace


def trace_page(trace: Trace, name: str) -> str:
    """Return the page; the same trace gives the same bytes."""
    found = statistics(trace)
    table = [(key.replace("_", " "), f"{value:.4g}") for key, value in asdict(found).items()]
    figures = {
        "Nodes over time": charts.steps(node_counts(trace), trace.end_s, "time", "nodes"),
        "Still there after": _lifetimes(trace),
        "Nodes lost at once": _bulks(trace),
        "Losses by hour": _hours(trace),
    }
    plots = [
        (title, chart(figure, f"plot-{i}", title))
        for i, (title, figure) in enumerate(figures.items())
    ]
    lead = (
        f"{found.nodes_mean:.1f} nodes on average ({found.nodes_least} to {found.nodes_most}) "
        f"over {found.hours:.4g} hours; {found.losses} losses in {found.loss_events} events, "
        f"{found.losses_per_node_hour:.3g} a node-hour."
    )
    return page(
        "trace.html",
        {
            "title": name,
            "lead": lead,
            "origin": trace.origin,
            "table": table,
            "plots": plots,
        },
    )


def _lifetimes(trace: Trace) -> Any:
    """Return a chart of the share of lost nodes that lived longer than each lifetime."""
    ended = sorted(lifetimes(trace)[0])
    rows = [
        (0.0, 100.0),
        *((length, 100.0 * (1 - (i + 1) / len(ended))) for i, length in enumerate(ended)),
    ]
    return charts.steps(
        rows, ended[-1] if ended else 1.0, "lifetime", "share of the lost nodes (%)"
    )


def _bulks(trace: Trace) -> Any:
    moments = Counter(event.seconds for event in trace.events if event.kind != ADD)
    sizes = Counter(moments.values())
    shown = {n: sizes[n] for n in range(1, max(sizes, default=1) + 1)}
    return charts.histogram(shown, "nodes lost at once", "events")


def _hours(trace: Trace) -> Any:
    hours = Counter(int(event.seconds // 3600) % 24 for event in trace.events if event.kind != ADD)
    shown = {h: hours[h] for h in range(24)}
    return charts.histogram(shown, "hour of the day, counted from the trace's start", "lost nodes")
