"""How groups of nodes cover the layers: step 1 of the exact search (`elastic.planning.search.exact`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from elastic.planning.cost.cost_model import Floats
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.problem import CLOSE, Group, Problem


@dataclass
class Covers:
    """How the groups of nodes of a problem cover the layers."""

    problem: Problem
    _covers: dict[tuple[str, int, float, int], dict[Group, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        self.model, self.counts, self.m = p.model, p.counts, p.microbatches
        self.n_layers = p.model.n_layers
        units = [min(kind.units, self.n_layers) for kind in p.model.kinds]
        self.units, self.most = units, 1
        self.deepest = min(self.n_layers, sum(n * u for n, u in zip(self.counts, units, strict=True)))
        self.limits = {schedule: self._limits(schedule) for schedule in p.schedules}
        self.schedules = [schedule for schedule in p.schedules if len(self.limits[schedule])]

    # ---- pipelines ----

    def _limits(self, schedule: str) -> Floats:
        """Every time that the slowest stage can have."""
        found = [np.zeros(0)]
        for kind, n in enumerate(self.counts):
            for ahead in range(1, self.deepest + 1) if self.model.limited and n else [1] * bool(n):
                for inside, last in ((False, False), (False, True), (True, False)):
                    if inside and self.units[kind] == 1:
                        continue
                    tau = self.model.stages(kind, ahead, schedule, inside=inside, last=last).tau
                    found.append(tau[np.isfinite(tau)])
        values = np.unique(np.concatenate(found))
        return values[values <= self.problem.above * (1 + CLOSE)]

    def cover(self, schedule: str, ahead: int, tail: float, pipelines: int) -> dict[Group, Floats]:
        """`cover` of every group: [L + 1, limits]. `ahead`: most micro-batches in flight (zero-bubble: exactly)."""
        key = (schedule, ahead, tail, 0 if tail == inf else pipelines)
        if key not in self._covers:
            self._covers[key] = self._build(schedule, ahead, tail, pipelines)
        return self._covers[key]

    def _build(self, schedule: str, ahead: int, tail: float, pipelines: int) -> dict[Group, Floats]:
        start = np.full((self.n_layers + 1, len(self.limits[schedule])), inf)
        start[self.n_layers] = 0.0
        covers = {Group((0,) * len(self.counts), 0): start}
        for size in range(sum(self.counts)):
            for group in [g for g in covers if sum(g.counts) == size]:
                for kind, n in enumerate(self.counts):
                    if group.counts[kind] < n:
                        self._extend(covers, group, kind, schedule, ahead, tail, pipelines)
        return {group: cover for group, cover in covers.items() if group.depth}

    def _extend(
        self, covers: dict[Group, Floats], group: Group, kind: int,
        schedule: str, ahead: int, tail: float, pipelines: int,
    ) -> None:  # fmt: skip
        """Put a node of `kind` before `group`, with any number of its units."""
        cover = covers[group]
        counts = tuple(n + (q == kind) for q, n in enumerate(group.counts))
        for used in range(1, self.units[kind] + 1):
            depth = group.depth + used
            if depth > self.deepest:
                return
            table, fill = self.stage(kind, depth - 1, used > 1, schedule, ahead, tail, pipelines)
            cover = _prepend(cover, table, fill, self.limits[schedule])
            known = covers.get(Group(counts, depth))
            covers[Group(counts, depth)] = cover if known is None else np.minimum(known, cover)

    def stage(
        self, kind: int, behind: int, inside: bool, schedule: str, ahead: int, tail: float, pipelines: int
    ) -> tuple[Floats, Floats]:
        flying = ahead if schedule == ZERO_BUBBLE else min(behind + 1, ahead)
        stages = self.model.stages(kind, flying, schedule, inside=inside, last=behind == 0)
        if tail == inf:
            return stages.tau, stages.fill
        tau = np.where(self.model.tails(kind, pipelines) <= tail * (1 + CLOSE), stages.tau, inf)
        return tau, stages.fill


def _prepend(cover: Floats, tau: Floats, fill: Floats, limits: Floats) -> Floats:
    """Put one stage before what `cover` covers: [L + 1, limits], the least sum over where the stage ends."""
    result = np.full_like(cover, inf)
    ends = np.flatnonzero(np.isfinite(cover).any(axis=1))
    for end in ends:
        starts = np.flatnonzero(np.isfinite(tau[:, end]))
        allowed = tau[starts, end][:, None] <= limits[None, :]
        sums = np.where(allowed, fill[starts, end][:, None] + cover[end][None, :], inf)
        result[starts] = np.minimum(result[starts], sums)
    return result
