"""The joint state of coordinator, store, nodes and network, and all its next states.

A joint state is a tuple of small numbers. Each number stands for an immutable value in a table: a
state of the coordinator, a node, or a connection. Steps of one part are computed once for each of
its states (`functools.cache` on the numbers), which makes the exploration fast.

    (budget, crashes, coordinator, saved, saved before, promises, node, link, node, link, ...)

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
from typing import Any, Generic, NamedTuple, TypeVar

from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, Policy
from elastic.core.node import node as node_core
from elastic.core.protocol import messages as m
from elastic.domain.types import Assignment
from tests.core.exploration import coordinator_model as coordinator
from tests.core.exploration.node_model import (
    TRAINS,
    Effects,
    Node,
    NodeModel,
    Worker,
    WorkerPhase,
    stored,
)
from tests.core.recovery.job_model import make_spec

State = tuple[int, ...]
T = TypeVar("T")
HEAD = 6
"""Number of entries of a state before those of the first node."""
SLOW_S = 5.0
"""Most time that passes while a worker starts."""
CUT_S = 500.0
"""Most time that passes while a connection is cut: less than a job waits for lost nodes."""
LONG_S = 1000.0
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


class Successor(NamedTuple):
    label: str | tuple[str, str, int]
    """Text, or (node, direction, number of a message)."""
    state: State
    fault: str = ""
    """Kind of the fault; "": none."""


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
    """Return whether a worker is not in this epoch any more."""
    if not alive or worker.phase <= WorkerPhase.STARTING or worker.epoch > epoch:
        return True
    return worker.epoch == epoch and worker.phase in (WorkerPhase.LEFT, WorkerPhase.IDLE)


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
        steps: int = 1,
        max_nodes: int = 2,
        until_end: bool = False,
        coarse: bool = False,
    ) -> None:
        self.coarse = coarse
        self.until_end = until_end
        self.faults, self.kinds = faults, kinds
        self.names = tuple(f"node{i}" for i in range(nodes))
        self.index = {name: i for i, name in enumerate(self.names)}
        self.spec = make_spec(2, 1, steps)
        self.model = NodeModel(self.spec)
        self.policy = Policy(min_nodes=2, max_nodes=max_nodes, shape="1", backup="stream+snapshot")
        self.states: Table[JobState] = Table()
        self.nodes: Table[Node] = Table()
        self.links: Table[Link] = Table()
        self.messages: Table[Any] = Table()
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
        self.pushed = cache(self._pushed)
        self.popped = cache(self._popped)
        self.effects = cache(self._effects)

    @property
    def start(self) -> State:
        cs = self._state(coordinator.initial(self.policy))
        parts = []
        for name in self.names:
            node = self.nodes.number(self.model.new_node(name))
            parts += [node, self.links.number(Link())]
        return (self.faults, 0, cs, cs, cs, self.promises.number(()), *parts)

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
                (name, mb.report.info.incarnation, mb.connected, mb.seen, mb.closed_at)
                for name, mb in state.members.items()
            )
            facts = (
                members,
                state.retired,
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
        if self.coarse and self.model.may_leave(effects.node.worker):
            after = self.model.leave(effects.node)
            effects = Effects(after.node, (*effects.messages, *after.messages))
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
        if phase is WorkerPhase.COMPUTING and not self.coarse:
            step("worker computes", self.model.compute(node))
        return tuple(found)

    def _load(self, number: int, *others: int) -> tuple[int, tuple[int, ...]]:
        node = self.nodes.values[number]
        return self._effects(self.model.load(node, self._vaults(others)))

    def _vaults(self, numbers: tuple[int, ...]) -> dict[str, Node]:
        nodes = [self.nodes.values[number] for number in numbers]
        return {node.name: node for node in nodes if node.alive}

    def _pushed(self, link: int, up: tuple[int, ...], down: tuple[int, ...]) -> int:
        """Add messages to a connection; they are lost if it is not open."""
        value = self.links.values[link]
        if value.phase in (LinkPhase.OPEN, LinkPhase.CUT):
            value = value._replace(up=value.up + up)
            if value.known:
                value = value._replace(down=value.down + down)
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
        if self.until_end and self.states.values[state[2]].phase in OVER:
            return []
        found = list(self._fast(state))
        slow = list(self._slow(state))
        if not found:
            found += self._time(state)
        found += slow
        if state[0]:
            found += self._faults(state)
        return found

    def _fast(self, state: State) -> Iterator[Successor]:
        for i in range(len(self.names)):
            link = self.links.values[state[HEAD + 2 * i + 1]]
            node = self.nodes.values[state[HEAD + 2 * i]]
            yield from self._messages(state, i, link, node)
            if node.alive:
                yield from self._work(state, i, node)

    def _messages(self, state: State, i: int, link: Link, node: Node) -> Iterator[Successor]:
        name = self.names[i]
        if link.phase is LinkPhase.OPEN and link.up:
            yield Successor((name, ">", link.up[0]), self.heard(state, i))
        if link.phase in (LinkPhase.OPEN, LinkPhase.STALE) and link.down and node.alive:
            yield Successor((name, "<", link.down[0]), self.obeyed(state, i))
        if link.phase is LinkPhase.BROKEN:
            yield Successor(f"{name}: its closed connection is noticed", self._closed(state, i))
        broken = (LinkPhase.BROKEN, LinkPhase.CLOSED, LinkPhase.STALE)
        if node.alive and link.phase in broken:
            yield Successor(f"{name}: connects", self._connected(state, i))
        if not node.alive and link.phase is LinkPhase.CLOSED:
            gone = self._with(state, i, link=self.relink(state[HEAD + 2 * i + 1], phase=5))
            event = job.PortRefused(name, node.agent.info.incarnation)
            yield Successor(f"{name}: its port refuses", self._event(gone, event))

    def text(self, label: str | tuple[str, str, int]) -> str:
        """Return the text of a label."""
        if isinstance(label, str):
            return label
        name, way, number = label
        message = self.messages.values[number]
        text = type(message).__name__
        if isinstance(message, m.NodeReport):
            text += f"({message.phase.value}, epoch {message.epoch})"
        elif isinstance(message, m.Halt | m.Install | m.Trim):
            text += f"({message.epoch})"
        return f"{name} {way} {text}"

    def _work(self, state: State, i: int, node: Node) -> Iterator[Successor]:
        """Fast steps of a node's worker and agent."""
        number, name = state[HEAD + 2 * i], self.names[i]
        for label, slow, after, sent in self.local(number):
            if not slow:
                yield Successor(f"{name}: {label}", self._sent(state, i, after, sent))
        worker = node.worker
        if node.prefetch is not None:
            effects = self.model.prefetched(node, self._vaults(self._numbers(state)))
            yield Successor(f"{name}: has fetched", self._acted(state, i, effects))
        if worker.phase is WorkerPhase.LOADING:
            after, sent = self.load(number, *self._numbers(state))
            yield Successor(f"{name}: worker loads", self._sent(state, i, after, sent))
        elif worker.phase in TRAINS:
            numbers = self._numbers(state)
            others = tuple(self.workers[n] for n in numbers)
            keeper = self.index.get(self.model.keeper(node) or "", -1)
            reads = WorkerPhase.LOADED <= worker.phase <= WorkerPhase.COMPUTED
            kept = numbers[keeper] if reads and keeper >= 0 else -1
            for label, after, sent, peer in self.train(number, i, others, keeper, kept):
                before = state if peer < 0 else self._with(state, keeper, node=peer)
                yield Successor(f"{name}: worker {label}", self._sent(before, i, after, sent))

    def _numbers(self, state: State) -> tuple[int, ...]:
        return state[HEAD::2]

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
        if worker.phase is WorkerPhase.DONE:
            return ()
        peer = self.nodes.values[kept] if kept >= 0 else None
        lost = {n: None for n, part in peers.items() if _has_left(*part, worker.epoch)}
        if worker.phase is WorkerPhase.COMPUTED and peer is not None and not peer.alive:
            lost[peer.name] = None
        if lost:
            step("lost contact", self.model.fail(node, tuple(lost), "link"))
        self._train_on(node, [w for _, w in peers.values()], peer, step)
        return tuple(found)

    def _train_on(self, node: Node, others: list[Worker], peer: Node | None, step: Any) -> None:
        """The next step of a worker, if the others let it go on."""
        model, worker = self.model, node.worker
        together = all(w.epoch == worker.epoch and w.phase in TRAINS for w in others)
        if self.coarse and worker.phase in (WorkerPhase.LOADED, WorkerPhase.COMPUTING):
            if worker.phase is WorkerPhase.COMPUTING or together:
                self._train_coarsely(node, peer, step)
        elif worker.phase is WorkerPhase.LOADED and together:
            step("is ready", model.ready(node))
        elif worker.phase is WorkerPhase.COMPUTED and self._may_send(node, peer):
            kept = self._kept(node, peer)
            step("has whole copies", model.arrive(node), kept)
        elif worker.phase is WorkerPhase.ARRIVED:
            self._commit(node, [worker, *others], step)

    def _may_send(self, node: Node, peer: Node | None) -> bool:
        """Whether the vaults take copies of the worker's epoch. None: it has no peer."""
        epoch = node.worker.epoch
        takes = peer is None or (peer.alive and peer.fence <= epoch)
        return takes and node.fence <= epoch

    def _kept(self, node: Node, peer: Node | None) -> int:
        """Return the number of the peer with the copies of `node`; -1: there is no peer."""
        if peer is None:
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
        if self._may_send(node, peer):
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
            number, link_number = state[HEAD + 2 * i : HEAD + 2 * i + 2]
            for label, slow, after, sent in self.local(number):
                if slow:
                    yield Successor(f"{name}: {label}", self._sent(state, i, after, sent))
            link, node = self.links.values[link_number], self.nodes.values[number]
            if link.phase is LinkPhase.CUT:
                healed = self.relink(link_number, phase=LinkPhase.OPEN)
                reset = self.relink(
                    link_number, phase=LinkPhase.BROKEN, known=False, up=(), down=()
                )
                yield Successor(f"{name}: network heals", self._with(state, i, link=healed))
                yield Successor(f"{name}: network resets", self._with(state, i, link=reset))
            elif link.phase is LinkPhase.OPEN and node.alive and not link.up:
                beaten = self._beat(state, i, node)
                if beaten is not None:
                    yield Successor(f"{name}: heartbeat of a former member", beaten)

    def _beat(self, state: State, i: int, node: Node) -> State | None:
        """The heartbeat of a node that is not a member is answered."""
        members = self.states.values[state[2]].members
        member = members.get(node.name)
        info = node.agent.info
        if member is not None and member.report.info.incarnation == info.incarnation:
            return None
        beat = self.messages.number(m.Heartbeat(info.node, info.incarnation, 0, 0))
        answer = self.answer(state[2], i, beat)
        link = self.links.values[state[HEAD + 2 * i + 1]]
        order = self.messages.number(answer)
        if order in link.down:
            return None
        new = self.links.number(link._replace(down=(*link.down, order)))
        return self._with(state, i, link=new)

    def _time(self, state: State) -> Iterator[Successor]:
        """Time passes until the coordinator decides something."""
        heard, most_s = 0, LONG_S
        links = list(state[HEAD + 1 :: 2])
        members = self.states.values[state[2]].members
        for i, number in enumerate(self._numbers(state)):
            node, link = self.nodes.values[number], self.links.values[links[i]]
            if link.phase is LinkPhase.CUT:
                most_s = min(most_s, CUT_S)
            if node.worker.phase is WorkerPhase.STARTING:
                most_s = SLOW_S
            member = members.get(node.name)
            same = member and member.report.info.incarnation == node.agent.info.incarnation
            if node.alive and link.phase is LinkPhase.OPEN and same:
                heard |= 1 << i
                links[i] = self.relink(links[i], known=True)
        passed = self.wait(state[2], heard, most_s)
        if passed is None:
            return
        seconds, cs, actions, saved = passed
        after = list(state)
        after[HEAD + 1 :: 2] = links
        after[3], after[4] = self.aged(state[3], seconds), self.aged(state[4], seconds)
        yield Successor(f"{seconds:g} s pass", self._after(tuple(after), cs, actions, saved))

    # ---- faults ----

    def _faults(self, state: State) -> Iterator[Successor]:
        if self.states.values[state[2]].phase in OVER:
            return
        for fault, label, after in self._possible(state):
            if self.kinds is None or fault in self.kinds:
                after = self._spent(after)
                yield Successor(f"FAULT {fault} {label}", after, fault)

    def _spent(self, state: State) -> State:
        budget = state[0] - 1
        if budget:
            return (budget, *state[1:])
        # Nothing reads the store any more.
        return (0, state[1], state[2], 0, 0, *state[5:])

    def _possible(self, state: State) -> Iterator[tuple[str, str, State]]:
        for i, name in enumerate(self.names):
            number, link_number = state[HEAD + 2 * i : HEAD + 2 * i + 2]
            node, link = self.nodes.values[number], self.links.values[link_number]
            if link.phase is LinkPhase.OPEN:
                broken = self.relink(
                    link_number, phase=LinkPhase.BROKEN, known=False, up=(), down=()
                )
                yield "drop", name, self._with(state, i, link=broken)
                cut = self.relink(link_number, phase=LinkPhase.CUT)
                yield "cut", name, self._with(state, i, link=cut)
                if link.up:
                    yield "duplicate", f"{name} >", self.heard(state, i, twice=True)
                if link.down:
                    yield "duplicate", f"{name} <", self.obeyed(state, i, twice=True)
            if node.alive:
                yield "node crash", name, self._killed(state, i)
                if node.worker.phase >= WorkerPhase.IDLE:
                    effects = self.model.crash(node)
                    yield "worker crash", name, self._acted(state, i, effects)
            elif link.phase in (LinkPhase.CLOSED, LinkPhase.GONE) and not node.ended:
                yield "return", name, self._returned(state, i, node)
        yield "coordinator cut", "", self._all_cut(state)
        unsaved = () if state[2] == state[3] else (("latest", state[2]),)
        for which, start in (("saved", state[3]), *unsaved):
            yield "takeover", which, self._taken_over(state, start)
        if state[4] != state[3]:
            yield "lost save", "", self._taken_over(state, state[4])

    def _killed(self, state: State, i: int) -> State:
        number = state[HEAD + 2 * i]
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
        link = self.links.values[state[HEAD + 2 * i + 1]]
        noticed = link.phase in (LinkPhase.CLOSED, LinkPhase.STALE)
        phase = LinkPhase.CLOSED if noticed else LinkPhase.BROKEN
        gone = self.links.number(Link(phase))
        state = self._with(state, i, node=self.nodes.number(dead), link=gone)
        return (state[0], state[1] + 1, *state[2:])

    def _returned(self, state: State, i: int, node: Node) -> State:
        fresh = self.model.new_node(node.name, node.incarnation + 1)
        closed = self.links.number(Link())
        return self._with(state, i, node=self.nodes.number(fresh), link=closed)

    def _all_cut(self, state: State) -> State:
        after = list(state)
        for at in range(HEAD + 1, len(state), 2):
            if self.links.values[state[at]].phase is LinkPhase.OPEN:
                after[at] = self.relink(state[at], phase=LinkPhase.CUT)
        return tuple(after)

    def _taken_over(self, state: State, start: int) -> State:
        """A new coordinator begins with the saved state `start`."""
        after = list(state)
        for at in range(HEAD, len(state), 2):
            node, link = self.nodes.values[state[at]], self.links.values[state[at + 1]]
            if not node.alive:
                after[at + 1] = self.links.number(Link(LinkPhase.CLOSED))
            elif link.phase in (LinkPhase.OPEN, LinkPhase.CUT, LinkPhase.STALE):
                down = link.down if link.phase is not LinkPhase.CUT else ()
                after[at + 1] = self.links.number(Link(LinkPhase.STALE, False, (), down))
            else:
                after[at + 1] = self.links.number(Link(LinkPhase.CLOSED))
        after[2] = after[3] = after[4] = start
        return self._event(tuple(after), job.CoordinatorFailover())

    # ---- composing ----

    def _with(self, state: State, i: int, node: int = -1, link: int = -1) -> State:
        at = HEAD + 2 * i
        pair = (node if node >= 0 else state[at], link if link >= 0 else state[at + 1])
        return (*state[:at], *pair, *state[at + 2 :])

    def _acted(self, state: State, i: int, effects: Effects) -> State:
        return self._sent(state, i, *self.effects(effects))

    def _sent(self, state: State, i: int, node: int, sent: tuple[int, ...]) -> State:
        """Node i becomes `node` and sends messages."""
        link = state[HEAD + 2 * i + 1]
        if sent:
            link = self.pushed(link, sent, ())
        if self.nodes.values[node].ended:
            phase = self.links.values[link].phase
            known = phase in (LinkPhase.CLOSED, LinkPhase.STALE)
            link = self.links.number(Link(LinkPhase.CLOSED if known else LinkPhase.BROKEN))
        return self._with(state, i, node, link)

    def heard(self, state: State, i: int, twice: bool = False) -> State:
        """The coordinator receives the oldest message of node i."""
        at = HEAD + 2 * i + 1
        event = self.links.values[state[at]].up[0]
        message = self.messages.values[event]
        state = self._with(state, i, link=self.popped(state[at], True, twice))
        answer = self.answer(state[2], i, event)
        if answer is not None:
            if answer == ():
                return state
            link = self.links.values[state[at]]
            number = self.messages.number(coordinator.plain_message(answer))
            return self._with(state, i, link=self.relink(state[at], down=(*link.down, number)))
        if isinstance(message, m.NodeReport):
            state = self._with(state, i, link=self.relink(state[at], known=True))
        former = self.names[i] not in self.states.values[state[2]].members
        if isinstance(message, m.StepDone) and former:
            return state
        return self._after(state, *self.take(state[2], event))

    def obeyed(self, state: State, i: int, twice: bool = False) -> State:
        """Node i receives the oldest message of the coordinator."""
        at = HEAD + 2 * i + 1
        order = self.links.values[state[at]].down[0]
        state = self._with(state, i, link=self.popped(state[at], False, twice))
        return self._sent(state, i, *self.order(state[at - 1], order))

    def _closed(self, state: State, i: int) -> State:
        at = HEAD + 2 * i + 1
        state = self._with(state, i, link=self.relink(state[at], phase=LinkPhase.CLOSED))
        member = self.states.values[state[2]].members.get(self.names[i])
        if member is None:
            return state
        incarnation = member.report.info.incarnation
        return self._event(state, job.ConnectionClosed(self.names[i], incarnation))

    def _connected(self, state: State, i: int) -> State:
        link = self.links.number(Link(LinkPhase.OPEN))
        state = self._with(state, i, link=link)
        node = self.nodes.values[state[HEAD + 2 * i]]
        return self._acted(state, i, self.model.connected(node))

    def _event(self, state: State, event: Any) -> State:
        return self._after(state, *self.take(state[2], self.messages.number(event)))

    def _after(self, state: State, cs: int, actions: tuple[Any, ...], saved: bool) -> State:
        """The coordinator's state becomes `cs`; it is saved, then the actions are carried out."""
        after = list(state)
        after[2] = cs
        if saved and state[0] and cs != state[3]:
            after[3], after[4] = cs, state[3]
        for action in actions:
            if isinstance(action, job.JobFinished):
                self._check_end(state, action.code)
                self._tell_others(after, action)
            elif isinstance(action[0], str):
                self.interventions.add(" ".join(action))
            else:
                i, number = action
                at = HEAD + 2 * i + 1
                message = self.messages.values[number]
                if isinstance(message, m.Install):
                    self._promise(after, message.epoch, message.assignment)
                after[at] = self.pushed(after[at], (), (number,))
                if isinstance(message, m.Fenced):
                    after[at] = self.relink(after[at], known=False)
        return tuple(after)

    def _tell_others(self, after: list[int], end: job.JobFinished) -> None:
        """The end is told to connected nodes that are not members."""
        members = self.states.values[after[2]].members
        stop = self.messages.number(m.Stop(end.code, ""))
        for i, name in enumerate(self.names):
            if name not in members:
                at = HEAD + 2 * i + 1
                after[at] = self.pushed(after[at], (), (stop,))

    # ---- promises ----

    def _promise(self, after: list[int], epoch: int, assignment: Assignment) -> None:
        """Every assignment of an epoch is the same, whichever coordinator sends it."""
        known = dict(self.promises.values[after[5]])
        number = self.model.number(assignment)
        self._require(known.get(epoch, number) == number, f"two assignments for epoch {epoch}")
        if epoch in known:
            return
        known[epoch] = number
        after[5] = self.promises.number(tuple(sorted(known.items())))
        nodes = [self.nodes.values[n] for n in after[HEAD::2]]
        members = self.states.values[after[2]].members
        newest = max(
            node.worker.version
            for node in nodes
            if node.alive
            and node.name in members
            and members[node.name].report.info.incarnation == node.agent.info.incarnation
        )
        self._require(
            after[1] > 1 or assignment.step >= newest,
            f"epoch {epoch} goes back to step {assignment.step} although version {newest} exists",
        )

    def _check_end(self, state: State, code: int) -> None:
        self._require(code == 0 or state[1] > 1, f"the job ends with code {code}")

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    def is_goal(self, state: State) -> bool:
        """Whether the job has ended and all agents with it, or no node can run it any more."""
        phase = self.states.values[state[2]].phase
        living = sum(self.nodes.values[n].alive for n in self._numbers(state))
        if not living:  # the launcher ends a job without nodes
            return True
        if phase in OVER:
            return self.until_end
        return living < self.policy.min_nodes and phase is JobPhase.WAITING
