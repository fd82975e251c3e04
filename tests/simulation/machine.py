"""Puts the simulated clock, threads, sockets, disks and memory in the place of the real ones.

`installed` replaces names in the modules of the shells for the time of a run: the standard modules
that they import, the transports, and what reads the real machine. No code of the shells knows about
the simulation.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import importlib
import inspect
import logging
import os
import pkgutil
import queue
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import psutil

import elastic
from elastic import console
from elastic.agent.health import devices, disks, preflight
from elastic.agent.workers import output, processes
from elastic.coordinator import port_watch
from elastic.core.coordinator import transitions
from elastic.core.node.node import ProcessSample
from elastic.core.protocol.health_report import DiskSpace
from elastic.rpc import frames
from elastic.rpc.bulk import transfer
from elastic.rpc.control import client, event_loop, server
from elastic.rpc.security import rejections, tls
from elastic.store import open_store
from elastic.worker.engine import evaluation_runner, step
from elastic.worker.transport import links
from tests.simulation.control import (
    SimCoordinatorSession,
    SimPortWatch,
    SimServer,
    call,
    loop_of,
)
from tests.simulation.network import Sockets
from tests.simulation.primitives import Executor, Queues, SimFuture, Threading, Time, process_of
from tests.simulation.scheduler import Killed, Process, Scheduler

SHELLS = (
    *("agent", "background", "console", "coordinator", "lifeline", "metrics", "rpc", "store"),
    "telemetry",
    "worker",
)
DISK_BYTES = 100 << 30
SLOW_DISK_S = 0.5
"""Time of an operation that waits for a slow disk."""

HANG_S = 0.1
"""An operation that hangs looks this often whether the disk answers again."""


class Disk:
    """Stands in for the module `os` where it waits for disks or memory, or ends the process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def getpid(self) -> int:
        return process_of(self._scheduler).pid

    def _exit(self, code: int) -> None:
        if self._scheduler.ending:
            raise Killed
        process_of(self._scheduler).end(code)
        self._scheduler.leave_for_good()

    def getloadavg(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

    def chmod(self, *_: Any) -> None:
        pass  # of a Unix socket, which is simulated

    def fsync(self, descriptor: int) -> None:
        self._wait()

    def replace(self, source: Any, target: Any) -> None:
        self._wait()
        os.replace(source, target)

    def rename(self, source: Any, target: Any) -> None:
        self._wait()
        os.rename(source, target)

    def write(self, descriptor: int, data: bytes) -> int:
        host = process_of(self._scheduler).host
        if host.disk_error is not None or host.disk_hangs is not None:
            self._wait()
        return os.write(descriptor, data)

    def close(self, descriptor: int) -> None:
        if self._scheduler.current is not None:
            process_of(self._scheduler).local.get("locked", set()).discard(descriptor)
        os.close(descriptor)

    def posix_fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        host = process_of(self._scheduler).host
        self._scheduler.sleep(nbytes / host.memory_rate)
        if host.memory_error is not None:
            host.memory_error.hit()
        os.posix_fallocate(descriptor, offset, nbytes)

    def _wait(self) -> None:
        """Wait for the disk. Raises OSError if it is full or fails."""
        if self._scheduler.ending:
            raise Killed
        host = process_of(self._scheduler).host
        seconds = host.disk_s
        host.disk_waits += 1
        if host.disk_slow is not None:
            host.disk_slow.hit()
            seconds = SLOW_DISK_S
        self._scheduler.sleep(seconds * self._scheduler.uniform(0.3, 3.0))
        while host.disk_hangs is not None:
            host.disk_hangs.hit()
            self._scheduler.sleep(HANG_S)
        if host.disk_error is not None:
            host.disk_error.hit()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class Locks:
    """Stands in for the module `fcntl`: a lock of a file that does not block the real thread, and
    the length of the send queue of a socket."""

    LOCK_EX, LOCK_UN, LOCK_SH = fcntl.LOCK_EX, fcntl.LOCK_UN, fcntl.LOCK_SH
    LOCK_NB = fcntl.LOCK_NB

    def __init__(self, scheduler: Scheduler, sockets: Sockets) -> None:
        self._scheduler, self._sockets = scheduler, sockets

    def ioctl(self, descriptor: int, request: int, _: bytes) -> bytes:
        queued = self._sockets.unacked(descriptor) if request == termios.TIOCOUTQ else 0
        return queued.to_bytes(4, sys.byteorder)

    def flock(self, descriptor: int, how: int) -> None:
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                break
            except OSError as error:
                if how & fcntl.LOCK_NB or error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            self._scheduler.sleep(0.001)
        process = process_of(self._scheduler)
        if "locked" not in process.local:
            process.local["locked"] = set()
            process.at_exit.append(lambda: _unlock(process))
        process.local["locked"].add(descriptor)


def _unlock(process: Process) -> None:
    """Release the locks of a process that has ended."""
    for descriptor in process.local["locked"]:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


class Uuids:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._scheduler.rng.getrandbits(128))


class NoProcesses:
    """Stands in for `psutil` where it looks at processes and memory."""

    NoSuchProcess, STATUS_ZOMBIE = psutil.NoSuchProcess, psutil.STATUS_ZOMBIE

    def Process(self, pid: int) -> Any:
        raise psutil.NoSuchProcess(pid)

    def virtual_memory(self) -> Any:
        return SimpleNamespace(available=64 << 30, total=100 << 30)


class WorkerProcess:
    """Stands in for `subprocess.Popen`: the process of a worker."""

    def __init__(self, world: Any, argv: Any, env: dict[str, str], **_: Any) -> None:
        self._scheduler: Scheduler = world.scheduler
        parent = process_of(self._scheduler)
        self._process: Process = world.start_worker(parent, env)
        self.pid = self._process.pid

    def wait(self) -> int:
        while self._process.alive:
            if self._scheduler.current is not None:
                self._process.watchers.append(self._scheduler.current)
            self._scheduler.pause(None)
        return self._process.code or 0

    def send_signal(self, number: int) -> None:
        process = self._process
        if not process.alive:
            raise ProcessLookupError
        self._scheduler.at(self._scheduler.uniform(0.0005, 0.02), lambda: process.end(-number))


class NoOutput:
    """Stands in for the output of workers, which print nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def open(self, *_: Any) -> tuple[int, int]:
        return os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)

    def start(self) -> None:
        pass

    def finish(self, timeout_s: float = 1.0) -> None:
        pass

    def save(self, timeout_s: float) -> None:
        pass

    def last_error(self, folder: Any, code: int) -> str:
        return ""


class NoDevices(devices.Devices):
    def __init__(self, *_: Any) -> None:
        super().__init__(nvml=SimpleNamespace(NVMLError=OSError, nvmlInit=_no_driver))


def _no_driver() -> None:
    raise OSError("no driver")


class OfProcess:
    """Stands in for an object of which each process has one; `make` makes it."""

    def __init__(self, scheduler: Scheduler, name: str, make: Callable[[], Any]) -> None:
        self._scheduler, self._name, self._make = scheduler, name, make

    def __getattr__(self, name: str) -> Any:
        local = process_of(self._scheduler).local
        if self._name not in local:
            local[self._name] = self._make()
        return getattr(local[self._name], name)


class OfThisRun:
    """Stands in for a module, but only for the threads of the run. A thread that an earlier test
    has left gets the real module."""

    def __init__(self, scheduler: Scheduler, real: Any, stand_in: Any) -> None:
        self._scheduler, self._real, self._stand_in = scheduler, real, stand_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stand_in if self._scheduler.runs_here() else self._real, name)


class Trail(logging.Handler):
    """Writes logs to the trail, and notes unexpected errors."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(logging.INFO)
        self._scheduler = scheduler
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._scheduler.ending or not self._scheduler.runs_here():
            return
        task = self._scheduler.current
        where = f"{task.process.name}/{task.name}" if task is not None else "-"
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            if isinstance(record.exc_info[1], Killed):
                return
            trace = "".join(traceback.format_exception(record.exc_info[1]))
            self.errors.append(f"{where}: {text}\n{trace}")
            text += f" ({record.exc_info[1]!r})"
        self._scheduler.log(f"{where} {record.levelname}: {text}")


def _disk_of(scheduler: Scheduler, role: str, path: Any) -> DiskSpace:
    host = process_of(scheduler).host
    free = 0 if host.disk_error or (role == "memory" and host.memory_error) else DISK_BYTES
    return DiskSpace(role, str(path), free, 2 * DISK_BYTES, f"{host.name}:{role}")


def _replacements(world: Any) -> dict[Any, Any]:
    scheduler: Scheduler = world.scheduler
    clock, threads, disk = Time(scheduler), Threading(scheduler), Disk(scheduler)
    SimFuture.default, sockets = scheduler, Sockets(scheduler)
    Popen = partial(WorkerProcess, world)

    def sample(rank: int, pid: int) -> ProcessSample | None:
        return world.sample(rank, pid)  # type: ignore[no-any-return]

    def pool(workers: int = 1, name: str = "pool") -> Executor:
        return Executor(scheduler, workers, name)

    def pid() -> int:
        return process_of(scheduler).pid

    def local_checks(*_: Any, **__: Any) -> tuple[list[Any], float]:
        scheduler.sleep(scheduler.uniform(0.02, 0.2))
        return [], 100.0

    modules: dict[Any, Any] = {
        threading: threads,
        queue: Queues(scheduler),
        time: clock,
        socket: sockets,
        os: disk,
        fcntl: Locks(scheduler, sockets),
        uuid: Uuids(scheduler),
        psutil: NoProcesses(),
        subprocess: SimpleNamespace(Popen=Popen, DEVNULL=None),
        tempfile: SimpleNamespace(gettempdir=lambda: str(world.directory / "disk")),
        traceback: SimpleNamespace(
            format_exc=traceback.format_exc,
            print_exc=lambda: None,
            print_exception=lambda error: None,
        ),
    }
    return {real: OfThisRun(scheduler, real, found) for real, found in modules.items()} | {
        time.monotonic: clock.monotonic,
        time.time: clock.time,
        time.perf_counter: clock.perf_counter,
        threading.Event: threads.Event,
        concurrent.futures.Future: SimFuture,
        concurrent.futures.ThreadPoolExecutor: pool,
        event_loop.event_loop: partial(loop_of, scheduler),
        client.CoordinatorSession: partial(SimCoordinatorSession, scheduler),
        client.call: partial(call, scheduler),
        server.Server: partial(SimServer, scheduler, world.losses),
        transitions.record_event: world.losses.watched(transitions.record_event, pid),
        transitions.apply_rules: world.losses.watched(transitions.apply_rules, pid),
        port_watch.PortWatch: partial(SimPortWatch, scheduler),
        open_store.open_store: world.open_store,
        rejections.REJECTIONS: OfProcess(scheduler, "rejections", rejections.Rejections),
        disks.disk_of: partial(_disk_of, scheduler),
        devices.Devices: NoDevices,
        preflight.local_checks: local_checks,
        processes.process_sample: sample,
        # Its number of threads depends on the descriptors of this process.
        console.Console: partial(console.Console, (-1, -1)),
        output.Output: NoOutput,
        links.Links: world.links,
        step.StepRunner: world.steps,
        evaluation_runner.EvaluationRunner: world.evaluations,
    }


@functools.cache
def _modules() -> tuple[Any, ...]:
    """Import all modules of the shells that can be imported here. One that is imported during a run
    would have the real names in this run, and the stand-ins of this run in later ones."""
    found = []
    for info in pkgutil.walk_packages(elastic.__path__, "elastic.", onerror=lambda name: None):
        parts = info.name.split(".")
        if parts[1] in SHELLS and parts[-1] != "__main__":
            with contextlib.suppress(ImportError):  # an extra is missing
                found.append(importlib.import_module(info.name))
    return tuple(found)


def _functions(module: Any) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield value
        elif inspect.isclass(value):
            yield from (f for f in vars(value).values() if inspect.isfunction(f))


@contextlib.contextmanager
def installed(world: Any) -> Iterator[Trail]:
    """Run the shells in `world` meanwhile."""
    modules = _modules()
    table = {id(real): stand_in for real, stand_in in _replacements(world).items()}
    undo: list[Callable[[], object]] = []
    for module in modules:
        for function in _functions(module):
            defaults = function.__defaults__
            if defaults and any(id(value) in table for value in defaults):
                undo.append(partial(setattr, function, "__defaults__", defaults))
                function.__defaults__ = tuple(table.get(id(v), v) for v in defaults)
            named = function.__kwdefaults__
            if named and any(id(value) in table for value in named.values()):
                undo.append(partial(setattr, function, "__kwdefaults__", named))
                function.__kwdefaults__ = {k: table.get(id(v), v) for k, v in named.items()}
        for name, value in list(vars(module).items()):
            if id(value) in table and not name.startswith("__"):
                undo.append(partial(setattr, module, name, value))
                setattr(module, name, table[id(value)])
    # Copies are small here, and rates low. So these sizes are smaller, too.
    sizes = (transfer, "ASK_BYTES", world.scenario.ask_bytes), (preflight, "PROBE_BYTES", 4096)
    for module, name, nbytes in sizes:
        undo.append(partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, nbytes)
    # The order of a set of streams must be the same in each run of a seed.
    undo.append(partial(delattr, frames.FrameStream, "__hash__"))
    setattr(frames.FrameStream, "__hash__", lambda stream: hash(stream._sock))  # noqa: B010
    undo.append(partial(tls.use, tls.use(tls.SecuritySettings())))  # an earlier test's
    trail = Trail(world.scheduler)
    root = logging.getLogger("elastic")
    before = root.handlers, root.level, root.propagate
    root.handlers, root.propagate = [trail], False
    root.setLevel(logging.INFO)  # loggers remember what it was, unless it is set by this call
    try:
        yield trail
    finally:
        root.handlers, root.propagate = before[0], before[2]
        root.setLevel(before[1])
        for action in reversed(undo):
            action()
