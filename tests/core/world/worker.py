"""A simulated worker: attach, install, train with backups and commit gate, leave, halt, finish.

Its order of things is that of `elastic.worker.epoch_session` and `elastic.worker.engine.step`; computing is a delay.
In a pipeline stages really wait for each other; here only the commit makes them meet, which is what
decisions depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.domain.types import GRADIENT, STATE, Assignment, Copy, Recipe, StepRecord

if TYPE_CHECKING:
    from tests.core.world.node import Agent, Run

MICROBATCH_S = 0.08


class Worker:
    def __init__(self, agent: Agent, rank: int, generation: int) -> None:
        self.agent, self.world, self.rank, self.generation = agent, agent.world, rank, generation
        self.alive, self.attached, self.stopped, self.slowness = True, False, False, 1.0
        self.epoch = self.left_epoch = 0
        self.left, self.awaits_halt = True, False
        self.newest = m.Halt(0)
        self.version, self.gradient = -1, dict[int, Counter[int]]()
        self.record: StepRecord | None = None
        self.activity, self._counter, self._cpu = "idle", 0, 0.0
        self._token = 0
        self._published: dict[int, tuple[int, frozenset[int]]] = {}
        self._states: dict[int, int] = {}
        self.run: Run | None = None
        self._later(self.world.soon(0.3, 1.0), self._attach)

    # ---- plumbing -------------------------------------------------------------------------------

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        """Do it unless the worker has left its epoch, is dead or stopped by then."""
        token = self._token
        self.world.at(
            delay * self.slowness,
            lambda: action() if token == self._token and self.alive and not self.stopped else None,
        )

    def say(self, message: Any) -> None:
        if self.alive and not self.stopped:
            self.agent.hear_worker(self, message)

    def progress(self) -> m.Progress:
        self._counter += self.activity == "compute"
        return m.Progress(self._counter, self.activity, max(self.version, 0), 0)

    def cpu_s(self) -> float:
        self._cpu += 0.0 if self.stopped else 0.01
        return self._cpu

    @property
    def reachable(self) -> bool:
        return self.alive and not self.stopped and self.agent.reachable

    def _attach(self) -> None:
        self.attached = True
        self.say(m.Attach(self.rank, 1, self.world.spec, f"{self.agent.name}:2"))

    def die(self, code: int, silent: bool = False) -> None:
        if self.alive:
            self.agent.hear_worker(self, core.Exited(self.rank, code))
            self.alive = False
            if not silent:
                self._break()

    def stop(self) -> None:
        self.stopped = True

    def _break(self) -> None:
        """The others in the run see this one's connections end."""
        run = self.run
        for other in list(run.present.values()) if run is not None and not self.agent.cut else []:
            if other is not self and not other.left and other.run is run and not other.agent.cut:
                other._later(self.world.soon(0.001, 0.03), lambda o=other: o._link_failed((self.agent.name,)))

    def _link_failed(self, nodes: tuple[str, ...]) -> None:
        if not self.left:
            self.say(m.CommFailed(self.epoch, nodes, "link"))
            self._leave()

    # ---- orders ---------------------------------------------------------------------------------

    def order(self, message: Any) -> None:
        """An order arrives: a stopped process never reads it."""
        if self.attached:
            self.world.at(self.world.soon(0.0002, 0.002), lambda: self._order(message))

    def _order(self, message: Any) -> None:
        if not self.alive or self.stopped:
            return
        match message:
            case m.Halt():
                self.newest = message
                if self.awaits_halt:
                    self._tell_halted()
                elif not self.left and not message.boundary and message.epoch > self.epoch:
                    self._leave()
            case m.Install() if message.epoch > self.left_epoch:
                self._enter(message)
            case m.Stop():
                self.alive = False

    def _leave(self, quiet: bool = False) -> None:
        """Leave all communication; report once a newer epoch is known."""
        self._token += 1
        self.left, self.left_epoch, self.awaits_halt, self.activity = True, self.epoch, True, "wait"
        if not quiet:
            self._break()
        if self.newest.epoch > self.epoch:
            self._later(self.world.soon(0.001, 0.05), self._tell_halted)

    def _tell_halted(self) -> None:
        if not self.awaits_halt:
            return
        self.awaits_halt, self.activity = False, "idle"
        states = [c for c in self._state_copies() if self._states.get(c[0].layer) != c[0].step]
        ours = [
            c
            for c in self._gradient_copies()
            if self._published.get(c[0].layer) != (c[0].step, c[0].microbatches)
        ]
        for copy, content in (*states, *ours):
            self.agent.vault.add(copy, content)
        started = frozenset(i for total in self.gradient.values() for i in total)
        self.say(m.Halted(self.newest.epoch, self.version, started, started, self.record))

    # ---- installing -----------------------------------------------------------------------------

    def _enter(self, order: m.Install) -> None:
        self._token += 1
        self.epoch, self.left, self.awaits_halt = order.epoch, False, False
        self.assignment: Assignment = order.assignment
        self._published, self._states, self._waiting_acks = {}, {}, 0
        self._entered, self._told, self._resumed = False, False, False
        self.activity = "install"
        if self.newest.epoch > self.epoch and not self.newest.boundary:
            self._leave()
            return
        self._later(self.world.soon(0.02, 0.3), self._fetch)

    def _fetch(self) -> None:
        """Take what the recipes name from the vaults that are said to hold it."""
        plan, node = self.assignment.plan, self.agent.name
        at = next((p, s, stage) for p, s, stage in plan.stages() if stage.unit.node == node)
        self.pipeline, self.stage, layers = at[0], at[1], at[2].layers
        recipes = {r.layer: r for n, r in self.assignment.recipes if n == node and r.shard == self.rank}
        gradient: dict[int, Counter[int]] = {}
        for layer in layers:
            recipe = recipes.get(layer, Recipe(layer, self.rank, 0))
            sources = [*((recipe.state,) if recipe.state else ()), *recipe.replay, *recipe.gradients]
            if not all(self._has(copy) for copy in sources):
                self.say(m.CommFailed(self.epoch, (), f"layer {layer}: a source is gone"))
                self._leave()
                return
            found = (self.world.agents[c.node].vault.held[c.key][1] for c in recipe.gradients)
            gradient[layer] = sum(found, Counter())
        self.version, self.gradient = self.assignment.step, gradient
        self.todo = list(self.assignment.todo[self.pipeline])
        self.covered = dict(self.assignment.covered)
        self._meet()

    def _has(self, copy: Copy) -> bool:
        agent = self.world.agents[copy.node]
        return (agent is self.agent and copy.key in agent.vault.held) or (
            agent.reachable and not self.agent.cut and copy.key in agent.vault.held
        )

    def _meet(self) -> None:
        from tests.core.world.node import Run

        self.run = self.world.runs.setdefault(self.epoch, Run(self.assignment))
        self.run.present[self.agent.name, self.rank] = self
        self.arrived = False
        self.poke()

    def poke(self) -> None:
        """If everybody is there: begin, or commit."""
        if self.run is None or not self.run.whole or self.left:
            return
        workers = list(self.run.present.values())
        if all(not w._told for w in workers):
            for worker in workers:
                worker._told = True
                worker._later(self.world.soon(0.001, 0.02), worker._ready)
        elif all(w.arrived and w.version == self.version and not w.left for w in workers):
            self.run.check_ledgers(self.version, self.world.spec)
            halt = max(w.newest.epoch if w.newest.boundary else 0 for w in workers)
            for worker in workers:
                worker.arrived = False
                worker._later(self.world.soon(0.001, 0.01), lambda w=worker: w._committed(halt))

    # ---- training -------------------------------------------------------------------------------

    def _ready(self) -> None:
        self.say(m.Ready(self.epoch, 0.0, 0.0))
        self.activity = "compute"
        self._next()

    def _next(self) -> None:
        if self.version < self.world.spec.n_steps and self.todo:
            self._later(MICROBATCH_S * self.world.soon(0.5, 1.5), self._microbatch)
        else:
            self._enter_backup()
            self._gate()

    def _microbatch(self) -> None:
        if self._waiting_acks >= 2:
            self._later(0.005, self._microbatch)
            return
        index = self.todo.pop(0)
        for layer, total in self.gradient.items():
            if index not in self.covered.get(layer, ()):
                total[index] += 1
        if not self._resumed:
            self._resumed = True
            self.say(m.Resumed(self.epoch, self.world.now))
        self._publish(self._gradient_copies(), self.assignment.plan.gradients, "stream")
        self._enter_backup()
        self._next()

    def _gate(self) -> None:
        """The commit is entered only when everything is whole at the peer."""
        if self._waiting_acks:
            self._later(0.005, self._gate)
            return
        self.arrived, self.activity = True, "wait"
        self.poke()

    def _committed(self, halt: int) -> None:
        if self.version >= self.world.spec.n_steps:
            self._later(self.world.soon(0.01, 0.1), self._finish)
            return
        self.record = StepRecord(self.version, 1.0, 1.0, float(self.version))
        self.version += 1
        self.gradient = {layer: Counter() for layer in self.gradient}
        self._publish(self._state_copies(), self.assignment.plan.state, "snapshot")
        if (self.pipeline, self.stage, self.rank) == (0, 0, 0):
            self.say(m.StepDone(self.epoch, self.record, 0.1, 0.1))
        if halt > self.epoch:
            self._leave(quiet=True)
            return
        self.todo, self.covered = list(self._mine()), {}
        self.activity = "compute"
        self._next()

    def _mine(self) -> tuple[int, ...]:
        return self.assignment.plan.pipelines[self.pipeline].microbatches

    def _finish(self) -> None:
        if not self._resumed:
            self.say(m.Resumed(self.epoch, self.world.now))
        first = (self.pipeline, self.stage, self.rank) == (0, 0, 0)
        if first and not all(self.world.agents[n].reachable for n in self.assignment.plan.nodes()):
            self._link_failed(())
            return
        self.say(m.Finished(self.world.spec.n_steps, "sha" if first else ""))
        self.left, self.left_epoch, self.awaits_halt = True, self.epoch, True
        if self.newest.epoch > self.epoch:
            self._tell_halted()

    # ---- backups --------------------------------------------------------------------------------

    def _enter_backup(self) -> None:
        if not self._entered:
            self._entered = True
            self._publish(self._state_copies(), self.assignment.plan.state, "snapshot")
            epoch = self.epoch
            self._publish(
                self._gradient_copies() or self._state_copies(), self.assignment.plan.gradients, "stream",
                lambda: self.say(m.Protected(epoch)),
            )  # fmt: skip

    def _publish(
        self, copies: list[tuple[Copy, Any]], scheme: str, away: str, acked: Callable[[], None] | None = None
    ) -> None:
        """Into the own vault, and if the scheme says so on to the peer's."""
        peer = self.assignment.plan.peer_of(self.agent.name)
        for copy, content in copies if scheme != "none" else ():
            self.agent.vault.add(copy, content)
            if copy.kind == STATE:
                self._states[copy.layer] = copy.step
            else:
                self._published[copy.layer] = (copy.step, copy.microbatches)
        if scheme != away or peer is None or not copies:
            if acked is not None:
                acked()
            return
        token = self._token
        self._waiting_acks += 1

        def whole() -> None:
            if token == self._token and self.alive:
                self._waiting_acks -= 1
                if acked is not None:
                    acked()

        self.agent.replicate(copies, peer, whole)

    def _state_copies(self) -> list[tuple[Copy, Any]]:
        return [(self._copy(STATE, layer, frozenset()), self.version) for layer in self.gradient]

    def _gradient_copies(self) -> list[tuple[Copy, Any]]:
        return [(self._copy(GRADIENT, la, frozenset(t)), Counter(t)) for la, t in self.gradient.items() if t]

    def _copy(self, kind: str, layer: int, indices: frozenset[int]) -> Copy:
        last = kind == GRADIENT and layer == self.world.spec.n_layers - 1
        return Copy(
            kind=kind,
            layer=layer,
            shard=self.rank,
            step=self.version,
            epoch=self.epoch,
            owner=self.agent.name,
            sequence=next(self.world.sequence),
            nbytes=8,
            checksum="",
            microbatches=indices,
            losses=tuple((i, float(i)) for i in sorted(indices)) if last else (),
            node=self.agent.name,
        )
