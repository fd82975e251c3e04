"""Checks of a node before it joins: compute, memory, disks, devices, clock, coordinator, peer.

All checks take about 0.1 s if the node has no devices and reaches a peer. A check that cannot be
made is left out. A failed check is fatal only if the node would harm the job. The coordinator
decides whether the node may join (`elastic.core.policy.admission`).

A busy node or peer is not broken, so no check fails because of a long time alone: the speed of the
processor is measured in CPU time, a peer is unreachable only if its machine acknowledges nothing,
and a trial of the devices is hung only if it uses no CPU time. The limits are in
`elastic.core.protocol.timeouts`.
"""

from __future__ import annotations

import contextlib
import json
import logging
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

from elastic.agent.health.devices import DeviceReader
from elastic.agent.health.disks import disk_of, nearest_parent
from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, PreflightCheck
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS, Timeouts
from elastic.domain.errors import ElasticError, Unanswered, VaultUnreachable, describe
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.client import call
from elastic.store import checkpoints

log = logging.getLogger(__name__)
MATRIX_ROWS, ROUNDS = 256, 5
"""Rows of the square matrices, and number of multiplications; the fastest one counts."""
MIN_MEMORY_BYTES = 256 << 20
MIN_DISK_BYTES = 16 << 20
PROBE_BYTES, MAX_PEERS = 256 << 10, 3
MAX_CLOCK_OFFSET_S = 60.0
NOTICE_S = 5.0
"""The user is told which directories have not answered for this long."""
TRIAL_POLL_S = 0.1
"""Interval between looks at the CPU time of the trial of the devices."""
KILL_S = 10.0
"""Longest wait for the end of a killed trial. It cannot end while it waits for a device."""
SCORE_STEP = 1.25
"""Ratio between the scores of neighbouring score classes."""
TRIAL_MODULE = "elastic.worker.transport.device_check"


def local_checks(
    directories: Sequence[tuple[str, Path]],
    memory_bytes: int = 0,
    devices: DeviceReader | None = None,
    *,
    trial: bool = False,
    limits: Timeouts = DEFAULT_TIMEOUTS,
    tell: Callable[[str], object] = log.warning,
    checkpoint_url: str = "",
) -> tuple[list[PreflightCheck], float]:
    """Make the checks that need neither coordinator nor peer; return (checks, score).

    `memory_bytes`: memory that the plan may use; 0: unknown. `trial`: also compute on the devices,
    in a child process, which takes seconds. `tell(text)`: see `disk_checks`. `checkpoint_url`:
    that of the checkpoints, if they are in an object store. The score is the processor's speed in
    GFLOP/s, or after a trial that of the slowest device in TFLOP/s; 0: the check failed.
    """
    objects = [("checkpoints", checkpoint_url)] if checkpoint_url else []
    disks = disk_checks([*directories, *objects], limits, tell)
    checks = [compute(), memory(memory_bytes), *disks]
    score = checks[0].value if checks[0].ok else 0.0
    devices = devices if devices is not None else DeviceReader()
    found = device_checks(devices)
    checks += found
    if trial and found and not devices.hung:
        checks.append(device_trial(limits=limits))
        score = checks[-1].value if checks[-1].ok else 0.0
    return checks, score


def compute() -> PreflightCheck:
    """Multiply matrices of small integers: measure GFLOP/s of CPU time, which other processes do
    not shorten, and compare with the exact product."""
    a = (np.arange(MATRIX_ROWS**2, dtype=np.float32).reshape(MATRIX_ROWS, MATRIX_ROWS) % 7) - 3
    expected = a.astype(np.int64) @ a.astype(np.int64)
    best, right = math.inf, True
    for _ in range(ROUNDS):
        began = time.thread_time()
        result = a @ a
        best = min(best, time.thread_time() - began)
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


def disk_checks(
    directories: Sequence[tuple[str, Path | str]],
    limits: Timeouts = DEFAULT_TIMEOUTS,
    tell: Callable[[str], object] = log.warning,
) -> list[PreflightCheck]:
    """Check that files can be written in each directory (role, path) and that space is free. In
    place of a path, the URL of an object store may stand.

    All directories together have `limits.preflight_disk_s`, because their disks may hang.
    `tell(text)` is called if the user has to wait for some. A failure is not fatal for checkpoints:
    the job can go on without them.
    """
    checks = [_DiskCheck(role, path) for role, path in directories]
    began, limit_s = time.monotonic(), limits.preflight_disk_s
    late = [check for check in checks if not check.answers(began + min(NOTICE_S, limit_s))]
    if late:
        paths = ", ".join(str(check.path) for check in late)
        tell(f"no answer yet from {paths}: the pre-flight waits for up to {limit_s:g} s")
    for check in late:
        if not check.answers(began + limit_s):
            check.failed(f"has not answered for {limit_s:g} s")
    return [check.result for check in checks]


class _DiskCheck:
    """The check of one directory, on a thread of its own from construction on."""

    def __init__(self, role: str, path: Path | str) -> None:
        self.path, self._role = path, role
        self.result = _disk_check(role, 0, "not checked")
        self._checker = threading.Thread(target=self._check, name=f"disk-{role}", daemon=True)
        self._checker.start()

    def answers(self, until: float) -> bool:
        """Wait for the end of the check, at most until the given time; return whether it came."""
        self._checker.join(max(0.0, until - time.monotonic()))
        return not self._checker.is_alive()

    def failed(self, problem: str) -> None:
        self.result = _disk_check(self._role, 0, f"{self.path} {problem}")

    def _check(self) -> None:
        try:
            if isinstance(self.path, Path):
                self.result = _disk(self._role, self.path)
            else:
                checkpoints.probe(self.path)
                self.result = _disk_check(self._role, 0, "")
        except Exception as error:  # noqa: BLE001 - any error means that it cannot be used
            self.failed(f"cannot be used: {describe(error)}")


def _disk(role: str, path: Path) -> PreflightCheck:
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
    return _disk_check(role, free, problem)


def _disk_check(role: str, free: int, problem: str) -> PreflightCheck:
    return _check(f"disk:{role}", free, "bytes", problem, fatal=role != "checkpoints")


def device_checks(devices: DeviceReader) -> list[PreflightCheck]:
    """Return one check per device, from the driver's readings."""
    checks = []
    for seen in devices.read_patiently():
        problem = ""
        if seen.fault:
            problem = f"device {seen.index}: {seen.fault}: replace or reset it"
        elif seen.throttled:
            problem = f"device {seen.index} is throttled ({seen.throttled}): check its cooling"
        name = f"device:{seen.index}"
        checks.append(_check(name, seen.temperature_c, "C", problem, fatal=bool(seen.fault)))
    return checks


def device_trial(
    command: Sequence[str] = (sys.executable, "-m", TRIAL_MODULE),
    *,
    limits: Timeouts = DEFAULT_TIMEOUTS,
) -> PreflightCheck:
    """Measure TFLOP/s of a matrix product on every device. A child process computes it, because the
    agent must not import torch."""
    rate = 0.0
    try:
        found = json.loads(_output_of(command, limits).decode().strip().rpartition("\n")[2])
        rate, problem = float(found["tflops"]), str(found.get("error", ""))
    except TimeoutError as error:
        problem = f"{error}: check the driver"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"the trial failed: {error}"
    return _check("device", rate, "TFLOP/s", problem)


def _output_of(command: Sequence[str], limits: Timeouts) -> bytes:
    """Return the output of a process. Raises TimeoutError, and kills it, if it hangs."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    watch, problem = TrialWatch(limits, time.monotonic()), ""
    try:
        while not problem:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=TRIAL_POLL_S)[0]
            with contextlib.suppress(psutil.Error):  # it has just ended
                child = psutil.Process(process.pid)
                times, ready = child.cpu_times(), child.status() == psutil.STATUS_RUNNING
                problem = watch.look(times.user + times.system, ready, time.monotonic())
    finally:
        ended = _kill(process)
    raise TimeoutError(problem if ended else f"{problem}, and it does not end after SIGKILL")


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process and wait at most KILL_S for it; return whether it has ended."""
    process.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
    return process.returncode is not None


class TrialWatch:
    """Tells a trial that hangs from one that is slow because the machine is busy."""

    def __init__(self, limits: Timeouts, now: float) -> None:
        self._limits, self._cpu_s, self._moved_at = limits, 0.0, now

    def look(self, cpu_s: float, ready: bool, now: float) -> str:
        """Return why the trial hangs, or "". `cpu_s`: CPU time that it has used. `ready`: whether
        it runs, or waits for nothing but a processor."""
        if ready or cpu_s > self._cpu_s:
            self._cpu_s, self._moved_at = cpu_s, now
        if cpu_s > self._limits.trial_cpu_s:
            return f"the trial has no end after {self._limits.trial_cpu_s:g} s of CPU time"
        if now - self._moved_at >= self._limits.stuck_s:
            return f"the trial has used no CPU time for {self._limits.stuck_s:g} s"
        return ""


def network_checks(
    coordinator: str,
    node: str = "",
    pace: Callable[[int], None] | None = None,
    ask: Callable[..., dict[str, Any]] = call,
    limits: Timeouts = DEFAULT_TIMEOUTS,
) -> list[PreflightCheck]:
    """Measure latency and clock offset of the coordinator, and the bandwidth to a peer's vault.

    `ask` has the signature of `elastic.rpc.control.client.call`.
    """
    try:
        best, offset, peers = math.inf, 0.0, []
        for _ in range(2):
            began, wall = time.perf_counter(), time.time()
            answer = ask(coordinator, "peers", {"node": node}, timeout_s=limits.preflight_s)
            took = time.perf_counter() - began
            peers = answer.get("peers", [])
            if took < best and answer.get("now"):
                best, offset = took, float(answer["now"]) - wall - took / 2
    except ElasticError as error:
        problem = f"the coordinator does not answer: {error}"
        return [_check("coordinator", 0.0, "s", problem, fatal=False)]
    checks = []
    if best < math.inf:
        right = abs(offset) <= MAX_CLOCK_OFFSET_S + best / 2  # the answer may be that old
        problem = "" if right else f"the clock is off by {abs(offset):.0f} s: set it (NTP)"
        checks = [_check("coordinator", best, "s"), _check("clock", offset, "s", problem)]
    return [*checks, *_peer_check(peers[:MAX_PEERS], node, pace, limits)]


def _peer_check(
    nodes: Sequence[dict[str, Any]],
    node: str,
    pace: Callable[[int], None] | None,
    limits: Timeouts,
) -> list[PreflightCheck]:
    """Measure the bandwidth (bytes/s) to the first vault that answers; return [] without nodes.

    The check fails if no machine of a peer acknowledges what this node sends. A peer that
    acknowledges it but has not answered within the limit is busy, and is not measured.
    """
    problems: list[ElasticError] = []
    busy = ""
    for row in nodes:
        try:
            client = VaultClient(
                str(row.get("vault", "")),
                node=node,
                timeout_s=limits.preflight_s,
                pace=pace,
                peer=str(row.get("node", "")),
            )
            with contextlib.closing(client):
                seconds = min(client.probe(PROBE_BYTES) for _ in range(2))
        except Unanswered as error:
            busy = busy or f"not measured, for the network is sound but {error}"
            continue
        except ElasticError as error:
            problems.append(error)
            continue
        return [_check("peer", PROBE_BYTES / max(seconds, 1e-9), "bytes/s")]
    if busy:
        return [PreflightCheck("peer", 0.0, "bytes/s", True, True, busy[:MAX_TEXT_LENGTH])]
    if not problems:
        return []
    text = f"no vault of {len(problems)} peers can be used: {problems[0]}"
    if isinstance(problems[0], VaultUnreachable):
        text += " (open the network between nodes)"
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
