"""What is short when no plan fits: how much memory, on which node."""

from __future__ import annotations

import numpy as np

from elastic.planning.cost.cost_model import CostModel
from elastic.planning.cost.node_kinds import NodeKinds
from elastic.planning.search.problem import Problem
from elastic.planning.search.request import PlanRequest


def explain_infeasible(problem: Problem, kinds: NodeKinds, request: PlanRequest) -> str:
    """Say by how much memory is short even with one pipeline on all nodes, cut so that it needs least."""
    model = problem.model
    units = [min(kind.units, model.n_layers) for kind in kinds.kinds]
    depth = min(model.n_layers, sum(n * u for n, u in zip(problem.counts, units, strict=True)))
    need, stage, (first, last) = _least(model, depth, problem.microbatches)
    limited = [
        (kinds.kinds[kinds.of[info.node]].memory_bytes, info.node)
        for info in request.nodes
        if info.node in kinds.of and kinds.kinds[kinds.of[info.node]].memory_bytes > 0
    ]
    memory, node = min(limited, key=lambda pair: pair[0])
    missing = need - memory
    if missing <= 0:
        return (
            f"no plan fits: {depth} stages need {need} bytes a worker when each is cut to need least, which does not "
            f"fit the sizes and order of the nodes ({node} may use {memory} bytes): add memory or nodes"
        )
    return (
        f"memory is short: even one pipeline of {depth} stages on all {sum(problem.counts)} nodes needs "
        f"{need} bytes a worker (stage {stage}, layers {first} to {last - 1}), but {node} may use {memory}: "
        f"short by {missing} bytes{_gib(missing)}"
    )


def _gib(nbytes: int) -> str:
    return f" ({nbytes / 2**30:.1f} GiB)" if nbytes >= 2**30 else ""


def _least(model: CostModel, depth: int, microbatches: int) -> tuple[int, int, tuple[int, int]]:
    """(bytes, stage, its layers) of the fullest stage when cut so that it needs least; recomputing where that helps."""
    tables = [_needs(model, min(depth - s, microbatches)) for s in range(depth)]
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
    needs = [int(table[a, b]) for table, a, b in zip(tables, cuts, cuts[1:], strict=False)]
    fullest = needs.index(max(needs))
    return needs[fullest], fullest, (cuts[fullest], cuts[fullest + 1])


def _needs(model: CostModel, ahead: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    table = np.minimum(model.memory(ahead, False), model.memory(ahead, True))
    table[np.tril_indices(model.n_layers + 1)] = np.inf
    return table
