"""What a trace says of a market: how many nodes are there, how long they stay, how many go at once."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from statistics import mean, median

from simulator.trace import ADD, Trace


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one trace. Rates are per node and hour that nodes were there."""

    hours: float
    node_hours: float
    nodes_mean: float
    nodes_least: int
    """Except before the first node came."""
    nodes_most: int
    losses: int
    loss_events: int
    """Moments at which nodes went."""
    losses_per_node_hour: float
    bulk_mean: float
    """Nodes lost at such a moment."""
    bulk_most: int
    joins: int
    """After the beginning."""
    lifetime_median_s: float
    """Of nodes that went; 0: none did."""
    between_losses_mean_s: float
    """Of the whole cluster; 0: fewer than two such moments."""
    notices: int
    """Losses that were told before."""


def statistics(trace: Trace) -> Statistics:
    """Count a trace."""
    steps = counts(trace)
    came: dict[str, float] = {}
    lifetimes = list[float]()
    bulks = Counter[float]()
    joins = notices = 0
    for event in trace.events:
        if event.kind == ADD:
            came[event.node] = event.seconds
            joins += event.seconds > 0
        else:
            lifetimes.append(event.seconds - came.pop(event.node))
            bulks[event.seconds] += 1
            notices += event.notice_s > 0
    node_s = sum(n * (until - at) for (at, n), (until, _) in itertools.pairwise(steps))
    moments = sorted(bulks)
    sizes = [n for _, n in steps]
    while sizes and not sizes[0]:
        sizes.pop(0)
    return Statistics(
        hours=trace.end_s / 3600,
        node_hours=node_s / 3600,
        nodes_mean=node_s / trace.end_s,
        nodes_least=min(sizes, default=0),
        nodes_most=max(sizes, default=0),
        losses=len(lifetimes),
        loss_events=len(bulks),
        losses_per_node_hour=len(lifetimes) / (node_s / 3600) if node_s else 0.0,
        bulk_mean=mean(bulks.values()) if bulks else 0.0,
        bulk_most=max(bulks.values(), default=0),
        joins=joins,
        lifetime_median_s=median(lifetimes) if lifetimes else 0.0,
        between_losses_mean_s=(moments[-1] - moments[0]) / (len(moments) - 1) if len(moments) > 1 else 0.0,
        notices=notices,
    )


def counts(trace: Trace) -> list[tuple[float, int]]:
    """(seconds, nodes from then on), from 0 to the end."""
    found, n = [(0.0, 0)], 0
    for at, events in trace.steps():
        n += sum(1 if event.kind == ADD else -1 for event in events)
        if at == found[-1][0]:
            found[-1] = at, n
        else:
            found.append((at, n))
    if found[-1][0] < trace.end_s:
        found.append((trace.end_s, n))
    return found
