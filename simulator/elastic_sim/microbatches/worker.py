"""DOC"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import Phase
from elastic.domain.types import WHOLE, Assignment, Copy, Plan, Portion, Recipe, StepRecord
from elastic.planning.cost.predict import Prediction, predict
from elastic.planning.plan.rank_map import Member, Roster, roster
from elastic.planning.plan.schemes import gradients_of, portion_of
from elastic.planning.schedule.partial_schedule import excerpt, groups
from elastic.planning.schedule.reduction_rounds import Rounds, rounds_of
from elastic.planning.schedule.schedule import Action, Kind, actions_of, message_of, units_of
from elastic.planning.schedule.timeline import StageTimes
from elastic_sim.microbatches.clock import Wire
from elastic_sim.microbatches.copies import NOTHING, Copies, HeldLayers
from elastic_sim.microbatches.environment import Environment, Host

Span = tuple[int, int]
POINTS = {Kind.F: Phase.FORWARD, Kind.B: Phase.BACKWARD, Kind.INPUT: Phase.BACKWARD}
"""Where injected faults strike: right before these."""


@dataclass
class Run:
    """The workers of one epoch, and what they have in common."""

    world: Environment
    assignment: Assignment
    present: dict[str, Worker] = field(default_factory=dict)
    connected: bool = False
    met_at: float = 0.0
    """When those that are here will all have been at the store."""
    committing: bool = False

    def __post_init__(self) -> None:
        plan = self.assignment.plan
        self.roster: Roster = roster(plan)
        infos = tuple(known.info for node in plan.nodes() if (known := self.world.node(node)))
        self.predicted: Prediction = predict(
            replace(plan, gradients="none"), self.world.profile, infos
        )
        self.joined: dict[tuple[int, int, int], dict[str, frozenset[int]]] = {}
        """(layer, version, round): what holders brought to a common sum, by node."""

    @property
    def plan(self) -> Plan:
        return self.assignment.plan

    @property
    def whole(self) -> bool:
        """Everybody of the plan is there and can be reached."""
        return set(self.plan.nodes()) == self.present.keys() and all(
            w.here for w in self.present.values()
        )

    def connect(self, worker: Worker) -> None:
        """It has what it needs, and goes to the store; if everybody has: meet."""
        clock, physics = self.world.clock, self.world.physics
        self.met_at = (
            max(self.met_at, clock.now) + physics.pair_s * (len(self.plan.nodes()) - 1) / 2
        )
        if self.whole and not self.connected:
            self.connected = True
            for one in self.present.values():
                clock.after(
                    self.met_at - clock.now + clock.vary(physics.group_s), one.ready_for(self)
                )

    def commit(self) -> None:
        """If everybody has done its micro-batches: the common end of the step."""
        workers = list(self.present.values())
        if (
            not self.whole
            or self.committing
            or not all(w.training and w.training.arrived for w in workers)
        ):
            return
        self.committing = True
        seconds = self.predicted.tail_s + self.world.clock.vary(self.world.physics.step_s)
        self.world.clock.after(seconds, self._committed)

    def _committed(self) -> None:
        self.committing = False
        workers = list(self.present.values())
        if not self.whole or not all(w.training and w.training.arrived for w in workers):
            return
        self.check_ledgers(workers)
        halt = max(w.newest.epoch if w.newest.boundary else 0 for w in workers)
        for worker in workers:
            assert worker.training is not None
            worker.training.committed(halt)
        self.world.look()

    def check_ledgers(self, workers: Sequence[Worker]) -> None:
        """Every layer has every micro-batch exactly once."""
        every, common = (
            set(range(self.plan.n_microbatches)),
            gradients_of(self.plan.gradients).rounds,
        )
        for layer in range(self.plan.n_layers):
            held = [w.held.ledger(layer) for w in workers if layer in w.held.parts]
            total = held[0] if common else frozenset(i for ledger in held for i in ledger)
            once = sum(map(len, held)) == len(total) or bool(common)
            assert once and total == every, f"layer {layer}: {held}"


class Training:
    """From the meeting to the end of the epoch."""

    def __init__(self, worker: Worker, run: Run) -> None:
        self._worker, self._world, self._run = worker, run.world, run
        plan = run.plan
        node = worker.agent.name
        self._rank = next(r for r, mb in enumerate(run.roster.members) if mb.unit.node == node)
        self._me: Member = run.roster.members[self._rank]
        self._pipeline = plan.pipelines[self._me.pipeline]
        self._units = units_of(self._pipeline)
        self._places = run.roster.places(self._rank)
        self.copies = Copies(
            run.world, worker.agent, worker.held, worker.say, run.assignment, len(self._places)
        )
        self._lists: list[tuple[Span, tuple[Action, ...]]] = []
        self._at, self._inbox = 0, set[tuple[Span, Action]]()
        self.arrived, self._stuck, self._resumed, self.over = False, False, False, False
        self._warm = False
        self.step = -1
        self.started, self.sent = set[int](), set[int]()
        self._finished: dict[int, int] = {}
        """Stage: micro-batches that it has finished in this step."""
        self._round = 0
        self._rounds: Rounds | None = None
        self._began = self._world.clock.now
        self._ended = set[str]()
        """Nodes whose connections have ended; who waits for one of them learns of it. Sending tells nothing."""

    # ---- a step ----

    def begin(self, first: bool) -> None:
        """Begin a step: in the epoch's first one with what the assignment says."""
        run, p = self._run, self._me.pipeline
        todo = run.assignment.todo if first else tuple(pl.microbatches for pl in run.plan.pipelines)
        everything = 0, run.plan.n_layers
        lists = list[tuple[Span, tuple[Action, ...]]]()
        if first:
            for span, runs in groups(run.assignment.partial, p):
                indices = tuple(one.microbatch for one in runs)
                lists.append((span, excerpt(self._pipeline, *span, indices)[self._me.stage]))
        lists.append((everything, actions_of(self._pipeline, todo[p])[self._me.stage]))
        self._lists, self._at, self._began = lists, 0, self._world.clock.now
        self.step = self._worker.held.version
        self.arrived, self.started, self.sent, self._finished = False, set(), set(), {}
        self._covered = dict(run.assignment.covered) if first else {}
        often = gradients_of(run.plan.gradients).rounds
        self._round = 0
        self._rounds = (
            rounds_of(run.plan.pipelines, [len(t) for t in todo], often) if often else None
        )
        if self._world.strikes(self._worker.agent.name, self.step, Phase.START):
            return
        if not lists[-1][1]:
            self.copies.enter()
        self.advance()

    def advance(self) -> None:
        """Go on with the list until there is something to wait for."""
        self._stuck = False
        if self._worker.interrupted():
            return
        while self._lists and not self.over:
            span, actions = self._lists[0]
            if self._at >= len(actions):
                self._lists.pop(0)
                self._at = 0
                continue
            action = actions[self._at]
            if action.kind.computes:
                self._compute(span, action)
                return
            if action.kind.receives:
                if (span, action) not in self._inbox:
                    self._stuck = not self._fails(action)
                    return
                self._inbox.remove((span, action))
            else:
                self._send(span, action)
            self._at += 1
        if not self.over:
            self._microbatches_done()

    def ended(self, node: str) -> None:
        """The connections of `node` have ended: who waits for it, or for everybody, sees it at once."""
        self._ended.add(node)
        if self.arrived:
            self._worker.link_failed(node)
        elif self._stuck:
            self._fails(self._lists[0][1][self._at])

    def _fails(self, receive: Action) -> bool:
        """Whether it is from a neighbour whose connections have ended; if so, say so and leave."""
        ahead = 1 if receive.kind is Kind.RECV_B else -1
        node = self._units[(self._me.stage + ahead) % len(self._units)].node
        if node in self._ended:
            self._worker.link_failed(node)
        return node in self._ended

    def _compute(self, span: Span, action: Action) -> None:
        worker, stage = self._worker, self._me.stage if action.stage < 0 else action.stage
        point = POINTS.get(action.kind)
        if point and self._world.strikes(worker.agent.name, self.step, point, action.microbatch):
            return
        if action.kind is Kind.F:
            self.started.add(action.microbatch)
        worker.counter += 1
        worker.activity, worker.microbatch = "compute", action.microbatch
        seconds = self._times(stage).of(action.kind) * self._share(span, stage)
        busy = worker.agent.wire.busy_s
        seconds += self._world.profile.contention * min(seconds, busy)
        if not self._warm:
            self._warm = True
            seconds += self._world.clock.vary(self._world.physics.resume_s)
        worker.busy_until = self._world.clock.now + seconds * worker.slowness
        worker.later(seconds * worker.slowness, lambda: self._computed_action(span, action, stage))

    def _times(self, stage: int) -> StageTimes:
        return self._run.predicted.stages[self._me.pipeline][stage]

    def _share(self, span: Span, stage: int) -> float:
        """Of a stage's time, what its layers inside `span` take."""
        whole = self._pipeline.stages[stage].layers
        if span[0] <= whole.start and whole.stop <= span[1]:
            return 1.0
        layers = self._world.profile.layers
        cost = {i: layers[i].forward_s + layers[i].backward_s for i in whole}
        total = sum(cost.values())
        inside = sum(seconds for i, seconds in cost.items() if span[0] <= i < span[1])
        return inside / total if total else 0.0

    def _computed_action(self, span: Span, action: Action, stage: int) -> None:
        if action.kind.finishes:
            layers = self._pipeline.stages[stage].layers
            inside = [i for i in layers if span[0] <= i < span[1]]
            self._worker.held.add(action.microbatch, inside, self._covered)
            self._finished[stage] = self._finished.get(stage, 0) + 1
            self._resume()
            if self._rounds is not None:
                self._join_rounds()
            self._publish()
        else:
            self._at += 1
            self.advance()

    def _publish(self) -> None:
        """A micro-batch is finished: its gradient is copied, once there is room for another copy."""
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

    def _resume(self) -> None:
        if not self._resumed:
            self._resumed = True
            self._worker.say(m.Resumed(self._run.plan.epoch, self._world.clock.now))

    def _send(self, span: Span, action: Action) -> None:
        stage = self._me.stage if action.stage < 0 else action.stage
        if action.kind is Kind.SEND_F:
            self.sent.add(action.microbatch)
        place = self._pipeline.stages[stage]
        self.copies.sent(action, place.first, place.last)
        unit, receive = message_of(self._me.stage, action, len(self._units))
        other = self._run.present.get(self._units[unit].node)
        hop = self._times(stage if action.kind is Kind.SEND_F else stage - 1).hop_s
        hop += self._world.clock.vary(self._world.physics.hop_s)
        run = self._run

        def arrive() -> None:
            training = other.training if other is not None and other.reachable else None
            if training is not None and training.run is run and self._worker.agent.reachable:
                training.receive(span, receive)

        self._world.clock.after(hop, arrive)

    @property
    def run(self) -> Run:
        return self._run

    @property
    def first(self) -> bool:
        """Of all workers, the one that speaks for them."""
        return self._rank == 0

    def receive(self, span: Span, action: Action) -> None:
        self._inbox.add((span, action))
        if self._stuck and not self.over and not self._worker.stopped:
            self.advance()

    # ---- common sums ----

    def _join_rounds(self) -> None:
        """Under `reduce`: bring what is here to the sums that are due."""
        assert self._rounds is not None
        done = min(self._finished.get(place.number, 0) for place in self._places)
        while self._round < self._rounds.number and done >= self._rounds.due(
            self._me.pipeline, self._round
        ):
            self._join(self._round)
            self._round += 1

    def _join(self, number: int) -> None:
        run, node, mine = self._run, self._worker.agent.name, self._worker.held
        version = mine.version
        nbytes, rate = 0, self._world.link_bytes_per_s
        for layer in mine.parts:
            held = run.joined.setdefault((layer, version, number), {})
            held[node] = mine.own(layer)
            nbytes += self._world.profile.layers[layer].gradient_bytes
            holders = [unit.node for unit in run.plan.holders(layer)]
            if set(held) == set(holders):
                k = len(holders)
                seconds = 2 * (k - 1) / k * nbytes / rate if rate > 0 else 0.0
                union = frozenset(i for part in held.values() for i in part)
                self._world.clock.after(
                    seconds, lambda la=layer, u=union: self._summed(la, version, u)
                )  # type: ignore[misc]

    def _summed(self, layer: int, version: int, union: frozenset[int]) -> None:
        for worker in self._run.present.values():
            training = worker.training
            if (
                training is None
                or training.run is not self._run
                or training.over
                or not worker.alive
            ):
                continue
            if layer in worker.held.parts and worker.held.version == version:
                worker.held.share(layer, union)
                training.settle()

    def settle(self) -> None:
        if not self.copies.settled and not self._worker.held.unshared():
            self.copies.settled = True
            self.copies.tell()
        if self._rounds is not None and not self._lists and not self.arrived:
            self._microbatches_done()

    # ---- the end of a step ----

    def _microbatches_done(self) -> None:
        worker = self._worker
        worker.activity = "wait"
        if self._rounds is not None:
            while self._round < self._rounds.number:
                self._join(self._round)
                self._round += 1
            everything = frozenset(range(self._run.plan.n_microbatches))
            held = worker.held
            if any(held.shared(layer) != everything for layer in held.parts):
                return
        self.copies.after_microbatches()
        self._gate()

    def _gate(self) -> None:
        if self.over:
            return
        if not self.copies.clear:
            self.copies.wait(self._gate)
            return
        self.arrived = True
        if self._ended:
            self._worker.link_failed(min(self._ended))
        else:
            self._run.commit()

    def committed(self, halt: int) -> None:
        """The step counts: a new version, published; on with the next step, or out."""
        worker, held, step = self._worker, self._worker.held, self._worker.held.version
        worker.record = StepRecord(step, 1.0, 1.0, 0.0)
        self.copies.before_update(list(held.parts))
        held.update()
        seconds = self.copies.after_update()
        self._resume()
        self.arrived = False
        if self._rank == 0:
            took, tokens = self._world.clock.now - self._began, self._world.tokens
            worker.say(m.StepDone(self._run.plan.epoch, worker.record, took, 0.0, tokens))
            self._world.stepped(step, took)
        if held.version >= self._world.spec.n_steps:
            self._finish()
        elif halt > self._run.plan.epoch:
            worker.leave(planned=True)
        elif seconds:
            worker.later(seconds, lambda: self.begin(first=False))
        else:
            self.begin(first=False)

    def _finish(self) -> None:
        if not self.copies.clear:
            self.copies.wait(self._finish)
            return
        self._worker.finished(self._rank == 0)


def run_of(runs: dict[int, Run], world: Environment, assignment: Assignment) -> Run:
    """The run of the assignment's epoch; begun, and added to `runs`, if it is new.

    Runs that are more than two epochs older are forgotten.
    """
    epoch = assignment.plan.epoch
    if epoch not in runs:
        for old in [e for e in runs if e < epoch - 2]:
            del runs[old]
        runs[epoch] = Run(world, assignment)
    return runs[epoch]


class Worker:
    def __init__(
        self, world: Environment, agent: Host, runs: dict[int, Run], generation: int, seconds: float
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
            seconds,
            lambda: action() if token == self._token and self.alive and not self.stopped else None,
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
            self.say(core.Exited(0, -9))
            self.die()

    def _break(self, seconds: float) -> None:
        """The others in the run see this one's connections end."""
        run = self.training.run if self.training is not None else None
        for other in list(run.present.values()) if run is not None else []:
            if (
                other is not self
                and other.here
                and other.training is not None
                and other.training.run is run
            ):
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
        self.left, self.left_epoch, self._awaits_halt, self.activity = (
            True,
            self.epoch,
            True,
            "wait",
        )
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
        wanted = [
            c for la in layers if la in recipes for c in self._wanted(recipes[la], la in live)
        ]
        messages = [
            c
            for run in assignment.partial
            for c in self._messages(run.inputs, run.gradients, layers)
        ]
        disk = sum(
            self.world.state_bytes(la) for la in layers if la in recipes and recipes[la].checkpoint
        )
        rate = self.world.physics.disk_bytes_per_s
        seconds = self.world.clock.vary(self.world.physics.install_s) + (
            disk / rate if rate > 0 else 0.0
        )
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
