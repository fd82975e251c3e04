"""Real faults of a node are classified with evidence and handled accordingly.

Hung workers are in `test_hang`, slow nodes in `test_slow`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic.core.health.diagnosis import HealthLimits
from elastic.planning.plan.plan import parse_plan
from tests.disks import small_disk
from tests.patience import LONG_S
from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.jobs import Job
from tests.scenarios.shared import SCRIPT, exact, faults, reference


def health(run: Run, node: str = "") -> list[dict[str, Any]]:
    return [e for e in run.events if e["kind"] == "health" and node in ("", e["node"])]


@pytest.mark.chaos
def test_a_slow_link_is_found_and_its_node_replaced(tmp_path: Path) -> None:
    """A link becomes six times slower, and a spare replaces its node at the end of a step.

    All links are slow enough that steps wait for them, also on a busy machine.
    """
    flags = [
        "--nnodes",
        "4",  # of which three layers leave one as a spare
        "--pipelines",
        "1",
        "--backup",
        "stream+snapshot",
        "--link",
        "bandwidth=30Mbit",
        "--quarantine",
        "600",  # longer than the run, however slow the machine
    ]
    slow = faults("slow-link node=1 step=15 factor=6")
    script = [*SCRIPT, "--layers", "1", "--num-microbatches", "3", "--steps", "30"]
    run = elastic_run(tmp_path / "run", exact(*flags, *slow), script)
    assert run.code == 0, run.output
    found = [e for e in health(run, "node1") if e["class"] == "link"][-1]
    assert found["action"] == "replace", found
    evidence = found["evidence"]
    assert evidence["factor"] >= 3 and evidence["peer"] in ("node0", "node2")
    assert (
        evidence["usual_bytes_per_s"] > 3 * evidence["bytes_per_s"]
        and evidence["steps_slower"] >= HealthLimits().slowed
    )
    assert not [e for e in run.events if e["kind"] == "lost"]
    (change,) = [r for r in run.summary["recoveries"] if "node1 is quarantined" in r["cause"]]
    assert change["planned"] and change["microbatches_lost"] == 0
    assert sorted(parse_plan(run.summary["plan"]).nodes()) == ["node0", "node2", "node3"]


def crash_loop(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings about node1, without those on its compute speed, because the machine may be busy."""
    found = [e for e in events if e["kind"] == "health" and e["node"] == "node1"]
    return [e for e in found if e["class"] in ("process", "host") and "slow" not in e["evidence"]]


@pytest.mark.chaos
def test_a_crash_looping_worker_puts_its_node_aside_and_it_comes_back(tmp_path: Path) -> None:
    """A worker that crashes again after two restarts puts its node into quarantine.

    The job continues without the node until the quarantine ends. Steps take seconds, so that enough
    of them remain after slow restarts; at the end they take no extra time.
    """
    hurry = tmp_path / "hurry"
    flags = ["run", "--standalone", "--nnodes", "1:2", "--quarantine", "8"]
    crashes = faults(*(f"kill-worker node=1 step={step}" for step in (2, 3, 4)))
    script = [
        "-m",
        "tests.kubernetes.train",
        "--steps",
        "200",
        "--pace",
        "0.1",
        "--hurry",
        str(hurry),
    ]
    job = Job(tmp_path / "run", [*flags, *crashes], script)
    try:
        job.wait("the end of the quarantine", lambda: len(crash_loop(job.events)) >= 4, 4 * LONG_S)
        hurry.touch()
        run = job.finish()
    finally:
        job.kill()
    assert run.code == 0, run.output
    found = crash_loop(run.events)
    actions = [(e["class"], e["action"]) for e in found]
    assert actions[:3] == [
        ("process", "restart"),
        ("process", "restart"),
        ("host", "quarantine"),
    ], found
    assert "signal 9" in found[0]["evidence"]["cause"]
    assert found[2]["evidence"]["crashes"] == 3 and found[2]["evidence"]["quarantine_s"] == 8.0
    assert actions[3] == ("host", "none") and "may be used again" in found[3]["reason"]
    put, out = found[2]["at"], found[3]["at"]
    assert out - put >= 7.9  # events are written a moment after what they tell
    between = [e for e in run.events if e["kind"] == "plan" and put < e["at"] < out]
    assert between and all("node1" not in parse_plan(e["text"]).nodes() for e in between)
    assert {
        e["node"] for e in health(run) if e["class"] == "process" or "crashes" in e["evidence"]
    } == {"node1"}
    assert run.summary["ledger"] == proved(run.summary)


def test_a_full_disk_is_told_of_and_training_goes_on(tmp_path: Path) -> None:
    """The disk refuses every checkpoint. All steps are trained, but the job does not succeed
    without its last checkpoint."""
    disk = tmp_path / "disk"
    with small_disk(disk, "256k"):
        flags = ["--nnodes", "2", "--pipelines", "1", "--checkpoint-dir", str(disk)]
        run = elastic_run(tmp_path / "run", exact(*flags), [*SCRIPT, "--checkpoint-every", "2"])
    assert run.code == 1, run.output
    assert run.summary["params_sha256"] == reference(tmp_path).summary["params_sha256"]
    assert run.summary["checkpoints"] == []
    assert "the checkpoint of the last step could not be written" in run.summary["reason"]
    assert "No space left" in run.output.splitlines()[-1], run.output
    found = [e for e in health(run) if e["action"] == "none"]
    assert {e["class"] for e in found} == {"storage"}, found
    told = [e for e in found if "error" in e["evidence"]]
    assert told, found
    for event in told:
        assert (
            event["evidence"]["path"] == str(disk) and "No space left" in event["evidence"]["error"]
        )
        assert (
            0 <= event["evidence"]["free_bytes"] <= 256 << 10
            and "training goes on" in event["reason"]
        )


@pytest.mark.chaos
def test_a_node_without_room_is_refused_and_joins_when_there_is_some(tmp_path: Path) -> None:
    """With strict pre-flight checks, a node without disk space for checkpoints joins once it has
    space."""
    disk = tmp_path / "disk"
    with small_disk(disk, "1m"):
        script = [*SCRIPT, "--steps", "2"]
        flags = ["--nnodes", "1", "--checkpoint-dir", str(disk), "--preflight", "strict"]
        events = tmp_path / "run" / "events.jsonl"
        grow = (
            f"until grep -qs bytes.left {events}; do sleep 0.05; done; "
            f"mount -o remount,size=64m {disk}"
        )
        helper = subprocess.Popen(["sh", "-c", grow])
        try:
            run = elastic_run(tmp_path / "run", flags, script)
        finally:
            helper.kill()
            helper.wait()
    assert run.code == 0, run.output
    first, *_, last = [e for e in run.events if e["kind"] == "preflight"]
    assert not first["ok"] and "bytes left" in first["reason"] and first["retry_s"] == 5.0
    assert last["ok"] and last["figures"]["disk:checkpoints"] > 16 << 20
    (joined,) = [e for e in run.events if e["kind"] == "joined"]
    assert joined["at"] - first["at"] >= 4.9
