"""Reads this node's accelerators through NVML. Without a driver or pynvml, no devices are found.

Reading needs no CUDA context and no device memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic.core.protocol.health_report import MAX_ENTRIES, MAX_TEXT_LENGTH, DeviceHealth

log = logging.getLogger(__name__)
READ_S = 0.5
"""A reading that takes longer is not waited for."""
HUNG_S = 60.0
"""A driver that does not answer for this long is faulty. It may need 20 s to start."""
MAX_GAP_S = 2.0
"""If two looks are further apart, the agent itself did not run, and the time beyond this does not
count against the driver."""
DEVICE_XIDS = frozenset({48, 62, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""XID errors that mean a faulty device, from NVIDIA's list. Errors of the program (XID 13, 31, 43,
45) do not count."""
THROTTLED = (
    ("nvmlClocksThrottleReasonSwThermalSlowdown", "too hot"),
    ("nvmlClocksThrottleReasonHwThermalSlowdown", "too hot"),
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "power brake"),
)


class Devices:
    """Reads the devices that this node may use. Not thread-safe. Driver errors are not raised: a
    device that does not answer is reported with a fault."""

    def __init__(self, nvml: Any = None, environ: Mapping[str, str] | None = None) -> None:
        """`nvml`: the pynvml module or a substitute; None: the installed module, if any."""
        self._nvml = nvml if nvml is not None else _import_pynvml()
        self._handles: list[tuple[int, Any]] = []
        self._initial_errors: dict[int, int] = {}
        self._faults: dict[int, str] = {}
        self._events: Any = None
        self.reading = -1
        """Index of the device that is being read; -1: none is."""
        if self._nvml is not None:
            self._open((os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES"))

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> tuple[DeviceHealth, ...]:
        """Return the current readings of the first MAX_ENTRIES devices."""
        self._read_events()
        found = []
        for index, handle in self._handles[:MAX_ENTRIES]:
            self.reading = index
            found.append(self._read(index, handle))
        self.reading = -1
        return tuple(found)

    def _open(self, visible: str | None) -> None:
        try:
            self._nvml.nvmlInit()
            here = range(self._nvml.nvmlDeviceGetCount())
            words = visible.split(",") if visible else map(str, here)
            indices = [int(word) for word in words if word.strip().isdigit()]
            self._handles = [
                (i, self._nvml.nvmlDeviceGetHandleByIndex(i)) for i in indices if i in here
            ]
        except self._nvml.NVMLError as error:
            log.info("devices are not monitored: %s", error)
            self._handles = []
            return
        try:
            self._events = self._nvml.nvmlEventSetCreate()
            for _, handle in self._handles:
                kind = self._nvml.nvmlEventTypeXidCriticalError
                self._nvml.nvmlDeviceRegisterEvents(handle, kind, self._events)
        except self._nvml.NVMLError as error:
            log.info("XID errors of the driver are not monitored: %s", error)
            self._events = None

    def _read_events(self) -> None:
        """Read the driver's events since the last call, and note the faulty devices."""
        for _ in range(MAX_ENTRIES if self._events is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                return  # no message is left
            xid = int(event.eventData)
            index = next((i for i, handle in self._handles if handle == event.device), -1)
            if xid in DEVICE_XIDS and index >= 0:
                self._faults[index] = f"XID {xid}"

    def _read(self, index: int, handle: Any) -> DeviceHealth:
        nvml = self._nvml
        try:
            name = nvml.nvmlDeviceGetName(handle)
            temperature_c = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        except nvml.NVMLError as error:
            fault = f"the device does not answer: {error}"
            return DeviceHealth(index, "", fault=fault[:MAX_TEXT_LENGTH])
        name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        throttled, errors = self._throttled(handle), self._errors(index, handle)
        fault = self._faults.get(index, "")
        return DeviceHealth(index, name[:MAX_TEXT_LENGTH], temperature_c, throttled, errors, fault)

    def _throttled(self, handle: Any) -> str:
        mask = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        found = [text for name, text in THROTTLED if mask & int(getattr(self._nvml, name, 0))]
        return ", ".join(dict.fromkeys(found))

    def _errors(self, index: int, handle: Any) -> int:
        kinds = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        count = self._number("nvmlDeviceGetTotalEccErrors", handle, *kinds)
        return 0 if count is None else max(0, count - self._initial_errors.setdefault(index, count))

    def _number(self, function: str, *args: Any) -> int | None:
        """Return the integer from a function of NVML; None if the device does not support it."""
        try:
            return int(getattr(self._nvml, function)(*args))
        except self._nvml.NVMLError:
            return None


class DeviceReader:
    """Reads the devices on a thread of its own, so that a driver that hangs delays nobody for long.
    One thread uses it."""

    def __init__(
        self,
        open_devices: Callable[[], Devices] = Devices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._clock = open_devices, clock
        self._devices: Devices | None = None
        """None: not opened yet."""
        self._known: tuple[DeviceHealth, ...] = ()
        self._reader: threading.Thread | None = None
        self._looked_at, self._waited_s = 0.0, 0.0
        """Time of the last look, and time for which the present reading has been awaited."""

    @property
    def hung(self) -> bool:
        """Whether the driver has not answered for HUNG_S."""
        return self._waited_s >= HUNG_S

    def read(self) -> tuple[DeviceHealth, ...]:
        """Return the newest known readings. If the driver hangs, the device that it was asked for
        has a fault; all have one if it was asked for none."""
        if self._devices is not None and len(self._devices) == 0:
            return ()
        if self._reader is None or not self._reader.is_alive():
            self._looked_at, self._waited_s = self._clock(), 0.0
            self._reader = threading.Thread(target=self._read, name="devices", daemon=True)
            self._reader.start()
        self._reader.join(READ_S)
        now = self._clock()
        if self._reader.is_alive():
            self._waited_s += min(now - self._looked_at, MAX_GAP_S)
        else:
            self._waited_s = 0.0
        self._looked_at = now
        return self._with_fault() if self.hung else self._known

    def read_patiently(self) -> tuple[DeviceHealth, ...]:
        """Return new readings; wait for them until the driver counts as hung."""
        found = self.read()
        while self._waited_s > 0 and not self.hung:
            found = self.read()
        return found

    def _with_fault(self) -> tuple[DeviceHealth, ...]:
        asked = self._devices.reading if self._devices is not None else -1
        known = {one.index: one for one in self._known}
        fault = f"the driver has not answered for {HUNG_S:g} s"
        for index in (asked,) if asked >= 0 else tuple(known) or (0,):
            known[index] = replace(known.get(index, DeviceHealth(index, "")), fault=fault)
        return tuple(known.values())

    def _read(self) -> None:
        try:
            if self._devices is None:
                self._devices = self._open()
            self._known = self._devices.read()
        except Exception as error:  # noqa: BLE001 - the next reading may succeed
            log.warning("the devices cannot be read: %r", error)


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
