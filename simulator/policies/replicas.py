"""Systems that keep going with what is left, because others hold the same layers or computed ahead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from simulator.account import Use
from simulator.engine import Change, Job, Setup
from simulator.policies.base import About, Base, ms, pauses
from simulator.trace import Event
from simulator.world import Running, World


class Oobleck(Base):
    """Pipelines from templates, two of them at least; a loss costs the running iteration and a regrouping."""

    about = About(
        name="oobleck",
        what="heterogeneous pipelines from templates; the running iteration is redone",
        source="Jang et al., SOSP 2023; lease of 5 s from their 2026 refactor; copying and groups as physics has it "
        "(measured by others: 57 s for a loss, TrainMover); nodes that come wait for the next loss, as in the artifact",
    )
    detect_s = 5.0

    def begin(self, job: Job) -> Change:
        return Change(setup=self._regroup(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        if not gone:
            return self._again(job, "nodes came") if job.setup is None else None
        running = self._running
        if running is not None and self._beyond(running, len(job.alive) + len(gone), len(gone)):
            return self._from_checkpoint(job, f"{len(gone)} lost, no replica left")
        return self._again(job, f"{len(gone)} lost")

    def _again(self, job: Job, reason: str) -> Change:
        """The iteration is redone whole by new pipelines; the slowest copy is a whole stage."""
        setup, running = self._regroup(job), self._running
        if running is None:
            return Change(pauses((Use.DETECT, self.detect_s)), None, lost_ms=job.now, reason=reason)
        groups = self.physics.groups_s(running.pipelines, running.depth)
        copied = self.moving_s(self.world.state_bytes / running.depth)
        parts = pauses(
            (Use.DETECT, self.detect_s), (Use.PLAN, self.physics.decide_s + groups), (Use.TRANSFER, copied)
        )
        return Change(parts, setup, lost_ms=job.now, reason=reason)

    def _from_checkpoint(self, job: Job, reason: str) -> Change:
        """It has none of its own: the last one an hour ago at most is assumed."""
        setup = self._regroup(job)
        restart = self.physics.restart_s(self.world.devices(len(job.alive)))
        parts = pauses(
            (Use.DETECT, self.detect_s),
            (Use.PLAN, restart),
            (Use.TRANSFER, self.world.checkpoint_s(len(job.alive))),
        )
        return Change(parts if setup else parts[:1], setup, back_to=self._hour_ago(job), reason=reason)

    def _hour_ago(self, job: Job) -> int:
        if self._plain is None:
            return job.steps
        return max(0, job.steps - (job.steps % max(1, 3_600_000 // self._plain.step_ms)))

    def _beyond(self, running: Running, before: int, lost: int) -> bool:
        """Whether all replicas of a layer are gone: in every pipeline, the stage that holds it."""
        k = running.pipelines
        if lost < k:
            return False
        if k == 1:
            return any(self.draw.random() < running.nodes / before for _ in range(lost))
        hit = sorted(self.draw.sample(range(before), min(lost, before)))
        rows = [
            {n % running.depth for n in hit if n < running.nodes and n // running.depth == p}
            for p in range(k)
        ]
        return bool(set.intersection(*rows))

    def _regroup(self, job: Job) -> Setup | None:
        self._running = self.world.oobleck(len(job.alive))
        return self.use(job, self._running)


class Bamboo(Base):
    """Every node also runs its successor's forward pass; its predecessor takes over from who is lost."""

    about = About(
        name="bamboo",
        what="redundant computation by neighbours; adjacent losses restart everybody",
        source="Thorpe et al., NSDI 2023: depth 1.5 times the plain one, +19.8 % without failures (BERT), 1.5 times "
        "the step until rebalanced; etcd TTL 10 s; checkpoints as checkpoint's every hour",
    )
    detect_s = 10.0
    OVERHEAD, TAKEN_OVER, DEEPER = 0.198, 1.5, 1.5

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._depth, self._slower = 0, False

    def begin(self, job: Job) -> Change:
        return Change(setup=self._grid(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        n = len(job.alive)
        if gone:
            pairs = self._adjacent(n + len(gone), len(gone))
            if pairs or self._plain is None or n < self._depth:
                return self._restart(job, f"{len(gone)} lost, adjacent" if pairs else "too few nodes")
            slower = self._plain.step_ms * (1 if self._slower else self.TAKEN_OVER)
            self._slower = True
            parts = pauses(
                (Use.DETECT, self.detect_s),
                (Use.PLAN, self.physics.decide_s + self.physics.groups_s(n // self._depth, self._depth)),
            )
            setup = self.change_plain(job, step_ms=round(slower), nodes=min(self._plain.nodes, n))
            return Change(parts, setup, reason=f"{len(gone)} lost: predecessors take over")
        if self._plain is None:
            return self._restart(job, "nodes came", detect_s=0.0)
        return None

    def stepped(self, job: Job) -> Change | None:
        """Rebalanced when replacements are there, or a pipeline less does."""
        if not self._slower:
            return None
        setup = self._grid(job)
        if setup is None:
            return None
        copied = self.moving_s(2 * self.world.state_bytes / self._depth)
        groups = self.physics.groups_s(len(job.alive) // self._depth, self._depth)
        parts = pauses((Use.PLAN, self.physics.decide_s + groups), (Use.TRANSFER, copied))
        return Change(parts, setup, reason="rebalanced")

    def _adjacent(self, before: int, lost: int) -> bool:
        if lost < 2:
            return False
        hit = sorted(self.draw.sample(range(before), min(lost, before)))
        return any(b - a == 1 and b % self._depth for a, b in pairwise(hit))

    def _restart(self, job: Job, reason: str, detect_s: float | None = None) -> Change:
        setup = self._grid(job)
        parts = pauses(
            (Use.DETECT, self.detect_s if detect_s is None else detect_s),
            (Use.PLAN, self.physics.restart_s(self.world.devices(len(job.alive)))),
            (Use.TRANSFER, self.world.checkpoint_s(len(job.alive))),
        )
        per_hour = 3_600_000 // self._plain.step_ms if self._plain else 1
        back = job.steps - job.steps % max(1, per_hour)
        return Change(parts if setup else parts[:1], setup, back_to=back, reason=reason)

    def _grid(self, job: Job) -> Setup | None:
        self._slower = False
        if not self._depth and (plain := self.world.varuna(len(job.alive))):
            self._depth = min(ceil(self.DEEPER * plain.depth), self.world.spec.n_layers - 2)
        running = self.world.grid(len(job.alive), self._depth) if self._depth else None
        setup = self.use(job, running)
        if setup is None or running is None or self._too_large(running):
            self._plain = None
            return None
        longer = round(setup.step_ms * (1 + self.OVERHEAD))
        return self.change_plain(job, step_ms=longer, redundant=self.OVERHEAD / (1 + self.OVERHEAD))

    def _too_large(self, running: Running) -> bool:
        """Every node holds two stages' parameters and optimizer state."""
        memory = self.world.profile.devices[0].memory_bytes
        for pipeline in running.plan.pipelines[:1]:
            layers = self.world.profile.layers
            held = [
                sum(la.param_bytes + la.state_bytes + la.gradient_bytes for la in layers[s.first : s.last])
                for s in pipeline.stages
            ]
            both = max(
                (held[i] + held[(i + 1) % len(held)]) / self.world.profile.tp for i in range(len(held))
            )
            return bool(memory) and both > memory
        return False


class ReCycle(Base):
    """The grid of the start; a lost worker's micro-batches go to its data-parallel peers, into bubbles."""

    about = About(
        name="recycle",
        what="micro-batches of lost workers go to peers of the same stage",
        source="Gandhi et al., SOSP 2024, modelled from the abstract: with d of D peers of a stage lost a step takes "
        "at least max(m + p - 1, m D / (D - d)) t; a stage without peers: restart from a checkpoint as old as an "
        "hour at most; detection assumed",
    )
    detect_s = 5.0

    def begin(self, job: Job) -> Change:
        return Change(setup=self._grid(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        running = self._running
        if running is None:
            return self._restart(job, "nodes came" if came else "too few nodes")
        for event in gone:
            self._places.pop(event.node, None)
        gap = self._gaps(running)
        if gone and max(gap) >= running.pipelines:
            return self._restart(job, "a stage lost all its peers")
        return self._fill(job, came, bool(gone))

    def _fill(self, job: Job, came: Sequence[Event], lost: bool) -> Change:
        """Nodes that are free take the places of those lost: copies from a peer of the stage."""
        running = self._running
        assert running is not None
        free = [n for n in job.alive if n not in self._places]
        taken = set(self._places.values())
        holes = [place for place in range(running.nodes) if place not in taken]
        self._places.update(zip(free, holes, strict=False))
        worst = max(self._gaps(running))
        d, m = running.pipelines, self.world.spec.n_microbatches / running.pipelines
        full = m + running.depth - 1
        longer = max(full, m * d / (d - worst)) / full
        setup = self.change_plain(job, step_ms=round(ms(running.step_s) * longer), nodes=len(self._places))
        copied = self.moving_s(self.world.state_bytes / running.depth) if free and holes else 0.0
        groups = self.physics.groups_s(running.pipelines, running.depth)
        parts = pauses(
            (Use.DETECT, self.detect_s if lost else 0.0),
            (Use.PLAN, self.physics.decide_s + groups),
            (Use.TRANSFER, copied),
        )
        one = ms(running.pace_s * running.depth)
        return Change(parts, setup, lost_ms=one if lost else 0, reason=f"{worst} of {d} peers lost at most")

    def _gaps(self, running: Running) -> list[int]:
        """Lost workers of each stage."""
        gaps = [running.pipelines] * running.depth
        for place in self._places.values():
            gaps[place % running.depth] -= 1
        return gaps

    def _restart(self, job: Job, reason: str) -> Change:
        before = self._plain
        setup = self._grid(job)
        parts = pauses(
            (Use.DETECT, self.detect_s),
            (Use.PLAN, self.physics.restart_s(self.world.devices(len(job.alive)))),
            (Use.TRANSFER, self.world.checkpoint_s(len(job.alive))),
        )
        per_hour = 3_600_000 // before.step_ms if before else 1
        back = job.steps - job.steps % max(1, per_hour)
        return Change(parts if setup else parts[:1], setup, back_to=back, reason=reason)

    def _grid(self, job: Job) -> Setup | None:
        self._running = self.world.varuna(len(job.alive))
        places = self._running.nodes if self._running else 0
        self._places = {node: place for place, node in enumerate(list(job.alive)[:places])}
        return self.use(job, self._running)


class TorchFT(Base):
    """Replica groups; a failure discards the step, and its group waits for a node."""

    about = About(
        name="torchft",
        what="replica groups; a failure discards the running step, the batch shrinks meanwhile",
        source="torchft: heartbeat 5 s, our run 4.9 s to the next step; groups of the plain grid's depth; nodes that "
        "are free fill up groups and heal from a peer; samples a step in proportion to the groups alive",
    )
    detect_s = 4.9

    def begin(self, job: Job) -> Change:
        grid = self.world.varuna(len(job.alive))
        self._depth = grid.depth if grid else 0
        self._grid = grid
        return Change(setup=self._groups(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        if self._grid is None:
            return self.begin(job)
        before = self._plain
        setup = self._groups(job)
        if setup == before and not gone:
            return None
        grown = setup is not None and (before is None or setup.nodes > before.nodes)
        copied = self.moving_s(self.world.state_bytes / self._depth) if grown or gone else 0.0
        parts = pauses(
            (Use.DETECT, self.detect_s if gone else 0.0),
            (Use.PLAN, self.physics.groups_s(len(job.alive) // self._depth, self._depth)),
            (Use.TRANSFER, copied),
        )
        if setup is None or before is None:  # nobody was left who has the state
            return self._restart(job, setup)
        return Change(
            parts, setup, lost_ms=job.now if gone else 0, reason=f"{len(gone)} lost, {len(came)} came"
        )

    def _restart(self, job: Job, setup: Setup | None) -> Change:
        parts = pauses(
            (Use.PLAN, self.physics.restart_s(self.world.devices(len(job.alive)))),
            (Use.TRANSFER, self.world.checkpoint_s(len(job.alive))),
        )
        step_ms = ms(self._grid.step_s) if self._grid else 1
        back = job.steps - job.steps % max(1, 3_600_000 // max(1, step_ms))
        return Change(parts if setup else (), setup, back_to=back, reason="no replica group is whole")

    def _groups(self, job: Job) -> Setup | None:
        """Each group does its share of the full batch; groups that are not whole do nothing."""
        grid = self._grid
        whole = min(len(job.alive) // self._depth, grid.pipelines) if grid else 0
        if grid is None or whole == 0:
            self._plain = None
            return None
        share = self.world.samples * whole // grid.pipelines
        self.use(job, grid, samples=share, text=f"{whole} of {grid.pipelines} groups of {self._depth}")
        return self.change_plain(job, nodes=whole * self._depth)
