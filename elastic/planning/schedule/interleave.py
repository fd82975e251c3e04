"""Division of the layers into several stages per unit, for the interleaved schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from elastic.domain.errors import FieldError
from elastic.domain.types import Pipeline, Stage
from elastic.planning.schedule.schedule import INTERLEAVED, ZERO_BUBBLE, units_of

_HALVINGS = 40


def can_interleave(n_layers: int, n_units: int, chunks: int = 2) -> bool:
    """Return whether `n_units` units can have `chunks` stages each."""
    return n_units >= 2 and chunks >= 2 and n_units * chunks <= n_layers


def interleave(pipeline: Pipeline, seconds: Sequence[Sequence[float]], chunks: int = 2) -> Pipeline:
    """Return `pipeline` with `chunks` stages per unit, cut so that the slowest stage is fastest.

    Args:
        pipeline: units in order; a unit that recomputes does so on all of its stages.
        seconds: per unit, the seconds of each layer on this unit, or figures in proportion.

    Raises:
        FieldError: there are too few layers or units (`can_interleave`).
    """
    units, n_layers = units_of(pipeline), pipeline.stages[-1].last
    if not can_interleave(n_layers, len(units), chunks):
        remedy = f"at least 2 units and {chunks * len(units)} layers are needed"
        raise FieldError(
            "schedule", f"{INTERLEAVED}, {chunks} stages on each of {len(units)} units", remedy
        )
    recompute = {stage.unit: stage.recompute for stage in pipeline.stages}
    sums = [list(accumulate(row, initial=0.0)) for row in seconds]
    ends = _cut([sums[s % len(units)] for s in range(chunks * len(units))], n_layers)
    stages = tuple(
        Stage(unit, first, last, recompute[unit])
        for unit, (first, last) in zip(units * chunks, pairwise(ends), strict=True)
    )
    return replace(pipeline, stages=stages, schedule=INTERLEAVED)


def _cut(sums: Sequence[Sequence[float]], n_layers: int) -> list[int]:
    """Return the stage boundaries that minimise the time of the slowest stage.

    `sums` has, per stage, the prefix sums of the layers' seconds. Bisection finds the smallest time
    limit under which greedily filled stages cover all layers.
    """
    low, high = 0.0, max(row[-1] for row in sums)
    best = _reach(sums, n_layers, high)
    assert best is not None, "one layer a stage is always within the slowest of everything"
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _reach(sums, n_layers, middle)
        low, high, best = (low, middle, found) if found else (middle, high, best)
    return best


def _reach(sums: Sequence[Sequence[float]], n_layers: int, limit: float) -> list[int] | None:
    """Return the boundaries if no stage may take longer than `limit`; None if that is impossible.

    Each stage holds at least one layer. The first stages are as long as possible.
    """
    ends_at = [[n_layers]]
    for left, row in enumerate(reversed(sums)):
        begins = range(len(sums) - left - 1, n_layers - left)
        ends_at.append([b for b in begins if _longest(row, b, limit, ends_at[-1]) is not None])
    if 0 not in ends_at[-1]:
        return None
    ends = [0]
    for row, allowed in zip(sums, reversed(ends_at[:-1]), strict=True):
        last = _longest(row, ends[-1], limit, allowed)
        assert last is not None
        ends.append(last)
    return ends


def _longest(row: Sequence[float], first: int, limit: float, allowed: list[int]) -> int | None:
    """Return the last allowed end of a stage that begins at layer `first`; None if there is none.

    `row`: prefix sums of the layers' seconds. The stage takes at most `limit` seconds.
    """
    place = bisect_right(allowed, bisect_right(row, row[first] + limit) - 1) - 1
    return allowed[place] if place >= 0 and allowed[place] > first else None


def scheduled(pipeline: Pipeline, schedule: str, seconds: Sequence[Sequence[float]]) -> Pipeline:
    """Return `pipeline` under `schedule`, or unchanged if the schedule does not fit it.

    A pipeline with one unit or too few layers stays unchanged. `seconds` is as in `interleave`.
    """
    units = units_of(pipeline)
    if schedule == INTERLEAVED and can_interleave(pipeline.stages[-1].last, len(units)):
        return interleave(pipeline, seconds)
    if schedule == ZERO_BUBBLE and len(units) > 1:
        return replace(pipeline, schedule=ZERO_BUBBLE)
    return pipeline
