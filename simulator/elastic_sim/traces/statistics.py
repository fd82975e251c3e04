"""Statistics of a trace: number of nodes, lifetimes, and losses at once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from elastic_sim.traces.trace import ADD, Trace

MIN_LIFETIMES = 20
"""Least number of lost nodes for an estimate of the shape of lifetimes."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one trace."""

    hours: float
    node_hours: float
    nodes_mean: float
    nodes_least: int
    """Fewest nodes at once, without the time before the first node joins."""
    nodes_most: int
    losses: int
    loss_events: int
    """Number of moments at which nodes were lost."""
    losses_per_node_hour: float
    bulk_mean: float
    """Mean number of nodes lost at one of these moments."""
    bulk_most: int
    joins: int
    """Number of nodes that joined after the beginning."""
    lifetime_median_s: float
    """Median lifetime of the lost nodes; 0: no node was lost."""
    lifetime_shape: float
    """Weibull shape of lifetimes, including unfinished ones. Below 1, young nodes are lost more
    often; above 1, old ones. 0: fewer than `MIN_LIFETIMES` nodes were lost."""
    between_losses_mean_s: float
    """Mean seconds between moments of loss in the cluster; 0: fewer than two such moments."""
    notices: int
    """Number of losses with notice."""


def statistics(trace: Trace) -> Statistics:
    """Return the statistics of a trace."""
    steps = node_counts(trace)
    ended, lasting = lifetimes(trace)
    bulks = Counter[float]()
    joins = notices = 0
    for event in trace.events:
        if event.kind == ADD:
            joins += event.seconds > 0
        else:
            bulks[event.seconds] += 1
            notices += event.notice_s > 0
    node_s = sum(n * (until - at) for (at, n), (until, _) in itertools.pairwise(steps))
    moments = sorted(bulks)
    sizes = list(itertools.dropwhile(lambda n: not n, (n for _, n in steps)))
    return Statistics(
        hours=trace.end_s / 3600,
        node_hours=node_s / 3600,
        nodes_mean=node_s / trace.end_s,
        nodes_least=min(sizes, default=0),
        nodes_most=max(sizes, default=0),
        losses=len(ended),
        loss_events=len(bulks),
        losses_per_node_hour=len(ended) / (node_s / 3600) if node_s else 0.0,
        bulk_mean=mean(bulks.values()) if bulks else 0.0,
        bulk_most=max(bulks.values(), default=0),
        joins=joins,
        lifetime_median_s=median(ended) if ended else 0.0,
        lifetime_shape=weibull_shape(ended, lasting) if len(ended) >= MIN_LIFETIMES else 0.0,
        between_losses_mean_s=(
            (moments[-1] - moments[0]) / (len(moments) - 1) if len(moments) > 1 else 0.0
        ),
        notices=notices,
    )


def lifetimes(trace: Trace) -> tuple[list[float], list[float]]:
    """Return (lifetimes of lost nodes, ages at the end of the nodes still present), in seconds."""
    joined_at: dict[str, float] = {}
    ended = list[float]()
    for event in trace.events:
        if event.kind == ADD:
            joined_at[event.node] = event.seconds
        else:
            ended.append(event.seconds - joined_at.pop(event.node))
    return ended, [trace.end_s - at for at in joined_at.values()]


def weibull_shape(ended: Sequence[float], lasting: Sequence[float]) -> float:
    """Return the maximum-likelihood shape of the Weibull distribution of lifetimes, by bisection.

    `lasting` lifetimes are censored: they are longer than given. Source: Cohen, Technometrics 1965,
    equation for the shape alone.
    """
    longest = max([*ended, *lasting])
    went = [math.log(max(t, 1.0) / longest) for t in ended]
    every = [*went, *(math.log(max(t, 1.0) / longest) for t in lasting)]
    low, high = 0.1, 10.0
    for _ in range(50):
        shape = (low + high) / 2
        weights = [math.exp(shape * t) for t in every]
        mean_log = sum(w * t for w, t in zip(weights, every, strict=True)) / sum(weights)
        low, high = (low, shape) if mean_log - 1 / shape > mean(went) else (shape, high)
    return round((low + high) / 2, 3)


def node_counts(trace: Trace) -> list[tuple[float, int]]:
    """Return (seconds, nodes from then on) of each change, from 0 to the end."""
    found, n = {0.0: 0}, 0
    for event in trace.events:
        n += 1 if event.kind == ADD else -1
        found[event.seconds] = n
    found.setdefault(trace.end_s, n)
    return list(found.items())
