"""Models of the planners of Varuna and Oobleck, to compare plans under one cost model.

**Varuna** (Athlur et al., EuroSys 2022), `plan_varuna`. All pipelines have one depth P, and there
are D = floor(N / P) of them. Stages have equal numbers of blocks, and all pipelines the same number
of micro-batches (as nearly as they divide). Varuna finds P by simulation; this model uses our cost
model. The paper always recomputes activations; this model may also keep them.

**Oobleck** (Jang et al., SOSP 2023), `plan_oobleck`. Nodes are equal. A template for n nodes is a
pipeline of n stages (one device per node). Its cuts minimise T1 + T2 + T3: T1 = sum of the stages'
times w, T2 = (4 S - S + k - 1) w_k with k the slowest of S stages, T3 = sum from stage k on.
Templates exist from n0 nodes, the fewest with enough memory. At least f + 1 pipelines are made from
templates, such that they use all nodes. Each gets as many micro-batches as balance the pipelines.

This model differs from the paper: it finds the best cuts exactly (the paper's program keeps one
best per sub-problem and can miss them). For every number of pipelines, it considers the multiset of
templates with the greatest total rate, and chooses the fastest of these under our cost model. It
recomputes activations wherever that makes a template feasible or faster. If f + 1 = 2 pipelines do
not fit, it uses a single pipeline.

Both models use the 1F1B schedule, and choose by our cost model, which the original planners do not
have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.profile import Profile

MIN_PIPELINES = 2
"""Oobleck's f + 1: the fewest pipelines with which f = 1 loss leaves a replica."""
MAX_PRICED = 4
"""Number of candidates, the best by the closed form, that the full cost model compares."""


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """Stages of a pipeline whose nodes are not yet chosen."""

    cuts: tuple[int, ...]
    recompute: bool
    seconds: float
    """Time of 4 S micro-batches through S stages; in Oobleck's planner T1 + T2 + T3."""

    @property
    def depth(self) -> int:
        return len(self.cuts) - 1

    @property
    def rate(self) -> float:
        """Micro-batches per second."""
        return 4 * self.depth / self.seconds


class EqualNodes:
    """A cluster of equal nodes with one unit each. Its lists are prefix sums over layers."""

    def __init__(self, profile: Profile, microbatches: int, memory_bytes: float) -> None:
        self.profile, self.microbatches = profile, microbatches
        self.memory_bytes = memory_bytes
        """Memory of one worker."""
        times, layers, tp = profile.devices[0].layers, profile.layers, profile.tp
        keeping = (t.forward_s + t.backward_s for t in times)
        recomputing = (t.forward_s * 2 + t.backward_s for t in times)
        self.time = {False: _prefix_sums(keeping), True: _prefix_sums(recomputing)}
        """Forward and backward seconds of a micro-batch, by whether activations are recomputed."""
        held = (-(-la.held_bytes // tp) for la in layers)
        self.fixed = _prefix_sums(held)
        """Bytes of parameters, optimizer state and gradients."""
        self.activation = _prefix_sums(la.activation_bytes for la in layers)
        """Bytes of activations per micro-batch."""
        self.widest = max((la.output_bytes for la in layers[:-1]), default=0)
        """Bytes of the largest output of a layer."""

    @property
    def n_layers(self) -> int:
        return len(self.fixed) - 1

    def needs(self, first: int, last: int, ahead: int, recompute: bool) -> float:
        """Return the bytes of layers [first, last) with `ahead` micro-batches in flight."""
        activation = self.activation[last] - self.activation[first]
        kept = ahead * self.widest + activation if recompute else ahead * activation
        return self.fixed[last] - self.fixed[first] + kept

    def most_ahead(self, first: int, last: int, recompute: bool) -> int:
        """Return the most micro-batches that layers [first, last) can hold in flight."""
        none, one = (self.needs(first, last, ahead, recompute) for ahead in (0, 1))
        if one <= none:
            return self.microbatches
        return min(self.microbatches, max(0, int((self.memory_bytes - none) / (one - none))))

    def tail(self, first: int, last: int, per_byte: float) -> float:
        """Return the seconds to reduce the gradients of a stage and to update it.

        `per_byte`: seconds to reduce one byte."""
        layers, times = self.profile.layers[first:last], self.profile.devices[0].layers[first:last]
        sent = sum(layer.gradient_bytes for layer in layers) / self.profile.tp
        return per_byte * sent + sum(t.update_s for t in times)

    def fits(self, cuts: Sequence[int], microbatches: int, recompute: bool) -> bool:
        depth = len(cuts) - 1
        return all(
            self.needs(a, b, min(depth - s, microbatches), recompute) <= self.memory_bytes
            for s, (a, b) in enumerate(pairwise(cuts))
        )


def _prefix_sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0))


def plan_oobleck(cluster: EqualNodes, nodes: Sequence[NodeInfo]) -> list[Plan]:
    """Return plans from Oobleck's templates; Oobleck's choice is the fastest by the cost model."""
    return _candidates(cluster, nodes, _template_sets(cluster, len(nodes)))


def plan_varuna(cluster: EqualNodes, nodes: Sequence[NodeInfo]) -> list[Plan]:
    """Return grids of equal pipelines; Varuna's (P, D) is the fastest by the cost model."""
    return _candidates(cluster, nodes, _grids(cluster, len(nodes)))


def plan_grid(cluster: EqualNodes, nodes: Sequence[NodeInfo], depth: int) -> list[Plan]:
    """Return one plan with as many pipelines of this depth as fit, or [] if none fits.

    Activations are recomputed only if memory requires it.
    """
    shapes = sorted(_grids(cluster, len(nodes), depth), key=lambda made: made[0].seconds)
    return _candidates(cluster, nodes, shapes[:1])


def _candidates(
    cluster: EqualNodes, nodes: Sequence[NodeInfo], shapes: Iterable[list[PipelineTemplate]]
) -> list[Plan]:
    """Return the plans of the `MAX_PRICED` best candidates by the closed form, best first."""
    options = [(shape, _split_microbatches(cluster, shape)) for shape in shapes]
    options.sort(key=lambda option: _closed_form_s(cluster, *option))
    return [_plan(cluster, nodes, *option) for option in options[:MAX_PRICED]]


def _closed_form_s(
    cluster: EqualNodes, shape: Sequence[PipelineTemplate], counts: Sequence[int]
) -> float:
    """Return the step time: sum + (m - 1) * max of the stages' times, then reduction and update."""
    k, link = len(shape), cluster.profile.link
    per_byte = 2 * (k - 1) / k / link.bytes_per_s if link.bytes_per_s > 0 else 0.0
    ends, tails = [], []
    for made, count in set(zip(shape, counts, strict=True)):
        times = _times(cluster, made.cuts, made.recompute)
        ends.append(sum(times) + (count - 1) * max(times))
        tails += [cluster.tail(a, b, per_byte) for a, b in pairwise(made.cuts)]
    return max(ends) + max(tails)


def _grids(cluster: EqualNodes, nodes: int, only: int = 0) -> Iterator[list[PipelineTemplate]]:
    """Yield D equal pipelines of depth P for every P, or only for depth `only` if above 0.

    The embedding is in the first stage, and the head in the last one.
    """
    blocks = cluster.n_layers - 2
    for depth in range(only or 1, min(nodes, blocks, only or blocks) + 1):
        inner = [1 + round(i * blocks / depth) for i in range(1, depth)]
        cuts = (0, *inner, cluster.n_layers)
        pipelines = min(nodes // depth, cluster.microbatches)
        share = -(-cluster.microbatches // pipelines)
        for recompute in (True, False):
            if cluster.fits(cuts, share, recompute):
                slowest = max(_times(cluster, cuts, recompute))
                yield [PipelineTemplate(cuts, recompute, 4 * depth * slowest)] * pipelines


def _template_sets(cluster: EqualNodes, nodes: int) -> Iterator[list[PipelineTemplate]]:
    """Yield for each number of pipelines the multiset of templates with the greatest total rate.

    A multiset uses all nodes, or as many as templates can.
    """
    most = min(nodes, cluster.microbatches)
    table = _rate_table(cluster, nodes)
    counts = list(range(min(MIN_PIPELINES, most), most + 1))
    if nodes < MIN_PIPELINES or not any(rate > 0 for rate, _ in table[MIN_PIPELINES]):
        counts.append(1)
    for pipelines in counts:
        used = next((n for n in range(nodes, 0, -1) if table[pipelines][n][0] > 0), 0)
        if used:
            yield _multiset(cluster, table, pipelines, used)


RateTable = list[list[tuple[float, int]]]
"""[pipelines][nodes]: (greatest total rate, nodes of the last template); rate 0: impossible."""


@lru_cache(maxsize=256)
def _rate_table(cluster: EqualNodes, nodes: int) -> RateTable:
    rates = {
        n: t.rate
        for n in range(1, min(nodes, cluster.n_layers) + 1)
        if (t := best_template(cluster, n))
    }
    table: RateTable = [[(0.0, 0)] * (nodes + 1)]
    for pipelines in range(1, min(nodes, cluster.microbatches) + 1):
        before, row = table[-1], []
        for n in range(nodes + 1):
            options = (
                (before[n - size][0] + rate, size)
                for size, rate in rates.items()
                if size <= n and (before[n - size][0] > 0 or (pipelines == 1 and size == n))
            )
            row.append(max(options, default=(0.0, 0)))
        table.append(row)
    return table


def _multiset(
    cluster: EqualNodes, table: RateTable, pipelines: int, nodes: int
) -> list[PipelineTemplate]:
    """Return the templates of one table entry, the deepest first."""
    found = []
    for left in range(pipelines, 0, -1):
        size = table[left][nodes][1]
        made = best_template(cluster, size)
        assert made is not None
        found.append(made)
        nodes -= size
    return sorted(found, key=lambda t: -t.depth)


@lru_cache(maxsize=4096)
def best_template(cluster: EqualNodes, depth: int) -> PipelineTemplate | None:
    """Return the template of `depth` stages with the least T1 + T2 + T3, or None if none fits."""
    found = [made for recompute in (False, True) if (made := _cut(cluster, depth, recompute))]
    return min(found, key=lambda t: t.seconds, default=None)


def _cut(cluster: EqualNodes, depth: int, recompute: bool) -> PipelineTemplate | None:
    """Return the template with the least T1 + T2 + T3, or None if none fits.

    Tries limits on the slowest stage's time, from small to large. All other stages may take any
    time up to the limit. T3 is the smaller, the later the slowest stage begins.
    """
    time, n = cluster.time[recompute], cluster.n_layers
    spans: dict[float, list[tuple[int, int]]] = {}
    for a in range(n):
        for b in range(a + 1, n + 1):
            spans.setdefault(round(time[b] - time[a], 12), []).append((a, b))
    best, best_s = None, inf
    for limit in sorted(spans):
        if time[-1] + (3 * depth + 1) * limit >= best_s:
            break
        ends = _ends(cluster, depth, recompute, limit)
        begins = _begins(cluster, depth, recompute, limit)
        for k in range(depth):
            for a, b in reversed(spans[limit]):
                total = time[-1] + (3 * depth + k) * limit + time[-1] - time[a]
                if total >= best_s:
                    break
                left, right = k <= a <= ends[k], begins[k + 1] <= b <= n - (depth - 1 - k)
                ahead = min(depth - k, cluster.microbatches)
                if left and right and cluster.needs(a, b, ahead, recompute) <= cluster.memory_bytes:
                    cuts = _cuts_around(ends, begins, k, a, b)
                    best, best_s = PipelineTemplate(cuts, recompute, total), total
                    break
    return best


def _ends(cluster: EqualNodes, depth: int, recompute: bool, limit: float) -> list[int]:
    """Return [s]: the most layers that the first s stages can hold; -1: impossible."""
    found, time = [0], cluster.time[recompute]
    for s in range(depth):
        first, ahead = found[-1], min(depth - s, cluster.microbatches)
        last = bisect_right(time, time[first] + limit + 1e-12) - 1 if first >= 0 else -1
        while last > first and cluster.needs(first, last, ahead, recompute) > cluster.memory_bytes:
            last -= 1
        found.append(last if last > s else -1)
    return found


def _begins(cluster: EqualNodes, depth: int, recompute: bool, limit: float) -> list[int]:
    """Return [s]: the first layer from which stage s and all later stages can hold the rest.

    A value above the number of layers: impossible.
    """
    n, time = cluster.n_layers, cluster.time[recompute]
    found = [n]
    for s in range(depth - 1, -1, -1):
        last, ahead = found[-1], min(depth - s, cluster.microbatches)
        first = last
        while (
            0 < first <= n
            and time[last] - time[first - 1] <= limit + 1e-12
            and cluster.needs(first - 1, last, ahead, recompute) <= cluster.memory_bytes
        ):
            first -= 1
        found.append(first if first <= n - (depth - s) else n + 1)
    return found[::-1]


def _cuts_around(ends: list[int], begins: list[int], k: int, a: int, b: int) -> tuple[int, ...]:
    """Return cuts with stage k at layers [a, b) and all other stages as long as possible."""
    before = [min(ends[s], a - (k - s)) for s in range(k + 1)]
    depth = len(begins) - 1
    after = [max(begins[s], b + (s - k - 1)) for s in range(k + 1, depth + 1)]
    return (*before, *after)


def _times(cluster: EqualNodes, cuts: Sequence[int], recompute: bool) -> list[float]:
    """Return the seconds per micro-batch of each stage, with messages to and from the next one."""
    time, layers, link = cluster.time[recompute], cluster.profile.layers, cluster.profile.link
    return [
        time[b] - time[a] + (2 * link.seconds(layers[b - 1].output_bytes) if b < cuts[-1] else 0.0)
        for a, b in pairwise(cuts)
    ]


def _plan(
    cluster: EqualNodes,
    nodes: Sequence[NodeInfo],
    shape: Sequence[PipelineTemplate],
    counts: Sequence[int],
) -> Plan:
    """Return the plan that assigns nodes to templates in order."""
    names, index, pipelines = iter(info.node for info in nodes), 0, []
    for made, count in zip(shape, counts, strict=True):
        stages = tuple(
            Stage(Unit(next(names)), a, b, made.recompute) for a, b in pairwise(made.cuts)
        )
        pipelines.append(Pipeline(stages, tuple(range(index, index + count))))
        index += count
    return Plan(
        epoch=1,
        n_layers=cluster.n_layers,
        n_microbatches=cluster.microbatches,
        tp=cluster.profile.tp,
        pipelines=tuple(pipelines),
        spares=tuple(names),
        gradients="none",
        state="none",
    )


def _split_microbatches(cluster: EqualNodes, shape: Sequence[PipelineTemplate]) -> list[int]:
    """Return the number of micro-batches of each pipeline.

    Each pipeline gets one micro-batch. Each further micro-batch goes to the pipeline that would
    finish it first.
    """
    times = {made: _times(cluster, made.cuts, made.recompute) for made in set(shape)}
    counts = [1] * len(shape)
    heap = [(sum(times[made]) + max(times[made]), i) for i, made in enumerate(shape)]
    heapify(heap)
    for _ in range(cluster.microbatches - len(shape)):
        end, i = heap[0]
        counts[i] += 1
        heapreplace(heap, (end + max(times[shape[i]]), i))
    return counts
