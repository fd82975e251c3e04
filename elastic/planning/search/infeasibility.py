"""Explains why no plan fits: which memory is short, and on which node."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from elastic.planning.cost.cost_model import CostModel, Floats
from elastic.planning.cost.node_kinds import NodeKinds
from elastic.planning.plan.units import size_text
from elastic.planning.search.problem import Problem
from elastic.planning.search.request import PlanRequest


def explain_infeasible(problem: Problem, kinds: NodeKinds, request: PlanRequest) -> str:
    """Return a message that names the memory which one pipeline over all nodes lacks."""
    model = problem.model
    units = [min(kind.units, model.n_layers) for kind in kinds.kinds]
    places = sum(n * u for n, u in zip(problem.counts, units, strict=True))
    depth = min(model.n_layers, places)
    need, stage, (first, last) = _fullest_stage(model, depth, problem.microbatches)
    memory, node = min(
        (
            (kinds.kinds[kinds.index_of[info.node]].memory_bytes, info.node)
            for info in request.nodes
            if info.node in kinds.index_of
            and kinds.kinds[kinds.index_of[info.node]].memory_bytes > 0
        ),
        key=lambda pair: pair[0],
    )
    missing = need - memory
    if missing <= 0:
        return (
            f"no plan fits: {depth} stages need {size_text(need)} per worker when each is cut to "
            f"need least, which does not fit the sizes and order of the nodes ({node} may use "
            f"{size_text(memory)}): add nodes, or memory (--node-memory)"
        )
    return (
        f"memory is short: even one pipeline of {depth} stages on all {sum(problem.counts)} nodes "
        f"needs {size_text(need)} per worker (stage {stage}, layers {first} to {last - 1}), but "
        f"{node} may use {size_text(memory)}: short by {size_text(missing)}; add nodes, or give "
        "them more memory (--node-memory)"
    )


def _fullest_stage(
    model: CostModel, depth: int, microbatches: int
) -> tuple[int, int, tuple[int, int]]:
    """Return (bytes, index, layers) of the fullest stage under the cut that needs least."""
    tables = [_bytes_of_stages(model, min(depth - s, microbatches)) for s in range(depth)]
    rest = np.full(model.n_layers + 1, np.inf)
    rest[-1] = 0.0
    ends = []
    for table in reversed(tables):
        worst = np.maximum(table, rest[None, :])
        ends.append(worst.argmin(axis=1))
        rest = worst.min(axis=1)
    cuts = [0]
    for end in reversed(ends):
        cuts.append(int(end[cuts[-1]]))
    needs = [int(table[a, b]) for table, (a, b) in zip(tables, pairwise(cuts), strict=True)]
    fullest = needs.index(max(needs))
    return needs[fullest], fullest, (cuts[fullest], cuts[fullest + 1])


def _bytes_of_stages(model: CostModel, ahead: int) -> Floats:
    table = np.minimum(model.memory(ahead, False), model.memory(ahead, True))
    table[np.tril_indices(model.n_layers + 1)] = np.inf
    return table
