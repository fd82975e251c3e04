"""Agents of other versions are refused before they join; the job does not notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic.core.protocol.version import PROTOCOL
from elastic.domain.errors import EXIT_INCOMPATIBLE
from tests.patience import LONG_S
from tests.scenarios.harness import ROOT
from tests.scenarios.jobs import Job
from tests.scenarios.paced import paced

OTHER_AGENT = """
import sys
from elastic.core.protocol import version
version.PROTOCOL += int(sys.argv.pop(1))
from elastic.agent.service import main
sys.exit(main(sys.argv[1:]))
"""


AHEAD, BEHIND = "node9", "node8"


def agent(job: Job, node: str, later: int) -> subprocess.Popen[str]:
    """Start the agent of a node that is `later` versions ahead."""
    words = [str(later), "--run-dir", str(job.run_dir), "--node", node]
    words += ["--coordinator", job.leader()["address"]]
    return subprocess.Popen(
        [sys.executable, "-c", OTHER_AGENT, *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.chaos
def test_agents_two_versions_away_are_refused_with_both_versions(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    flags = ["run", "--standalone", "--nnodes", "2:3"]
    job = Job(tmp_path / "run", flags, paced(hurry))
    numbers = {AHEAD: PROTOCOL + 2, BEHIND: PROTOCOL - 2}
    agents: dict[str, subprocess.Popen[str]] = {}
    try:
        job.await_steps(1)
        agents |= {node: agent(job, node, number - PROTOCOL) for node, number in numbers.items()}
        told = {node: one.communicate(timeout=LONG_S)[1] for node, one in agents.items()}
        job.wait("a refusal, of which few are logged", lambda: refusals(job))
        job.await_steps(1)
        hurry.touch()
        run = job.finish()
    finally:
        for one in agents.values():
            one.kill()
        job.kill()
    for node, number in numbers.items():
        assert agents[node].returncode == EXIT_INCOMPATIBLE, told[node]
        theirs = f"with protocol {number}" if number else "that announces no protocol"
        for text in (told[node], *filter(None, [refusals(job).get(node)])):
            assert node in text and "install the same version of elastic" in text
            assert f"with protocol {PROTOCOL}" in text and theirs in text
    assert run.code == 0, run.output
    assert "warning: coordinator refused" in run.output
    joined = {event.get("node") for event in run.events if event["kind"] == "joined"}
    assert not joined & numbers.keys()
    assert run.summary["recoveries"] == []


def refusals(job: Job) -> dict[str, str]:
    """Detail of the coordinator's refusals because of the version, by node."""
    found = [event["detail"] for event in job.of("refused") if event["reason"] == "version"]
    return {node: text for node in (AHEAD, BEHIND) for text in found if node in text}
