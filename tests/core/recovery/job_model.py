"""A model of a whole job: nodes, vaults, commits and kills in any order that the rules allow.

The workers are those of `tests.core.worker_model`. A given `random.Random` makes every choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from elastic.core.protocol.messages import Halted
from elastic.core.recovery.recovery import replayed_microbatches, solve
from elastic.domain.errors import Unrecoverable
from elastic.domain.types import (
    GRADIENT,
    LOGS,
    STATE,
    UPDATE,
    Assignment,
    Copy,
    JobSpec,
    LayerSpec,
    NodeInfo,
    PartialRun,
    Plan,
    StepRecord,
)
from elastic.planning.plan.plan import validate_plan
from elastic.planning.search.search import PlanRequest, make_plan
from tests.core.recovery.oracle import reachable_versions
from tests.core.recovery.proof import Vault, check_assignment
from tests.core.worker_model import Worker, check_ledgers, install, shares, todo_of


def make_spec(
    n_layers: int, n_microbatches: int, n_steps: int, tp: int = 1, tied: bool = False
) -> JobSpec:
    layers = tuple(LayerSpec(8, 16, 8, 1.0 + i % 2, 2.0) for i in range(n_layers))
    pairs = ((0, n_layers - 1),) if tied and n_layers > 1 else ()
    return JobSpec(layers=layers, n_microbatches=n_microbatches, n_steps=n_steps, tp=tp, tied=pairs)


def make_info(i: int, *, workers: int = 1, domain: str = "") -> NodeInfo:
    return NodeInfo(f"node{i}", f"i{i}", f"127.0.0.1:{9000 + i}", workers=workers, domain=domain)


def _shows_step(copies: Iterable[Copy]) -> bool:
    """Whether some copy shows that a step was trained."""
    return any(copy.kind == UPDATE or (copy.kind == STATE and copy.step > 0) for copy in copies)


class Job:
    """`act()` does one random action; `fail(nodes)` halts all workers and recovers."""

    def __init__(
        self,
        rng: random.Random,
        spec: JobSpec,
        nodes: Iterable[NodeInfo],
        *,
        shape: str = "auto",
        backup: str = "auto",
        checkpoints: bool = False,
    ) -> None:
        self.rng, self.spec, self.shape, self.backup = rng, spec, shape, backup
        self.nodes = {info.node: info for info in nodes}
        self.vaults = {name: Vault(name) for name in self.nodes}
        self.able = set(self.nodes)
        self.epoch, self.sequence = 0, 0
        self.plan: Plan | None = None
        self.workers: list[Worker] = []
        self.trimmed = True
        self.checkpoint: tuple[str, int] | None = None
        self.checkpoints = checkpoints
        self.known_record: StepRecord | None = None
        self.last: Assignment | None = None
        self.partial: dict[int, list[tuple[PartialRun, int]]] = {}
        """Pipeline: (run, stage) of the partial runs that are left."""
        self.began = 0
        """Step in which the epoch began."""
        self.recover(())

    # ---- training ----

    @property
    def finished(self) -> bool:
        return all(w.step == self.spec.n_steps for w in self.workers)

    def act(self) -> bool:
        """Do one action that the rules allow now; False if none is left."""
        actions: list[Callable[[], None]] = []
        for worker in self.workers:
            actions += self.actions_of(worker)
        for stage in {(w.pipeline, w.stage) for w in self.workers}:
            actions += self.compute(stage)
        if not self.trimmed and all(w.unprotected == 0 for w in self.workers):
            actions.append(self.trim)
        if not actions:
            return False
        self.rng.choice(actions)()
        return True

    def compute(self, at: tuple[int, int]) -> list[Callable[[], None]]:
        """Forward and backward passes that a stage could do now."""
        ranks = [w for w in self.workers if (w.pipeline, w.stage) == at]
        step = ranks[0].step
        if step >= self.spec.n_steps or any(w.passed or w.step != step for w in ranks):
            return []
        left = self.partial.get(at[0], [])
        if left:
            return [lambda: self.run_in_part(ranks)] if left[0][1] == at[1] else []
        todo = self.todo(at[0], step)
        before = self.first_of(at[0], at[1] - 1)
        after = self.first_of(at[0], at[1] + 1)
        me = ranks[0]
        actions: list[Callable[[], None]] = []
        forward = [m for m in todo if m not in me.started]
        if forward and (before is None or (before.step == step and forward[0] in before.started)):
            actions.append(lambda: self.forward(ranks, forward[0]))
        back = [m for m in todo if m in me.started and m not in me.backward]
        if (
            back
            and not any(w.full for w in ranks)
            and (after is None or (after.step == step and back[0] in after.backward))
        ):
            actions.append(lambda: self.backward(ranks, back[0]))
        return actions

    def forward(self, ranks: list[Worker], index: int) -> None:
        for worker in ranks:
            worker.forward(index)

    def backward(self, ranks: list[Worker], index: int) -> None:
        for worker in ranks:
            worker.backward_pass(index)

    def run_in_part(self, ranks: list[Worker]) -> None:
        """Run the next stage's share of a partial run; the last stage adds it first."""
        run, _ = self.partial[ranks[0].pipeline].pop(0)
        for worker in ranks:
            worker.run_in_part(run)

    def actions_of(self, worker: Worker) -> list[Callable[[], None]]:
        """Possible actions of one worker: publish, back up, commit, update."""
        if worker.queue:
            return [lambda: self.deliver(worker)]
        if worker.step >= self.spec.n_steps:
            return [] if worker.entered else [worker.enter]
        if worker.passed:
            return [lambda: self.update(worker)]
        if worker.published < len(worker.backward):
            return [worker.publish]
        if not self.arrived(worker):
            return []
        if not worker.entered:
            return [worker.enter]
        # A worker that is a step further has passed the same commit, so all had arrived.
        if all(
            w.step > worker.step or ((w.passed or self.ready(w)) and w.step == worker.step)
            for w in self.workers
        ):
            return [lambda: self.commit(worker)]
        return []

    def arrived(self, worker: Worker) -> bool:
        left = self.partial.get(worker.pipeline)
        return not left and set(self.todo(worker.pipeline, worker.step)) <= worker.backward

    def ready(self, worker: Worker) -> bool:
        """Whether it may commit: everything is done, published and acknowledged."""
        return self.arrived(worker) and worker.ready

    def commit(self, worker: Worker) -> None:
        if all(w.step == worker.step and not w.passed for w in self.workers):
            check_ledgers(self.workers, self.spec, worker.step)
        worker.commit()
        if (worker.pipeline, worker.stage, worker.shard) == (0, 0, 0) and self.rng.random() < 0.5:
            self.known_record = worker.record

    def update(self, worker: Worker) -> None:
        """Update one layer; after the epoch's first step, drop the logged messages."""
        worker.update()
        if not worker.passed and self.trimmed:
            self.vaults[worker.node].forget(self.epoch, LOGS)

    def deliver(self, worker: Worker) -> None:
        """Deliver one more copy to the peer."""
        bundle = worker.queue[0]
        assert worker.peer is not None
        copy, content = bundle.pop(self.rng.randrange(len(bundle)))
        self.vaults[worker.peer].add(copy, content)
        if not bundle:
            worker.acknowledged()

    def number(self) -> int:
        self.sequence += 1
        return self.sequence

    def trim(self) -> None:
        """Logged messages stay while their node is in the step in which the epoch began."""
        for node, vault in self.vaults.items():
            running = all(w.step == self.began for w in self.workers if w.node == node)
            vault.forget(self.epoch, (STATE, GRADIENT, UPDATE) if running else ())
        self.trimmed = True

    @property
    def plan_of(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def first_of(self, pipeline: int, stage: int) -> Worker | None:
        return next((w for w in self.workers if (w.pipeline, w.stage) == (pipeline, stage)), None)

    def todo(self, pipeline: int, step: int) -> tuple[int, ...]:
        assert self.last is not None
        return todo_of(self.last, pipeline, step)

    # ---- failures ----

    def save_checkpoint(self) -> None:
        """Make the newest version that every layer has in some vault durable."""
        versions = [
            {
                c.step
                for v in self.vaults.values()
                for c, _ in v.held.values()
                if (c.kind, c.layer, c.shard) == at
            }
            for at in (
                (STATE, la, sh) for la in range(self.spec.n_layers) for sh in range(self.spec.tp)
            )
        ]
        common = set.intersection(*versions)
        if common:
            self.checkpoint = "/checkpoints/x", max(common)

    def fail(self, nodes: Iterable[str] = (), workers_only: Iterable[str] = ()) -> None:
        """Lose `nodes` with their vaults, and the workers of `workers_only`; the others recover."""
        nodes, workers_only = tuple(nodes), tuple(workers_only)
        halted = self.halt({*nodes, *workers_only})
        for node in nodes:
            del self.nodes[node], self.vaults[node]
            self.able.discard(node)
        self.recover((*nodes, *workers_only), halted)

    def halt(self, gone: set[str]) -> dict[str, Halted]:
        """Survivors finish their update, publish the rest locally, and stop sending."""
        halted: dict[str, Halted] = {}
        for worker in [w for w in self.workers if w.node not in gone]:
            while worker.passed:
                self.update(worker)
            halted[worker.node] = worker.halt(self.epoch)
        return halted

    def recover(self, lost: tuple[str, ...], halted: dict[str, Halted] | None = None) -> None:
        """Plan, solve, check and install. Raises Unrecoverable like the product.

        The version and the failure are judged by `tests.core.recovery.oracle`, the assignment by
        `tests.core.recovery.proof`. Neither uses `solve`.
        """
        halted = halted or {}
        self.epoch += 1
        old = self.plan
        request = PlanRequest(
            spec=self.spec,
            nodes=tuple(self.nodes[name] for name in sorted(self.able)),
            epoch=self.epoch,
            shape=self.shape,
            current=self.plan,
            backup=self.backup,
        )
        plan = make_plan(request)
        validate_plan(plan)
        records = [h.record for h in halted.values() if h.record]
        if self.known_record:
            records.append(self.known_record)
        copies = [copy for vault in self.vaults.values() for copy, _ in vault.held.values()]
        live = {node: h.step for node, h in halted.items()}
        possible = reachable_versions(
            copies,
            self.spec,
            {record.step for record in records},
            checkpoint=self.checkpoint[1] if self.checkpoint else None,
            initial=not records and max(live.values(), default=0) <= 0 and not _shows_step(copies),
        )
        try:
            assignment = solve(
                plan=plan,
                spec=self.spec,
                inventory=tuple(copies),
                records=tuple(records),
                vaults=tuple((name, info.vault) for name, info in self.nodes.items()),
                checkpoint=self.checkpoint,
                initial_allowed=self.known_record is None,
                live=live,
            )
        except Unrecoverable:
            assert not possible, f"given up although {possible} can be reached"
            raise
        assert assignment.step == max(possible)
        check_assignment(assignment, self.spec, self.vaults)
        if old is not None:
            todo = frozenset(i for share in assignment.todo for i in share)
            step, orders = assignment.step, [p.microbatches for p in old.pipelines]
            arguments = old, frozenset(lost), todo, halted, step, orders, dict(assignment.covered)
            assert replayed_microbatches(*arguments) <= todo
        self.plan, self.last = plan, assignment
        self.install(assignment)

    def install(self, assignment: Assignment) -> None:
        self.workers, self.trimmed, self.began = [], False, assignment.step
        self.partial = {p: shares(assignment, p) for p in range(len(assignment.plan.pipelines))}
        for p, s, _ in assignment.plan.stages():
            for shard in range(assignment.plan.tp):
                self.workers.append(
                    install(assignment, self.spec, (p, s), shard, self.vaults, self.number)
                )
