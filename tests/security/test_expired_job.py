"""A running job whose certificates end: the cause is named, and renewed files heal it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from elastic.launcher.flags.certs import make_certificates
from tests.scenarios.harness import ROOT
from tests.scenarios.jobs import Job
from tests.scenarios.paced import paced, paced_reference
from tests.scenarios.shared import exact

EXPIRED = "this side's tls.crt (CN=localhost) expired"


@pytest.mark.parametrize("pause_s", [10, pytest.param(60, marks=pytest.mark.chaos)])
def test_a_loss_after_the_certificates_have_ended(tmp_path: Path, pause_s: float) -> None:
    """Open connections go on. The recovery needs new ones, which fail until the files are new.

    They are renewed when the pause between two attempts has grown to `pause_s`.
    """
    root, hurry = tmp_path / "authority", tmp_path / "hurry"
    make_certificates(root, [["localhost"]])
    flags = exact("--nnodes", "3", "--pipelines", "1", "--certs", str(root / "localhost"))
    with closing(
        Ending(Job(tmp_path / "run", ["run", "--standalone", *flags], paced(hurry)))
    ) as it:
        job = it.job
        job.await_steps(2)
        make_certificates(root, [["localhost"]], days=-1)
        job.wait("warning", lambda: job.of("certificate"))
        job.agent("node1").kill()
        cause = job.wait("cause", lambda: failed_handshakes(job))[0]
        assert "vault of node" in cause and EXPIRED in cause
        job.wait("pause", lambda: [e for e in job.of("retry") if e["pause_s"] >= pause_s])
        job.wait("last line", lambda: is_retry(job.output.splitlines()[-1]))
        assert EXPIRED in elastic_status(job), "it cannot connect either"
        trained = max(job.steps())
        make_certificates(root, [["localhost"]])
        status = elastic_status(job)
        assert re.search(rf"^stalled: .*{re.escape(EXPIRED)}", status, re.M) or job.steps(trained)
        check_attempts(job)
        job.await_steps(1)
        hurry.touch()
        run = job.finish()
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert any("expired" in recovery["cause"] for recovery in run.summary["recoveries"])
    assert "warning: tls.crt of node" in run.output and "begins: node" in run.output


def check_attempts(job: Job) -> None:
    """Since the last finished step, at most five epochs failed in any minute."""
    times = [event["at"] for event in job.of("halt") if EXPIRED in event["cause"]]
    most = max(sum(0 <= other - one < 60 for other in times) for one in times)
    assert len(times) >= 4 and most <= 5, times


def is_retry(line: str) -> bool:
    """Return whether a line of the output tells of failed attempts and of the cause."""
    return "next attempt" in line and EXPIRED in line


def elastic_status(job: Job) -> str:
    """Output of `elastic status`."""
    words = [sys.executable, "-m", "elastic", "status", "--run-dir", str(job.run_dir)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def failed_handshakes(job: Job) -> list[str]:
    """Causes of epochs in which a worker could not connect to a vault."""
    causes = [str(event["cause"]) for event in job.of("halt")]
    return [
        cause for cause in causes if "VaultUnreachable" in cause and "TLS handshake failed" in cause
    ]


class Ending:
    """Kills the job at the end of a block."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def close(self) -> None:
        self.job.kill()
