"""Matching of slots and nodes at least cost: first bytes that a node lacks, then layers to load.

Up to some thousand nodes are matched by shortest augmenting paths (Crouse 2016, after Jonker and
Volgenant 1987: `scipy.optimize.linear_sum_assignment`). More nodes, if they are of few sorts, are
matched as flows between sorts: a transportation problem, solved by the simplex method of HiGHS. Its
basic solutions are whole numbers, because its constraints are totally unimodular. There, costs that
differ by less than 1e-7 of the largest cost count as equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, TypeVar

T = TypeVar("T")

Sort = tuple[frozenset[int], frozenset[tuple[int, int]]]
"""Layers of a node's worker, and (layer, bytes) in its vault; nodes of one sort agree in both."""

FEW = 8
"""Maximum number of nodes that are matched without SciPy."""
DENSE = 1 << 22
"""Maximum number of pairs of slot and node that are compared one by one."""


def cheapest(
    wanted: Sequence[Sequence[int]],
    sorts: Sequence[Sort],
    full_bytes: Sequence[int],
    dense: int = DENSE,
) -> list[tuple[int, int]]:
    """Return a least-cost matching of all slots as (slot, node).

    `wanted` has the layers of each slot, and `sorts` the sort of each node. There are at least as
    many nodes as slots. Costs are whole numbers (bytes are divided by their common divisor). Sums
    of them are exact up to 2^53; for petabytes of odd sizes the 16th digit may be wrong.
    """
    distinct, which = _number(tuple(layers) for layers in wanted)
    kinds, what = _number(sorts)
    costs = _costs(distinct, kinds, full_bytes, sum(map(len, wanted)))
    if len(which) * len(what) > dense and len(distinct) * len(kinds) <= dense:
        return _flows(costs, which, what)
    import numpy as np

    if len(what) <= FEW:
        return _small(costs[np.ix_(which, what)].tolist())
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(costs[np.ix_(which, what)])
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _small(costs: list[list[float]]) -> list[tuple[int, int]]:
    """Return the matching of a few nodes by dynamic programming over sets of nodes.

    SciPy would take half a second to import.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for row in costs:
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (total, chosen) in best.items():
            for column, cost in enumerate(row):
                key = used | 1 << column
                if key != used and (
                    key not in following or (total + cost, (*chosen, column)) < following[key]
                ):
                    following[key] = (total + cost, (*chosen, column))
        best = following
    return list(enumerate(min(best.values())[1]))


def _costs(
    distinct: Sequence[Sequence[int]], kinds: Sequence[Sort], full_bytes: Sequence[int], most: int
) -> Any:
    """Return costs as a matrix [sorts of slots, sorts of nodes]. `most`: layers of all slots."""
    import numpy as np

    unit = gcd(*full_bytes, *(nbytes for _, kept in kinds for _, nbytes in kept)) or 1
    fetch = np.tile(np.array([nbytes // unit for nbytes in full_bytes], float), (len(kinds), 1))
    load = np.ones_like(fetch)
    for row, (live, kept) in enumerate(kinds):
        for layer, nbytes in kept:
            fetch[row, layer] = max(0, full_bytes[layer] - nbytes) // unit
        fetch[row, list(live)] = load[row, list(live)] = 0
    member = np.zeros((len(distinct), len(full_bytes)))
    for row, layers in enumerate(distinct):
        member[row, list(layers)] = 1
    return member @ (fetch * (1 + most) + load).T


def _flows(costs: Any, which: Sequence[int], what: Sequence[int]) -> list[tuple[int, int]]:
    """Return the matching by flows. `which`: sort of each slot; `what`: sort of each node."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import identity, kron

    need, room = Counter(which), Counter(what)
    n_slots, n_nodes = costs.shape
    found = linprog(
        costs.ravel() / max(1.0, float(costs.max())),
        A_eq=kron(identity(n_slots), np.ones((1, n_nodes)), format="csr"),
        b_eq=[need[s] for s in range(n_slots)],
        A_ub=kron(np.ones((1, n_slots)), identity(n_nodes), format="csr"),
        b_ub=[room[n] for n in range(n_nodes)],
        method="highs-ds",
    )
    assert found.status == 0, f"there are enough nodes, yet: {found.message}"
    amounts = np.rint(found.x).astype(int).reshape(costs.shape)
    slots, nodes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for members, numbers in ((slots, which), (nodes, what)):
        for i in reversed(range(len(numbers))):
            members[numbers[i]].append(i)
    return [
        (slots[s].pop(), nodes[n].pop())
        for s, n in np.argwhere(amounts).tolist()
        for _ in range(int(amounts[s, n]))
    ]


def _number(items: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return (distinct items, index of each item among them)."""
    seen: dict[T, int] = {}
    numbers = [seen.setdefault(item, len(seen)) for item in items]
    return list(seen), numbers
