"""A substitute for pynvml, with faults."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any


class Driver:
    """`count` devices. Tests change `heat`, `mask`, `ecc` and `gone`, and add (device, XID) to
    `messages`."""

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
        self.messages: deque[tuple[int, int]] = deque()

    def nvmlInit(self) -> None:
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

    def nvmlDeviceGetName(self, handle: int) -> str:
        if handle in self.gone:
            raise self.NVMLError("GPU is lost")
        return "NVIDIA Toy"

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return self.heat[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.mask[handle]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.ecc[handle]
