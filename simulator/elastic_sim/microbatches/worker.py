"""A worker, one a node: attach, install, train, leave, halt, finish, in the order in which the real one does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.domain.types import WHOLE, Assignment, Copy, Portion, Recipe, StepRecord
from elastic.planning.plan.schemes import portion_of
from elastic_sim.microbatches.clock import Wire
from elastic_sim.microbatches.environment import Environment, Host
from elastic_sim.microbatches.held_layers import NOTHING, HeldLayers
from elastic_sim.microbatches.training import Run, Training, run_of


class Worker:
    def __init__(
        self,
        world: Environment,
        agent: Host,
        runs: dict[int, Run],
        generation: int,
        seconds: float,
    ) -> None:
        """Attaches after about `seconds`. `runs`: those of the cluster, by epoch."""
        self.agent, self.world, self._generation, self._runs = agent, world, generation, runs
        self.alive, self.attached, self.stopped, self.slowness = True, False, False, 1.0
        self.epoch = self.left_epoch = 0
        self.left, self._awaits_halt = True, False
        self.newest = m.Halt(0)
        self.held = HeldLayers()
        self._portions: dict[int, Portion] = {}
        self.record: StepRecord | None = None
        self.training: Training | None = None
        self.activity, self.counter, self.microbatch = "idle", 0, 0
        self.busy_until = 0.0
        """When the action that it computes ends."""
        self._sources: tuple[Wire, ...] = ()
        """Wires over which it fetches."""
        self._pending: Callable[[], None] | None = None
        self._token = 0
        self.world.clock.about(seconds, self._attach)

    # ---- plumbing -------------------------------------------------------------------------------

    @property
    def reachable(self) -> bool:
        return self.alive and not self.stopped and self.agent.reachable

    @property
    def here(self) -> bool:
        """Takes part in its epoch."""
        return self.reachable and not self.left

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it, unless the worker has left its epoch, is dead or stopped by then."""
        token = self._token
        self.world.clock.after(
            seconds, lambda: action() if token == self._token and self.alive and not self.stopped else None
        )

    def between_actions(self, action: Callable[[], None]) -> None:
        """Do it when what is being computed is done; of several things, the first."""
        if self.world.clock.now >= self.busy_until:
            action()
        elif self._pending is None:
            self._pending = action

    def interrupted(self) -> bool:
        """An action is done: do what came up meanwhile, if anything did."""
        if self._pending is None:
            return False
        action, self._pending = self._pending, None
        action()
        return True

    def say(self, message: Any) -> None:
        if self.alive and not self.stopped:
            self.agent.hear_worker(self._generation, message)

    def progress(self) -> m.Progress:
        return m.Progress(self.counter, self.activity, max(self.held.version, 0), self.microbatch)

    def _attach(self) -> None:
        if self.alive:
            self.attached = True
            self.say(m.Attach(0, 1, self.world.spec, f"{self.agent.name}:2"))

    def die(self, *, silent: bool = False) -> None:
        """Killed; `silent`: nobody sees a connection closed."""
        if self.alive:
            self.alive = False
            if self.training is not None:
                self.training.over = self.training.copies.over = True
            if not silent:
                self._break(self.world.physics.closed_s)

    def crash(self) -> None:
        """The process alone ends; its agent learns of it."""
        if self.alive:
            self.say(core.WorkerExited(0, -9))
            self.die()

    def _break(self, seconds: float) -> None:
        """The others in the run see this one's connections end."""
        run = self.training.run if self.training is not None else None
        for other in list(run.present.values()) if run is not None else []:
            if other is not self and other.here and other.training is not None and other.training.run is run:
                self.world.clock.about(seconds, other.lost_contact(run, self.agent.name))

    def lost_contact(self, run: Run, node: str) -> Callable[[], None]:
        def ended() -> None:
            if self.here and self.training is not None and self.training.run is run:
                self.training.ended(node)

        return ended

    def link_failed(self, node: str) -> None:
        """This worker talks to `node`, whose connections have ended."""
        self.say(m.CommFailed(self.epoch, (node,), "link"))
        self.leave()

    # ---- orders ---------------------------------------------------------------------------------

    def order(self, message: Any) -> None:
        if self.attached:
            self.world.clock.about(self.world.physics.local_s, lambda: self._order(message))

    def _order(self, message: Any) -> None:
        if not self.alive or self.stopped:
            return
        match message:
            case m.Halt():
                self.newest = message
                if self._awaits_halt:
                    self._halted_after(self.world.physics.leave_s)
                elif not self.left and not message.boundary and message.epoch > self.epoch:
                    self.between_actions(self.leave)
            case m.Install() if message.epoch > self.left_epoch:
                self._enter(message)
            case m.Stop():
                self.alive = False

    def leave(self, *, planned: bool = False) -> None:
        """Leave all communication; report once a newer epoch is known."""
        self._token += 1
        self._pending = None
        for wire in self._sources:
            wire.drop(self.agent.name)
        if self.training is not None:
            self.training.over = self.training.copies.over = True
        self.left, self.left_epoch, self._awaits_halt, self.activity = True, self.epoch, True, "wait"
        if not planned:
            self._break(self.world.physics.local_s)
        if self.newest.epoch > self.epoch:
            physics = self.world.physics
            self._halted_after(physics.stop_s if planned else physics.leave_s)

    def _halted_after(self, seconds: float) -> None:
        self._awaits_halt = False
        token = self._token
        self.world.clock.about(seconds, lambda: self._halted() if token == self._token else None)

    def _halted(self) -> None:
        if not self.alive or self.stopped:
            return
        training, started, sent = self.training, NOTHING, NOTHING
        if training is not None:
            training.copies.flush()
        if training is not None and training.step == self.held.version:
            started, sent = frozenset(training.started), frozenset(training.sent)
        self.activity = "idle"
        self.say(m.Halted(self.newest.epoch, self.held.version, started, sent, self.record))

    # ---- installing -----------------------------------------------------------------------------

    def _enter(self, order: m.Install) -> None:
        self._token += 1
        self.epoch, self.left, self._awaits_halt = order.epoch, False, False
        self.training, self.activity = None, "install"
        self._pending, self.busy_until = None, 0.0
        if self.newest.epoch > self.epoch and not self.newest.boundary:
            self.leave()
            return
        self._began = self.world.clock.now
        self._install(order.assignment)

    def _install(self, assignment: Assignment) -> None:
        """Find out what to fetch, and how long that takes."""
        plan, node = assignment.plan, self.agent.name
        layers = [la for _, _, st in plan.stages() if st.unit.node == node for la in st.layers]
        recipes = {r.layer: r for n, r in assignment.recipes if n == node}
        portions = {la: portion_of(plan, node, la) for la in layers}
        live = {la for la in self.held.parts if portions.get(la) == self._portions.get(la)}
        wanted = [c for la in layers if la in recipes for c in self._wanted(recipes[la], la in live)]
        messages = [
            c for run in assignment.partial for c in self._messages(run.inputs, run.gradients, layers)
        ]
        disk = sum(self.world.state_bytes(la) for la in layers if la in recipes and recipes[la].checkpoint)
        rate = self.world.physics.disk_bytes_per_s
        seconds = self.world.clock.vary(self.world.physics.install_s) + (disk / rate if rate > 0 else 0.0)
        sources = dict.fromkeys((*wanted, *messages))
        if not all(self._has(copy) for copy in sources):
            self.later(seconds, self._source_gone)
            return

        def done() -> None:
            if not all(self._has(copy) for copy in sources):
                self._source_gone()
                return
            recovered = dict.fromkeys(layers, NOTHING)
            for la in set(layers) & set(recipes):
                recovered[la] = frozenset(i for c in recipes[la].gradients for i in c.microbatches)
            self.held.install(assignment.step, recovered)
            self._portions = portions
            self._meet(assignment)

        self._fetch(list(sources), lambda: self.later(seconds, done))

    def _messages(
        self, inputs: Sequence[Copy], gradients: Sequence[Copy], layers: list[int]
    ) -> Iterator[Copy]:
        for copy in inputs:
            if copy.layer in layers:
                yield copy
        for copy in gradients:
            if copy.layer - 1 in layers:
                yield copy

    def _wanted(self, recipe: Recipe, live: bool) -> Iterator[Copy]:
        """Copies to read, states first."""
        kept = live and self.held.version == recipe.version
        if not kept:
            whole = live and recipe.state is not None and self._portions.get(recipe.layer) == WHOLE
            leads = whole and recipe.state is not None and recipe.state.step == self.held.version
            for part in recipe.portions:
                yield from part.states
                yield from part.updates
            if recipe.state is not None and not leads:
                yield recipe.state
            yield from recipe.updates
            yield from recipe.replay
        for copy in recipe.gradients:
            mine = copy.owner == copy.node == self.agent.name
            if not (kept and mine and copy.microbatches in self.held.parts.get(recipe.layer, ())):
                yield copy

    def _has(self, copy: Copy) -> bool:
        node = self.world.node(copy.node)
        return node is not None and copy in node.vault and (node is self.agent or node.reachable)

    def _fetch(self, copies: list[Copy], done: Callable[[], None]) -> None:
        """Fetch over each node's own wire at once, and from this node as fast as memory copies."""
        nbytes: dict[str, int] = {}
        for copy in copies:
            nbytes[copy.node] = nbytes.get(copy.node, 0) + copy.nbytes
        here = nbytes.pop(self.agent.name, 0)
        wires = {name: node.wire for name in nbytes if (node := self.world.node(name))}
        rate, left, token = self.world.copy_bytes_per_s, 1 + len(wires), self._token

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left and token == self._token:
                done()

        self._sources = tuple(wires.values())
        for name, wire in wires.items():
            wire.send(self.agent.name, nbytes[name], arrived)
        self.later(here / rate if rate > 0 else 0.0, arrived)

    def _source_gone(self) -> None:
        self.say(m.CommFailed(self.epoch, (), "a source is gone"))
        self.leave()

    def _meet(self, assignment: Assignment) -> None:
        self._sources = ()
        self._transferred = self.world.clock.now
        run = run_of(self._runs, self.world, assignment)
        run.present[self.agent.name] = self
        self.training = Training(self, run)
        self.world.look()
        run.connect(self)

    def ready_for(self, run: Run) -> Callable[[], None]:
        def act() -> None:
            if self.here and self.training is not None and self.training.run is run:
                transfer_s = self._transferred - self._began
                self.say(m.Ready(self.epoch, transfer_s, self.world.clock.now - self._transferred))
                if self.held.version >= self.world.spec.n_steps:
                    self.finished(self.training.first)
                else:
                    self.training.begin(first=True)

        return act

    # ---- the end --------------------------------------------------------------------------------

    def finished(self, first: bool) -> None:
        self.say(m.Finished(self.world.spec.n_steps, "simulated" if first else ""))
        self.left, self.left_epoch, self._awaits_halt = True, self.epoch, True
        if self.newest.epoch > self.epoch:
            self._halted_after(self.world.physics.leave_s)
