"""Nodes whose memory and TMPDIR are really full, or whose vault can create no files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.scenarios.harness import ROOT, Run, proved
from tests.scenarios.paced import paced_reference
from tests.scenarios.shared import exact, faults, made_once
from tests.scenarios.storage.machines import Machines, missing
from tests.scenarios.storage.progress import check_epochs, check_progress

SMALL_JOB = (str(ROOT / "tests/scenarios/faults/small_job.py"),)
STEADY = ("--pipelines", "1", "--backup", "stream+snapshot", "--lease", "30")


@pytest.fixture(scope="module", autouse=True)
def mounts() -> None:
    """Skip the tests if this machine cannot mount file systems."""
    if why := missing():
        pytest.skip(why)


def small_reference(directory: Path) -> Run:
    return made_once(directory, exact("--nnodes", "1"), SMALL_JOB)


def check_end(run: Run, expected: Run) -> None:
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == expected.summary["params_sha256"]
    assert run.summary["ledger"] == proved(run.summary)
    check_epochs(run.events)


def test_a_keeper_that_can_create_no_files(tmp_path: Path) -> None:
    """The vault of node1 is broken before it stores anything. Training continues without copies
    of node0, also after a recovery, and the user is warned."""
    crash = faults("kill-worker node=1 step=3 microbatch=2")
    with Machines(tmp_path, 2, *STEADY, *crash, script=SMALL_JOB, late=["node0"]) as job:
        job.head.wait("the vault", lambda: job.head.of("joined"))
        job.refuse_slots("node1")
        job.start("node0")
        run = job.finish()
    check_end(run, small_reference(tmp_path))
    notes = [event for event in run.events if event["kind"] == "keeper-failed"]
    assert {(event["owner"], event["keeper"]) for event in notes} == {("node0", "node1")}
    assert "Operation not permitted" in notes[0]["detail"]
    assert "node1" in run.output and "Operation not permitted" in run.output
    causes = [recovery["cause"] for recovery in run.summary["recoveries"]]
    assert any("signal 9" in cause for cause in causes), "a change of keepers may come first"


@pytest.mark.chaos
def test_memory_and_disk_are_full_when_a_node_is_lost(tmp_path: Path) -> None:
    """The next plan needs new slots on node1, which cannot have them."""
    with Machines(tmp_path, 3, *STEADY) as job:
        job.head.await_steps(2)
        job.fill("node1")
        job.head.await_steps(1)
        lost = time.time()
        job.lose("node2")
        job.head.wait("the next epoch", lambda: "VaultFull" in job.head.output)
        job.head.await_steps(1)
        run = job.finish()
    check_end(run, paced_reference(tmp_path))
    check_progress(run.events, lost)
    assert "node1: VaultFull: no room for a copy" in run.output
    assert "No space left on device" in run.output


@pytest.mark.chaos
def test_a_node_without_room_for_any_copy(tmp_path: Path) -> None:
    """Without the pre-flight it takes part, until it is to make its first copy."""
    flags = (*STEADY, "--preflight", "off")
    with Machines(tmp_path, 3, *flags, script=SMALL_JOB, tiny=["node1"]) as job:
        run = job.finish()
    check_end(run, small_reference(tmp_path))
    assert "node1: VaultFull: no room for a copy" in run.output


@pytest.mark.chaos
def test_all_nodes_are_full_when_one_is_lost(tmp_path: Path) -> None:
    """It continues, with few copies or none, or ends with the cause."""
    with Machines(tmp_path, 3, *STEADY) as job:
        job.head.await_steps(2)
        for node in job.names:
            job.fill(node)
        job.lose("node2")
        job.head.wait("the next epoch", lambda: "VaultFull" in job.head.output)
        run = job.finish()
    check_epochs(run.events)
    if run.code != 0:
        assert "No space left on device" in run.summary["reason"], run.output
    else:
        check_end(run, paced_reference(tmp_path))
