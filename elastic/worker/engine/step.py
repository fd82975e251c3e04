"""One optimizer step on one worker: run the schedule, reduce, commit, update.

Order of things that makes every later recovery possible (docs/design/design.md, "Versions"): gradients are published after
each micro-batch; the commit is entered only when the final gradients and the current state (or what makes it) are
whole at the peer; what the update takes is published before it, states right after it. Where holders shared the update,
they exchange what they updated then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind

from torch import Tensor

from elastic.core.protocol.fault_spec import Phase
from elastic.domain.types import Plan, StepRecord
from elastic.planning.plan.rank_map import Roster
from elastic.planning.plan.schemes import gradients_of
from elastic.planning.schedule.schedule import Action, Kind, actions_of, units_of
from elastic.worker.backup.policy import Protection
from elastic.worker.control.agent_client import TrainingPosition
from elastic.worker.control.step_timing import StepTimer
from elastic.worker.engine.allreduce import GradientAllReduce
from elastic.worker.engine.commit import commit
from elastic.worker.engine.incremental_allreduce import IncrementalAllReduce
from elastic.worker.engine.injector import FaultInjector
from elastic.worker.engine.partial import PartialRunner
from elastic.worker.engine.sharded_update import ParameterGather
from elastic.worker.engine.stage import LocalStage
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.model.layers import LayerStack, Microbatch
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from elastic.worker.transport.links import Links

UNRECEIVED_A_UNIT = 2
"""Long interleaved pipelines have as many messages under way as units, and their headers (`Links.most_unreceived`)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to; the same on every worker."""

    record: StepRecord
    halt_epoch: int
    """Epoch for which everybody stops now; -1: go on."""
    lr: float
    seconds: float


class StepRunner:
    """Runs the steps of one epoch on one worker. Also the pipeline runner's hooks."""

    def __init__(
        self,
        *,
        plan: Plan,
        roster: Roster,
        rank: int,
        replicas: Sequence[LayerReplica],
        links: Links,
        stack: LayerStack,
        optimizer: OptimizerSpec,
        data: Callable[[int, int], Microbatch],
        abandon: AbandonSignal,
        tp_sync: Callable[[bool], bool] | None,
        protection: Protection,
        injector: FaultInjector,
        position: TrainingPosition,
        boundary_requested: Callable[[], int],
        on_microbatch: Callable[[], None],
        partial: PartialRunner | None = None,
    ) -> None:
        """`partial`: what comes first in the first step."""
        self._plan, self._roster, self._replicas, self._links = plan, roster, replicas, links
        self._optimizer, self._protection = optimizer, protection
        self._injector, self._position = injector, position
        self._boundary_requested, self._on_microbatch = boundary_requested, on_microbatch
        self._member = roster.members[rank]
        self._make_runner = bind(
            StageRunner,
            links=links,
            n_microbatches=plan.n_microbatches,
            data=data,
            abandon=abandon,
            tp_sync=tp_sync,
            keep=protection.log.keep if protection.log is not None else None,
        )
        self.runner = self._make_runner(stages_of_rank(roster, rank, replicas))
        self._partial, self._in_part = partial, False
        n_units = len(units_of(plan.pipelines[self._member.pipeline]))
        links.most_unreceived = max(links.most_unreceived, UNRECEIVED_A_UNIT * n_units)
        self._reduction = GradientAllReduce(replicas, links, roster, rank, stack.tied)
        self._shards = ParameterGather(replicas, links, roster, rank)
        self._tied = {layer for group in stack.tied for layer, _ in group}
        every = gradients_of(plan.gradients).rounds
        self._common = (
            IncrementalAllReduce(replicas, links, roster, rank, every, self.runner.agreement) if every else None
        )
        self.step, self._began, self._computing = -1, 0.0, False
        self.meter = StepTimer(links.device, lambda: protection.sending)
        self.record: StepRecord | None = None
        """Record of the last step whose update was begun here."""

    def run(
        self, step: int, todo: Sequence[tuple[int, ...]], covered: Mapping[int, frozenset[int]]
    ) -> StepResult:
        """Do step `step`: this worker's micro-batches (`todo`: those of each pipeline), then the common end.

        `covered[layer]`: micro-batches that some holder's ledger has already. Raises EpochAbandoned or LinkFailed; the
        ledgers and versions of the replicas then tell how far it came.
        """
        started = time.perf_counter()
        self.step = step
        self._injector.reach(step, Phase.START)
        self._run_in_part(step, covered)
        pipeline = self._plan.pipelines[self._member.pipeline]
        actions = actions_of(pipeline, todo[self._member.pipeline])[self._member.stage]
        if not actions:  # what the epoch began with is not published after a first micro-batch
            with self.runner.agreement:
                self._protection.enter()
        if self._common is not None:
            self._position.at("wait", step)
            with self.runner.agreement:
                self._common.begin(actions, [len(share) for share in todo])
        self.runner.run(step, actions, covered, self)
        self._stretch()
        with self.runner.agreement:
            self._position.at("wait", step)
            self._protection.after_microbatches()
            reduced = self._reduce(lambda layer: self._injector.reach(step, Phase.REDUCE))
            norms = {r.index: r.norm_sq(reduced[r.index]) for r in self._replicas}
            self._protection.before_commit(step, reduced)
            agreed = commit(
                self._links,
                self._roster,
                self._replicas if self._common is None else self._common.parts(),
                norms,
                step=step,
                halt_epoch=self._boundary_requested() or -1,
                common=self._common is not None,
            )
        clip = _clip(agreed.norm, self._optimizer.clip_norm)
        self.record = StepRecord(step, clip, agreed.norm, agreed.loss)
        self._position.at("compute", step)
        lr = self._optimizer.lr(step)
        self._protection.before_update(reduced, clip)
        for replica in self._replicas:
            replica.update(reduced[replica.index], clip, lr)
            self._protection.retire(replica)
            self._injector.reach(step, Phase.OPTIMIZER)
        self._protection.after_update()
        self._position.at("wait", step)
        with self.runner.agreement:
            self._shards.gather()
        return StepResult(self.record, agreed.halt_epoch, lr, time.perf_counter() - started)

    def _run_in_part(self, step: int, covered: Mapping[int, frozenset[int]]) -> None:
        """What some layers run alone; once, and not measured."""
        if self._partial is None:
            return
        if self._partial.step == step:
            self._in_part = True
            self._partial.run(self._make_runner, covered, self)
            self._stretch()
            self._in_part = False
        else:
            self._partial = None

    @property
    def started(self) -> frozenset[int]:
        """Micro-batches of the current step whose forward pass was begun here."""
        return frozenset(self.runner.started) | (self._partial.started if self._partial else frozenset())

    @property
    def sent(self) -> frozenset[int]:
        """Micro-batches of the current step whose activations this worker handed on."""
        return frozenset(self.runner.sent) | (self._partial.sent if self._partial else frozenset())

    def _reduce(self, on_layer: Callable[[int], None]) -> dict[int, Tensor]:
        """Layer -> the gradient that its update takes."""
        if self._common is None:
            return self._reduction.run(on_layer)
        sums = self._common.finish(self._tied, on_layer)
        self._protection.settle()
        return self._reduction.tie(sums)

    # ---- hooks of the pipeline runner ----

    def before(self, action: Action) -> None:
        self._stretch()
        self._computing = action.kind.computes
        activity = "compute" if action.kind.computes else "wait"
        self._position.at(activity, self.step, action.microbatch)
        if action.kind is Kind.F:
            self._injector.reach(self.step, Phase.FORWARD, action.microbatch)
        elif action.kind in (Kind.B, Kind.INPUT):
            self._injector.reach(self.step, Phase.BACKWARD, action.microbatch)
        self._began = time.perf_counter()
        if self._computing and not self._in_part:
            self.meter.begin(action)

    def on_backward(self, index: int) -> None:
        self._stretch()
        self._position.at("wait")
        self._on_microbatch()
        if self._common is not None and not self._in_part:
            self._common.after_microbatch()
            if self._common.shared:
                self._protection.settle()
        self._protection.after_microbatch(self.step)

    def _stretch(self) -> None:
        if self._computing:
            self._computing = False
            self._injector.stretch(time.perf_counter() - self._began)
            self.meter.end()


def stages_of_rank(roster: Roster, rank: int, replicas: Sequence[LayerReplica]) -> list[LocalStage]:
    """The stages of `rank`. `replicas`: all of its layers."""
    layers, places = {replica.index: replica for replica in replicas}, roster.places(rank)
    return [
        LocalStage(
            [layers[layer] for layer in place.stage.layers],
            previous=place.previous,
            following=place.following,
            number=place.number if len(places) > 1 else -1,
            recompute=place.stage.recompute,
        )
        for place in places
    ]


def _clip(norm: float, limit: float | None) -> float:
    """Coefficient that brings a gradient of this norm down to `limit` (as torch.nn.utils.clip_grad_norm_)."""
    if limit is None:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
