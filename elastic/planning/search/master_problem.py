"""A programme of few rows and many columns: choosing pipelines, in fractions and whole.

    maximise  sum_c value[c] x[c]   subject to  sum_c counts[c, q] x[c] <= nodes[q],  x >= 0

Gilmore and Gomory (1961) cut stock by the same programme. Its optimum is at least that of whole numbers, so
it bounds what any plan can do; and a basic solution has no more non-zeros than there are kinds of nodes, so
rounding it down loses little. Solved by the primal simplex method; entering columns by largest gain, ties by
position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import highspy
import numpy as np

from elastic.planning.cost.cost_model import Floats, Ints

NODES = 200
"""Most nodes of the search tree for whole columns."""

PROVEN = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kObjectiveTarget,
    highspy.HighsModelStatus.kSolutionLimit,
)
"""Ends after which the solver's bound holds."""


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


@dataclass(frozen=True, slots=True)
class Whole:
    """Columns taken whole: no choice reaches `enough` if `bound` is below it; `chosen` reaches `value`."""

    bound: float
    value: int
    chosen: Counter[int]


def most_whole(
    value: Ints,
    counts: Ints,
    nodes: tuple[int, ...],
    enough: int,
    number: tuple[int, int] = (0, 1 << 30),
    promising: int = 0,
) -> Whole:
    """`number[0]` to `number[1]` whole columns that reach `enough`, or a proof that none do; no proof if only so many
    `promising` columns are looked at.

    A column that falls short by more than the linear programme exceeds `enough` is in no solution that reaches it
    (reduced-cost fixing): a few dozen of thousands are left for branch and cut (HiGHS; Huangfu and Hall 2018).
    """
    optimum, limit = maximise(value, counts, nodes), bound(value, counts, nodes)
    if limit < enough * (1 - 1e-9):
        return Whole(limit, 0, Counter())
    kept = np.flatnonzero((value > 0) & (optimum.gaps <= limit - enough + 1e-6 * enough))
    if not len(kept):
        return Whole(0.0, 0, Counter())
    if promising and len(kept) > promising:
        kept = np.sort(kept[np.argsort(optimum.gaps[kept], kind="stable")[:promising]])
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in (("output_flag", False), ("threads", 1), ("mip_max_nodes", NODES)):
        solver.setOptionValue(name, setting)
    solver.setOptionValue("objective_target", 0.5 - enough)
    solver.passModel(_model(value[kept], counts[kept], nodes, number))
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Whole(0.0, 0, Counter())
    if status not in PROVEN:
        raise RuntimeError(f"HiGHS: {solver.modelStatusToString(status)}")
    top = min(limit, -float(solver.getInfo().mip_dual_bound))
    solution = solver.getSolution()
    if not solution.value_valid:
        return Whole(top, 0, Counter())
    amounts = np.rint(solution.col_value).astype(np.int64)
    assert (amounts @ counts[kept] <= np.array(nodes)).all(), "HiGHS keeps to the nodes there are"
    chosen = Counter({int(c): int(n) for c, n in zip(kept, amounts, strict=True) if n > 0})
    return Whole(top, sum(int(value[c]) * n for c, n in chosen.items()), chosen)


def _model(value: Ints, counts: Ints, nodes: tuple[int, ...], number: tuple[int, int]) -> highspy.HighsLp:
    """Minimise -value; a row for each kind of node, and one for the number of columns."""
    rows = np.concatenate((counts, np.ones((len(counts), 1), dtype=np.int64)), axis=1)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = rows.shape
    model.col_cost_ = -value.astype(np.float64)
    model.col_lower_ = np.zeros(len(value))
    most = np.where(counts > 0, np.array(nodes) // np.maximum(counts, 1), max(nodes)).min(axis=1)
    model.col_upper_ = most.astype(np.float64)
    model.row_lower_ = np.array([*[-highspy.kHighsInf] * len(nodes), number[0]], dtype=np.float64)
    model.row_upper_ = np.array([*nodes, number[1]], dtype=np.float64)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.arange(len(rows) + 1) * rows.shape[1]
    model.a_matrix_.index_ = np.tile(np.arange(rows.shape[1]), len(rows))
    model.a_matrix_.value_ = rows.astype(np.float64).ravel()
    model.integrality_ = [highspy.HighsVarType.kInteger] * len(value)
    return model
