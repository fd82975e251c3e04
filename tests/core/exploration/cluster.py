"""The joint state of coordinator, store, nodes and network, and all its next states.

A joint state is a tuple of small numbers. Each number stands for an immutable value in a table: a
state of the coordinator, a node, or a connection. Steps of one part are computed once for each of
its states (`functools.cache` on the numbers), which makes the exploration fast.

    (faults, crashes, coordinator, store, promises, node, link, node, link, ...)

The first five numbers are the **head**, and a node with its link is a **pair**. A step changes one
pair; or two nodes (copies go to a peer); or the coordinator takes an event, which changes the head
and adds messages to links (`Outcome`). A search in C (`native`) does the same with the same tables.

**What no step reads any more** is set to a constant: saved states if no fault is left that reads
them, promises for epochs that no coordinator can reach again, and everything after the end.

**Connections** keep the order of messages both ways. **Saving** is atomic with a decision, and its
messages are sent afterwards. A crash of the coordinator between the two equals a crash after the
messages were lost.

**Time** passes only while no part can act, except parts that are slow by nature: workers that
start, connections that are cut, and refused nodes. Then it passes until the coordinator decides
something.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from enum import IntEnum
from functools import cache
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, Policy
from elastic.core.node import node as node_core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import STATE, Assignment, Copy
from tests.core.exploration import coordinator_model as coordinator
from tests.core.exploration.node_model import (
    ALL_PEERS,
    TRAINS,
    Effects,
    Node,
    NodeModel,
    Vault,
    Worker,
    WorkerPhase,
    stored,
)
from tests.core.recovery.job_model import make_spec

State = tuple[int, ...]
T = TypeVar("T")
HEAD = 5
"""Number of entries of a state before those of the first node."""
SLOW_S = 5.0
"""Most time that passes while a worker starts."""
CUT_S = 500.0
"""Most time that passes while a connection is cut: less than a job waits for lost nodes."""
LONG_S = 1000.0
MOST_WAITING = 32
"""Most messages that may wait on one connection."""
KINDS = (
    "drop",
    "duplicate",
    "takeover",
    "lost save",
    "node crash",
    "return",
    "cut",
    "worker crash",
    "coordinator cut",
)
"""Kinds of faults."""
OVER = (JobPhase.FINISHED, JobPhase.FAILED)
QUIET = (WorkerPhase.ABSENT, WorkerPhase.IDLE, WorkerPhase.LEFT)
"""Phases of a worker that waits for an order."""
NEVER = 2**30
"""Epoch that no job reaches."""


class LinkPhase(IntEnum):
    """Phase of the connection between a node and the coordinator."""

    OPEN = 0
    BROKEN = 1
    """The node knows that it is closed; the coordinator does not."""
    CLOSED = 2
    """Both know it. The agent opens it again if it lives."""
    CUT = 3
    """Nothing arrives. Nobody knows."""
    STALE = 4
    """The coordinator has changed. The node does not know it, and may get older messages."""
    GONE = 5
    """The node has ended, and the coordinator knows it."""


class Link(NamedTuple):
    phase: LinkPhase = LinkPhase.CLOSED
    known: bool = False
    """Whether the coordinator has had a message of the node over this connection."""
    up: tuple[int, ...] = ()
    """Messages to the coordinator, oldest first."""
    down: tuple[int, ...] = ()


Op = tuple[str, int]
"""Change of a link: (name, number of a message or 0); see `Cluster.changed`."""


class Outcome(NamedTuple):
    """What an event at the coordinator changes."""

    head: State
    ops: tuple[tuple[int, Op], ...] = ()
    """(index of a node, change of its link), in this order."""
    step: int = -1
    """First step of a new assignment: no member may have a newer version; -1: nothing to check."""


class Successor(NamedTuple):
    label: str | tuple[str, str, int]
    """Text, or (node, direction, number of a message)."""
    state: State
    fault: str = ""
    """Kind of the fault; "": none."""


class OrderKind(IntEnum):
    """Kinds of orders that may arrive sooner or later (`Cluster.first`)."""

    TRIM = 1
    """Old copies are removed from the vault."""
    INSTALL = 2
    HALT = 3
    ECHO = 4
    """The node only reports again."""


class QuietOrder(NamedTuple):
    """An order that a node may receive sooner or later (`Cluster.first`)."""

    kind: OrderKind
    epoch: int = 0

    def allows(self, epoch: int, loads: bool) -> bool:
        """Whether another node may depend on this one in an epoch, and load from it."""
        match self.kind:
            case OrderKind.TRIM:
                return epoch >= self.epoch and not loads
            case OrderKind.INSTALL:
                return epoch in (self.epoch, NEVER)
            case OrderKind.HALT:
                return epoch == NEVER
        return True


def _quiet(node: Node, order: Any, after: Node, reports: bool, copies: bool) -> QuietOrder | None:
    """Return the kind of an order if no other step of the node depends on when it arrives.

    `reports`: whether the node answers with a report; `copies`: whether this has its copies.
    """
    worker, new = node.worker, after.worker
    if worker.phase in TRAINS:
        # Reports of these phases have no copies, and the worker writes only newer copies.
        silent = node.agent.phase in (NodePhase.INSTALLING, NodePhase.RUNNING, NodePhase.FINISHED)
        trims = isinstance(order, m.Trim) and worker.state_epoch >= order.epoch
        return QuietOrder(OrderKind.TRIM, order.epoch) if silent and trims else None
    if worker.phase not in QUIET or after.agent.info != node.agent.info or not after.alive:
        return None
    if isinstance(order, m.Trim):
        return QuietOrder(OrderKind.TRIM, order.epoch)
    newest = _newest(after.vault) == _newest(node.vault)  # otherwise a prefetch may depend on it
    if after == node and not copies:
        return QuietOrder(OrderKind.ECHO)
    if isinstance(order, m.Install):
        undone = {copy for copy, _ in node.vault - after.vault} & _sources(order.assignment)
        starts = new.phase is WorkerPhase.LOADING and not reports
        waits = new == worker and after.agent.phase is NodePhase.IDLE and not copies
        if (starts or waits) and after.vault <= node.vault and newest and not undone:
            return QuietOrder(OrderKind.INSTALL, order.epoch)
    halts = isinstance(order, m.Halt) and after.agent.epoch == order.epoch
    if halts and new.phase in QUIET and newest:
        return QuietOrder(OrderKind.HALT, order.epoch)
    return None


class Violation(AssertionError):
    """A promise that a step has broken."""


class Table(Generic[T]):
    """Numbers for values."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: T, key: Hashable = None) -> int:
        key = value if key is None else key
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.values)
            self.values.append(value)
        return found


def _has_left(alive: bool, worker: Worker, epoch: int) -> bool:
    """Return whether a worker is not in this epoch any more, and its links are closed."""
    if alive and worker.phase > WorkerPhase.STARTING and worker.kept == epoch:
        return False
    if not alive or worker.phase <= WorkerPhase.STARTING or worker.epoch > epoch:
        return True
    return worker.epoch == epoch and worker.phase in (WorkerPhase.LEFT, WorkerPhase.IDLE)


def _sources(assignment: Assignment) -> set[Copy]:
    """Return the copies that an assignment loads."""
    recipes = [recipe for _, recipe in assignment.recipes]
    copies = [copy for r in recipes for copy in (r.state, *r.replay, *r.gradients)]
    return {copy for copy in copies if copy is not None}


def _newest(vault: Vault) -> dict[int, Copy]:
    """Return the newest state of each layer."""
    states = sorted(
        (c for c, _ in vault if c.kind == STATE), key=lambda c: (c.step, c.epoch, c.key)
    )
    return {copy.layer: copy for copy in states}


def _concerned(assignment: Assignment) -> set[str]:
    """Return the nodes that compute, keep copies, or are loaded from."""
    keepers = {keeper for _, keeper in assignment.plan.peers}
    return {*assignment.plan.nodes(), *keepers, *(copy.node for copy in _sources(assignment))}


def _policy(nodes: int, pipelines: int, spares: int | None) -> Policy:
    if spares is None:
        spares = 0 if pipelines > 1 else nodes - 2
    most = max(2, nodes - spares)
    shape, backup = str(pipelines), "stream+snapshot"
    return Policy(min_nodes=2, max_nodes=most, shape=shape, backup=backup)


class Workers(dict[int, int]):
    """Number of the worker of each node."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster

    def __missing__(self, number: int) -> int:
        node = self.cluster.nodes.values[number]
        self[number] = found = self.cluster.public.number((node.alive, node.worker))
        return found


class Cluster:
    """All steps of a small job."""

    def __init__(
        self,
        nodes: int,
        faults: int,
        *,
        kinds: frozenset[str] | None = None,
        sequences: frozenset[tuple[str, ...]] | None = None,
        steps: int = 1,
        pipelines: int = 1,
        microbatches: int = 1,
        spares: int | None = None,
        until_end: bool = False,
        coarse: bool = False,
        lost_writes: int = 1,
        reduced: bool = False,
    ) -> None:
        """`sequences`: kinds of the faults in their order; without, all sequences of `kinds`.

        `microbatches`: micro-batches per step. `spares`: nodes without a stage; None: with one
        pipeline all but two, else none.
        `lost_writes`: most last writes that the store loses at a time.
        `reduced`: leave out orders of steps that make no difference (`first`).
        """
        self.lost_writes, self.reduced = lost_writes, reduced
        self.coarse = coarse
        self.until_end = until_end
        if sequences is None:
            sequences = frozenset(product(sorted(kinds or KINDS), repeat=faults))
        self.kinds = frozenset(kind for sequence in sequences for kind in sequence)
        self.sequences: Table[frozenset[tuple[str, ...]]] = Table()
        """Sequences of faults that may still happen. Number 0: none."""
        self.sequences.number(frozenset({()}))
        self.faults = self.sequences.number(sequences)
        self.names = tuple(f"node{i}" for i in range(nodes))
        self.index = {name: i for i, name in enumerate(self.names)}
        self.spec = make_spec(2, microbatches, steps)
        self.scopes = pipelines > 1
        self.model = NodeModel(
            self.spec, keeps_assignments="lost save" not in self.kinds, scopes=self.scopes
        )
        self.policy = _policy(nodes, pipelines, spares)
        self.states: Table[JobState] = Table()
        self.nodes: Table[Node] = Table()
        self.links: Table[Link] = Table()
        self.messages: Table[Any] = Table()
        self.stores: Table[tuple[int, ...]] = Table()
        """Saved states, newest first: those with which another coordinator may begin."""
        self.stores.number(())
        self.promises: Table[tuple[tuple[int, int], ...]] = Table()
        """(epoch, number of its assignment) of the assignments that may still be sent again."""
        self.interventions: set[str] = set()
        """Log entries of the watchdog, of doubts and of pauses."""
        self.take = cache(self._take)
        self.gates: dict[int, int] = {}
        self._gates: dict[Hashable, int] = {}
        self._answers: dict[tuple[int, int, int], Any] = {}
        self.wait = cache(self._wait)
        self.aged = cache(self._aged)
        self.order = cache(self._order)
        self.local = cache(self._local)
        self.load = cache(self._load)
        self.train = cache(self._train)
        self.public: Table[tuple[bool, Worker]] = Table()
        """(whether the node lives, its worker)."""
        self.workers: dict[int, int] = Workers(self)
        """Number of the worker of each node."""
        self.popped = cache(self._popped)
        self.changed = cache(self._changed)
        self.effects = cache(self._effects)
        self.heard = cache(self._heard)
        self.event = cache(self._event)
        self.left = cache(self._left)
        self.solo = cache(self._solo)
        self.team = cache(self._team)
        self.link_event = cache(self._link_event)
        self.pair_faults = cache(self._pair_faults)
        self.quiet_order = cache(self._quiet_order)
        self.interest = cache(self._interest)
        self.next_kinds = cache(self._next_kinds)

    def keep_no_outcomes(self) -> None:
        """Compute outcomes anew each time, because the caller keeps them."""
        for name in ("heard", "event", "solo", "team", "link_event", "pair_faults"):
            setattr(self, name, getattr(self, f"_{name}"))

    @property
    def start(self) -> State:
        cs = self._state(coordinator.initial(self.policy))
        parts = []
        for name in self.names:
            node = self.nodes.number(self.model.new_node(name))
            parts += [node, self.links.number(Link())]
        head = (self.faults, 0, cs, self.stores.number((cs,)), self.promises.number(()))
        return (*self._living(head), *parts)

    def running(self) -> State:
        """Return a state in which the job runs, all copies are protected and nothing waits."""
        state = self.start
        for _ in range(1000):
            fast = list(self._fast(state))
            cs = self.states.values[state[2]]
            talking = [s for s in fast if isinstance(s.label, tuple)]
            training = cs.phase is JobPhase.RUNNING and cs.trimmed == cs.epoch
            if training and not talking:
                return state
            found = talking or fast or list(self._slow(state))
            state = (found or list(self._time(state)))[0].state
        raise AssertionError("the job does not start")

    def _state(self, state: JobState) -> int:
        return self.states.number(state, coordinator.freeze(state))

    # ---- steps of one part, by number ----

    def _take(self, cs: int, event: int) -> tuple[int, tuple[Any, ...], bool]:
        """The coordinator takes an event. Returns (state, actions, whether it is saved)."""
        return self._decided(coordinator.take(self.states.values[cs], self.messages.values[event]))

    def _decided(self, made: coordinator.Decision) -> tuple[int, tuple[Any, ...], bool]:
        actions = []
        for action in made.actions:
            if isinstance(action, job.Send):
                number = self.messages.number(action.message)
                actions.append((self.index[action.node], number))
            else:
                actions.append(action)
        return self._state(made.state), tuple(actions), made.saved

    def answer(self, cs: int, node: int, event: int) -> Any:
        """Return the answer to a message that is rejected; None: it is accepted."""
        state = self.states.values[cs]
        gate = self.gates.get(cs)
        if gate is None:
            members = tuple(
                (
                    name,
                    mb.report.info.incarnation,
                    mb.connected,
                    mb.seen,
                    mb.excused_s,
                    mb.closed_at,
                )
                for name, mb in state.members.items()
            )
            facts = (
                members,
                state.retired,
                state.released,
                state.ending is None,
                state.newest_step,
                state.epoch,
                state.spec is None,
                state.limits,
            )
            gate = self.gates[cs] = self._gates.setdefault(facts, len(self._gates))
        key = gate, node, event
        if key not in self._answers:
            self._answers[key] = coordinator.answer(
                state, self.names[node], self.messages.values[event]
            )
        return self._answers[key]

    def _wait(self, cs: int, heard: int, most_s: float) -> Any:
        """Returns (seconds, state, actions, saved), or None."""
        names = [name for i, name in enumerate(self.names) if heard >> i & 1]
        passed = coordinator.wait(self.states.values[cs], names, most_s)
        return passed and (passed.seconds, *self._decided(passed.decision))

    def _aged(self, cs: int, seconds: float) -> int:
        return self._state(coordinator.aged(self.states.values[cs], seconds))

    def _effects(self, effects: Effects) -> tuple[int, tuple[int, ...]]:
        sent = tuple(self.messages.number(coordinator.plain_message(x)) for x in effects.messages)
        return self.nodes.number(effects.node), sent

    def _order(self, node: int, order: int) -> tuple[int, tuple[int, ...]]:
        """A node receives an order."""
        effects = self.model.ordered(self.nodes.values[node], self.messages.values[order])
        worker = effects.node.worker
        if self.coarse and self.model.may_leave(worker):
            after = self.model.leave(effects.node)
            sent = after.messages if worker.promise else (*effects.messages, *after.messages)
            effects = Effects(after.node, sent)
        return self._effects(effects)

    def _local(self, number: int) -> tuple[tuple[str, bool, int, tuple[int, ...]], ...]:
        """Steps that need no other node: (label, whether it is slow, node, messages)."""
        node, found = self.nodes.values[number], []

        def step(label: str, effects: Effects, slow: bool = False) -> None:
            found.append((label, slow, *self._effects(effects)))

        if not node.alive:
            return ()
        if node.refused:
            again = replace(node, refused=False)
            step("asks to join again", Effects(again, (self.model.report(again),)), slow=True)
        phase = node.worker.phase
        if phase is WorkerPhase.STARTING:
            step("worker attaches", self.model.attach(node), slow=True)
        if self.model.may_leave(node.worker):
            step("worker halts", self.model.leave(node))
        if node.worker.updating:
            step(f"worker begins step {node.worker.version}", self.model.begin(node))
        elif phase is WorkerPhase.COMPUTING and not self.coarse:
            step("worker computes", self.model.compute(node))
        return tuple(found)

    def _load(self, number: int, *others: int) -> tuple[int, tuple[int, ...]]:
        node = self.nodes.values[number]
        return self._effects(self.model.load(node, self._vaults(others)))

    def _vaults(self, numbers: tuple[int, ...]) -> dict[str, Node]:
        nodes = [self.nodes.values[number] for number in numbers]
        return {node.name: node for node in nodes if node.alive}

    def _changed(self, link: int, op: Op) -> int:
        """Return the link after a change by the coordinator or the network."""
        value = self.links.values[link]
        name, message = op
        passes = value.phase in (LinkPhase.OPEN, LinkPhase.CUT)
        match name:
            case "send":  # lost if the connection is not open
                down = (*value.down, message) if passes and value.known else value.down
                value = value._replace(down=down)
            case "answer":
                value = value._replace(down=(*value.down, message))
            case "known" | "unknown":
                value = value._replace(known=name == "known")
            case "cut" if value.phase is LinkPhase.OPEN:
                value = value._replace(phase=LinkPhase.CUT)
            case "takeover" if passes or value.phase is LinkPhase.STALE:
                down = value.down if value.phase is not LinkPhase.CUT else ()
                value = Link(LinkPhase.STALE, False, (), down)
            case "takeover" | "takeover of a dead node":
                value = Link(LinkPhase.CLOSED)
        return self._numbered(value)

    def _reported(self, link: int, sent: tuple[int, ...]) -> int:
        """Add messages of the node; they are lost if the connection is not open."""
        value = self.links.values[link]
        if value.phase in (LinkPhase.OPEN, LinkPhase.CUT):
            value = value._replace(up=value.up + sent)
        return self._numbered(value)

    def _numbered(self, value: Link) -> int:
        """Fail if messages pile up: then the search would not end."""
        most = max(len(value.up), len(value.down))
        if most > MOST_WAITING:
            waiting = [repr(self.messages.values[n]) for n in (*value.up, *value.down)]
            raise RuntimeError(f"{most} messages wait on one connection:\n" + "\n".join(waiting))
        return self.links.number(value)

    def _popped(self, link: int, upward: bool, twice: bool) -> int:
        value = self.links.values[link]
        if twice:
            return link
        if upward:
            return self.links.number(value._replace(up=value.up[1:]))
        return self.links.number(value._replace(down=value.down[1:]))

    def relink(self, link: int, **changes: Any) -> int:
        return self.links.number(self.links.values[link]._replace(**changes))

    # ---- joint steps ----

    def successors(self, state: State) -> list[Successor]:
        """Return all next states. Raises Violation if a step breaks a promise."""
        if self.until_end and self.is_over(state[2]):
            return []
        found = list(self._fast(state))
        slow = list(self._slow(state))
        if not found:
            found += self._time(state)
        found += slow
        if state[0]:
            found += self._faults(state)
        if self.reduced:
            found = [one._replace(state=self.settled(one.state)) for one in found]
        return found

    def is_over(self, cs: int) -> bool:
        return self.states.values[cs].phase in OVER

    # ---- the reduction: docs/design/exploration.md, "Order of steps" ----

    def settled(self, state: State) -> State:
        """Return the state after all orders for which it makes no difference when they arrive."""
        while (i := self.first(state)) >= 0:
            _, _, *after = self.solo(*state[HEAD + 2 * i : HEAD + 2 * i + 2])[0]
            state = self._with(state, i, *after)
        return state

    def first(self, state: State) -> int:
        """Return the index of a node that may receive its oldest order at once; -1: none.

        No step of another part depends on whether the order comes before or after it.
        """
        if not self.reduces(state[:HEAD]):
            return -1
        pairs = [state[at : at + 2] for at in range(HEAD, len(state), 2)]
        for i, pair in enumerate(pairs):
            order = self.quiet_order(*pair)
            if order is None or not self._waits_for(state[2], i, pair[0], order):
                continue
            others = [self.interest(*pair)[i] for j, pair in enumerate(pairs) if j != i]
            if all(order.allows(*interest) for interest in others):
                return i
        return -1

    def reduces(self, head: State) -> bool:
        """Whether orders arrive at once if it makes no difference: no more faults can happen.

        With several pipelines a promise or a loss may come before or after an order, so each order
        may make a difference.
        """
        return self.reduced and head[0] == 0 and not self.scopes

    def _waits_for(self, cs: int, i: int, number: int, order: QuietOrder) -> bool:
        """Whether the coordinator makes no assignment that concerns the node before its next step.

        A new epoch needs its report. The assignment of the present epoch may be sent again, but no
        longer after an order to trim.
        """
        state, agent = self.states.values[cs], self.nodes.values[number].agent
        if self.member_incarnation(cs, i) != agent.info.incarnation:
            return False
        if order.kind is OrderKind.ECHO:
            return True
        if agent.epoch == state.epoch:
            trimmed = order.kind is not OrderKind.TRIM or self.has_trimmed(cs)
            return order.epoch == state.epoch and order.kind is not OrderKind.HALT and trimmed
        behind = agent.epoch < state.epoch and order.epoch <= state.epoch
        return behind and state.phase is JobPhase.HALTING

    def has_trimmed(self, cs: int) -> bool:
        state = self.states.values[cs]
        return state.trimmed == state.epoch

    def _quiet_order(self, number: int, link: int) -> QuietOrder | None:
        """Return the oldest order if it may arrive sooner or later, as far as this pair matters."""
        node, value = self.nodes.values[number], self.links.values[link]
        waits = node.alive and value.phase is LinkPhase.OPEN and value.down
        if not waits or node.refused or node.prefetch or self.model.may_leave(node.worker):
            return None
        reports = [self.messages.values[x] for x in value.up]
        if any(isinstance(x, m.NodeReport) and x.info != node.agent.info for x in reports):
            return None
        order, (number, sent) = value.down[0], self.order(number, value.down[0])
        after = self.nodes.values[number]
        copies = bool(sent) and self.model.reports_copies(after.agent)
        return _quiet(node, self.messages.values[order], after, bool(sent), copies)

    def _interest(self, number: int, link: int) -> tuple[tuple[int, bool], ...]:
        """Return how the worker of this node may depend on each node.

        (the epoch in which it looks at the other node, or loads from its vault, or writes to it;
        -1: in several epochs, NEVER: in none; whether it may load from it)
        """
        node = self.nodes.values[number]
        known = list[tuple[int, Assignment]]()
        epochs = [NEVER] * len(self.names)
        loads = set[str]()
        if node.alive:
            worker = node.worker
            orders = [self.messages.values[x] for x in self.links.values[link].down]
            if node.prefetch is not None or any(isinstance(x, m.Prefetch) for x in orders):
                loads |= {*self.names}
            if worker.phase is WorkerPhase.LOADING or worker.phase in TRAINS:
                known.append((worker.epoch, self.model.assignments[worker.assignment]))
            known += [(x.epoch, x.assignment) for x in orders if isinstance(x, m.Install)]
        for epoch, assignment in known:
            if node.name not in assignment.plan.nodes():
                continue
            if epoch > worker.epoch or worker.phase is WorkerPhase.LOADING:
                loads |= {copy.node for copy in _sources(assignment)}
            for name in _concerned(assignment):
                i = self.index[name]
                epochs[i] = epoch if epochs[i] in (NEVER, epoch) else -1
        return tuple((epoch, name in loads) for epoch, name in zip(epochs, self.names, strict=True))

    # ---- joint steps, continued ----

    def _fast(self, state: State) -> Iterator[Successor]:
        for i, name in enumerate(self.names):
            number, link = state[HEAD + 2 * i : HEAD + 2 * i + 2]
            event, popped = self.link_event(number, link)
            if event is not None:
                after = self._with(state, i, link=popped)
                label = (name, ">", event) if isinstance(event, int) else f"{name}: {event}"
                yield Successor(label, self._done(after, self.outcome(state[:HEAD], i, event)))
            for label, slow, node, new in self.solo(number, link):
                if not slow:
                    yield Successor(label, self._with(state, i, node, new))
        yield from self._together(state)

    def _link_event(self, node: int, link: int) -> tuple[int | str | None, int]:
        """Return what the coordinator gets next from a link, and the link after it; None: nothing.

        It is the number of a message, or an event of the connection.
        """
        value, alive = self.links.values[link], self.nodes.values[node].alive
        if value.phase is LinkPhase.OPEN and value.up:
            return value.up[0], self.popped(link, True, False)
        if value.phase is LinkPhase.BROKEN:
            return "its closed connection is noticed", self.relink(link, phase=LinkPhase.CLOSED)
        if not alive and value.phase is LinkPhase.CLOSED:
            event = job.PortRefused(self.nodes.values[node].name, self.incarnation(node))
            return self.messages.number(event), self.relink(link, phase=LinkPhase.GONE)
        return None, link

    def incarnation(self, node: int) -> str:
        return self.nodes.values[node].agent.info.incarnation

    def text(self, label: str | tuple[str, str, int]) -> str:
        """Return the text of a label."""
        if isinstance(label, str):
            return label
        name, way, number = label
        message = self.messages.values[number]
        text = type(message).__name__
        if isinstance(message, job.PortRefused):
            return f"{name}: its port refuses"
        if isinstance(message, m.NodeReport):
            text += f"({message.phase.value}, epoch {message.epoch})"
        elif isinstance(message, m.Halt | m.Install | m.Trim):
            text += f"({message.epoch})"
        return f"{name} {way} {text}"

    def _solo(self, number: int, link: int) -> list[tuple[Any, bool, int, int]]:
        """Steps of one pair alone: (label, whether it is slow, node, link)."""
        node, value = self.nodes.values[number], self.links.values[link]
        name, found = node.name, list[tuple[Any, bool, int, int]]()
        if value.phase in (LinkPhase.OPEN, LinkPhase.STALE) and value.down and node.alive:
            found.append(((name, "<", value.down[0]), False, *self._obeyed(number, link)))
        if node.alive and value.phase in (LinkPhase.BROKEN, LinkPhase.CLOSED, LinkPhase.STALE):
            opened = self.links.number(Link(LinkPhase.OPEN))
            after = self.sent(opened, *self.effects(self.model.connected(node)))
            found.append((f"{name}: connects", False, *after))
        for label, slow, after_number, sent in self.local(number):
            found.append((f"{name}: {label}", slow, *self.sent(link, after_number, sent)))
        if value.phase is LinkPhase.CUT:
            healed = self.relink(link, phase=LinkPhase.OPEN)
            found.append((f"{name}: network heals", True, number, healed))
            found.append((f"{name}: network resets", True, number, self._broken(link)))
        return found

    def _broken(self, link: int) -> int:
        return self.relink(link, phase=LinkPhase.BROKEN, known=False, up=(), down=())

    def _together(self, state: State) -> Iterator[Successor]:
        """Steps of a node that depend on other nodes."""
        numbers = state[HEAD::2]
        for label, i, number, sent, keeper, kept in self.team(numbers):
            before = state if kept < 0 else self._with(state, keeper, node=kept)
            after = self.sent(state[HEAD + 2 * i + 1], number, sent)
            yield Successor(label, self._with(before, i, *after))

    def _team(
        self, numbers: tuple[int, ...]
    ) -> list[tuple[str, int, int, tuple[int, ...], int, int]]:
        """Return (label, index, node, messages, index of a peer or -1, its number after it)."""
        found = []
        for i, number in enumerate(numbers):
            node, name = self.nodes.values[number], self.names[i]
            if not node.alive:
                continue
            if node.prefetch is not None:
                effects = self.model.prefetched(node, self._vaults(numbers))
                found.append((f"{name}: has fetched", i, *self.effects(effects), -1, -1))
            worker = node.worker
            if worker.phase is WorkerPhase.LOADING:
                found.append((f"{name}: worker loads", i, *self.load(number, *numbers), -1, -1))
            elif worker.phase in TRAINS:
                others = tuple(self.workers[n] for n in numbers)
                keeper = self.index.get(self.model.keeper(node) or "", -1)
                reads = WorkerPhase.LOADED <= worker.phase <= WorkerPhase.COMPUTED
                kept = numbers[keeper] if reads and keeper >= 0 else -1
                for label, after, sent, peer in self.train(number, i, others, keeper, kept):
                    found.append((f"{name}: worker {label}", i, after, sent, keeper, peer))
        return found

    def _train(
        self, number: int, i: int, others: tuple[int, ...], keeper: int, kept: int
    ) -> tuple[tuple[str, int, tuple[int, ...], int], ...]:
        """Steps of a worker that depend on the other workers of its epoch.

        `others`: numbers of all workers; `keeper`: index of the peer that keeps the copies, or -1;
        `kept`: its number. Returns (label, node, messages, number of the peer after it or -1).
        """
        node = self.nodes.values[number]
        worker, found = node.worker, []

        def step(label: str, effects: Effects, peer: int = -1) -> None:
            found.append((label, *self._effects(effects), peer))

        parts = {name: self.public.values[others[j]] for j, name in enumerate(self.names)}
        peers = {n: parts[n] for n in self.model.plan_nodes(worker) if n != node.name}
        for _, other in peers.values():
            if other.epoch == worker.epoch:
                self._require(
                    other.assignment == worker.assignment,
                    f"workers of epoch {worker.epoch} have different assignments",
                )
        if worker.phase is WorkerPhase.DONE or worker.updating:
            return ()
        peer = self.nodes.values[kept] if kept >= 0 else None
        inner = self.model.pipeline_nodes(worker, node.name)
        used = inner if worker.phase is not WorkerPhase.ARRIVED else peers.keys()
        lost = {n: None for n, p in peers.items() if n in used and self._is_lost(worker, *p)}
        waits = worker.phase is WorkerPhase.COMPUTED and peer is not None and not peer.alive
        if waits and peer is not None and not self._is_unheld(node, peer):
            lost[peer.name] = None
        if lost and not (worker.promise and worker.has_arrived):
            step("lost contact", self.model.fail(node, tuple(lost), "link"))
        together = all(
            other.epoch == worker.epoch and other.phase in TRAINS
            for name, (_, other) in peers.items()
            if name in inner
        )
        self._train_on(node, [w for _, w in peers.values()], together, peer, step)
        return tuple(found)

    def _is_lost(self, worker: Worker, alive: bool, other: Worker) -> bool:
        """Whether a worker loses contact with another one of its epoch.

        A worker that lost contact at the meeting point may still promise to halt there, so its
        links stay open. A worker that computes does not notice.
        """
        computes = self.scopes and worker.phase is not WorkerPhase.ARRIVED
        stays = alive and other.phase is WorkerPhase.LEFT and other.has_arrived
        if computes and stays and other.epoch == worker.epoch:
            return False
        return _has_left(alive, other, worker.epoch)

    def _is_unheld(self, node: Node, peer: Node) -> bool:
        """Whether the node's worker does not wait until this peer has its copies."""
        return peer.name in node.unheld or ALL_PEERS in node.unheld

    def _train_on(
        self, node: Node, others: list[Worker], together: bool, peer: Node | None, step: Any
    ) -> None:
        """The next step of a worker, if the others let it go on.

        `together`: whether all workers of its pipeline are in the epoch.
        """
        model, worker = self.model, node.worker
        if self.coarse and worker.phase in (WorkerPhase.LOADED, WorkerPhase.COMPUTING):
            if worker.phase is WorkerPhase.COMPUTING or together:
                self._train_coarsely(node, peer, step)
        elif worker.phase is WorkerPhase.LOADED and together:
            step("is ready", model.ready(node))
        elif worker.phase is WorkerPhase.COMPUTED and self._may_arrive(node, peer):
            kept = self._kept(node, peer)
            step("has whole copies", model.arrive(node), kept)
        elif worker.phase is WorkerPhase.ARRIVED and not worker.promise:
            self._commit(node, [worker, *others], step)

    def _may_send(self, node: Node, peer: Node | None) -> bool:
        """Whether the vaults take copies of the worker's epoch. None: it has no peer."""
        epoch = node.worker.epoch
        takes = peer is None or (peer.alive and peer.takes(node.name, epoch))
        return takes and node.takes(node.name, epoch)

    def _may_arrive(self, node: Node, peer: Node | None) -> bool:
        """Whether the peer has the worker's copies, or the worker does not wait for it."""
        unheld = peer is not None and self._is_unheld(node, peer)
        return unheld or self._may_send(node, peer)

    def _kept(self, node: Node, peer: Node | None) -> int:
        """Return the number of the peer with the copies of `node`; -1: there is no peer, or it
        takes no copies."""
        if peer is None or not self._may_send(node, peer):
            return -1
        vault = stored(peer.vault, peer.name, self.model.copies(node))
        return self.nodes.number(replace(peer, vault=vault))

    def _commit(self, node: Node, workers: list[Worker], step: Any) -> None:
        """Pass the commit if all workers of the epoch have entered it, or are beyond it."""
        worker = node.worker
        version = worker.version
        if any(w.epoch != worker.epoch or w.arrived < version for w in workers):
            return
        if version >= self.spec.n_steps:
            step("is done", self.model.finish(node))
            return
        self._check_commit(workers, version)
        halt = max(w.agreed for w in workers if w.arrived == version)
        step(f"commits step {version}", self.model.commit(node, halt))

    def _train_coarsely(self, node: Node, peer: Node | None, step: Any) -> None:
        """Compute, back up and enter the commit in one step, with one report."""
        model = self.model
        sent: list[Any] = []
        number = -1
        if node.worker.phase is WorkerPhase.LOADED:
            node, more = model.ready(node)
            sent += more
        node, more = model.compute(node)
        sent += more
        if node.worker.phase is WorkerPhase.COMPUTING:
            number = self._kept(node, peer)
        elif self._may_arrive(node, peer):
            number = self._kept(node, peer)
            node, more = model.arrive(node)
            sent += more
        step("computes", Effects(node, tuple(sent[-1:])), number)

    def _check_commit(self, workers: list[Worker], step: int) -> None:
        """Every layer has every micro-batch exactly once."""
        if any(worker.version != step for worker in workers):
            return  # checked when the first worker passed
        held = [pair for worker in workers for pair in worker.gradients]
        whole = tuple(range(self.spec.n_microbatches))
        for layer in range(self.spec.n_layers):
            sums = tuple(sorted(i for la, some in held if la == layer for i in some))
            self._require(sums == whole, f"step {step}, layer {layer}: {sums}")

    def _slow(self, state: State) -> Iterator[Successor]:
        """Steps that may take longer than a limit of the coordinator."""
        for i, name in enumerate(self.names):
            number, link = state[HEAD + 2 * i : HEAD + 2 * i + 2]
            for label, slow, node, new in self.solo(number, link):
                if slow:
                    yield Successor(label, self._with(state, i, node, new))
            if self.may_beat(number, link):
                order = self.beat_answer(state[2], i, number)
                if order >= 0 and order not in self.links.values[link].down:
                    after = self._with(state, i, link=self.changed(link, ("answer", order)))
                    yield Successor(f"{name}: heartbeat of a former member", after)

    def may_beat(self, node: int, link: int) -> bool:
        """Return whether the coordinator may answer a heartbeat of a node that is no member.

        A heartbeat takes time, in which most messages arrive. Without this limit a node that is
        refused could get one more answer each time, and the number of states would be infinite.
        """
        value = self.links.values[link]
        waits = not value.up and len(value.down) < 2
        return self.nodes.values[node].alive and value.phase is LinkPhase.OPEN and waits

    def beat_answer(self, cs: int, i: int, node: int) -> int:
        """Return the answer to the heartbeat of a node that is not a member; -1: none."""
        if self.incarnation(node) == self.member_incarnation(cs, i):
            return -1
        beat = self.messages.number(m.Heartbeat(self.names[i], self.incarnation(node), 0, 0))
        return self.messages.number(self.answer(cs, i, beat))

    def member_incarnation(self, cs: int, i: int) -> str:
        """Return the incarnation of the member with this index; "": it is no member."""
        member = self.states.values[cs].members.get(self.names[i])
        return member.report.info.incarnation if member is not None else ""

    def _time(self, state: State) -> Iterator[Successor]:
        """Time passes until the coordinator decides something."""
        heard, most_s = 0, LONG_S
        for i, number in enumerate(state[HEAD::2]):
            node, link = self.nodes.values[number], self.links.values[state[HEAD + 2 * i + 1]]
            if link.phase is LinkPhase.CUT:
                most_s = min(most_s, CUT_S)
            if node.worker.phase is WorkerPhase.STARTING:
                most_s = min(most_s, SLOW_S)
            same = self.incarnation(number) == self.member_incarnation(state[2], i)
            if node.alive and link.phase is LinkPhase.OPEN and same:
                heard |= 1 << i
        passed = self.passed(state[:HEAD], heard, most_s)
        if passed is not None:
            seconds, outcome = passed
            yield Successor(f"{seconds:g} s pass", self._done(state, outcome))

    def passed(self, head: State, heard: int, most_s: float) -> tuple[float, Outcome] | None:
        """Return the time that passes and what the coordinator decides then; None: nothing."""
        passed = self.wait(head[2], heard, most_s)
        if passed is None:
            return None
        seconds, cs, actions, saved = passed
        stored = tuple(self.aged(number, seconds) for number in self.stores.values[head[3]])
        head = (*head[:3], self.stores.number(stored), head[4])
        known = tuple((i, ("known", 0)) for i in range(len(self.names)) if heard >> i & 1)
        outcome = self._decision(head, cs, actions, saved)
        return seconds, outcome._replace(ops=(*known, *outcome.ops))

    # ---- faults ----

    def _faults(self, state: State) -> Iterator[Successor]:
        if self.is_over(state[2]):
            return
        kinds = self.next_kinds(state[0])
        for kind, label, after in self._possible(state, kinds):
            head = self.spent(after[:HEAD], kind)
            yield Successor(f"FAULT {kind} {label}", (*head, *after[HEAD:]), kind)

    def _next_kinds(self, faults: int) -> frozenset[str]:
        return frozenset(found[0] for found in self.sequences.values[faults] if found)

    def _left(self, faults: int, kind: str) -> int:
        """Return the faults that may follow one of this kind."""
        all_left = self.sequences.values[faults]
        return self.sequences.number(frozenset(x[1:] for x in all_left if x[:1] == (kind,)))

    def spent(self, head: State, kind: str) -> State:
        """Return the head after a fault of this kind."""
        if self.until_end and self.is_over(head[2]):
            return head
        return self._living((self.left(head[0], kind), *head[1:]))

    def _living(self, head: State) -> State:
        """Set everything to a constant that nothing reads any more."""
        faults, crashes, cs, store, promises = head
        kinds = {kind for sequence in self.sequences.values[faults] for kind in sequence}
        saved = self.stores.values[store]
        if "lost save" not in kinds:
            saved = saved[:1] if "takeover" in kinds else ()
        first = min(self.states.values[number].epoch for number in (cs, *saved))
        kept = tuple(one for one in self.promises.values[promises] if one[0] >= first)
        return (faults, min(crashes, 2), cs, self.stores.number(saved), self.promises.number(kept))

    def _possible(self, state: State, kinds: frozenset[str]) -> Iterator[tuple[str, str, State]]:
        head = state[:HEAD]
        for i, name in enumerate(self.names):
            number, link = state[HEAD + 2 * i : HEAD + 2 * i + 2]
            for kind, label, node, new, crashes in self.pair_faults(number, link, kinds):
                after = self._with(state, i, node, new)
                yield kind, label, (state[0], state[1] + crashes, *after[2:])
            value = self.links.values[link]
            if "duplicate" in kinds and value.phase is LinkPhase.OPEN and value.up:
                outcome = self.outcome(head, i, value.up[0])
                yield "duplicate", f"{name} >", self._done(state, outcome)
        if "coordinator cut" in kinds:
            yield "coordinator cut", "", self._on_all(state, "cut")
        for kind, start in self.takeovers(head, kinds):
            after = self._on_all(state, "takeover")
            before = self.states.values[start]
            label = f"{before.phase.value}, epoch {before.epoch}"
            yield kind, label, self._done(after, self.takeover(head, start))

    def _pair_faults(
        self, number: int, link: int, kinds: frozenset[str]
    ) -> list[tuple[str, str, int, int, int]]:
        """Faults of one pair alone: (kind, label, node, link, number of crashed nodes)."""
        node, value = self.nodes.values[number], self.links.values[link]
        name, found = node.name, list[tuple[str, str, int, int, int]]()
        if value.phase is LinkPhase.OPEN:
            found.append(("drop", name, number, self._broken(link), 0))
            found.append(("cut", name, number, self.changed(link, ("cut", 0)), 0))
            if value.down:
                twice = self._obeyed(number, link, twice=True)
                found.append(("duplicate", f"{name} <", *twice, 0))
        if node.alive:
            found.append(("node crash", name, *self._killed(number, link), 1))
            if "worker crash" in kinds and node.worker.phase >= WorkerPhase.IDLE:
                sent = self.sent(link, *self.effects(self.model.crash(node)))
                found.append(("worker crash", name, *sent, 0))
        elif value.phase in (LinkPhase.CLOSED, LinkPhase.GONE) and not node.ended:
            fresh = self.nodes.number(self.model.new_node(name, node.incarnation + 1))
            found.append(("return", name, fresh, self.links.number(Link()), 0))
        return [one for one in found if one[0] in kinds]

    def takeovers(self, head: State, kinds: frozenset[str]) -> list[tuple[str, int]]:
        """Return (kind, state with which the next coordinator begins)."""
        cs, saved = head[2], self.stores.values[head[3]]
        found = [("takeover", start) for start in dict.fromkeys((*saved[:1], cs))]
        found += [("lost save", start) for start in dict.fromkeys(saved[1:]) if start != saved[0]]
        return [one for one in found if one[0] in kinds]

    def takeover(self, head: State, start: int) -> Outcome:
        head = (*head[:2], start, self.stores.number((start,)), head[4])
        return self.event(head, job.CoordinatorFailover())

    def _killed(self, number: int, link: int) -> tuple[int, int]:
        node = self.nodes.values[number]
        worker = node.worker
        ghost = worker if worker.arrived >= 0 else Worker()
        ghost = ghost._replace(phase=WorkerPhase.ABSENT)
        dead = Node(
            node_core.NodeState(node.agent.info),
            ghost,
            alive=False,
            incarnation=node.incarnation,
        )
        noticed = self.links.values[link].phase in (LinkPhase.CLOSED, LinkPhase.STALE)
        phase = LinkPhase.CLOSED if noticed else LinkPhase.BROKEN
        return self.nodes.number(dead), self.links.number(Link(phase))

    def _on_all(self, state: State, name: str) -> State:
        """Change all links: a cut, or a takeover."""
        after = list(state)
        for at in range(HEAD, len(state), 2):
            after[at + 1] = self.changed(state[at + 1], (self.op_for(state[at], name), 0))
        return tuple(after)

    def op_for(self, node: int, name: str) -> str:
        dead = name == "takeover" and not self.nodes.values[node].alive
        return "takeover of a dead node" if dead else name

    # ---- composing ----

    def _with(self, state: State, i: int, node: int = -1, link: int = -1) -> State:
        at = HEAD + 2 * i
        pair = (node if node >= 0 else state[at], link if link >= 0 else state[at + 1])
        return (*state[:at], *pair, *state[at + 2 :])

    def sent(self, link: int, node: int, sent: tuple[int, ...]) -> tuple[int, int]:
        """The node of a link becomes `node` and sends messages. Returns (node, link)."""
        if sent:
            link = self._reported(link, sent)
        if self.nodes.values[node].ended:
            phase = self.links.values[link].phase
            known = phase in (LinkPhase.CLOSED, LinkPhase.STALE)
            link = self.links.number(Link(LinkPhase.CLOSED if known else LinkPhase.BROKEN))
        return node, link

    def _obeyed(self, node: int, link: int, twice: bool = False) -> tuple[int, int]:
        """The node receives the oldest message of the coordinator."""
        order = self.links.values[link].down[0]
        return self.sent(self.popped(link, False, twice), *self.order(node, order))

    def outcome(self, head: State, i: int, event: int | str) -> Outcome:
        """The coordinator gets a message of node i, or an event of its connection."""
        if isinstance(event, int):
            message = self.messages.values[event]
            if isinstance(message, job.PortRefused):
                return self.event(head, message)
            return self.heard(head, i, event)
        incarnation = self.member_incarnation(head[2], i)
        if not incarnation:
            return Outcome(head)
        return self.event(head, job.ConnectionClosed(self.names[i], incarnation))

    def _heard(self, head: State, i: int, event: int) -> Outcome:
        message = self.messages.values[event]
        answer = self.answer(head[2], i, event)
        if answer is not None:
            if answer == ():
                return Outcome(head)
            number = self.messages.number(coordinator.plain_message(answer))
            return Outcome(head, ((i, ("answer", number)),))
        known: tuple[tuple[int, Op], ...] = ()
        if isinstance(message, m.NodeReport):
            known = ((i, ("known", 0)),)
        former = self.names[i] not in self.states.values[head[2]].members
        if isinstance(message, m.StepDone) and former:
            return Outcome(head)
        cs, actions, saved = self.take(head[2], event)
        outcome = self._decision(head, cs, actions, saved)
        return outcome._replace(ops=(*known, *outcome.ops))

    def _event(self, head: State, event: Any) -> Outcome:
        return self._decision(head, *self.take(head[2], self.messages.number(event)))

    def _decision(self, head: State, cs: int, actions: tuple[Any, ...], saved: bool) -> Outcome:
        """The coordinator's state becomes `cs`; it is saved, then the actions are carried out."""
        after = list(head)
        after[2] = cs
        states = self.stores.values[head[3]]
        if saved and states and cs != states[0]:
            after[3] = self.stores.number((cs, *states[: self.lost_writes]))
        ops, step = list[tuple[int, Op]](), -1
        for action in actions:
            if isinstance(action, job.JobFinished):
                self._require(
                    action.code == 0 or head[1] > 1, f"the job ends with code {action.code}"
                )
                ops += self._tell_others(cs, action)
            elif isinstance(action[0], str):
                self.interventions.add(" ".join(action))
            else:
                i, number = action
                message = self.messages.values[number]
                if self.reduces(head):
                    self._check_reduction(cs, i, message, head)
                if isinstance(message, m.Install):
                    known = dict(self.promises.values[after[4]])
                    if message.epoch not in known and head[1] <= 1:
                        step = message.assignment.step
                    after[4] = self._promised(known, message.epoch, message.assignment)
                ops.append((i, ("send", number)))
                if isinstance(message, m.Fenced):
                    ops.append((i, ("unknown", 0)))
        return Outcome(self._living(tuple(after)), tuple(ops), step)

    def _check_reduction(self, cs: int, i: int, message: Any, head: State) -> None:
        """Check what `first` relies on: when the coordinator sends orders that let workers load."""
        state = self.states.values[cs]
        if isinstance(message, m.Prefetch):
            assert state.assignment is not None
            stages = [stage for _, _, stage in state.assignment.plan.stages()]
            held = {(layer, stage.unit.node) for stage in stages for layer in stage.layers}
            old = {x for x, mb in state.members.items() if mb.report.epoch < state.epoch}
            sources = {(layer, name) for layer, _, name in message.sources if name not in old}
            assert len(sources) == len(message.sources) and sources <= held, "an old copy is read"
        if not isinstance(message, m.Install):
            return
        epoch, plan = message.epoch, message.assignment.plan
        concerned = _concerned(message.assignment)
        if epoch not in dict(self.promises.values[head[4]]):
            members = {x for x, mb in state.members.items() if mb.report.epoch >= epoch}
            late = sorted(concerned - members)
            assert not late, f"epoch {epoch} begins without reports of {late}"
        holder = self.names[i] in plan.nodes()
        assert not (holder and state.trimmed == epoch), f"epoch {epoch} was trimmed"

    def _check_members(self, before: int, after: list[int]) -> None:
        """Check that no member is dropped while its reports wait: `first` relies on it.

        Heartbeats of former members are answered only if no report waits.
        """
        for i, number in enumerate(after[HEAD::2]):
            link = self.links.values[after[HEAD + 2 * i + 1]]
            own = self.incarnation(number)
            stays = self.member_incarnation(after[2], i) == own
            waits = link.phase is LinkPhase.OPEN and link.up
            if waits and not stays and self.member_incarnation(before, i) == own:
                raise Violation("the reduction knows no dropped member whose reports wait")

    def _tell_others(self, cs: int, end: job.JobFinished) -> Iterator[tuple[int, Op]]:
        """The end is told to connected nodes that are not members."""
        members = self.states.values[cs].members
        stop = self.messages.number(m.Stop(end.code, ""))
        for i, name in enumerate(self.names):
            if name not in members:
                yield i, ("send", stop)

    def _done(self, state: State, outcome: Outcome) -> State:
        """Return the state after an event at the coordinator."""
        head = outcome.head
        if self.until_end and self.is_over(head[2]):
            return self.end(head[2])
        after = [*head, *state[HEAD:]]
        for i, op in outcome.ops:
            at = HEAD + 2 * i + 1
            after[at] = self.changed(after[at], op)
        if self.reduces(state[:HEAD]):
            self._check_members(state[2], after)
        if outcome.step >= 0:
            for i, number in enumerate(after[HEAD::2]):
                version = self.version(number)
                member = self.incarnation(number) == self.member_incarnation(head[2], i)
                self._require(
                    version <= outcome.step or not member,
                    f"an epoch goes back to step {outcome.step} although version {version} exists",
                )
        return tuple(after)

    def end(self, cs: int) -> State:
        """Return the state of a job that is over."""
        return (0, 0, cs, 0, 0, *(0 for _ in range(2 * len(self.names))))

    # ---- promises ----

    def version(self, number: int) -> int:
        """Return the version of the state in a node's worker; -1: none."""
        node = self.nodes.values[number]
        return node.worker.version if node.alive else -1

    def _promised(self, known: dict[int, int], epoch: int, assignment: Assignment) -> int:
        """Every assignment of an epoch is the same, whichever coordinator sends it."""
        number = self.model.number(assignment)
        self._require(known.get(epoch, number) == number, f"two assignments for epoch {epoch}")
        return self.promises.number(tuple(sorted({**known, epoch: number}.items())))

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    def is_goal(self, state: State) -> bool:
        """Whether the job has ended and all agents with it, or no node can run it any more."""
        phase = self.states.values[state[2]].phase
        if self.until_end and phase in OVER:
            return True
        living = sum(self.nodes.values[n].alive for n in state[HEAD::2])
        if not living:  # the launcher ends a job without nodes
            return True
        return living < self.policy.min_nodes and phase is JobPhase.WAITING
