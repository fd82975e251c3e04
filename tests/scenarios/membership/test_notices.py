"""Real jobs with preemption notices: each node drains before its deadline, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from tests.agent.notices.providers import FakeAws, FakeAzure, FakeGcp
from tests.scenarios.harness import ROOT, Run, assert_checkpoints, proved
from tests.scenarios.paced import paced, paced_reference
from tests.scenarios.shared import exact

DEADLINE_S = 200.0


class Job:
    """A running `elastic run` and its event log."""

    def __init__(
        self, run_dir: Path, command: list[str], environ: dict[str, str], output: Path
    ) -> None:
        self.run_dir, self._output, self._command = run_dir, output, command
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic", *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for an event that meets the condition; return the first one."""
        end = time.monotonic() + DEADLINE_S
        while True:
            for event in self.events:
                if what(event):
                    return event
            assert self.process.poll() is None and time.monotonic() < end, self._output.read_text()
            time.sleep(0.05)

    def wait(self) -> Run:
        """Wait for the end. If the job succeeded, every due checkpoint must be whole."""
        code = self.process.wait(DEADLINE_S)
        run = Run(code, self._output.read_text(errors="replace"), self.run_dir)
        if code == 0:
            assert_checkpoints(run, self._command, self._command)
        return run


@contextmanager
def running(run_dir: Path, command: list[str], environ: dict[str, str]) -> Iterator[Job]:
    job = Job(run_dir, command, environ, run_dir.with_suffix(".out"))
    try:
        yield job
    finally:
        job.process.kill()
        job.process.wait()


def is_step(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "step" and event["step"] >= number


def is_drained(node: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "drained" and event["node"] == node


def kinds(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == kind]


def assert_nothing_was_lost(run: Run, drained: list[str]) -> None:
    """Check that these nodes left in this order before their deadlines, and that nothing else was
    lost."""
    assert run.code == 0, run.output
    end = kinds(run, "end")[0]["at"]
    assert [event["node"] for event in kinds(run, "drained")] == drained
    assert [event for event in kinds(run, "lost") if event["at"] < end] == []
    for event in kinds(run, "drained"):
        notice = next(e for e in kinds(run, "notice") if e["node"] == event["node"])
        assert event["at"] < notice["at"] + notice["deadline_s"], (notice, event)
    recoveries = run.summary["recoveries"]
    assert recoveries
    assert all(one["planned"] and one["microbatches_lost"] == 0 for one in recoveries), recoveries
    assert run.summary["ledger"] == proved(run.summary)


@pytest.mark.chaos  # tests/agent/notices has each cloud, and hosts that leave in four ways
def test_every_cloud_in_one_job(tmp_path: Path) -> None:
    """AWS, GCP and Azure each take a node away. Azure then cancels, and its node rejoins."""
    aws, gcp, azure = FakeAws(uses=3), FakeGcp(), FakeAzure()
    environ = {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{aws.address}/${{node}}",
        "GCE_METADATA_HOST": f"{gcp.address}/${{node}}",
        "ELASTIC_AZURE_METADATA_SERVICE": f"http://{azure.address}/${{node}}",
        "http_proxy": "http://127.0.0.1:1",  # never used for metadata
    }
    flags = [
        "--standalone",
        "--nnodes",
        "1:4",
        "--pipelines",
        "1",
        "--lease",
        "30",
        "--notice",
        "aws,gcp,azure",
    ]
    command = [
        "run",
        *exact(*flags),
        "--run-dir",
        str(tmp_path / "run"),
        *paced(tmp_path / "hurry"),
    ]
    try:
        with running(tmp_path / "run", command, environ) as job:
            job.wait_for(is_step(1))
            soon = datetime.now(UTC) + timedelta(seconds=120)
            action = {"action": "terminate", "time": soon.strftime("%Y-%m-%dT%H:%M:%SZ")}
            aws.set("node0", FakeAws.ACTION, action)
            job.wait_for(is_drained("node0"))
            gcp.set("node1", FakeGcp.PREEMPTED, "TRUE")
            job.wait_for(is_drained("node1"))
            soon = datetime.now(UTC) + timedelta(seconds=90)
            azure.schedule("e-1", "Preempt", "node2", not_before=format_datetime(soon, usegmt=True))
            gone = job.wait_for(is_drained("node2"))
            assert azure.await_start("e-1", DEADLINE_S)  # by the drained node, after it has left
            azure.events = []  # a false notice
            job.wait_for(
                lambda e: e["kind"] == "joined" and e["node"] == "node2" and e["at"] > gone["at"]
            )
            (tmp_path / "hurry").touch()
            run = job.wait()
    finally:
        for provider in (aws, gcp, azure):
            provider.close()
    assert_nothing_was_lost(run, ["node0", "node1", "node2"])
    assert [(e["provider"], e["notice"]) for e in kinds(run, "notice")] == [
        (p, "leave") for p in ("aws", "gcp", "azure")
    ]
    assert azure.started == ["e-1"]
    assert run.summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
