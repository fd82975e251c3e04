"""The training loop that survives: what a script calls.

    Trainer(stack=..., optimizer=..., data=..., steps=..., microbatches=...).run()

The worker attaches to its agent and then follows orders. `Install` makes it bring its layers to the
assignment, connect to the others and train; a fault anywhere, or a newer epoch, makes it leave all
communication at once, put what it has into the vault, report `Halted`, and wait for the next `Install`.
Process, device context and model stay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import Phase
from elastic.domain.errors import EXIT_FAILURE, ElasticError, FieldError, VaultError
from elastic.domain.types import WHOLE, Accumulate, JobSpec, Portion, Unit
from elastic.planning.plan.rank_map import Roster, roster
from elastic.planning.plan.schemes import state_of
from elastic.rpc.frames import connect_unix
from elastic.rpc.shaping import shaper_of
from elastic.worker.backup.copier import beside
from elastic.worker.backup.policy import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.control.agent_client import Control, WorkerContext
from elastic.worker.engine.injector import Injector
from elastic.worker.engine.partial import PartialRunner
from elastic.worker.engine.step import Outcome, StepRunner
from elastic.worker.model.device import choose_device
from elastic.worker.model.layers import LayerStack, Microbatch, TensorParallel
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.model.tensor_parallel import tp_sync
from elastic.worker.profiling.profiled import EMULATE, check_fit, stack_of
from elastic.worker.profiling.profiling import measure_job
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.recovery.final_hash import job_sha256
from elastic.worker.recovery.state_loader import Installed, Installer
from elastic.worker.replica.build import build_replica, warm_up
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import Abandon, EpochAbandoned
from elastic.worker.transport.devicefault import broke, broke_here, crashing
from elastic.worker.transport.links import LinkFailed, Links, host_store


class Trainer:
    """Trains `stack` for `steps` steps of `microbatches` micro-batches, on whatever nodes there are.

    data(step, index) gives micro-batch `index` of `step`, a function of these alone. Global batch, sample order,
    dropout and learning rate do not depend on the nodes. With `--accumulate exact` neither do the parameters, bit
    for bit.
    """

    def __init__(
        self,
        *,
        stack: LayerStack,
        optimizer: OptimizerSpec,
        data: Callable[[int, int], Microbatch],
        steps: int,
        microbatches: int,
        seed: int = 0,
        tp: int = 1,
        tokens_per_microbatch: int = 0,
        checkpoint_every: int = 0,
    ) -> None:
        for name, value, least in (
            ("steps", steps, 1),
            ("microbatches", microbatches, 1),
            ("tp", tp, 1),
            ("checkpoint_every", checkpoint_every, 0),
        ):
            if value < least:
                raise FieldError(name, value, f"a whole number from {least} up")
        self._context = WorkerContext.from_environment()
        stack = stack_of(self._context, stack)
        self._stack, self._optimizer, self._data = stack, optimizer, data
        self._accumulate = Accumulate(self._context.accumulate)
        self._spec = JobSpec(
            layers=stack.specs(self._accumulate, optimizer),
            n_microbatches=microbatches,
            n_steps=steps,
            tp=tp,
            seed=seed,
            tokens_per_microbatch=tokens_per_microbatch,
            tied=tuple((group[0][0], owner[0]) for group in stack.tied for owner in group[1:]),
            checkpoint_every=checkpoint_every,
        )
        self._tp = TensorParallel()
        self._publisher: Publisher
        self._live: dict[int, LayerReplica] = {}
        self._protection: Protection | None = None

    def run(self) -> None:
        """Train to the end. Returns when the job is done; raises SystemExit with the job's code if it failed.

        Under `elastic profile` the layers are measured instead.
        """
        if self._context.measure:
            measure_job(self._context, self._stack, self._spec, self._optimizer, self._data, self._accumulate)
            return
        try:
            self._connect()
        except ElasticError as error:
            channel = connect_unix(self._context.agent)
            channel.send(m.Failed(str(error), error.exit_code, self._context.local_rank))
            raise SystemExit(error.exit_code) from None
        while True:
            order = self._control.next_order()
            if isinstance(order, m.Stop):
                self._leave()
                if order.code:
                    raise SystemExit(order.code)
                return
            if isinstance(order, m.Install) and order.epoch > self._left_epoch:
                with crashing(self._control.send, self._context.local_rank):
                    self._epoch(order)

    def _leave(self) -> None:
        """Let go of groups and slots while the interpreter is whole: their destructors wait for threads."""
        self._control.close()
        self._publisher.close()
        self._live.clear()
        self._protection = None
        self._tp = TensorParallel(self._tp.rank, self._tp.size)
        self._stack.release()

    # ---- attaching ----

    def _connect(self) -> None:
        context = self._context
        check_fit(context, self._spec)
        if context.local_world_size % self._spec.tp:
            raise FieldError(
                "tp", self._spec.tp, f"it must divide the {context.local_world_size} workers of a node"
            )
        self._device = choose_device(context.local_rank, emulated=context.profile == EMULATE)
        if self._accumulate is Accumulate.EXACT and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # sums inside a kernel depend on it, and nodes must not differ
        group, shard = divmod(context.local_rank, self._spec.tp)
        self._unit, self._left_epoch = Unit(context.node, group), 0
        self._tp = self._stack.tensor_parallel(
            shard, self._spec.tp, f"{context.tp_store}.{group}", self._device
        )
        warm_up(self._stack, self._tp, self._optimizer, self._accumulate, self._device)
        self._store, address = host_store(context.host)
        self._control = Control(context.agent, self._on_acked)
        memory = Path(context.memory_dir) / context.node
        self._publisher = Publisher(self._control, memory, context.node, shard, beside=beside(self._device))
        self._injector = Injector(context, self._control.send)
        self._control.send(m.Attach(context.local_rank, os.getpid(), self._spec, address))
        self._control.start()

    def _on_acked(self, acked: m.Acked) -> None:
        self._publisher.on_acked(acked.bundle, acked.kept)
        if self._protection is not None:
            self._protection.on_acked(acked.bundle, acked.kept)

    # ---- an epoch ----

    def _epoch(self, order: m.Install) -> None:
        """Install, train, and leave when told or when something breaks; then report what is here."""
        abandon = self._control.enter(order.epoch)
        epoch = _Epoch(self, order, abandon)
        try:
            epoch.run()
        except EpochAbandoned:
            pass
        except LinkFailed as error:
            nodes = tuple(dict.fromkeys(epoch.roster.members[r].unit.node for r in error.ranks))
            self._control.send(m.CommFailed(order.epoch, nodes, str(error)))
        except VaultError as error:
            self._control.send(m.CommFailed(order.epoch, (), str(error)))
        except ElasticError as error:
            self._fail(f"{type(error).__name__}: {error}", error.exit_code)
        except RuntimeError as error:
            # A collective of a TP group fails when a sibling dies. The agent, which knows of that, ends this
            # worker too, or somebody announces an epoch; else it was the script's own error, or the device's.
            alone = self._tp.size == 1 or broke_here(error)
            if alone or not abandon.wait(self._context.timeouts.sibling_s):
                if broke(error):
                    raise
                self._fail(f"{type(error).__name__}: {error}", EXIT_FAILURE, error)
        except Exception as error:  # noqa: BLE001 - the user's model, data or optimizer: the job cannot go on, and says so
            self._fail(f"{type(error).__name__}: {error}", EXIT_FAILURE, error)
        finally:
            epoch.close()
        self._control.position.at("wait")
        self._left_epoch = order.epoch
        newest = self._control.await_halt(order.epoch)
        if newest is None:
            return
        if self._protection is not None:
            self._protection.flush()
        self._control.send(epoch.halted(newest))
        self._control.position.at("idle")

    def _fail(self, message: str, code: int, cause: BaseException | None = None) -> NoReturn:
        self._control.send(m.Failed(message, code, self._context.local_rank))
        if cause is not None:
            raise cause
        raise SystemExit(code)

    def _build(self, layer: int, empty: bool, portion: Portion = WHOLE) -> LayerReplica:
        replica = build_replica(
            self._stack,
            layer,
            self._tp,
            self._optimizer,
            self._accumulate,
            self._spec.seed,
            self._device,
            empty=empty,
            portion=portion,
        )
        replica.owner = self._context.node
        return replica


class _Epoch:
    """One worker in one epoch."""

    def __init__(self, trainer: Trainer, order: m.Install, abandon: Abandon) -> None:
        self._t, self._order, self._abandon = trainer, order, abandon
        self._assignment = order.assignment
        self.plan = order.assignment.plan
        self.roster: Roster = roster(self.plan)
        self._links: Links | None = None
        self._steps: StepRunner | None = None
        self._resumed = False
        units = self.plan.units()
        self._rank = -1
        if trainer._unit in units:
            self._rank = self.roster.rank(trainer._unit, trainer._tp.rank)

    def run(self) -> None:
        """Install and train until the last step is done, or somebody wants otherwise."""
        if self._rank < 0:
            self._t._live.clear()
            self._t._protection = None
            self._t._control.send(m.Ready(self._order.epoch, 0.0, 0.0))
            self._t._control.send(m.Protected(self._order.epoch))
            return
        self._install()
        assert self._steps is not None
        todo, covered = self._assignment.todo, dict(self._assignment.covered)
        for step in range(self._assignment.step, self._t._spec.n_steps):
            outcome = self._steps.run(step, todo, covered)
            self._measure(step)
            self._tell(outcome)
            if outcome.halt_epoch > self._order.epoch:
                break
            todo, covered = tuple(p.microbatches for p in self.plan.pipelines), {}
        self._steps.runner.agreement.check()  # a TP rank that failed in the last commit waits for the others here
        if all(replica.version == self._t._spec.n_steps for replica in self._t._live.values()):
            self._finish()

    def _install(self) -> None:
        t, control = self._t, self._t._control
        control.position.at("install", self._assignment.step)
        began = time.perf_counter()
        member = self.roster.members[self._rank]
        fetcher = Fetcher(
            t._context.node,
            dict(self._assignment.vaults),
            self._abandon,
            timeout_s=t._context.timeouts.bulk_s,
        )
        t._optimizer.check(shared=state_of(self.plan.state).sharded)
        recovering = any(recipe.states or recipe.checkpoint for _, recipe in self._assignment.recipes)

        def reached() -> None:
            if recovering:
                t._injector.reach(self._assignment.step, Phase.RECOVERY)

        try:
            check, tied = self._abandon.check, t._stack.tied
            installer = Installer(t._build, fetcher, t._optimizer.lr, reached, check, tied)
            t._live = installer.usable(self._assignment, member, t._live)
            if t._protection is not None:
                t._protection.release(t._live)
            installed = installer.install(self._assignment, member, t._live)
        finally:
            fetcher.close()
        t._live = {replica.index: replica for replica in installed.replicas}
        transferred = time.perf_counter()
        self._connect(installed)
        if recovering:
            t._injector.recoveries += 1
        rebuilt = time.perf_counter()
        control.send(
            m.Ready(self._order.epoch, transferred - began, rebuilt - transferred, tuple(installed.sources))
        )

    def _connect(self, installed: Installed) -> None:
        t, replicas = self._t, installed.replicas
        self._links = Links.open(
            epoch=self._order.epoch,
            rank=self._rank,
            world_size=self.roster.size,
            store_address=self._assignment.store,
            device=t._device,
            timeout_s=t._context.timeouts.link_s,
            abandon=self._abandon,
            host=t._context.host,
            holder_sets=self.roster.holder_sets(),
            pairs=self.roster.pairs(),
            shaper=shaper_of(Path(t._context.memory_dir) / t._context.node, t._context.link),
            remote=[r for r, mb in enumerate(self.roster.members) if mb.unit.node != t._context.node],
        )
        t._protection = Protection(
            t._publisher, self.plan, t._context.node, replicas, self._abandon, t._control.send, t._stack.tied,
            chunks=len(self.roster.places(self._rank)),
        )  # fmt: skip
        self._steps = StepRunner(
            plan=self.plan,
            roster=self.roster,
            rank=self._rank,
            replicas=replicas,
            links=self._links,
            stack=t._stack,
            optimizer=t._optimizer,
            data=self._data,
            abandon=self._abandon,
            tp_sync=tp_sync(t._tp),
            protection=t._protection,
            injector=t._injector,
            position=t._control.position,
            boundary_requested=t._control.boundary_requested,
            on_microbatch=self._on_microbatch,
            partial=PartialRunner(self._assignment, self.roster, self._rank, replicas, installed.messages),
        )

    def _data(self, step: int, index: int) -> Microbatch:
        if self._t._context.profile == EMULATE:
            return Microbatch(step, index, {})
        microbatch = self._t._data(step, index)
        fields = {name: tensor.to(self._t._device) for name, tensor in microbatch.fields.items()}
        return Microbatch(step, index, fields)

    def _on_microbatch(self) -> None:
        if not self._resumed:
            self._resumed = True
            self._t._control.send(m.Resumed(self._order.epoch, time.time()))

    def _tell(self, outcome: Outcome) -> None:
        if not self._resumed:
            self._on_microbatch()
        if self._rank == 0:
            t = self._t
            tokens = t._spec.n_microbatches * t._spec.tokens_per_microbatch
            t._control.send(
                m.StepDone(self._order.epoch, outcome.record, outcome.seconds, outcome.lr, tokens)
            )

    def _measure(self, step: int) -> None:
        """The heartbeat carries how long the step's computing took."""
        assert self._steps is not None
        context = self._t._context
        traffic = self._t._publisher.traffic.take()
        measured = self._steps.meter.take(self._order.epoch, step, context.local_rank, traffic)
        self._t._control.position.measured = measured or self._t._control.position.measured

    def _finish(self) -> None:
        """All steps are done: wait until everybody's last state is in a vault; one worker computes the hash."""
        t = self._t
        assert t._protection is not None and self._links is not None
        t._control.position.at("wait", t._spec.n_steps)
        if not self._resumed:
            self._on_microbatch()
        t._protection.finish()
        self._links.gather(torch.zeros(1, dtype=torch.int64))
        sha = ""
        if self._rank == 0:
            sha = job_sha256(
                self.plan, t._spec, dict(self._assignment.vaults), t._context.node, self._abandon
            )
        t._control.send(m.Finished(t._spec.n_steps, sha))

    def close(self) -> None:
        if self._links is not None:
            self._links.close()

    def halted(self, epoch: int) -> m.Halted:
        """What this worker holds now that it has left."""
        steps = self._steps
        if steps is None or not self._t._live:
            versions = {r.version for r in self._t._live.values()}
            return m.Halted(epoch, min(versions, default=-1))
        step = min(replica.version for replica in self._t._live.values())
        if step != steps.step:
            return m.Halted(epoch, step, record=steps.record)
        return m.Halted(epoch, step, steps.started, steps.sent, steps.record)
