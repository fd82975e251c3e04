"""The linear programme that chooses pipelines, fractional and integer, solved by HiGHS.

    maximise  sum_c value[c] x[c]   subject to  sum_c counts[c, q] x[c] <= nodes[q],  x >= 0

It has a row per kind of node and a column per possible pipeline: few rows, thousands of columns.
Gilmore and Gomory (1961) use the same programme for cutting stock. The fractional optimum is at
least the integer one, so it bounds any plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import highspy
import numpy as np

from elastic.planning.cost.cost_model import Floats, Ints

MAX_TREE_NODES = 200
"""Maximum nodes of the search tree of the integer programme."""
PRECISION = 1e-9
"""Fraction of the largest value that a column may still gain at the optimum."""
PROVEN = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kObjectiveTarget,
    highspy.HighsModelStatus.kSolutionLimit,
)
"""Solver outcomes after which the solver's bound holds."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """Optimum of the linear programme, with a bound that holds despite rounding errors."""

    bound: float
    """prices @ nodes: the maximum value of any choice of columns."""
    prices: Floats
    """[kinds] dual value of one node; no column is worth more than its nodes."""
    gaps: Floats
    """[columns] price of the column's nodes minus its value, at least 0."""


class Relaxation:
    """The linear programme for fixed columns and nodes, solved for many sets of values in turn.

    HiGHS keeps the columns that earlier solutions needed (delayed column generation), so a similar
    problem takes only one or two runs of HiGHS. If several prices are optimal, the returned ones
    depend on earlier problems. So no instance may outlive its search: equal requests must get equal
    plans.
    """

    def __init__(self, counts: Ints, nodes: tuple[int, ...]) -> None:
        """`counts`: [columns, kinds] nodes; `nodes`: available nodes per kind."""
        self.counts, self.nodes = counts, nodes
        self._matrix, self._sizes = counts.astype(np.float64), counts.sum(axis=1)
        self._inside: list[int] = []
        self._solver: highspy.Highs | None = None

    def maximise(self, value: Ints) -> Optimum:
        """Return the optimum for these values of the columns."""
        worth = value.astype(np.float64)
        prices = self._least_prices(worth)
        gaps = self._matrix @ prices - worth
        short = float(np.max(-gaps / self._sizes, initial=0.0))
        prices = prices + short
        return Optimum(float(prices @ np.array(self.nodes)), prices, gaps + short * self._sizes)

    def _least_prices(self, worth: Floats) -> Floats:
        """Return, [kinds], prices at which no column gains, except for rounding."""
        if len(self.nodes) == 1:
            return np.array([np.max(worth / self._sizes)])
        if self._solver is None:
            self._solver = _solver(presolve="off")
            for n in self.nodes:
                self._solver.addRow(-highspy.kHighsInf, n, 0, [], [])
            self._add(int(np.argmax(worth / self._sizes)), worth)
        else:
            costs = -worth[self._inside]
            self._solver.changeColsCost(len(costs), np.arange(len(costs)), costs)
        least = -PRECISION * max(1.0, float(worth.max()))
        while True:
            self._solver.run()
            _check(self._solver, (highspy.HighsModelStatus.kOptimal,))
            duals = np.array(self._solver.getSolution().row_dual, dtype=np.float64)
            prices: Floats = np.maximum(-duals, 0.0)
            gaps = self._matrix @ prices - worth
            entering = int(gaps.argmin())
            if gaps[entering] >= least or entering in self._inside:
                return prices
            self._add(entering, worth)

    def _add(self, column: int, worth: Floats) -> None:
        assert self._solver is not None
        rows = np.arange(len(self.nodes))
        self._solver.addCol(
            -worth[column], 0, highspy.kHighsInf, len(rows), rows, self._matrix[column]
        )
        self._inside.append(column)


@dataclass(frozen=True, slots=True)
class IntegerSolution:
    """Result of `solve_integer`."""

    bound: float
    """Upper bound on the value of any choice; 0 if no choice reaches `enough`."""
    value: int
    chosen: Counter[int]
    """Number of each column in the choice with this value; empty: no choice was found."""


def solve_integer(
    relaxation: Relaxation,
    value: Ints,
    enough: int,
    number: tuple[int, int] = (0, 1 << 30),
    promising: int = 0,
) -> IntegerSolution:
    """Return `number[0]` to `number[1]` columns that reach `enough`, or a bound if none do.

    `promising`: use only so many columns, and prove nothing; 0: use all.

    A column whose gap exceeds the slack of the fractional optimum over `enough` is in no solution
    that reaches `enough` (reduced-cost fixing). A few dozen of thousands of columns are left for
    branch and cut (HiGHS; Huangfu and Hall 2018).
    """
    counts, nodes = relaxation.counts, relaxation.nodes
    optimum = relaxation.maximise(value)
    limit = optimum.bound
    if limit < enough * (1 - 1e-9):
        return IntegerSolution(limit, 0, Counter())
    kept = np.flatnonzero((value > 0) & (optimum.gaps <= limit - enough + 1e-6 * enough))
    if not len(kept):
        return IntegerSolution(0.0, 0, Counter())
    if promising and len(kept) > promising:
        kept = np.sort(kept[np.argsort(optimum.gaps[kept], kind="stable")[:promising]])
    solver = _solver(mip_max_nodes=MAX_TREE_NODES, objective_target=0.5 - enough)
    solver.passModel(_model(value[kept], counts[kept], nodes, number))
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return IntegerSolution(0.0, 0, Counter())
    _check(solver, PROVEN)
    top = min(limit, -float(solver.getInfo().mip_dual_bound))
    solution = solver.getSolution()
    if not solution.value_valid:
        return IntegerSolution(top, 0, Counter())
    amounts = np.rint(solution.col_value).astype(np.int64)
    assert (amounts @ counts[kept] <= np.array(nodes)).all(), "HiGHS uses available nodes only"
    chosen = Counter({int(c): int(n) for c, n in zip(kept, amounts, strict=True) if n > 0})
    return IntegerSolution(top, sum(int(value[c]) * n for c, n in chosen.items()), chosen)


def _solver(**options: str | float) -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in {"output_flag": False, "threads": 1, **options}.items():
        solver.setOptionValue(name, setting)
    return solver


def _check(solver: highspy.Highs, expected: tuple[highspy.HighsModelStatus, ...]) -> None:
    status = solver.getModelStatus()
    if status not in expected:
        raise RuntimeError(f"HiGHS: {solver.modelStatusToString(status)}")


def _model(
    value: Ints, counts: Ints, nodes: tuple[int, ...], number: tuple[int, int]
) -> highspy.HighsLp:
    """Return the programme that minimises -value: a row per kind of node, and one for `number`."""
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
