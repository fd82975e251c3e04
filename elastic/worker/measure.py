"""How long a worker's stages compute: measured while training, without stopping the device.

On the CPU by the clock; on CUDA by events in the stream, which are read at the end of the step, when the
device has passed them anyhow. Waiting for neighbours is not in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median

import torch

from elastic.core.messages import Measured
from elastic.planning.schedule import Action, Kind

Mark = float | torch.cuda.Event


class Meter:
    """Times the compute actions of one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: tuple[Action, Mark] | None = None
        self._spans: list[tuple[Action, Mark, Mark]] = []

    def begin(self, action: Action) -> None:
        """`action` begins now."""
        self._open = (action, self._mark())

    def end(self) -> None:
        """The action that began last is done (on CUDA: launched)."""
        if self._open is not None:
            self._spans.append((*self._open, self._mark()))
            self._open = None

    def take(self, epoch: int, step: int, local_rank: int) -> Measured | None:
        """What was measured since the last call, or None for nothing."""
        spans, self._spans = self._spans, []
        found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for action, began, ended in spans:
            seconds = _seconds(began, ended)
            if seconds is not None:
                found[action.kind, action.stage].append(seconds)
        if not any(kind is Kind.F for kind, _ in found):
            return None
        forward = sum(median(times) for (kind, _), times in found.items() if kind is Kind.F)
        backward = sum(median(times) for (kind, _), times in found.items() if kind is not Kind.F)
        return Measured(epoch, step, local_rank, forward, backward)

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(began: Mark, ended: Mark) -> float | None:
    """None while the device is not there yet."""
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    passed: bool = ended.query()  # type: ignore[no-untyped-call]
    return began.elapsed_time(ended) / 1000.0 if passed else None
