"""Systems that stop everybody and start again from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from elastic_sim.steps.engine import Change, Job, Setup
from elastic_sim.steps.policies.base import About, Base, pauses
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import Running, World
from elastic_sim.traces.trace import Event


class Restarting(Base):
    """A checkpoint now and then; after a loss everybody starts again, with the best grid for who is there."""

    about = About(
        name="checkpoint",
        what="restart from a durable checkpoint, grid chosen anew",
        source="torchrun with Megatron: a node is missed after 15 s; interval sqrt(2 C M), Young 1974; restart times "
        "as ByteRobust's and Varuna's",
    )
    detect_s = 15.0

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self.saved = 0
        """Steps in the newest complete checkpoint."""
        self._writing: tuple[int, int] | None = None
        """(step, when it will be complete)."""
        self._last_at = 0
        self._nodes = 0
        """That the running grid was chosen for."""

    # ---- the rules ----

    def plan(self, nodes: int) -> Running | None:
        return self.world.varuna(nodes)

    def interval_s(self, job: Job) -> float:
        """Young's interval from the losses seen so far, one being expected an hour at first."""
        mtbf_s = (job.now / 1000 + 3600.0) / (self._losses + 1)
        return sqrt(2 * self.world.checkpoint_s(len(job.alive)) * mtbf_s)

    def due(self, job: Job) -> bool:
        return job.now - self._last_at >= 1000 * self.interval_s(job)

    def write_s(self, job: Job) -> float:
        """How long training stands still for a checkpoint."""
        return self.world.checkpoint_s(len(job.alive))

    def read_s(self, job: Job) -> float:
        return self.world.checkpoint_s(len(job.alive))

    def worth_growing(self, job: Job) -> bool:
        """Whether nodes that came are worth a restart: after the next checkpoint, if it pays until the next loss."""
        now, then = self._plain, self.plan(len(job.alive))
        if now is None or then is None or len(job.alive) <= self._nodes:
            return False
        pause_s = self.physics.restart_s(self.world.devices(len(job.alive))) + self.read_s(job)
        return self.pays(job, then, pause_s)

    # ---- answers ----

    def begin(self, job: Job) -> Change:
        return Change(setup=self._start(job))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        self._complete(job)
        if gone:
            self._losses += 1
            if self._plain is not None and len(job.alive) >= self._plain.nodes and not self.hits(job, gone):
                return None  # nodes that were not used
            return self.restart(job, f"{len(gone)} lost")
        return self.restart(job, "nodes came", detect_s=0.0) if job.setup is None else None

    def stepped(self, job: Job) -> Change | None:
        self._complete(job)
        if not self.due(job):
            return None
        if self.worth_growing(job):
            write = self.write_s(job)
            self.saved = job.steps
            return self.restart(job, "nodes came", detect_s=0.0, write_s=write)
        return self.write(job)

    # ---- parts ----

    def write(self, job: Job, reason: str = "checkpoint") -> Change:
        seconds = self.write_s(job)
        self._writing = (job.steps, job.now + round(1000 * seconds))
        self._last_at = self._writing[1]
        return Change(pauses((Use.TRANSFER, seconds)), self.paced(job), reason=reason)

    def restart(
        self, job: Job, reason: str, *, detect_s: float | None = None, write_s: float = 0.0
    ) -> Change:
        """All processes anew, from the newest complete checkpoint."""
        self._writing, self._last_at = None, job.now
        setup = self._start(job)
        starting = self.physics.restart_s(self.world.devices(len(job.alive)))
        parts = pauses(
            (Use.DETECT, self.detect_s if detect_s is None else detect_s),
            (Use.TRANSFER, write_s),
            (Use.PLAN, starting),
            (Use.TRANSFER, self.read_s(job)),
        )
        self._last_at = job.now + sum(length for _, length in parts)
        return Change(parts if setup else parts[:1], setup, back_to=self.back_to(job), reason=reason)

    def back_to(self, job: Job) -> int:
        return min(self.saved, job.steps)

    def _start(self, job: Job) -> Setup | None:
        self._nodes = len(job.alive)
        return self.use(job, self.plan(len(job.alive)))

    def _complete(self, job: Job) -> None:
        if self._writing is not None and job.now >= self._writing[1]:
            self.saved, self._writing = self._writing[0], None


class Varuna(Restarting):
    about = About(
        name="varuna",
        what="restart at a new (P, D) from the last checkpoint, every 10 steps; checkpoint first when told",
        source="Athlur et al., EuroSys 2022; every 10 steps as in Oobleck's artifact; notices polled "
        "every 5 s",
    )
    detect_s = 5.0

    def due(self, job: Job) -> bool:
        return job.steps % 10 == 0

    def told(self, job: Job, going: Sequence[Event]) -> Change | None:
        """As late as it can be whole in time, the last finished step is written."""
        left_s = min(event.seconds for event in going) - job.now / 1000
        self.ask(max(0.0, left_s - self.write_s(job) - 0.5), "notice")
        return None

    def rang(self, job: Job, name: str) -> Change | None:
        self._complete(job)
        if job.paused or job.setup is None or self.saved == job.steps:
            return None
        return self.write(job, "told of a loss: checkpoint")


class VarunaKept(Varuna):
    about = About(
        name="varuna-no-rollback",
        what="as varuna, and nothing is lost by going back",
        source="as varuna; Oobleck's authors switch the rollback off on the real traces for three models",
    )

    def back_to(self, job: Job) -> int:
        return job.steps


class Gemini(Restarting):
    about = About(
        name="gemini",
        what="checkpoint in a peer's memory at every step; restart from it",
        source="Wang et al., SOSP 2023: T_wasted = t_ckpt + 1/(2f) + t_retrieve, f once a step, t_ckpt hidden; nodes "
        "in pairs keep each other's state, and when both of a pair go, everybody reads the durable checkpoint, written "
        "beside training as ours; restart as checkpoint's",
    )
    detect_s = 15.0

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._peers: dict[str, str] = {}
        """Who keeps whose state, since the last step."""
        self._lost: set[str] = set()
        """Of these, who went since then."""
        self._cold = False
        """Nobody's memory has the state: it is read from storage."""

    def due(self, job: Job) -> bool:
        return False

    def hits(self, job: Job, gone: Sequence[Event]) -> bool:
        return any(event.node in self._peers for event in gone) if self._peers else super().hits(job, gone)

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        self._lost |= {event.node for event in gone} & self._peers.keys()
        self._cold |= any(self._peers[node] in self._lost for node in self._lost)
        if not self._cold:
            return super().changed(job, came, gone)
        if not gone and job.setup is not None:
            return None
        self._losses += bool(gone)
        change = self.from_storage(job, self._start(job), gone)
        self.saved = change.back_to
        return change

    def stepped(self, job: Job) -> Change | None:
        self.checkpoint_beside(job)
        self.saved, self._cold, self._lost = job.steps, False, set()
        self._peers = _in_pairs(list(job.alive)[: self._plain.nodes if self._plain else 0])
        return self.restart(job, "nodes came", detect_s=0.0) if self.worth_growing(job) else None

    def read_s(self, job: Job) -> float:
        """Everybody from a peer's memory."""
        return self.moving_s(self.world.state_bytes / max(1, len(job.alive)))


def _in_pairs(nodes: Sequence[str]) -> dict[str, str]:
    """Two and two; of an odd number the last one's state is with the one before. One alone has nobody: itself."""
    pairs = {}
    for i, node in enumerate(nodes):
        other = i ^ 1
        pairs[node] = nodes[other if other < len(nodes) else max(0, i - 1)]
    return pairs


class Spares(Restarting):
    about = About(
        name="spares",
        what="a grid on 9 nodes of 10, the others wait; restart with a spare; another grid when none is left",
        source="static over-provisioning (10 % spares: assumed); checkpoints and restarts as checkpoint's",
    )
    SHARE = 0.1

    def __init__(self, world: World, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._fixed: Running | None = None

    def plan(self, nodes: int) -> Running | None:
        """The fixed grid; another one when its spares are used up."""
        if self._fixed is None or nodes < self._fixed.nodes:
            self._fixed = self.world.varuna(nodes - ceil(self.SHARE * nodes))
        return self._fixed

    def worth_growing(self, job: Job) -> bool:
        """A larger fixed grid, where many more nodes are there than it was chosen for."""
        n = len(job.alive)
        then = self.world.varuna(n - ceil(self.SHARE * n))
        pause_s = self.physics.restart_s(self.world.devices(n)) + self.read_s(job)
        if not self.pays(job, then, pause_s):
            return False
        self._fixed = then
        return True
