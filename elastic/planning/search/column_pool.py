"""All pipelines that a cluster could be made of, by schedule and size of block, and how many micro-batches they do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, inf, log

import numpy as np

from elastic.planning.cost.cost_model import CostModel, Floats, Ints
from elastic.planning.search.columns import MANY, Columns, columns, grid
from elastic.planning.search.master_problem import Relaxation

LEVELS = {1: (128, 64, 64), 2: (64, 40, 40), 3: (26, 20, 17), 4: (13, 11, 9)}
"""Most blocks of a group, by number of kinds, for growing blocks: a few thousand groups."""
LIMITS = 192
"""Limits on the slowest stage that groups are priced with."""
TAILS = 20
"""Limits on the tail that are tried."""
COARSE = 1.03
"""Limits from earlier solutions are rounded to powers of this, so that nearly equal questions find the same answer."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Columns of all schedules together."""

    parts: tuple[Columns, ...]
    counts: Ints
    tails: tuple[float, ...]
    pipelines: int
    """In the ring that it was priced for."""

    def values(self, seconds: float, tail: float, nodes: tuple[int, ...]) -> Ints:
        """[columns] the most micro-batches done within `seconds`; 0 where more nodes are needed than there are."""
        found = np.concatenate([part.microbatches(seconds, tail) for part in self.parts])
        found[(self.counts > np.array(nodes)).any(axis=1)] = 0
        return found

    def find(self, column: int) -> tuple[Columns, int]:
        """(part, row in it) of a column."""
        for part in self.parts:
            if column < len(part.counts):
                return part, column
            column -= len(part.counts)
        raise AssertionError("no such column")

    def fractional(
        self,
        relaxation: Relaxation,
        microbatches: int,
        tail: float,
        most: float = inf,
        close: float = 2e-4,
    ) -> float:
        """The least time at which `relaxation`, the linear programme of these columns, reaches
        `microbatches`; inf if it is above `most` or never.

        Wrong by at most the fraction `close`, upwards.
        """

        def able(seconds: float) -> bool:
            value = self.values(seconds, tail, relaxation.nodes)
            return bool(value.any()) and relaxation.maximise(value).bound >= microbatches * (1 - 1e-9)

        if most < inf and not able(most):
            return inf
        low, high = 0.0, most
        if most == inf:
            high = 1e-9
            while not able(high):
                low, high = high, high * 4
                if high > 1e15:
                    return inf
        while high - low > close * high:
            middle = (low * high) ** 0.5 if low else high / 4
            low, high = (low, middle) if able(middle) else (middle, high)
        return high


def pool(
    model: CostModel,
    schedules: tuple[str, ...],
    deepest: int,
    most: float,
    tail: float = inf,
    near: tuple[float, float] = (0.0, inf),
    pipelines: int = MANY,
) -> Pool | None:
    """Price groups of up to `deepest` nodes; None if none can hold the model.

    `most`: micro-batches of a pipeline that memory is reckoned with; `tail`: limit on a stage's tail, to cut for, with
    `pipelines` in the ring;
    `near`: range of the slowest stage that is of interest. The last two are rounded.
    """
    low = COARSE ** floor(log(near[0], COARSE)) if near[0] > 0 else 0.0
    high = COARSE ** ceil(log(near[1], COARSE)) if near[1] < inf else inf
    tail = COARSE ** floor(log(tail, COARSE)) if 0 < tail < inf else tail
    return tables(model, schedules, deepest, most, tail, low, high, pipelines)


@lru_cache(maxsize=48)
def tables(
    model: CostModel,
    schedules: tuple[str, ...],
    deepest: int,
    most: float,
    tail: float,
    low: float,
    high: float,
    pipelines: int,
) -> Pool | None:
    parts = tuple(
        columns(model, grid(model, s, deepest, LIMITS, (low, high)), s, levels, block, most, tail, pipelines)
        for s in schedules
        for levels, block in _blocks(len(model.kinds), deepest)
    )
    if not any(np.isfinite(part.fill).any() for part in parts):
        return None
    tails = np.concatenate([part.tail[np.isfinite(part.tail)] for part in parts])
    limits = _spread(tails, model) if tail == inf else (tail,)
    return Pool(parts, np.concatenate([part.counts for part in parts]), limits, pipelines)


def _blocks(kinds: int, deepest: int) -> list[tuple[int, int]]:
    """(levels, nodes a block): shallow groups one by one, deeper ones in coarser and coarser steps."""
    found: list[tuple[int, int]] = []
    block = 1
    for levels in LEVELS.get(kinds, (8, 8, 8)):
        reached = found[-1][0] * found[-1][1] if found else 0
        if reached >= deepest:
            break
        block = max(block, ceil(deepest / levels)) if len(found) == 2 else block
        found.append((min(levels, ceil(deepest / block)), block))
        block *= 2
    return found


def _spread(tails: Floats, model: CostModel) -> tuple[float, ...]:
    if model.tailless:
        return (inf,)
    values = np.unique(tails)
    steps = np.geomspace(max(values[0], 1e-12), max(values[-1], 1e-12), TAILS)
    return tuple(np.unique(values[np.minimum(np.searchsorted(values, steps), len(values) - 1)]).tolist())
