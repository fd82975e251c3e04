"""A substitute for pynvml, with faults."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from elastic.agent.health.devices import DeviceReader, Devices
from tests.patience import LONG_S


class Driver:
    """`count` devices. Tests change `heat`, `mask`, `ecc` and `gone`, and add (device, XID) to
    `messages`. Calls for devices in `stuck`, and with -1 the first call, wait for `go`."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(self, count: int) -> None:
        self.heat, self.mask, self.ecc = [40] * count, [0] * count, [5] * count
        self.gone: set[int] = set()
        self.stuck: set[int] = set()
        self.go = threading.Event()
        self.messages: deque[tuple[int, int]] = deque()

    def nvmlInit(self) -> None:
        self._answer(-1)
        if not self.heat:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.heat)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "reading never waits"
        if not self.messages:
            raise self.NVMLError("Timeout")
        device, xid = self.messages.popleft()
        return SimpleNamespace(device=device, eventData=xid)

    def _answer(self, handle: int) -> None:
        assert handle not in self.stuck or self.go.wait(LONG_S)

    def nvmlDeviceGetName(self, handle: int) -> str:
        self._answer(handle)
        if handle in self.gone:
            raise self.NVMLError("GPU is lost")
        return "NVIDIA Toy"

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return self.heat[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.mask[handle]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.ecc[handle]


def reader(driver: Driver) -> DeviceReader:
    """Return a reader of the driver's devices."""
    return DeviceReader(lambda: Devices(driver))
