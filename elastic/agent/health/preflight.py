"""Checks of a node before it joins: compute, memory, disks, devices, clock, coordinator, peer.

All checks take about 0.1 s if the node has no devices and reaches a peer. A check that cannot be
made is left out. A failed check is fatal only if the node would harm the job. The coordinator
decides whether the node may join (`elastic.core.policy.remediation`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from elastic.agent.health.devices import Devices
from elastic.agent.health.monitor import disk_of, nearest_parent
from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, PreflightCheck
from elastic.domain.errors import ElasticError
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.client import call

MATRIX_ROWS, ROUNDS = 256, 5
"""Rows of the square matrices, and number of multiplications; the fastest one counts."""
MIN_MEMORY_BYTES = 256 << 20
MIN_DISK_BYTES = 16 << 20
PROBE_BYTES, MAX_PEERS = 256 << 10, 3
CALL_S = 2.0
"""Timeout of one answer of the coordinator or of a peer."""
MAX_CLOCK_OFFSET_S = 60.0
DEVICE_TRIAL_S = 90.0
"""Timeout of the child process that tests the devices; it has to import torch."""
SCORE_STEP = 1.25
"""Ratio between the scores of neighbouring score classes."""
TRIAL_MODULE = "elastic.worker.transport.device_check"


def local_checks(
    directories: Sequence[tuple[str, Path]],
    memory_bytes: int = 0,
    devices: Devices | None = None,
    *,
    trial: bool = False,
) -> tuple[list[PreflightCheck], float]:
    """Make the checks that need neither coordinator nor peer; return (checks, score).

    `memory_bytes`: memory that the plan may use; 0: unknown. `trial`: also compute on the devices,
    in a child process, which takes seconds. The score is the processor's speed in GFLOP/s, or after
    a trial that of the slowest device in TFLOP/s; 0: the check failed.
    """
    checks = [compute(), memory(memory_bytes), *(disk(role, path) for role, path in directories)]
    score = checks[0].value if checks[0].ok else 0.0
    devices = devices if devices is not None else Devices()
    checks += device_checks(devices)
    if trial and len(devices):
        checks.append(device_trial())
        score = checks[-1].value if checks[-1].ok else 0.0
    return checks, score


def compute() -> PreflightCheck:
    """Multiply matrices of small integers: measure GFLOP/s, and compare with the exact product."""
    a = (np.arange(MATRIX_ROWS**2, dtype=np.float32).reshape(MATRIX_ROWS, MATRIX_ROWS) % 7) - 3
    expected = a.astype(np.int64) @ a.astype(np.int64)
    best, right = math.inf, True
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = a @ a
        best = min(best, time.perf_counter() - began)
        right = right and bool((result == expected).all())
    rate = 2 * MATRIX_ROWS**3 / max(best, 1e-9) / 1e9
    problem = "" if right else "the node computes wrong results: replace it"
    return _check("compute", rate, "GFLOP/s", problem)


def memory(wanted_bytes: int) -> PreflightCheck:
    free, problem = psutil.virtual_memory().available, ""
    fatal = free < MIN_MEMORY_BYTES
    if fatal:
        problem = f"only {free} bytes are available: free some memory"
    elif free < wanted_bytes:
        problem = f"{free} bytes are available but --node-memory is {wanted_bytes}: reduce it"
    return _check("memory", free, "bytes", problem, fatal=fatal)


def disk(role: str, path: Path) -> PreflightCheck:
    """Check that a file can be written and that space is free. A failure is not fatal for
    checkpoints: the job can go on without them."""
    free, problem = disk_of(role, path).free_bytes, ""
    probe = nearest_parent(path) / f".preflight-{uuid.uuid4().hex[:12]}"
    if free < MIN_DISK_BYTES:
        problem = f"{path} has only {free} bytes left: delete files or use another"
    try:
        with probe.open("xb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = (
            f"{path} cannot be written ({error.strerror}): delete files, mount it or use another"
        )
    finally:
        probe.unlink(missing_ok=True)
    return _check(f"disk:{role}", free, "bytes", problem, fatal=role != "checkpoints")


def device_checks(devices: Devices) -> list[PreflightCheck]:
    """Return one check per device, from the driver's readings."""
    checks = []
    for seen in devices.read():
        problem = ""
        if seen.fault:
            problem = f"device {seen.index}: {seen.fault}: replace or reset it"
        elif seen.throttled:
            problem = f"device {seen.index} is throttled ({seen.throttled}): check its cooling"
        name = f"device:{seen.index}"
        checks.append(_check(name, seen.temperature_c, "C", problem, fatal=bool(seen.fault)))
    return checks


def device_trial(command: Sequence[str] = (sys.executable, "-m", TRIAL_MODULE)) -> PreflightCheck:
    """Measure TFLOP/s of a matrix product on every device. A child process computes it, because the
    agent must not import torch."""
    rate = 0.0
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEVICE_TRIAL_S, check=False)
        found = json.loads(done.stdout.decode().strip().rpartition("\n")[2])
        rate, problem = float(found["tflops"]), str(found.get("error", ""))
    except subprocess.TimeoutExpired:
        problem = f"no answer within {DEVICE_TRIAL_S:g} s: check the driver"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"the trial failed: {error}"
    return _check("device", rate, "TFLOP/s", problem)


def network_checks(
    coordinator: str,
    node: str = "",
    pace: Callable[[int], None] | None = None,
    ask: Callable[..., dict[str, Any]] = call,
) -> list[PreflightCheck]:
    """Measure latency and clock offset of the coordinator, and the bandwidth to a peer's vault.

    `ask` has the signature of `elastic.rpc.control.client.call`.
    """
    try:
        best, offset, peers = math.inf, 0.0, []
        for _ in range(2):
            began, wall = time.perf_counter(), time.time()
            answer = ask(coordinator, "peers", {"node": node}, timeout_s=CALL_S)
            took = time.perf_counter() - began
            peers = answer.get("peers", [])
            if took < best and answer.get("now"):
                best, offset = took, float(answer["now"]) - wall - took / 2
    except ElasticError as error:
        problem = f"the coordinator does not answer: {error}"
        return [_check("coordinator", 0.0, "s", problem, fatal=False)]
    checks = []
    if best < math.inf:
        right = abs(offset) <= MAX_CLOCK_OFFSET_S
        problem = "" if right else f"the clock is off by {abs(offset):.0f} s: set it (NTP)"
        checks = [_check("coordinator", best, "s"), _check("clock", offset, "s", problem)]
    return [*checks, *_peer_check(peers[:MAX_PEERS], node, pace)]


def _peer_check(
    nodes: Sequence[dict[str, Any]], node: str, pace: Callable[[int], None] | None
) -> list[PreflightCheck]:
    """Measure the bandwidth (bytes/s) to the first vault that answers; return [] without nodes."""
    problems = []
    for row in nodes:
        try:
            client = VaultClient(
                str(row.get("vault", "")),
                node=node,
                timeout_s=CALL_S,
                pace=pace,
                peer=str(row.get("node", "")),
            )
            with contextlib.closing(client):
                seconds = min(client.probe(PROBE_BYTES) for _ in range(2))
        except ElasticError as error:
            problems.append(str(error))
            continue
        return [_check("peer", PROBE_BYTES / max(seconds, 1e-9), "bytes/s")]
    if not problems:
        return []
    text = (
        f"no vault of {len(problems)} peers can be reached (open the network between nodes): "
        f"{problems[0]}"
    )
    return [_check("peer", 0.0, "bytes/s", text)]


def _check(
    name: str, value: float, unit: str, problem: str = "", *, fatal: bool = True
) -> PreflightCheck:
    """Return a check, which failed unless `problem` is "". `problem` includes the remedy."""
    return PreflightCheck(name, value, unit, not problem, fatal, problem[:MAX_TEXT_LENGTH])


def score_class(score: float) -> int:
    """Return the class of a score. Scores of neighbouring classes differ by 25 %, nodes of one
    class count as equally fast, and 0 means unknown."""
    return round(math.log(score, SCORE_STEP)) if score > 0 else 0
