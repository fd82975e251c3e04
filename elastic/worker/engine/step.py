"""One optimizer step on one worker: run the schedule, reduce, commit, update.

The order of events makes every later recovery possible ("Versions and the commit" in
docs/design/design.md):
1. Gradients are published while the micro-batches run.
2. When they have run, the worker is at its meeting point: from here to the result of the commit an
   order to halt may leave its sums as they are (`elastic.worker.control.meeting_point`).
3. The commit begins only when the final gradients and the current state, or the means to rebuild
   it, are as safe as the backup schemes demand.
4. The update's input is published before the update, and the new state right after it.
5. Holders that share an update exchange the updated parameters last.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from elastic.core.protocol.fault_spec import Phase
from elastic.domain.errors import NonfiniteError
from elastic.domain.ledger import format_indices
from elastic.domain.types import EvaluationResult, OnNonfinite, Plan, StepRecord
from elastic.planning.plan.rank_map import Roster
from elastic.planning.plan.schemes import gradients_of
from elastic.planning.schedule.schedule import Action, Kind, actions_of, units_of
from elastic.worker.backup.protection import Protection
from elastic.worker.control.agent_client import AgentClient
from elastic.worker.control.step_timing import StepTimer
from elastic.worker.engine.allreduce import GradientAllReduce
from elastic.worker.engine.commit import Commit, ReadData, commit, verify
from elastic.worker.engine.incremental_allreduce import IncrementalAllReduce
from elastic.worker.engine.injector import FaultInjector
from elastic.worker.engine.microbatch_cost import UNKNOWN_SIZE, TypicalSize
from elastic.worker.engine.partial import PartialRunner
from elastic.worker.engine.sharded_update import ParameterGather
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import GroupAgreement, StageRunner
from elastic.worker.model.gradients import exact_limit, range_text
from elastic.worker.model.layers import Tied
from elastic.worker.model.loss_scale import RunningScale
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.replica.digest import device_kind
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links

log = logging.getLogger(__name__)
UNRECEIVED_PER_UNIT = 3
"""Messages in flight per unit of a long interleaved pipeline: one message, its header and the
header's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChecks:
    """Checks before each update; equal on all workers."""

    exact: bool = False
    """Whether the holders of a layer must have equal bits (exact accumulation)."""
    verify_every: int = 0
    """Steps between two comparisons of the holders' parameters, with `exact`; 0: none."""
    on_nonfinite: OnNonfinite = OnNonfinite.STOP

    def verifies(self, step: int) -> bool:
        """Return whether the holders compare their parameters before the update of `step`."""
        return self.exact and self.verify_every > 0 and step % self.verify_every == 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step; the same on every worker, except for `seconds`."""

    record: StepRecord
    halt_epoch: int
    """Epoch for which all workers stop now; -1: continue."""
    lr: float
    seconds: float


@dataclass(kw_only=True, eq=False)
class StepRunner:
    """Runs the steps of one epoch on one worker. Implements the stage runner's `Hooks`."""

    plan: Plan
    roster: Roster
    replicas: Sequence[LayerReplica]
    links: Links
    tied: Tied
    optimizer: OptimizerSpec
    data: Callable[[int, int], Microbatch]
    """data(step, index) -> micro-batch on this device."""
    typical_weight: float = 1.0
    """Expected weight of a micro-batch (`elastic.worker.datasets.weighting`)."""
    typical_size: TypicalSize = UNKNOWN_SIZE
    """Size of a usual micro-batch, if their sizes differ."""
    agreement: GroupAgreement
    """Agreement with the tensor-parallel group to leave the epoch."""
    protection: Protection
    injector: FaultInjector
    agent: AgentClient
    on_microbatch: Callable[[], None]
    """Called when a stage has collected a micro-batch."""
    partial: PartialRunner
    """Partial replays that precede the epoch's first step."""
    checks: StepChecks = StepChecks()

    step: int = field(default=-1, init=False)
    record: StepRecord | None = field(default=None, init=False)
    """Record of the last step whose update has begun here."""

    def __post_init__(self) -> None:
        plan, links, replicas, roster = self.plan, self.links, self.replicas, self.roster
        self._position, log = self.agent.position, self.protection.log
        self._member = roster.members[links.rank]
        self.runner = StageRunner(
            stages_of_rank(roster, links.rank, replicas),
            links,
            n_microbatches=plan.n_microbatches,
            typical_weight=self.typical_weight,
            typical_size=self.typical_size,
            data=self.data,
            agreement=self.agreement,
            keep=log.keep if log is not None else None,
        )
        self._device = device_kind(links.device)
        self._in_partial_replay = self._compared = False
        self._computing: Action | None = None
        self._began = 0.0
        n_units = len(units_of(plan.pipelines[self._member.pipeline]))
        links.max_unreceived = max(links.max_unreceived, UNRECEIVED_PER_UNIT * n_units)
        self._all_reduce = GradientAllReduce(replicas, links, roster, self.tied)
        self._parameter_gather = ParameterGather(replicas, links, roster)
        every = gradients_of(plan.gradients).rounds
        self._incremental: IncrementalAllReduce | None = None
        if every:
            self._incremental = IncrementalAllReduce(replicas, links, roster, every, self.agreement)
        self.timer = StepTimer(links.device, lambda: self.protection.sending)

    def protect(self) -> None:
        """Publish the first copies of the epoch, unless they are published already."""
        with self.agreement:
            self.protection.enter()

    def run(
        self,
        step: int,
        todo: Sequence[tuple[int, ...]],
        covered: Mapping[int, frozenset[int]],
        evaluation: EvaluationResult | None = None,
        began: float | None = None,
    ) -> StepResult:
        """Run step `step`.

        Args:
            todo: micro-batches that each pipeline runs.
            covered: layer -> micro-batches that some holder's ledger has already.
            evaluation: evaluation of the present parameters, for the step's record; None: none.
            began: value of time.perf_counter when this worker began the step; None: now.

        Raises:
            EpochAbandoned, LinkFailed, VaultError: the ledgers and versions of the replicas show
                how far the step came.
            DivergenceError: the holders of a layer disagree; no worker has updated.
            NonfiniteError: the gradient norm is infinite or NaN, and the job must stop.
        """
        began = time.perf_counter() if began is None else began
        self.step = step
        self.injector.reach(step, Phase.START)
        self._run_partial_replay(covered)
        self._run_schedule(todo, covered)
        with self.agreement:
            reduced, agreed = self._reduce_and_commit()
            if not math.isfinite(agreed.norm) and not self.checks.verifies(step):
                self.verify(step)  # a wrong replica may be the cause
            self.agent.meeting.accept()
        limit = exact_limit(self.plan.n_microbatches, self.tied)
        clip_norm = self.optimizer.clip_norm
        expected = self.plan.n_microbatches * self.typical_weight
        self.record = judge(
            step,
            agreed,
            expected,
            clip_norm,
            self.checks,
            limit,
            evaluation,
            loss_scale=self.replicas[-1].loss_scale,
        )
        for replica in self.replicas:
            if replica.index == self.plan.n_layers - 1:
                replica.record = self.record
        lr = self.optimizer.lr(step)
        with self.agreement:
            self._update(reduced, self.record, lr)
            self._parameter_gather.gather()
        return StepResult(self.record, agreed.halt_epoch, lr, time.perf_counter() - began)

    def verify(self, step: int) -> None:
        """Wait for all workers, and compare the holders' parameters, unless `verify_every` is 0.

        Raises DivergenceError, EpochAbandoned and LinkFailed.
        """
        checks = self.checks
        digests = self._digests() if checks.exact and checks.verify_every else {}
        layers = self._member.layers
        verify(self.links, self.roster, layers, digests, step=step, device=self._device)

    def _digests(self) -> dict[int, int]:
        """Return layer -> hash of its parameters, for layers that have several holders."""
        shard = self._member.shard
        shared = (r for r in self.replicas if len(self.roster.holders(r.index, shard)) > 1)
        return {replica.index: replica.digest() for replica in shared}

    def _run_partial_replay(self, covered: Mapping[int, frozenset[int]]) -> None:
        """Before the epoch's first step, run the partial replays. Their compute is not timed."""
        if self.partial.step == self.step:
            self._in_partial_replay = True
            self.partial.run(self.runner, covered, self)
            self._stretch()
            self._in_partial_replay = False

    def _run_schedule(
        self, todo: Sequence[tuple[int, ...]], covered: Mapping[int, frozenset[int]]
    ) -> None:
        """Run this worker's part of the pipelines' schedules."""
        pipeline = self.plan.pipelines[self._member.pipeline]
        actions = actions_of(pipeline, todo[self._member.pipeline])[self._member.stage]
        if not actions:
            # With actions, the first copies of the epoch are published after a micro-batch.
            self.protect()
        if self._incremental is not None:
            self._position.update("wait", self.step)
            with self.agreement:
                self._incremental.begin(actions, [len(indices) for indices in todo])
        self.agent.meeting.depart(self.step)
        self.runner.run(self.step, actions, covered, self)
        self._stretch()

    def _reduce_and_commit(self) -> tuple[dict[int, Tensor], Commit]:
        """Reduce the gradients and commit. Returns layer -> reduced gradient, and the commit."""
        step = self.step
        self._position.update("wait", step)
        self.protection.after_microbatches()
        self.agent.meeting.arrive()
        reduced = self._reduce(lambda layer: self.injector.reach(step, Phase.REDUCE))
        norms_sq = {r.index: r.norm_sq(reduced[r.index]) for r in self.replicas}
        self.protection.before_commit(step, reduced)
        digests = self._digests() if self.checks.verifies(step) else None
        agreed = commit(
            self.links,
            self.roster,
            self.replicas if self._incremental is None else self._incremental.parts(),
            norms_sq,
            step=step,
            weight=self.replicas[-1].weight(reduced[self.replicas[-1].index]),
            halt_epoch=self.agent.boundary_requested() or -1,
            common=self._incremental is not None,
            exact=self.checks.exact,
            digests=digests,
            device=self._device,
            data=self._data_read(),
        )
        return reduced, agreed

    def _data_read(self) -> ReadData:
        """Return the hashes of the data that was read in this step. In the first step of the epoch,
        the last micro-batch is read for that, if it was not: streams are only read forward."""
        first, last = self.runner.read_first, self.runner.read_last
        common, ends = 0, {0, self.plan.n_layers - 1} & {*self._member.layers}
        if ends and not self._compared:
            index = self.plan.n_microbatches - 1
            known = (first | last).get(index)
            common = self.data(self.step, index).digest if known is None else known
        self._compared = True
        return ReadData.of(first, last, common)

    def _reduce(self, on_layer: Callable[[int], None]) -> dict[int, Tensor]:
        """Return layer -> reduced flat gradient. Calls `on_layer(layer)` when a sum is whole."""
        if self._incremental is None:
            return self._all_reduce.run(on_layer)
        tied = {layer for group in self.tied for layer, _ in group}
        sums = self._incremental.finish(tied, on_layer)
        self.protection.settle()
        return self._all_reduce.sum_tied(sums)

    def _update(self, reduced: dict[int, Tensor], record: StepRecord, lr: float) -> None:
        """Update all layers, unless the step is skipped, and publish their new state."""
        self._position.update("compute", self.step)
        self.protection.before_update(reduced, record.clip, skipped=record.skipped)
        for replica in self.replicas:
            if record.skipped:
                replica.skip_update()
            else:
                replica.update(reduced[replica.index], record.clip, lr)
            self._position.update("compute", self.step)
            self.protection.retire(replica)
            self.injector.reach(self.step, Phase.OPTIMIZER)
        self.protection.after_update()
        self._position.update("wait", self.step)

    # ---- hooks of the stage runner ----

    def before(self, action: Action) -> None:
        self._stretch()
        self._computing = action if action.kind.computes else None
        activity = "compute" if action.kind.computes else "wait"
        self._position.update(activity, self.step, action.microbatch)
        if action.kind is Kind.F:
            self.injector.reach(self.step, Phase.FORWARD, action.microbatch)
        elif action.kind in (Kind.B, Kind.INPUT):
            self.injector.reach(self.step, Phase.BACKWARD, action.microbatch)
        self._began = time.perf_counter()
        if self._computing and not self._in_partial_replay:
            self.timer.begin(action)

    def on_backward(self, index: int) -> None:
        self._stretch()
        self._position.update("wait")
        self.on_microbatch()
        if self._incremental is not None and not self._in_partial_replay:
            self._incremental.after_microbatch()
            if self._incremental.shared:
                self.protection.settle()
        self.protection.after_microbatch(self.step)

    def _stretch(self) -> None:
        """End the current compute action; prolong it if a fault slows this worker."""
        if self._computing:
            action, self._computing = self._computing, None
            self.injector.stretch(time.perf_counter() - self._began)
            self.timer.end(partial(self.runner.cost, action))


def judge(
    step: int,
    agreed: Commit,
    expected_weight: float,
    clip_norm: float | None,
    checks: StepChecks,
    limit: float,
    evaluation: EvaluationResult | None = None,
    *,
    loss_scale: RunningScale,
) -> StepRecord:
    """Return the record of a step. Raises NonfiniteError if the job must stop.

    All workers have the same `agreed`, so all of them do the same. `limit`: largest gradient that
    exact accumulation can add.

    The gradients of the micro-batches were divided by `expected_weight`, and are summed. Their
    weighted mean is that sum times `expected_weight` / `agreed.weight`. Without weights this is 1.

    A norm that is not finite may be due to `loss_scale`, that of the step. Then the update is left
    out, whatever `checks` say.
    """
    mean = expected_weight / agreed.weight if agreed.weight else 1.0
    norm = agreed.norm * mean
    clip, finite = _clip(norm, clip_norm) * mean, math.isfinite(norm)
    scaled = loss_scale.can_fall
    skipped = not finite and (scaled or checks.on_nonfinite is OnNonfinite.SKIP)
    record = StepRecord(
        step,
        clip,
        norm,
        agreed.loss,
        ledgers=agreed.ledgers,
        nonfinite=agreed.nonfinite,
        skipped=skipped,
        evaluation=evaluation,
    )
    if finite:
        return record
    layers = format_indices(agreed.nonfinite)
    text = f"step {step}: the gradient norm is {norm}, because of layers {layers}"
    if scaled:
        log.warning("%s; the loss scale of %g is halved, without an update", text, loss_scale.value)
        return record
    if checks.on_nonfinite is OnNonfinite.STOP:
        reason = f"{text} (loss {agreed.loss})"
        if checks.exact:
            reason += f"; {range_text(limit)}"
        remedy = "--on-nonfinite skip leaves such updates out"
        raise NonfiniteError(f"{reason}; {remedy}", record)
    log.warning("%s; the update is %s", text, "left out" if skipped else "made")
    return record


def _clip(norm: float, limit: float | None) -> float:
    """Return the factor that scales a gradient of `norm` down to `limit`; None: no limit.

    The formula is that of torch.nn.utils.clip_grad_norm_.
    """
    if limit is None:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
