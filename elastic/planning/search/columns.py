"""Every pipeline that a large cluster could be made of, priced at once.

A *group* is a number of nodes of each kind. Going from the last stage to the first, `reach[group, t]` is the
first layer that the group's stages can come down to when no stage takes longer than `limits[t]`. Coming
further is never worse, so the best reach of a group follows from the best reaches of the groups with one node
less; the group can carry the whole model under a limit when it reaches layer 0. All groups of one size and
all limits are done in a few array operations.

For each group the smallest limit is kept, and some wider ones under which the stages' times add up to less
(fast nodes then take more of the layers): a group is one to four *options* of (fill, slowest, tail).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import ceil, comb, floor, inf, log

import numpy as np
from numpy.typing import NDArray

from elastic.planning.cost.cost_model import UNLIMITED_BYTES, CostModel, Floats, Ints
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.master_problem import Relaxation

LIMIT_FACTORS = (1.0, 1.05, 1.15, 1.4)
"""Limits kept for a group, as factors of its smallest one."""
BUCKET_WIDTHS = (1e-4, 1e-3, 4e-3, 0.01, 0.02, 0.04)
"""Of the limits that differ by less than such a fraction only the largest is kept, if there are too many."""
FAR_THINNING = 6
"""Beyond the range of interest there is one limit to so many inside it."""
MANY_PIPELINES = 1 << 20
"""Pipelines, where their number is not yet known: a ring of many."""


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """Groups (one a row) with their options (one a column)."""

    counts: Ints
    """[groups, kinds] nodes."""
    depth: Ints
    """[groups] stages."""
    fill: Floats
    """[groups, options]; inf: not an option."""
    slowest: Floats
    tail: Floats
    """Seconds of the largest stage's reduction (in a ring of many) and update."""
    most: float
    """Micro-batches that such a pipeline may take, for the memory it was priced with."""
    schedule: str
    choice: list[NDArray[np.int8]]
    """Per level: [groups of it, limits] kind of the first node."""
    option: Ints
    """[groups, options] index of the limit."""
    limits: Floats
    block: int
    """Nodes of one kind that always go together."""

    def microbatches(self, seconds: float, tail: float) -> Ints:
        """[groups] the most micro-batches done within `seconds`, no stage's tail above `tail`."""
        ahead = 0 if self.schedule == ZERO_BUBBLE else 1
        with np.errstate(invalid="ignore"):
            number = np.floor((seconds - self.fill) / self.slowest * (1 + 1e-12) + ahead)
        number[~np.isfinite(number) | (self.tail > tail * (1 + 1e-9)) | (self.fill > seconds)] = 0
        return np.asarray(np.clip(number, 0, self.most).max(axis=1), dtype=np.int64)

    def fastest(self, group: int, microbatches: int, tail: float) -> int:
        """The option under which `microbatches` are done first."""
        ahead = 0 if self.schedule == ZERO_BUBBLE else 1
        able = np.isfinite(self.fill[group]) & (self.tail[group] <= tail * (1 + 1e-9))
        slowest = np.where(able, self.slowest[group], 0.0)
        return int(np.argmin(np.where(able, self.fill[group] + (microbatches - ahead) * slowest, np.inf)))

    def order(self, group: int, option: int) -> tuple[int, ...]:
        """Kinds of the nodes that come to that option, first stage first."""
        limit, counts, kinds = self.option[group, option], self.counts[group] // self.block, []
        while counts.any():
            size = int(counts.sum())
            row = composition_index(counts[None, :], size)[0]
            kind = int(self.choice[size][row, limit])
            kinds += [kind] * self.block
            counts = counts - (np.arange(len(counts)) == kind)
        return tuple(kinds)


_State = tuple[Ints, Floats, Floats, Floats]
"""(reach, sum of fills, slowest stage, largest tail), each [groups, limits]."""


class _StageReach:
    """How far one stage comes down: tables by (kind, stages behind)."""

    def __init__(
        self,
        model: CostModel,
        limits: Floats,
        schedule: str,
        most: float,
        tail: float = np.inf,
        pipelines: int = MANY_PIPELINES,
        *,
        optimistic: bool = False,
    ) -> None:
        """`optimistic`: a stage may end after any later layer than it does; where boundaries differ in bytes, coming
        further is else not always better."""
        self.optimistic = optimistic
        self.model, self.limits, self.schedule, self.most, self.tail = model, limits, schedule, most, tail
        self.tails = [
            model.gradient * model.reduction(pipelines) + model.prefix(q).update
            for q in range(len(model.kinds))
        ]
        self.times = {
            (q, again): self._prefix(q, again) for q in range(len(model.kinds)) for again in (False, True)
        }
        self._slow: dict[tuple[int, bool, bool, bool], Ints] = {}

    def _prefix(self, kind: int, again: bool) -> Floats:
        p = self.model.prefix(kind)
        backward = p.split if self.schedule == ZERO_BUBBLE else p.backward
        assert backward is not None
        return np.asarray(p.forward * (2 if again else 1) + backward + p.exposed)

    def by_time(self, kind: int, again: bool, inside: bool, last: bool) -> Ints:
        """[L + 1, limits] the least first layer of a stage that ends at j, as far as time goes."""
        key = (kind, again, inside, last)
        if key not in self._slow:
            times = self.times[kind, again]
            room = self.limits[None, :] * (1 + 1e-12) - self.model.hops(inside=inside, last=last)[:, None]
            found = np.searchsorted(times, times[:, None] - room, side="left")
            stream = self.model.prefix(kind).stream
            if stream[-1] > 0:
                found = np.maximum(found, np.searchsorted(stream, stream[:, None] - room, side="left"))
            found = np.minimum(found, np.arange(self.model.n_layers + 1)[:, None])
            if self.optimistic:
                found = np.minimum.accumulate(found[::-1], axis=0)[::-1]
            self._slow[key] = found
        return self._slow[key]

    def by_space(self, kind: int, ahead: float, again: bool) -> Ints:
        """[L + 1] the least first layer of a stage that ends at j, as far as memory and the tail go."""
        found = self._by_memory(kind, ahead, again)
        if self.tail < np.inf:
            sums = self.tails[kind]
            least = np.searchsorted(sums, sums - self.tail * (1 + 1e-9), side="left")
            found = np.maximum(found, np.minimum(least, np.arange(len(sums))))
        return found

    def _by_memory(self, kind: int, ahead: float, again: bool) -> Ints:
        model, memory = self.model, self.model.prefix(kind).memory
        if memory >= UNLIMITED_BYTES:
            return np.zeros(model.n_layers + 1, dtype=np.int64)
        sums = model.fixed + (1 if again else ahead) * model.activation
        room = memory - (ahead * model.widest if again else 0)
        found = np.searchsorted(sums, sums - room, side="left") if room > 0 else np.full(len(sums), len(sums))
        return np.minimum(found, np.arange(model.n_layers + 1))

    def extend(
        self,
        kind: int,
        behind: int,
        depth: int,
        inside: bool,
        reach: Ints,
        fill: Floats,
        slowest: Floats,
        tail: Floats,
    ) -> _State:
        """Put a stage of `kind` before stages that came down to `reach`; all [groups, limits]."""
        ahead = min(float(depth if self.schedule == ZERO_BUBBLE else behind + 1), self.most)
        width = reach.shape[1]
        at = np.arange(width)
        new = self.by_time(kind, False, inside, behind == 0)[reach, at]
        space = self.by_space(kind, ahead, False)[reach]
        times = self.times[kind, False]
        if (space <= new).all():
            seconds = times[reach] - times[new]
        else:
            new = np.maximum(space, new)
            seconds = times[reach] - times[new]
            again = np.maximum(
                self.by_space(kind, ahead, True)[reach],
                self.by_time(kind, True, inside, behind == 0)[reach, at],
            )
            further = again < new
            times = self.times[kind, True]
            seconds = np.where(further, times[reach] - times[again], seconds)
            new = np.where(further, again, new)
        p, stream = self.model.prefix(kind), self.model.prefix(kind).stream
        if stream[-1] > 0:
            seconds = np.maximum(seconds, stream[reach] - stream[new])
        hops = self.model.hops(inside=inside, last=behind == 0)
        if hops.any():
            seconds = seconds + np.where(new < reach, hops[reach], 0.0)
        slowest = np.maximum(slowest, seconds)
        if self.schedule == ZERO_BUBBLE:
            assert p.weight is not None
            hidden = 2 * (p.weight[reach] - p.weight[new])
            seconds = np.maximum(seconds - hidden, 0.0) if behind else np.zeros_like(seconds)
        tails = self.tails[kind]
        return new, fill + seconds, slowest, np.maximum(tail, tails[reach] - tails[new])


def compositions(kinds: int, size: int) -> Ints:
    """All ways to take `size` nodes of `kinds` kinds, [n, kinds], in the order of `composition_index`."""
    if kinds == 1:
        return np.array([[size]])
    bars = np.array(list(combinations(range(size + kinds - 1), kinds - 1)), dtype=np.int64)
    edges = np.concatenate(
        (np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), size + kinds - 1)), axis=1
    )
    return np.asarray(np.diff(edges, axis=1) - 1)


def composition_index(counts: Ints, size: int) -> Ints:
    """Row of each of `counts` in `compositions(kinds, size)`: the rank of its bars among combinations."""
    kinds = counts.shape[1]
    total, chosen = size + kinds - 1, kinds - 1
    bars = np.cumsum(counts[:, :-1] + 1, axis=1) - 1
    composition_index = np.zeros(len(counts), dtype=np.int64)
    previous = np.full(len(counts), -1)
    for i in range(chosen):
        below = np.array([comb(total - 1 - v, chosen - 1 - i) for v in range(total)], dtype=np.int64)
        sums = np.concatenate(([0], np.cumsum(below)))
        composition_index += sums[bars[:, i]] - sums[previous + 1]
        previous = bars[:, i]
    return composition_index


def price_columns(
    model: CostModel,
    limits: Floats,
    schedule: str,
    levels: int,
    block: int,
    most: float,
    tail: float = np.inf,
    pipelines: int = MANY_PIPELINES,
    *,
    optimistic: bool = False,
) -> ColumnBlock:
    """Price all groups of up to `levels` blocks of `block` nodes.

    `tail`: limit on a stage's reduction (in a ring of `pipelines`) and update, seconds; `optimistic`: no group that is
    able is left out, and none is priced above its least limit.
    """
    stepper = _StageReach(model, limits, schedule, most, tail, pipelines, optimistic=optimistic)
    kinds, n_limits = len(model.kinds), len(limits)
    units = np.array([min(kind.units, model.n_layers) for kind in model.kinds])
    zeros = np.zeros((1, n_limits))
    state: _State = (np.full((1, n_limits), model.n_layers), zeros, zeros, zeros)
    found: list[tuple[Ints, Ints, _State]] = []
    choice: list[NDArray[np.int8]] = [np.zeros((1, n_limits), dtype=np.int8)]
    for level in range(1, levels + 1):
        groups = compositions(kinds, level)
        width = state[0].shape[1]
        none = np.full((len(groups), width), np.inf)
        best = (np.full((len(groups), width), model.n_layers), none, none.copy(), none.copy())
        chosen = np.zeros((len(groups), width), dtype=np.int8)
        for kind in range(kinds):
            rows = np.flatnonzero(groups[:, kind] > 0)
            before = groups[rows] - (np.arange(kinds) == kind)
            depth = before @ units * block
            source = composition_index(before, level - 1)
            for behind in np.unique(depth):
                part, at = rows[depth == behind], source[depth == behind]
                top = int(behind + units[kind] * block)
                if top > model.n_layers:
                    continue
                here = (state[0][at], state[1][at], state[2][at], state[3][at])
                for n in range(block * units[kind]):
                    inside = bool(n % units[kind])
                    here = stepper.extend(kind, int(behind) + n, top, inside, *here)
                _keep(best, chosen, part, here, kind)
        open_ = np.flatnonzero(((best[0] > 0) & np.isfinite(best[1])).any(axis=0))
        state = best
        choice.append(chosen)
        found.append((groups * block, groups @ units * block, state))
        if optimistic:
            continue
        if not len(open_):
            break
        width = int(open_[-1]) + 1  # wider limits are met by fewer nodes already
        state = (best[0][:, :width], best[1][:, :width], best[2][:, :width], best[3][:, :width])
    return _options(found, limits, schedule, most, choice, block)


def _keep(best: _State, chosen: NDArray[np.int8], rows: Ints, state: _State, kind: int) -> None:
    """Where `state` came further down, or as far in less time, it is the best now."""
    here = tuple(values[rows] for values in best)
    better = np.isfinite(state[1]) & (
        (state[0] < here[0]) | ((state[0] == here[0]) & (state[1] < here[1])) | ~np.isfinite(here[1])
    )
    for values, old, new in zip(best, here, state, strict=True):
        values[rows] = np.where(better, new, old)
    chosen[rows] = np.where(better, kind, chosen[rows])


def _options(
    found: list[tuple[Ints, Ints, _State]], limits: Floats, schedule: str, most: float,
    choice: list[NDArray[np.int8]], block: int,
) -> ColumnBlock:  # fmt: skip
    counts, depth = (np.concatenate([part[i] for part in found]) for i in (0, 1))
    widest = found[0][2][0].shape[1]
    reach, fill, slowest, tail = (np.full((len(counts), widest), missing) for missing in (1.0, *[np.inf] * 3))
    row = 0
    for _, _, state in found:
        for table, part in zip((reach, fill, slowest, tail), state, strict=True):
            table[row : row + len(part), : part.shape[1]] = part
        row += len(state[0])
    whole = (reach == 0) & np.isfinite(fill)
    first = np.argmax(whole, axis=1)
    wanted = np.stack(
        [np.searchsorted(limits, limits[first] * f * (1 + 1e-9), side="right") - 1 for f in LIMIT_FACTORS], axis=1
    )
    rows = np.arange(len(counts))[:, None]
    able = whole[rows, wanted] & whole.any(axis=1)[:, None]
    return ColumnBlock(
        counts, depth,
        np.where(able, fill[rows, wanted], np.inf), np.where(able, slowest[rows, wanted], np.inf),
        np.where(able, tail[rows, wanted], np.inf),
        most, schedule, choice, wanted, limits, block,
    )  # fmt: skip


@lru_cache(maxsize=8)
def stage_times(model: CostModel, schedule: str, deepest: int) -> Floats:
    """All times that a stage can have which may be the slowest of a pipeline of up to `deepest`, ascending."""
    found = []
    least = float(
        np.min([np.diff(model.compute(q, schedule)) for q in range(len(model.kinds))], axis=0).sum()
    )
    for kind in range(len(model.kinds)):
        for again in (False, True) if model.prefix(kind).memory < UNLIMITED_BYTES else (False,):
            times = _StageReach(model, np.zeros(1), schedule, 1).times[kind, again]
            stream = model.prefix(kind).stream
            inside = (model.hops(inside=True, last=False),) if model.kinds[kind].units > 1 else ()
            for hops in (model.hops(inside=False, last=False), model.hops(inside=False, last=True), *inside):
                tau = (
                    np.maximum(times[None, :] - times[:, None], stream[None, :] - stream[:, None])
                    + hops[None, :]
                )
                found.append(tau[np.triu_indices(model.n_layers + 1, 1)])
    values = np.unique(np.concatenate(found))
    values = values[values >= least / deepest * (1 - 1e-9)]
    return np.asarray(values[np.append(np.diff(values) > 1e-9 * values[:-1], True)])  # rounding makes twins


def stage_time_limits(
    model: CostModel, schedule: str, deepest: int, size: int, near: tuple[float, float] = (0.0, np.inf)
) -> Floats:
    """Limits to price groups with: times that stages have, at most about `size` of them.

    `near`: most of them between these.
    """
    values = stage_times(model, schedule, deepest)
    inside = (values >= near[0]) & (values <= near[1])
    if inside.all() or not inside.any():
        return _thinned(values, size)
    far = values[values > near[1]]
    return np.union1d(_thinned(values[inside], size), _thinned(far, size // FAR_THINNING) if len(far) else far)


def _thinned(values: Floats, size: int) -> Floats:
    if len(values) <= size:
        return values
    for width in (*BUCKET_WIDTHS, *(2**i * BUCKET_WIDTHS[-1] for i in range(1, 12))):
        bucket = np.floor(np.log(values) / width)
        last = values[np.append(np.diff(bucket) > 0, True)]
        if len(last) <= size:
            break
    return np.asarray(last)


MAX_LEVELS = {1: (128, 64, 64), 2: (64, 40, 40), 3: (26, 20, 17), 4: (13, 11, 9)}
"""Most blocks of a group, by number of kinds, for growing blocks: a few thousand groups."""
MAX_STAGE_LIMITS = 192
"""Limits on the slowest stage that groups are priced with."""
MAX_TAIL_LIMITS = 20
"""Limits on the tail that are tried."""
ROUNDING = 1.03
"""Limits from earlier solutions are rounded to powers of this, so that nearly equal questions find the same answer."""


@dataclass(frozen=True, eq=False)
class ColumnPool:
    """Columns of all schedules together."""

    parts: tuple[ColumnBlock, ...]
    counts: Ints
    tails: tuple[float, ...]
    pipelines: int
    """In the ring that it was priced for."""

    def values(self, seconds: float, tail: float, nodes: tuple[int, ...]) -> Ints:
        """[columns] the most micro-batches done within `seconds`; 0 where more nodes are needed than there are."""
        found = np.concatenate([part.microbatches(seconds, tail) for part in self.parts])
        found[(self.counts > np.array(nodes)).any(axis=1)] = 0
        return found

    def find(self, column: int) -> tuple[ColumnBlock, int]:
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


def column_pool(
    model: CostModel,
    schedules: tuple[str, ...],
    deepest: int,
    most: float,
    tail: float = inf,
    near: tuple[float, float] = (0.0, inf),
    pipelines: int = MANY_PIPELINES,
) -> ColumnPool | None:
    """Price groups of up to `deepest` nodes; None if none can hold the model.

    `most`: micro-batches of a pipeline that memory is reckoned with; `tail`: limit on a stage's tail, to cut for, with
    `pipelines` in the ring;
    `near`: range of the slowest stage that is of interest. The last two are rounded.
    """
    low = ROUNDING ** floor(log(near[0], ROUNDING)) if near[0] > 0 else 0.0
    high = ROUNDING ** ceil(log(near[1], ROUNDING)) if near[1] < inf else inf
    tail = ROUNDING ** floor(log(tail, ROUNDING)) if 0 < tail < inf else tail
    return cached_pool(model, schedules, deepest, most, tail, low, high, pipelines)


@lru_cache(maxsize=48)
def cached_pool(
    model: CostModel,
    schedules: tuple[str, ...],
    deepest: int,
    most: float,
    tail: float,
    low: float,
    high: float,
    pipelines: int,
) -> ColumnPool | None:
    parts = tuple(
        price_columns(model, stage_time_limits(model, s, deepest, MAX_STAGE_LIMITS, (low, high)), s, levels, block, most, tail, pipelines)
        for s in schedules
        for levels, block in _blocks(len(model.kinds), deepest)
    )
    if not any(np.isfinite(part.fill).any() for part in parts):
        return None
    tails = np.concatenate([part.tail[np.isfinite(part.tail)] for part in parts])
    limits = _spread(tails, model) if tail == inf else (tail,)
    return ColumnPool(parts, np.concatenate([part.counts for part in parts]), limits, pipelines)


def _blocks(kinds: int, deepest: int) -> list[tuple[int, int]]:
    """(levels, nodes a block): shallow groups one by one, deeper ones in coarser and coarser steps."""
    found: list[tuple[int, int]] = []
    block = 1
    for levels in MAX_LEVELS.get(kinds, (8, 8, 8)):
        reached = found[-1][0] * found[-1][1] if found else 0
        if reached >= deepest:
            break
        block = max(block, ceil(deepest / levels)) if len(found) == 2 else block
        found.append((min(levels, ceil(deepest / block)), block))
        block *= 2
    return found


def _spread(tails: Floats, model: CostModel) -> tuple[float, ...]:
    if model.has_no_tail:
        return (inf,)
    values = np.unique(tails)
    steps = np.geomspace(max(values[0], 1e-12), max(values[-1], 1e-12), MAX_TAIL_LIMITS)
    return tuple(np.unique(values[np.minimum(np.searchsorted(values, steps), len(values) - 1)]).tolist())
