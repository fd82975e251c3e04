"""Parcae's optimizer (Duan et al., NSDI 2024), with its measured throughputs and costs.

The rules and constants are those of the authors' program (github.com/JF-D/Parcae at efedee7,
liveput/cost.py, throughput.py, liveput.py, monte_carlo.py); this code is our own.

Time passes in minutes. In each minute nodes join or are lost, and a grid of D pipelines with P
stages is chosen for the nodes present. A change takes time from this minute and the next ones.

- **ideal**: the grid with the highest throughput, at no cost.
- **reactive**: the same grid, reached by a checkpoint (14 s) and a restart that sends all
  parameters.
- **proactive** (Parcae): knows the next twelve minutes and takes the grid with the most samples
  over them. A change builds new groups, moves nodes between stages, or needs a new cut. Its cost is
  the mean over random draws of the lost nodes."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import ceil, inf

from elastic_sim.traces.trace import ADD, REMOVE, Trace

MINUTE_S = 60
LOOK_AHEAD = 12
DRAWS = 200
VALUES_PER_PARAMETER = 3
"""The parameter and two optimizer moments, 4 bytes each."""
RENDEZVOUS_MS, CHECKPOINT_MS = 6600.0, 14_000.0
GROUP_BASE_MS, GROUP_ADD_MS, GROUPS_ADD = 35.0, 500.0, 1.5
"""Time to build groups: a constant, and the time per group if nodes are added. Models whose groups
were timed together take `GROUPS_ADD` times the time of a removal."""

Grid = tuple[int, int]
"""(pipelines D, stages P)."""
NO_GRID: Grid = (0, 0)
"""Nothing runs."""

SENDING_MS = {
    1 << 15: 0.162665, 1 << 16: 0.194492, 1 << 17: 0.230588, 1 << 18: 0.385104,
    1 << 19: 0.689821, 1 << 20: 1.428108, 1 << 21: 3.006771, 1 << 22: 5.182599,
    1 << 23: 9.727047, 1 << 24: 18.622294, 1 << 25: 38.560219, 1 << 26: 74.432216,
    1 << 27: 153.550589, 1 << 28: 305.811282, 1 << 29: 601.380752, 1 << 30: 1198.2559,
}  # fmt: skip
"""Measured milliseconds by bytes sent over 10 Gbit/s; linear in between."""


@dataclass(frozen=True, eq=False)
class ParcaeModel:
    """The authors' measurements of a model."""

    name: str
    throughput: dict[Grid, float]
    """Samples per second of each measured grid."""
    parameters: tuple[int, int, int]
    """Number of parameters of the first, each middle, and the last layer."""
    layers: int
    group_remove_ms: float | dict[int, float]
    """Time to build a group without added nodes; or to build all, by least number of pipelines."""
    min_stages: int
    build_ms: dict[int, float]
    """Time to build the stages, by their number. Empty: 430 ms per layer of the deepest stage, plus
    sending the embedding."""
    process_ms: float = 240.0
    extra_ms: float = 0.0
    excluded_stages: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> list[int]:
        first, middle, last = self.parameters
        return [first, *[middle] * self.layers, last]

    @lru_cache(maxsize=64)  # noqa: B019 - few models, which live as long as the program
    def cut(self, stages: int) -> list[int]:
        """Return the first layer of each stage, followed by the number of layers."""
        size, over = divmod(len(self.sizes) - 1, stages)
        chunks = [size + 1, *[size] * (stages - 1)]
        for i in range(over):
            chunks[-i - 2] += 1
        return [0, *itertools.accumulate(chunks)]

    def stage_parameters(self, stages: int) -> list[int]:
        ends = self.cut(stages)
        return [sum(self.sizes[a:b]) for a, b in itertools.pairwise(ends)]

    def build_time_ms(self, stages: int) -> float:
        if self.build_ms:
            return self.build_ms.get(stages, 0.0)
        return sending_ms(50257 * 1024 * 4) + 430 * ceil(self.layers / stages)

    def groups_ms(self, grid: Grid, *, adding: bool) -> float:
        d, p = grid
        if isinstance(self.group_remove_ms, float):
            each = GROUP_ADD_MS if adding else self.group_remove_ms
            return GROUP_BASE_MS + (d + p + 1 + d * p) * each
        together = next(ms for least, ms in self.group_remove_ms.items() if d >= least)
        return GROUP_BASE_MS + together * (GROUPS_ADD if adding else 1.0)

    @lru_cache(maxsize=64)  # noqa: B019
    def grids(self, nodes: int) -> tuple[Grid, ...]:
        """Return the grids with a known throughput that fit on `nodes` nodes."""
        return tuple(
            (d, p)
            for d, p in self.throughput
            if d * p <= nodes and p >= self.min_stages and p not in self.excluded_stages
        )

    def best(self, nodes: int) -> Grid | None:
        return max(self.grids(nodes), key=lambda grid: self.throughput[grid], default=None)


def sending_ms(nbytes: float) -> float:
    """Return the milliseconds to send bytes over 10 Gbit/s."""
    sizes = list(SENDING_MS)
    at = bisect_left(sizes, nbytes)
    if at == 0:
        return SENDING_MS[sizes[0]]
    if at == len(sizes):
        return nbytes / sizes[-1] * SENDING_MS[sizes[-1]]
    a, b = sizes[at - 1], sizes[at]
    return SENDING_MS[a] + (SENDING_MS[b] - SENDING_MS[a]) * (nbytes - a) / (b - a)


class MigrationCosts:
    """Computes the milliseconds to change from one grid to another."""

    def __init__(self, model: ParcaeModel, seed: int = 0) -> None:
        self.model, self._draw = model, random.Random(seed)
        self.moving = cache(self._moving)
        self._last_stage = cache(self._sending_last_stage)

    def restart(self, grid: Grid, *, adding: bool) -> float:
        model = self.model
        first = RENDEZVOUS_MS + model.extra_ms if adding else 0.0
        groups = model.groups_ms(grid, adding=adding)
        return first + groups + model.process_ms + model.build_time_ms(grid[1])

    def from_checkpoint(self, grid: Grid, *, adding: bool, first: bool) -> float:
        sent = sum(
            sending_ms(n * VALUES_PER_PARAMETER * 4) for n in self.model.stage_parameters(grid[1])
        )
        return self.restart(grid, adding=adding) + sent + (0.0 if first else CHECKPOINT_MS)

    def _moving(self, nodes: int, old: Grid, lost: int, new: Grid) -> float:
        """Return the expected cost of changing to `new` when `lost` of `nodes` nodes, drawn at
        random, are lost."""
        if old == NO_GRID:
            return self._recut(old, 0, new)
        same_depth = new[1] == old[1]
        return self._within(nodes, old, lost, new) if same_depth else self._recut(old, lost, new)

    def _within(self, nodes: int, old: Grid, lost: int, new: Grid) -> float:
        """Return the expected cost of a change that keeps the stages."""
        if not lost:
            return 0.0 if new == old else self._draw_within(old, [old[0]] * old[1], new, lost)
        total = 0.0
        for _ in range(DRAWS):
            left = [old[0]] * old[1]
            for node in self._draw.sample(range(nodes), lost):
                if node < old[0] * old[1]:
                    left[node % old[1]] -= 1
            total += self._draw_within(old, left, new, lost)
        return total / DRAWS

    def _draw_within(self, old: Grid, left: Sequence[int], new: Grid, lost: int) -> float:
        """Return the cost if `left` nodes of each stage remain."""
        d, p = new
        if min(left) >= d:
            return self.model.groups_ms(new, adding=False) + self.model.process_ms
        parameters = self.model.stage_parameters(p)
        most = gone = 0.0
        for stage, have in enumerate(left):
            missing = max(d - have, 0)
            if missing:
                cost = sending_ms(parameters[stage] * VALUES_PER_PARAMETER * 4)
                most = max(most, cost)
                if missing == d or (stage == p - 1 and missing == d - 1):
                    gone += cost
        return max(most, gone) + self.restart(new, adding=d * p > old[0] * old[1] - lost)

    def _recut(self, old: Grid, lost: int, new: Grid) -> float:
        """Return the cost of a change to other stages."""
        d, p = new
        sent = self._last_stage(old, p)
        if d > 1:
            sizes = self.model.stage_parameters(p)
            sent += max(sending_ms(n * VALUES_PER_PARAMETER * 4) for n in sizes)
        return sent + self.restart(new, adding=d * p > old[0] * old[1] - lost)

    def _sending_last_stage(self, old: Grid, stages: int) -> float:
        """Return the cost of fetching the last stage of a new cut, with nodes assigned greedily.

        The authors' program counts only this stage.
        """
        before = self.model.cut(old[1]) if old[1] else [0]
        sums = [0, *itertools.accumulate(self.model.sizes)]
        left, need = [old[0]] * old[1], 0
        for a, b in itertools.pairwise(self.model.cut(stages)):
            best, fewest = None, inf
            for stage, have in enumerate(left):
                shared = max(0, sums[min(b, before[stage + 1])] - sums[max(a, before[stage])])
                overlaps = before[stage] < b and before[stage + 1] > a
                extra = sums[b] - sums[a] - (shared if overlaps else 0)
                if have and extra < fewest:
                    best, fewest = stage, extra
            if best is not None:
                left[best] -= 1
                need = int(fewest)
        return sending_ms(need * VALUES_PER_PARAMETER * 4)


Minute = tuple[int, int, int]
"""(nodes at the end of the minute, joined, lost)."""


def minutes(trace: Trace) -> list[Minute]:
    """Return the trace, minute by minute."""
    found: list[Minute] = []
    nodes = 0
    events = Counter((event.seconds // MINUTE_S, event.kind) for event in trace.events)
    for minute in range(ceil(trace.end_s / MINUTE_S)):
        joined, lost = events[minute, ADD], events[minute, REMOVE]
        nodes += joined - lost
        found.append((nodes, joined, lost))
    return found


def ideal(model: ParcaeModel, trace: Trace) -> float:
    """Return the samples per second if changes cost nothing."""
    found = [model.best(nodes) for nodes, _, _ in minutes(trace)]
    return sum(model.throughput[grid] for grid in found if grid) / len(found)


def reactive(model: ParcaeModel, trace: Trace) -> float:
    """Return the samples per second with a checkpoint and a restart at every change."""
    costs, left, samples = MigrationCosts(model), 0.0, 0.0
    steps = minutes(trace)
    for number, (nodes, joined, lost) in enumerate(steps):
        grid = model.best(nodes)
        if grid is None:
            continue
        if number == 0 or joined + lost:
            adding = joined > 0 or number == 0
            cost = costs.from_checkpoint(grid, adding=adding, first=number == 0)
            left = cost + costs.restart(grid, adding=adding) if left > 0 else cost
        samples += model.throughput[grid] * max(0.0, MINUTE_S - left / 1000)
        left = max(0.0, left - MINUTE_S * 1000)
    return samples / (len(steps) * MINUTE_S)


def proactive(model: ParcaeModel, trace: Trace) -> float:
    """Return the samples per second of Parcae with a perfect forecast."""
    costs, steps = MigrationCosts(model), minutes(trace)
    nodes, grid, left, samples = 0, NO_GRID, 0.0, 0.0
    for number, (present, _, lost) in enumerate(steps):
        if not model.grids(present):
            nodes, grid, left = present, NO_GRID, 0.0
            continue
        chosen = _solve(model, costs, nodes, grid, left, steps[number : number + LOOK_AHEAD])
        cost = costs.moving(nodes, grid, lost, chosen)
        if cost > 0:
            left = cost + costs.restart(chosen, adding=False) if left > 0 else cost
        samples += model.throughput[chosen] * max(0.0, MINUTE_S - left / 1000)
        left = max(0.0, left - MINUTE_S * 1000)
        nodes, grid = present, chosen
    return samples / (len(steps) * MINUTE_S)


def _solve(
    model: ParcaeModel,
    costs: MigrationCosts,
    nodes: int,
    grid: Grid,
    left: float,
    coming: Sequence[Minute],
) -> Grid:
    """Return the grid for the next minute that leads to the most samples in `coming`."""
    states: dict[Grid, tuple[float, float, Grid | None]] = {grid: (0.0, left, None)}
    """By grid: (samples, remaining milliseconds of a change, grid of the first minute)."""
    for present, _, lost in coming:
        if not model.grids(present):
            nodes = present
            continue
        following: dict[Grid, tuple[float, float, Grid | None]] = {}
        for old, (samples, still, first) in states.items():
            for new in model.grids(present):
                cost = costs.moving(nodes, old, lost, new)
                interrupts = cost > 0 and still > 0
                pause = cost + costs.restart(new, adding=False) if interrupts else cost or still
                work = max(0.0, MINUTE_S - pause / 1000) * model.throughput[new]
                rest = max(0.0, pause - MINUTE_S * 1000)
                best = following.get(new)
                if best is None or (samples + work, -rest) > (best[0], -best[1]):
                    following[new] = samples + work, rest, first or new
        states, nodes = following, present
    return max(states.values(), key=lambda state: (state[0], -state[1]))[2] or grid
