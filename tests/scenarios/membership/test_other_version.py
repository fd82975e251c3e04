"""An agent of another version is refused before it joins; the job does not notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic.core.protocol.version import PROTOCOL
from elastic.domain.errors import EXIT_INCOMPATIBLE
from tests.patience import LONG_S
from tests.scenarios.harness import ROOT
from tests.scenarios.jobs import Job
from tests.scenarios.paced import paced

TWO_VERSIONS_LATER = """
import sys
from elastic.core.protocol import version
version.PROTOCOL += 2
from elastic.agent.service import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_agent_two_versions_ahead_is_refused_with_both_versions(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    flags = ["run", "--standalone", "--nnodes", "2:3"]
    job = Job(tmp_path / "run", flags, paced(hurry))
    try:
        job.await_steps(1)
        words = ["--run-dir", str(job.run_dir), "--node", "node9"]
        words += ["--coordinator", job.leader()["address"]]
        done = subprocess.run(
            [sys.executable, "-c", TWO_VERSIONS_LATER, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        refused = job.wait("refusal", lambda: job.of("refused"))
        hurry.touch()
        run = job.finish()
    finally:
        job.kill()
    assert done.returncode == EXIT_INCOMPATIBLE, done.stderr
    for text in (done.stderr, refused[0]["detail"]):
        assert "node9" in text and "install the same version of elastic" in text
        assert f"with protocol {PROTOCOL}" in text and f"with protocol {PROTOCOL + 2}" in text
    assert refused[0]["reason"] == "version"
    assert run.code == 0, run.output
    assert "warning: coordinator refused" in run.output
    assert "node9" not in {event.get("node") for event in run.events if event["kind"] == "joined"}
    assert run.summary["recoveries"] == []
