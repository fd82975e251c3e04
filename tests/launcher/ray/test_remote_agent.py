"""One remote agent without a cluster: real processes, with a stand-in for the agent."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic import metrics
from elastic.config import JobConfig, WorkerCommand, load_config
from elastic.domain import codec
from elastic.domain.errors import UsageError
from elastic.launcher.ray import remote_agent
from elastic.launcher.ray.remote_agent import AgentHost, AgentSpec
from elastic.launcher.run.rundir import locked, remove_stale
from tests.launcher.helpers import gone, wait_until
from tests.patience import LONG_S

AGENT = "tests.launcher.ray.stand_in_remote_agent"


@pytest.fixture
def coordinator() -> Iterator[str]:
    """Address of a listening socket."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def spec(tmp_path: Path, coordinator: str, monkeypatch: pytest.MonkeyPatch) -> AgentSpec:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "machine"))
    (tmp_path / "machine").mkdir()
    monkeypatch.setattr(remote_agent, "AGENT", AGENT)
    monkeypatch.setattr(remote_agent, "end_with", lambda pid: None)
    monkeypatch.chdir(tmp_path)
    config = JobConfig(
        job_id=f"hosted-{os.getpid()}",
        run_dir=str(tmp_path / "elsewhere"),
        memory_dir="/nonexistent",
        checkpoint_dir=str(tmp_path / "checkpoints"),
        command=WorkerCommand(script="script.py"),
    )
    return AgentSpec(
        config=config, node="node1", coordinator=coordinator, host="127.0.0.1", domain="rack7"
    )


def serving(host: AgentHost) -> tuple[threading.Thread, list[tuple[int, str]]]:
    ends: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: ends.append(host.serve()), daemon=True)
    thread.start()
    return thread, ends


def logs_of(host: AgentHost) -> dict[str, bytes]:
    return {name: data for name, _, data in host.logs({})}


def test_it_serves_and_its_logs_come_in_pieces(spec: AgentSpec, tmp_path: Path) -> None:
    spec = replace(spec, working_dir=str(tmp_path), environment=(("HOSTED_WORD", "carried"),))
    host = AgentHost(codec.dumps(spec), {"join.token": b"hidden", "certs/tls.key": b"also"})
    assert host.logs({}) == []
    thread, ends = serving(host)
    assert wait_until(lambda: b"ready" in logs_of(host).get("node1.out", b""))
    text = logs_of(host)["node1.out"].decode()
    assert (
        "--node node1" in text
        and "--domain rack7" in text
        and "carried" in text
        and f"in {tmp_path}" in text
    )
    assert "hidden" not in text, "secrets stand on no command line"
    (secret,) = (tmp_path / "machine").rglob("join.token")
    assert secret.read_bytes() == b"hidden" and secret.stat().st_mode & 0o777 == 0o600
    offsets = {name: len(data) for name, data in logs_of(host).items()}
    assert host.logs(offsets) == []
    host.stop()
    thread.join(LONG_S)
    assert ends == [(-signal.SIGTERM, "")]
    run_dir = secret.parent
    assert (run_dir / "certs" / "tls.key").read_bytes() == b"also"
    assert run_dir.exists()
    host.close()
    assert not run_dir.exists()


@pytest.mark.parametrize("shown", ["127.0.0.1", "0.0.0.0"])
def test_metrics_are_served_on_its_own_machine(spec: AgentSpec, shown: str, tmp_path: Path) -> None:
    """The port is any free one if its own is taken; its address is fetched like a log."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1
        config = spec.config.of(metrics_port=port, metrics_host=shown)
        host = AgentHost(codec.dumps(replace(spec, config=config, host="localhost")))
        _, ends = serving(host)
        assert wait_until(lambda: b"ready" in logs_of(host).get("node1.out", b"")), ends
        assert b"--metrics-port 0 " in logs_of(host)["node1.out"]
    (own,) = (tmp_path / "machine").rglob("config.json")
    assert load_config(own.parent).metrics_host == ("localhost" if shown == "0.0.0.0" else shown)
    metrics.write_discovery(metrics.discovery(own.parent, "node1"), b"[]")
    assert host.logs({})[0] == ("metrics/node1.json", 0, b"[]")
    host.close()


def test_a_killed_agent_ends_with_its_signal(spec: AgentSpec) -> None:
    host = AgentHost(codec.dumps(spec))
    thread, ends = serving(host)
    assert wait_until(lambda: b"ready" in logs_of(host).get("node1.out", b""))
    host.stop(kill=True)
    thread.join(LONG_S)
    assert ends[0][0] == -signal.SIGKILL
    host.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "0.0.1"}, "install the same version"),
        ({"coordinator": "127.0.0.1:1"}, "cannot reach the coordinator at 127.0.0.1:1"),
    ],
)
def test_problems_are_reported_before_anything_starts(
    spec: AgentSpec,
    change: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(remote_agent, "CONNECT_TIMEOUT_S", 0.2)
    code, problem = AgentHost(codec.dumps(replace(spec, **change))).serve()
    assert code == 2 and why in problem
    assert list((tmp_path / "machine").iterdir()) == []


def test_malformed_specifications_are_refused() -> None:
    code, problem = AgentHost('{"node": "node1"}').serve()
    assert code == 2 and "config" in problem


@pytest.mark.parametrize(
    "name", ["../elsewhere", "..", "a/b/c", "", "/etc/x", "a/..", "config.json", ".hidden"]
)
def test_secrets_stay_in_the_run_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageError, match="no name of a secret"):
        remote_agent.write_secret(tmp_path, name, b"x")


def test_a_directory_that_others_can_write_is_not_used(spec: AgentSpec, tmp_path: Path) -> None:
    """Another user could place a configuration there."""
    root = tmp_path / "machine" / f"elastic-hosted-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    code, why = AgentHost(codec.dumps(spec)).serve()
    assert code == 2 and "open to other users" in why
    assert not list(root.iterdir())


def test_leftovers_of_killed_hosts_are_removed(tmp_path: Path) -> None:
    held, left, young = (tmp_path / name for name in ("held", "left", "young"))
    for folder in (held, left, young):
        folder.mkdir()
        (folder / "launcher.lock").touch()
    for folder in (held, left):
        os.utime(folder / "launcher.lock", (0, 0))
    lock = locked(held / "launcher.lock")
    remove_stale(tmp_path.glob("*/"), "launcher.lock", remote_agent.NEW_LOCK_S)
    assert held.exists() and young.exists() and not left.exists()
    assert lock is not None
    os.close(lock)


def test_cleaning_up_takes_no_lock_that_is_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner removes the lock file, or makes a new one, between opening and locking."""
    path = tmp_path / ".lock"
    with pytest.raises(FileNotFoundError):
        locked(path, create=False)
    assert not path.exists(), "its owner could not remove the directory"
    flock = fcntl.flock
    for again in (False, True):
        path.touch()

        def late(descriptor: int, how: int, again: bool = again) -> None:
            path.unlink()
            if again:
                path.touch()
            flock(descriptor, how)

        with monkeypatch.context() as patch:
            patch.setattr("fcntl.flock", late)
            assert locked(path, create=False) is None
    lock = locked(path, create=False)
    assert lock is not None
    os.close(lock)


def test_a_process_ends_with_its_parent() -> None:
    sleep = "import time; time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", sleep])
    imports = "from elastic.launcher.ray.remote_agent import end_with"
    code = f"{imports}; end_with({parent.pid}); print(1, flush=True); {sleep}"
    tied = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert tied.stdout is not None and tied.stdout.readline() == b"1\n"
        assert not gone(tied.pid)
        parent.kill()
        parent.wait()
        assert tied.wait(LONG_S) == remote_agent.EXIT_PARENT_LOST
    finally:
        for process in (parent, tied):
            process.kill()
            process.wait()
