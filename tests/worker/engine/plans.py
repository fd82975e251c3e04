"""Small plans for engine tests."""

from __future__ import annotations

from elastic.domain.types import Pipeline, Plan, Stage, Unit
from elastic.planning.plan.rank_map import Roster, roster

Shares = list[tuple[int, ...]]
"""Micro-batches per pipeline."""


def plan_of(cuts: list[list[int]], n_layers: int, microbatches: Shares, tp: int = 1) -> Plan:
    """A plan whose pipelines have these cuts, each stage on a node of its own.

    The cuts are first layers: [[0, 2], [0, 1, 3]] makes pipelines of 2 and of 3 stages.
    """
    pipelines, node = [], 0
    for starts, indices in zip(cuts, microbatches, strict=True):
        stages = []
        for first, last in zip(starts, [*starts[1:], n_layers], strict=True):
            stages.append(Stage(Unit(f"node{node}"), first, last))
            node += 1
        pipelines.append(Pipeline(tuple(stages), indices))
    n = sum(len(indices) for indices in microbatches)
    return Plan(epoch=1, n_layers=n_layers, n_microbatches=n, tp=tp, pipelines=tuple(pipelines))


def roster_of(cuts: list[list[int]], n_layers: int, microbatches: Shares, tp: int = 1) -> Roster:
    return roster(plan_of(cuts, n_layers, microbatches, tp))
