"""Pipelines that lost nothing go on while a damaged one is repaired, and no bit changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.shared import exact, faults, made_once, script

STEP = 3
KILL = f"kill node=3 step={STEP} microbatch=6"
"""node3 is the last stage of the second of two pipelines, with micro-batches 4 to 7."""


@dataclass(frozen=True)
class Case:
    name: str
    faults: tuple[str, ...]
    nodes: str = "4"
    pipelines: str = "2"
    flags: tuple[str, ...] = ()
    """Flags of `elastic run`, also for the failure-free run."""
    job: tuple[str, ...] = ()
    small: bool = False


def at(node: int, **when: object) -> str:
    words = " ".join(f"{key}={value}" for key, value in when.items())
    return f"kill node={node} step={STEP} {words}"


CASES = (
    Case("a-node", (KILL,), small=True),
    Case("a-worker", ("kill-worker node=3 step=3 microbatch=6",)),
    Case("forward", (at(3, phase="forward", microbatch=5),)),
    Case("reduction", (at(3, phase="reduce"),)),
    Case("update", (at(3, phase="optimizer"),)),
    Case("first-step", ("kill node=3 step=0 microbatch=6",)),
    Case("two-pipelines-at-once", (at(1, microbatch=1), at(3, microbatch=4)), "6", "3"),
    Case("second-inside", (KILL, at(2, phase="recovery"))),
    Case("second-outside", (at(3, microbatch=4), at(0, microbatch=3))),
    Case("second-in-the-next-step", (KILL, "kill node=1 step=4 microbatch=2")),
    Case("coordinator-too", (KILL, f"kill-coordinator step={STEP} phase=recovery down=1")),
    Case("a-newcomer", (KILL, f"join step={STEP}", f"join step={STEP + 1}")),
    Case("a-leaving-node", (KILL, f"drain node=0 step={STEP} deadline=60")),
    Case("spare", (KILL,), "5", "2+2"),
    Case("single-nodes", (at(2, microbatch=6),), "3", "3"),
    Case("snapshot", (KILL,), flags=("--backup", "stream+snapshot")),
    Case("log", (KILL,), flags=("--backup", "log+snapshot")),
    Case("recompute", (KILL,), flags=("--backup", "recompute+replica")),
    Case("sharded", (KILL,), flags=("--backup", "stream+snapshot/sharded")),
    Case("interleaved", (KILL,), flags=("--schedule", "interleaved")),
    Case("zero-bubble", (KILL,), flags=("--schedule", "zero-bubble")),
    Case(
        "tensor-parallel", (KILL,), flags=("--nproc-per-node", "2"), job=("--tp", "2")
    ),
    Case("evaluation", (KILL,), job=("--evaluate-every", "1")),
)  # fmt: skip


def begun(run: Run) -> list[dict[str, Any]]:
    """Return the events of changes after faults."""
    halts = [event for event in run.events if event["kind"] == "halt"]
    return [event for event in halts if event["cause_kind"] != "start"]


def carry_out(case: Case, tmp_path: Path) -> Run:
    """Run a case, and compare it with the failure-free run on one node."""
    job = script("--steps", "7", "--num-microbatches", "8", *case.job)
    shape = ["--nnodes", case.nodes, "--pipelines", case.pipelines]
    run = elastic_run(tmp_path / "run", [*shape, *exact(*case.flags), *faults(*case.faults)], job)
    assert run.code == 0, run.output
    ours = case.flags if "--nproc-per-node" in case.flags else ()
    expected = made_once(tmp_path, ["--nnodes", "1", *exact(*ours)], job).summary
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"]
    assert summary["ledger"] == proved(summary)
    return run


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.small else [pytest.mark.chaos]) for c in CASES],
)
def test_no_bit_changes(case: Case, tmp_path: Path) -> None:
    run = carry_out(case, tmp_path)
    assert run.summary["recoveries"]
    if case.small:
        (change,) = begun(run)
        assert change["outside"] == ["node0", "node1"], run.output
        (plan,) = (event for event in run.events if event["kind"] == "plan" and event["epoch"] > 1)
        assert plan["promised"] == [[0, [0, 1, 2, 3]]] and plan["step"] == STEP
        assert {4, 5, 6, 7} >= {index for part in plan["todo"] for index in part}
