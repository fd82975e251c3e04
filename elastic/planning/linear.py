"""A linear programme of few rows and many columns: the fractional form of choosing pipelines.

    maximise  sum_c value[c] x[c]   subject to  sum_c counts[c, q] x[c] <= nodes[q],  x >= 0

Gilmore and Gomory (1961) cut stock by the same programme. Its optimum is at least that of whole numbers, so
it bounds what any plan can do; and a basic solution has no more non-zeros than there are kinds of nodes, so
rounding it down loses little. Solved by the primal simplex method; entering columns by largest gain, ties by
position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic.planning.columns import Ints
from elastic.planning.model import Floats


@dataclass(frozen=True, slots=True)
class Optimum:
    """value = prices @ nodes; `chosen` columns with their amounts; `gaps`: by how much each column falls short."""

    value: float
    chosen: tuple[int, ...]
    amounts: tuple[float, ...]
    prices: Floats
    gaps: Floats


def maximise(value: Ints, counts: Ints, nodes: tuple[int, ...]) -> Optimum:
    """Solve it. O(pivots * columns); a handful of pivots a row in practice."""
    rows = len(nodes)
    if rows == 1:
        return _one_row(value, counts[:, 0], nodes[0])
    worth = np.concatenate((value.astype(np.float64), np.zeros(rows)))
    matrix = np.concatenate((counts.astype(np.float64), np.eye(rows)))
    basis = list(range(len(value), len(value) + rows))
    supply: Floats = np.asarray(nodes, dtype=np.float64)
    amounts: Floats = supply
    prices: Floats = np.zeros(rows)
    gains: Floats = worth
    for _ in range(50 * (rows + 1)):
        square = matrix[basis].T
        prices = np.asarray(np.linalg.solve(square.T, worth[basis]), dtype=np.float64)
        amounts = np.asarray(np.linalg.solve(square, supply), dtype=np.float64)
        gains = np.asarray(worth - matrix @ prices, dtype=np.float64)
        entering = int(np.argmax(gains))
        if gains[entering] <= 1e-9 * max(1.0, float(worth.max())):
            break
        direction = np.linalg.solve(square, matrix[entering])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(direction > 1e-12, np.maximum(amounts, 0.0) / direction, np.inf)
        basis[int(np.argmin(ratios))] = entering
    kept = [(b, float(a)) for b, a in zip(basis, amounts, strict=True) if b < len(value) and a > 1e-12]
    prices = np.maximum(prices, 0.0)
    return Optimum(
        float(prices @ supply), tuple(b for b, _ in kept), tuple(a for _, a in kept),
        prices, np.asarray(-gains[: len(value)], dtype=np.float64),
    )  # fmt: skip


def _one_row(value: Ints, size: Ints, nodes: int) -> Optimum:
    """One kind of node: the column that does most a node."""
    rates = value / size
    best = int(np.argmax(rates))
    price = float(rates[best])
    gaps: Floats = np.asarray(price * size - value, dtype=np.float64)
    return Optimum(price * nodes, (best,), (nodes / float(size[best]),), np.array([price]), gaps)


def bound(value: Ints, counts: Ints, nodes: tuple[int, ...]) -> float:
    """An upper bound on the optimum that does not rest on the method having converged: prices at which no
    column gains."""
    prices = maximise(value, counts, nodes).prices
    short = value - counts @ prices
    worst = float(np.max(short / counts.sum(axis=1), initial=0.0))
    return float((prices + max(0.0, worst)) @ np.asarray(nodes, dtype=np.float64))
