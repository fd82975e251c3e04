"""A simulated worker, one per node: attach, install, train, leave, halt, finish.

A worker promises to halt at its meeting point as `elastic.worker.control.meeting_point` says.

`SimulatedWorker` takes orders from its agent. `WorkerTraining` runs its action lists during one
epoch. `EpochRun` is the state that the workers of an epoch share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import Phase
from elastic.domain.types import WHOLE, Assignment, Copy, Portion, Recipe, StepRecord
from elastic.planning.cost.predict import predict
from elastic.planning.plan.rank_map import roster
from elastic.planning.plan.schemes import gradients_of, portion_of
from elastic.planning.schedule.partial_schedule import excerpt, groups
from elastic.planning.schedule.reduction_rounds import Rounds, rounds_of
from elastic.planning.schedule.schedule import Action, Kind, actions_of, message_of, units_of
from elastic.planning.schedule.timeline import StageTimes
from elastic_sim.microbatches.clock import Uplink
from elastic_sim.microbatches.copies import EMPTY, CopyPublisher, HeldLayers, Ledger
from elastic_sim.microbatches.environment import Environment, Node

LayerRange = tuple[int, int]
FAULT_PHASES = {Kind.F: Phase.FORWARD, Kind.B: Phase.BACKWARD, Kind.INPUT: Phase.BACKWARD}
"""Phase of the injected faults that strike right before an action of each kind."""


@dataclass
class EpochRun:
    """The workers of one epoch and their shared state."""

    world: Environment
    assignment: Assignment
    present: dict[str, SimulatedWorker] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    """Pipelines whose workers are connected to each other."""
    connected_at: dict[int, float] = field(default_factory=dict)
    """Time at which the workers of a pipeline that are present have connected to each other."""
    committing: bool = False

    def __post_init__(self) -> None:
        self.plan = plan = self.assignment.plan
        self.roster = roster(plan)
        infos = tuple(known.info for node in plan.nodes() if (known := self.world.agents.get(node)))
        self.predicted = predict(replace(plan, gradients="none"), self.world.profile, infos)
        self.joined: dict[tuple[int, int, int], dict[str, Ledger]] = {}
        """Ledgers contributed to each shared sum, by node. Key: (layer, version, round)."""

    @property
    def complete(self) -> bool:
        """Whether all workers of the plan take part."""
        everyone = set(self.plan.nodes()) == self.present.keys()
        return everyone and all(worker.here for worker in self.present.values())

    def connect(self, worker: SimulatedWorker) -> None:
        """Connect a worker that has its state. A pipeline trains when its last one connects."""
        clock, physics = self.world.clock, self.world.physics
        node = worker.agent.name
        mine = next(m.pipeline for m in self.roster.members if m.unit.node == node)
        nodes = {unit.node for unit in units_of(self.plan.pipelines[mine])}
        before = max(self.connected_at.get(mine, 0.0), clock.now)
        self.connected_at[mine] = before + physics.pair_s * (len(nodes) - 1) / 2
        here = nodes <= self.present.keys() and all(self.present[name].here for name in nodes)
        if here and mine not in self.connected:
            self.connected.add(mine)
            for name in sorted(nodes):
                seconds = self.connected_at[mine] - clock.now + clock.vary(physics.group_s)
                clock.after(seconds, partial(self.present[name].ready, self))

    def _all_arrived(self) -> bool:
        workers = self.present.values()
        return self.complete and all(w.training and w.training.arrived for w in workers)

    def commit(self) -> None:
        """End the step for all workers once each has done its micro-batches."""
        if not self.committing and self._all_arrived():
            self.committing = True
            seconds = self.predicted.tail_s + self.world.clock.vary(self.world.physics.step_s)
            self.world.clock.after(seconds, self._committed)

    def _committed(self) -> None:
        self.committing = False
        if not self._all_arrived():
            return
        self._check_ledgers()
        workers = list(self.present.values())
        halt = max(w.newest.epoch if w.newest.boundary else 0 for w in workers)
        for worker in workers:
            assert worker.training is not None
            worker.training.committed(halt)

    def _check_ledgers(self) -> None:
        """Assert that every layer has every micro-batch exactly once."""
        everything = set(range(self.plan.n_microbatches))
        shared = bool(gradients_of(self.plan.gradients).rounds)
        for layer in range(self.plan.n_layers):
            workers = self.present.values()
            held = [w.held.ledger(layer) for w in workers if layer in w.held.parts]
            total = held[0] if shared else frozenset(i for ledger in held for i in ledger)
            once = shared or sum(map(len, held)) == len(total)
            assert once and total == everything, f"layer {layer}: {held}"


class WorkerTraining:
    """A worker's part in an epoch, from the first step to the last."""

    def __init__(self, worker: SimulatedWorker, run: EpochRun) -> None:
        self._worker, self._world, self.run = worker, run.world, run
        node = worker.agent.name
        members = run.roster.members
        self.rank = next(rank for rank, member in enumerate(members) if member.unit.node == node)
        self._member = members[self.rank]
        self._pipeline = run.plan.pipelines[self._member.pipeline]
        self._units = units_of(self._pipeline)
        self._places = run.roster.places(self.rank)
        stages = len(self._places)
        self.copies = CopyPublisher(
            run.world, worker.agent, worker.held, worker.send, run.assignment, stages
        )
        self._lists: list[tuple[LayerRange, tuple[Action, ...]]] = []
        self._at, self._inbox = 0, set[tuple[LayerRange, Action]]()
        self.arrived, self._receiving, self._resumed, self.over = False, False, False, False
        self._warm = False
        self.step = -1
        self.started, self.sent = set[int](), set[int]()
        self._finished: dict[int, int] = {}
        """Number of micro-batches that each stage finished in this step."""
        self._round = 0
        self._rounds: Rounds | None = None
        self._began = self._world.clock.now
        self.place = ""
        """"computing" the full schedule, "arrived" at the meeting point, or elsewhere."""
        self._disconnected = set[str]()
        """Nodes whose connections have ended. A worker that waits for such a node notices."""

    def begin(self, first: bool) -> None:
        """Begin a step. `first`: whether this is the epoch's first step, whose work the assignment
        gives."""
        run, p = self.run, self._member.pipeline
        todo = run.assignment.todo if first else tuple(pl.microbatches for pl in run.plan.pipelines)
        lists = list[tuple[LayerRange, tuple[Action, ...]]]()
        for layers, runs in groups(run.assignment.partial, p) if first else ():
            indices = tuple(one.microbatch for one in runs)
            lists.append((layers, excerpt(self._pipeline, *layers, indices)[self._member.stage]))
        actions = actions_of(self._pipeline, todo[p])[self._member.stage]
        lists.append(((0, run.plan.n_layers), actions))
        self._lists, self._at, self._began = lists, 0, self._world.clock.now
        self.place = "computing" if len(lists) == 1 else ""
        self.step = self._worker.held.version
        self.arrived, self.started, self.sent, self._finished = False, set(), set(), {}
        self._covered = dict(run.assignment.covered) if first else {}
        every, counts = gradients_of(run.plan.gradients).rounds, [len(t) for t in todo]
        self._round = 0
        self._rounds = rounds_of(run.plan.pipelines, counts, every) if every else None
        if self._world.strike(self._worker.agent.name, self.step, Phase.START):
            return
        if not actions:
            self.copies.enter()
        self.advance()

    def advance(self) -> None:
        """Run actions until one of them takes time."""
        self._receiving = False
        if self._worker.interrupted():
            return
        while self._lists and not self.over:
            layers, actions = self._lists[0]
            if self._at >= len(actions):
                self._lists.pop(0)
                self._at = 0
                self.place = "computing" if len(self._lists) <= 1 else ""
                continue
            action = actions[self._at]
            if action.kind.computes:
                self._compute(layers, action)
                return
            if action.kind.receives:
                if (layers, action) not in self._inbox:
                    self._receiving = not self._sender_failed(action)
                    return
                self._inbox.remove((layers, action))
            else:
                self._send(layers, action)
            self._at += 1
        if not self.over:
            self._microbatches_done()

    def disconnected(self, node: str) -> None:
        """Notice that the connections of `node` ended, if this worker waits for it."""
        self._disconnected.add(node)
        if self.arrived:
            self._worker.link_failed(node)
        elif self._receiving:
            self._sender_failed(self._lists[0][1][self._at])

    def _sender_failed(self, receive: Action) -> bool:
        """Return whether the message's sender is disconnected; if so, report it and leave."""
        ahead = 1 if receive.kind is Kind.RECV_B else -1
        node = self._units[(self._member.stage + ahead) % len(self._units)].node
        if node in self._disconnected:
            self._worker.link_failed(node)
        return node in self._disconnected

    def _stage_of(self, action: Action) -> int:
        return self._member.stage if action.stage < 0 else action.stage

    def _compute(self, layers: LayerRange, action: Action) -> None:
        worker, stage, clock = self._worker, self._stage_of(action), self._world.clock
        phase = FAULT_PHASES.get(action.kind)
        if phase and self._world.strike(worker.agent.name, self.step, phase, action.microbatch):
            return
        if action.kind is Kind.F:
            self.started.add(action.microbatch)
        worker.counter += 1
        worker.activity, worker.microbatch = "compute", action.microbatch
        seconds = self._times(stage).of(action.kind) * self._share(layers, stage)
        seconds += self._world.profile.contention * min(seconds, worker.agent.uplink.busy_s)
        if not self._warm:
            self._warm = True
            seconds += clock.vary(self._world.physics.resume_s)
        worker.busy_until = clock.now + seconds
        worker.later(seconds, lambda: self._computed(layers, action, stage))

    def _times(self, stage: int) -> StageTimes:
        return self.run.predicted.stages[self._member.pipeline][stage]

    def _share(self, span: LayerRange, stage: int) -> float:
        """Return the fraction of a stage's time that its layers inside `span` take."""
        whole = self._pipeline.stages[stage].layers
        if span[0] <= whole.start and whole.stop <= span[1]:
            return 1.0
        layers = self._world.profile.layers
        cost = {i: layers[i].forward_s + layers[i].backward_s for i in whole}
        total = sum(cost.values())
        inside = sum(seconds for i, seconds in cost.items() if span[0] <= i < span[1])
        return inside / total if total else 0.0

    def _computed(self, span: LayerRange, action: Action, stage: int) -> None:
        if not action.kind.finishes:
            self._at += 1
            self.advance()
            return
        inside = [i for i in self._pipeline.stages[stage].layers if span[0] <= i < span[1]]
        self._worker.held.add(action.microbatch, inside, self._covered)
        self._finished[stage] = self._finished.get(stage, 0) + 1
        self._report_resumed()
        if self._rounds is not None:
            done = min(self._finished.get(place.number, 0) for place in self._places)
            self._join_rounds(done)
        self._publish()

    def _publish(self) -> None:
        """Publish a finished micro-batch's gradient, once there is room for another bundle."""
        if self.over or (self.copies.full and self._worker.interrupted()):
            return
        if self.copies.full:
            self._worker.activity = "wait"
            self.copies.wait(self._publish)
            return
        seconds = self.copies.after_microbatch()
        self._at += 1
        if seconds:
            self._worker.later(seconds, self.advance)
        else:
            self.advance()

    def _report_resumed(self) -> None:
        if not self._resumed:
            self._resumed = True
            self._worker.send(m.Resumed(self.run.plan.epoch, self._world.clock.now))

    def _send(self, layers: LayerRange, action: Action) -> None:
        stage = self._stage_of(action)
        if action.kind is Kind.SEND_F:
            self.sent.add(action.microbatch)
        place = self._pipeline.stages[stage]
        self.copies.log_message(action, place.first, place.last)
        unit, receive = message_of(self._member.stage, action, len(self._units))
        other = self.run.present.get(self._units[unit].node)
        hop_s = self._times(stage if action.kind is Kind.SEND_F else stage - 1).hop_s
        hop_s += self._world.clock.vary(self._world.physics.hop_s)

        def arrive() -> None:
            training = other.training if other is not None and other.reachable else None
            if training and training.run is self.run and self._worker.agent.alive:
                training.receive(layers, receive)

        self._world.clock.after(hop_s, arrive)

    def receive(self, layers: LayerRange, action: Action) -> None:
        """Take a message from another stage."""
        self._inbox.add((layers, action))
        if self._receiving and not self.over:
            self.advance()

    def _join_rounds(self, done: int | None) -> None:
        """Join the shared sums that are due after `done` micro-batches; None: all of them."""
        rounds, p = self._rounds, self._member.pipeline
        assert rounds is not None
        while self._round < rounds.number and (done is None or done >= rounds.due(p, self._round)):
            self._join(self._round)
            self._round += 1

    def _join(self, number: int) -> None:
        """Contribute this worker's gradients to the shared sums of a round."""
        run, mine = self.run, self._worker.held
        nbytes, rate = 0, self._world.link_bytes_per_s
        for layer in mine.parts:
            held = run.joined.setdefault((layer, mine.version, number), {})
            held[self._worker.agent.name] = mine.parts[layer][0]
            nbytes += self._world.profile.layers[layer].gradient_bytes
            holders = [unit.node for unit in run.plan.holders(layer)]
            if set(held) == set(holders):
                k = len(holders)
                seconds = 2 * (k - 1) / k * nbytes / rate if rate > 0 else 0.0
                union = frozenset(i for part in held.values() for i in part)
                done = partial(self._summed, layer, mine.version, union)
                self._world.clock.after(seconds, done)

    def _summed(self, layer: int, version: int, union: Ledger) -> None:
        for worker in self.run.present.values():
            training, held = worker.training, worker.held
            if training is None or training.run is not self.run or training.over:
                continue
            if worker.alive and layer in held.parts and held.version == version:
                held.share(layer, union)
                training.settle()

    def settle(self) -> None:
        """Continue after a shared sum, if the worker awaits no other."""
        if not self.copies.settled and not self._worker.held.unshared():
            self.copies.settled = True
            self.copies.report_protected()
        if self._rounds is not None and not self._lists and not self.arrived:
            self._microbatches_done()

    def _microbatches_done(self) -> None:
        self._worker.activity = "wait"
        if self._rounds is not None:
            self._join_rounds(None)
            everything = frozenset(range(self.run.plan.n_microbatches))
            if any(shared != everything for _, shared in self._worker.held.parts.values()):
                return
        self.copies.after_microbatches()
        self.place = "arrived"
        if self._worker.keeps_promise:
            self._worker.leave(planned=True)
        else:
            self._arrive()

    def _arrive(self) -> None:
        """Arrive at the commit once all copies are in place."""
        if self.over:
            return
        if not self.copies.clear:
            self.copies.wait(self._arrive)
            return
        self.arrived = True
        if self._disconnected:
            self._worker.link_failed(min(self._disconnected))
        else:
            self.run.commit()

    def committed(self, halt: int) -> None:
        """Take the optimizer step, publish, and begin the next step or leave for epoch `halt`."""
        worker, held, step = self._worker, self._worker.held, self._worker.held.version
        assert not worker.promise, f"{worker.agent.name} commits in spite of its promise"
        self.place = ""
        worker.record = StepRecord(step, 1.0, 1.0, 0.0)
        self.copies.before_update(list(held.parts))
        held.update()
        seconds = self.copies.after_update()
        self._report_resumed()
        self.arrived = False
        if self.rank == 0:
            took = self._world.clock.now - self._began
            worker.send(m.StepDone(self.run.plan.epoch, worker.record, took, 0.0))
            self._world.step_done(step, took)
        if held.version >= self._world.spec.n_steps:
            self._finish()
        elif halt > self.run.plan.epoch:
            worker.leave(planned=True)
        elif seconds:
            worker.later(seconds, lambda: self.begin(first=False))
        else:
            self.begin(first=False)

    def _finish(self) -> None:
        if self.copies.clear:
            self._worker.finished(self.rank)
        else:
            self.copies.wait(self._finish)


class SimulatedWorker:
    """A worker process: takes orders from its agent and reports to it."""

    def __init__(
        self,
        world: Environment,
        agent: Node,
        runs: dict[int, EpochRun],
        generation: int,
        seconds: float,
    ) -> None:
        """`seconds`: mean time until the worker attaches. `runs`: runs of the cluster, by epoch."""
        self.agent, self.world, self._generation, self._runs = agent, world, generation, runs
        self.alive, self.attached = True, False
        self.epoch = self.left_epoch = 0
        self.left, self._awaits_halt = True, False
        self.newest = m.Halt(0)
        self.promise = 0
        """Epoch for which it has promised to halt at the meeting point; 0: none."""
        self.held = HeldLayers()
        self._portions: dict[int, Portion] = {}
        self.record: StepRecord | None = None
        self.training: WorkerTraining | None = None
        self.activity, self.counter, self.microbatch = "idle", 0, 0
        self.busy_until = 0.0
        """End of the running compute action."""
        self._sources: tuple[Uplink, ...] = ()
        """Uplinks over which the worker fetches copies."""
        self._pending: Callable[[], None] | None = None
        self._token = 0
        world.clock.after_about(seconds, self._attach)

    @property
    def reachable(self) -> bool:
        """Whether the worker and its node are alive."""
        return self.alive and self.agent.alive

    @property
    def here(self) -> bool:
        """Whether the worker takes part in its epoch."""
        return self.reachable and not self.left

    def _trains_in(self, run: EpochRun) -> bool:
        return self.here and self.training is not None and self.training.run is run

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` after `seconds`, unless the worker has left its epoch or died by then."""
        token = self._token
        self.world.clock.after(
            seconds, lambda: action() if token == self._token and self.alive else None
        )

    def _between_actions(self, action: Callable[[], None]) -> None:
        """Run `action` at the end of the running compute action, unless another one waits."""
        if self.world.clock.now >= self.busy_until:
            action()
        elif self._pending is None:
            self._pending = action

    def interrupted(self) -> bool:
        """Run the action that waits for the end of a compute action; return False if none waits."""
        if self._pending is None:
            return False
        action, self._pending = self._pending, None
        action()
        return True

    def send(self, message: Any) -> None:
        """Send a message to the agent."""
        if self.alive:
            self.agent.receive_from_worker(self._generation, message)

    def progress(self) -> m.Progress:
        """Return the progress report."""
        return m.Progress(self.counter, self.activity, max(self.held.version, 0), self.microbatch)

    def _attach(self) -> None:
        if self.alive:
            self.attached = True
            store, accelerated = f"{self.agent.name}:2", self.world.accelerated
            self.send(m.Attach(0, 1, self.world.spec, store, accelerated))

    def die(self, *, silent: bool = False) -> None:
        """End the process; `silent`: its connections do not close visibly."""
        if self.alive:
            self.alive = False
            self._end_training()
            if not silent:
                self._disconnect(self.world.physics.closed_s)

    def crash(self) -> None:
        """End the process but not its node; the agent notices."""
        if self.alive:
            self.send(core.WorkerExited(0, -9))
            self.die()

    def _end_training(self) -> None:
        if self.training is not None:
            self.training.over = self.training.copies.over = True

    def _disconnect(self, seconds: float) -> None:
        """Let the other workers of the run notice that this worker's connections ended."""
        if self.training is None:
            return
        run = self.training.run
        for other in run.present.values():
            if other is not self and other._trains_in(run):
                noticed = partial(other.lost_contact, run, self.agent.name)
                self.world.clock.after_about(seconds, noticed)

    def lost_contact(self, run: EpochRun, node: str) -> None:
        """Notice, in `run`, that the connections of `node` ended."""
        if self._trains_in(run) and self.training is not None:
            self.training.disconnected(node)

    def link_failed(self, node: str) -> None:
        """Report that the connections of `node` ended, and leave the epoch."""
        self.send(m.CommFailed(self.epoch, (node,), "link"))
        self.leave()

    def order(self, message: Any) -> None:
        """Take an order of the agent."""
        if self.attached:
            self.world.clock.after_about(self.world.physics.local_s, lambda: self._order(message))

    def _order(self, message: Any) -> None:
        if not self.alive:
            return
        match message:
            case m.Halt():
                promises = self._promises(message)
                self.newest = message
                if self._awaits_halt:
                    self._halted_after(self.world.physics.leave_s)
                elif promises:
                    if self.keeps_promise:
                        self.leave(planned=True)
                elif not self.left and not message.boundary and message.epoch > self.epoch:
                    self._between_actions(self.leave)
            case m.Install() if message.epoch > self.left_epoch:
                self._enter(message)
            case m.Stop():
                self.alive = False

    def _promises(self, halt: m.Halt) -> bool:
        """Promise to halt at the meeting point, if the worker may."""
        ordered = self.newest.epoch > self.epoch and not self.newest.boundary
        there = self.training is not None and bool(self.training.place)
        if ordered or not there or halt.boundary or halt.epoch <= self.epoch:
            return False
        if self.agent.name not in halt.outside:
            return False
        self.promise = halt.epoch
        self.send(m.Promise(halt.epoch, self.epoch, self.held.version))
        return True

    @property
    def keeps_promise(self) -> bool:
        """Whether the worker is at the meeting point and has promised to halt there."""
        arrived = self.training is not None and self.training.place == "arrived"
        return arrived and self.promise > 0

    def leave(self, *, planned: bool = False) -> None:
        """Abort all communication; report the halt once a newer epoch is known. `planned`: the
        other workers need no connection to this one any more."""
        if self.training is not None and self.training.place != "arrived":
            self.training.place = ""
        self._token += 1
        self._pending = None
        for uplink in self._sources:
            uplink.drop(self.agent.name)
        self._end_training()
        self.left, self.left_epoch, self._awaits_halt = True, self.epoch, True
        self.activity = "wait"
        if not planned:
            self._disconnect(self.world.physics.local_s)
        if self.newest.epoch > self.epoch:
            physics = self.world.physics
            self._halted_after(physics.stop_s if planned else physics.leave_s)

    def _halted_after(self, seconds: float) -> None:
        self._awaits_halt = False
        self.later(self.world.clock.vary(seconds), self._halted)

    def _halted(self) -> None:
        training, started, sent = self.training, EMPTY, EMPTY
        if training is not None:
            training.copies.flush()
            if training.step == self.held.version:
                started, sent = frozenset(training.started), frozenset(training.sent)
        self.activity = "idle"
        epoch = self.newest.epoch
        complete = self.keeps_promise and self.promise == epoch
        self.send(m.Halted(epoch, self.held.version, started, sent, self.record, complete))

    def _enter(self, order: m.Install) -> None:
        self._token += 1
        self.epoch, self.left, self._awaits_halt = order.epoch, False, False
        self.training, self.activity, self.promise = None, "install", 0
        self._pending, self.busy_until = None, 0.0
        if self.newest.epoch > self.epoch and not self.newest.boundary:
            self.leave()
            return
        self._began = self.world.clock.now
        promised = self._promised(order.assignment)
        if promised is None:
            self._install(order.assignment)
        elif self.held.version != order.assignment.step or any(
            self.held.ledger(layer) != frozenset(promised) for layer in self.held.parts
        ):
            self._source_lost()
        else:
            seconds = self.world.clock.vary(self.world.physics.install_s)
            self.later(seconds, lambda: self._connect(order.assignment))

    def _promised(self, assignment: Assignment) -> tuple[int, ...] | None:
        """Return the micro-batches that this worker must have in its sums; None: it loads them."""
        node = self.agent.name
        mine = next(p for p, _, stage in assignment.plan.stages() if stage.unit.node == node)
        return dict(assignment.promised).get(mine)

    def _install(self, assignment: Assignment) -> None:
        """Fetch the copies that the assignment names, then connect to the others."""
        plan, node = assignment.plan, self.agent.name
        layers = [la for _, _, st in plan.stages() if st.unit.node == node for la in st.layers]
        recipes = {r.layer: r for n, r in assignment.recipes if n == node}
        portions = {la: portion_of(plan, node, la) for la in layers}
        live = {la for la in self.held.parts if portions.get(la) == self._portions.get(la)}
        used = [la for la in layers if la in recipes]
        wanted = [copy for la in used for copy in self._wanted(recipes[la], la in live)]
        for run in assignment.partial:
            wanted += [copy for copy in run.inputs if copy.layer in layers]
            wanted += [copy for copy in run.gradients if copy.layer - 1 in layers]
        read = sum(self.world.state_bytes(la) for la in used if recipes[la].checkpoint)
        rate = self.world.physics.disk_bytes_per_s
        seconds = self.world.clock.vary(self.world.physics.install_s)
        seconds += read / rate if rate > 0 else 0.0
        sources = list(dict.fromkeys(wanted))
        if not all(self._has(copy) for copy in sources):
            self.later(seconds, self._source_lost)
            return

        def done() -> None:
            if not all(self._has(copy) for copy in sources):
                self._source_lost()
                return
            recovered = dict.fromkeys(layers, EMPTY)
            for la in used:
                recovered[la] = frozenset(i for c in recipes[la].gradients for i in c.microbatches)
            self.held.install(assignment.step, recovered)
            self._portions = portions
            self._connect(assignment)

        self._fetch(sources, lambda: self.later(seconds, done))

    def _wanted(self, recipe: Recipe, live: bool) -> Iterator[Copy]:
        """Yield the copies to read, states first; `live`: the worker holds the layer already."""
        kept = live and self.held.version == recipe.version
        if not kept:
            whole = live and self._portions.get(recipe.layer) == WHOLE
            for part in recipe.portions:
                yield from part.states
                yield from part.updates
            state = recipe.state
            if state is not None and not (whole and state.step == self.held.version):
                yield state
            yield from recipe.updates
            yield from recipe.replay
        for copy in recipe.gradients:
            mine = copy.owner == copy.node == self.agent.name
            if not (kept and mine and copy.microbatches in self.held.parts.get(recipe.layer, ())):
                yield copy

    def _has(self, copy: Copy) -> bool:
        node = self.world.agents.get(copy.node)
        return node is not None and copy in node.vault and (node is self.agent or node.alive)

    def _fetch(self, copies: list[Copy], done: Callable[[], None]) -> None:
        """Fetch from all sources at once, own copies at copying speed, and call `done()`."""
        nbytes: dict[str, int] = {}
        for copy in copies:
            nbytes[copy.node] = nbytes.get(copy.node, 0) + copy.nbytes
        local = nbytes.pop(self.agent.name, 0)
        uplinks = {name: node.uplink for name in nbytes if (node := self.world.agents.get(name))}
        rate, left, token = self.world.copy_bytes_per_s, 1 + len(uplinks), self._token

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left and token == self._token:
                done()

        self._sources = tuple(uplinks.values())
        for name, uplink in uplinks.items():
            uplink.send(self.agent.name, nbytes[name], arrived)
        self.later(local / rate if rate > 0 else 0.0, arrived)

    def _source_lost(self) -> None:
        self.send(m.CommFailed(self.epoch, (), "a source is gone"))
        self.leave()

    def _connect(self, assignment: Assignment) -> None:
        self._sources = ()
        self._transferred = self.world.clock.now
        if self.epoch not in self._runs:
            for old in [epoch for epoch in self._runs if epoch < self.epoch - 2]:
                del self._runs[old]
            self._runs[self.epoch] = EpochRun(self.world, assignment)
        run = self._runs[self.epoch]
        run.present[self.agent.name] = self
        self.training = WorkerTraining(self, run)
        run.connect(self)

    def ready(self, run: EpochRun) -> None:
        """Report that all workers of `run` are connected, and begin to train."""
        if self._trains_in(run) and self.training is not None:
            transfer_s = self._transferred - self._began
            self.send(m.Ready(self.epoch, transfer_s, self.world.clock.now - self._transferred))
            if self.held.version >= self.world.spec.n_steps:
                self.finished(self.training.rank)
            else:
                self.training.begin(first=True)

    def finished(self, rank: int) -> None:
        """Report that all steps are done."""
        self.send(m.Finished(self.world.spec.n_steps, "simulated" if rank == 0 else ""))
        self.left, self.left_epoch, self._awaits_halt = True, self.epoch, True
        if self.newest.epoch > self.epoch:
            self._halted_after(self.world.physics.leave_s)
