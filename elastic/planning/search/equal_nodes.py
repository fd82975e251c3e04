"""Plans on nodes of one kind: a knapsack over pipelines whose times are simulated.

On equal nodes each depth has one or two best cuts. A full pipeline needs about the same time for
each further micro-batch, so two simulations give its time for any number of micro-batches. The
knapsack finds the depths that do most micro-batches within a time. All plans for fewer nodes stay
possible, so a further node does not make the result slower.

The other searches use closed forms (`elastic.planning.cost.cost_model`), in which a message delays
every micro-batch. In a full pipeline it often delays none, so they take deep pipelines for slower
than they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import numpy as np

from elastic.planning.cost.cost_model import CostModel, Ints
from elastic.planning.schedule.microbatch_split import allot
from elastic.planning.search.columns import MANY_PIPELINES
from elastic.planning.search.evaluate import (
    largest_tail,
    shape_seconds,
    simulated_seconds,
    step_seconds,
)
from elastic.planning.search.fixed_shape import cut_uniform
from elastic.planning.search.problem import PipelineShape, Problem, Solution

MAX_SOLUTIONS = 3
"""Maximum number of plans that are returned."""
ALL_DEPTHS, NEXT_DEPTH = 24, 1.12
"""Up to 24 nodes, pipelines of each number of nodes are tried; then each is 12 % longer."""
MAX_ACTIONS = 3000
"""Maximum micro-batches times stages of a pipeline whose time is simulated here: a depth of 31."""
PRECISION = 1e-4
"""Relative precision of the least time in which all micro-batches are done."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A pipeline whose seconds are `base_s` + `each_s` per micro-batch."""

    shape: PipelineShape
    nodes: int
    base_s: float
    each_s: float

    def seconds(self, microbatches: int) -> float:
        return self.base_s + self.each_s * microbatches


def solutions(problem: Problem) -> tuple[Solution, ...]:
    """Return the best pipelines of equal depth, and the best of mixed depths for several limits on
    the tail. () with several kinds of nodes, and if nothing fits.

    Some nodes may be left over.
    """
    if len(problem.counts) > 1:
        return ()
    return cached_solutions(replace(problem, current=0, thorough=True))


@lru_cache(maxsize=1024)
def cached_solutions(problem: Problem) -> tuple[Solution, ...]:
    """Return `solutions` of a problem without the fields that do not matter to them."""
    nodes, units = problem.counts[0], min(problem.model.kinds[0].units, problem.model.n_layers)
    lines = [
        line
        for schedule in problem.schedules
        for depth in _depths(problem.model.n_layers, units)
        if depth <= nodes * units
        for line in simulated_lines(problem.model, schedule, depth, units, problem.microbatches)
    ]
    if not lines:
        return ()
    found = dict.fromkeys([_equal_depths(problem, lines), *_mixed_depths(problem, lines)])
    best = sorted((_allotted(problem, chosen) for chosen in found), key=lambda one: one.seconds)
    return tuple(_with_fastest_cuts(problem, lines, one) for one in best[:MAX_SOLUTIONS])


def _depths(n_layers: int, units: int) -> list[int]:
    """Return the depths that are tried: all up to ALL_DEPTHS nodes, then some. They do not depend
    on the number of nodes, so those of fewer nodes are always among them."""
    found = [nodes * units for nodes in range(1, ALL_DEPTHS + 1)]
    while found[-1] < n_layers:
        found.append(ceil(found[-1] / units * NEXT_DEPTH) * units)
    return [depth for depth in found if depth < n_layers] + [n_layers]


@lru_cache(maxsize=2048)
def simulated_lines(
    model: CostModel, schedule: str, depth: int, units: int, microbatches: int
) -> list[_Line]:
    """Return the best cuts of a depth, and their times. [] if memory is short.

    One cut counts messages as part of a stage's time, the other one does not. The truth is between.
    """
    most = min(3 * depth, max(2, microbatches))
    few = min(2 * depth, most - 1)
    seconds = simulated_seconds if depth * most <= MAX_ACTIONS else shape_seconds
    found = {}
    for messages in (True, False):
        cut = cut_uniform(model, schedule, depth, units, depth, messages=messages)
        if cut is not None and cut[0] not in found:
            first, last = (seconds(model, replace(cut[0], microbatches=m)) for m in (few, most))
            each = (last - first) / (most - few)
            found[cut[0]] = _Line(cut[0], -(-depth // units), first - few * each, each)
    return list(found.values())


def _equal_depths(problem: Problem, lines: list[_Line]) -> tuple[_Line, ...]:
    """Return the best plan whose pipelines have the same depth. A ring of few pipelines reduces
    faster, which `_mixed_depths` does not see."""
    nodes, m = problem.counts[0], problem.microbatches

    def seconds(line: _Line, pipelines: int) -> float:
        tail = largest_tail(problem.model, (line.shape,), pipelines)
        return line.seconds(-(-m // pipelines)) + tail

    choices = [
        (line, pipelines)
        for line in lines
        for pipelines in range(1, min(nodes // line.nodes, m) + 1)
    ]
    line, pipelines = min(choices, key=lambda choice: seconds(*choice))
    return (line,) * pipelines


def _mixed_depths(problem: Problem, lines: list[_Line]) -> list[tuple[_Line, ...]]:
    """Return plans of mixed depths, each with a shorter tail and a shorter step than the last."""
    tails = [largest_tail(problem.model, (line.shape,), MANY_PIPELINES) for line in lines]
    found: list[tuple[_Line, ...]] = []
    high = lines[0].seconds(problem.microbatches)
    best = high + max(tails)
    for limit in sorted(set(tails), reverse=True):
        knapsack = _Knapsack([x for x, t in zip(lines, tails, strict=True) if t <= limit], problem)
        low, high = 0.0, best - limit
        if high <= 0 or knapsack.most(high) < problem.microbatches:
            continue
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            enough = knapsack.most(middle) >= problem.microbatches
            low, high = (low, middle) if enough else (middle, high)
        best = high + limit
        found.append(knapsack.chosen(high))
    return found


class _Knapsack:
    """Most micro-batches that pipelines on a number of nodes do within a time."""

    def __init__(self, lines: list[_Line], problem: Problem) -> None:
        self.lines, self.nodes, self.limit = lines, problem.counts[0], problem.microbatches
        self._sizes = np.array([line.nodes for line in lines])
        self._base = np.array([line.base_s for line in lines])
        self._each = np.array([line.each_s for line in lines])
        self._seconds, self._table = -1.0, [0]
        self._values: Ints = self._sizes

    def most(self, seconds: float) -> int:
        """Return the number of micro-batches that are done within `seconds`."""
        self._fill(seconds)
        return self._table[-1]

    def chosen(self, seconds: float) -> tuple[_Line, ...]:
        """Return the pipelines that do most within `seconds`, at most one per micro-batch."""
        self._fill(seconds)
        left, found = self.nodes, []
        while self._table[left]:
            if self._table[left] == self._table[left - 1]:
                left -= 1
                continue
            fits = np.flatnonzero(self._sizes <= left)
            rest = np.array([self._table[left - size] for size in self._sizes[fits]])
            best = int(fits[np.argmax(rest + self._values[fits])])
            found.append(self.lines[best])
            left -= int(self._sizes[best])
        return tuple(found[: self.limit])

    def _fill(self, seconds: float) -> None:
        if seconds == self._seconds:
            return
        self._seconds = seconds
        done = np.floor((seconds - self._base) / self._each + 1e-9)
        self._values = np.maximum(done, 0).astype(np.int64)
        best: dict[int, int] = {}
        for size, value in zip(self._sizes.tolist(), self._values.tolist(), strict=True):
            best[size] = max(best.get(size, 0), value)
        items = [(size, value) for size, value in best.items() if value]
        table = [0] * (self.nodes + 1)
        for n in range(1, self.nodes + 1):
            table[n] = max(
                (table[n - size] + value for size, value in items if size <= n), default=0
            )
            table[n] = max(table[n], table[n - 1])
        self._table = table


@dataclass(frozen=True, slots=True)
class _Choice:
    """Pipelines with their micro-batches, and the seconds of the step."""

    parts: tuple[tuple[_Line, int], ...]
    seconds: float


def _allotted(problem: Problem, chosen: tuple[_Line, ...]) -> _Choice:
    """Return the pipelines with exactly M micro-batches."""
    shares = allot(problem.microbatches, [line.seconds for line in chosen])
    parts = tuple(zip(chosen, shares, strict=True))
    tail = largest_tail(problem.model, [line.shape for line in chosen])
    return _Choice(parts, max(line.seconds(m) for line, m in parts) + tail)


def _with_fastest_cuts(problem: Problem, lines: list[_Line], choice: _Choice) -> Solution:
    """Return the plan with the cuts and schedules that are fastest for its micro-batches."""
    best: dict[tuple[int, int], PipelineShape] = {}
    for size, m in {(line.nodes, m) for line, m in choice.parts}:
        tries = [replace(line.shape, microbatches=m) for line in lines if line.nodes == size]
        best[size, m] = min(tries, key=lambda shape: simulated_seconds(problem.model, shape))
    shapes = tuple(best[line.nodes, m] for line, m in choice.parts)
    return Solution(shapes, step_seconds(problem.model, shapes))
