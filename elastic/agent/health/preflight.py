"""Checks of a node before it joins: compute, memory, disks, devices, clock, coordinator, peer.

They take about 0.1 s on a node without devices that reaches a peer. A check that cannot be made is
left out. A failed check is fatal only if the node would harm the job. The coordinator decides
whether the node may join (`elastic.core.policy.remediation`).
"""

from __future__ import annotations

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
from elastic.agent.health.monitor import disk_of
from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, PreflightCheck
from elastic.domain.errors import ElasticError
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.client import call

MATRIX_ROWS, ROUNDS = 256, 5
"""Size of the matrices that are multiplied, and number of multiplications; the fastest counts."""
MIN_MEMORY_BYTES = 256 << 20
MIN_DISK_BYTES = 16 << 20
PROBE_BYTES, MAX_PEERS = 256 << 10, 3
CALL_S = 2.0
"""Timeout of one answer of the coordinator or of a peer."""
MAX_CLOCK_OFFSET_S = 60.0
DEVICE_TRIAL_S = 90.0
"""Timeout of the child process that tries the devices. It has to import torch."""
SCORE_STEP = 1.25
"""Ratio of the scores of two neighbouring score classes."""
TRIAL_MODULE = "elastic.worker.transport.device_check"


def local_checks(
    directories: Sequence[tuple[str, Path]],
    memory_bytes: int = 0,
    devices: Devices | None = None,
    *,
    trial: bool = False,
) -> tuple[list[PreflightCheck], float]:
    """Checks that need no other process: (checks, score in GFLOP/s).

    `memory_bytes`: memory that the plan may use (0: unknown). `trial`: also compute on the devices
    in a child process, which takes seconds; the score then counts TFLOP/s of the devices.
    """
    checks = [compute(), memory(memory_bytes), *(disk(role, path) for role, path in directories)]
    score = checks[0].value if checks[0].ok else 0.0
    devices = devices if devices is not None else Devices()
    checks += device_checks(devices)
    if trial and len(devices):
        tried = device_trial()
        checks.append(tried)
        score = tried.value if tried.ok else 0.0
    return checks, score


def compute() -> PreflightCheck:
    """Measure GFLOP/s of a matrix product of small integers, the exact result of which is known."""
    a = (np.arange(MATRIX_ROWS**2, dtype=np.float32).reshape(MATRIX_ROWS, MATRIX_ROWS) % 7) - 3
    expected = a.astype(np.int64) @ a.astype(np.int64)
    best, right = math.inf, True
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = a @ a
        best = min(best, time.perf_counter() - began)
        right = right and bool((result == expected).all())
    rate = 2 * MATRIX_ROWS**3 / max(best, 1e-9) / 1e9
    return PreflightCheck(
        "compute",
        rate,
        "GFLOP/s",
        right,
        True,
        "" if right else "the node computes wrong results: replace it",
    )


def memory(wanted_bytes: int) -> PreflightCheck:
    free = psutil.virtual_memory().available
    if free < MIN_MEMORY_BYTES:
        return PreflightCheck(
            "memory",
            free,
            "bytes",
            False,
            True,
            f"only {free} bytes are available: free some memory",
        )
    if wanted_bytes and free < wanted_bytes:
        text = f"{free} bytes are available but --node-memory is {wanted_bytes}: reduce it"
        return PreflightCheck("memory", free, "bytes", False, False, text)
    return PreflightCheck("memory", free, "bytes", True)


def disk(role: str, path: Path) -> PreflightCheck:
    """Write a file and read the free space. A failure is not fatal for checkpoints: the job can go
    on without them."""
    fatal = role != "checkpoints"
    found = disk_of(role, path)
    free = found.free_bytes if found is not None else 0
    existing = next((one for one in (path, *path.parents) if one.exists()), path)
    probe = existing / f".preflight-{uuid.uuid4().hex[:12]}"
    try:
        with probe.open("xb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{path} cannot be written ({error.strerror}): delete files, mount it or use another"
        return PreflightCheck(f"disk:{role}", free, "bytes", False, fatal, text)
    finally:
        probe.unlink(missing_ok=True)
    if free < MIN_DISK_BYTES:
        text = f"{path} has only {free} bytes left: delete files or use another"
        return PreflightCheck(f"disk:{role}", free, "bytes", False, fatal, text)
    return PreflightCheck(f"disk:{role}", free, "bytes", True)


def device_checks(devices: Devices) -> list[PreflightCheck]:
    """One check per device, from the driver's readings."""
    checks = []
    for seen in devices.read():
        text = f"device {seen.index}: {seen.fault}: replace or reset it" if seen.fault else ""
        hot = (
            f"device {seen.index} is throttled ({seen.throttled}): check its cooling"
            if seen.throttled
            else ""
        )
        ok, fatal = not (text or hot), bool(text)
        checks.append(
            PreflightCheck(f"device:{seen.index}", seen.temperature_c, "C", ok, fatal, text or hot)
        )
    return checks


def device_trial(command: Sequence[str] = (sys.executable, "-m", TRIAL_MODULE)) -> PreflightCheck:
    """Multiply matrices on every device, in a child process, because the agent must not import
    torch."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEVICE_TRIAL_S, check=False)
        found = json.loads(done.stdout.decode().strip().rpartition("\n")[2])
        rate, wrong = float(found["tflops"]), str(found.get("error", ""))
    except subprocess.TimeoutExpired:
        return PreflightCheck(
            "device",
            0.0,
            "TFLOP/s",
            False,
            True,
            f"no answer within {DEVICE_TRIAL_S:g} s: check the driver",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return PreflightCheck(
            "device", 0.0, "TFLOP/s", False, True, f"the trial failed: {error}"[:MAX_TEXT_LENGTH]
        )
    return PreflightCheck("device", rate, "TFLOP/s", not wrong, True, wrong[:MAX_TEXT_LENGTH])


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
        return [
            PreflightCheck(
                "coordinator",
                0.0,
                "s",
                False,
                False,
                f"the coordinator does not answer: {error}"[:MAX_TEXT_LENGTH],
            )
        ]
    checks = [PreflightCheck("coordinator", best, "s", True)] if best < math.inf else []
    if best < math.inf:
        ok = abs(offset) <= MAX_CLOCK_OFFSET_S
        text = "" if ok else f"the clock is off by {abs(offset):.0f} s: set it (NTP)"
        checks.append(PreflightCheck("clock", offset, "s", ok, True, text))
    return [*checks, *_peer_check(peers[:MAX_PEERS], node, pace)]


def _peer_check(
    nodes: Sequence[dict[str, Any]], node: str, pace: Callable[[int], None] | None
) -> list[PreflightCheck]:
    """Measure the bandwidth in bytes/s to the first vault that answers; no check without peers."""
    problems = []
    for row in nodes:
        try:
            client = VaultClient(str(row.get("vault", "")), node=node, timeout_s=CALL_S, pace=pace)
            try:
                seconds = min(client.probe(PROBE_BYTES) for _ in range(2))
            finally:
                client.close()
        except ElasticError as error:
            problems.append(str(error))
            continue
        return [PreflightCheck("peer", PROBE_BYTES / max(seconds, 1e-9), "bytes/s", True)]
    if not problems:
        return []
    text = (
        f"no vault of {len(problems)} peers can be reached (open the network between nodes): "
        f"{problems[0]}"
    )
    return [PreflightCheck("peer", 0.0, "bytes/s", False, True, text[:MAX_TEXT_LENGTH])]


def score_class(score: float) -> int:
    """Class of a score, in steps of 25 %; 0: unknown. Nodes of one class count as equally fast."""
    return round(math.log(score, SCORE_STEP)) if score > 0 else 0
