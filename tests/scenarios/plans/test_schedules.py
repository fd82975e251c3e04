"""All schedules give the same parameters, with and without faults, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.shared import GPT, SCRIPT, exact, faults, reference

DROPOUT = ("--dropout", "0.1")
TIED = ("--tie-embeddings", "--dropout", "0.1")
TP = ("--tp", "2")
KILL = "kill node=1 step=2 microbatch=3"


def _case(
    name: str,
    schedule: str,
    *flags: str,
    fault: str = "",
    nodes: str = "3",
    pipelines: str = "1",
    model: tuple[str, ...] = DROPOUT,
    small: bool = False,
) -> ParameterSet:
    """Flags of `elastic run` and of the script for one run."""
    marks = () if small else (pytest.mark.chaos,)
    words = ("--nnodes", nodes, "--pipelines", pipelines, *flags, *(faults(fault) if fault else ()))
    return pytest.param(schedule, words, model, id=name, marks=marks)


CASES = (
    _case("zero-bubble-killed", "zero-bubble", fault=KILL),
    _case("interleaved-killed", "interleaved", fault=KILL),
    _case("1f1b", "1f1b"),
    _case("zero-bubble", "zero-bubble"),
    _case("interleaved", "interleaved"),
    _case("zero-bubble-first-killed", "zero-bubble", fault="kill node=0 step=2 microbatch=4"),
    _case("zero-bubble-last-killed", "zero-bubble", fault="kill node=2 step=2 microbatch=1"),
    _case("interleaved-last-killed", "interleaved", fault="kill node=2 step=2 microbatch=4"),
    _case(
        "interleaved-killed-in-optimizer", "interleaved", fault="kill node=1 step=2 phase=optimizer"
    ),
    _case(
        "interleaved-killed-in-reduction", "interleaved", fault="kill node=1 step=2 phase=reduce"
    ),
    _case("interleaved-two-pipelines", "interleaved", fault=KILL, nodes="4", pipelines="2"),
    _case("zero-bubble-two-pipelines", "zero-bubble", fault=KILL, nodes="5", pipelines="3+2"),
    _case("zero-bubble-tied", "zero-bubble", fault=KILL, model=TIED),
    _case("interleaved-tied", "interleaved", fault=KILL, model=TIED),
    _case("zero-bubble-tp", "zero-bubble", "--nproc-per-node", "2", fault=KILL, model=TP),
    _case("interleaved-tp", "interleaved", "--nproc-per-node", "2", fault=KILL, model=TP),
)


def _check(run: Run, expected: Run, words: tuple[str, ...]) -> None:
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected.summary["params_sha256"], run.output
    assert summary["loss"] == expected.summary["loss"]
    assert summary["ledger"] == proved(summary)
    assert len(summary["recoveries"]) == ("--fault" in words)


def _expected(directory: Path, model: tuple[str, ...]) -> Run:
    """The failure-free run with 1F1B; with TP 2, nodes have two workers."""
    if model != TP:
        return reference(directory, *model)
    flags = exact(
        "--nnodes", "2", "--pipelines", "1", "--nproc-per-node", "2", "--schedule", "1f1b"
    )
    return elastic_run(directory / "reference", flags, [*GPT, *model])


@pytest.mark.parametrize(("schedule", "words", "model"), CASES)
def test_parameters_do_not_depend_on_the_schedule(
    schedule: str, words: tuple[str, ...], model: tuple[str, ...], tmp_path: Path
) -> None:
    expected = _expected(tmp_path, model)
    run = elastic_run(tmp_path / "run", exact("--schedule", schedule, *words), [*GPT, *model])
    _check(run, expected, words)
    assert (f"schedule={schedule}:" in run.summary["plan"]) == (schedule != "1f1b")


RECOMPUTING = (
    pytest.param("zero-bubble", KILL, id="zero-bubble-killed"),
    pytest.param("1f1b", "", id="1f1b", marks=pytest.mark.chaos),
    pytest.param("interleaved", KILL, id="interleaved-killed", marks=pytest.mark.chaos),
)


def test_plain_layers_give_the_same(tmp_path: Path) -> None:
    """The small form of interleaved-killed: processes with plain layers start faster."""
    words = ("--nnodes", "3", "--pipelines", "1", *faults(KILL))
    run = elastic_run(tmp_path / "run", exact("--schedule", "interleaved", *words), SCRIPT)
    _check(run, reference(tmp_path), words)
    assert "schedule=interleaved:" in run.summary["plan"]


@pytest.mark.parametrize(("schedule", "fault"), RECOMPUTING)
def test_nor_on_recomputation(schedule: str, fault: str, tmp_path: Path) -> None:
    """Memory is short before and after the loss, so activations are recomputed."""
    words = ("--nnodes", "3", "--pipelines", "1", *(faults(fault) if fault else ()))
    flags = exact("--schedule", schedule, "--node-memory", "4MiB", *words)
    run = elastic_run(tmp_path / "run", flags, [*GPT, *DROPOUT])
    _check(run, reference(tmp_path, *DROPOUT), words)
    assert "+recompute" in run.summary["plan"]
