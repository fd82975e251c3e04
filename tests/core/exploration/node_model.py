"""One node of the exploration: the agent's real transition, one worker, and a vault.

A worker does its work in few steps (`WorkerPhase`). The steps are as small as the decisions need:
a fault may come between any two of them. Orders of the agent reach the worker at once, and the
worker's messages reach the agent at once, because they do not leave the node. The worker reacts to
an order in a step of its own, so it may finish other work before.

All values are immutable and hashable. The model has no time: agents get time 0, and no hang is
searched for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import (
    GRADIENT,
    STATE,
    Assignment,
    Copy,
    JobSpec,
    NodeInfo,
    Recipe,
    StepRecord,
)

REPORTING_NO_COPIES = (
    NodePhase.RUNNING,
    NodePhase.INSTALLING,
    NodePhase.HALTING,
    NodePhase.FINISHED,
)
RESUMED_AT = 1.0
"""Time of every first micro-batch. Decisions only test whether there was one."""
Content = tuple[int, ...]
"""Real content of a copy: (version,) of a state, or the micro-batches that a gradient sums up."""
Vault = frozenset[tuple[Copy, Content]]


class WorkerPhase(IntEnum):
    """What a worker does next."""

    ABSENT = 0
    STARTING = 1
    IDLE = 2
    """Attached; it waits for an order to install."""
    LOADING = 3
    """It has an assignment, and fetches its layers."""
    LOADED = 4
    """It connects to the other workers."""
    COMPUTING = 5
    """It computes the micro-batches of its step."""
    COMPUTED = 6
    """Its state and gradients are in the own vault, but not at the peer."""
    ARRIVED = 7
    """All copies are whole at the peer. It is in the commit."""
    LEFT = 8
    """It has left the epoch, and waits for the order to halt."""
    DONE = 9
    """All steps are done. It waits for an order to halt, or for the end."""


TRAINS = frozenset(
    {
        WorkerPhase.LOADED,
        WorkerPhase.COMPUTING,
        WorkerPhase.COMPUTED,
        WorkerPhase.ARRIVED,
        WorkerPhase.DONE,
    }
)
"""Phases of a worker that is connected to the others of its epoch, or waits to be."""


class Worker(NamedTuple):
    phase: WorkerPhase = WorkerPhase.ABSENT
    epoch: int = 0
    """Epoch of the newest assignment."""
    assignment: int = -1
    """Number of the assignment (`NodeModel.assignments`)."""
    version: int = -1
    """Version of the state in memory; -1: no state."""
    state_epoch: int = 0
    """Epoch in which the state was loaded."""
    gradients: tuple[tuple[int, Content], ...] = ()
    """(layer, micro-batches) of the step that runs."""
    halt: int = 0
    """Newest epoch that was ordered to halt for."""
    boundary: bool = False
    """Whether that halt is planned."""
    arrived: int = -1
    """Newest step of the epoch in whose commit the worker took part."""
    agreed: int = 0
    """Epoch of the planned halt that it proposed in that commit; 0: none."""
    resumed: bool = False
    protected: bool = False
    record: int = -1
    """Newest step whose update it began; -1: none."""


NO_WORKER = Worker()


@dataclass(frozen=True, slots=True)
class Node:
    """State of one node."""

    agent: core.NodeState
    worker: Worker = NO_WORKER
    vault: Vault = frozenset()
    fence: int = 0
    steps: tuple[m.StepDone, ...] = ()
    """Finished steps, which are sent again after each reconnect."""
    prefetch: m.Prefetch | None = None
    refused: bool = False
    """Whether the coordinator refused the node's name for now."""
    alive: bool = True
    ended: bool = False
    """Whether the agent ended by an order."""
    incarnation: int = 0
    """Number of the newest incarnation."""

    @property
    def name(self) -> str:
        return self.agent.info.node


class Effects(NamedTuple):
    """A node after a step, and its messages to the coordinator."""

    node: Node
    messages: tuple[Any, ...] = ()


def number_of(record: StepRecord | None) -> int:
    return record.step if record is not None else -1


def record_of(step: int) -> StepRecord | None:
    return StepRecord(step, 1.0, 1.0, float(step)) if step >= 0 else None


class NodeModel:
    """Steps of nodes. Holds the facts that are equal on all nodes of a job."""

    def __init__(self, spec: JobSpec, *, keeps_assignments: bool = False) -> None:
        """`keeps_assignments`: the coordinator never forgets that it has sent an assignment."""
        self.spec, self.keeps_assignments = spec, keeps_assignments
        self.assignments: list[Assignment] = []
        self._numbers: dict[Assignment, int] = {}

    def number(self, assignment: Assignment) -> int:
        if assignment not in self._numbers:
            self._numbers[assignment] = len(self.assignments)
            self.assignments.append(assignment)
        return self._numbers[assignment]

    def plan_nodes(self, worker: Worker) -> tuple[str, ...]:
        return self.assignments[worker.assignment].plan.nodes()

    def new_node(self, name: str, incarnation: int = 0) -> Node:
        return Node(core.NodeState(self._info(name, incarnation)), incarnation=incarnation)

    @staticmethod
    def _info(name: str, incarnation: int) -> NodeInfo:
        return NodeInfo(name, f"{name}.{incarnation}", f"{name}:1")

    # ---- the agent ----

    def report(self, node: Node) -> m.NodeReport:
        report = core.report(node.agent)
        if self.reports_copies(node.agent):
            copies = sorted((copy for copy, _ in node.vault), key=lambda copy: copy.key)
            report = replace(report, inventory=tuple(copies))
        return report

    def reports_copies(self, agent: core.NodeState) -> bool:
        # A spare that has its assignment reports its copies again before they are used.
        installed = self.keeps_assignments and 0 < agent.epoch == agent.installed
        spare = installed and agent.phase is NodePhase.IDLE
        return agent.phase not in REPORTING_NO_COPIES and not spare

    def connected(self, node: Node) -> Effects:
        """The agent has a new connection to the coordinator."""
        return Effects(node, (*node.steps, self.report(node)))

    def ordered(self, node: Node, order: Any) -> Effects:
        """An order of the coordinator arrives."""
        match order:
            case m.Trim(epoch):
                kept = frozenset(pair for pair in node.vault if pair[0].epoch >= epoch)
                return Effects(replace(node, vault=kept))
            case m.Prefetch():
                return Effects(replace(node, prefetch=order))
            case m.NodeReport():
                raise AssertionError("nodes send reports")
        if type(order).__name__ == "JoinRefused":
            return Effects(replace(node, refused=True))
        return self.agent_event(node, order)

    def agent_event(self, node: Node, event: Any) -> Effects:
        """Apply an event to the agent, and carry out its actions."""
        before = node.agent
        state, actions, _ = core.transition(before, event, 0.0)
        assert state.epoch >= before.epoch, "a node's epoch only grows"
        node = replace(node, agent=state)
        sent: list[Any] = []
        exited = False
        for action in actions:
            match action:
                case core.SendToWorkers(message):
                    node = replace(node, worker=self._order_worker(node.worker, message))
                case core.SpawnWorkers():
                    node, exited = replace(node, worker=Worker(WorkerPhase.STARTING)), False
                case core.KillWorkers():
                    exited = node.worker.phase is not WorkerPhase.ABSENT
                    node = replace(node, worker=Worker())
                case core.FenceVault(epoch):
                    node = replace(node, fence=max(node.fence, epoch))
                case core.EnterEpoch(install):
                    node = self._enter_epoch(node, install)
                case core.SendReport():
                    sent.append(self.report(node))
                case core.EndAgent():
                    worker = Worker()
                    node = replace(node, alive=False, ended=True, worker=worker, vault=frozenset())
                case core.Rejoin(keep_vault):
                    node, exited = self._rejoin(node, keep_vault), False
                    sent.append(self.report(node))
        if exited:
            node, more = self.agent_event(node, core.WorkerExited(0, -9))
            sent += more
        return Effects(node, tuple(sent))

    def _enter_epoch(self, node: Node, install: m.Install) -> Node:
        step, epoch = install.assignment.step, install.epoch
        vault = frozenset(pair for pair in node.vault if not pair[0].undone_by(epoch, step))
        steps = tuple(d for d in node.steps if d.record.step < step or d.epoch >= epoch)
        return replace(node, fence=max(node.fence, epoch), vault=vault, steps=steps)

    def _rejoin(self, node: Node, keep_vault: bool) -> Node:
        number = node.incarnation + 1
        vault, fence = (node.vault, node.fence) if keep_vault else (frozenset(), 0)
        fresh = self.new_node(node.name, number)
        return replace(fresh, vault=vault, fence=fence, steps=node.steps)

    def _order_worker(self, worker: Worker, order: Any) -> Worker:
        if worker.phase <= WorkerPhase.STARTING:
            return worker
        match order:
            case m.Halt(epoch, boundary) if epoch > worker.halt:
                return worker._replace(halt=epoch, boundary=boundary)
            case m.Install(epoch, assignment) if epoch > worker.epoch:
                return worker._replace(
                    phase=WorkerPhase.LOADING,
                    epoch=epoch,
                    assignment=self.number(assignment),
                    arrived=-1,
                    agreed=0,
                    resumed=False,
                    protected=False,
                )
            case m.Stop():
                return Worker()
        return worker

    def tell(self, node: Node, worker: Worker, *messages: Any) -> Effects:
        """The worker becomes `worker`, and sends messages to its agent."""
        node = replace(node, worker=worker)
        sent: list[Any] = []
        for message in messages:
            node, more = self.agent_event(node, core.WorkerMessage(0, message))
            sent += more
        return Effects(node, tuple(sent))

    # ---- steps of the worker alone ----

    def attach(self, node: Node) -> Effects:
        worker = node.worker._replace(phase=WorkerPhase.IDLE)
        return self.tell(node, worker, m.Attach(0, 1, self.spec, f"{node.name}:2"))

    def crash(self, node: Node) -> Effects:
        node = replace(node, worker=Worker())
        return self.agent_event(node, core.WorkerExited(0, 1))

    def may_leave(self, worker: Worker) -> bool:
        """Whether the worker has an order to halt, and may obey it now."""
        if worker.halt <= worker.epoch:
            return False
        if worker.phase in (WorkerPhase.LEFT, WorkerPhase.DONE):
            return True
        active = WorkerPhase.LOADING <= worker.phase <= WorkerPhase.ARRIVED
        return active and not worker.boundary

    def leave(self, node: Node) -> Effects:
        """Leave the epoch, publish everything to the own vault, and report it."""
        worker = node.worker
        vault = self._published(node) if worker.version >= 0 else node.vault
        started = frozenset({0}) if any(held for _, held in worker.gradients) else frozenset()
        record = record_of(worker.record)
        halted = m.Halted(worker.halt, worker.version, started, started, record)
        worker = worker._replace(phase=WorkerPhase.IDLE)
        return self.tell(replace(node, vault=vault), worker, halted)

    def fail(self, node: Node, suspects: tuple[str, ...], detail: str) -> Effects:
        """Contact with other workers is lost: leave the epoch."""
        worker = node.worker._replace(phase=WorkerPhase.LEFT)
        return self.tell(node, worker, m.CommFailed(worker.epoch, suspects, detail))

    def compute(self, node: Node) -> Effects:
        """Run all micro-batches of the step that some layer lacks; publish to the own vault."""
        worker, assignment = node.worker, self.assignments[node.worker.assignment]
        assert not assignment.partial, "this backup scheme logs no messages"
        first = worker.version == assignment.step
        covered = dict(assignment.covered) if first else {}
        shares = (
            assignment.todo if first else tuple(p.microbatches for p in assignment.plan.pipelines)
        )
        todo = shares[0] if worker.version < self.spec.n_steps else ()
        gradients = tuple(
            (layer, tuple(sorted((*held, *(i for i in todo if i not in covered.get(layer, ()))))))
            for layer, held in worker.gradients
        )
        worker = worker._replace(phase=WorkerPhase.COMPUTED, gradients=gradients)
        node = replace(node, worker=worker)
        node = replace(node, vault=self._published(node))
        if worker.resumed:
            return Effects(node)
        resumed = m.Resumed(worker.epoch, RESUMED_AT)
        return self.tell(node, worker._replace(resumed=True), resumed)

    # ---- steps with other nodes ----

    def load(self, node: Node, sources: dict[str, Node]) -> Effects:
        """Fetch the layers from the vaults that the assignment names."""
        worker, assignment = node.worker, self.assignments[node.worker.assignment]
        plan = assignment.plan
        layers = [la for _, _, s in plan.stages() if s.unit.node == node.name for la in s.layers]
        recipes = {r.layer: r for name, r in assignment.recipes if name == node.name}
        gradients = []
        for layer in layers:
            recipe = recipes.get(layer) or Recipe(layer, 0, 0)
            try:
                gradients.append((layer, self._fetch(recipe, assignment, sources)))
            except KeyError:
                return self.fail(node, (), f"layer {layer}: a source is gone")
        worker = worker._replace(
            phase=WorkerPhase.LOADED,
            version=assignment.step,
            state_epoch=worker.epoch,
            gradients=tuple(gradients),
        )
        return Effects(replace(node, worker=worker))

    def _fetch(self, recipe: Recipe, assignment: Assignment, sources: dict[str, Node]) -> Content:
        """Return the gradient with which a layer begins. Raises KeyError if a copy is gone."""

        def content(copy: Copy) -> Content:
            held = dict(sources[copy.node].vault)
            return held[copy]

        version = recipe.version
        assert version == assignment.step, "versions are mixed"
        if recipe.state is None:
            assert version == 0 and not recipe.replay, "nothing to start from"
        else:
            base = version - 1 if recipe.replay else version
            assert content(recipe.state) == (base,), "a copy with another version"
        if recipe.replay:
            total = sorted(i for copy in recipe.replay for i in content(copy))
            assert total == list(range(self.spec.n_microbatches)), "replay is not exactly once"
            assert number_of(assignment.record) == version - 1, "an update without its record"
        return tuple(sorted(i for copy in recipe.gradients for i in content(copy)))

    def ready(self, node: Node) -> Effects:
        worker = node.worker._replace(phase=WorkerPhase.COMPUTING)
        return self.tell(node, worker, m.Ready(worker.epoch, 0.0, 0.0))

    def keeper(self, node: Node) -> str | None:
        return self.assignments[node.worker.assignment].plan.peer_of(node.name)

    def copies(self, node: Node) -> tuple[tuple[Copy, Content], ...]:
        """Return the copies of the worker's state and gradients."""
        worker, pairs = node.worker, list[tuple[Copy, Content]]()
        for layer, held in worker.gradients:
            pairs.append((self._copy(STATE, layer, node, ()), (worker.version,)))
            if held:
                pairs.append((self._copy(GRADIENT, layer, node, held), held))
        return tuple(pairs)

    def _copy(self, kind: str, layer: int, node: Node, held: Content) -> Copy:
        last = layer == self.spec.n_layers - 1
        return Copy(
            kind=kind,
            layer=layer,
            shard=0,
            step=node.worker.version,
            epoch=node.worker.state_epoch,
            owner=node.name,
            sequence=0,
            nbytes=24 if kind == STATE else 8,
            checksum="",
            microbatches=frozenset(held),
            losses=tuple((i, float(i)) for i in held) if last else (),
            node=node.name,
        )

    def _published(self, node: Node) -> Vault:
        return stored(node.vault, node.name, self.copies(node))

    def arrive(self, node: Node) -> Effects:
        """All copies are whole at the peer: enter the commit."""
        worker = node.worker
        planned = worker.halt if worker.boundary and worker.halt > worker.epoch else 0
        worker = worker._replace(
            phase=WorkerPhase.ARRIVED, arrived=worker.version, agreed=planned, protected=True
        )
        if node.worker.protected:
            return Effects(replace(node, worker=worker))
        return self.tell(node, worker, m.Protected(worker.epoch))

    def commit(self, node: Node, halt: int) -> Effects:
        """Update all layers; the reporting worker tells the coordinator. Leave for a planned halt.

        `halt`: epoch of the planned halt that all workers agreed on; 0: none.
        """
        worker = node.worker
        step = worker.version
        worker = worker._replace(
            phase=WorkerPhase.LEFT if halt > worker.epoch else WorkerPhase.COMPUTING,
            version=step + 1,
            record=step,
            gradients=tuple((layer, ()) for layer, _ in worker.gradients),
        )
        node = replace(node, worker=worker)
        node = replace(node, vault=self._published(node))
        if self.plan_nodes(worker)[0] != node.name:
            return Effects(node)
        record = record_of(step)
        assert record is not None
        done = m.StepDone(worker.epoch, record, 0.1, 0.1)
        return Effects(replace(node, steps=(*node.steps, done)), (done,))

    def finish(self, node: Node) -> Effects:
        worker = node.worker._replace(phase=WorkerPhase.DONE)
        sha = "sha" if self.plan_nodes(worker)[0] == node.name else ""
        return self.tell(node, worker, m.Finished(self.spec.n_steps, sha))

    def prefetched(self, node: Node, sources: dict[str, Node]) -> Effects:
        """Fetch the newest states of the layers that the order names."""
        order = node.prefetch
        assert order is not None
        vault = node.vault
        for layer, _, name in order.sources:
            held = sources[name].vault if name in sources else frozenset()
            states = [p for p in held if p[0].kind == STATE and p[0].layer == layer]
            if states:
                newest = max(states, key=lambda p: (p[0].step, p[0].epoch, p[0].key))
                vault = stored(vault, node.name, (newest,))
        node = replace(node, vault=vault, prefetch=None)
        return self.agent_event(node, core.PrefetchDone(order.epoch))


def stored(vault: Vault, node: str, pairs: Iterable[tuple[Copy, Content]]) -> Vault:
    """Add copies to the vault of `node`. It keeps the two newest steps of each owner and epoch."""
    held = set(vault)
    for copy, content in pairs:
        copy = replace(copy, node=node)

        def same_group(other: Copy, new: Copy = copy) -> bool:
            ours = (new.kind, new.layer, new.owner, new.epoch)
            return (other.kind, other.layer, other.owner, other.epoch) == ours

        group = [pair for pair in held if same_group(pair[0])]
        held -= {pair for pair in group if pair[0].step == copy.step}
        held.add((copy, content))
        steps = sorted({copy.step, *(pair[0].step for pair in group)})[:-2]
        held -= {pair for pair in group if pair[0].step in steps}
    return frozenset(held)
