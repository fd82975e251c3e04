"""A running job whose certificates end: the cause is named, and renewed files heal it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from elastic.launcher.flags.certs import make_certificates
from tests.scenarios.jobs import Job
from tests.scenarios.paced import paced, paced_reference
from tests.scenarios.shared import exact


def test_a_loss_after_the_certificates_have_ended(tmp_path: Path) -> None:
    """Open connections go on. The recovery needs new ones, which fail until the files are new."""
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
        assert "vault of node" in cause and "this side's tls.crt (CN=localhost) expired" in cause
        make_certificates(root, [["localhost"]])
        job.await_steps(1)
        hurry.touch()
        run = job.finish()
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert any("expired" in recovery["cause"] for recovery in run.summary["recoveries"])
    assert "warning: tls.crt of node" in run.output and "begins: node" in run.output


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
