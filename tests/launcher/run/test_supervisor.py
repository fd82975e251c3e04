"""The supervisor with stand-in services: ends, signals, restarts, faults and clean-up."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.launcher.flags.addresses import AddressState, address_state
from elastic.launcher.run import processes
from elastic.launcher.run.rundir import free_port
from tests.agent.vault.checkpoints import whole
from tests.launcher.helpers import gone, wait_until
from tests.patience import LONG_S
from tests.pipes import full_pipe

LAUNCHER = """
import os, sys
from dataclasses import replace
from elastic.command_line import read_flags
from elastic.launcher.run.supervisor import launch
from elastic.launcher.flags.request import request
from elastic.launcher.commands.run import run
from elastic.domain.errors import ElasticError
services = ("tests.launcher.run.stand_in_coordinator", "tests.launcher.run.stand_in_agent")
try:
    sys.exit(launch(replace(request(read_flags(run, None), os.environ), services=services)))
except ElasticError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Start]:
    """start(script arguments, flags...) starts a launcher with stand-ins in tmp_path/runs/a.
    `console`: descriptor of its output; None: a pipe for each stream."""
    (tmp_path / "script.py").write_text("")
    launchers: list[subprocess.Popen[str]] = []

    def begin(
        words: str,
        *flags: str,
        run: str = "runs/a",
        mode: tuple[str, ...] = ("--standalone", "--nnodes", "2"),
        console: int | None = None,
    ) -> subprocess.Popen[str]:
        given = [*mode, "--run-dir", run, "--shutdown-timeout", "0.3", *flags]
        streams = subprocess.PIPE if console is None else console
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *given, "script.py", *words.split()],
            cwd=tmp_path, env=environment, stdout=streams, stderr=streams, text=True,
        )  # fmt: skip
        launchers.append(launcher)
        return launcher

    yield begin
    for launcher in launchers:
        launcher.kill()
        launcher.communicate(timeout=LONG_S)


def agents(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (run_dir / "agents.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def up(run_dir: Path, count: int = 2) -> bool:
    return len(agents(run_dir)) >= count and (run_dir / "coordinator.json").exists()


def pids(run_dir: Path) -> list[int]:
    coordinator = json.loads((run_dir / "coordinator.json").read_text())["pid"]
    return [coordinator, *(pid for agent in agents(run_dir) for pid in agent["pids"])]


def memory(run_dir: Path) -> Path:
    return Path(json.loads((run_dir / "config.json").read_text())["memory_dir"])


@pytest.fixture(params=["pipe", "terminal"])
def unread(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(read, write) ends of a console that nobody reads, as in `elastic run | less`, after Ctrl-S,
    or on a dead ssh session."""
    read, write = os.pipe() if request.param == "pipe" else os.openpty()
    yield read, write
    os.close(read)


def full(descriptor: int) -> bool:
    """Return whether a write would wait for a reader."""
    return not select.select([], [descriptor], [], 0)[1]


def kill_coordinator(run_dir: Path) -> None:
    """Kill the coordinator, and wait for the next one."""
    before = pids(run_dir)[0]
    os.kill(before, signal.SIGKILL)
    assert wait_until(lambda: pids(run_dir)[0] != before)


def rest_of(read: int, write: int) -> str:
    """Close the write end of a console; return what the other end still has."""
    os.close(write)
    found = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(read, 1 << 16):
            found += data
    return found.decode()


@pytest.mark.parametrize(
    ("unread", "number", "code"),
    [
        ("pipe", signal.SIGTERM, 143),
        ("terminal", signal.SIGINT, 130),
        pytest.param("pipe", signal.SIGINT, 130, marks=pytest.mark.chaos),
        pytest.param("terminal", signal.SIGTERM, 143, marks=pytest.mark.chaos),
    ],
    indirect=["unread"],
)
def test_signals_end_a_launcher_whose_output_nobody_reads(
    start: Start, tmp_path: Path, unread: tuple[int, int], number: int, code: int
) -> None:
    launcher, run = start("serve loud", console=unread[1]), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run) and full(unread[1]))
    for _ in range(2):  # the second time comes after a line that could not be printed
        kill_coordinator(run)
    launcher.send_signal(number)
    assert launcher.wait(LONG_S) == code
    assert wait_until(lambda: all(gone(pid) for pid in pids(run))) and not memory(run).exists()
    assert "y\n" in rest_of(*unread).replace("\r", "")


def test_a_job_ends_while_nobody_reads_the_output(
    start: Start, tmp_path: Path, unread: tuple[int, int]
) -> None:
    launcher, run = start("finish=3 after=3 loud", console=unread[1]), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run) and full(unread[1]))
    for _ in range(2):
        kill_coordinator(run)
    assert launcher.wait(LONG_S) == 3
    assert wait_until(lambda: all(gone(pid) for pid in pids(run))) and not memory(run).exists()
    os.close(unread[1])


def test_lines_that_waited_are_printed_when_somebody_reads(start: Start, tmp_path: Path) -> None:
    read, write = full_pipe()
    launcher, run = start("finish=0 after=2", console=write), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    os.kill(pids(run)[0], signal.SIGKILL)
    assert wait_until(lambda: (run / "exit.json").exists())
    text = rest_of(read, write).lstrip(".")
    assert launcher.wait(LONG_S) == 0
    assert text.startswith("elastic: node0, node1; run directory ")
    assert "the coordinator ended (SIGKILL)" in text and text.endswith("acted out\n")
    os.close(read)


@pytest.mark.parametrize("code", [0, 3])
def test_ends_with_the_jobs_exit_code(start: Start, tmp_path: Path, code: int) -> None:
    launcher = start(f"finish={code}")
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == code
    assert "acted out" in err and "step 1/9: loss 2.5000, 2 nodes, plan 2" in err
    run = tmp_path / "runs" / "a"
    assert wait_until(lambda: all(gone(pid) for pid in pids(run)))
    assert not memory(run).exists()
    assert (tmp_path / "runs" / "latest").resolve() == run


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_everything(start: Start, tmp_path: Path, number: int, code: int) -> None:
    launcher, run = start("serve"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    launcher.send_signal(number)
    assert launcher.wait(LONG_S) == code
    assert wait_until(lambda: all(gone(pid) for pid in pids(run))) and not memory(run).exists()


def test_second_signal_does_not_wait(start: Start, tmp_path: Path) -> None:
    launcher, run = start("serve", "--shutdown-timeout", "600"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    os.kill(agents(run)[0]["pids"][0], signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    assert any("SIGINT" in line for line in iter(launcher.stderr.readline, ""))
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LONG_S) == 130
    assert wait_until(lambda: all(gone(pid) for pid in pids(run)))


def test_nothing_survives_a_killed_launcher(start: Start, tmp_path: Path) -> None:
    launcher, run = start("serve"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: all(gone(pid) for pid in pids(run)))
    assert memory(run).exists()
    start("finish=0", run="runs/b").communicate(timeout=LONG_S)
    assert not memory(run).exists()  # the next run cleans up behind it


def test_coordinator_is_started_again_at_its_address(start: Start, tmp_path: Path) -> None:
    launcher, run = start("finish=0 after=2"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    os.kill(pids(run)[0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0 and "the coordinator ended (SIGKILL)" in err
    first, second = (run / "starts").read_text().split()
    assert first == second


def test_a_restart_that_the_machine_refuses_is_tried_again(start: Start, tmp_path: Path) -> None:
    """Here the file for its output cannot be opened; training continues meanwhile."""
    launcher, run = start("finish=0 after=2"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    log = run / "logs" / "coordinator.out"
    log.rename(run / "kept")
    log.mkdir()
    os.kill(pids(run)[0], signal.SIGKILL)
    assert launcher.stderr is not None
    line = next(line for line in launcher.stderr if "cannot be started" in line)
    assert "the coordinator cannot be started (IsADirectoryError" in line
    assert line.endswith("next try in 0.5 s\n") and launcher.poll() is None
    log.rmdir()
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, err


def test_coordinator_that_cannot_start_is_given_up(start: Start, tmp_path: Path) -> None:
    launcher = start("fail")
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 1
    assert "the coordinator cannot run" in err and "the stand-in cannot start" in err


def test_a_coordinator_that_fails_in_each_start_is_given_up(start: Start, tmp_path: Path) -> None:
    """It fails after it has written its process id. The last line has its error."""
    launcher = start("unable")
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 1
    assert err.splitlines()[-1] == "elastic: the coordinator cannot run: a free port is needed"
    starts = (tmp_path / "runs" / "a" / "starts").read_text().splitlines()
    assert len(starts) == processes.FIRST_FAILURES


def test_coordinator_of_another_version_is_not_restarted(start: Start, tmp_path: Path) -> None:
    """A restart would not help. The last line has the coordinator's error."""
    _, err = start("outdated").communicate(timeout=LONG_S)
    assert err.splitlines()[-1] == (
        "elastic: the coordinator cannot run: protocol 9 wrote the state, protocol 2 is mine"
    )
    assert len((tmp_path / "runs" / "a" / "starts").read_text().splitlines()) == 1


def test_the_error_of_an_agent_is_in_the_line_about_its_end(start: Start) -> None:
    _, err = start("serve broken", "--heartbeat", "0.05", "--lease", "0.2").communicate(
        timeout=LONG_S
    )
    how = "exit code 1: OSError: no room for the socket"
    for node in ("node0", "node1"):
        assert f"elastic: {node} ended ({how})" in err
    assert f"the last one was node1: {how}" in err.splitlines()[-1]


def test_kill_coordinator_and_join_faults(start: Start, tmp_path: Path) -> None:
    faults = ["--fault", "kill-coordinator step=1 down=100ms", "--fault", "join step=2"]
    launcher, run = start("serve", *faults, "--domain", "east"), tmp_path / "runs" / "a"
    assert wait_until(lambda: len(agents(run)) == 3)
    assert {agent["node"] for agent in agents(run)} == {"node0", "node1", "node2"}
    assert {agent["domain"] for agent in agents(run)} == {"east"}
    assert len((run / "starts").read_text().split()) == 2
    assert sorted(path.name for path in (run / "faults").iterdir()) == ["0.fired", "1.fired"]
    launcher.terminate()
    _, err = launcher.communicate(timeout=LONG_S)
    assert "fault: kill-coordinator step=1 down=0.1" in err
    assert wait_until(lambda: all(gone(pid) for pid in pids(run)))


def test_killed_agents_stay_dead_and_their_children_with_them(start: Start, tmp_path: Path) -> None:
    launcher, run = start("serve", "--heartbeat", "0.05", "--lease", "0.2"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    for agent in agents(run):
        os.kill(agent["pids"][0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 1
    assert "node0 ended (SIGKILL)" in err and "every node ended before the job did" in err
    assert len(agents(run)) == 2 and wait_until(lambda: all(gone(pid) for pid in pids(run)))


def test_a_run_directory_belongs_to_one_run(start: Start, tmp_path: Path) -> None:
    first, run = start("serve"), tmp_path / "runs" / "a"
    assert wait_until(lambda: up(run))
    firsts = ("agents.jsonl", "config.json", "coordinator.json", "join.token", "launcher.lock")
    before = {name: (run / name).stat().st_ino for name in firsts}
    for flags in ([], ["--resume", "auto"]):
        second = start("serve", *flags)
        _, err = second.communicate(timeout=LONG_S)
        assert second.returncode == 2 and "--run-dir" in err and len(err.splitlines()) == 1
    assert {name: (run / name).stat().st_ino for name in firsts} == before
    assert not (run / "exit.json").exists() and not list(run.glob("attempt-*"))
    first.terminate()
    assert first.wait(LONG_S) == 143


def test_resume_moves_the_earlier_attempt_aside(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    start("finish=3").communicate(timeout=LONG_S)
    whole(run / "checkpoints", 2)
    start("finish=0", "--resume", "auto").communicate(timeout=LONG_S)
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    assert json.loads((run / "attempt-1" / "exit.json").read_text())["code"] == 3
    assert json.loads((run / "config.json").read_text())["resume"] == str(run / "checkpoints")
    assert (run / "checkpoints" / "step-00000002").is_dir()


def test_the_machine_that_owns_the_address_starts_the_coordinator(
    start: Start, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert (
        address_state(address) is AddressState.FREE
        and address_state("192.0.2.1:9999") is AddressState.ELSEWHERE
    )
    flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    first, second = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    host = start("serve", *flags, mode=())
    assert wait_until(lambda: up(first, 1)) and address_state(address) is AddressState.TAKEN
    joiner = start("serve", *flags, mode=(), run="runs/b")
    assert wait_until(lambda: agents(second))
    assert not (second / "coordinator.json").exists()
    os.kill(agents(second)[0]["pids"][0], signal.SIGKILL)
    assert joiner.wait(LONG_S) == 128 + signal.SIGKILL
    os.kill(agents(first)[0]["pids"][0], signal.SIGKILL)
    assert wait_until(lambda: all(gone(pid) for pid in pids(first)[1:]))
    assert host.poll() is None  # the coordinator serves the other machines
    host.terminate()
    assert host.wait(LONG_S) == 143


@pytest.mark.parametrize(
    "mode",
    [("--rdzv-backend", "c10d", "--rdzv-conf", "is_host=true"), ("--rdzv-backend", "static")],
)
def test_another_program_has_the_coordinators_address(
    start: Start, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        launcher = start("serve", "--rdzv-endpoint", address, mode=("--nnodes", "2", *mode))
        _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 2 and len(err.splitlines()) == 1
    assert f"--rdzv-endpoint: '{address}'" in err and "another program" in err
    assert not (tmp_path / "runs" / "a").exists(), "nothing is written before the check"


def test_a_coordinator_waits_for_its_store(start: Start, tmp_path: Path) -> None:
    """Pods start in any order, and etcd may be away for a while."""
    store = f"etcd://127.0.0.1:{free_port()}"
    flags = [*hosts(), "--rdzv-id", "a", "--store", store]
    launcher = start("serve", *flags, mode=())
    assert wait_until(lambda: up(tmp_path / "runs" / "a", 1)), "the launcher does not wait"
    launcher.terminate()
    assert launcher.wait(LONG_S) == 143


def test_a_launcher_ends_with_its_agent_if_its_coordinator_never_led(start: Start) -> None:
    """The store was away for so long that the agent gave up."""
    launcher = start("waits broken", *hosts(), mode=())
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 1 and "OSError: no room for the socket" in err


def test_a_coordinator_and_its_status_tell_the_store_that_is_awaited(tmp_path: Path) -> None:
    store, run_dir = f"etcd://127.0.0.1:{free_port()}", tmp_path / "run"
    script = tmp_path / "script.py"
    script.write_text("")
    command = [sys.executable, "-m", "elastic.launcher.cli"]
    words = ["coordinator", "--address", f"127.0.0.1:{free_port()}", "--nnodes", "1"]
    words += ["--store", store, "--rdzv-id", "a", "--run-dir", str(run_dir), str(script)]
    with subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stderr is not None
        told_of = (line for line in iter(coordinator.stderr.readline, "") if "the store" in line)
        awaited = list(itertools.islice(told_of, 2))
        asked = [*command, "status", "--run-dir", str(run_dir)]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=LONG_S, check=False)
        coordinator.terminate()
    for text in (*awaited, told.stdout):
        assert f"the store: no etcd answers at {store}" in text
    assert len(awaited) == 2, "it is told again"
    assert told.returncode == 0 and told.stdout.startswith("phase: waiting\n")


def test_the_launcher_says_that_agents_do_not_end(start: Start, tmp_path: Path) -> None:
    launcher = start("serve", "--shutdown-timeout", "5")
    assert wait_until(lambda: up(tmp_path / "runs" / "a"))
    for name in ("coordinator.json", "agents.jsonl"):
        assert (tmp_path / "runs" / "a" / name).exists()
    (tmp_path / "runs" / "a" / "exit.json").write_text('{"code": 0, "reason": "acted out"}')
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0
    assert "waiting for 3 s: node0 node1 to end; at most 5 s" in err


def hosts() -> tuple[str, ...]:
    """One of two hosts, the one that owns the coordinator's address."""
    endpoint = f"127.0.0.1:{free_port()}"
    return (
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--notice",
        "none",
    )


def test_sigterm_with_grace_lets_the_node_leave(start: Start, tmp_path: Path) -> None:
    launcher = start("serve leaves", "--grace", "60", mode=hosts())
    assert wait_until(lambda: up(tmp_path / "runs" / "a", 1))
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0 and "leaving within 60 s" in err


@pytest.mark.parametrize(("grace", "twice"), [("60", True), ("0.3", False), ("0", False)])
def test_a_second_sigterm_the_end_of_the_grace_or_none_ends_at_once(
    start: Start, tmp_path: Path, grace: str, twice: bool
) -> None:
    launcher = start("serve", "--grace", grace, mode=hosts())
    assert wait_until(lambda: up(tmp_path / "runs" / "a", 1))
    launcher.send_signal(signal.SIGTERM)
    if twice:
        assert launcher.stderr is not None
        assert any("leaving within 60 s" in line for line in launcher.stderr)
        launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert wait_until(
        lambda: all(gone(pid) for one in agents(tmp_path / "runs" / "a") for pid in one["pids"])
    )


def test_sigint_is_never_a_notice(start: Start, tmp_path: Path) -> None:
    launcher = start("serve leaves", "--grace", "60", mode=hosts())
    assert wait_until(lambda: up(tmp_path / "runs" / "a", 1))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 128 + signal.SIGINT
