"""Training on a loaded machine: nodes are slow, and the job must not act against any of them.

`make soak` runs it for half an hour (ELASTIC_SOAK_S).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elastic.telemetry import read_events
from tests.launcher.helpers import wait_until
from tests.scenarios.harness import LEASE_S, ROOT, Run
from tests.scenarios.health.test_hang import agent_log, loaded_machine
from tests.scenarios.shared import SCRIPT

SOAK_S = float(os.environ.get("ELASTIC_SOAK_S", "1800"))
HELD_S = 2.0
"""How long an agent is stopped, now and then."""


def agents_of(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return [p for p in found if "elastic.agent.service" in " ".join(p.cmdline())]


def hold_up_an_agent(pid: int) -> None:
    """Stop an agent for a while; messages of its workers stay unread in the meantime."""
    agent = agents_of(pid)[0]
    agent.suspend()
    time.sleep(HELD_S)
    agent.resume()


def soak(folder: Path, seconds: float, a_core: int, every_s: float) -> None:
    """Train beside `a_core` busy processes per core, and pause one agent at intervals."""
    script = [*SCRIPT, "--steps", "1000000", "--checkpoint-every", "50"]
    flags = ["--nnodes", "3", "--lease", LEASE_S, "--run-dir", str(folder / "run")]
    command = [sys.executable, "-m", "elastic", "run", "--standalone", *flags, *script]
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output
        )
        try:
            assert wait_until(lambda: steps(folder / "run") > 5, 240.0), (
                folder / "output"
            ).read_text()
            with loaded_machine(a_core):
                end = time.time() + seconds
                while time.time() < end:
                    with pytest.raises(subprocess.TimeoutExpired):
                        run.wait(max(0.1, min(every_s, end - time.time())))
                    hold_up_an_agent(run.pid)
                ended = time.time()
            run.send_signal(signal.SIGINT)
            run.wait(120)
        finally:
            run.kill()
    done = Run(run.returncode, (folder / "output").read_text(), folder / "run")
    during = [e for e in done.events if e["at"] < ended]
    halts = [e["cause"] for e in during if e["kind"] == "halt"]
    assert halts[0] == "start" and not [
        cause for cause in halts[1:] if not cause.startswith("backup")
    ], halts
    assert not [e for e in during if e["kind"] == "lost"]
    for node in range(3):
        assert not [
            line for line in agent_log(done, f"node{node}") if "killing the workers" in line
        ]
    acted = [e for e in done.events if e["kind"] == "health" and e["action"] != "none"]
    assert not acted, acted
    assert not [e for e in done.events if e["kind"] == "preflight" and not e["ok"]]


def steps(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    return sum(event["kind"] == "step" for event in read_events(path)) if path.exists() else 0


@pytest.mark.chaos
def test_nothing_is_done_about_anybody_on_a_loaded_machine(tmp_path: Path) -> None:
    soak(tmp_path, 8.0, 2, 4.0)


@pytest.mark.chaos
@pytest.mark.timeout(SOAK_S + 300)
def test_nothing_is_done_about_anybody_in_half_an_hour(tmp_path: Path) -> None:
    soak(tmp_path, SOAK_S, 4, 60.0)
