"""Recovery in whole modelled jobs that lose nodes repeatedly."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.domain.errors import Unrecoverable
from elastic.domain.types import GRADIENT
from tests.core.recovery.job_model import Job, make_info, make_spec
from tests.core.recovery.proof import Vault


def build(seed: int, backup: str = "") -> Job:
    """A job with random layers, micro-batches, TP, nodes, domains, shape and backup scheme."""
    rng = random.Random(seed)
    tp = rng.choice([1, 1, 2])
    spec = make_spec(
        rng.randint(1, 6), rng.randint(1, 8), rng.randint(1, 6), tp, rng.random() < 0.3
    )
    workers = tp * rng.choice([1, 1, 2])
    infos = [
        make_info(i, workers=workers, domain=rng.choice(["", "a", "b"]))
        for i in range(rng.randint(2, 5))
    ]
    schemes = ["stream+snapshot", "stream+replica", "stream+replay:2", "recompute+replay:3"]
    backup = backup or rng.choice(schemes)
    return Job(rng, spec, infos, shape=rng.choice(["auto", "1", "2", "2+2", "3+1"]), backup=backup)


def train(job: Job, most: int) -> None:
    """Do up to `most` random actions."""
    for _ in range(most):
        if not job.act():
            return


def join(job: Job) -> None:
    name = f"node{len(job.vaults) + job.epoch * 10}"
    workers = next(iter(job.nodes.values())).workers
    job.nodes[name] = replace(make_info(0, workers=workers), node=name, vault=f"{name}:1")
    job.vaults[name] = Vault(name)
    job.able.add(name)


@given(st.integers(0, 1 << 30))
@example(178158)
@example(1252818)
@settings(max_examples=60, deadline=None)
def test_single_losses_never_lose_a_step_nor_double_a_microbatch(seed: int) -> None:
    """tests.core.recovery.proof checks every assignment; every commit checks every gradient.

    Under `recompute` a step is repeated if its update was not yet acknowledged by the peer. So is a
    step that was finished by one node alone, which was lost before the coordinator heard of it: the
    record of the step, which an update needs, was on this node only.
    """
    job = build(seed)
    rng = job.rng
    while not job.finished:
        train(job, rng.randint(0, 120))
        while not job.trimmed:
            if not job.act():
                break
        if job.finished:
            break
        lowest = min(worker.step for worker in job.workers)
        victim = rng.choice(sorted(job.able))
        what, unheard = rng.random(), False
        if what < 0.5 and len(job.able) > 1:
            heard = job.known_record is not None and job.known_record.step >= lowest - 1
            unheard = not heard and all(worker.node == victim for worker in job.workers)
            job.fail([victim])
        elif what < 0.75:
            job.fail(workers_only=[victim])
        else:
            if what < 0.9:
                join(job)
            job.fail()
        repeated = job.backup.startswith("recompute") or unheard
        assert job.last is not None and job.last.step >= lowest - repeated
    assert all(worker.step == job.spec.n_steps for worker in job.workers)


@given(st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_any_losses_give_a_right_state_or_unrecoverable(seed: int) -> None:
    """Covers several nodes at once, faults before the last recovery is protected, checkpoints."""
    job = build(seed)
    rng = job.rng
    for _ in range(12):
        train(job, rng.randint(0, 100))
        if job.finished:
            return
        if rng.random() < 0.3:
            job.save_checkpoint()
        if rng.random() < 0.4:
            join(job)
        names = sorted(job.able)
        lost = rng.sample(names, rng.randint(0, len(names) - 1))
        killed = [name for name in names if name not in lost and rng.random() < 0.2]
        try:
            job.fail(lost, killed)
        except Unrecoverable as error:
            assert job.checkpoint is None
            assert "layers" in str(error)
            return
        assert job.last is not None
        if any(recipe.checkpoint for _, recipe in job.last.recipes):
            assert "fell back to the checkpoint" in job.last.plan.reason


@given(st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_a_loss_costs_no_acknowledged_microbatch(seed: int) -> None:
    """With TP 1, gradients in living vaults after a single loss are not computed again."""
    job = build(seed)
    if job.spec.tp > 1 or len(job.able) < 2:
        return
    train(job, job.rng.randint(0, 200))
    if job.finished or not job.trimmed:
        return
    victim = job.rng.choice(sorted(job.able))
    job.fail([victim])
    assert job.last is not None
    held = [frozenset[int]()] * job.spec.n_layers
    for vault in job.vaults.values():
        for copy, _ in vault.held.values():
            if copy.kind == GRADIENT and copy.step == job.last.step and copy.epoch == job.epoch - 1:
                held[copy.layer] |= copy.microbatches
    safe = frozenset.intersection(*held)
    assert not safe & {index for share in job.last.todo for index in share}


@given(st.integers(0, 1 << 30), st.sampled_from(["log+snapshot", "log+replica"]))
@settings(max_examples=60, deadline=None)
def test_logged_messages_never_double_a_microbatch(seed: int, backup: str) -> None:
    """Covers losses at any moment, also during partial runs."""
    job = build(seed, backup)
    rng = job.rng
    for _ in range(12):
        train(job, rng.randint(0, 100))
        if job.finished:
            return
        names = sorted(job.able)
        lost = [rng.choice(names)] if len(names) > 1 and rng.random() < 0.7 else []
        killed = [name for name in names if name not in lost and rng.random() < 0.2]
        if rng.random() < 0.3:
            join(job)
        try:
            job.fail(lost, killed)
        except Unrecoverable as error:
            assert "layers" in str(error)
            return


@given(st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_after_a_loss_only_lost_layers_rerun_finished_microbatches(seed: int) -> None:
    """This holds within one step and one epoch, between logged messages."""
    job = build(seed, "log+replica")
    train(job, job.rng.randint(0, 200))
    if (
        job.finished
        or not job.trimmed
        or len(job.able) < 2
        or len({w.step for w in job.workers}) > 1
    ):
        return
    finished = frozenset.intersection(
        *(
            frozenset().union(
                *(w.gradient[layer] for w in job.workers if layer in w.version and w.shard == shard)
            )
            for layer in range(job.spec.n_layers)
            for shard in range(job.spec.tp)
        )
    )
    victim = job.rng.choice(sorted(job.able))
    gone = {layer for w in job.workers if w.node == victim for layer in w.version}
    for p, pipeline in enumerate(job.plan_of.pipelines):
        if all(stage.unit.node == victim for stage in pipeline.stages):
            finished -= set(job.todo(p, job.workers[0].step))  # no message of it is left
    step = job.workers[0].step
    job.fail([victim])
    assert job.last is not None
    if job.last.step != step:
        return
    assert not finished & {index for share in job.last.todo for index in share}
    for run in job.last.partial:
        if run.microbatch in finished:
            assert gone.issuperset(range(run.first, run.last))
