"""Parcae (Duan et al., NSDI 2024): forecast the number of nodes and migrate before losses.

Each minute, a dynamic program over the forecast chooses the grid with the most expected progress.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from elastic_sim.steps.engine import JobView, Reconfiguration
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses
from elastic_sim.steps.world import PricedPlan, SimulatedWorld
from elastic_sim.traces.statistics import node_counts
from elastic_sim.traces.trace import Event, Trace

INTERVAL_S, LOOK_AHEAD = 60.0, 12
"""Length of a forecast interval, and the number of intervals of a forecast."""


class ParcaePolicy(PolicyBase):
    """Parcae with a perfect forecast."""

    about = PolicyDescription(
        name="parcae",
        what="grid by expected progress over 12 minutes, perfect forecast; live migration before "
        "losses",
        source="Duan et al., NSDI 2024, github.com/JF-D/Parcae: minutes, twelve ahead; groups and "
        "state over the link as in physics (rendezvous 6.6 s when nodes are added); losses are "
        "known before they happen, so no step is lost; the state is also with parameter servers on "
        "separate nodes, which are not paid for here, and is read from there as from storage if no "
        "grid was left",
    )
    RENDEZVOUS_S = 6.6

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._future: list[int] = []
        """Number of nodes at the end of every minute."""
        self._best_grid = lru_cache(maxsize=None)(self._solve)

    def set_future(self, trace: Trace) -> None:
        """Give the policy the trace, for its perfect forecast."""
        times, counts = zip(*node_counts(trace), strict=True)
        minutes = range(int(trace.end_s / INTERVAL_S) + LOOK_AHEAD + 1)
        self._future = [counts[bisect_right(times, INTERVAL_S * i) - 1] for i in minutes]

    def forecast(self, job: JobView) -> tuple[int, ...]:
        """Return the number of nodes at the end of each of the next minutes."""
        first = int(job.now / 1000 / INTERVAL_S) + 1
        counts = self._future[first : first + LOOK_AHEAD] or [len(job.alive)]
        return min(len(job.alive), counts[0]), *counts[1:]

    # ---- events ----

    def on_start(self, job: JobView) -> Reconfiguration:
        job.set_timer(INTERVAL_S, "minute")
        return self._adapt(job, "start")

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        fits = self._plan is not None and self._plan.nodes <= len(job.alive)
        if not lost or (fits and not self.hits_used_nodes(job, lost)):
            return None
        return self._after_loss(job, lost)

    def on_timer(self, job: JobView, name: str) -> Reconfiguration | None:
        job.set_timer(INTERVAL_S, "minute")
        if job.paused:
            return None
        grid = self._choose(job)
        same = grid is self._plan or (grid and self._plan and grid.shape == self._plan.shape)
        return None if same else self._adapt(job, "forecast", grid)

    # ---- parts ----

    def hits_used_nodes(self, job: JobView, lost: Sequence[Event]) -> bool:
        """Return False: Parcae moves nodes that are about to be lost out of the grid."""
        return False

    def _after_loss(self, job: JobView, lost: Sequence[Event]) -> Reconfiguration:
        """Return the change to a new grid. Only migration takes time: the loss was foreseen."""
        return self._adapt(job, f"{len(lost)} lost")

    def _adapt(self, job: JobView, reason: str, grid: PricedPlan | None = None) -> Reconfiguration:
        old, new = self._plan, grid or self._choose(job)
        setup = self.run_plan(job, new)
        if new is None or setup is None:
            return Reconfiguration((), None, reason=f"{reason}: too few nodes")
        groups_s, move_s = self._migration_s(old, new)
        if old is None and job.steps:
            move_s = self.checkpoint_s(job)
        parts = pauses(plan_s=groups_s, transfer_s=move_s)
        return Reconfiguration(parts, setup, reason=reason)

    def _migration_s(self, old: PricedPlan | None, new: PricedPlan) -> tuple[float, float]:
        """Return the seconds of (building groups, moving state).

        State moves if the depth changes, or if new pipelines need copies of the stages.
        """
        groups_s = self.physics.groups_s(new.pipelines, new.depth)
        if old is None:
            return groups_s + self.RENDEZVOUS_S, 0.0
        grows = new.nodes > old.nodes
        stage_s = self.transfer_s(self.world.state_bytes / new.depth)
        moves = new.depth != old.depth or new.pipelines > old.pipelines
        return groups_s + (self.RENDEZVOUS_S if grows else 0.0), stage_s if moves else 0.0

    def _choose(self, job: JobView) -> PricedPlan | None:
        old = self._plan.shape if self._plan else None
        return self._best_grid(len(job.alive), self.forecast(job), old)

    def _solve(
        self, nodes: int, forecast: tuple[int, ...], old: tuple[int, int] | None
    ) -> PricedPlan | None:
        """Return the grid for now with the most steps over the forecast, including migrations."""
        grids = {n: self._grids(n) for n in {nodes, *forecast}}
        by_shape = {grid.shape: grid for found in grids.values() for grid in found}
        later: dict[tuple[int, int], float] = {}  # steps in later intervals, by the shape before

        def steps(grid: PricedPlan, before: PricedPlan | None) -> float:
            return self._steps_per_interval(grid, before) + later.get(grid.shape, 0.0)

        for n in reversed(forecast):
            later = {
                shape: max((steps(grid, before) for grid in grids[n]), default=0.0)
                for shape, before in by_shape.items()
            }
        start = self.world.grid(old[0] * old[1], old[1]) if old else None
        return max(grids[nodes], key=lambda grid: steps(grid, start), default=None)

    def _steps_per_interval(self, grid: PricedPlan, before: PricedPlan | None) -> float:
        """Return the steps in one interval, after the migration from `before`."""
        if before is not None and grid.shape == before.shape:
            return INTERVAL_S / grid.step_s
        return max(0.0, INTERVAL_S - sum(self._migration_s(before, grid))) / grid.step_s

    def _grids(self, n: int) -> tuple[PricedPlan, ...]:
        """Return the best grid for `n` nodes, and the grids of some other depths."""
        best = self.world.varuna(n)
        if best is None:
            return ()
        depths = {best.depth - 1, best.depth + 1, best.depth + 2, 2 * best.depth}
        others = [self.world.grid(n, depth) for depth in depths if 0 < depth <= n]
        return best, *(grid for grid in others if grid is not None)


class ParcaeTrendPolicy(ParcaePolicy):
    """Parcae with a forecast from the trend of the last minutes."""

    about = PolicyDescription(
        name="parcae-fitted",
        what="as parcae, with a forecast from the last twelve minutes; losses that were not "
        "forecast cost the step",
        source="as parcae; the trend of the last twelve minutes in place of their ARIMA; a loss "
        "that was not forecast discards the running step",
    )

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._past: list[int] = []

    def forecast(self, job: JobView) -> tuple[int, ...]:
        """Return the number of nodes in each of the next minutes, from the trend of the last
        minutes if that falls."""
        self._past = [*self._past, len(job.alive)][-LOOK_AHEAD:]
        k = len(self._past)
        middle = (k - 1) / 2
        spread = sum((i - middle) ** 2 for i in range(k))
        slope = sum((i - middle) * n for i, n in enumerate(self._past)) / spread if spread else 0.0
        return tuple(
            max(1, round(len(job.alive) + min(0.0, slope) * (i + 1))) for i in range(LOOK_AHEAD)
        )

    def hits_used_nodes(self, job: JobView, lost: Sequence[Event]) -> bool:
        return PolicyBase.hits_used_nodes(self, job, lost)

    def _after_loss(self, job: JobView, lost: Sequence[Event]) -> Reconfiguration:
        change = super()._after_loss(job, lost)
        parts = pauses(detect_s=self.detect_s) + change.pauses
        return Reconfiguration(parts, change.setup, lost_ms=job.now, reason=change.reason)
