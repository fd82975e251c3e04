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
ALL_PEERS = "all"
"""Stands for all names in `Node.unheld`."""


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
    done: int = 0
    """Number of micro-batches of its step that it has run in this epoch, while more are left."""
    updating: bool = False
    """Whether the next step has not begun after a commit. Always false in a job of one pipeline."""
    promise: int = 0
    """Epoch for which it promised to halt at the meeting point; 0: none."""
    kept: int = 0
    """Old epoch whose links it has left open, because it kept its promise there; 0: none."""

    @property
    def has_arrived(self) -> bool:
        """Whether it is at the meeting point, or has left the epoch there by a loss of contact."""
        places = (WorkerPhase.ARRIVED, WorkerPhase.LEFT)
        return self.phase in places and self.arrived == self.version >= 0


NO_WORKER = Worker()


@dataclass(frozen=True, slots=True)
class Node:
    """State of one node."""

    agent: core.NodeState
    worker: Worker = NO_WORKER
    vault: Vault = frozenset()
    fence: int = 0
    outside: tuple[tuple[str, int], ...] = ()
    """(owner, oldest epoch of its copies that the vault takes in spite of the fence)."""
    unheld: tuple[str, ...] = ()
    """Peers whose copies the workers do not wait for (`ALL_PEERS`: nobody's)."""
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

    def takes(self, owner: str, epoch: int) -> bool:
        """Whether the vault takes a copy that `owner` wrote in `epoch`."""
        return epoch >= dict(self.outside).get(owner, self.fence)

    def fenced(self, epoch: int, outside: Iterable[str] = (), publishing: int = 0) -> Node:
        """Return the node with a fence, and the owners that still train in an older epoch."""
        if epoch < self.fence:
            return self
        kept = dict(self.outside) if epoch == self.fence else {}
        kept |= dict.fromkeys(outside, publishing)
        return replace(self, fence=epoch, outside=tuple(sorted(kept.items())))


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

    def __init__(
        self, spec: JobSpec, *, keeps_assignments: bool = False, scopes: bool = False
    ) -> None:
        """`keeps_assignments`: the coordinator never forgets that it has sent an assignment.

        `scopes`: an epoch change may leave some pipelines outside.
        """
        self.spec, self.keeps_assignments, self.scopes = spec, keeps_assignments, scopes
        self.assignments: list[Assignment] = []
        self._numbers: dict[Assignment, int] = {}

    def number(self, assignment: Assignment) -> int:
        if assignment not in self._numbers:
            self._numbers[assignment] = len(self.assignments)
            self.assignments.append(assignment)
        return self._numbers[assignment]

    def plan_nodes(self, worker: Worker) -> tuple[str, ...]:
        return self.assignments[worker.assignment].plan.nodes()

    def pipeline_of(self, worker: Worker, node: str) -> int:
        """Return the index of the pipeline in which a node computes."""
        stages = self.assignments[worker.assignment].plan.stages()
        return next(number for number, _, stage in stages if stage.unit.node == node)

    def pipeline_nodes(self, worker: Worker, node: str) -> frozenset[str]:
        """Return the nodes of its pipeline."""
        plan, mine = self.assignments[worker.assignment].plan, self.pipeline_of(worker, node)
        return frozenset(stage.unit.node for stage in plan.pipelines[mine].stages)

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
        if agent.phase is NodePhase.HALTING:
            return bool(agent.workers) and all(worker.promise for worker in agent.workers)
        return agent.phase not in REPORTING_NO_COPIES and not spare

    def connected(self, node: Node) -> Effects:
        """The agent has a new connection to the coordinator."""
        return Effects(node, (*node.steps, self.report(node)))

    def ordered(self, node: Node, order: Any) -> Effects:
        """An order of the coordinator arrives."""
        match order:
            case m.Trim(epoch):
                kept = frozenset(pair for pair in node.vault if pair[0].epoch >= epoch)
                outside = () if epoch >= node.fence else node.outside
                return Effects(replace(node, vault=kept, outside=outside))
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
        promised = 0
        for action in actions:
            match action:
                case core.SendToWorkers(message):
                    worker = self._order_worker(node, message)
                    promised = worker.promise if worker.promise > node.worker.promise else 0
                    node = replace(node, worker=worker)
                case core.SpawnWorkers():
                    node, exited = replace(node, worker=Worker(WorkerPhase.STARTING)), False
                case core.KillWorkers():
                    exited = node.worker.phase is not WorkerPhase.ABSENT
                    node = replace(node, worker=Worker())
                case core.FenceVault() | core.StopHolding():
                    node = self._order_vault(node, action)
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
        if promised:
            promise = m.Promise(promised, node.worker.epoch, node.worker.version)
            node, reports = self.agent_event(node, core.WorkerMessage(0, promise))
            sent += reports
        if exited:
            node, reports = self.agent_event(node, core.WorkerExited(0, -9))
            sent += reports
        return Effects(node, tuple(sent))

    @staticmethod
    def _order_vault(node: Node, action: core.FenceVault | core.StopHolding) -> Node:
        if isinstance(action, core.StopHolding):
            more = (ALL_PEERS,) if action.peers is None else action.peers
            return replace(node, unheld=tuple(sorted({*node.unheld, *more})))
        node = node.fenced(action.epoch, action.outside, action.publishing)
        return replace(node, unheld=()) if action.discard else node

    def _enter_epoch(self, node: Node, install: m.Install) -> Node:
        step, epoch = install.assignment.step, install.epoch
        vault = frozenset(pair for pair in node.vault if not pair[0].undone_by(epoch, step))
        steps = tuple(d for d in node.steps if d.record.step < step or d.epoch >= epoch)
        return replace(node.fenced(epoch), vault=vault, steps=steps, unheld=())

    def _rejoin(self, node: Node, keep_vault: bool) -> Node:
        number = node.incarnation + 1
        fresh = replace(self.new_node(node.name, number), steps=node.steps)
        if not keep_vault:
            return fresh
        return replace(fresh, vault=node.vault, fence=node.fence, outside=node.outside)

    def _may_promise(self, worker: Worker, epoch: int) -> bool:
        """Whether the worker may promise to halt for `epoch` at the meeting point: it computes a
        step, or is at the meeting point, and has no order to halt at once."""
        halts = worker.halt > worker.epoch and not worker.boundary
        computes = worker.phase in (WorkerPhase.COMPUTING, WorkerPhase.COMPUTED)
        there = (computes and not worker.updating) or worker.has_arrived
        return there and worker.version < self.spec.n_steps and not halts and epoch > worker.epoch

    def _order_worker(self, node: Node, order: Any) -> Worker:
        worker = node.worker
        if worker.phase <= WorkerPhase.STARTING:
            return worker
        match order:
            case m.Halt(epoch, boundary) if epoch > worker.halt:
                promises = node.name in order.outside and self._may_promise(worker, epoch)
                promise = epoch if promises else worker.promise
                return worker._replace(halt=epoch, boundary=boundary, promise=promise)
            case m.Install(epoch, assignment) if epoch > worker.epoch:
                return worker._replace(
                    phase=WorkerPhase.LOADING,
                    epoch=epoch,
                    assignment=self.number(assignment),
                    arrived=-1,
                    agreed=0,
                    resumed=False,
                    protected=False,
                    done=0,
                    updating=False,
                    promise=0,
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
        return active and not worker.boundary and not self.goes_on(worker)

    @staticmethod
    def goes_on(worker: Worker) -> bool:
        """Whether the worker halts later, at the meeting point, as it has promised."""
        computes = worker.phase in (WorkerPhase.COMPUTING, WorkerPhase.COMPUTED)
        return computes and 0 < worker.promise == worker.halt

    def leave(self, node: Node, complete: bool = False) -> Effects:
        """Leave the epoch, publish everything to the own vault, and report it.

        `complete`: the worker has just come to the meeting point, and keeps its promise.
        """
        worker = node.worker
        complete |= worker.has_arrived and 0 < worker.promise == worker.halt
        vault = self._published(node) if worker.version >= 0 else node.vault
        started = frozenset(i for _, held in worker.gradients for i in held)
        record = record_of(worker.record)
        halted = m.Halted(worker.halt, worker.version, started, started, record, complete)
        kept = worker.epoch if complete else 0
        worker = worker._replace(
            phase=WorkerPhase.IDLE, done=0, updating=False, promise=0, kept=kept
        )
        return self.tell(replace(node, vault=vault), worker, halted)

    def fail(self, node: Node, suspects: tuple[str, ...], detail: str) -> Effects:
        """Contact with other workers is lost: leave the epoch."""
        worker = node.worker._replace(phase=WorkerPhase.LEFT, done=0, kept=0)
        return self.tell(node, worker, m.CommFailed(worker.epoch, suspects, detail))

    def compute(self, node: Node) -> Effects:
        """Run the micro-batches of the step that some layer lacks; publish to the own vault.

        A worker of several pipelines runs one at a time, because orders may come in between.
        """
        worker, assignment = node.worker, self.assignments[node.worker.assignment]
        assert not assignment.partial, "this backup scheme logs no messages"
        first = worker.version == assignment.step
        covered = dict(assignment.covered) if first else {}
        shares = (
            assignment.todo if first else tuple(p.microbatches for p in assignment.plan.pipelines)
        )
        trains = worker.version < self.spec.n_steps
        todo = shares[self.pipeline_of(worker, node.name)] if trains else ()
        left, done = len(todo), 0
        if self.scopes and todo:
            todo, done = todo[worker.done : worker.done + 1], worker.done + 1
        more = 0 < done < left
        gradients = tuple(
            (layer, tuple(sorted((*held, *(i for i in todo if i not in covered.get(layer, ()))))))
            for layer, held in worker.gradients
        )
        phase = WorkerPhase.COMPUTING if more else WorkerPhase.COMPUTED
        done = done if more else 0
        worker = worker._replace(phase=phase, gradients=gradients, done=done)
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
        promised = dict(assignment.promised).get(self.pipeline_of(worker, node.name))
        if promised is not None:
            return self._keep_sums(node, layers, tuple(sorted(promised)))
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

    def _keep_sums(self, node: Node, layers: list[int], promised: Content) -> Effects:
        """Keep the layers with their sums, as promised; fail if they are not as promised."""
        worker, assignment = node.worker, self.assignments[node.worker.assignment]
        held = dict(worker.gradients)
        kept = all(held.get(layer) == promised for layer in layers)
        if not kept or worker.version != assignment.step:
            return self.fail(node, (), f"the sums of {layers} are not as promised")
        worker = worker._replace(
            phase=WorkerPhase.LOADED,
            state_epoch=worker.epoch,
            gradients=tuple((layer, held[layer]) for layer in layers),
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
        worker = node.worker._replace(phase=WorkerPhase.COMPUTING, kept=0)
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
        if not node.takes(node.name, node.worker.state_epoch):
            return node.vault
        return stored(node.vault, node.name, self.copies(node))

    def begin(self, node: Node) -> Effects:
        """Begin the step after a commit."""
        return Effects(replace(node, worker=node.worker._replace(updating=False)))

    def arrive(self, node: Node) -> Effects:
        """All copies are whole at the peer: enter the commit, or halt as promised."""
        worker = node.worker
        if self.goes_on(worker):
            return self.leave(node, complete=True)
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
        assert not worker.promise, f"a worker that has promised to halt commits step {step}"
        leaves = halt > worker.epoch
        worker = worker._replace(
            phase=WorkerPhase.LEFT if leaves else WorkerPhase.COMPUTING,
            version=step + 1,
            record=step,
            updating=self.scopes and not leaves and step + 1 < self.spec.n_steps,
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
