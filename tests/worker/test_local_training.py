"""`python mine.py`: the script trains in its own process as a job on one node does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.domain.errors import FieldError, NonfiniteError
from elastic.domain.types import Accumulate, JobSpec
from elastic.worker.context import TrainingJob
from elastic.worker.evaluation import Evaluation
from elastic.worker.local_training import train_here
from elastic.worker.model.microbatch import Microbatch
from tests.scenarios.harness import ROOT
from tests.scenarios.shared import GPT, SCRIPT, exact, made_once
from tests.worker.model.toy_model import microbatch, sgd, toy_stack

LINE = re.compile(r"elastic: step (\d+)/6: loss ([\d.]+), gradient norm ([\d.e-]+), [\d.]+ s")


def job(tp: int = 1, data: object = microbatch) -> TrainingJob:
    stack, optimizer = toy_stack(), sgd()
    spec = JobSpec(
        layers=stack.specs(Accumulate.FAST, optimizer), n_microbatches=2, n_steps=3, tp=tp
    )
    return TrainingJob(
        stack=stack,
        optimizer=optimizer,
        data=data,  # type: ignore[arg-type]
        accumulate=Accumulate.FAST,
        spec=spec,
    )


@pytest.mark.parametrize(
    "words",
    [
        SCRIPT,
        pytest.param((*GPT, "--tie-embeddings", "--dropout", "0.1"), marks=pytest.mark.chaos),
    ],
)
def test_losses_and_norms_are_those_of_the_job(words: tuple[str, ...], tmp_path: Path) -> None:
    expected = made_once(tmp_path, exact("--nnodes", "1"), words).summary
    env = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *lines = done.stderr.splitlines()
    assert "trains alone, without recovery and checkpoints" in first
    found = [match.groups() for line in lines if (match := LINE.fullmatch(line))]
    wanted = zip(expected["loss"], expected["grad_norm"], strict=True)
    assert found == [(str(i), f"{a:.4f}", f"{b:.4g}") for i, (a, b) in enumerate(wanted, 1)]


def test_each_step_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    train_here(job())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines[1:]] == [f" step {i}/3" for i in (1, 2, 3)]


def test_losses_are_means_by_weight(capsys: pytest.CaptureFixture[str]) -> None:
    """The micro-batch with weight 0 does not count at all."""
    plain = job()
    spec = replace(plain.spec, tokens_per_microbatch=3, n_steps=1)
    train_here(replace(plain, spec=replace(spec, n_microbatches=1)))
    weigh = lambda fields: 5.0 * (fields["x"][0, 0] == microbatch(0, 0).fields["x"][0, 0])  # noqa: E731
    train_here(replace(plain, spec=spec, weigh=weigh))
    one, other = (line for line in capsys.readouterr().err.splitlines() if "step 1/1" in line)
    assert one.rpartition(",")[0] == other.rpartition(",")[0]


def test_an_evaluation_is_weighed_only_when_it_must_be() -> None:
    """Its fields are read when a layer uses them, or when they are weighed."""
    asked: list[int] = []

    def source(step: int, index: int) -> Microbatch:
        asked.append(index)
        return microbatch(step, index)

    evaluation = Evaluation(data=source, every=2, microbatches=3)
    plain = replace(job(), evaluation=evaluation)
    cpu = torch.device("cpu")
    assert plain.evaluation_weight(plain.evaluation_microbatch(2, 1, cpu)) == 1.0 and not asked
    weighed = replace(plain, weigh=lambda fields: 2 * len(fields))
    assert weighed.evaluation_weight(weighed.evaluation_microbatch(2, 1, cpu)) == 2.0
    assert {*asked} == {1}
    emulated = weighed.evaluation_microbatch(2, 1, cpu, emulated=True)
    assert weighed.evaluation_weight(emulated) == 1.0


def test_the_model_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = Evaluation(data=microbatch, every=2, microbatches=3)
    plain = job()
    evaluated = replace(
        plain,
        evaluation=evaluation,
        spec=replace(plain.spec, evaluate_every=2, evaluation_microbatches=3),
    )
    train_here(evaluated)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [re.sub(r"[\d.]{3,}", "N", line) for line in lines] == [
        "elastic: step 1/3: loss N, gradient norm N, N s",
        "elastic: step 2/3: loss N, gradient norm N, N s",
        "elastic: evaluated after step 2: loss N, N s",
        "elastic: step 3/3: loss N, gradient norm N, N s",
        "elastic: evaluated after step 3: loss N, N s",
    ]


def test_a_tensor_parallel_model_needs_workers() -> None:
    with pytest.raises(FieldError, match=r"tp: 2 .*elastic run --nproc-per-node 2 SCRIPT"):
        train_here(job(tp=2))


def test_a_gradient_that_is_not_finite_ends_it() -> None:
    def data(step: int, index: int) -> Microbatch:
        found = microbatch(step, index)
        scale = float("inf") if (step, index) == (1, 1) else 1.0
        return Microbatch(step, index, {n: value * scale for n, value in found.fields.items()})

    with pytest.raises(NonfiniteError, match="step 1: the gradient norm is"):
        train_here(job(data=data))
