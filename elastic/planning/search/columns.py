"""Prices every pipeline that a large cluster could form: the columns of the linear programme.

A *group* is a number of nodes per kind. Going from the last stage to the first, `reach[group, t]`
is the first layer that the group's stages can start at if no stage takes longer than `limits[t]`.
Starting earlier is never worse, so the best reach of a group follows from the best reaches of the
groups with one node less. The group can hold the whole model under a limit if it reaches layer 0.
All groups of one size and all limits are computed in a few array operations.

Each group keeps its smallest limit and some wider ones. Under a wider limit fast nodes take more
layers, so that the stages' times add up to less. So a group has one to four *options* of (fill,
slowest, tail). A `ColumnPool` holds the groups of all schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import ceil, comb, floor, inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastic.planning.cost.cost_model import UNLIMITED_BYTES, CostModel, Floats, Ints
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.master_problem import Relaxation

LIMIT_FACTORS = (1.0, 1.05, 1.15, 1.4)
"""Limits kept per group, as factors of its smallest one."""
BUCKET_WIDTHS = (1e-4, 1e-3, 4e-3, 0.01, 0.02, 0.04)
"""Relative widths of buckets: if there are too many limits, each bucket keeps only its largest."""
FAR_THINNING = 6
"""Ratio of the numbers of limits inside and above the range of interest."""
MANY_PIPELINES = 1 << 20
"""Assumed number of pipelines in the ring if it is not yet known."""
MAX_LEVELS = {1: (128, 64, 64), 2: (64, 40, 40), 3: (26, 20, 17), 4: (13, 11, 9)}
"""Maximum blocks in a group for three growing block sizes, by kinds: a few thousand groups."""
MAX_STAGE_LIMITS = 192
"""Maximum number of limits on the slowest stage with which groups are priced."""
MAX_TAIL_LIMITS = 20
ROUNDING = 1.03
"""Base to whose powers limits are rounded, so that similar searches share cached tables."""


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """Groups (rows) with their options (columns), for one schedule and block size."""

    counts: Ints
    """[groups, kinds] nodes."""
    depth: Ints
    """[groups] stages."""
    fill: Floats
    """[groups, options] seconds; inf: not an option."""
    slowest: Floats
    """[groups, options] seconds of the slowest stage."""
    tail: Floats
    """[groups, options] seconds of the largest stage's reduction and update."""
    most: float
    """Maximum micro-batches of such a pipeline, because its memory was checked for no more."""
    schedule: str
    choice: list[NDArray[np.int8]]
    """Per number of blocks: [groups of this size, limits] kind of the first node."""
    option: Ints
    """[groups, options] index into `limits`."""
    limits: Floats
    block: int
    """Number of nodes of one kind that are always used together."""

    def microbatches(self, seconds: float, tail: float) -> Ints:
        """Return, [groups], the most micro-batches within `seconds` if no tail exceeds `tail`."""
        ahead = 0 if self.schedule == ZERO_BUBBLE else 1
        with np.errstate(invalid="ignore"):
            number = np.floor((seconds - self.fill) / self.slowest * (1 + 1e-12) + ahead)
        unfit = (self.tail > tail * (1 + 1e-9)) | (self.fill > seconds)
        number[~np.isfinite(number) | unfit] = 0
        return np.asarray(np.clip(number, 0, self.most).max(axis=1), dtype=np.int64)

    def fastest_option(self, group: int, microbatches: int, tail: float) -> int:
        """Return the option with which the group finishes `microbatches` first."""
        ahead = 0 if self.schedule == ZERO_BUBBLE else 1
        able = np.isfinite(self.fill[group]) & (self.tail[group] <= tail * (1 + 1e-9))
        slowest = np.where(able, self.slowest[group], 0.0)
        seconds = self.fill[group] + (microbatches - ahead) * slowest
        return int(np.argmin(np.where(able, seconds, np.inf)))

    def node_order(self, group: int, option: int) -> tuple[int, ...]:
        """Return the kinds of the nodes that achieve the option, first stage first."""
        limit, counts = self.option[group, option], self.counts[group] // self.block
        kinds: list[int] = []
        while counts.any():
            size = int(counts.sum())
            row = composition_index(counts[None, :], size)[0]
            kind = int(self.choice[size][row, limit])
            kinds += [kind] * self.block
            counts = counts - (np.arange(len(counts)) == kind)
        return tuple(kinds)


class _Progress(NamedTuple):
    """Figures of the best stages so far, each [groups, limits]; `reach` is their first layer."""

    reach: Ints
    fill: Floats
    """Sum of fills."""
    slowest: Floats
    tail: Floats
    """Largest tail."""

    def select(self, index: Any) -> _Progress:
        """Return the tables at a NumPy index."""
        return _Progress(self.reach[index], self.fill[index], self.slowest[index], self.tail[index])


class _StageReach:
    """Computes the first layer at which another stage can start."""

    def __init__(
        self,
        model: CostModel,
        limits: Floats,
        schedule: str,
        most: float,
        tail: float = inf,
        pipelines: int = MANY_PIPELINES,
        *,
        optimistic: bool = False,
    ) -> None:
        """`optimistic`: a stage may start as early as any stage that ends later.

        This matters if boundaries differ in bytes: then an earlier start is not always better.
        """
        self.model, self.limits, self.schedule, self.most = model, limits, schedule, most
        self.tail, self.optimistic = tail, optimistic
        kinds = range(len(model.kinds))
        self.tails = [model.tail_sums(q, pipelines) for q in kinds]
        self.times = {
            (q, again): _stage_prefix(model, schedule, q, again)
            for q in kinds
            for again in (False, True)
        }
        self._by_time_cache: dict[tuple[int, bool, bool, bool], Ints] = {}

    def _by_time(self, kind: int, again: bool, inside: bool, last: bool) -> Ints:
        """Return, [L + 1, limits], the least first layer that time allows, by a stage's end."""
        key = (kind, again, inside, last)
        if key not in self._by_time_cache:
            times = self.times[kind, again]
            hops = self.model.hops(inside=inside, last=last)
            room = self.limits[None, :] * (1 + 1e-12) - hops[:, None]
            found = np.searchsorted(times, times[:, None] - room, side="left")
            stream = self.model.prefix[kind].stream
            if stream[-1] > 0:
                streamed = np.searchsorted(stream, stream[:, None] - room, side="left")
                found = np.maximum(found, streamed)
            found = np.minimum(found, np.arange(self.model.n_layers + 1)[:, None])
            if self.optimistic:
                found = np.minimum.accumulate(found[::-1], axis=0)[::-1]
            self._by_time_cache[key] = found
        return self._by_time_cache[key]

    def _by_space(self, kind: int, ahead: float, again: bool) -> Ints:
        """Return, [L + 1], the least first layer that memory and tail allow, by a stage's end."""
        found = self._by_memory(kind, ahead, again)
        if self.tail < np.inf:
            sums = self.tails[kind]
            least = np.searchsorted(sums, sums - self.tail * (1 + 1e-9), side="left")
            found = np.maximum(found, np.minimum(least, np.arange(len(sums))))
        return found

    def _by_memory(self, kind: int, ahead: float, again: bool) -> Ints:
        model, memory = self.model, self.model.prefix[kind].memory
        if memory >= UNLIMITED_BYTES:
            return np.zeros(model.n_layers + 1, dtype=np.int64)
        sums = model.fixed + (1 if again else ahead) * model.activation
        room = memory - (ahead * model.widest if again else 0)
        if room <= 0:
            return np.arange(model.n_layers + 1)
        found = np.searchsorted(sums, sums - room, side="left")
        return np.minimum(found, np.arange(model.n_layers + 1))

    def extend(
        self, kind: int, behind: int, depth: int, inside: bool, state: _Progress
    ) -> _Progress:
        """Return `state` with a stage of `kind` put first; `behind` stages come after it."""
        reach = state.reach
        ahead = min(float(depth if self.schedule == ZERO_BUBBLE else behind + 1), self.most)
        at = np.arange(reach.shape[1])
        new = self._by_time(kind, False, inside, behind == 0)[reach, at]
        space = self._by_space(kind, ahead, False)[reach]
        times = self.times[kind, False]
        if (space <= new).all():
            seconds = times[reach] - times[new]
        else:
            new = np.maximum(space, new)
            seconds = times[reach] - times[new]
            again = np.maximum(
                self._by_space(kind, ahead, True)[reach],
                self._by_time(kind, True, inside, behind == 0)[reach, at],
            )
            further = again < new
            times = self.times[kind, True]
            seconds = np.where(further, times[reach] - times[again], seconds)
            new = np.where(further, again, new)
        p, stream = self.model.prefix[kind], self.model.prefix[kind].stream
        if stream[-1] > 0:
            seconds = np.maximum(seconds, stream[reach] - stream[new])
        hops = self.model.hops(inside=inside, last=behind == 0)
        if hops.any():
            seconds = seconds + np.where(new < reach, hops[reach], 0.0)
        slowest = np.maximum(state.slowest, seconds)
        if self.schedule == ZERO_BUBBLE:
            assert p.weight is not None
            hidden = 2 * (p.weight[reach] - p.weight[new])
            seconds = np.maximum(seconds - hidden, 0.0) if behind else np.zeros_like(seconds)
        tails = self.tails[kind]
        tail = np.maximum(state.tail, tails[reach] - tails[new])
        return _Progress(new, state.fill + seconds, slowest, tail)


def _stage_prefix(model: CostModel, schedule: str, kind: int, again: bool) -> Floats:
    """Return prefix sums of seconds per micro-batch, without hops; `again`: with recomputation."""
    p = model.prefix[kind]
    backward = p.split if schedule == ZERO_BUBBLE else p.backward
    assert backward is not None
    return np.asarray(p.forward * (2 if again else 1) + backward + p.exposed)


def compositions(kinds: int, size: int) -> Ints:
    """Return all ways to take `size` nodes of `kinds` kinds, [n, kinds], by `composition_index`."""
    if kinds == 1:
        return np.array([[size]])
    bars = np.array(list(combinations(range(size + kinds - 1), kinds - 1)), dtype=np.int64)
    first, last = np.full((len(bars), 1), -1), np.full((len(bars), 1), size + kinds - 1)
    return np.asarray(np.diff(np.concatenate((first, bars, last), axis=1), axis=1) - 1)


def composition_index(counts: Ints, size: int) -> Ints:
    """Return the row of each of `counts` in `compositions`, by its rank among combinations."""
    kinds = counts.shape[1]
    total, chosen = size + kinds - 1, kinds - 1
    bars = np.cumsum(counts[:, :-1] + 1, axis=1) - 1
    index = np.zeros(len(counts), dtype=np.int64)
    previous = np.full(len(counts), -1)
    for i in range(chosen):
        below = [comb(total - 1 - v, chosen - 1 - i) for v in range(total)]
        sums = np.concatenate(([0], np.cumsum(np.array(below, dtype=np.int64))))
        index += sums[bars[:, i]] - sums[previous + 1]
        previous = bars[:, i]
    return index


def price_columns(
    model: CostModel,
    limits: Floats,
    schedule: str,
    levels: int,
    block: int,
    most: float,
    tail: float = inf,
    pipelines: int = MANY_PIPELINES,
    *,
    optimistic: bool = False,
) -> ColumnBlock:
    """Return all groups of up to `levels` blocks of `block` nodes, with their options.

    `tail`: limit on a stage's reduction (in a ring of `pipelines`) and update, seconds.
    `optimistic`: no able group is left out, and none is priced above its least limit.
    """
    stage_reach = _StageReach(model, limits, schedule, most, tail, pipelines, optimistic=optimistic)
    kinds, n_limits = len(model.kinds), len(limits)
    units = np.array([min(kind.units, model.n_layers) for kind in model.kinds])
    zeros = np.zeros((1, n_limits))
    state = _Progress(np.full((1, n_limits), model.n_layers), zeros, zeros, zeros)
    found: list[tuple[Ints, Ints, _Progress]] = []
    choice: list[NDArray[np.int8]] = [np.zeros((1, n_limits), dtype=np.int8)]
    for level in range(1, levels + 1):
        groups = compositions(kinds, level)
        best, chosen = _next_level(stage_reach, state, groups, level, units, block)
        open_ = np.flatnonzero(((best.reach > 0) & np.isfinite(best.fill)).any(axis=0))
        state = best
        choice.append(chosen)
        found.append((groups * block, groups @ units * block, state))
        if optimistic:
            continue
        if not len(open_):
            break
        width = int(open_[-1]) + 1  # fewer nodes already hold the model under wider limits
        state = best.select(np.s_[:, :width])
    return _with_options(found, limits, schedule, most, choice, block)


def _next_level(
    stage_reach: _StageReach, state: _Progress, groups: Ints, level: int, units: Ints, block: int
) -> tuple[_Progress, NDArray[np.int8]]:
    """Return the best progress of groups of `level` blocks, and the kind of their first node."""
    model = stage_reach.model
    shape = (len(groups), state.reach.shape[1])
    none = np.full(shape, np.inf)
    best = _Progress(np.full(shape, model.n_layers), none, none.copy(), none.copy())
    chosen = np.zeros(shape, dtype=np.int8)
    for kind in range(groups.shape[1]):
        rows = np.flatnonzero(groups[:, kind] > 0)
        before = groups[rows] - (np.arange(groups.shape[1]) == kind)
        depth = before @ units * block
        source = composition_index(before, level - 1)
        for behind in np.unique(depth):
            part, at = rows[depth == behind], source[depth == behind]
            top = int(behind + units[kind] * block)
            if top > model.n_layers:
                continue
            here = state.select(at)
            for n in range(block * units[kind]):
                here = stage_reach.extend(kind, int(behind) + n, top, bool(n % units[kind]), here)
            _keep_better(best, chosen, part, here, kind)
    return best, chosen


def _keep_better(
    best: _Progress, chosen: NDArray[np.int8], rows: Ints, state: _Progress, kind: int
) -> None:
    """Replace entries of `best` where `state` reaches further, or as far in less time."""
    here = best.select(rows)
    better = np.isfinite(state.fill) & (
        (state.reach < here.reach)
        | ((state.reach == here.reach) & (state.fill < here.fill))
        | ~np.isfinite(here.fill)
    )
    for values, old, new in zip(best, here, state, strict=True):
        values[rows] = np.where(better, new, old)
    chosen[rows] = np.where(better, kind, chosen[rows])


def _with_options(
    found: list[tuple[Ints, Ints, _Progress]],
    limits: Floats,
    schedule: str,
    most: float,
    choice: list[NDArray[np.int8]],
    block: int,
) -> ColumnBlock:
    """Return the groups with their options: a limit per factor of `LIMIT_FACTORS`."""
    counts, depth = (np.concatenate([part[i] for part in found]) for i in (0, 1))
    shape = (len(counts), found[0][2].reach.shape[1])
    tables = [np.full(shape, missing) for missing in (1.0, inf, inf, inf)]
    row = 0
    for _, _, state in found:
        for table, part in zip(tables, state, strict=True):
            table[row : row + len(part), : part.shape[1]] = part
        row += len(state.reach)
    reach, fill, slowest, tail = tables
    whole = (reach == 0) & np.isfinite(fill)
    first = np.argmax(whole, axis=1)
    options = [
        np.searchsorted(limits, limits[first] * factor * (1 + 1e-9), side="right") - 1
        for factor in LIMIT_FACTORS
    ]
    option = np.stack(options, axis=1)
    rows = np.arange(len(counts))[:, None]
    able = whole[rows, option] & whole.any(axis=1)[:, None]
    fill, slowest, tail = (np.where(able, t[rows, option], inf) for t in (fill, slowest, tail))
    return ColumnBlock(
        counts, depth, fill, slowest, tail, most, schedule, choice, option, limits, block
    )


@lru_cache(maxsize=8)
def stage_times(model: CostModel, schedule: str, deepest: int) -> Floats:
    """Return, ascending, all times of stages that may be the slowest of up to `deepest` stages."""
    found = []
    kinds = range(len(model.kinds))
    least = float(np.min([np.diff(model.compute(q, schedule)) for q in kinds], axis=0).sum())
    for kind in kinds:
        stream = model.prefix[kind].stream
        inside = (model.hops(inside=True, last=False),) if model.kinds[kind].units > 1 else ()
        limited = model.prefix[kind].memory < UNLIMITED_BYTES
        for again in (False, True) if limited else (False,):
            times = _stage_prefix(model, schedule, kind, again)
            seconds = np.maximum(times[None, :] - times[:, None], stream[None, :] - stream[:, None])
            ends = (model.hops(inside=False, last=False), model.hops(inside=False, last=True))
            for hops in (*ends, *inside):
                tau = seconds + hops[None, :]
                found.append(tau[np.triu_indices(model.n_layers + 1, 1)])
    values = np.unique(np.concatenate(found))
    values = values[values >= least / deepest * (1 - 1e-9)]
    # Rounding errors make nearly equal values; keep the last of these.
    return np.asarray(values[np.append(np.diff(values) > 1e-9 * values[:-1], True)])


def _stage_time_limits(
    model: CostModel, schedule: str, deepest: int, near: tuple[float, float]
) -> Floats:
    """Return about `MAX_STAGE_LIMITS` times that stages have, most of them in the range `near`."""
    values = stage_times(model, schedule, deepest)
    inside = (values >= near[0]) & (values <= near[1])
    if inside.all() or not inside.any():
        return _thinned(values, MAX_STAGE_LIMITS)
    kept = _thinned(values[inside], MAX_STAGE_LIMITS)
    far = values[values > near[1]]
    return np.union1d(kept, _thinned(far, MAX_STAGE_LIMITS // FAR_THINNING))


def _thinned(values: Floats, size: int) -> Floats:
    """Return at most `size` of the values, if the widest buckets suffice for that."""
    if len(values) <= size:
        return values
    for width in (*BUCKET_WIDTHS, *(2**i * BUCKET_WIDTHS[-1] for i in range(1, 12))):
        bucket = np.floor(np.log(values) / width)
        last = values[np.append(np.diff(bucket) > 0, True)]
        if len(last) <= size:
            break
    return np.asarray(last)


@dataclass(frozen=True, eq=False)
class ColumnPool:
    """Columns of all schedules and block sizes together."""

    parts: tuple[ColumnBlock, ...]
    counts: Ints
    """[columns, kinds] nodes."""
    tails: tuple[float, ...]
    """Limits on the tail under which solutions are searched, seconds."""
    pipelines: int
    """Assumed number of pipelines in the ring."""

    def values(self, seconds: float, tail: float, nodes: tuple[int, ...]) -> Ints:
        """Return, [columns], the most micro-batches in time; 0 if more than `nodes` are needed."""
        found = np.concatenate([part.microbatches(seconds, tail) for part in self.parts])
        found[(self.counts > np.array(nodes)).any(axis=1)] = 0
        return found

    def find(self, column: int) -> tuple[ColumnBlock, int]:
        """Return (part, row in this part) of a column."""
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
        tolerance: float = 2e-4,
    ) -> float:
        """Return the least seconds in which the linear programme reaches `microbatches`.

        inf: these exceed `most`, or no time suffices. The result is at most the fraction
        `tolerance` too large.
        """

        def able(seconds: float) -> bool:
            value = self.values(seconds, tail, relaxation.nodes)
            enough = microbatches * (1 - 1e-9)
            return bool(value.any()) and relaxation.maximise(value).bound >= enough

        if most < inf and not able(most):
            return inf
        low, high = 0.0, most
        if most == inf:
            high = 1e-9
            while not able(high):
                low, high = high, high * 4
                if high > 1e15:
                    return inf
        while high - low > tolerance * high:
            middle = (low * high) ** 0.5 if low else high / 4
            low, high = (low, middle) if able(middle) else (middle, high)
        return high


def column_pool(
    model: CostModel,
    schedules: tuple[str, ...],
    deepest: int,
    most: float,
    tail: float = inf,
    near: tuple[float, float] = (0.0, inf),
    pipelines: int = MANY_PIPELINES,
) -> ColumnPool | None:
    """Return the priced groups of up to `deepest` nodes; None if none can hold the model.

    Args:
        most: micro-batches per pipeline that memory is assumed to hold.
        tail: limit on a stage's tail in a ring of `pipelines`, seconds; rounded.
        near: range of interest of the slowest stage, seconds; rounded.
    """
    low = ROUNDING ** floor(log(near[0], ROUNDING)) if near[0] > 0 else 0.0
    high = ROUNDING ** ceil(log(near[1], ROUNDING)) if near[1] < inf else inf
    tail = ROUNDING ** floor(log(tail, ROUNDING)) if 0 < tail < inf else tail
    return cached_pool(model, schedules, deepest, most, tail, (low, high), pipelines)


@lru_cache(maxsize=48)
def cached_pool(
    model: CostModel,
    schedules: tuple[str, ...],
    deepest: int,
    most: float,
    tail: float,
    near: tuple[float, float],
    pipelines: int,
) -> ColumnPool | None:
    """Return `column_pool`, for arguments that are rounded already."""
    parts = []
    for schedule in schedules:
        limits = _stage_time_limits(model, schedule, deepest, near)
        parts += [
            price_columns(model, limits, schedule, levels, block, most, tail, pipelines)
            for levels, block in _block_sizes(len(model.kinds), deepest)
        ]
    if not any(np.isfinite(part.fill).any() for part in parts):
        return None
    tails = np.concatenate([part.tail[np.isfinite(part.tail)] for part in parts])
    limits_on_tail = _spread(tails, model) if tail == inf else (tail,)
    counts = np.concatenate([part.counts for part in parts])
    return ColumnPool(tuple(parts), counts, limits_on_tail, pipelines)


def _block_sizes(kinds: int, deepest: int) -> Iterator[tuple[int, int]]:
    """Yield (levels, nodes per block): small groups node by node, deeper ones in growing blocks."""
    block, reached = 1, 0
    for number, levels in enumerate(MAX_LEVELS.get(kinds, (8, 8, 8))):
        if reached >= deepest:
            break
        block = max(block, ceil(deepest / levels)) if number == 2 else block
        levels = min(levels, ceil(deepest / block))
        yield levels, block
        reached = levels * block
        block *= 2


def _spread(tails: Floats, model: CostModel) -> tuple[float, ...]:
    """Return some of the tails, evenly spaced on a logarithmic scale; (inf,) without tails."""
    if model.has_no_tail:
        return (inf,)
    values = np.unique(tails)
    steps = np.geomspace(max(values[0], 1e-12), max(values[-1], 1e-12), MAX_TAIL_LIMITS)
    chosen = np.minimum(np.searchsorted(values, steps), len(values) - 1)
    return tuple(np.unique(values[chosen]).tolist())
