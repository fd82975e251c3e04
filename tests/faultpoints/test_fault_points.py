"""A sample of the fault points, and the injection itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faultpoints.campaign import one, points_of
from tests.faultpoints.enumeration import (
    CLEAN,
    COORDINATOR,
    NODE_LOST,
    SCENARIOS,
    WORKER_LOST,
    Case,
    judge,
    read_results,
)
from tests.faultpoints.injection import FAULTS, parse_point
from tests.faultpoints.mini_job import NO_NODE, SCHEMES, Result
from tests.patience import LONG_S
from tests.scenarios.harness import ROOT

SCRIPT = """
import os, sys
from pathlib import Path
from tests.faultpoints.injection import Injector, install, parse_point

root, target, fault = sys.argv[1:]
install(Injector("me", record=root + ".points", target=parse_point(target), fault=fault), (root,))
for number in range(3):
    path = Path(root, f"{number}.slot")
    with open(path, "xb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            print(number, error.errno)
    os.replace(path, Path(root, "last"))
"""


def inject(root: Path, target: str, fault: str) -> subprocess.CompletedProcess[str]:
    root.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(root), target, fault]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S)


def points(root: Path) -> list[str]:
    return Path(f"{root}.points").read_text().splitlines()


def test_each_call_has_an_address(tmp_path: Path) -> None:
    """The numbers of slots differ from run to run, so they are no part of an address."""
    inject(tmp_path / "a", "me/fsync/none#1", "EIO")
    assert points(tmp_path / "a") == [
        f"me/{kind}#{number}"
        for number in (1, 2, 3)
        for kind in ("open/*.slot", "fsync/*.slot", "rename/last")
    ]
    assert all(parse_point(text).text == text for text in points(tmp_path / "a"))


@pytest.mark.parametrize(
    ("fault", "printed"), [("EIO", "1 5\n"), ("ENOSPC", "1 28\n"), ("EIO+", "1 5\n2 5\n")]
)
def test_a_call_fails_once_or_for_ever(tmp_path: Path, fault: str, printed: str) -> None:
    done = inject(tmp_path / "a", "me/fsync/*.slot#2", fault)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


@pytest.mark.parametrize(
    ("fault", "left"), [("kill", {"1.slot", "last"}), ("kill-after", {"last"})]
)
def test_a_process_is_killed_before_or_after_a_call(
    tmp_path: Path, fault: str, left: set[str]
) -> None:
    done = inject(tmp_path / "a", "me/rename/last#2", fault)
    assert done.returncode == -signal.SIGKILL
    assert set(os.listdir(tmp_path / "a")) == left


LOOP = "12 epochs, the last one because: agent-a"
COPIES = "layer 1: no copies are left"


@pytest.mark.parametrize(
    ("scenario", "fault", "refusal", "verdict"),
    [
        (NODE_LOST, "kill", NO_NODE, "refused"),
        (NODE_LOST, "kill-after", NO_NODE, "refused"),
        (NODE_LOST, "kill", LOOP, "FAILED"),
        (NODE_LOST, "kill", COPIES, "FAILED"),
        (NODE_LOST, "stop", NO_NODE, "FAILED"),
        (WORKER_LOST, "kill", NO_NODE, "FAILED"),
        (WORKER_LOST, "kill", COPIES, "FAILED"),
        (CLEAN, "kill", NO_NODE, "FAILED"),
        (NODE_LOST, "EIO+", f"{LOOP} (injected at agent-a)", "refused"),
        (NODE_LOST, "EIO+", LOOP, "FAILED"),
        (NODE_LOST, "EIO", f"{LOOP} (injected at agent-a)", "FAILED"),
    ],
)
def test_a_job_may_be_refused_only_for_what_was_injected(
    scenario: str, fault: str, refusal: str, verdict: str
) -> None:
    """After a second loss, only the death of the last agent explains a refusal."""
    for role in ("agent-a", "worker-a"):
        case = Case("log+snapshot", scenario, f"{role}/send/Published#1", fault)
        found = judge(case, Result("", 3, [], set(), refusal=refusal), "good")
        last = refusal == NO_NODE and role == "worker-a"
        assert found == ("FAILED" if last else verdict, refusal)


@pytest.mark.chaos
def test_a_sample_of_fault_points(tmp_path: Path) -> None:
    """Fresh points in every run; the seed is in the command that pytest prints on a failure."""
    scheme, scenario = random.choice(SCHEMES)[0], random.choice(SCENARIOS)
    command = [sys.executable, "-m", "tests.faultpoints.enumeration"]
    command += ["--scheme", COORDINATOR, "--scheme", scheme, "--scenario", scenario]
    command += ["--results", str(tmp_path / "results"), "--sample", "5"]
    command += ["--seed", str(random.randrange(1 << 30))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    verdicts = [outcome.verdict for outcome in read_results(tmp_path / "results").values()]
    assert len(verdicts) == 10 and verdicts.count("ok") >= 5, done.stdout


@pytest.mark.chaos
@pytest.mark.parametrize(("scheme", "pipelines"), SCHEMES)
def test_fault_points_of_real_jobs(scheme: str, pipelines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sha, found = points_of(Path(folder), scheme, pipelines)
    for _ in range(3):
        point = random.choice(found)
        fault = random.choice(FAULTS[parse_point(point).kind])
        with tempfile.TemporaryDirectory() as folder:
            line = one(Path(folder), scheme, pipelines, point, fault, sha)
        assert line["verdict"] in ("ok", "refused", "not reached"), line
