"""An agent's heartbeats and answers are on time while its vault takes a copy of gigabytes.

These tests measure time, so `make chaos` runs them, one after the other. `test_slow_operations`
makes the same operations wait for the test, and needs no clock.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from elastic.config import JobConfig
from elastic.core.protocol import messages as m
from elastic.domain.checksum import copy_checksum
from elastic.domain.types import STATE, Copy
from elastic.rpc.bulk.transfer import VaultClient
from elastic.store.shared_memory import checksum
from tests.agent.agents import RecordingCoordinator
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
HEARTBEAT_S, LATE_S = 0.1, 0.5
PACER = """
import select, sys, time
longest, last = 0.0, time.monotonic()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    longest, last = max(longest, time.monotonic() - last - 0.02), time.monotonic()
print(longest)
"""
"""Measures how late the machine wakes a process that does nothing else."""


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="elastic-size-", dir=SHARED))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.chaos
@pytest.mark.parametrize("gib", [2, 4])
def test_heartbeats_and_answers_are_on_time_during_a_large_copy(
    gib: int, memory: Path, make_config: Callable[..., JobConfig]
) -> None:
    """`LATE_S` is measured on top of the delay of an idle process on the same machine."""
    nbytes = gib << 30
    if shutil.disk_usage(SHARED).free < nbytes + (1 << 30):
        pytest.skip(f"shared memory has no room for {gib} GiB")
    config = make_config(memory_dir=str(memory), preflight="off", heartbeat_s=HEARTBEAT_S)
    config.save()
    zeros = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).toreadonly()
    copy = Copy(STATE, 0, 0, 1, 1000, "b", 1, nbytes, "")
    copy = replace(copy, checksum=copy_checksum(copy, checksum(zeros)))
    coordinator = RecordingCoordinator()
    flags = ["--run-dir", config.run_dir, "--node", "node0"]
    flags += ["--coordinator", coordinator.server.address]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "elastic.agent.service", *flags]
    agent = subprocess.Popen(command, cwd=ROOT, env=env)
    pacer = subprocess.Popen(
        [sys.executable, "-c", PACER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        vault = coordinator.report(lambda report: True).info.vault
        coordinator.heartbeats()
        began, answers = time.monotonic(), list[float]()
        with ThreadPoolExecutor(1) as pool:
            client = VaultClient(vault, timeout_s=LONG_S)
            sending = pool.submit(client.put, [(copy, zeros)])
            for epoch in range(1, 1000):
                answers.append(answer_s(coordinator, epoch))
                if sending.done():
                    break
                threading.Event().wait(HEARTBEAT_S)
            sending.result(LONG_S)
        client.close()
        coordinator.heartbeats(2)
        times = [at for at in coordinator.arrivals if at >= began]
        output, _ = pacer.communicate("\n", timeout=LONG_S)
        answer_s(coordinator, 1000)
        last = coordinator.report(lambda report: report.epoch == 1000)
        assert [found.nbytes for found in last.inventory] == [nbytes]
    finally:
        for process in (agent, pacer):
            process.kill()
            process.wait(LONG_S)
        coordinator.server.close()
    late_s = max(after - before for before, after in pairwise(times)) - HEARTBEAT_S
    allowed_s = LATE_S + float(output)
    print(
        f"{gib} GiB: heartbeats {late_s:.3f} s late, answers after {max(answers):.3f} s, "
        f"an idle process {float(output):.3f} s late"
    )
    assert late_s < allowed_s and max(answers) < allowed_s


def answer_s(coordinator: RecordingCoordinator, epoch: int) -> float:
    """Return the seconds from an order that fences the vault to the answer with its content."""
    began = time.monotonic()
    coordinator.order(m.Halt(epoch))
    coordinator.report(lambda report: report.epoch == epoch)
    return time.monotonic() - began
