"""Exhaustive search for the best plan, from the formulas of docs/design/planner.md.

It shares no code with the planner.
"""

from __future__ import annotations

import itertools
from functools import cache
from math import inf

from elastic.domain.types import Plan
from elastic.planning.cost.profile import Profile

Node = tuple[str, float, int, int]
"""(device name, slow factor, memory bytes or 0, units)."""


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` numbers from 1 up."""
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, total))) for cut in cuts]


class Brute:
    """Least step seconds over all pipelines, orders, cuts, shares and schedules."""

    def __init__(
        self,
        profile: Profile,
        nodes: tuple[Node, ...],
        microbatches: int,
        schedules: tuple[str, ...] = ("1f1b",),
        stream: bool = False,
    ) -> None:
        self.p, self.nodes, self.m, self.schedules, self.stream = (
            profile,
            nodes,
            microbatches,
            schedules,
            stream,
        )
        self.n = len(profile.layers)
        self.pipeline = cache(self._pipeline)
        self.stage = cache(self._stage)

    def _stage(
        self, node: Node, i: int, j: int, ahead: int, last: bool, inside: bool, zero: bool
    ) -> tuple[float, float, float, float] | None:
        """(tau, weight part, gradient bytes, update) of a stage, or None if it does not fit."""
        name, slow, memory, _ = node
        times = self.p.device(name).layers[i:j]
        layers = self.p.layers[i:j]
        fixed = sum(la.param_bytes + la.state_bytes + la.gradient_bytes for la in layers)
        kept = sum(la.activation_bytes for la in layers)
        widest = max((la.output_bytes for la in self.p.layers[:-1]), default=0)
        forward = sum(t.forward_s for t in times) * slow
        backward = sum(t.backward_s for t in times) * slow
        weight = sum(t.backward_weight_s for t in times) * slow
        if zero:
            backward = sum(t.backward_input_s + t.backward_weight_s for t in times) * slow
        compute = forward + backward
        if memory and fixed + ahead * kept > memory:
            if fixed + kept + ahead * widest > memory:
                return None
            compute += forward
        gradient = sum(la.gradient_bytes for la in layers)
        if self.stream and self.p.link.bytes_per_s:
            x = gradient / self.p.link.bytes_per_s
            copying = gradient / self.p.copy_bytes_per_s if self.p.copy_bytes_per_s else 0.0
            compute = max(compute + self.p.contention * x + copying, x)
        link = self.p.inside if inside else self.p.link
        hop = 0.0
        if not last:
            hop = 2 * (
                link.latency_s
                + (layers[-1].output_bytes / link.bytes_per_s if link.bytes_per_s else 0)
            )
        return compute + hop, weight, gradient, sum(t.update_s for t in times) * slow

    def _pipeline(
        self, kinds: tuple[Node, ...], m: int
    ) -> list[tuple[float, tuple[tuple[float, float], ...]]]:
        """Pareto set of (seconds, ((gradient bytes, update) of each stage)); `kinds` sorted."""
        found: set[tuple[float, tuple[tuple[float, float], ...]]] = set()
        for order in sorted(set(itertools.permutations(kinds))):
            for used in itertools.product(*(range(1, node[3] + 1) for node in order)):
                depth = sum(used)
                if depth > self.n:
                    continue
                owners = [
                    (node, r < n - 1) for node, n in zip(order, used, strict=True) for r in range(n)
                ]
                for lengths in compositions(self.n, depth):
                    for schedule in self.schedules:
                        option = self._time(owners, lengths, m, schedule == "zero-bubble")
                        if option is not None:
                            found.add(option)
        if all(not g and not u for _, tails in found for g, u in tails) or self._tailless():
            best = min((f[0] for f in found), default=inf)
            return [(best, ())] if best < inf else []
        return self._pareto(found)

    def _tailless(self) -> bool:
        return not self.p.link.bytes_per_s and not any(
            t.update_s for d in self.p.devices for t in d.layers
        )

    @staticmethod
    def _pareto(
        found: set[tuple[float, tuple[tuple[float, float], ...]]],
    ) -> list[tuple[float, tuple[tuple[float, float], ...]]]:
        kept: list[tuple[float, tuple[tuple[float, float], ...]]] = []
        for time, tails in sorted(found):
            if not any(
                all(any(a <= x and b <= y for x, y in tails) for a, b in other) for _, other in kept
            ):
                kept.append((time, tails))
        return kept

    def _time(
        self, owners: list[tuple[Node, bool]], lengths: tuple[int, ...], m: int, zero: bool
    ) -> tuple[float, tuple[tuple[float, float], ...]] | None:
        depth, at = len(lengths), 0
        taus, fills, tails = [], [], []
        for s, (length, (node, inside)) in enumerate(zip(lengths, owners, strict=True)):
            ahead = min(depth if zero else depth - s, m)
            stage = self.stage(node, at, at + length, ahead, s == depth - 1, inside, zero)
            if stage is None:
                return None
            tau, weight, gradient, update = stage
            taus.append(tau)
            fills.append(max(0.0, tau - 2 * weight))
            tails.append((gradient, update))
            at += length
        seconds = m * max(taus) + sum(fills[:-1]) if zero else sum(taus) + (m - 1) * max(taus)
        return seconds, tuple(sorted(set(tails)))

    def cost_of(self, plan: Plan, by_name: dict[str, Node]) -> float:
        """Seconds of a step of `plan` by the same formulas.

        Asserts that it fits in memory and recomputes only where needed.
        """
        k = len(plan.pipelines)
        per_byte = 2 * (k - 1) / k / self.p.link.bytes_per_s if self.p.link.bytes_per_s else 0.0
        slowest = tail = 0.0
        for pipeline in plan.pipelines:
            stages = pipeline.stages
            owners = [
                (by_name[a.unit.node], b is not None and a.unit.node == b.unit.node)
                for a, b in itertools.zip_longest(stages, stages[1:])
            ]
            lengths = tuple(stage.last - stage.first for stage in stages)
            m = len(pipeline.microbatches)
            zero = pipeline.schedule == "zero-bubble"
            found = self._time(owners, lengths, m, zero)
            assert found is not None, "a stage does not fit"
            slowest = max(slowest, found[0])
            tail = max(tail, *(g * per_byte + u for g, u in found[1]))
            for s, (stage, (node, _)) in enumerate(zip(stages, owners, strict=True)):
                ahead = min(len(stages) if zero else len(stages) - s, m)
                assert stage.recompute == self._again(node, stage.first, stage.last, ahead), (
                    "recomputation"
                )
        return slowest + tail

    def _again(self, node: Node, i: int, j: int, ahead: int) -> bool:
        layers = self.p.layers[i:j]
        fixed = sum(la.param_bytes + la.state_bytes + la.gradient_bytes for la in layers)
        return bool(node[2]) and fixed + ahead * sum(la.activation_bytes for la in layers) > node[2]

    def best(self) -> float:
        """Least seconds of a step."""
        result = inf
        for groups in self._partitions(tuple(sorted(self.nodes))):
            k = len(groups)
            if not 0 < k <= self.m:
                continue
            per_byte = 2 * (k - 1) / k / self.p.link.bytes_per_s if self.p.link.bytes_per_s else 0.0
            for shares in compositions(self.m, k):
                options = [self.pipeline(g, m) for g, m in zip(groups, shares, strict=True)]
                for choice in itertools.product(*options):
                    tail = max(
                        (g * per_byte + u for _, tails in choice for g, u in tails), default=0.0
                    )
                    result = min(result, max(t for t, _ in choice) + tail)
        return result

    def _partitions(self, nodes: tuple[Node, ...]) -> set[tuple[tuple[Node, ...], ...]]:
        """All sets of pipelines of some of the nodes; equal nodes are not distinguished."""
        if not nodes:
            return {()}
        result = set()
        for rest in self._partitions(nodes[1:]):
            result.add(rest)
            result.add(tuple(sorted((*rest, (nodes[0],)))))
            for i, group in enumerate(rest):
                grown = (*rest[:i], tuple(sorted((*group, nodes[0]))), *rest[i + 1 :])
                result.add(tuple(sorted(grown)))
        return {r for r in result if r} | {()}
