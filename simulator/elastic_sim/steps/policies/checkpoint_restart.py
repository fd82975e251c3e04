"""Systems that stop all nodes after a loss and restart from a checkpoint.

`CheckpointRestartPolicy` is torchrun with Megatron, `SparesPolicy` adds nodes that wait. Varuna and
Gemini (varuna.py, gemini.py) derive from it.

Checkpoints are asynchronous, as the documents of these systems recommend. Training waits while all
devices copy the state to host memory, and continues while it is written. A restart uses the newest
checkpoint whose write is complete; it ends a running write. Sources:

- Megatron: NeMo Distributed Checkpoint User Guide (the state is copied to the CPU first and
  persisted in the background; each rank saves its own part); option --async-save.
- Varuna: docs/morphing.rst of github.com/microsoft/varuna (background copying and sharding are
  recommended); varuna/checkpoint.py loads only complete checkpoints.

Assumed: one write at a time, no slowdown of training by it, and Varuna's local directory is as fast
as host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses, to_ms
from elastic_sim.steps.world import PricedPlan, SimulatedWorld
from elastic_sim.traces.trace import Event


class CheckpointRestartPolicy(PolicyBase):
    """torchrun with Megatron: periodic checkpoints; after a loss, a restart on the best grid."""

    about = PolicyDescription(
        name="checkpoint",
        what="restart from a durable checkpoint, grid chosen again",
        source="torchrun with Megatron: a loss is detected after 15 s; asynchronous checkpoints "
        "(NeMo Distributed Checkpoint User Guide, --async-save): training waits for the copy to "
        "host memory alone; interval sqrt(2 C M) (Young 1974) with C of the copy, but not shorter "
        "than a write; restart times of ByteRobust and Varuna",
    )
    detect_s = 15.0

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self.saved_step = 0
        """Step of the newest complete checkpoint."""
        self._write: tuple[int, int] | None = None
        """(step, completion in milliseconds) of the checkpoint that is being written."""
        self._last_checkpoint_ms = 0
        self._planned_for = 0
        """Number of nodes that the running grid was chosen for."""

    # ---- rules that subclasses change ----

    def plan_for(self, nodes: int) -> PricedPlan | None:
        return self.world.varuna(nodes)

    def checkpoint_due(self, job: JobView) -> bool:
        """Return whether Young's interval for the losses so far has passed.

        One loss in an hour is assumed before the start."""
        mtbf_s = (job.now / 1000 + 3600.0) / (self._loss_events + 1)
        interval_s = sqrt(2 * self.copy_s(job) * mtbf_s)
        return job.now - self._last_checkpoint_ms >= 1000 * interval_s

    def read_s(self, job: JobView) -> float:
        """Return the seconds to load a checkpoint."""
        return self.checkpoint_s(job)

    def save_s(self, job: JobView) -> float:
        """Return the seconds to save the state before a restart that is planned."""
        return self.checkpoint_s(job)

    def step_after_restart(self, job: JobView) -> int:
        return min(self.saved_step, job.steps)

    def should_grow(self, job: JobView) -> bool:
        """Return whether a restart with the nodes that joined pays off."""
        n = len(job.alive)
        larger = self.plan_for(n) if n > self._planned_for else None
        return self.pays_off(job, larger, self.planned_restart_s(job))

    # ---- events ----

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        self._complete_write(job)
        if lost:
            self._loss_events += 1
            enough = self._nominal is not None and len(job.alive) >= self._nominal.nodes
            if enough and not self.hits_used_nodes(job, lost):
                return None
            return self.restart(job, f"{len(lost)} lost")
        return self.restart(job, "nodes joined", loss=False) if job.setup is None else None

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        self._complete_write(job)
        if self._write is not None or not self.checkpoint_due(job):
            return None
        if self.should_grow(job):
            self.saved_step = job.steps
            return self.restart(job, "nodes joined", loss=False, write_s=self.save_s(job))
        return self.write_checkpoint(job)

    # ---- parts ----

    def write_checkpoint(self, job: JobView, reason: str = "checkpoint") -> Reconfiguration:
        """Return the pause for the copy to host memory, after which the write begins.

        A write that is running ends unfinished.
        """
        parts = pauses(write_s=self.copy_s(job))
        self._last_checkpoint_ms = job.now + sum(length for _, length in parts)
        self._write = job.steps, self._last_checkpoint_ms + to_ms(self.checkpoint_s(job))
        return Reconfiguration(parts, self.with_stragglers(job), reason=reason)

    @property
    def newest_checkpoint(self) -> int:
        """Step of the newest checkpoint, whether its write is complete or not."""
        return self._write[0] if self._write else self.saved_step

    def copy_s(self, job: JobView) -> float:
        """Return the seconds that training waits for a checkpoint."""
        return self.world.host_copy_s(len(job.alive))

    def planned_restart_s(self, job: JobView) -> float:
        """Return the seconds of a restart without a loss."""
        return self.save_s(job) + self.restart_s(job) + self.read_s(job)

    def restart(
        self, job: JobView, reason: str, *, loss: bool = True, write_s: float = 0.0
    ) -> Reconfiguration:
        """Return a restart of all processes from the newest complete checkpoint."""
        self._write = None
        setup = self.start(job)
        parts = pauses(
            detect_s=self.detect_s if loss else 0.0,
            write_s=write_s,
            plan_s=self.restart_s(job),
            transfer_s=self.read_s(job),
        )
        self._last_checkpoint_ms = job.now + sum(length for _, length in parts)
        back_to = self.step_after_restart(job)
        return Reconfiguration(parts if setup else parts[:1], setup, back_to=back_to, reason=reason)

    def start(self, job: JobView) -> Setup | None:
        self._planned_for = len(job.alive)
        return self.run_plan(job, self.plan_for(len(job.alive)))

    def _complete_write(self, job: JobView) -> None:
        if self._write is not None and job.now >= self._write[1]:
            self.saved_step, self._write = self._write[0], None


class SparesPolicy(CheckpointRestartPolicy):
    """A fixed grid on 90 % of the nodes; the others wait as spares."""

    about = PolicyDescription(
        name="spares",
        what="a grid on 9 of 10 nodes; restart with a spare; another grid when no spare is left",
        source="static over-provisioning (10 % spares: assumed); checkpoints and restarts as in "
        "the policy checkpoint",
    )
    SPARE_SHARE = 0.1

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._grid: PricedPlan | None = None

    def plan_for(self, nodes: int) -> PricedPlan | None:
        """Return the fixed grid, or a smaller one when its spares are used up."""
        if self._grid is None or nodes < self._grid.nodes:
            self._grid = self._grid_with_spares(nodes)
        return self._grid

    def should_grow(self, job: JobView) -> bool:
        larger = self._grid_with_spares(len(job.alive))
        grows = self.pays_off(job, larger, self.planned_restart_s(job))
        if grows:
            self._grid = larger
        return grows

    def _grid_with_spares(self, nodes: int) -> PricedPlan | None:
        return self.world.varuna(nodes - ceil(self.SPARE_SHARE * nodes))
