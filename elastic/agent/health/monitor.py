"""Samples a node's disks, memory, load, devices and links, and makes health reports.

The monitor samples on a thread of its own. Devices, disks and certificates are read on further
threads, which may hang. The monitor passes a `HealthReport` to the agent when something important
changed, and at long intervals otherwise. The coordinator decides what the figures mean.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic.agent.health.devices import DeviceReader
from elastic.agent.health.disks import Disks
from elastic.background import BackgroundReading
from elastic.core.protocol.health_report import (
    MAX_ENTRIES,
    MAX_TEXT_LENGTH,
    CertificateEnd,
    FailedOperation,
    HealthReport,
    LinkTraffic,
    UnreachablePeer,
)

log = logging.getLogger(__name__)
SAMPLE_S = 1.0
"""Interval between two samples."""
MAX_SILENT_SAMPLES = 20
"""Samples without a change after which a report is sent anyway."""
MIN_BYTES = 1 << 16
"""Smaller copies measure latency, not bandwidth."""
MIN_SENDS = 2
"""Minimum number of copies in a measurement window of a link."""
WINDOW_S, SHORT_WINDOWS = 10.0, 4
"""Length of a measurement window. The first SHORT_WINDOWS windows of a link, and those after its
bandwidth changed, end at the next sample."""
CHANGE_FACTOR = 1.5
"""Ratio between two bandwidths of a link that counts as a change."""
SCARCE_SHARES = (0.10, 0.05, 0.02, 0.01)
"""Free shares of memory or a disk below which the level of scarcity rises by 1."""


@dataclass(slots=True)
class _Window:
    """Measurement window of a link: copies sent to one peer since the last report."""

    began: float
    largest: int = 0
    sends: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    best: float = 0.0
    reported: float = 0.0
    """Best bandwidth of the last reported window, in bytes/s; 0: none was reported."""
    windows: int = 0
    """Number of reported windows since the bandwidth changed."""

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a copy. Copies smaller than half of the largest are left out, so that windows are
        comparable."""
        if nbytes > 2 * self.largest:
            self.clear(self.began)
        self.largest = max(self.largest, nbytes)
        if 2 * nbytes >= self.largest and seconds > 0:
            self.sends += 1
            self.nbytes += nbytes
            self.seconds += seconds
            self.best = max(self.best, nbytes / seconds)

    def clear(self, now: float) -> None:
        self.began, self.sends, self.nbytes, self.seconds, self.best = now, 0, 0, 0.0, 0.0

    def closes(self, now: float) -> bool:
        if self.sends < MIN_SENDS:
            return False
        low, high = sorted((self.best, self.reported))
        if not self.reported or high > CHANGE_FACTOR * low:
            self.windows = 0
        return self.windows < SHORT_WINDOWS or now - self.began >= WINDOW_S


class Monitor:
    """Samples the node's health on a thread of its own, which calls `emit(report)` for each report.
    Other threads may call the other methods."""

    def __init__(
        self,
        node: str,
        directories: Sequence[tuple[str, Path]],
        emit: Callable[[HealthReport], object],
        devices: DeviceReader | None = None,
        clock: Callable[[], float] = time.monotonic,
        certificates: Callable[[], tuple[CertificateEnd, ...]] | None = None,
        checkpoints: str = "",
    ) -> None:
        """`directories`: (role, path) of each directory that the node writes to. `certificates()`
        returns the ends of the node's certificates; None: it has none. `checkpoints`: their
        location."""
        self._checkpoints = checkpoints or str(dict(directories).get("checkpoints", ""))
        self._certificates: BackgroundReading[tuple[CertificateEnd, ...]] | None = None
        if certificates is not None:
            self._certificates = BackgroundReading("certificates", certificates, ())
        self._node, self._directories, self._emit = node, directories, emit
        self._disks = Disks(directories)
        self._devices, self._clock = devices if devices is not None else DeviceReader(), clock
        self._lock, self._ended, self._woken = threading.Lock(), False, threading.Event()
        self._windows: dict[str, _Window] = {}
        self._failures: tuple[FailedOperation, ...] = ()
        self._unreachable: tuple[UnreachablePeer, ...] = ()
        self._incarnation, self._epoch, self._silent_samples = "", 0, 0
        self._last: tuple[object, ...] | None = None
        """`_conditions` of the last report."""

    def start(self) -> Monitor:
        threading.Thread(target=self._run, name="health", daemon=True).start()
        return self

    def close(self) -> None:
        self._ended = True
        self._woken.set()

    def enter(self, incarnation: str, epoch: int) -> None:
        """Begin a new plan or membership: measure the links again and report at the next sample."""
        with self._lock:
            self._windows.clear()
            self._incarnation, self._epoch = incarnation, epoch
            self._silent_samples = MAX_SILENT_SAMPLES

    def sent(self, peer: str, nbytes: int, seconds: float) -> None:
        """Record that `nbytes` reached the peer in `seconds`."""
        if nbytes >= MIN_BYTES:
            with self._lock:
                self._windows.setdefault(peer, _Window(self._clock())).add(nbytes, seconds)

    def checkpoint_failed(self, why: str) -> None:
        """Report at once that a checkpoint could not be written: the job may end before the next
        sample."""
        path = self._checkpoints[:MAX_TEXT_LENGTH]
        with self._lock:
            count = 1 + sum(failure.count for failure in self._failures)
            self._failures = (FailedOperation("checkpoint", path, why[:MAX_TEXT_LENGTH], count),)
        self._woken.set()

    def unreachable(self, peers: tuple[UnreachablePeer, ...]) -> None:
        """Report at once which peers the node cannot reach now."""
        with self._lock:
            self._unreachable = peers
        self._woken.set()

    def connected(self) -> None:
        """Report unreachable peers again at the next sample: the coordinator may be a new one."""
        with self._lock:
            if self._unreachable:
                self._silent_samples = MAX_SILENT_SAMPLES

    def sample(self) -> HealthReport | None:
        """Sample the node's health. Return a report if one is due, else None."""
        memory = psutil.virtual_memory()
        devices = self._devices.read()
        disks = self._disks.read()
        certificates = self._certificates.read() if self._certificates is not None else ()
        with self._lock:
            links = self._links(self._clock())
            failures, self._failures = self._failures, ()
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
                failed_operations=failures,
                unreachable=self._unreachable[:MAX_ENTRIES],
                certificates=certificates,
            )
            self._silent_samples += 1
            conditions = _conditions(report)
            overdue = self._silent_samples > MAX_SILENT_SAMPLES
            if not (overdue or links or failures or conditions != self._last):
                return None
            self._silent_samples, self._last = 0, conditions
            return report

    def _run(self) -> None:
        while not self._ended:
            self._woken.wait(SAMPLE_S)
            self._woken.clear()
            try:
                report = self.sample()
            except Exception as error:  # noqa: BLE001 - the thread must not end
                log.warning("the node's health cannot be read: %r", error)
                continue
            if report is not None:
                self._emit(report)

    def _links(self, now: float) -> tuple[LinkTraffic, ...]:
        found: list[LinkTraffic] = []
        for peer, window in self._windows.items():
            if len(found) < MAX_ENTRIES and window.closes(now):
                found.append(
                    LinkTraffic(peer, window.sends, window.nbytes, window.seconds, window.best)
                )
                window.reported, window.windows = window.best, window.windows + 1
                window.clear(now)
        return tuple(found)


def _conditions(report: HealthReport) -> tuple[object, ...]:
    """Return the values of a report whose change is reported at once: states of devices, levels of
    scarcity of memory and disks (0: at least 10 % is free; higher levels mean less), peers that
    cannot be reached, and ends of certificates."""
    devices = [(d.index, d.throttled, d.errors, d.fault) for d in report.devices]
    disks = [(disk.free_bytes, disk.total_bytes) for disk in report.disks]
    spaces = [(report.memory_free_bytes, report.memory_total_bytes), *disks]
    levels = [sum(free < share * total for share in SCARCE_SHARES) for free, total in spaces]
    unreachable = [(one.peer, one.vault) for one in report.unreachable]
    return devices, levels, unreachable, report.certificates
