"""Training in the script's own process, without `elastic run`: for a debugger and for first tries.

    python mine.py

The model, the data, the optimizer and the engine are those of a job on one node. The coordinator,
the agent, backups and checkpoints are absent. So losses and parameters are those of the job, and a
breakpoint or a print in a layer works as in any other script.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.domain.errors import FieldError
from elastic.domain.types import EvaluationResult, OnNonfinite, Pipeline, Plan, Stage, Unit
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import Action, actions_of
from elastic.worker.context import TrainingJob
from elastic.worker.engine.allreduce import GradientAllReduce
from elastic.worker.engine.commit import commit
from elastic.worker.engine.evaluation_runner import EvaluationRunner
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import GroupAgreement, StageRunner
from elastic.worker.engine.step import StepChecks, judge
from elastic.worker.model.device import choose_device
from elastic.worker.model.gradients import exact_limit
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from elastic.worker.transport.links import Links

EPOCH = 1
CHECKS = StepChecks(on_nonfinite=OnNonfinite.STOP)


class _NoHooks:
    """Nothing is backed up or reported between two actions."""

    def before(self, action: Action) -> None: ...

    def on_backward(self, index: int) -> None: ...


def train_here(job: TrainingJob) -> None:
    """Train the whole model in this process, and print each step.

    Raises UsageError if the model needs several processes, and NonfiniteError for a gradient that
    is infinite or NaN.
    """
    spec = job.spec
    if spec.tp > 1:
        remedy = f"a single process trains: try elastic run --nproc-per-node {spec.tp} SCRIPT"
        raise FieldError("tp", spec.tp, remedy)
    _say("this process trains alone, without recovery and checkpoints; `elastic run` has both")
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        for text in _steps(job, str(Path(folder) / "store")):
            _say(text)
        job.stack.release()


def _steps(job: TrainingJob, store: str) -> Iterator[str]:
    """Run each step and evaluation; yield its figures. `store`: file for a process group of one."""
    spec, device = job.spec, choose_device(0)
    tp = job.stack.tensor_parallel(0, 1, store, device)
    indices = tuple(range(spec.n_microbatches))
    pipeline = Pipeline((Stage(Unit("here"), 0, spec.n_layers),), indices)
    plan = Plan(EPOCH, spec.n_layers, spec.n_microbatches, 1, (pipeline,))
    ranks = roster(plan)
    replicas = [job.replica(layer, tp, device) for layer in range(spec.n_layers)]
    links = Links.open(
        epoch=EPOCH,
        rank=0,
        world_size=1,
        store_address="",
        device=device,
        timeout_s=0.0,
        abandon=AbandonSignal(),
    )

    evaluations = _evaluations(job, plan, replicas, links)
    stages = stages_of_rank(ranks, 0, replicas)
    runner = StageRunner(
        stages,
        links,
        n_microbatches=spec.n_microbatches,
        typical_weight=job.typical_weight,
        data=lambda step, index: job.microbatch(step, index, device, hashed=False),
    )
    all_reduce = GradientAllReduce(replicas, links, ranks, job.stack.tied_trained)
    limit = exact_limit(spec.n_microbatches, job.stack.tied_trained)
    expected, last = spec.n_microbatches * job.typical_weight, replicas[-1]
    try:
        for step in range(spec.n_steps):
            began = time.perf_counter()
            runner.run(step, actions_of(pipeline, indices)[0], {}, _NoHooks())
            reduced = all_reduce.run(lambda layer: None)
            norms_sq = {one.index: one.norm_sq(reduced[one.index]) for one in replicas}
            weight = last.weight(reduced[last.index])
            agreed = commit(links, ranks, replicas, norms_sq, step=step, weight=weight)
            record = judge(
                step,
                agreed,
                expected,
                job.optimizer.clip_norm,
                CHECKS,
                limit,
                loss_scale=last.loss_scale,
            )
            lr = job.optimizer.lr(step)
            for replica in replicas:
                if record.skipped:
                    replica.skip_update()
                else:
                    replica.update(reduced[replica.index], record.clip, lr)
                replica.clear()
            seconds = time.perf_counter() - began
            figures = f"loss {record.loss:.4f}, gradient norm {record.grad_norm:.4g}"
            yield f"step {step + 1}/{spec.n_steps}: {figures}, {seconds:.2f} s"
            if evaluations is not None and spec.evaluates(step + 1):
                yield _described(evaluations.run(step + 1, None))
    finally:
        links.close()


def _evaluations(
    job: TrainingJob, plan: Plan, replicas: list[LayerReplica], links: Links
) -> EvaluationRunner | None:
    """Return the runner of the evaluations; None: the job has none."""
    if job.evaluation is None:
        return None
    return EvaluationRunner(
        microbatches=job.evaluation.microbatches,
        data=lambda version, index: job.evaluation_microbatch(version, index, links.device),
        weigh=job.evaluation_weight,
        plan=plan,
        roster=roster(plan),
        replicas=replicas,
        links=links,
        agreement=GroupAgreement(None, links.abandon),
        before=lambda version, kind, index: None,
        after=lambda seconds: None,
    )


def _described(found: EvaluationResult) -> str:
    figures = {"loss": found.loss, **{one.name: one.value for one in found.figures}}
    text = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
    return f"evaluated after step {found.step}: {text}, {found.seconds:.2f} s"


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)
