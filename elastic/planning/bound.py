"""A proven lower bound on the step time of any 1F1B plan for a cluster: how far can the planner be from the best?

Nothing here follows the planner's choices. Every group of nodes that could make a pipeline gets an optimistic price:

- its slowest stage is at least the least limit under which stages of any order cover the layers (exact, from
  `columns`);
- its stages' times add up to at least what they would if layers could be split at will and the fastest nodes
  of the group took as much as the limit lets them (a fractional knapsack);
- its stages' tails stay within a limit, which the bound branches over;
- with m micro-batches memory holds at least min(m, stages behind + 1) of them; m is treated in ranges, each
  with the least of its range.

The linear programme over all groups then bounds how many micro-batches all nodes can do in a time
(`linear.bound`, valid at any prices), and the least time that allows M is the bound. Kinds are few (<= 3), layers
some dozens: all groups are enumerated.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

import numpy as np

from elastic.errors import FieldError
from elastic.planning.columns import Ints, columns, grid
from elastic.planning.linear import bound
from elastic.planning.model import NO_LIMIT, CostModel, Floats
from elastic.planning.problem import Problem
from elastic.planning.schedule import ONE_F_ONE_B

LIMITS = 1500
SEGMENTS = (1.0, 1.005, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2, 1.35, 1.6, 2.0, 3.0)
"""Limits are treated in ranges between these multiples of a group's least one."""
MOST_GROUPS = 60_000
SPLITS = 6
CLOSE_ENOUGH = 0.015
"""The bound is not improved further when it is this near to the plan."""
LIGHT = 0.003
"""Share of the whole below which a layer's time does not count for the sum of stages."""


@dataclass(frozen=True, slots=True)
class _Optimistic:
    """Optimistic options of all groups for `least` to `most` micro-batches a pipeline."""

    counts: Ints
    fill: Floats
    slowest: Floats
    least: int
    most: float

    def microbatches(self, seconds: float) -> Ints:
        with np.errstate(invalid="ignore"):
            number = np.floor((seconds - self.fill) / self.slowest * (1 + 1e-9) + 1 + 1e-9)
        number[~np.isfinite(number) | (self.fill > seconds * (1 + 1e-9))] = 0
        best = number.max(axis=1)
        best[best < self.least] = 0
        return np.asarray(np.minimum(best, self.most), dtype=np.int64)


def lower_bound(problem: Problem, above: float) -> float:
    """No 1F1B plan is faster than this (seconds), nor can it be proven above `above`, the seconds of a known plan.

    Raises FieldError for problems with more groups than can be enumerated.
    """
    if problem.schedules != (ONE_F_ONE_B,):
        raise FieldError("schedules", problem.schedules, "the bound is for 1F1B alone")
    free = _Bounds(problem, inf, 1)
    largest = free.most(above)
    if largest == 0:
        return above
    fewest = -(-problem.microbatches // min(largest, problem.microbatches))
    if problem.model.tailless:
        return free.least(above)
    start = float(np.diff(problem.model.gradient).max()) * problem.model.reduction(fewest)
    return _branch(problem, fewest, start, above)


def _branch(problem: Problem, pipelines: int, start: float, above: float) -> float:
    """Split the range of the tail until the bound is good enough: a plan whose tail lies between low and high takes at
    least `low` and the least time with stages limited to `high`."""
    heap = [(start + _Bounds(problem, above - start, pipelines).least(above - start), start, above - start)]
    for _ in range(SPLITS):
        found, low, high = heap[0]
        if found >= above * (1 - CLOSE_ENOUGH):
            break
        middle = (low * high) ** 0.5 if low > 0 else high / 4
        upper = middle + _time(found, low, above - middle)
        lower = low + _Bounds(problem, middle, pipelines).least(above - low)
        heapq.heapreplace(heap, (upper, middle, high))
        heapq.heappush(heap, (lower, low, middle))
    return min(above, heap[0][0])


def _time(found: float, low: float, most: float) -> float:
    return min(found - low, most)


class _Bounds:
    """Optimistic groups whose stages' tails stay within `tail` in a ring of `pipelines`."""

    def __init__(self, problem: Problem, tail: float, pipelines: int) -> None:
        self.problem = problem
        self.parts = [_optimistic(problem, a, b, tail, pipelines) for a, b in _ranges(problem)]

    def values(self, seconds: float) -> Ints:
        """[groups] the most micro-batches; 0 for groups that take more nodes than there are."""
        found = np.max([part.microbatches(seconds) for part in self.parts], axis=0)
        found[(self.parts[0].counts > np.array(self.problem.counts)).any(axis=1)] = 0
        return np.asarray(found)

    def most(self, seconds: float) -> int:
        """The most micro-batches that one pipeline could do."""
        return int(self.values(seconds).max())

    def least(self, most: float) -> float:
        """The least time at which the bound on micro-batches reaches M, or `most` if that is less."""
        if most <= 0 or not self._able(most):
            return max(most, 0.0)
        low, high = 0.0, most
        while high - low > 3e-4 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._able(middle) else (middle, high)
        return low

    def _able(self, seconds: float) -> bool:
        value = self.values(seconds)
        counts = self.parts[0].counts
        return bool(value.any()) and bound(
            value, counts, self.problem.counts
        ) >= self.problem.microbatches * (1 - 1e-9)


def _ranges(problem: Problem) -> list[tuple[int, float]]:
    if not problem.model.limited:
        return [(1, inf)]
    starts = [1, 8, 16, 32]
    return [(a, b - 1 if b else inf) for a, b in zip(starts, [*starts[1:], 0], strict=True)]


def _optimistic(problem: Problem, least: int, most: float, tail: float, pipelines: int) -> _Optimistic:
    model = problem.model
    levels = min(sum(problem.counts), model.n_layers)
    limits, whole = grid(model, ONE_F_ONE_B, model.n_layers, LIMITS)
    priced = columns(model, limits, ONE_F_ONE_B, levels, 1, least, tail, pipelines)
    if len(priced.counts) > MOST_GROUPS:
        raise FieldError("groups", len(priced.counts), f"at most {MOST_GROUPS} can be enumerated")
    first = priced.option[:, 0]
    able = np.isfinite(priced.fill[:, 0])
    slow = limits if whole else np.concatenate(([limits[0]], limits[:-1]))
    rooms = _rooms(model, limits)
    fills, slowest = [], []
    for a, b in zip(SEGMENTS, (*SEGMENTS[1:], inf), strict=True):
        near = np.searchsorted(limits, limits[first] * a * (1 - 1e-12), side="left")
        far = (
            np.minimum(np.searchsorted(limits, limits[first] * b, side="right"), len(limits) - 1)
            if b < inf
            else np.full(len(first), len(limits) - 1)
        )
        near = np.minimum(near, len(limits) - 1)
        fills.append(np.where(able, _fill(model, priced.counts, rooms[:, far]), np.inf))
        slowest.append(slow[np.maximum(near, first)])
    return _Optimistic(priced.counts, np.stack(fills, axis=1), np.stack(slowest, axis=1), least, most)


def _rooms(model: CostModel, limits: Floats) -> Floats:
    """[kinds, limits] the most seconds of compute that a stage within the limit has, plain and with nothing
    in its way."""
    rooms = np.zeros((len(model.kinds), len(limits)))
    for kind in range(len(model.kinds)):
        p = model.prefix(kind)
        times = p.forward + p.backward
        stages = np.unique((times[None, :] - times[:, None])[np.triu_indices(model.n_layers + 1, 1)])
        at = np.searchsorted(stages, limits * (1 + 1e-9), side="right") - 1
        rooms[kind] = np.where(at >= 0, stages[np.maximum(at, 0)], 0.0)
        if p.memory < NO_LIMIT:
            rooms[kind] = np.minimum(rooms[kind], _memory_room(model, kind))
    return rooms


def _memory_room(model: CostModel, kind: int) -> float:
    """The most seconds of compute that a stage has whose parameters, state and gradients fit."""
    p = model.prefix(kind)
    times = p.forward + p.backward
    ends = np.searchsorted(model.fixed, model.fixed + p.memory, side="right") - 1
    return float((times[ends] - times).max())


def _fill(model: CostModel, counts: Ints, rooms: Floats) -> Floats:
    """[groups] the least sum of stage times when kind q has `rooms[q]` seconds a stage: fastest kinds first."""
    layers = [np.diff(model.prefix(q).forward + model.prefix(q).backward) for q in range(len(model.kinds))]
    heavy = layers[0] >= LIGHT * layers[0].sum()  # light layers scale differently, and are left out
    ratios = [float((times[heavy] / layers[0][heavy]).min()) for times in layers]
    left = np.full(len(counts), float(layers[0][heavy].sum()))
    total = (counts.sum(axis=1) - 1) * float(model.hop[1:-1].min(initial=inf) if model.n_layers > 1 else 0.0)
    for kind in np.argsort(ratios, kind="stable"):
        taken = np.minimum(left, counts[:, kind] * rooms[kind] / ratios[kind])
        total = total + taken * ratios[kind]
        left = left - taken
    return np.asarray(total + np.maximum(left, 0.0) * max(ratios))
