"""A script without any code of this project: same results and exit codes as under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.harness import DEADLINE_S, LEASE_S, ROOT

DDP = str(ROOT / "examples" / "ddp.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ONE_NODE = ("-m", "elastic", "run", "--standalone", "--nproc-per-node", "2")
TWO_NODES = ("-m", "elastic", "run", "--standalone", "--nnodes", "2")
LAUNCHERS = {"one-node": ONE_NODE, "two-nodes": TWO_NODES}


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    result: dict[str, Any] | None


def launch(
    directory: Path, launcher: tuple[str, ...], flags: tuple[str, ...], script: tuple[str, ...]
) -> Ended:
    directory.mkdir()
    out = directory / "result.json"
    mine = (
        ("--run-dir", str(directory / "run"), "--lease", LEASE_S) if "elastic" in launcher else ()
    )
    command = [
        sys.executable,
        *launcher,
        *mine,
        *flags,
        DDP,
        "--steps",
        "8",
        "--out",
        str(out),
        *script,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE_S,
        check=False,
    )
    result = json.loads(out.read_text()) if out.exists() else None
    return Ended(done.returncode, done.stdout.decode(errors="replace"), result)


RESTART = (("--max-restarts", "1"), ("--fail-at", "5"))
FAIL = (("--max-restarts", "0"), ("--fail-at", "5"))


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    done: dict[str, Ended] = {}

    def run(name: str) -> Ended:
        if name not in done:
            flags, script = {"restart": RESTART, "fail": FAIL}[name]
            done[name] = launch(tmp_path_factory.mktemp("torchrun") / name, TORCHRUN, flags, script)
        return done[name]

    return run


@pytest.mark.chaos
@pytest.mark.parametrize("launcher", ["one-node", "two-nodes"])
def test_same_result_restart_included(
    launcher: str, torchrun: Callable[[str], Ended], tmp_path: Path
) -> None:
    expected, run = torchrun("restart"), launch(tmp_path / "run", LAUNCHERS[launcher], *RESTART)
    assert expected.code == run.code == 0, (expected.output, run.output)
    assert expected.result is not None and expected.result["restarts"] == 1, expected
    assert run.result == expected.result


@pytest.mark.chaos
def test_a_restarted_run_ends_as_one_that_never_failed(
    torchrun: Callable[[str], Ended], tmp_path: Path
) -> None:
    run, expected = launch(tmp_path / "run", ONE_NODE, (), ()), torchrun("restart").result
    assert run.result is not None and expected is not None, run.output
    assert run.result["params_sha256"] == expected["params_sha256"]
    assert run.result["restarts"] == 0


@pytest.mark.chaos
@pytest.mark.parametrize("launcher", ["one-node", "two-nodes"])
def test_same_exit_code_when_restarts_are_used_up(
    launcher: str, torchrun: Callable[[str], Ended], tmp_path: Path
) -> None:
    run = launch(tmp_path / "run", LAUNCHERS[launcher], *FAIL)
    assert run.code == torchrun("fail").code == 1, run.output
    assert run.result is None
