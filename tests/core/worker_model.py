"""The tests' model of a worker: its computing and publishing in one epoch.

It has no time and no messages. Gradients are multisets of micro-batches, so a double addition
shows. It follows the rules of docs/design/design.md: two slots, commit gates, retention.
`tests.core.recovery.job_model` applies them in any order that they allow; `tests.core.world.worker`
applies them after simulated delays, under the real coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.core.protocol.messages import Halted
from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    GRADIENT,
    STATE,
    UPDATE,
    Assignment,
    Copy,
    JobSpec,
    PartialRun,
    Plan,
    StepRecord,
)
from elastic.planning.plan.schemes import state_of
from tests.core.recovery.proof import Vault

NBYTES = {STATE: 24, GRADIENT: 8, UPDATE: 4, ACTIVATION: 8, COTANGENT: 8}
MOST_UNACKED = 2
Bundle = list[tuple[Copy, Any]]


@dataclass
class Worker:
    """One TP rank of one stage in one epoch."""

    assignment: Assignment
    spec: JobSpec
    node: str
    pipeline: int
    stage: int
    shard: int
    vault: Vault
    """Vault of its node."""
    number: Callable[[], int]
    """Returns the next sequence number."""
    version: dict[int, int]
    gradient: dict[int, Counter[int]]
    started: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    published: int = 0
    """Micro-batches whose backward pass was published."""
    queue: list[Bundle] = field(default_factory=list)
    """Bundles on their way to the peer, in order."""
    entered: bool = False
    unprotected: int = -1
    """Unacknowledged bundles with the first state of the epoch; -1: not entered."""
    passed: bool = False
    """It has passed the commit of its step, and has not updated all layers."""
    unwritten: Bundle = field(default_factory=list)
    """Messages that were sent and are not logged yet."""
    updated: int = -1
    """Step whose update it has begun."""
    record: StepRecord | None = None

    @property
    def plan(self) -> Plan:
        return self.assignment.plan

    @property
    def step(self) -> int:
        return min(self.version.values())

    @property
    def peer(self) -> str | None:
        return self.plan.peer_of(self.node)

    @property
    def todo(self) -> tuple[int, ...]:
        """Micro-batches that its pipeline runs whole in its step."""
        return todo_of(self.assignment, self.pipeline, self.step)

    @property
    def full(self) -> bool:
        """It must wait for an acknowledgement before the next backward pass."""
        return self.published < len(self.backward) or len(self.queue) >= MOST_UNACKED

    @property
    def ready(self) -> bool:
        """It may enter the commit: everything is published and acknowledged."""
        return self.entered and self.published == len(self.backward) and not self.queue

    # ---- computing ----

    def forward(self, index: int) -> None:
        self.started.add(index)
        self._send(ACTIVATION, max(self.version) + 1, index)

    def backward_pass(self, index: int) -> None:
        self.backward.add(index)
        self._add(index, 0, self.spec.n_layers)
        self._send(COTANGENT, min(self.version), index)

    def run_in_part(self, run: PartialRun) -> None:
        """Its share of a run of some layers."""
        self.started.add(run.microbatch)
        for kind, boundary in ((COTANGENT, min(self.version)), (ACTIVATION, max(self.version) + 1)):
            if run.first < boundary < run.last:
                self._send(kind, boundary, run.microbatch)
        self._add(run.microbatch, run.first, run.last)
        self._write()
        self.enter()

    def _add(self, index: int, first: int, last: int) -> None:
        """Its layers in [first, last) have run `index`."""
        covered = dict(self.assignment.covered) if self.step == self.assignment.step else {}
        for layer, gradient in self.gradient.items():
            if first <= layer < last and index not in covered.get(layer, ()):
                gradient[index] += 1

    def commit(self) -> None:
        self.passed = True
        if self.plan.gradients == "log":
            self._announce(self._gradients(), False)
        self.record = StepRecord(self.step, 1.0, 1.0, float(self.step))

    def update(self) -> None:
        """Update one layer. Publish updates before the first layer, states after the last one."""
        step = self.step
        if state_of(self.plan.state).updates and self.updated != step:
            self._announce(self._states(UPDATE), True)
        self.updated = step
        layer = min(la for la, version in self.version.items() if version == step)
        self.version[layer] += 1
        self.gradient[layer] = Counter()
        if self.step > step:
            self.passed = False
            self.started, self.backward, self.published = set(), set(), 0
            self._publish_states(max(state_of(self.plan.state).every, 1))

    def halt(self, epoch: int) -> Halted:
        """Finish the update that it is in, publish the rest locally, and stop sending."""
        while self.passed:
            self.update()
        self._write()
        self._announce([*self._states(), *self._gradients()], False)
        self.queue.clear()
        started = frozenset(self.started)
        return Halted(epoch, self.step, started, started, self.record)

    # ---- publishing ----

    def publish(self) -> None:
        """A backward pass is over."""
        self.published += 1
        if self.plan.gradients == "stream":
            self._announce(self._gradients(), True)
        self._write()
        self.enter()

    def enter(self) -> None:
        """Publish what the epoch began with, if that was not done."""
        if not self.entered:
            self.entered = True
            self._publish_states()
            if self.plan.gradients == "stream":
                self._announce(self._gradients(), True)
            self.unprotected = len(self.queue)

    def acknowledged(self) -> None:
        """The oldest bundle is whole at the peer."""
        self.queue.pop(0)
        if self.unprotected > 0:
            self.unprotected -= 1

    def _publish_states(self, every: int = 1) -> None:
        """Publish states; the peer gets those of the layers whose turn it is."""
        if self.plan.state != "none":
            copies = self._states()
            away = [(c, inside) for c, inside in copies if (c.step + c.layer) % every == 0]
            self._announce([pair for pair in copies if pair not in away], False)
            self._announce(away, state_of(self.plan.state).away)

    def _announce(self, copies: Bundle, away: bool) -> None:
        for copy, content in copies:
            self.vault.add(copy, content)
        if away and copies and self.peer:
            self.queue.append(list(copies))

    def _send(self, kind: str, boundary: int, index: int) -> None:
        """It has sent a message over `boundary`; its log is not written yet."""
        if self.plan.gradients == "log" and 0 < boundary < self.spec.n_layers:
            copy = self._copy(kind, boundary, self.step, frozenset({index}))
            self.unwritten.append((copy, (kind, boundary, self.step, index)))

    def _write(self) -> None:
        for copy, content in self.unwritten:
            self.vault.add(copy, content)
        self.unwritten.clear()

    def _states(self, kind: str = STATE) -> Bundle:
        return [
            (self._copy(kind, layer, version, frozenset()), version)
            for layer, version in self.version.items()
        ]

    def _gradients(self) -> Bundle:
        return [
            (self._copy(GRADIENT, layer, self.version[layer], frozenset(total)), Counter(total))
            for layer, total in self.gradient.items()
            if total
        ]

    def _copy(self, kind: str, layer: int, step: int, indices: frozenset[int]) -> Copy:
        last = layer == self.spec.n_layers - 1 and kind == GRADIENT
        return Copy(
            kind=kind,
            layer=layer,
            shard=self.shard,
            step=step,
            epoch=self.plan.epoch,
            owner=self.node,
            sequence=self.number(),
            nbytes=NBYTES[kind],
            checksum="",
            microbatches=indices,
            losses=tuple((i, float(i)) for i in sorted(indices)) if last else (),
            node=self.node,
        )


def install(
    assignment: Assignment,
    spec: JobSpec,
    at: tuple[int, int],
    shard: int,
    vaults: Mapping[str, Vault],
    number: Callable[[], int],
    live: Worker | None = None,
) -> Worker:
    """The worker of a stage, `at` (pipeline, stage), with the gradients that its recipes name, or
    with those of the `live` worker, which has promised them."""
    stage = assignment.plan.pipelines[at[0]].stages[at[1]]
    node = stage.unit.node
    gradient: dict[int, Counter[int]] = {layer: Counter() for layer in stage.layers}
    for holder, recipe in assignment.recipes:
        if holder == node and recipe.shard == shard and recipe.layer in gradient:
            for copy in recipe.gradients:
                gradient[recipe.layer] += vaults[copy.node].held[copy.key][1]
    if live is not None:
        gradient = {layer: Counter(live.gradient[layer]) for layer in stage.layers}
    version = dict.fromkeys(stage.layers, assignment.step)
    return Worker(assignment, spec, node, *at, shard, vaults[node], number, version, gradient)


def broken_promise(
    worker: Worker | None, assignment: Assignment, promised: tuple[int, ...] | None
) -> str:
    """How a worker's layers differ from the micro-batches that it has promised; "": they do not.

    `promised`: None: nothing is."""
    if promised is None:
        return ""
    if worker is None:
        return "the worker holds no layer"
    wanted = Counter(promised)
    wrong = [
        layer
        for layer, version in worker.version.items()
        if version != assignment.step or worker.gradient[layer] != wanted
    ]
    return f"layers {wrong} are not as promised" if wrong else ""


def todo_of(assignment: Assignment, pipeline: int, step: int) -> tuple[int, ...]:
    """Micro-batches that a pipeline runs whole in `step`."""
    if step == assignment.step:
        return assignment.todo[pipeline]
    return assignment.plan.pipelines[pipeline].microbatches


def shares(assignment: Assignment, p: int) -> list[tuple[PartialRun, int]]:
    """(run, stage) in the order in which a pipeline's stages add what they run in part."""
    stages = assignment.plan.pipelines[p].stages
    return [
        (run, s)
        for run in assignment.partial
        if run.pipeline == p
        for s in reversed(range(len(stages)))
        if stages[s].first < run.last and stages[s].last > run.first
    ]


def check_ledgers(workers: Iterable[Worker], spec: JobSpec, step: int) -> None:
    """At the commit every layer has every micro-batch exactly once, over all its holders."""
    wanted, held = (
        Counter(range(spec.n_microbatches) if step < spec.n_steps else ()),
        tuple(workers),
    )
    for layer in range(spec.n_layers):
        for shard in range(spec.tp):
            mine = (w.gradient[layer] for w in held if w.shard == shard and layer in w.gradient)
            total = sum(mine, Counter[int]())
            assert total == wanted, f"layer {layer} shard {shard}: {total}"
