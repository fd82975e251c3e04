"""Evaluations of a real run: each once, with the values of the failure-free run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.harness import Run, elastic_run
from tests.scenarios.shared import exact, faults, made_once, reference, script
from tests.scenarios.tracking.hooks import KILL_AT, OUT

EVERY = ("--evaluate-every", "2")
CHAOS = pytest.mark.chaos
CASES = (
    pytest.param(("kill node=1 step=2 phase=evaluation microbatch=3",), id="in the evaluation"),
    pytest.param(
        ("kill node=2 step=6 phase=evaluation",), id="in the last evaluation", marks=CHAOS
    ),
    pytest.param(("kill node=1 step=2 microbatch=2",), id="in the same step", marks=CHAOS),
    pytest.param(
        (
            "kill node=0 step=2 phase=evaluation",
            "kill-worker node=2 step=4 microbatch=1 phase=evaluation",
        ),
        id="two in a row, and a worker",
        marks=CHAOS,
    ),
)


def evaluations(run: Run) -> list[dict[str, Any]]:
    left_out = ("seconds", "epoch")
    found = run.summary["evaluations"]
    return [{k: v for k, v in one.items() if k not in left_out} for one in found]


def expected(tmp_path: Path) -> Run:
    run = reference(tmp_path, *EVERY)
    found = evaluations(run)
    assert [one["step"] for one in found] == [2, 4, 6]
    assert [one["microbatches"] for one in found] == [5] * 3
    assert all(0.0 < one["figures"]["confidence"] < 1.0 for one in found)
    losses = [one["loss"] for one in found]
    assert losses[-1] < losses[0] and len({*losses}) == 3
    return run


@pytest.mark.parametrize("lost", CASES)
def test_a_fault_changes_no_evaluation(lost: tuple[str, ...], tmp_path: Path) -> None:
    flags = exact("--nnodes", "3", "--pipelines", "1", *faults(*lost))
    run = elastic_run(tmp_path / "run", flags, script(*EVERY))
    wanted = expected(tmp_path)
    assert run.code == 0, run.output
    assert len(run.summary["recoveries"]) == len(lost), run.output
    assert run.summary["params_sha256"] == wanted.summary["params_sha256"]
    assert run.summary["loss"] == wanted.summary["loss"]
    assert evaluations(run) == evaluations(wanted)
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").open()]
    assert [e["step"] for e in events if e["kind"] == "evaluation"] == [2, 4, 6]
    assert run.output.count("evaluated after step") == 3
    first = wanted.summary["evaluations"][0]
    assert f"evaluated after step 2: loss {first['loss']:.4f}, confidence" in run.output


@pytest.mark.chaos
@pytest.mark.parametrize(
    "words",
    [
        ("--nnodes", "3", "--pipelines", "1", "--schedule", "interleaved"),
        ("--nnodes", "4", "--pipelines", "2", "--backup", "reduce+replica"),
        ("--nnodes", "2", "--pipelines", "1", "--backup", "log+replay"),
    ],
)
def test_every_plan_gives_the_same_evaluations(words: tuple[str, ...], tmp_path: Path) -> None:
    flags = exact(*words, *faults("kill node=1 step=4 microbatch=1 phase=evaluation"))
    run = elastic_run(tmp_path / "run", flags, script(*EVERY))
    assert run.code == 0 and len(run.summary["recoveries"]) == 1, run.output
    assert evaluations(run) == evaluations(expected(tmp_path))


@pytest.mark.chaos
def test_tensor_parallel_workers_agree(tmp_path: Path) -> None:
    """With dropout, which evaluations do not have."""
    words = ("--tp", "2", "--dropout", "0.1", "--evaluate-every", "3")
    flags = exact("--nproc-per-node", "2")
    wanted = made_once(tmp_path, [*flags, "--nnodes", "1"], script(*words))
    lost = faults("kill node=1 step=3 microbatch=2 phase=evaluation")
    run = elastic_run(tmp_path / "run", [*flags, "--nnodes", "2", *lost], script(*words))
    assert run.code == 0 and len(run.summary["recoveries"]) == 1, run.output
    assert run.summary["params_sha256"] == wanted.summary["params_sha256"]
    assert [one["step"] for one in evaluations(run)] == [3, 6]
    assert evaluations(run) == evaluations(wanted)


@pytest.mark.chaos
def test_a_new_coordinator_repeats_no_evaluation(tmp_path: Path) -> None:
    """Nodes report their newest steps again to it."""
    flags = exact("--nnodes", "2", *faults("kill-coordinator step=3 down=1"))
    run = elastic_run(tmp_path / "run", flags, script(*EVERY, "--steps", "40"))
    assert run.code == 0, run.output
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").open()]
    terms = [e["term"] for e in events if e["kind"] == "coordinator"]
    assert len(terms) == 2, run.output
    assert [e["step"] for e in events if e["kind"] == "evaluation"] == list(range(2, 41, 2))


def test_evaluations_do_not_change_the_training(tmp_path: Path) -> None:
    plain, evaluated = reference(tmp_path), expected(tmp_path)
    for field in ("params_sha256", "loss", "grad_norm"):
        assert evaluated.summary[field] == plain.summary[field]
    assert plain.summary["evaluations"] == []


def test_a_tracker_is_told_each_evaluation_once(tmp_path: Path) -> None:
    """The tracker is killed at step 3 and started again; a node is lost in the evaluation."""
    lines = tmp_path / "lines"
    flags = exact("--nnodes", "2", *faults("kill node=1 step=4 phase=evaluation"))
    flags += ["--track", "callback:tests.scenarios.tracking.hooks:Lines"]
    environment = {OUT: str(lines), KILL_AT: "3"}
    run = elastic_run(tmp_path / "run", flags, script(*EVERY), environment=environment)
    assert run.code == 0, run.output
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    killed = next(i for i, line in enumerate(told) if line["kind"] == "killed")
    before = [line["step"] for line in told[:killed] if line["kind"] == "evaluation"]
    after = [line["step"] for line in told[killed:] if line["kind"] == "evaluation"]
    assert before == [2] and after in ([4, 6], [2, 4, 6])  # its batch may not have been durable
    for line in told:
        if line["kind"] == "evaluation":
            found = next(e for e in run.summary["evaluations"] if e["step"] == line["step"])
            assert (line["loss"], line["confidence"]) == (
                found["loss"],
                found["figures"]["confidence"],
            )
