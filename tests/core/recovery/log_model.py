"""Parts of `tests.core.recovery.job_model`: its workers, logged messages, and what runs between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.domain.types import ACTIVATION, COTANGENT, Assignment, PartialRun
from tests.core.recovery.modelled_worker import Worker

if TYPE_CHECKING:
    from tests.core.recovery.job_model import Job


def add(job: Job, worker: Worker, index: int, first: int, last: int) -> None:
    """The worker's layers in [first, last) have run `index`."""
    covered = job.covered(worker.step)
    for layer, gradient in worker.gradient.items():
        if first <= layer < last and index not in covered.get(layer, ()):
            gradient[index] += 1


def send(job: Job, worker: Worker, kind: str, boundary: int, index: int) -> None:
    """The worker has sent a message over `boundary`; its log is not written yet."""
    if job.plan_of.gradients == "log" and 0 < boundary < job.spec.n_layers:
        copy = job.copy(worker, kind, boundary, worker.step, frozenset({index}))
        worker.unwritten.append((copy, (kind, boundary, worker.step, index)))


def write(job: Job, worker: Worker) -> None:
    for copy, content in worker.unwritten:
        job.vaults[worker.node].add(copy, content)
    worker.unwritten.clear()


def run_in_part(job: Job, ranks: list[Worker]) -> None:
    """The next stage's share of a run of some layers; the last stage is the first to add it."""
    run, _ = job.partial[ranks[0].pipeline].pop(0)
    for worker in ranks:
        worker.started.add(run.microbatch)
        for kind, boundary in ((COTANGENT, min(worker.version)), (ACTIVATION, max(worker.version) + 1)):
            if run.first < boundary < run.last:
                send(job, worker, kind, boundary, run.microbatch)
        add(job, worker, run.microbatch, run.first, run.last)
        write(job, worker)
        if not worker.entered:
            job.enter(worker)


def shares(assignment: Assignment, p: int) -> list[tuple[PartialRun, int]]:
    """(run, stage) in the order in which a pipeline's stages add what they run in part."""
    stages = assignment.plan.pipelines[p].stages
    return [
        (run, s)
        for run in assignment.partial
        if run.pipeline == p
        for s in reversed(range(len(stages)))
        if stages[s].first < run.last and stages[s].last > run.first
    ]
