"""Parcae (Duan et al., NSDI 2024): its rules, its measured throughputs and costs (github.com/JF-D/Parcae at efedee7,
liveput/cost.py, throughput.py, liveput.py, monte_carlo.py); the program is our own.

Time goes in minutes. In each, nodes come or go; a grid of D pipelines with P stages is chosen for the nodes that are
there, and changing to it takes time from the minute, or from those that follow.

- **ideal**: the grid with the highest throughput, at no cost.
- **reactive**: the same grid, reached through a checkpoint (14 s) and a restart with all parameters sent.
- **parcae**: knows the next twelve minutes, and takes the grid with the most samples over them; costs are those of
  moving within a stage (groups anew), between stages, or of cutting anew, expected over which nodes are lost.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, inf

from elastic_sim.traces.trace import ADD, Trace

MINUTE_S = 60
LOOK_AHEAD = 12
DRAWS = 200
STATES = 3
"""Parameters, and two moments: all of 4 bytes."""
RENDEZVOUS_MS, CHECKPOINT_MS = 6600.0, 14_000.0
GROUP_BASE_MS, GROUP_ADD_MS, GROUPS_ADD = 35.0, 500.0, 1.5
"""For all; for each group; or times the removal's, of models whose groups are timed together."""

Grid = tuple[int, int]
"""(pipelines D, stages P)."""
NO_GRID: Grid = (0, 0)
"""Nothing runs."""

SENDING_MS = {
    1 << 15: 0.162665, 1 << 16: 0.194492, 1 << 17: 0.230588, 1 << 18: 0.385104, 1 << 19: 0.689821, 1 << 20: 1.428108,
    1 << 21: 3.006771, 1 << 22: 5.182599, 1 << 23: 9.727047, 1 << 24: 18.622294, 1 << 25: 38.560219, 1 << 26: 74.432216,
    1 << 27: 153.550589, 1 << 28: 305.811282, 1 << 29: 601.380752, 1 << 30: 1198.2559,
}  # fmt: skip
"""Bytes: milliseconds over 10 Gb/s, as measured; in between by lines."""


@dataclass(frozen=True, eq=False)
class ParcaeModel:
    """What the authors measured of a model."""

    name: str
    throughput: dict[Grid, float]
    """Samples a second."""
    parameters: tuple[int, int, int]
    """Of the first, each middle, and the last layer."""
    layers: int
    group_remove_ms: float | dict[int, float]
    """For each group; or for all together, by the pipelines that there are at least, most first."""
    least_stages: int
    build_ms: dict[int, float]
    """By stages; empty: 430 ms for each layer of the deepest stage, and the embedding sent."""
    process_ms: float = 240.0
    extra_ms: float = 0.0
    without_stages: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> list[int]:
        first, middle, last = self.parameters
        return [first, *[middle] * self.layers, last]

    @lru_cache(maxsize=64)  # noqa: B019 - a handful of models, for good
    def cut(self, stages: int) -> list[int]:
        """Where stages begin, and the end."""
        size, over = divmod(len(self.sizes) - 1, stages)
        chunks = [size + 1, *[size] * (stages - 1)]
        for i in range(over):
            chunks[-i - 2] += 1
        ends = [0]
        for chunk in chunks:
            ends.append(ends[-1] + chunk)
        return ends

    def stage_parameters(self, stages: int) -> list[int]:
        ends = self.cut(stages)
        return [sum(self.sizes[a:b]) for a, b in itertools.pairwise(ends)]

    def build(self, stages: int) -> float:
        if self.build_ms:
            return self.build_ms.get(stages, 0.0)
        return sending_ms(50257 * 1024 * 4) + 430 * ceil(self.layers / stages)

    def groups(self, grid: Grid, *, adding: bool) -> float:
        d, p = grid
        if isinstance(self.group_remove_ms, float):
            each = GROUP_ADD_MS if adding else self.group_remove_ms
            return GROUP_BASE_MS + (d + p + 1 + d * p) * each
        together = next(ms for least, ms in self.group_remove_ms.items() if d >= least)
        return GROUP_BASE_MS + together * (GROUPS_ADD if adding else 1.0)

    @lru_cache(maxsize=64)  # noqa: B019
    def grids(self, nodes: int) -> tuple[Grid, ...]:
        """Those with a throughput that fit."""
        return tuple(
            (d, p)
            for d, p in self.throughput
            if d * p <= nodes and p >= self.least_stages and p not in self.without_stages
        )

    def best(self, nodes: int) -> Grid | None:
        return max(self.grids(nodes), key=lambda grid: self.throughput[grid], default=None)


def sending_ms(nbytes: float) -> float:
    sizes = list(SENDING_MS)
    at = bisect_left(sizes, nbytes)
    if at == 0:
        return SENDING_MS[sizes[0]]
    if at == len(sizes):
        return nbytes / sizes[-1] * SENDING_MS[sizes[-1]]
    a, b = sizes[at - 1], sizes[at]
    return SENDING_MS[a] + (SENDING_MS[b] - SENDING_MS[a]) * (nbytes - a) / (b - a)


class MigrationCosts:
    """Milliseconds of changing from one grid to another."""

    def __init__(self, model: ParcaeModel, seed: int = 0) -> None:
        self.model, self._draw = model, random.Random(seed)
        self._known: dict[tuple[int, Grid, int, Grid], float] = {}
        self._recuts: dict[tuple[Grid, int], float] = {}

    def restart(self, grid: Grid, *, adding: bool) -> float:
        model, first = self.model, RENDEZVOUS_MS + self.model.extra_ms if adding else 0.0
        return first + model.groups(grid, adding=adding) + model.process_ms + model.build(grid[1])

    def again(self, grid: Grid) -> float:
        """For a change while another one is under way."""
        return self.restart(grid, adding=False)

    def from_checkpoint(self, grid: Grid, *, adding: bool, first: bool) -> float:
        sent = sum(sending_ms(n * STATES * 4) for n in self.model.stage_parameters(grid[1]))
        return self.restart(grid, adding=adding) + sent + (0.0 if first else CHECKPOINT_MS)

    def moving(self, nodes: int, old: Grid, lost: int, new: Grid) -> float:
        """Expected, when `lost` of `nodes` go, whichever."""
        if old == NO_GRID:
            return self._recut(old, 0, new)
        key = nodes, old, lost, new
        if key not in self._known:
            self._known[key] = self._within(*key) if new[1] == old[1] else self._recut(old, lost, new)
        return self._known[key]

    def _within(self, nodes: int, old: Grid, lost: int, new: Grid) -> float:
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
        d, p = new
        if min(left) >= d:
            return self.model.groups(new, adding=False) + self.model.process_ms
        parameters = self.model.stage_parameters(p)
        most = gone = 0.0
        for stage, have in enumerate(left):
            missing = max(d - have, 0)
            if missing:
                cost = sending_ms(parameters[stage] * STATES * 4)
                most = max(most, cost)
                if missing == d or (stage == p - 1 and missing == d - 1):
                    gone += cost
        return max(most, gone) + self.restart(new, adding=d * p > old[0] * old[1] - lost)

    def _recut(self, old: Grid, lost: int, new: Grid) -> float:
        d, p = new
        sent = self._last_stage(old, p)
        if d > 1:
            sent += max(sending_ms(n * STATES * 4) for n in self.model.stage_parameters(p))
        return sent + self.restart(new, adding=d * p > old[0] * old[1] - lost)

    def _last_stage(self, old: Grid, stages: int) -> float:
        """What the last stage of a new cut has to fetch, nodes taken greedily: the authors' program counts it alone."""
        key = old, stages
        if key not in self._recuts:
            before = self.model.cut(old[1]) if old[1] else [0]
            sums = [0]
            for size in self.model.sizes:
                sums.append(sums[-1] + size)
            left, ends, need = [old[0]] * old[1], self.model.cut(stages), 0
            for a, b in itertools.pairwise(ends):
                best, fewest = None, inf
                for stage, have in enumerate(left):
                    shared = max(0, sums[min(b, before[stage + 1])] - sums[max(a, before[stage])])
                    extra = sums[b] - sums[a] - (shared if before[stage] < b and before[stage + 1] > a else 0)
                    if have and extra < fewest:
                        best, fewest = stage, extra
                if best is not None:
                    left[best] -= 1
                    need = int(fewest)
            self._recuts[key] = sending_ms(need * STATES * 4)
        return self._recuts[key]


Minute = tuple[int, int, int]
"""(nodes, came, went)."""


def minutes(trace: Trace) -> list[Minute]:
    """The trace by minutes."""
    found: list[Minute] = []
    nodes = 0
    by_minute: dict[int, list[int]] = {}
    for event in trace.events:
        counts = by_minute.setdefault(int(event.seconds // MINUTE_S), [0, 0])
        counts[event.kind != ADD] += 1
    for minute in range(ceil(trace.end_s / MINUTE_S)):
        came, went = by_minute.get(minute, (0, 0))
        nodes += came - went
        found.append((nodes, came, went))
    return found


def ideal(model: ParcaeModel, trace: Trace) -> float:
    """Samples a second."""
    found = [model.best(nodes) for nodes, _, _ in minutes(trace)]
    return sum(model.throughput[grid] for grid in found if grid) / len(found)


def reactive(model: ParcaeModel, trace: Trace) -> float:
    """Samples a second."""
    costs, left, samples = MigrationCosts(model), 0.0, 0.0
    steps = minutes(trace)
    for number, (nodes, came, went) in enumerate(steps):
        grid = model.best(nodes)
        if grid is None:
            continue
        if number == 0 or came + went:
            adding = came > 0 or number == 0
            cost = costs.from_checkpoint(grid, adding=adding, first=number == 0)
            left = cost + costs.restart(grid, adding=adding) if left > 0 else cost
        samples += model.throughput[grid] * max(0.0, MINUTE_S - left / 1000)
        left = max(0.0, left - MINUTE_S * 1000)
    return samples / (len(steps) * MINUTE_S)


def proactive(model: ParcaeModel, trace: Trace) -> float:
    """Parcae's samples a second when it knows what comes."""
    costs, steps = MigrationCosts(model), minutes(trace)
    nodes, grid, left, samples = 0, NO_GRID, 0.0, 0.0
    for number, (there, _, went) in enumerate(steps):
        if not model.grids(there):
            nodes, grid, left = there, NO_GRID, 0.0
            continue
        chosen = _solve(model, costs, nodes, grid, left, steps[number : number + LOOK_AHEAD])
        cost = costs.moving(nodes, grid, went, chosen)
        if cost > 0:
            left = cost + costs.again(chosen) if left > 0 else cost
        samples += model.throughput[chosen] * max(0.0, MINUTE_S - left / 1000)
        left = max(0.0, left - MINUTE_S * 1000)
        nodes, grid = there, chosen
    return samples / (len(steps) * MINUTE_S)


def _solve(model: ParcaeModel, costs: MigrationCosts, nodes: int, grid: Grid, left: float, coming: Sequence[Minute]) -> Grid:
    """The grid for the first of the coming minutes that leads to the most samples over all of them."""
    states: dict[Grid, tuple[float, float, Grid | None]] = {grid: (0.0, left, None)}
    """Grid: (samples, milliseconds of a change that are left, grid of the first minute)."""
    for there, _, went in coming:
        if not model.grids(there):
            nodes = there
            continue
        following: dict[Grid, tuple[float, float, Grid | None]] = {}
        for old, (samples, still, first) in states.items():
            for new in model.grids(there):
                cost = costs.moving(nodes, old, went, new)
                pause = (cost + costs.again(new) if still > 0 else cost) if cost > 0 else still
                work = max(0.0, MINUTE_S - pause / 1000) * model.throughput[new]
                rest = max(0.0, pause - MINUTE_S * 1000)
                best = following.get(new)
                if best is None or (samples + work, -rest) > (best[0], -best[1]):
                    following[new] = samples + work, rest, first or new
        states, nodes = following, there
    return max(states.values(), key=lambda state: (state[0], -state[1]))[2] or grid
