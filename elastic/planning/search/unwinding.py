"""From a best cover back to its nodes and cuts (`elastic.planning.search.exact`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from elastic.planning.cost.cost_model import in_flight, pipeline_seconds
from elastic.planning.search.exact_cover import Covers
from elastic.planning.search.problem import CLOSE, Group, Shape


class _Way(NamedTuple):
    """Under what a pipeline is covered."""

    covers: Covers
    schedule: str
    ahead: int
    tail: float
    pipelines: int


def shape_of(covers: Covers, group: Group, microbatches: int, tail: float, pipelines: int) -> Shape:
    """How `group` covers the layers best, for so many micro-batches and a limit on the tail."""
    best: tuple[float, _Way, int] | None = None
    for schedule in covers.schedules:
        ahead = 1
        if covers.model.limited:
            ahead = in_flight(schedule, covers.deepest - 1, group.depth, microbatches)
        way = _Way(covers, schedule, ahead, tail, pipelines)
        cover = covers.cover(schedule, ahead, tail, pipelines).get(group)
        if cover is None:
            continue
        times = pipeline_seconds(schedule, cover[0], covers.limits[schedule], microbatches)
        at = int(np.argmin(times))
        if best is None or float(times[at]) < best[0]:
            best = float(times[at]), way, at
    assert best is not None, "a group that was priced has a cover"
    _, way, limit = best
    nodes = _unwind(way, group, limit)
    return Shape(
        way.schedule,
        tuple(kind for kind, _ in nodes),
        tuple(len(starts) for _, starts in nodes),
        (*(start for _, starts in nodes for start in starts), covers.n_layers),
        microbatches,
    )


def _unwind(way: _Way, group: Group, limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """Nodes of the best cover under a limit: (kind, first layer of each of its stages), first stage first."""
    at, nodes = 0, []
    while at < way.covers.n_layers:
        kind, starts, at, group = _first_node(way, group, at, limit)
        nodes.append((kind, starts))
    return nodes


def _first_node(way: _Way, group: Group, at: int, limit: int) -> tuple[int, tuple[int, ...], int, Group]:
    """The first node of a best cover from layer `at`: (kind, its cuts, where it ends, the group behind it)."""
    covers = way.covers
    found = covers.cover(way.schedule, way.ahead, way.tail, way.pipelines)
    target, slowest = found[group][at, limit], covers.limits[way.schedule][limit]
    for kind, used in product(range(len(covers.counts)), range(1, max(covers.units) + 1)):
        behind = Group(tuple(n - (q == kind) for q, n in enumerate(group.counts)), group.depth - used)
        if used > covers.units[kind] or min(behind.counts) < 0 or behind.depth < 0:
            continue
        rest = found.get(behind)
        if rest is None and behind.depth:
            continue
        for starts, end, value in _blocks(way, kind, used, behind.depth, at, slowest):
            after = (0.0 if end == covers.n_layers else inf) if rest is None else rest[end, limit]
            if value + after <= target * (1 + CLOSE):
                return kind, starts, end, behind
    raise AssertionError("a cover that was found can be unwound")


def _blocks(
    way: _Way, kind: int, used: int, behind: int, at: int, slowest: float
) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """Ways to put `used` stages of one node from layer `at` on: (first layers, end, sum of fills)."""
    covers = way.covers
    tau, fill = covers.stage(
        kind, behind + used - 1, used > 1, way.schedule, way.ahead, way.tail, way.pipelines
    )
    ends = range(at + 1, covers.n_layers + 1)
    for end in sorted(ends, key=lambda end: abs(tau[at, end] - slowest)):
        if tau[at, end] > slowest:
            continue
        if used == 1:
            yield (at,), end, float(fill[at, end])
            continue
        for starts, last, value in _blocks(way, kind, used - 1, behind, end, slowest):
            yield (at, *starts), last, value + float(fill[at, end])
