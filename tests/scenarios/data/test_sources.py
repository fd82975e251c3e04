"""The order of samples does not depend on nodes that are lost, that join, or on a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import elastic_run
from tests.scenarios.jobs import Job
from tests.scenarios.paced import finish_after
from tests.scenarios.shared import exact, faults, made_once

JOB = ("-m", "tests.scenarios.data.train_on")
LOST_AND_JOINED = ("kill node=1 step=2 microbatch=3", "join step=3")


def sources(often: str) -> list[object]:
    """Return all sources. `often` is that of the usual suite; the others run with the campaigns."""
    return [
        pytest.param(source, marks=() if source == often else pytest.mark.chaos)
        for source in ("dataset", "stream", "loader", "documents")
    ]


@pytest.mark.parametrize("source", sources("stream"))
def test_a_killed_node_and_a_newcomer_change_no_bit(source: str, tmp_path: Path) -> None:
    expected = made_once(tmp_path, exact("--nnodes", "1"), (*JOB, source)).summary
    flags = exact("--nnodes", "2", "--pipelines", "1", *faults(*LOST_AND_JOINED))
    hurry = tmp_path / "hurry"
    script = (*JOB, source, "--hurry", str(hurry))
    job = Job(tmp_path / "run", ["run", "--standalone", *flags], script)
    run = finish_after(job, hurry, "node1 lost", "join node2")
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == expected["params_sha256"], run.output


@pytest.mark.parametrize(
    ("nodes", "pipelines", "backup"),
    [
        pytest.param("4", "2+2", "log+snapshot", id="partial replay"),
        pytest.param("4", "2+2", "reduce:2+replica", id="reduction", marks=pytest.mark.chaos),
        pytest.param(
            "3", "1+1+1", "stream+snapshot/sharded", id="sharded", marks=pytest.mark.chaos
        ),
        pytest.param("4", "3+1", "stream+replay", id="replay", marks=pytest.mark.chaos),
    ],
)
def test_weights_are_summed_once_on_any_plan(
    nodes: str, pipelines: str, backup: str, tmp_path: Path
) -> None:
    """Micro-batches of this source have different weights, whose sum scales the update."""
    expected = made_once(tmp_path, exact("--nnodes", "1"), (*JOB, "stream")).summary
    flags = exact("--nnodes", nodes, "--pipelines", pipelines, "--backup", backup)
    lost = faults("kill node=1 step=2 microbatch=3")
    run = elastic_run(tmp_path / "run", [*flags, *lost], (*JOB, "stream"))
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"] and len(summary["recoveries"]) == 1


@pytest.mark.chaos
@pytest.mark.parametrize("source", sources("loader"))
def test_a_resumed_run_goes_on_with_the_next_sample(source: str, tmp_path: Path) -> None:
    expected = made_once(tmp_path, exact("--nnodes", "1"), (*JOB, source)).summary
    half = (*JOB, source, "--steps", "3", "--checkpoint-every", "3")
    first = elastic_run(tmp_path / "first", exact("--nnodes", "2"), half)
    assert first.code == 0, first.output
    (kept,) = (first.run_dir / "checkpoints").glob("step-*")
    run = elastic_run(
        tmp_path / "run", exact("--nnodes", "1", "--resume", str(kept)), (*JOB, source)
    )
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == expected["params_sha256"], run.output


@pytest.mark.chaos  # tests/worker/datasets has the decision
def test_a_source_with_hidden_state_is_refused(tmp_path: Path) -> None:
    run = elastic_run(tmp_path / "run", ["--nnodes", "1"], (*JOB, "hidden"))
    assert run.code != 0
    assert "data(0, 0): another micro-batch at the second call" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    "pipelines",
    [pytest.param("1", id="one pipeline"), pytest.param("2", id="two", marks=pytest.mark.chaos)],
)
def test_a_source_that_differs_between_nodes_is_refused(pipelines: str, tmp_path: Path) -> None:
    """Both ends of a pipeline read its micro-batches; two pipelines compare one of them."""
    run = elastic_run(
        tmp_path / "run", ["--nnodes", "2", "--pipelines", pipelines], (*JOB, "local")
    )
    assert run.code == 2, run.output
    assert "data: other micro-batches on node1 than on node0 in step 0 is not usable" in run.output
    assert "Traceback" not in run.output
