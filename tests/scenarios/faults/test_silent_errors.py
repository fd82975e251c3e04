"""Real runs in which bits of a replica change, or a gradient is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.shared import exact, faults, made_once

JOB = str(Path(__file__).with_name("small_job.py"))
SKIP = ("--on-nonfinite", "skip")
NAN, INF = ("--nan", "3", "2"), ("--inf", "3", "2")
LAST = 5
"""The last step."""
NEVER, SELDOM = ("--verify-every", "0"), ("--verify-every", "4")
CHAOS = pytest.mark.chaos


def reference(directory: Path, *flags: str, arguments: tuple[str, ...] = ()) -> Run:
    """The failure-free run on one node."""
    return made_once(directory, exact("--nnodes", "1", *flags), [JOB, *arguments])


def check_same(run: Run, expected: Run) -> None:
    """Parameters, losses and checkpoints are those of the failure-free run."""
    assert (run.code, expected.code) == (0, 0), run.output + expected.output
    for field in ("params_sha256", "loss", "checkpoints"):
        assert run.summary[field] == expected.summary[field], run.output
    assert run.summary["ledger"] == proved(run.summary)


@pytest.mark.parametrize(
    ("bit", "compared"),
    [
        ("20", ()),
        pytest.param("30", (), marks=CHAOS),
        pytest.param("30", SELDOM, marks=CHAOS),
    ],
)
def test_a_flipped_bit_of_one_replica_is_repaired(
    tmp_path: Path, bit: str, compared: tuple[str, ...]
) -> None:
    """Two nodes hold all layers. The layer whose weight changed is loaded from the other node. Bit
    30 makes gradients that are finite, but too large for exact accumulation; then the replicas are
    compared in any case."""
    flags = exact("--nnodes", "2", "--pipelines", "2", *compared)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", "2", "--bit", bit])
    check_same(run, reference(tmp_path))
    (found,) = run.summary["divergences"]
    assert (found["step"], found["wrong"], found["fatal"]) == (2, [["node1", 1, 0]], False)
    assert "layer 1 (TP rank 0): parameters differ: node0 has " in found["reason"]
    assert "warning: step 2: layer 1" in run.output
    (recovery,) = run.summary["recoveries"]
    assert recovery["cause_kinds"] == ["divergence"] and recovery["nodes_after"] == 2


@pytest.mark.chaos
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_flipped_bit_of_a_frozen_weight_is_repaired(tmp_path: Path, node: str) -> None:
    """Copies do not have frozen parameters. The wrong layer is built anew, also on the node that
    both copies come from."""
    flags = exact("--nnodes", "2", "--pipelines", "2")
    run = elastic_run(tmp_path / "run", flags, [JOB, "--frozen", "--flip", node, "2"])
    check_same(run, reference(tmp_path, arguments=("--frozen",)))
    (found,) = run.summary["divergences"]
    assert (found["step"], found["wrong"], found["fatal"]) == (2, [[node, 1, 0]], False)


@pytest.mark.chaos
@pytest.mark.parametrize("backup", ["stream+replay", "stream+snapshot/sharded", "log+snapshot"])
def test_a_lost_node_with_a_frozen_layer_changes_no_bit(tmp_path: Path, backup: str) -> None:
    kill = faults("kill node=1 step=3 microbatch=2")
    pipelines = "2" if "sharded" in backup else "1"
    flags = exact("--nnodes", "3", "--pipelines", pipelines, "--backup", backup)
    run = elastic_run(tmp_path / "run", [*flags, *kill], [JOB, "--frozen"])
    check_same(run, reference(tmp_path, arguments=("--frozen",)))
    assert len(run.summary["recoveries"]) == 1


@pytest.mark.chaos
@pytest.mark.parametrize(("node", "wrong"), [("node1", []), ("node0", [["node0", 1, 0]])])
def test_a_flipped_bit_of_a_shared_state_is_repaired(
    tmp_path: Path, node: str, wrong: list[object]
) -> None:
    """Two nodes share the optimizer state. The flip is in the half of the parameters that node0
    updates. Only node0 has copies of it; they are used, also if it is the wrong one."""
    backup = ("--backup", "stream+snapshot/sharded")
    flags = exact("--nnodes", "2", "--pipelines", "2", *backup)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", node, "2"])
    check_same(run, reference(tmp_path))
    (found,) = run.summary["divergences"]
    assert (found["step"], found["wrong"], found["fatal"]) == (2, wrong, False)
    (recovery,) = run.summary["recoveries"]
    assert recovery["cause_kinds"] == ["divergence"] and recovery["nodes_after"] == 2


@pytest.mark.chaos
def test_a_flipped_bit_and_then_a_lost_node(tmp_path: Path) -> None:
    """The parameters are those of the run without both."""
    kill = faults("kill node=0 step=3 microbatch=2")
    flags = exact("--nnodes", "3", "--pipelines", "3", *kill)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", "1"])
    check_same(run, reference(tmp_path))
    (found,) = run.summary["divergences"]
    assert (found["step"], found["wrong"]) == (1, [["node1", 1, 0]])
    assert run.summary["recoveries"][-1]["nodes_after"] == 2


@pytest.mark.chaos
@pytest.mark.parametrize("step", [2, LAST])
@pytest.mark.parametrize("where", ["microbatch=3", "phase=reduce"])
def test_a_flipped_bit_and_a_lost_node_in_one_step(tmp_path: Path, step: int, where: str) -> None:
    """A sound holder is lost before the comparison. The two others may have no evidence left, and
    the job ends; it never ends well with other parameters."""
    kill = faults(f"kill node=0 step={step} {where}")
    flags = exact("--nnodes", "3", "--pipelines", "3", *kill)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", str(step)])
    (found,) = run.summary["divergences"]
    if found["fatal"]:
        assert run.code == 3 and "layer 1 (TP rank 0): parameters differ" in found["reason"]
    else:
        check_same(run, reference(tmp_path))


@pytest.mark.parametrize(
    "late", [pytest.param((), id="before-the-commit"), pytest.param(("--late",), id="after-it")]
)
@pytest.mark.chaos
def test_a_bit_flips_in_the_last_step(tmp_path: Path, late: tuple[str, ...]) -> None:
    """The comparison after the last step finds a flip that the commit cannot see. Of three
    holders, the minority is loaded anew."""
    flags = exact("--nnodes", "3", "--pipelines", "3")
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", str(LAST), *late])
    check_same(run, reference(tmp_path))
    (found,) = run.summary["divergences"]
    assert found["step"] == LAST + len(late)
    assert (found["wrong"], found["fatal"]) == ([["node1", 1, 0]], False)


@pytest.mark.chaos
def test_a_seldom_comparison_finds_a_flip_at_the_end(tmp_path: Path) -> None:
    """Steps 0 and 4 are compared, and the end. By then both nodes have updated, so none is proven
    wrong, and the job ends with the values as evidence."""
    flags = exact("--nnodes", "2", "--pipelines", "2", *SELDOM)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", str(LAST)])
    assert run.code == 3, run.output
    (found,) = run.summary["divergences"]
    assert (found["step"], found["fatal"]) == (LAST + 1, True)
    text = "layer 1 (TP rank 0): parameters differ: node0 has "
    assert text in found["reason"] and text in run.output.splitlines()[-1]


@pytest.mark.chaos
def test_a_seldom_comparison_without_a_flip(tmp_path: Path) -> None:
    flags = exact("--nnodes", "2", "--pipelines", "2", *SELDOM)
    check_same(elastic_run(tmp_path / "run", flags, [JOB]), reference(tmp_path))


@pytest.mark.chaos
def test_a_seldom_comparison_of_three_holders_names_the_wrong_one(tmp_path: Path) -> None:
    """The flip is in step 1, the comparison in step 4. The minority is loaded anew; steps 1 to 3
    keep the gradients that it made."""
    flags = exact("--nnodes", "3", "--pipelines", "3", *SELDOM)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", "1"])
    assert run.code == 0, run.output
    (found,) = run.summary["divergences"]
    assert (found["step"], found["wrong"]) == (4, [["node1", 1, 0]])


@pytest.mark.chaos
def test_without_comparisons_a_flip_is_not_found(tmp_path: Path) -> None:
    flags = exact("--nnodes", "2", "--pipelines", "2", *NEVER)
    run = elastic_run(tmp_path / "run", flags, [JOB, "--flip", "node1", "2"])
    assert run.code == 0 and not run.summary["divergences"], run.output
    expected = reference(tmp_path).summary
    assert run.summary["params_sha256"] != expected["params_sha256"]


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["skip", "stop", "continue"])
def test_an_infinite_gradient(tmp_path: Path, action: str) -> None:
    flags = ["--accumulate", "fast", "--nnodes", "2", "--pipelines", "1", "--on-nonfinite", action]
    run = elastic_run(tmp_path / "run", flags, [JOB, *INF])
    summary = run.summary
    first = summary["nonfinite"][0]
    assert (first["step"], first["action"]) == (3, action), run.output
    assert "the gradient norm of step 3 is inf" in run.output or action == "stop"
    if action == "stop":
        assert run.code == 1 and summary["steps"] == 3, run.output
        assert "step 3: the gradient norm is inf" in summary["reason"]
        return
    assert run.code == 0 and len(summary["loss"]) == 6, run.output
    assert math.isinf(summary["grad_norm"][3])
    finite = [math.isfinite(value) for value in summary["loss"][4:]]
    if action == "skip":
        assert all(finite) and len(summary["nonfinite"]) == 1, "the parameters are well"
    else:
        assert not any(finite), "the update was made"


@pytest.mark.chaos
@pytest.mark.parametrize("backup", ["stream+snapshot", "stream+replay"])
def test_a_loss_scale_survives_a_lost_node(tmp_path: Path, backup: str) -> None:
    """The scale falls in the first steps, in which the gradients overflow, and rises again."""
    job = [JOB, "--half", "--steps", "24"]
    flags = exact("--nnodes", "3", "--pipelines", "1", "--backup", backup)
    kill = faults("kill node=1 step=20 microbatch=2")
    run = elastic_run(tmp_path / "run", [*flags, *kill], job)
    expected = made_once(tmp_path, exact("--nnodes", "1"), job)
    check_same(run, expected)
    skipped = [[one["step"] for one in each.summary["nonfinite"]] for each in (run, expected)]
    assert skipped[0] == skipped[1] and 2 < len(skipped[0]) < 20
    assert len(run.summary["recoveries"]) == 1


@pytest.mark.parametrize(
    ("backup", "kill"),
    [
        pytest.param(
            "stream+snapshot", "kill node=1 step=3 phase=optimizer", marks=pytest.mark.chaos
        ),
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
