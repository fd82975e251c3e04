"""The launcher says what a job waits for while nothing else is printed."""

from __future__ import annotations

import json
from pathlib import Path

from elastic.launcher.run.wait_lines import FILE, LASTING_PAUSE_S, STANDBY, WaitLines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waits(run_dir: Path, name: str = FILE, **fields: object) -> None:
    (run_dir / name).write_text(json.dumps(fields))


def test_what_is_awaited_since_when_and_what_ends_it(tmp_path: Path) -> None:
    clock = Clock()
    lines = WaitLines(tmp_path, ["127.0.0.1:29500"], clock)
    clock.now += 4.0
    log = tmp_path / "logs" / "coordinator.log"
    first = f"waiting for 4 s: the coordinator at 127.0.0.1:29500 to start; its log is {log}"
    assert lines.line() == first
    waits(tmp_path, what="nodes: 1 of at least 2 are here (a)", since=97.0, ends="1 more joins")
    line = "waiting for 7 s: nodes: 1 of at least 2 are here (a); 1 more joins"
    assert lines.line() == line
    clock.now += 4.0
    assert lines.line() == line.replace("7 s", "11 s")


def test_a_state_that_may_last_is_told_rarely(tmp_path: Path) -> None:
    clock = Clock()
    lines = WaitLines(tmp_path, ["a:1"], clock)
    waits(tmp_path, what="the script", since=90.0, ends="it ends", lasting=True)
    assert lines.line() == "waiting for 10 s: the script; it ends"
    assert lines.line() == ""
    clock.now += LASTING_PAUSE_S
    assert lines.line() == "waiting for 70 s: the script; it ends"


def test_a_step_that_takes_long(tmp_path: Path) -> None:
    clock = Clock()
    lines = WaitLines(tmp_path, ["a:1"], clock)
    waits(tmp_path)
    lines.observe({"phase": "running", "step": 2, "steps": 9, "microbatch": 0, "loss": 2.5})
    clock.now += 4.0
    assert lines.line() == "step 3/9 runs for 4 s, micro-batch 1"
    lines.observe({"phase": "running", "step": 2, "steps": 9, "microbatch": 3})
    clock.now += 4.0
    assert lines.line() == "step 3/9 runs for 8 s, micro-batch 4"
    lines.observe({"phase": "finished", "step": 9, "steps": 9})
    assert lines.line() == ""


def test_a_coordinator_that_does_not_lead(tmp_path: Path) -> None:
    """Its run directory has no news of the job, or only those of the time when it led."""
    clock = Clock()
    lines = WaitLines(tmp_path, ["a:1"], clock)
    waits(tmp_path, STANDBY.format(0), what="the lead", since=90.0, ends="", lasting=True)
    assert lines.line() == "waiting for 10 s: the lead"
    waits(tmp_path)
    lines.observe({"phase": "running", "step": 2, "steps": 9, "loss": 2.5})
    assert lines.line() == "", "the step is not known to run still"
    waits(tmp_path, STANDBY.format(0))
    assert lines.line().startswith("step 3/9 runs")


def test_one_of_several_coordinators_of_a_run_directory_leads(tmp_path: Path) -> None:
    lines = WaitLines(tmp_path, ["a:1", "a:2"], Clock())
    waits(tmp_path, what="nodes", since=90.0, ends="")
    waits(tmp_path, STANDBY.format(1), what="the lead", since=90.0, ends="", lasting=True)
    assert lines.line() == "waiting for 10 s: nodes"
    waits(tmp_path, STANDBY.format(0), what="the store", since=95.0, ends="")
    assert lines.line() == "waiting for 5 s: the store"
