"""Slots and nodes matched at least cost: first the bytes that a node lacks, then the layers that it
has to load.

Up to some thousand nodes by the shortest augmenting paths of `scipy.optimize.linear_sum_assignment`
(Crouse 2016,
after Jonker and Volgenant 1987). Beyond that, where nodes fall into few sorts, as flows between
sorts: a transportation
problem, whose basic solutions are whole numbers (its constraints are totally unimodular), solved by
the simplex method
of HiGHS. Costs that differ by less than 1e-7 of the largest count as equal there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, TypeVar

T = TypeVar("T")

Sort = tuple[frozenset[int], frozenset[tuple[int, int]]]
"""What tells nodes of one kind apart: live layers, kept (layer, bytes)."""

FEW = 8
"""Nodes up to which the library is not needed."""
DENSE = 1 << 22
"""Pairs of slot and node that are looked at one by one."""


def cheapest(
    wanted: Sequence[Sequence[int]],
    sorts: Sequence[Sort],
    full_bytes: Sequence[int],
    dense: int = DENSE,
) -> list[tuple[int, int]]:
    """Return a least-cost matching of all slots as (slot, node).

    `wanted` is the layers of each slot, `sorts` what each node has; there are at least as many
    nodes. Costs are whole
    numbers below 2^53 (bytes are divided by their common divisor), so that float64 sums are exact,
    unless a plan moves
    petabytes of oddly sized layers: then bytes may be off in the 16th digit.
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
    """By trying all sets of nodes: a few nodes are not worth the half second that the library takes
    to import."""
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
    """Costs as a matrix [sorts of slots, sorts of nodes]; `most` layers are loaded at most."""
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
    """Match by numbers of each sort: `which` sort each slot is of, `what` sort each node is of."""
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
    slots: dict[int, list[int]] = {}
    nodes: dict[int, list[int]] = {}
    for i in reversed(range(len(which))):
        slots.setdefault(which[i], []).append(i)
    for j in reversed(range(len(what))):
        nodes.setdefault(what[j], []).append(j)
    return [
        (slots[s].pop(), nodes[n].pop())
        for s, n in zip(*(axis.tolist() for axis in np.nonzero(amounts)), strict=True)
        for _ in range(int(amounts[s, n]))
    ]


def _number(items: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return (distinct items, index of each item among them)."""
    seen: dict[T, int] = {}
    numbers = [seen.setdefault(item, len(seen)) for item in items]
    return list(seen), numbers
