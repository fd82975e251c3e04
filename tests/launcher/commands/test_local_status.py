"""`elastic status --run-dir` while no coordinator answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.wait_record import WaitRecord
from elastic.coordinator.records.run_records import write_waiting
from elastic.coordinator.waiting import standby_wait
from elastic.domain.errors import UsageError
from elastic.launcher import cli
from elastic.launcher.commands.queries import local_wait
from elastic.launcher.run.rundir import free_port, locked
from elastic.store.interface import Conflict, StoreUnavailable
from tests.coordinator.helpers import three_nodes
from tests.launcher.helpers import wait_until


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory; its launcher runs if the test requests `launcher`."""
    path = tmp_path / "run"
    path.mkdir()
    three_nodes(path, coordinator=f"127.0.0.1:{free_port()}").save()
    return path


@pytest.fixture
def launcher(run_dir: Path) -> Iterator[int]:
    descriptor = locked(run_dir / "launcher.lock")
    assert descriptor is not None
    (run_dir / "launcher.lock").write_text(f"{os.getpid()}\n")
    yield descriptor
    os.close(descriptor)


def run_status(run_dir: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = cli.main(["status", "--run-dir", str(run_dir), *more])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_store_that_a_coordinator_awaits_is_told(
    run_dir: Path, launcher: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = StoreUnavailable("no etcd answers at etcd://127.0.0.1:1: connection refused")
    write_waiting(run_dir / "standby-0.json", standby_wait(error, time.time() - 90.0))
    code, printed = run_status(run_dir, capsys)
    assert code == 0 and printed.startswith("phase: waiting\n")
    assert "the store: no etcd answers at etcd://127.0.0.1:1: connection refused" in printed
    assert "90 s" in printed and "a coordinator then leads" in printed
    code, printed = run_status(run_dir, capsys, "--json")
    assert code == 0 and json.loads(printed)["waiting"]["seconds"] >= 90.0


def test_the_coordinator_that_a_node_awaits_is_told(
    run_dir: Path, launcher: int, capsys: pytest.CaptureFixture[str]
) -> None:
    record = WaitRecord(str(run_dir), "node0")
    record.begin("a coordinator at h:1 to answer node0: refused", time.time() - 40.0, "it ends")
    assert wait_until(lambda: local_wait(run_dir) is not None)
    code, printed = run_status(run_dir, capsys)
    assert code == 0 and "40 s: a coordinator at h:1 to answer node0: refused; it ends" in printed

    def ended() -> bool:
        record.end()
        return local_wait(run_dir) is None

    assert wait_until(ended)
    code, printed = run_status(run_dir, capsys)
    assert code == 2 and "no coordinator answers at 127.0.0.1:" in printed


def test_a_standby_waits_for_nothing_that_matters(
    run_dir: Path, launcher: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another coordinator leads, and may be out of reach from here."""
    write_waiting(run_dir / "standby-0.json", standby_wait(Conflict("held"), time.time() - 90.0))
    code, printed = run_status(run_dir, capsys)
    assert code == 2 and "no coordinator answers" in printed


def test_a_wait_during_the_training_tells_the_step(run_dir: Path, launcher: int) -> None:
    line = {"kind": "progress", "step": 7, "steps": 30, "epoch": 2}
    (run_dir / "progress.jsonl").write_text(json.dumps(line) + "\n")
    error = StoreUnavailable("away")
    write_waiting(run_dir / "standby-0.json", standby_wait(error, time.time()))
    found = local_wait(run_dir)
    assert found is not None and (found["step"], found["steps"], found["epoch"]) == (7, 30, 2)


def test_another_job_at_the_address_of_an_agent_that_has_ended_is_not_asked(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = run_status(run_dir, capsys)
    assert code == 2 and "no coordinator has led there yet" in printed


def test_a_wait_of_processes_that_have_ended_is_not_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_waiting(
        run_dir / "standby-0.json", standby_wait(StoreUnavailable("away"), time.time() - 90.0)
    )
    code, printed = run_status(run_dir, capsys)
    assert code == 2 and "no coordinator has led there yet" in printed


def test_a_directory_that_gives_no_address_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "coordinator.json").write_text("{")
    (tmp_path / "file").write_text("")
    for name, why in (
        ("missing", "there is no such directory"),
        ("file", "there is no such directory"),
        ("empty", "no coordinator has led there yet"),
        ("damaged", "its coordinator.json is damaged"),
    ):
        code, printed = run_status(tmp_path / name, capsys)
        assert code == UsageError("").exit_code
        assert f"{why}; give the directory of a run, or --rdzv-endpoint" in printed
