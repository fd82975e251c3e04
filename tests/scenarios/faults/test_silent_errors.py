"""Real runs in which bits of a replica change, or a gradient is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.shared import exact, faults, made_once

JOB = str(Path(__file__).with_name("small_job.py"))
SKIP = ("--on-nonfinite", "skip")
NAN = ("--nan", "3", "2")


def reference(directory: Path, *flags: str, arguments: tuple[str, ...] = ()) -> Run:
    """The failure-free run on one node."""
    return made_once(directory, exact("--nnodes", "1", *flags), [JOB, *arguments])


def check_same(run: Run, expected: Run) -> None:
    """Parameters, losses and checkpoints are those of the failure-free run."""
    assert (run.code, expected.code) == (0, 0), run.output + expected.output
    for field in ("params_sha256", "loss", "checkpoints"):
        assert run.summary[field] == expected.summary[field], run.output
    assert run.summary["ledger"] == proved(run.summary)


def test_a_flipped_bit_of_one_replica_is_repaired(tmp_path: Path) -> None:
    """Two nodes hold all layers. The layer whose weight changed is loaded from the other node."""
    flags = exact("--nnodes", "2", "--pipelines", "2")
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", "2"])
    check_same(run, reference(tmp_path))
    (found,) = run.summary["divergences"]
    assert (found["step"], found["wrong"], found["fatal"]) == (2, [["node1", 1, 0]], False)
    assert "layer 1 (TP rank 0): parameters differ: node0 has " in found["reason"]
    assert "warning: step 2: layer 1" in run.output
    (recovery,) = run.summary["recoveries"]
    assert recovery["cause_kinds"] == ["divergence"] and recovery["nodes_after"] == 2


@pytest.mark.parametrize(
    ("backup", "kill"),
    [
        ("stream+snapshot", "kill node=1 step=3 phase=optimizer"),
        pytest.param(
            "stream+replay", "kill node=1 step=3 phase=optimizer", marks=pytest.mark.chaos
        ),
        pytest.param("log+snapshot", "kill node=0 step=3 phase=reduce", marks=pytest.mark.chaos),
        pytest.param(
            "recompute+snapshot", "kill node=2 step=3 microbatch=3", marks=pytest.mark.chaos
        ),
    ],
)
def test_a_skipped_step_is_recovered_as_a_skipped_step(
    tmp_path: Path, backup: str, kill: str
) -> None:
    expected = reference(tmp_path, *SKIP, arguments=NAN)
    flags = exact("--nnodes", "3", "--pipelines", "1", "--backup", backup, *SKIP, *faults(kill))
    run = elastic_run(tmp_path / "run", flags, [JOB, *NAN])
    summary, plain = run.summary, expected.summary
    for one in (summary, plain):
        assert math.isnan(one["loss"][3]) and math.isnan(one["grad_norm"][3])
        assert [(e["step"], e["action"]) for e in one["nonfinite"]] == [(3, "skip")]
        one["loss"][3] = None
    assert summary["loss"] == plain["loss"] and len(summary["loss"]) == 6, run.output
    assert summary["params_sha256"] == plain["params_sha256"] and len(summary["recoveries"]) == 1
    assert summary["ledger"] == proved(summary) and summary["checkpoints"] == plain["checkpoints"]
    assert "the gradient norm of step 3 is nan: its update is left out" in run.output
    assert run.code == expected.code == 0


@pytest.mark.parametrize("accumulate", ["exact", pytest.param("fast", marks=pytest.mark.chaos)])
def test_a_gradient_that_is_not_finite_stops_the_job(tmp_path: Path, accumulate: str) -> None:
    flags = ["--accumulate", accumulate, "--nnodes", "2", "--pipelines", "1"]
    run = elastic_run(tmp_path / "run", flags, [JOB, *NAN])
    text = "step 3: the gradient norm is nan, because of layers 0-2"
    assert run.code == 1 and text in run.output.splitlines()[-1], run.output
    summary = run.summary
    assert text in summary["reason"] and summary["checkpoints"] == [3]
    assert [(e["step"], e["action"]) for e in summary["nonfinite"]] == [(3, "stop")]
    assert summary["steps"] == 3, "no update was made from it"


@pytest.mark.chaos
def test_training_continues_on_request(tmp_path: Path) -> None:
    flags = ["--nnodes", "2", "--pipelines", "2", "--on-nonfinite", "continue"]
    run = elastic_run(tmp_path / "run", flags, [JOB, *NAN])
    assert run.code == 0 and len(run.summary["loss"]) == 6, run.output
    assert {e["action"] for e in run.summary["nonfinite"]} == {"continue"}
    assert [e["step"] for e in run.summary["nonfinite"]] == [3, 4, 5]
