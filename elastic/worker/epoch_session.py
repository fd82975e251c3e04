"""One worker in one epoch: install, connect, train, leave, and report the layers it holds.

The session begins with an `Install` order. It ends when the worker has sent `Halted`, or when the
job is over. Between `Halted` and the next `Install` the worker waits in `Trainer.run`. A session
owns the links to the other workers and the step runner. All other objects belong to the
`WorkerContext`, where the session leaves the layers and their backup for the next session.

A worker that has kept a promise to halt at its meeting point (docs/design/local-recovery.md) leaves
its links open, too: other workers of its pipeline may still compute. The next session keeps the
layers with their sums. It closes the old links when it is connected to the same workers again,
because all of them have left the old epoch then, or when it ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import Phase
from elastic.core.recovery import lineage
from elastic.domain.errors import (
    EXIT_FAILURE,
    MAX_DESCRIPTION_CHARS,
    CorruptCheckpoint,
    DivergenceError,
    ElasticError,
    LedgerError,
    MissingCheckpoint,
    NonfiniteError,
    UsageError,
    VaultError,
    describe,
    with_place,
)
from elastic.domain.ledger import format_indices
from elastic.domain.types import WHOLE, Accumulate, EvaluationResult, Plan
from elastic.planning.plan.rank_map import Roster, roster
from elastic.planning.plan.schemes import state_of
from elastic.planning.schedule.schedule import Kind
from elastic.rpc.link_shaping import shaper_of
from elastic.worker.backup.protection import Protection
from elastic.worker.context import WorkerContext
from elastic.worker.engine.allreduce import tied_pairs
from elastic.worker.engine.evaluation_runner import EvaluationRunner
from elastic.worker.engine.microbatch_cost import UNKNOWN_SIZE, TypicalSize
from elastic.worker.engine.partial import PartialRunner, needed_messages
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.engine.step import StepChecks, StepResult, StepRunner
from elastic.worker.model.layers import tp_sync
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.profiling.run_profile import EMULATE
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.recovery.final_hash import job_sha256
from elastic.worker.recovery.state_loader import LoadedStage, StateLoader
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import EpochAbandoned, LinkFailed
from elastic.worker.transport.device_fault import is_local_fault, is_node_fault
from elastic.worker.transport.links import Links


def _witness(plan: Plan) -> int:
    """Return the rank that reports finished steps besides rank 0: the first one of another node, if
    there is one. The coordinator may not have read the last reports of a node that is lost."""
    members = roster(plan).members
    first = members[0].unit.node
    return next((rank for rank, one in enumerate(members) if one.unit.node != first), 0)


class EpochSession:
    """Takes one worker through the epoch that `order` begins. Call `run` once."""

    def __init__(self, context: WorkerContext, order: m.Install) -> None:
        self._context, self._order = context, order
        self._abandon = context.agent.begin_epoch(order.epoch)
        self._assignment = order.assignment
        known, starts = context.evaluated, lineage.starts_of(order.assignment)
        if known and any(known.epoch < epoch and step < known.step for epoch, step in starts):
            context.evaluated = None  # training went back behind it
        self._plan = order.assignment.plan
        self._roster: Roster = roster(self._plan)
        self._rank = -1
        """Rank in this epoch; -1: the plan does not use this worker."""
        if context.unit in self._plan.units():
            self._rank = self._roster.rank(context.unit, context.tp.rank)
        sync = tp_sync(context.tp) if self._rank >= 0 else None
        self._agreement = GroupAgreement(sync, self._abandon)
        self._links: Links | None = None
        self._steps: StepRunner | None = None
        self._evaluations: EvaluationRunner | None = None
        self._resumed = False
        self._went_on = False
        """Whether this worker kept a promise, and its layers with the sums of the running step."""
        self._meeting = context.agent.meeting

    def run(self) -> None:
        """Train until the job is done, a newer epoch is announced or a fault occurs.

        A broken link or a missing copy is reported to the agent. Then wait for the `Halt` of a
        newer epoch and answer it with `Halted`, or return because the job is over. Raises
        SystemExit, or the original error, if the job cannot continue.
        """
        try:
            with self._meeting:
                self._train()
        except EpochAbandoned:
            pass
        except LinkFailed as error:
            if not self._meeting.kept():
                nodes = tuple(dict.fromkeys(self._roster.members[r].unit.node for r in error.ranks))
                self._send(m.CommFailed(self._order.epoch, nodes, describe(error)))
            if self._steps is not None and not self._meeting.arrived:
                self._close_links()  # the other ranks of its group may wait for it
                self._agreement.leave()
        except DivergenceError as error:
            self._report_divergence(error)
        except CorruptCheckpoint as error:
            epoch, path = self._order.epoch, self._checkpoint_path()
            missing = isinstance(error, MissingCheckpoint)
            self._send(m.CheckpointUnreadable(epoch, path, str(error), missing))
        except RuntimeError as error:
            self._on_runtime_error(error)
        except Exception as error:  # noqa: BLE001 - also errors of the user's model, data, optimizer
            self._on_error(error)
        finally:
            self._close_left_links()
            if not self._meeting.arrived:  # else it may still be ordered to promise
                self._close_links()
        self._await_halt()

    def _on_error(self, error: Exception) -> None:
        """Raise a fault of this node, which crashes the worker. Report a copy that is missing as
        lost contact, and every other error as the job's failure."""
        if is_node_fault(error):
            raise error
        if not isinstance(error, VaultError):
            self._fail(error)
        self._send(m.CommFailed(self._order.epoch, (), describe(error)))

    def _checkpoint_path(self) -> str:
        """Return the directory of the checkpoint that the recipes name; "": none."""
        paths = (recipe.checkpoint for _, recipe in self._assignment.recipes)
        return next(filter(None, paths), "")

    def _on_runtime_error(self, error: RuntimeError) -> None:
        """Return if the end of another rank of the tensor-parallel group caused `error`.

        The collectives of a group fail when one of its ranks dies. The agent then ends this worker,
        or announces a newer epoch. Otherwise the device or the script caused the error: a device
        fault is raised, any other error is reported as the job's failure.
        """
        alone = self._context.tp.size == 1 or is_local_fault(error)
        if alone or not self._abandon.wait(self._context.settings.timeouts.sibling_s):
            if is_node_fault(error):
                raise error
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        """Report that the job failed; then raise SystemExit for an ElasticError, else `error`."""
        # The job waits for the checkpoint that is due, whose states may still be copied.
        with contextlib.suppress(Exception):
            self._context.publisher.settle(self._context.settings.timeouts.bulk_s)
        code = error.exit_code if isinstance(error, ElasticError) else EXIT_FAILURE
        replicas = self._context.replicas.values()
        text = str(error) if isinstance(error, UsageError) else describe(error)
        if not isinstance(error, ElasticError):  # raised by the script, or by a library for it
            text = with_place(text, error)
        failed = m.Failed(
            text[:MAX_DESCRIPTION_CHARS],
            code,
            self._context.settings.local_rank,
            record=error.record if isinstance(error, NonfiniteError) else None,
            doubled=error.doubled if isinstance(error, LedgerError) else 0,
            missing=error.missing if isinstance(error, LedgerError) else 0,
            version=min((replica.version for replica in replicas), default=-1),
        )
        self._send(failed)
        if isinstance(error, ElasticError):
            raise SystemExit(code)
        raise error

    def _report_divergence(self, error: DivergenceError) -> None:
        """Report which layers diverged, and what this worker's replicas and copies prove."""
        context = self._context
        context.evaluated = None  # a wrong replica may have taken part
        sound: list[tuple[str, int, int, bool]] = []
        portions: list[tuple[str, int, int, int, int]] = []
        unit, protection = context.unit.name, context.protection
        for layer in dict.fromkeys(one.layer for one in error.found):
            replica = context.replicas.get(layer)
            if replica is None or protection is None:
                continue
            known = protection.is_sound(replica)
            if known is None:
                continue
            sound.append((unit, layer, replica.shard, known))
            if replica.portion != WHOLE and (protection.copied_in_update or not known):
                portions.append((unit, layer, replica.shard, *replica.portion))
        found, epoch = error.found, self._order.epoch
        self._send(m.Diverged(epoch, error.step, found, tuple(sound), tuple(portions)))

    def _send(self, message: object) -> None:
        self._context.agent.send(message)

    # ---- installing ----

    def _train(self) -> None:
        """Install the assignment, and train until the last step or an agreed halt."""
        context = self._context
        if self._rank < 0:
            context.replicas.clear()
            context.protection = None
            self._send(m.Ready(self._order.epoch, 0.0, 0.0))
            self._send(m.Protected(self._order.epoch))
            return
        steps = self._steps = self._install()
        n_steps = context.job.spec.n_steps
        todo, covered = self._assignment.todo, dict(self._assignment.covered)
        began = context.step_began if self._went_on else None
        for step in range(self._assignment.step, n_steps):
            evaluation = self._evaluate(steps, step)
            context.step_began = time.perf_counter() if began is None else began
            result = steps.run(step, todo, covered, evaluation, context.step_began)
            self._record_timing(steps, step)
            self._report_step(result)
            if result.halt_epoch > self._order.epoch:
                break
            todo, covered = tuple(p.microbatches for p in self._plan.pipelines), {}
            began = None
        # A tensor-parallel rank that failed in the last step waits in an exchange: take part in it.
        self._agreement.check()
        if all(replica.version == n_steps for replica in context.replicas.values()):
            self._finish(steps)

    def _install(self) -> StepRunner:
        """Load the layers at the assigned version, connect, report `Ready`; return the runner."""
        context = self._context
        context.agent.position.update("install", self._assignment.step)
        began = time.perf_counter()
        context.job.optimizer.check(shared=state_of(self._plan.state).sharded)
        recipes = [recipe for _, recipe in self._assignment.recipes]
        recovering = any(recipe.states or recipe.checkpoint for recipe in recipes)

        def after_layer() -> None:
            self._abandon.check()
            context.agent.position.update("install")
            if recovering:
                context.injector.reach(self._assignment.step, Phase.RECOVERY)

        installed = self._kept_layers(after_layer) or self._load_layers(after_layer)
        transferred = time.perf_counter()
        context.agent.position.update("wait")  # for the workers that still load their layers
        self._links = self._open_links()
        self._close_left_links()
        steps = self._runner(installed, self._links)
        self._evaluations = self._evaluation_runner(installed, self._links)
        if recovering:
            context.injector.recoveries += 1
        transfer_s, rebuild_s = transferred - began, time.perf_counter() - transferred
        self._send(m.Ready(self._order.epoch, transfer_s, rebuild_s, tuple(installed.sources)))
        return steps

    def _load_layers(self, after_layer: Callable[[], None]) -> LoadedStage:
        """Keep the usable live layers and read the missing ones, all in `context.replicas`."""
        context = self._context
        member = self._roster.members[self._rank]
        fetcher = self._fetcher()
        stack, lr = context.job.stack, context.job.optimizer.lr
        installer = StateLoader(context.build_replica, fetcher, lr, after_layer, stack.tied_trained)
        try:
            context.replicas = installer.usable(self._assignment, member, context.replicas)
            if context.protection is not None:
                context.protection.release(context.replicas, self._order.epoch)
            installed = installer.install(self._assignment, member, context.replicas)
        finally:
            fetcher.close()
        context.replicas = {replica.index: replica for replica in installed.replicas}
        return installed

    def _fetcher(self) -> Fetcher:
        """Return a reader of copies in the vaults; the caller closes it."""
        settings = self._context.settings
        return Fetcher(
            settings.node,
            dict(self._assignment.vaults),
            self._abandon,
            timeout_s=settings.timeouts.bulk_s,
            on_progress=self._context.agent.position.advance,
        )

    def _kept_layers(self, after_layer: Callable[[], None]) -> LoadedStage | None:
        """Return the live layers with their sums, if the workers of this pipeline have promised
        them; None: they have not. Raises VaultError if the layers are not as promised."""
        context, assignment = self._context, self._assignment
        member = self._roster.members[self._rank]
        promised = dict(assignment.promised).get(member.pipeline)
        if promised is None:
            return None
        live = StateLoader.usable(assignment, member, context.replicas)
        for layer in member.layers:
            problem = _broken_promise(live.get(layer), assignment.step, frozenset(promised))
            if problem:
                raise VaultError(f"layer {layer}, which was promised: {problem}")
            after_layer()
        self._went_on = True
        context.replicas = {layer: live[layer] for layer in member.layers}
        if context.protection is not None:
            context.protection.release(context.replicas, self._order.epoch)
        kept = LoadedStage([*context.replicas.values()], ["memory"] * len(member.layers))
        messages = [*needed_messages(assignment, member)]
        if messages:  # this pipeline takes over partial replays
            fetcher = self._fetcher()
            try:
                kept.messages = {copy.key: fetcher.fetch(copy).data for copy in messages}
            finally:
                fetcher.close()
        return kept

    def _open_links(self) -> Links:
        """Connect to the workers of this pipeline, and begin to connect to all."""
        context, settings, members = self._context, self._context.settings, self._roster.members
        node, own = settings.node, members[self._rank].pipeline
        return Links.open(
            epoch=self._order.epoch,
            rank=self._rank,
            world_size=self._roster.size,
            store_address=self._assignment.store,
            device=context.device,
            timeout_s=settings.timeouts.link_s,
            open_s=settings.timeouts.open_s,
            abandon=self._abandon,
            host=settings.host,
            holder_sets=self._roster.holder_sets(),
            pairs=(
                *self._roster.pairs(),
                *tied_pairs(self._roster, context.job.stack.tied_trained),
            ),
            pipeline=[rank for rank, member in enumerate(members) if member.pipeline == own],
            shaper=shaper_of(Path(settings.memory_dir) / node, settings.link),
            remote=[rank for rank, member in enumerate(members) if member.unit.node != node],
            varying=context.job.stack.varying,
        )

    def _runner(self, installed: LoadedStage, links: Links) -> StepRunner:
        """Create the layers' backup as `context.protection`; return the runner of the steps."""
        context, replicas = self._context, installed.replicas
        context.protection = Protection(
            context.publisher,
            self._plan,
            context.settings.node,
            replicas,
            self._abandon,
            self._send,
            context.job.stack.tied_trained,
            stages=len(self._roster.places(self._rank)),
        )
        return StepRunner(
            plan=self._plan,
            roster=self._roster,
            replicas=replicas,
            links=links,
            tied=context.job.stack.tied_trained,
            optimizer=context.job.optimizer,
            data=self._data,
            typical_weight=context.job.typical_weight,
            typical_size=self._typical_size(),
            agreement=self._agreement,
            protection=context.protection,
            injector=context.injector,
            agent=context.agent,
            on_microbatch=self._report_resumed,
            partial=PartialRunner(
                self._assignment, self._roster, self._rank, replicas, installed.messages
            ),
            checks=StepChecks(
                exact=context.job.accumulate is Accumulate.EXACT,
                verify_every=context.settings.verify_every,
                on_nonfinite=context.settings.on_nonfinite,
            ),
        )

    def _typical_size(self) -> TypicalSize:
        """Return the size of a usual micro-batch, if the sizes of micro-batches differ."""
        job = self._context.job
        if not job.stack.varying:
            return UNKNOWN_SIZE
        return TypicalSize(job.spec.tokens_per_microbatch, job.tokens_per_sequence)

    def _evaluation_runner(self, installed: LoadedStage, links: Links) -> EvaluationRunner | None:
        """Return the runner of the evaluations; None: the job has none."""
        context, evaluation = self._context, self._context.job.evaluation
        if evaluation is None:
            return None
        position, injector = context.agent.position, context.injector

        def before(version: int, kind: Kind, index: int) -> None:
            position.update("evaluate" if kind.computes else "wait", version, 0)
            if kind is Kind.F:
                injector.reach(version, Phase.EVALUATION, index)

        def after(seconds: float) -> None:
            injector.stretch(seconds)
            position.update("wait")
            self._report_resumed()

        return EvaluationRunner(
            microbatches=evaluation.microbatches,
            data=self._evaluation_data,
            weigh=context.job.evaluation_weight,
            plan=self._plan,
            roster=self._roster,
            replicas=installed.replicas,
            links=links,
            agreement=self._agreement,
            before=before,
            after=after,
        )

    # ---- training ----

    def _evaluate(self, steps: StepRunner, version: int) -> EvaluationResult | None:
        """Return the evaluation of the parameters after `version` steps; None: none is due."""
        context, evaluations = self._context, self._evaluations
        if evaluations is None or not context.job.spec.evaluates(version):
            return None
        steps.protect()  # the epoch's first copies do not wait for the evaluation
        context.evaluated = evaluations.run(version, context.evaluated)
        return context.evaluated

    def _evaluation_data(self, version: int, index: int) -> Microbatch:
        context, emulated = self._context, self._context.settings.profile == EMULATE
        return context.job.evaluation_microbatch(version, index, context.device, emulated=emulated)

    def _data(self, step: int, index: int) -> Microbatch:
        """Return micro-batch `index` of `step` on this device; under --emulate without data."""
        if self._context.settings.profile == EMULATE:
            return Microbatch(step, index, {}, weight=self._context.job.typical_weight)
        return self._context.job.microbatch(step, index, self._context.device)

    def _report_resumed(self) -> None:
        """Report `Resumed`, once per epoch."""
        if not self._resumed:
            self._resumed = True
            self._send(m.Resumed(self._order.epoch, time.time()))

    def _report_step(self, result: StepResult) -> None:
        self._report_resumed()
        spare = self._rank not in (0, _witness(self._plan))
        if spare and self._context.settings.local_rank:
            return
        spec, epoch = self._context.job.spec, self._order.epoch
        tokens = spec.n_microbatches * spec.tokens_per_microbatch
        self._send(m.StepDone(epoch, result.record, result.seconds, result.lr, tokens, spare))

    def _record_timing(self, steps: StepRunner, step: int) -> None:
        """Put the compute times of `step` into the heartbeat."""
        context = self._context
        traffic = context.publisher.traffic.take()
        local_rank = context.settings.local_rank
        measured = steps.timer.take(self._order.epoch, step, local_rank, traffic)
        if measured:
            context.agent.position.measured = measured

    def _finish(self, steps: StepRunner) -> None:
        """Wait until all final states are in vaults; evaluate them, if that is due; report
        `Finished`, with rank 0's hash."""
        context, spec = self._context, self._context.job.spec
        assert context.protection is not None
        context.agent.position.update("wait", spec.n_steps)
        self._report_resumed()
        context.protection.finish()
        evaluation = self._evaluate(steps, spec.n_steps)
        steps.verify(spec.n_steps)
        sha = ""
        if self._rank == 0:
            vaults, node = dict(self._assignment.vaults), context.settings.node
            advance = context.agent.position.advance
            sha = job_sha256(self._plan, spec, vaults, node, self._abandon, advance)
        self._send(m.Finished(spec.n_steps, sha, evaluation))

    # ---- leaving ----

    def _close_links(self) -> None:
        if self._links is not None:
            self._links.close()

    def _close_left_links(self) -> None:
        """Close the links that a former session has left open."""
        left, self._context.left_links = self._context.left_links, None
        if left is not None:
            left.close()

    def _await_halt(self) -> None:
        """Wait for a newer `Halt`, publish all layers to the local vault, and send `Halted`.

        Returns without `Halted` if the job is over. In both cases no rank of the tensor-parallel
        group still waits for this one. If a promise for the newest epoch is kept, leaves the links
        open in the context. A later `Halt` that is no matter of promises closes them.
        """
        context = self._context
        context.agent.position.update("wait")
        newest = context.agent.await_halt(self._order.epoch)
        if newest is not None and self._meeting.kept(newest):
            context.left_links = self._links
        else:
            self._close_links()
        self._agreement.leave()
        if newest is None:
            return
        if context.protection is not None:
            context.protection.flush()
        self._send(self._halted(newest))
        context.agent.position.update("idle")

    def _halted(self, epoch: int) -> m.Halted:
        """Return the message that tells the planner of `epoch` how far this worker came."""
        steps, replicas = self._steps, self._context.replicas.values()
        version = min((replica.version for replica in replicas), default=-1)
        if steps is None or not replicas:
            return m.Halted(epoch, version)
        runner = steps.runner
        if version != runner.step:
            return m.Halted(epoch, version, record=steps.record)
        started, sent = frozenset(runner.started), frozenset(runner.sent)
        complete = self._meeting.kept(epoch)
        return m.Halted(epoch, version, started, sent, steps.record, complete)


def _broken_promise(replica: LayerReplica | None, step: int, promised: frozenset[int]) -> str:
    """Return how a layer differs from one before the update of `step` with the sum of the
    micro-batches `promised`; "": it does not."""
    if replica is None or not replica.complete:
        return "this worker does not hold it"
    if replica.version != step:
        return f"it has version {replica.version}, not {step}"
    missing, more = sorted(promised - replica.ledger), sorted(replica.ledger - promised)
    wrong = {"lacks": missing, "also has": more}
    found = [f"{name} micro-batches {format_indices(i)}" for name, i in wrong.items() if i]
    return f"its sum {' and '.join(found)}" if found else ""
