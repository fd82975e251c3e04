"""What a node finds about itself before it asks to join: compute, memory, disks, devices, clock, coordinator, a peer.

Bounded: about 0.1 s without a device and with a peer at hand. A check that cannot be made is none; one that fails is
fatal only where the node would harm the job. Whether it is taken is the coordinator's decision
(`elastic.core.policy.remediation`).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from elastic.agent.health.devices import Devices
from elastic.agent.health.monitor import disk_of
from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, Preflight, PreflightCheck
from elastic.domain.errors import ElasticError
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.client import call

SIZE, ROUNDS = 256, 5
"""Matrices that are multiplied, and how often: the quickest counts."""
MEMORY_BYTES = 256 << 20
"""Memory without which nothing can be trained."""
ROOM_BYTES = 16 << 20
"""Room without which a directory is full."""
PROBE_BYTES, PEERS = 256 << 10, 3
CALL_S = 2.0
"""For one answer of the coordinator, or of a peer."""
CLOCK_S = 60.0
DEVICE_S = 90.0
"""For the child that tries the devices, which has to import torch."""
STEP = 1.25
"""Nodes whose scores differ by less than this factor have the same standing."""
TRIAL = "elastic.worker.transport.device_check"


def local_checks(
    directories: Sequence[tuple[str, Path]],
    memory_bytes: int = 0,
    devices: Devices | None = None,
    *,
    trial: bool = False,
) -> tuple[list[PreflightCheck], float]:
    """What can be known without anybody else: (checks, score). `memory_bytes`: what the plan may use; `trial`: let a
    child compute on the devices, which takes seconds."""
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
    """Whole numbers, so that the result is known to the last bit; G operations a second."""
    a = (np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE) % 7) - 3
    expected = a.astype(np.int64) @ a.astype(np.int64)
    best, right = math.inf, True
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = a @ a
        best = min(best, time.perf_counter() - began)
        right = right and bool((result == expected).all())
    rate = 2 * SIZE**3 / max(best, 1e-9) / 1e9
    return PreflightCheck(
        "compute", rate, "GFLOP/s", right, True, "" if right else "it computes wrong results: replace it"
    )


def memory(wanted_bytes: int) -> PreflightCheck:
    free = psutil.virtual_memory().available
    if free < MEMORY_BYTES:
        return PreflightCheck("memory", free, "bytes", False, True, f"{free} bytes are available: free some")
    if wanted_bytes and free < wanted_bytes:
        text = f"{free} bytes are available where --node-memory says {wanted_bytes}: give less"
        return PreflightCheck("memory", free, "bytes", False, False, text)
    return PreflightCheck("memory", free, "bytes", True)


def disk(role: str, path: Path) -> PreflightCheck:
    """Whether a file can be written there, and how much room there is. Without room for checkpoints a job can go on."""
    fatal = role != "checkpoints"
    found = disk_of(role, path)
    free = found.free_bytes if found is not None else 0
    standing = next((one for one in (path, *path.parents) if one.exists()), path)
    probe = standing / f".preflight-{uuid.uuid4().hex[:12]}"
    try:
        with probe.open("xb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{path} cannot be written ({error.strerror}): free or mount it, or give another"
        return PreflightCheck(f"disk:{role}", free, "bytes", False, fatal, text)
    finally:
        probe.unlink(missing_ok=True)
    if free < ROOM_BYTES:
        text = f"{path} has {free} bytes left: make room"
        return PreflightCheck(f"disk:{role}", free, "bytes", False, fatal, text)
    return PreflightCheck(f"disk:{role}", free, "bytes", True)


def device_checks(devices: Devices) -> list[PreflightCheck]:
    """What the driver says."""
    checks = []
    for seen in devices.read():
        text = f"device {seen.index}: {seen.fault}: replace it or reset it" if seen.fault else ""
        hot = (
            f"device {seen.index} is held down ({seen.throttled}): look at its cooling"
            if seen.throttled
            else ""
        )
        ok, fatal = not (text or hot), bool(text)
        checks.append(PreflightCheck(f"device:{seen.index}", seen.temperature_c, "C", ok, fatal, text or hot))
    return checks


def device_trial(command: Sequence[str] = (sys.executable, "-m", TRIAL)) -> PreflightCheck:
    """Multiply matrices on every device, in a child: torch is not for this process."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEVICE_S, check=False)
        found = json.loads(done.stdout.decode().strip().rpartition("\n")[2])
        rate, wrong = float(found["tflops"]), str(found.get("error", ""))
    except subprocess.TimeoutExpired:
        return PreflightCheck(
            "device", 0.0, "TFLOP/s", False, True, f"no answer within {DEVICE_S:g} s: look at the driver"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return PreflightCheck("device", 0.0, "TFLOP/s", False, True, f"the trial failed: {error}"[:MAX_TEXT_LENGTH])
    return PreflightCheck("device", rate, "TFLOP/s", not wrong, True, wrong[:MAX_TEXT_LENGTH])


def network_checks(
    coordinator: str,
    node: str = "",
    pace: Callable[[int], None] | None = None,
    ask: Callable[..., dict[str, Any]] = call,
) -> list[PreflightCheck]:
    """Latency and clock of the coordinator, bandwidth to a peer's vault.

    `ask` is called as `elastic.rpc.control.client.call` is.
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
        return [PreflightCheck("coordinator", 0.0, "s", False, False, f"it does not answer: {error}"[:MAX_TEXT_LENGTH])]
    checks = [PreflightCheck("coordinator", best, "s", True)] if best < math.inf else []
    if best < math.inf:
        ok = abs(offset) <= CLOCK_S
        text = "" if ok else f"the clock is {abs(offset):.0f} s off: set it (NTP)"
        checks.append(PreflightCheck("clock", offset, "s", ok, True, text))
    return [*checks, *_peer(peers[:PEERS], node, pace)]


def _peer(nodes: Sequence[dict[str, Any]], node: str, pace: Callable[[int], None] | None) -> list[PreflightCheck]:
    """Bytes a second to the first vault that answers; nothing where there is nobody yet."""
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
    text = f"no vault of {len(problems)} peers can be reached (open the network between nodes): {problems[0]}"
    return [PreflightCheck("peer", 0.0, "bytes/s", False, True, text[:MAX_TEXT_LENGTH])]


def standing_of(score: float) -> int:
    """The score in steps of a quarter; 0: unknown."""
    return round(math.log(score, STEP)) if score > 0 else 0


class Gate:
    """Holds a node's first report back until the pre-flight is made; again after a refusal, and for every membership.

    `put` gets a `Preflight`, from another thread.
    """

    def __init__(
        self, mode: str, make: Callable[[], tuple[list[PreflightCheck], float]], put: Callable[[Preflight], object]
    ):
        """`mode`: on | strict | off."""
        self._mode, self._make, self._put = mode, make, put
        self._running = False
        self._timer: threading.Timer | None = None
        self.flight: Preflight | None = None
        """What was found; None: nothing yet."""

    @property
    def open(self) -> bool:
        """The node may ask."""
        return self._mode == "off" or self.flight is not None

    def ask(self) -> None:
        """Make the pre-flight, unless it is being made or a pause is kept."""
        if not (self.open or self._running):
            self._running = True
            threading.Thread(target=self._fly, name="preflight", daemon=True).start()

    def made(self, flight: Preflight) -> None:
        self.flight, self._running = flight, False

    def shut(self) -> None:
        """A new membership: the next report is a first one again."""
        self.flight = None

    def refused(self, retry_s: float) -> None:
        """Look again after a pause."""
        self.flight = None
        if not self._running:
            self._running = True
            self._timer = threading.Timer(retry_s, self._fly)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fly(self) -> None:
        began = time.perf_counter()
        try:
            checks, score = self._make()
        except Exception as error:  # noqa: BLE001 - a node whose pre-flight breaks is not fit, whatever it is
            checks, score = [PreflightCheck("preflight", 0.0, "", False, True, f"it broke off: {error!r}"[:MAX_TEXT_LENGTH])], 0.0
        self._put(Preflight(self._mode, time.perf_counter() - began, tuple(checks), score))
