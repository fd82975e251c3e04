"""Models of two rivals' planners, written from their papers, to compare plans under one cost model.

**Oobleck** (Jang et al., SOSP 2023). Nodes are equal. A template for n nodes is a pipeline of n stages (one device a
node) cut so that T1 + T2 + T3 is least: T1 = sum of the stages' times w, T2 = (4 S - S + k - 1) w_k with k the
slowest of S stages, T3 = sum from stage k on. Templates exist from n0 nodes, the fewest whose memory suffices.
Pipelines are made of templates so that all nodes are used and there are at least f + 1 of them; micro-batches even
the pipelines out. Here: the best cuts by T1 + T2 + T3 are found exactly (their programme keeps one best per
sub-problem and can miss them); of all multisets of templates, for every number of pipelines the one of greatest
total rate; among those the fastest under OUR cost model; recomputation wherever it makes a template feasible or
faster; where f + 1 = 2 pipelines do not fit, one.

**Varuna** (Athlur et al., EuroSys 2022). One depth P for all pipelines, D = floor(N / P) of them, stages of equal
numbers of blocks, the same micro-batches for each (as nearly as they divide), P by simulation: here, by OUR cost
model. The paper always recomputes activations; here it may also do without.

Both plan 1F1B. Where they have a choice it is made for them by our cost model, which they do not have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf

from elastic.domain.types import NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.profile import Profile

Seconds = Callable[[Plan], float]
"""Seconds of a step of a plan, under the cost model that all are compared with."""
REPLICAS = 2
"""Oobleck's f + 1."""
PRICED = 4
"""Shapes that are priced in full."""


@dataclass(frozen=True, slots=True)
class Template:
    """A pipeline before nodes are known."""

    cuts: tuple[int, ...]
    recompute: bool
    seconds: float
    """T1 + T2 + T3, for 4 S micro-batches."""

    @property
    def depth(self) -> int:
        return len(self.cuts) - 1

    @property
    def rate(self) -> float:
        """Micro-batches a second."""
        return 4 * self.depth / self.seconds


@dataclass(frozen=True, eq=False)
class Equal:
    """Equal nodes with one unit each; prefix sums over layers, with and without recomputation."""

    profile: Profile
    microbatches: int
    memory_bytes: float
    """Of a worker."""
    time: dict[bool, list[float]] = field(init=False)
    fixed: list[float] = field(init=False)
    activation: list[float] = field(init=False)
    widest: float = field(init=False)

    def __post_init__(self) -> None:
        times, layers, tp = self.profile.devices[0].layers, self.profile.layers, self.profile.tp
        sums = {
            again: list(
                accumulate((t.forward_s * (2 if again else 1) + t.backward_s for t in times), initial=0.0)
            )
            for again in (False, True)
        }
        held = [-(-(la.param_bytes + la.state_bytes + la.gradient_bytes) // tp) for la in layers]
        object.__setattr__(self, "time", sums)
        object.__setattr__(self, "fixed", list(accumulate(held, initial=0)))
        object.__setattr__(
            self, "activation", list(accumulate((la.activation_bytes for la in layers), initial=0))
        )
        object.__setattr__(self, "widest", max((la.output_bytes for la in layers[:-1]), default=0))

    @property
    def n_layers(self) -> int:
        return len(self.fixed) - 1

    def needs(self, first: int, last: int, ahead: int, recompute: bool) -> float:
        """Bytes of a stage with `ahead` micro-batches in flight."""
        activation = self.activation[last] - self.activation[first]
        kept = ahead * self.widest + activation if recompute else ahead * activation
        return self.fixed[last] - self.fixed[first] + kept

    def tail(self, first: int, last: int, per_byte: float) -> float:
        """Seconds to reduce and update a stage."""
        layers, times = self.profile.layers[first:last], self.profile.devices[0].layers[first:last]
        sent = sum(layer.gradient_bytes for layer in layers) / self.profile.tp
        return per_byte * sent + sum(t.update_s for t in times)

    def fits(self, cuts: Sequence[int], microbatches: int, recompute: bool) -> bool:
        depth = len(cuts) - 1
        return all(
            self.needs(a, b, min(depth - s, microbatches), recompute) <= self.memory_bytes
            for s, (a, b) in enumerate(pairwise(cuts))
        )


def oobleck(cluster: Equal, nodes: Sequence[NodeInfo], seconds: Seconds) -> Plan | None:
    """The best plan that Oobleck's templates allow, or None."""
    return _best(cluster, nodes, seconds, _instantiations(cluster, len(nodes)))


def varuna(cluster: Equal, nodes: Sequence[NodeInfo], seconds: Seconds) -> Plan | None:
    """The best plan of Varuna's (P, D), or None."""
    return _best(cluster, nodes, seconds, _grids(cluster, len(nodes)))


def grid(cluster: Equal, nodes: Sequence[NodeInfo], depth: int) -> Plan | None:
    """As many equal pipelines of this depth as fit, with recomputation only where memory asks for it; or None."""
    found = list(_grids(cluster, len(nodes), depth))
    if not found:
        return None
    shape = min(found, key=lambda made: made[0].seconds)
    return _plan(cluster, nodes, shape, _deal(cluster, shape))


def _best(
    cluster: Equal, nodes: Sequence[NodeInfo], seconds: Seconds, shapes: Iterable[list[Template]]
) -> Plan | None:
    """The shapes that are best by the closed form are priced in full, and the fastest of them is the plan."""
    dealt = [(shape, _deal(cluster, shape)) for shape in shapes]
    dealt.sort(key=lambda item: _closed_form(cluster, *item))
    return min((_plan(cluster, nodes, *item) for item in dealt[:PRICED]), key=seconds, default=None)


def _closed_form(cluster: Equal, shape: Sequence[Template], counts: Sequence[int]) -> float:
    """The cost model's step: sum + (m - 1) * max of the stages' times, reduction, update."""
    k, link = len(shape), cluster.profile.link
    per_byte = 2 * (k - 1) / k / link.bytes_per_s if link.bytes_per_s > 0 else 0.0
    ends, tails = [], []
    for made, count in set(zip(shape, counts, strict=True)):
        times = _times(cluster, made.cuts, made.recompute)
        ends.append(sum(times) + (count - 1) * max(times))
        tails += [cluster.tail(a, b, per_byte) for a, b in pairwise(made.cuts)]
    return max(ends) + max(tails)


def _grids(cluster: Equal, nodes: int, only: int = 0) -> Iterator[list[Template]]:
    """D equal pipelines of depth P, for every P (or one); embedding and head stay with the blocks beside them."""
    blocks = cluster.n_layers - 2
    for depth in range(only or 1, min(nodes, blocks, only or blocks) + 1):
        inner = [1 + round(i * blocks / depth) for i in range(1, depth)]
        cuts = (0, *inner, cluster.n_layers)
        pipelines = min(nodes // depth, cluster.microbatches)
        share = -(-cluster.microbatches // pipelines)
        for recompute in (True, False):
            if cluster.fits(cuts, share, recompute):
                slowest = max(_times(cluster, cuts, recompute))
                yield [Template(cuts, recompute, 4 * depth * slowest)] * pipelines


def _instantiations(cluster: Equal, nodes: int) -> Iterator[list[Template]]:
    """For each number of pipelines the multiset of templates that uses all nodes (or as many as templates can)
    and has the greatest total rate."""
    most = min(nodes, cluster.microbatches)
    table = _table(cluster, nodes)
    for pipelines in range(min(REPLICAS, most), most + 1):
        used = next((n for n in range(nodes, 0, -1) if table[pipelines][n][0] > 0), 0)
        if used:
            yield _multiset(cluster, table, pipelines, used)
    if nodes < REPLICAS or not any(rate > 0 for rate, _ in table[REPLICAS]):
        used = next((n for n in range(nodes, 0, -1) if table[1][n][0] > 0), 0)
        if used:
            yield _multiset(cluster, table, 1, used)


Table = list[list[tuple[float, int]]]


@lru_cache(maxsize=256)
def _table(cluster: Equal, nodes: int) -> Table:
    """[pipelines][nodes]: (greatest total rate, nodes of one template in it); rate 0: impossible."""
    rates = {n: t.rate for n in range(1, min(nodes, cluster.n_layers) + 1) if (t := template(cluster, n))}
    table: Table = [[(0.0, 0)] * (nodes + 1)]
    for pipelines in range(1, min(nodes, cluster.microbatches) + 1):
        row = []
        for n in range(nodes + 1):
            before = table[-1]
            options = [
                (before[n - size][0] + rate, size)
                for size, rate in rates.items()
                if size <= n and (before[n - size][0] > 0 or (pipelines == 1 and size == n))
            ]
            row.append(max(options, default=(0.0, 0)))
        table.append(row)
    return table


def _multiset(cluster: Equal, table: Table, pipelines: int, nodes: int) -> list[Template]:
    found = []
    for left in range(pipelines, 0, -1):
        size = table[left][nodes][1]
        made = template(cluster, size)
        assert made is not None
        found.append(made)
        nodes -= size
    return sorted(found, key=lambda t: -t.depth)


@lru_cache(maxsize=4096)
def template(cluster: Equal, depth: int) -> Template | None:
    """The cuts into `depth` stages with the least T1 + T2 + T3 that fit in memory."""
    found = [made for recompute in (False, True) if (made := _cut(cluster, depth, recompute))]
    return min(found, key=lambda t: t.seconds, default=None)


def _cut(cluster: Equal, depth: int, recompute: bool) -> Template | None:
    """Try limits on the slowest stage from small to large; with limit w every stage but the slowest one may be
    anything up to w, and the later the slowest one begins the less T3 is."""
    time, n = cluster.time[recompute], cluster.n_layers
    spans: dict[float, list[tuple[int, int]]] = {}
    for a in range(n):
        for b in range(a + 1, n + 1):
            spans.setdefault(round(time[b] - time[a], 12), []).append((a, b))
    best, best_s = None, inf
    for limit in sorted(spans):
        if time[-1] + (3 * depth + 1) * limit >= best_s:
            break
        ends, begins = _ends(cluster, depth, recompute, limit), _begins(cluster, depth, recompute, limit)
        for k in range(depth):
            for a, b in reversed(spans[limit]):
                total = time[-1] + (3 * depth + k) * limit + time[-1] - time[a]
                if total >= best_s:
                    break
                left, right = k <= a <= ends[k], begins[k + 1] <= b <= n - (depth - 1 - k)
                ahead = min(depth - k, cluster.microbatches)
                if left and right and cluster.needs(a, b, ahead, recompute) <= cluster.memory_bytes:
                    cuts = _join(ends, begins, k, a, b)
                    best, best_s = Template(cuts, recompute, total), total
                    break
    return best


def _ends(cluster: Equal, depth: int, recompute: bool, limit: float) -> list[int]:
    """[s]: the furthest layer that the first s stages can reach; -1 where they cannot be."""
    found, n = [0], cluster.n_layers
    for s in range(depth):
        far, ahead = found[-1], min(depth - s, cluster.microbatches)
        end = _reach(cluster, far, ahead, recompute, limit) if far >= 0 else -1
        found.append(end if end > s else -1)
        assert end <= n
    return found


def _reach(cluster: Equal, first: int, ahead: int, recompute: bool, limit: float) -> int:
    time = cluster.time[recompute]
    last = bisect_right(time, time[first] + limit + 1e-12) - 1
    while last > first and cluster.needs(first, last, ahead, recompute) > cluster.memory_bytes:
        last -= 1
    return last


def _begins(cluster: Equal, depth: int, recompute: bool, limit: float) -> list[int]:
    """[s]: the first layer that stages s, s+1, ... can begin at and still cover the rest; beyond all if they cannot."""
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


def _join(ends: list[int], begins: list[int], k: int, a: int, b: int) -> tuple[int, ...]:
    """Cuts with stage k at [a, b): the stages before it as long as they can be, those after it too."""
    before = [min(ends[s], a - (k - s)) for s in range(k + 1)]
    depth = len(begins) - 1
    after = [max(begins[s], b + (s - k - 1)) for s in range(k + 1, depth + 1)]
    return (*before, *after)


def _times(cluster: Equal, cuts: Sequence[int], recompute: bool) -> list[float]:
    """Seconds of each stage for one micro-batch, with the hop behind it."""
    time, layers, link = cluster.time[recompute], cluster.profile.layers, cluster.profile.link
    return [
        time[b] - time[a] + (2 * link.seconds(layers[b - 1].output_bytes) if b < cuts[-1] else 0.0)
        for a, b in pairwise(cuts)
    ]


def _plan(
    cluster: Equal, nodes: Sequence[NodeInfo], shape: Sequence[Template], counts: Sequence[int]
) -> Plan:
    """Put templates on nodes in order."""
    names, index, pipelines = iter(info.node for info in nodes), 0, []
    for made, count in zip(shape, counts, strict=True):
        stages = tuple(Stage(Unit(next(names)), a, b, made.recompute) for a, b in pairwise(made.cuts))
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


def _deal(cluster: Equal, shape: Sequence[Template]) -> list[int]:
    """Micro-batches of each pipeline: one each, then each further one to the pipeline that would end first with it."""
    times = {made: _times(cluster, made.cuts, made.recompute) for made in set(shape)}
    counts = [1] * len(shape)
    heap = [(sum(times[made]) + max(times[made]), i) for i, made in enumerate(shape)]
    heapify(heap)
    for _ in range(cluster.microbatches - len(shape)):
        end, i = heap[0]
        counts[i] += 1
        heapreplace(heap, (end + max(times[shape[i]]), i))
    return counts
