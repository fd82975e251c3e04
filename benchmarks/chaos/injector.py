"""Carries out the faults of a case that the product does not inject itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from benchmarks.chaos.case import OuterFault
from benchmarks.chaos.job import Job, NetworkJob

GROUPS = Path("/sys/fs/cgroup/memory")
SPARE_BYTES = 2 << 20
"""Memory that a node has left before the kernel kills."""
HOG = "import os, time\nx = [os.urandom(1 << 20) for _ in range(256)]\ntime.sleep(60)"
OOM_S = 20.0


def unsupported(fault: OuterFault) -> str:
    """Return the reason why this machine cannot carry out a fault; "" if it can."""
    if fault.kind == "oom" and not os.access(GROUPS / "cgroup.procs", os.W_OK):
        return "the kernel's memory groups (version 1) cannot be changed here"
    return ""


@dataclass(frozen=True)
class Injection:
    """A fault that was carried out, at `at` (seconds since 1970)."""

    fault: OuterFault
    at: float
    note: str = ""


class Injector:
    """Watches the progress of a job and carries out the faults that are due. `close` undoes all."""

    def __init__(self, job: Job) -> None:
        self._job, self._pending = job, list(job.case.own)
        self._ran = self._recovering = False
        self._step = self._microbatch = 0
        self._ends: list[tuple[float, Callable[[], object]]] = []
        """Time and function that end each lasting fault."""
        self._groups = _Groups(job) if any(f.kind == "oom" for f in self._pending) else None
        self.done: list[Injection] = []

    def poll(self) -> None:
        if self._groups is not None:
            self._groups.take_agents()
        for entry in self._job.progress.read():
            phase = entry.get("phase")
            self._step, self._microbatch = (
                int(entry.get("step", 0)),
                int(entry.get("microbatch", 0)),
            )
            running = phase == "running"
            self._recovering = not running and (self._recovering or self._ran)
            self._ran = self._ran or running
            if phase in ("finished", "failed"):
                self._pending.clear()
            for fault in [f for f in self._pending if self._due(f)]:
                self._pending.remove(fault)
                self._carry_out(fault)
        for end in [e for e in self._ends if time.monotonic() >= e[0]]:
            self._ends.remove(end)
            end[1]()

    def close(self) -> None:
        for _, end in self._ends:
            end()
        self._ends.clear()
        if self._groups is not None:
            unharmed = self._groups.close()
            self.done = [
                replace(one, note="the kernel killed nothing") if one.fault in unharmed else one
                for one in self.done
            ]

    def _due(self, fault: OuterFault) -> bool:
        if not self._ran or self._step < fault.step:
            return False
        if fault.recovery:
            return self._recovering
        return self._step > fault.step or self._microbatch >= fault.microbatch

    def _carry_out(self, fault: OuterFault) -> None:
        at, note = time.time(), ""
        try:
            end = self._begin(fault)
            if end is not None:
                self._ends.append((time.monotonic() + fault.duration_s, end))
        except (psutil.Error, OSError) as error:
            note = f"not possible: {error}"
        self.done.append(Injection(fault, at, note))

    def _begin(self, fault: OuterFault) -> Callable[[], object] | None:
        """Begin a fault; return the function that ends it, if it lasts."""
        job = self._job
        match fault.kind:
            case "pause-coordinator":
                process = job.coordinator()
                if process is None:
                    raise OSError("no coordinator runs")
                process.suspend()
                return lambda: _resume(process)
            case "full":
                fillers = [folder / "filler" for folder in job.disk(fault.disk, fault.node)]
                for filler in fillers:
                    fill(filler)
                return lambda: _remove(fillers)
            case "oom":
                assert self._groups is not None
                self._groups.exhaust(fault)
                return None
        assert isinstance(job, NetworkJob)
        return _begin_in_network(job, fault)


def _begin_in_network(job: NetworkJob, fault: OuterFault) -> Callable[[], object] | None:
    match fault.kind:
        case "partition":
            job.partition(fault.node)
            return lambda: job.partition(fault.node, healed=True)
        case "cut":
            pairs = [(fault.node, fault.peer)]
            pairs += [(fault.peer, fault.node)] if fault.both else []
            _cut(job, pairs, fault.silent, healed=False)
            return lambda: _cut(job, pairs, fault.silent, healed=True)
        case "kill-coordinator":
            process = job.coordinator()
            if process is None:
                raise OSError("no coordinator runs")
            process.kill()
        case "drain":
            job.drain(fault.node)
        case "join":
            job.join()
        case _:
            raise ValueError(fault.kind)
    return None


def _cut(job: NetworkJob, pairs: list[tuple[str, str]], silent: bool, healed: bool) -> None:
    for node, peer in pairs:
        job.cut(node, peer, silent, healed)


def _remove(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.resume()


def fill(filler: Path) -> None:
    """Take all free bytes of a disk."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


class _Groups:
    """A memory group of the kernel for each agent and its workers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._wanted = {fault.node for fault in job.case.own if fault.kind == "oom"}
        self._groups: dict[str, Path] = {}
        self._threads: list[threading.Thread] = []
        self._unharmed: list[OuterFault] = []
        """Faults that killed nothing."""

    def take_agents(self) -> None:
        """Move agents that have just started to their groups; their workers inherit these."""
        for node in self._wanted - set(self._groups):
            agent = self._job.agent(node)
            if agent is not None:
                group = GROUPS / f"elastic-chaos-{os.getpid()}-{node}"
                group.mkdir()
                (group / "cgroup.procs").write_text(str(agent.pid))
                self._groups[node] = group

    def exhaust(self, fault: OuterFault) -> None:
        """Let the node run out of memory until the kernel kills the target."""
        agent, group = self._job.agent(fault.node), self._groups.get(fault.node)
        if agent is None or group is None:
            raise OSError(f"no agent of {fault.node} runs")
        workers = sorted(agent.children(), key=lambda p: p.memory_info().rss)
        if fault.target == "worker" and not workers:
            raise OSError(f"{fault.node} has no worker")
        victim = agent if fault.target == "agent" else workers[-1]
        Path(f"/proc/{victim.pid}/oom_score_adj").write_text("1000")
        thread = threading.Thread(target=self._exhaust, args=(fault, group))
        thread.start()
        self._threads.append(thread)

    def _exhaust(self, fault: OuterFault, group: Path) -> None:
        kills, end = _kills(group), time.monotonic() + OOM_S
        while not _limit(group) and time.monotonic() < end:
            time.sleep(0.05)
        hog = subprocess.Popen([sys.executable, "-c", HOG], preexec_fn=partial(_enter, group))
        while _kills(group) == kills and time.monotonic() < end:
            time.sleep(0.005)
        if _kills(group) == kills:
            self._unharmed.append(fault)
        (group / "memory.limit_in_bytes").write_text("-1")
        hog.kill()
        hog.wait()

    def close(self) -> list[OuterFault]:
        """Remove the groups. Return the faults that killed nothing."""
        for thread in self._threads:
            thread.join()
        for group in self._groups.values():
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    (GROUPS / "cgroup.procs").write_text(pid)
                group.rmdir()
        return self._unharmed


def _enter(group: Path) -> None:
    """Let this process use the memory of the group. It is the kernel's second victim, so that the
    kernel kills nobody else before the limit is lifted."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    Path("/proc/self/oom_score_adj").write_text("900")


def _limit(group: Path) -> bool:
    """Leave a group little more memory than it uses; return whether the kernel accepted that."""
    used = int((group / "memory.usage_in_bytes").read_text())
    try:
        (group / "memory.limit_in_bytes").write_text(str(used + SPARE_BYTES))
    except OSError:  # it uses more by now
        return False
    return True


def _kills(group: Path) -> int:
    words = (group / "memory.oom_control").read_text().split()
    return int(words[words.index("oom_kill") + 1])
