"""Systems that keep going with what is left, because others hold the same layers or computed ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from elastic_sim.steps.engine import Change, Job, Setup
from elastic_sim.steps.policies.base import About, Base, ms, pauses
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import Running, World
from elastic_sim.traces.trace import Event


class Oobleck(Base):
    """Pipelines from templates, two of them at least; a loss costs the running iteration and a regrouping."""

    about = About(
        name="oobleck",
        what="heterogeneous pipelines from templates; the running iteration is redone",
        source="Jang et al., SOSP 2023; lease of 5 s from their 2026 refactor; copying and groups as physics has it "
        "(measured by others: 57 s for a loss, TrainMover); nodes that come enter at the end of a step where that pays",
    )
    detect_s = 5.0

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._cold = False
        """Nobody has the whole state: it is read from storage."""

    def begin(self, job: Job) -> Change:
        return Change(setup=self._regroup(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        if not gone and job.setup is not None:
            return None
        self._losses += bool(gone)
        self._cold |= not job.alive
        if self._cold:
            return self.from_storage(job, self._regroup(job), gone)
        if not gone:
            return self._again(job, "nodes came")
        running = self._running
        if running is not None and len(job.alive) >= running.nodes and not self.hits(job, gone):
            return None  # nodes that were not used
        if running is not None and self._beyond(running, len(job.alive) + len(gone), len(gone)):
            self._cold = True
            return self.from_checkpoint(job, self._regroup(job), f"{len(gone)} lost, no replica left")
        return self._again(job, f"{len(gone)} lost")

    def stepped(self, job: Job) -> Change | None:
        """Nodes that came enter at the end of a step, where that pays: kinder than the artifact."""
        self._cold = False
        self.checkpoint_beside(job)
        then = self.world.oobleck(len(job.alive))
        if self._running is None or then is None or len(job.alive) <= self._running.nodes:
            return None
        groups, copied = self._moves_s(then)
        if not self.pays(job, then, groups + copied):
            return None
        return Change(
            pauses((Use.PLAN, groups), (Use.TRANSFER, copied)), self._regroup(job), reason="nodes came"
        )

    def _moves_s(self, running: Running) -> tuple[float, float]:
        """Groups; the slowest copy, a whole stage."""
        groups = self.physics.decide_s + self.physics.groups_s(running.pipelines, running.depth)
        return groups, self.moving_s(self.world.state_bytes / running.depth)

    def _again(self, job: Job, reason: str) -> Change:
        """The iteration is redone whole by new pipelines."""
        setup, running = self._regroup(job), self._running
        if running is None:
            return Change(pauses((Use.DETECT, self.detect_s)), None, lost_ms=job.now, reason=reason)
        groups, copied = self._moves_s(running)
        parts = pauses((Use.DETECT, self.detect_s), (Use.PLAN, groups), (Use.TRANSFER, copied))
        return Change(parts, setup, lost_ms=job.now, reason=reason)

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
        "the step until rebalanced; etcd TTL 10 s; a durable checkpoint beside training as ours",
    )
    detect_s = 10.0
    OVERHEAD, TAKEN_OVER, DEEPER = 0.198, 1.5, 1.5

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._depth, self._slower = 0, False
        self._places: dict[str, int] = {}
        """Node: its place in the grid, pipeline by pipeline."""
        self._holes: set[int] = set()
        """Places whose predecessors have taken over, until the grid is rebalanced."""

    def begin(self, job: Job) -> Change:
        return Change(setup=self._grid(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        n = len(job.alive)
        if gone:
            self._losses += 1
            used = [place for e in gone if (place := self._places.pop(e.node, None)) is not None]
            if self._plain is not None and not used:
                return None  # nodes that were not used
            self._holes.update(used)
            pairs = any(place % self._depth and place - 1 in self._holes for place in self._holes)
            if pairs or self._plain is None or n < self._depth:
                return self._restart(job, f"{len(gone)} lost, adjacent" if pairs else "too few nodes")
            slower = self._plain.step_ms * (1 if self._slower else self.TAKEN_OVER)
            self._slower = True
            parts = pauses(
                (Use.DETECT, self.detect_s),
                (Use.PLAN, self.physics.decide_s + self.physics.groups_s(n // self._depth, self._depth)),
            )
            setup = self.change_plain(job, step_ms=round(slower), nodes=len(self._places))
            return Change(parts, setup, reason=f"{len(gone)} lost: predecessors take over")
        if self._plain is None:
            return self._restart(job, "nodes came", detect_s=0.0)
        return None

    def stepped(self, job: Job) -> Change | None:
        """Rebalanced when replacements are there, a pipeline less does, or one more pays."""
        self.checkpoint_beside(job)
        if not self._depth:
            return None
        copied = self.moving_s(2 * self.world.state_bytes / self._depth)
        groups = self.physics.decide_s + self.physics.groups_s(len(job.alive) // self._depth, self._depth)
        if not self._slower:
            then = self.world.grid(len(job.alive), self._depth)
            if then is None or self._plain is None or then.nodes <= self._plain.nodes:
                return None
            if not self.pays(job, replace(then, step_s=then.step_s * (1 + self.OVERHEAD)), groups + copied):
                return None
        setup = self._grid(job)
        if setup is None:
            return None
        return Change(pauses((Use.PLAN, groups), (Use.TRANSFER, copied)), setup, reason="rebalanced")

    def _restart(self, job: Job, reason: str, detect_s: float | None = None) -> Change:
        return self.from_checkpoint(job, self._grid(job), reason, detect_s=detect_s)

    def _grid(self, job: Job) -> Setup | None:
        self._slower = False
        self._places, self._holes = {}, set()
        if not self._depth and (plain := self.world.varuna(len(job.alive))):
            self._depth = min(ceil(self.DEEPER * plain.depth), self.world.spec.n_layers - 2)
        running = self.world.grid(len(job.alive), self._depth) if self._depth else None
        setup = self.use(job, running)
        if setup is None or running is None or self._too_large(running):
            self._plain = None
            return None
        self._places = {node: place for place, node in enumerate(list(job.alive)[: running.nodes])}
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
        self._losses += bool(gone)
        used = [event.node for event in gone if self._places.pop(event.node, None) is not None]
        holes = len(self._places) < running.nodes
        if not used and not (came and holes):
            return None  # nodes that are not used
        gap = self._gaps(running)
        if gone and max(gap) >= running.pipelines:
            return self._restart(job, "a stage lost all its peers")
        return self._fill(job, came, bool(used))

    def stepped(self, job: Job) -> Change | None:
        """Another grid, by a checkpoint and a restart, where many more nodes are there and it pays."""
        self.checkpoint_beside(job)
        return self.regrid(job, self.world.varuna(len(job.alive)), self._running, self._grid)

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
        return self.from_checkpoint(job, self._grid(job), reason)

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
        return Change(setup=self._anew(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        if self._grid is None:
            return self.begin(job)
        before = self._plain
        self._losses += bool(gone)
        spared = before is not None and len(job.alive) >= before.nodes and not (gone and self.hits(job, gone))
        setup = self._groups(job)
        if setup == before and (not gone or spared):
            return None
        grown = setup is not None and (before is None or setup.nodes > before.nodes)
        copied = self.moving_s(self.world.state_bytes / self._depth) if grown else 0.0
        parts = pauses(
            (Use.DETECT, self.detect_s if gone else 0.0),
            (Use.PLAN, self.physics.groups_s(len(job.alive) // self._depth, self._depth)),
            (Use.TRANSFER, copied),
        )
        if setup is None or before is None:  # nobody was left who has the state
            return self.from_checkpoint(job, setup, "no replica group is whole", detect_s=0.0)
        return Change(
            parts, setup, lost_ms=job.now if gone else 0, reason=f"{len(gone)} lost, {len(came)} came"
        )

    def stepped(self, job: Job) -> Change | None:
        """Groups of another depth, or more of them, by a checkpoint and a restart, where it pays."""
        self.checkpoint_beside(job)
        return self.regrid(job, self.world.varuna(len(job.alive)), self._grid, self._anew)

    def _anew(self, job: Job) -> Setup | None:
        self._grid = self.world.varuna(len(job.alive))
        self._depth = self._grid.depth if self._grid else 0
        return self._groups(job)

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
