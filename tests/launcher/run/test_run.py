"""`elastic run` with real coordinators and agents, on scripts that do not use elastic."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.launcher.helpers import gone, wait_until
from tests.patience import LONG_S

SCRIPT = """
import json, os, pathlib, sys, time
rank, restart = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pathlib.Path(f"seen-{rank}-{restart}.json").write_text(json.dumps(dict(os.environ)))
print(f"rank {rank} restart {restart}", flush=True)
if "fail" in sys.argv and rank == "1" and restart < int(sys.argv[2]):
    sys.exit(5)
time.sleep(60 if "wait" in sys.argv else 0)
"""
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Iterator[Run]:
    """run(flags, script arguments) starts `elastic run` in tmp_path, with the run directory `out`.

    The lease is long: on a busy machine an agent is silent for seconds, and would be lost.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def begin(flags: str, words: str = "") -> subprocess.Popen[str]:
        argv = [*flags.split(), "--lease", "30", "--run-dir", "out", "script.py", *words.split()]
        launcher = subprocess.Popen(
            [sys.executable, "-m", "elastic", "run", *argv],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(launcher)
        return started[-1]

    yield begin
    for launcher in started:
        launcher.kill()
        launcher.communicate(timeout=LONG_S)


def environ_of(folder: Path, rank: int, restart: int = 0) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"seen-{rank}-{restart}.json").read_text())
    return found


def test_unchanged_script_on_two_nodes(run: Run, tmp_path: Path) -> None:
    launcher = run("--standalone --nnodes 2 --nproc-per-node 2 --tee 3")
    out, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0, err
    lines = {f"[node{rank // 2}:{rank}]: rank {rank} restart 0" for rank in range(4)}
    assert set(out.splitlines()) == lines
    seen = [environ_of(tmp_path, rank) for rank in range(4)]
    assert len({env["MASTER_PORT"] for env in seen}) == 1 and seen[0]["MASTER_ADDR"] == "127.0.0.1"
    assert [env["GROUP_RANK"] for env in seen] == ["0", "0", "1", "1"]
    assert {env["WORLD_SIZE"] for env in seen} == {"4"}
    assert not Path(seen[0]["ELASTIC_MEMORY_DIR"]).exists()


@pytest.mark.parametrize(("failures", "restarts", "ok"), [(1, 1, True), (2, 1, False)])
def test_restarts(run: Run, tmp_path: Path, failures: int, restarts: int, ok: bool) -> None:
    launcher = run(f"--standalone --nnodes 2 --max-restarts {restarts}", f"fail {failures}")
    _, err = launcher.communicate(timeout=LONG_S)
    assert (launcher.returncode == 0) is ok, err
    assert environ_of(tmp_path, 1, 1)["TORCHELASTIC_MAX_RESTARTS"] == str(restarts)
    assert ok or "exit code 5" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphans(run: Run, tmp_path: Path, number: int) -> None:
    launcher = run("--standalone --nnodes 2", "wait")
    assert wait_until(lambda: len(list(tmp_path.glob("seen-*"))) == 2)
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) == 5  # coordinator, two agents, two workers
    os.kill(launcher.pid, number)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_until(lambda: all(gone(process.pid) for process in family))
