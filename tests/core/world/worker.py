"""A worker process on the simulated clock: attach, install, train, leave, halt, finish.

It computes and publishes by the rules of `tests.core.worker_model`, in the order of
`elastic.worker.epoch_session`; computing is a delay. Stages do not wait for each other's
micro-batches here: they meet at the commit, and decisions depend on that alone. A stage needs the
connections inside its pipeline until then. That other connections have ended it notices there.

A worker promises as `elastic.worker.control.meeting_point` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.domain.types import Assignment, Copy, StepRecord
from tests.core import worker_model

if TYPE_CHECKING:
    from tests.core.world.node import Agent, Run

MICROBATCH_S = 0.08


class Worker:
    def __init__(self, agent: Agent, rank: int, generation: int) -> None:
        self.agent, self.world, self.rank, self.generation = agent, agent.world, rank, generation
        self.alive, self.attached, self.stopped, self.slowness = True, False, False, 1.0
        self.spinning, self.mute = False, agent.mute_starts > 0
        self.epoch = self.left_epoch = 0
        self.left, self.awaits_halt = True, False
        self.place, self.promise = "", 0
        """"computing" the full schedule, "arrived" at the meeting point, or elsewhere; and the
        epoch for which it has promised to halt there."""
        self._missed: dict[str, None] = {}
        """Nodes of other pipelines whose connections have ended, which it has not noticed."""
        self.newest = m.Halt(0)
        self.model: worker_model.Worker | None = None
        """Model of the newest installed epoch."""
        self.record: StepRecord | None = None
        self.activity, self._counter, self._cpu = "idle", 0, 0.0
        self._token = 0
        self.run: Run | None = None
        agent.mute_starts -= self.mute
        self._later(self.world.soon(0.3, 1.0), self._attach)

    # ---- plumbing -------------------------------------------------------------------------------

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` unless the worker has left its epoch, died or stopped by then."""
        token = self._token
        self.world.at(
            delay * self.slowness,
            lambda: action() if token == self._token and self.alive and not self.frozen else None,
        )

    def send(self, message: Any) -> None:
        if self.alive and not self.stopped:
            self.agent.hear_worker(self, message)

    def progress(self) -> m.Progress:
        self._counter += self.activity == "compute" and not self.spinning
        return m.Progress(self._counter, self.activity, max(self.step, 0), 0)

    def cpu_s(self) -> float:
        if not self.stopped and not self.mute:
            self._cpu += 0.08 if self.spinning else 0.01
        return self._cpu

    @property
    def frozen(self) -> bool:
        """Whether its main thread does nothing that others see."""
        return self.stopped or self.spinning or self.mute

    @property
    def step(self) -> int:
        return self.model.step if self.model is not None else -1

    @property
    def reachable(self) -> bool:
        return self.alive and not self.frozen and self.agent.reachable

    def _attach(self) -> None:
        self.attached = True
        self.send(m.Attach(self.rank, 1, self.world.spec, f"{self.agent.name}:2"))

    def die(self, code: int, silent: bool = False) -> None:
        if self.alive:
            self.agent.hear_worker(self, core.WorkerExited(self.rank, code))
            self.alive = False
            if not silent:
                self._break()

    def stop(self) -> None:
        self.stopped = True

    def spin(self) -> None:
        """Loop in the user's code for ever: CPU time and heartbeats, but no progress."""
        self.spinning, self.activity = True, "compute"

    def _break(self) -> None:
        """The other workers of the run see the connections end."""
        run = self.run
        for other in list(run.present.values()) if run is not None and not self.agent.cut else []:
            if other is self or not self.world.joined(other.agent.name, self.agent.name):
                continue
            if not other.left and other.run is run and not other.agent.cut:
                other._later(
                    self.world.soon(0.001, 0.03), partial(other._disconnected, self.agent.name)
                )

    def _disconnected(self, node: str) -> None:
        """The connections of a node have ended."""
        assert self.model is not None and self.run is not None
        stages = self.run.assignment.plan.pipelines[self.model.pipeline].stages
        if self.place == "arrived" or node in {stage.unit.node for stage in stages}:
            self._link_failed((node,))
        else:
            self._missed[node] = None

    def _link_failed(self, nodes: tuple[str, ...]) -> None:
        if not self.left:
            self.send(m.CommFailed(self.epoch, nodes, "link"))
            self._leave()

    # ---- orders ---------------------------------------------------------------------------------

    def order(self, message: Any) -> None:
        """An order arrives: a stopped process never reads it."""
        if self.attached:
            self.world.at(self.world.soon(0.0002, 0.002), lambda: self._order(message))

    def _order(self, message: Any) -> None:
        if not self.alive or self.frozen:
            return
        match message:
            case m.Halt():
                promises = not message.boundary and self._promises(message)
                self.newest = message
                if self.awaits_halt:
                    self._tell_halted()
                elif promises and self.place == "computing":
                    pass  # it halts at the meeting point
                elif not self.left and not message.boundary and message.epoch > self.epoch:
                    self._leave(quiet=self._keeps_promise)
            case m.Install() if message.epoch > self.left_epoch:
                self._enter(message)
            case m.Stop():
                self.alive = False

    def _promises(self, halt: m.Halt) -> bool:
        """Promise to halt at the meeting point, if the worker may."""
        ordered = self.newest.epoch > self.epoch and not self.newest.boundary
        if ordered or not self.place or halt.epoch <= self.epoch:
            return False
        if self.agent.name not in halt.outside:
            return False
        self.promise = halt.epoch
        self.send(m.Promise(halt.epoch, self.epoch, self.step))
        return True

    @property
    def _keeps_promise(self) -> bool:
        return self.place == "arrived" and 0 < self.promise == self.newest.epoch

    def _leave(self, quiet: bool = False) -> None:
        """Leave all communication; report once a newer epoch is known."""
        self._token += 1
        self.left, self.left_epoch, self.awaits_halt, self.activity = True, self.epoch, True, "wait"
        if self.place != "arrived":
            self.place = ""
        if not quiet:
            self._break()
        if self.newest.epoch > self.epoch:
            self._later(self.world.soon(0.001, 0.05), self._tell_halted)

    def _tell_halted(self) -> None:
        if not self.awaits_halt:
            return
        self.awaits_halt, self.activity = False, "idle"
        halted = m.Halted(self.newest.epoch, -1, record=self.record)
        if self.model is not None:
            halted = replace(self.model.halt(self.newest.epoch), record=self.record)
        self.send(replace(halted, complete=self._keeps_promise))

    # ---- installing -----------------------------------------------------------------------------

    def _enter(self, order: m.Install) -> None:
        self._token += 1
        self.epoch, self.left, self.awaits_halt, self.run = order.epoch, False, False, None
        self.assignment: Assignment = order.assignment
        self._told, self._resumed, self._protected, self._sending = False, False, False, False
        self.activity, self.place, self.promise, self._missed = "install", "", 0, {}
        if self.newest.epoch > self.epoch and not self.newest.boundary:
            self._leave()
            return
        self._later(self.world.soon(0.02, 0.3), self._fetch)

    def _fetch(self) -> None:
        """Fetch the copies of the recipes from the vaults that the recipes name."""
        plan, node = self.assignment.plan, self.agent.name
        at = next((p, s) for p, s, stage in plan.stages() if stage.unit.node == node)
        promised = dict(self.assignment.promised).get(at[0])
        problem = worker_model.broken_promise(self.model, self.assignment, promised)
        if problem:
            self.send(m.CommFailed(self.epoch, (), problem))
            self._leave()
            return
        for recipe in [r for n, r in self.assignment.recipes if n == node and r.shard == self.rank]:
            sources = [*recipe.states, *recipe.updates, *recipe.replay, *recipe.gradients]
            if not all(self._has(copy) for copy in sources):
                self.send(m.CommFailed(self.epoch, (), f"layer {recipe.layer}: a source is gone"))
                self._leave()
                return
        vaults = {name: agent.vault for name, agent in self.world.agents.items()}
        number, spec = lambda: next(self.world.sequence), self.world.spec
        live = self.model if promised is not None else None
        self.model = worker_model.install(
            self.assignment, spec, at, self.rank, vaults, number, live
        )
        self.parts = [run for run, s in worker_model.shares(self.assignment, at[0]) if s == at[1]]
        self.todo = list(self.model.todo)
        self._meet()

    def _has(self, copy: Copy) -> bool:
        agent = self.world.agents[copy.node]
        return (agent is self.agent and copy.key in agent.vault.held) or (
            agent.reachable
            and not self.agent.cut
            and self.world.joined(self.agent.name, agent.name)
            and copy.key in agent.vault.held
        )

    def _meet(self) -> None:
        from tests.core.world.node import Run

        self.run = self.world.runs.setdefault(self.epoch, Run(self.assignment))
        self.run.present[self.agent.name, self.rank] = self
        self.arrived, self.activity = False, "wait"
        self.poke()

    def poke(self) -> None:
        """Begin if all workers of the pipeline are present, or commit if all workers are."""
        if self.run is None or self.model is None or self.left:
            return
        workers = list(self.run.present.values())
        mine = [w for w in workers if w.model and w.model.pipeline == self.model.pipeline]
        if not any(w._told for w in mine) and self.run.whole_pipeline(self.model.pipeline):
            for worker in mine:
                worker._told = True
                worker._later(self.world.soon(0.001, 0.02), worker._ready)
        elif self.run.whole and all(
            w.arrived and w.step == self.step and not w.left for w in workers
        ):
            self.run.check_ledgers(self.world.spec, self.step)
            halt = max(w.newest.epoch if w.newest.boundary else 0 for w in workers)
            for worker in workers:
                worker.arrived = False
                worker._later(self.world.soon(0.001, 0.01), partial(worker._committed, halt))

    # ---- training -------------------------------------------------------------------------------

    def _ready(self) -> None:
        self.send(m.Ready(self.epoch, 0.0, 0.0))
        self.activity = "compute"
        self._next()

    def _next(self) -> None:
        assert self.model is not None
        if not self.parts and self.step < self.world.spec.n_steps:
            self.place = "computing"
        if self.step < self.world.spec.n_steps and (self.parts or self.todo):
            self._later(MICROBATCH_S * self.world.soon(0.5, 1.5), self._microbatch)
        else:
            self.model.enter()
            self._send_copies()
            self._arrive()

    def _microbatch(self) -> None:
        assert self.model is not None
        if self.model.full:
            self._later(0.005, self._microbatch)
            return
        if self.agent.full:
            self.send(m.CommFailed(self.epoch, (), "OSError: No space left on device"))
            self._leave()
            return
        if self.parts:
            self.model.run_in_part(self.parts.pop(0))
        else:
            index = self.todo.pop(0)
            self.model.forward(index)
            self.model.backward_pass(index)
            self.model.publish()
        if not self._resumed:
            self._resumed = True
            self.send(m.Resumed(self.epoch, self.world.now))
        self._send_copies()
        self._next()

    def _arrive(self) -> None:
        """Halt at the meeting point, as promised, or go on to the commit."""
        if self.step < self.world.spec.n_steps:
            self.place = "arrived"
        if self._keeps_promise:
            self._leave(quiet=True)
        elif self._missed:
            self._link_failed(tuple(self._missed))
        else:
            self._gate()

    def _gate(self) -> None:
        """Enter the commit only when all copies are whole at the peer."""
        assert self.model is not None
        if not self.model.ready:
            self._later(0.005, self._gate)
            return
        self.arrived, self.activity = True, "wait"
        self.poke()

    def _committed(self, halt: int) -> None:
        assert self.model is not None
        if self.step >= self.world.spec.n_steps:
            self._later(self.world.soon(0.01, 0.1), self._finish)
            return
        assert not self.promise, f"{self.agent.name} commits in spite of its promise"
        self.place = ""
        self.model.commit()
        self.record = self.model.record
        while self.model.passed:
            self.model.update()
        self._send_copies()
        if self._first:
            assert self.record is not None
            self.send(m.StepDone(self.epoch, self.record, 0.1, 0.1))
        if halt > self.epoch:
            self._leave(quiet=True)
            return
        self.todo = list(self.model.todo)
        self.activity = "compute"
        self._next()

    @property
    def _first(self) -> bool:
        """This worker reports for all workers."""
        assert self.model is not None
        return (self.model.pipeline, self.model.stage, self.rank) == (0, 0, 0)

    def _finish(self) -> None:
        if not self._resumed:
            self.send(m.Resumed(self.epoch, self.world.now))
        if self._first and not all(
            self.world.agents[n].reachable for n in self.assignment.plan.nodes()
        ):
            self._link_failed(())
            return
        self.send(m.Finished(self.world.spec.n_steps, "sha" if self._first else ""))
        self.left, self.left_epoch, self.awaits_halt = True, self.epoch, True
        if self.newest.epoch > self.epoch:
            self._tell_halted()

    # ---- backups --------------------------------------------------------------------------------

    def _send_copies(self) -> None:
        """Send bundles to the peer in turn; report when the epoch is protected."""
        model = self.model
        assert model is not None
        if model.unprotected == 0 and not self._protected:
            self._protected = True
            self.send(m.Protected(self.epoch))
        if self._sending or not model.queue:
            return
        assert model.peer is not None
        token, self._sending = self._token, True

        def whole() -> None:
            if token == self._token and self.alive:
                self._sending = False
                model.acknowledged()
                self._send_copies()

        self.agent.replicate(model.queue[0], model.peer, whole)
