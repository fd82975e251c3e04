"""Restarts of coordinators, on a clock that the test moves, and services that outlive nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.launcher.run import processes
from elastic.launcher.run.processes import MAX_FAILURES, Coordinators
from elastic.telemetry import write_last_words
from tests.launcher.helpers import gone, send, wait_until


class Restarts:
    """The coordinator of a job. `lives(n)` says how long its n-th process lives, in seconds, and
    with what exit code it ends."""

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, lives: Callable[[int], tuple[float, int]]
    ) -> None:
        self.now = 0.0
        starts = self.starts = list[float]()
        self.notes: list[str] = []

        def clock() -> float:
            return self.now

        class Process:
            """As `Child`."""

            def __init__(self, name: str, *_: object) -> None:
                self.name, self.pid, self.born = name, 100 + len(starts), clock()
                self.returncode: int | None = None
                self.life_s, self.code = lives(len(starts))
                self.how = f"exit code {self.code}"
                starts.append(self.born)

            def ended(self) -> bool:
                if clock() < self.born + self.life_s:
                    return False
                self.returncode = self.code
                if self.code > 0:
                    write_last_words(path, self.name, "the store cannot be read")
                return True

        (path / "logs").mkdir()
        monkeypatch.setattr(processes, "Child", Process)
        monkeypatch.setattr(processes, "metrics_flag", lambda *_: [])
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=clock))
        config = SimpleNamespace(run_dir=str(path))
        self.all = Coordinators(config, "m", ("127.0.0.1:1",), 0, self.notes.append)  # type: ignore[arg-type]
        self.all.start()

    def run(self, seconds: float) -> str:
        """Let time pass; return why the job cannot continue, or ""."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            if problem := self.all.check(lambda: False):
                return problem
        return ""

    @property
    def pauses(self) -> list[float]:
        return [b - a for a, b in pairwise(self.starts)]


def test_one_that_has_worked_and_then_fails_is_given_up_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = Restarts(tmp_path, monkeypatch, lambda n: (60.0 if n == 0 else 0.5, 2))
    problem = restarts.run(300.0)
    assert problem == "the coordinator cannot run: the store cannot be read"
    assert len(restarts.starts) == 1 + MAX_FAILURES
    assert restarts.pauses[1:] == sorted(restarts.pauses[1:]) and restarts.now > 80.0
    assert "exit code 2: the store cannot be read" in restarts.notes[-1]


def test_one_that_is_killed_again_and_again_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may lack memory. Training continues meanwhile."""
    restarts = Restarts(tmp_path, monkeypatch, lambda _: (0.5, -9))
    assert not restarts.run(600.0)
    assert max(restarts.pauses) < processes.MAX_RETRY_S + 1.0 and len(restarts.starts) < 30


def test_one_that_lives_for_some_time_is_restarted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = Restarts(tmp_path, monkeypatch, lambda _: (processes.SETTLED_S, 1))
    assert not restarts.run(300.0)
    assert max(restarts.pauses) < processes.SETTLED_S + 0.2


LAUNCHER = """
import os, signal
from elastic.launcher.run.processes import Child
child = Child("node0", "service", [], os.pipe()[0], None)
print(child.pid, flush=True)
signal.pause()
"""
SERVICE = """
import signal, sys
from elastic import lifeline
lifeline.watch(int(sys.argv[sys.argv.index("--parent-pipe") + 1]))
print("watches", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_no_service_outlives_a_launcher_that_is_killed(
    tmp_path: Path, environment: dict[str, str], stopped: bool
) -> None:
    """Also a stopped one ends, which cannot watch the launcher's pipe."""
    (tmp_path / "service.py").write_text(SERVICE)
    path = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env=environment | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    lines = sorted(launcher.stdout.readline().strip() for _ in range(2))
    pid, said = int(lines[0]), lines[1]
    assert said == "watches"
    if stopped:
        send(pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert wait_until(lambda: gone(pid))
