"""Parcae: forecast how many nodes there will be, take the grid with the most expected progress, move before losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from elastic_sim.steps.engine import Change, Job
from elastic_sim.steps.policies.base import About, Base, pauses
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import Running, World
from elastic_sim.traces.trace import ADD, Event, Trace

INTERVAL_S, AHEAD = 60.0, 12
"""Availability is forecast by the minute, twelve minutes ahead."""


class Parcae(Base):
    about = About(
        name="parcae",
        what="grid by expected progress over 12 minutes, perfect forecast; live migration before losses",
        source="Duan et al., NSDI 2024, github.com/JF-D/Parcae: minutes, twelve ahead; groups and state over the "
        "link as in physics (rendezvous 6.6 s when nodes are added); losses are known before they happen, so no step "
        "is lost; the state is also with its parameter servers on nodes of their own, which are not paid for here, and "
        "is read from there as from storage where no grid was left",
    )
    RENDEZVOUS_S = 6.6

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._grid: Running | None = None
        self._counts: list[int] = []
        self._trace: Trace | None = None
        self._best = lru_cache(maxsize=None)(self._solve)

    def know(self, trace: Trace) -> None:
        """The future, for the perfect forecast: nodes at the end of every minute."""
        self._trace = trace
        n, at, counts = 0, 0.0, list[int]()
        for event in trace.events:
            while event.seconds > at:
                counts.append(n)
                at += INTERVAL_S
            n += 1 if event.kind == ADD else -1
        while at <= trace.end_s + INTERVAL_S * AHEAD:
            counts.append(n)
            at += INTERVAL_S
        self._counts = counts

    def forecast(self, job: Job) -> tuple[int, ...]:
        """Nodes at the end of each of the coming minutes."""
        first = int(job.now / 1000 / INTERVAL_S) + 1
        seen = self._counts[first : first + AHEAD] or [len(job.alive)]
        return tuple(min(len(job.alive), n) if i == 0 else n for i, n in enumerate(seen))

    # ---- answers ----

    def begin(self, job: Job) -> Change:
        self.ask(INTERVAL_S, "minute")
        return self._adapt(job, "start")

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        if self._grid is not None and self._grid.nodes <= len(job.alive):
            return None if gone == () or not self._hit(job, gone) else self._unforeseen(job, gone)
        return self._unforeseen(job, gone) if gone else None

    def rang(self, job: Job, name: str) -> Change | None:
        self.ask(INTERVAL_S, "minute")
        if job.paused:
            return None
        grid = self._choose(job)
        if grid is self._grid or (grid and self._grid and _same(grid, self._grid)):
            return None
        return self._adapt(job, "forecast", grid)

    # ---- parts ----

    def _hit(self, job: Job, gone: Sequence[Event]) -> bool:
        """Nodes outside the grid are lost first, as Parcae moves what is about to go out of the grid."""
        return False

    def _unforeseen(self, job: Job, gone: Sequence[Event]) -> Change:
        """The grid does not fit any more: moved in the minute before, so nothing is lost but the move."""
        return self._adapt(job, f"{len(gone)} lost")

    def _adapt(self, job: Job, reason: str, grid: Running | None = None) -> Change:
        old, new = self._grid, grid or self._choose(job)
        self._grid = new
        setup = self.use(job, new)
        if new is None or setup is None:
            return Change((), None, reason=f"{reason}: too few nodes")
        groups, moved = self._cost_s(old, new)
        if old is None and job.steps:
            moved = self.world.checkpoint_s(len(job.alive))
        parts = pauses((Use.PLAN, groups), (Use.TRANSFER, moved))
        return Change(parts, setup, reason=reason)

    def _cost_s(self, old: Running | None, new: Running) -> tuple[float, float]:
        """(groups, state): another depth moves the state, another number of pipelines copies a stage to those new."""
        groups = self.physics.groups_s(new.pipelines, new.depth)
        if old is None:
            return groups + self.RENDEZVOUS_S, 0.0
        grows = new.nodes > old.nodes
        stage = self.moving_s(self.world.state_bytes / new.depth)
        moved = stage if new.depth != old.depth or new.pipelines > old.pipelines else 0.0
        return groups + (self.RENDEZVOUS_S if grows else 0.0), moved

    def _choose(self, job: Job) -> Running | None:
        coming = self.forecast(job)
        old = (self._grid.pipelines, self._grid.depth) if self._grid else None
        return self._best(len(job.alive), coming, old)

    def _solve(self, nodes: int, coming: tuple[int, ...], old: tuple[int, int] | None) -> Running | None:
        """Dynamic programme over the minutes: the grid now from which most samples are made, moves paid for."""
        grids = {n: self._grids(n) for n in {nodes, *coming}}
        value: dict[tuple[int, int], float] = {}
        for n in reversed(coming):
            value = {
                key: max(
                    (
                        self._minute(grid, now) + value.get((grid.pipelines, grid.depth), 0.0)
                        for grid in grids[n]
                    ),
                    default=0.0,
                )
                for key, now in {(g.pipelines, g.depth): g for ns in grids.values() for g in ns}.items()
            }
        start = self.world.grid(old[0] * old[1], old[1]) if old else None
        return max(
            grids[nodes],
            key=lambda g: self._minute(g, start) + value.get((g.pipelines, g.depth), 0.0),
            default=None,
        )

    def _minute(self, grid: Running, before: Running | None) -> float:
        """Steps of one minute, after the move."""
        if before is not None and _same(grid, before):
            return INTERVAL_S / grid.step_s
        return max(0.0, INTERVAL_S - sum(self._cost_s(before, grid))) / grid.step_s

    def _grids(self, n: int) -> tuple[Running, ...]:
        """The best grid that fits, and those of some other depths; fewer pipelines are allowed."""
        best = self.world.varuna(n)
        if best is None:
            return ()
        found = [best]
        for depth in {best.depth - 1, best.depth + 1, best.depth + 2, 2 * best.depth}:
            grid = self.world.grid(n, depth) if 0 < depth <= n else None
            if grid is not None:
                found.append(grid)
        return tuple(found)


class ParcaeFitted(Parcae):
    about = About(
        name="parcae-fitted",
        what="as parcae, with a forecast from the last twelve minutes; losses not foreseen cost the step",
        source="as parcae; the trend of the last twelve minutes in place of their ARIMA; a loss that was not foreseen "
        "discards the running step",
    )

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._seen: list[int] = []

    def know(self, trace: Trace) -> None:
        """Nothing of the future."""

    def forecast(self, job: Job) -> tuple[int, ...]:
        """The line through the last twelve minutes, from what is there now."""
        self._seen = [*self._seen, len(job.alive)][-AHEAD:]
        k = len(self._seen)
        middle = (k - 1) / 2
        spread = sum((i - middle) ** 2 for i in range(k))
        slope = sum((i - middle) * n for i, n in enumerate(self._seen)) / spread if spread else 0.0
        return tuple(max(1, round(len(job.alive) + min(0.0, slope) * (i + 1))) for i in range(AHEAD))

    def _hit(self, job: Job, gone: Sequence[Event]) -> bool:
        used = self._grid.nodes if self._grid else 0
        n = len(job.alive) + len(gone)
        return any(self.draw.random() < used / n for _ in gone)

    def _unforeseen(self, job: Job, gone: Sequence[Event]) -> Change:
        change = self._adapt(job, f"{len(gone)} lost")
        parts = pauses((Use.DETECT, self.detect_s)) + change.pauses
        return Change(parts, change.setup, lost_ms=job.now, reason=change.reason)


def _same(a: Running, b: Running) -> bool:
    return (a.pipelines, a.depth) == (b.pipelines, b.depth)
