"""The agent's look at its node: room on disks, memory, load, devices, and how fast copies reach the peer.

A thread of its own, because a look at a dead network disk can last. It hands a `HealthReport` to the agent when
something changed that the coordinator goes by, and every so often otherwise. What figures mean is decided there.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic.agent.health.devices import Devices
from elastic.core.protocol.health_report import (
    MAX_ENTRIES,
    MAX_TEXT_LENGTH,
    DeviceHealth,
    DiskSpace,
    FailedOperation,
    HealthReport,
    LinkTraffic,
)

log = logging.getLogger(__name__)
SAMPLE_S = 1.0
"""Between two looks."""
QUIET_LOOKS = 20
"""Looks without news after which a report is sent all the same."""
LEAST_BYTES = 1 << 16
"""Smaller copies tell of latency, not of the link."""
LEAST_SENDS = 2
"""Copies without which a window of a link is not closed."""
WINDOW_S, FIRST_WINDOWS = 10.0, 4
"""A window of a link lasts so long, but for the first ones and those after a change, which last one look."""
DIFFERS = 1.5
"""Factor by which it then differs."""
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "glusterfs",
    "9p",
    "afs",
    "fuse.",
)
"""File systems that several machines share, by the beginning of their type."""


@dataclass(slots=True)
class _Window:
    """Copies sent to one peer since the last report."""

    began: float
    largest: int = 0
    sends: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    best: float = 0.0
    told: float = 0.0
    windows: int = 0

    def add(self, nbytes: int, seconds: float) -> None:
        """Copies of about the largest size alone: they tell the same every time."""
        if nbytes > 2 * self.largest:
            self.clear(self.began)
        self.largest = max(self.largest, nbytes)
        if 2 * nbytes >= self.largest and seconds > 0:
            self.sends, self.nbytes, self.seconds = (
                self.sends + 1,
                self.nbytes + nbytes,
                self.seconds + seconds,
            )
            self.best = max(self.best, nbytes / seconds)

    def clear(self, now: float) -> None:
        self.began, self.sends, self.nbytes, self.seconds, self.best = now, 0, 0, 0.0, 0.0

    def closes(self, now: float) -> bool:
        if self.sends < LEAST_SENDS:
            return False
        if not self.told or max(self.best, self.told) > DIFFERS * min(self.best, self.told):
            self.windows = 0
        return self.windows < FIRST_WINDOWS or now - self.began >= WINDOW_S


class Monitor:
    """`emit` gets reports, from the monitor's thread. `sent` and `failed` may be called from any thread."""

    def __init__(
        self,
        node: str,
        directories: Sequence[tuple[str, Path]],
        emit: Callable[[HealthReport], object],
        devices: Devices | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directories`: (role, path) of what the node writes to."""
        self._node, self._directories, self._emit = node, directories, emit
        self._devices, self._clock = devices if devices is not None else Devices(), clock
        self._lock, self._ended, self._woken = threading.Lock(), False, threading.Event()
        self._windows: dict[str, _Window] = {}
        self._mishaps: dict[tuple[str, str], FailedOperation] = {}
        self._incarnation, self._epoch, self._quiet = "", 0, 0
        self._last: HealthReport | None = None

    def start(self) -> Monitor:
        threading.Thread(target=self._run, name="health", daemon=True).start()
        return self

    def close(self) -> None:
        self._ended = True
        self._woken.set()

    def enter(self, incarnation: str, epoch: int) -> None:
        """A new plan, or a new membership: links are measured anew."""
        with self._lock:
            self._windows.clear()
            self._incarnation, self._epoch, self._quiet = incarnation, epoch, QUIET_LOOKS

    def sent(self, peer: str, nbytes: int, seconds: float) -> None:
        """So many bytes are whole at the peer after so many seconds."""
        if nbytes >= LEAST_BYTES:
            with self._lock:
                self._windows.setdefault(peer, _Window(self._clock())).add(nbytes, seconds)

    def failed(self, what: str, path: str, detail: str) -> None:
        """Something could not be written. It is told at once: the job may be over at the next look."""
        with self._lock:
            count = self._mishaps[what, path].count + 1 if (what, path) in self._mishaps else 1
            if count > 1 or len(self._mishaps) < MAX_ENTRIES:
                self._mishaps[what, path] = FailedOperation(what, path[:MAX_TEXT_LENGTH], detail[:MAX_TEXT_LENGTH], count)
        self._woken.set()

    def look(self) -> HealthReport | None:
        """The node as it is now, if that is news."""
        memory = psutil.virtual_memory()
        devices, disks = self._devices.read(), tuple(self._disks())
        with self._lock:
            links = self._links(self._clock())
            failed_operations, self._mishaps = tuple(self._mishaps.values()), {}
            report = HealthReport(
                node=self._node,
                incarnation=self._incarnation,
                at=time.time(),
                epoch=self._epoch,
                load=os.getloadavg()[0] / (os.cpu_count() or 1),
                memory_free_bytes=memory.available,
                memory_total_bytes=memory.total,
                disks=disks,
                devices=devices,
                links=links,
                failed_operations=failed_operations,
            )
            self._quiet += 1
            if not (self._quiet > QUIET_LOOKS or links or failed_operations or _differs(self._last, report)):
                return None
            self._quiet, self._last = 0, report
            return report

    def _run(self) -> None:
        while not self._ended:
            self._woken.wait(SAMPLE_S)
            self._woken.clear()
            try:
                report = self.look()
            except (OSError, psutil.Error) as error:
                log.warning("health is not known now: %s", error)
                continue
            if report is not None:
                self._emit(report)

    def _links(self, now: float) -> tuple[LinkTraffic, ...]:
        found: list[LinkTraffic] = []
        for peer, window in self._windows.items():
            if len(found) < MAX_ENTRIES and window.closes(now):
                found.append(LinkTraffic(peer, window.sends, window.nbytes, window.seconds, window.best))
                window.told, window.windows = window.best, window.windows + 1
                window.clear(now)
        return tuple(found)

    def _disks(self) -> list[DiskSpace]:
        return [disk for role, path in self._directories if (disk := disk_of(role, path)) is not None]


def disk_of(role: str, path: Path) -> DiskSpace | None:
    """Room where `path` lies, or will lie; None: nothing of it is there."""
    standing = next((one for one in (path, *path.parents) if one.exists()), None)
    if standing is None:
        return None
    stat = os.statvfs(standing)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return DiskSpace(role, str(path)[:MAX_TEXT_LENGTH], free, total, volume(standing))


def volume(path: Path) -> str:
    """A name for the file system of `path` that is the same on every machine that shares it."""
    mounts = [p for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)]
    mount = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    if mount is not None and mount.fstype.startswith(NETWORK):
        return mount.device[:MAX_TEXT_LENGTH]
    return f"{socket.gethostname()}:{os.stat(path).st_dev}"


def _differs(last: HealthReport | None, report: HealthReport) -> bool:
    """Something that does not change all the time did."""
    if last is None or [_state(d) for d in last.devices] != [_state(d) for d in report.devices]:
        return True
    if _scarce(last.memory_free_bytes, last.memory_total_bytes) != _scarce(
        report.memory_free_bytes, report.memory_total_bytes
    ):
        return True
    return [_scarce(d.free_bytes, d.total_bytes) for d in last.disks] != [
        _scarce(d.free_bytes, d.total_bytes) for d in report.disks
    ]


def _state(device: DeviceHealth) -> tuple[int, str, int, str]:
    return device.index, device.throttled, device.errors, device.fault


def _scarce(free: int, total: int) -> int:
    """0: much is left; the higher the less."""
    shares = (0.10, 0.05, 0.02, 0.01)
    return sum(free < share * total for share in shares)
