"""Injected faults that the job cannot have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.protocol.fault_spec import parse_fault
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec, LayerSpec
from elastic.worker.engine.injector import check_faults

LAYER = LayerSpec(1, 1, 1, 1.0, 1.0)
JOB = JobSpec(
    layers=(LAYER,), n_microbatches=6, n_steps=30, evaluate_every=10, evaluation_microbatches=9
)


@pytest.mark.parametrize(
    ("text", "field", "last"),
    [
        ("kill node=1 step=3000", "--fault step", 29),
        ("join step=30", "--fault step", 29),
        ("stop node=0 step=30 phase=recovery", "--fault step", 29),
        ("kill node=1 step=1 microbatch=100", "--fault microbatch", 5),
        ("kill node=1 microbatch=6 phase=forward", "--fault microbatch", 5),
        ("kill-coordinator step=1 microbatch=6", "--fault microbatch", 5),
        ("kill node=1 step=31 phase=evaluation", "--fault step", 30),
        ("kill node=1 microbatch=9 phase=evaluation", "--fault microbatch", 8),
    ],
)
def test_a_fault_that_can_never_happen_is_refused(text: str, field: str, last: int) -> None:
    with pytest.raises(FieldError, match=f"from 0 to {last}") as error:
        check_faults((parse_fault("join"), parse_fault(text)), JOB)
    assert error.value.field == field and text in str(error.value)


def test_a_job_without_evaluations_has_no_fault_in_them() -> None:
    job = replace(JOB, evaluate_every=0)
    with pytest.raises(FieldError, match=r"phase: 'evaluation' .*this job has no evaluation"):
        check_faults((parse_fault("kill node=1 phase=evaluation"),), job)
    check_faults((parse_fault("kill node=1 step=30 phase=evaluation microbatch=8"),), JOB)


def test_the_last_step_and_micro_batch_can_have_a_fault() -> None:
    check_faults((parse_fault("kill node=1 step=29 microbatch=5"), parse_fault("join")), JOB)
