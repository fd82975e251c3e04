"""How long a worker's stages compute: measured while training, without stopping the device.

On the CPU by the clock; on CUDA by events in the stream, which are read at the end of the step, when the
device has passed them anyhow. Waiting for neighbours is not in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch

from elastic.core.protocol.messages import BackupTraffic, MicrobatchTiming
from elastic.planning.schedule.schedule import Action, Kind

Mark = float | torch.cuda.Event
NO_TRAFFIC = BackupTraffic()
Times = dict[tuple[Kind, int], list[float]]
"""(kind of action, stage): seconds."""


class Meter:
    """Times the compute actions of one step. `sending` says whether copies are on their way to a peer."""

    def __init__(self, device: torch.device, sending: Callable[[], bool] = lambda: False) -> None:
        self._device, self._sending = device, sending
        self._open: tuple[Action, Mark, bool] | None = None
        self._spans: list[tuple[Action, Mark, Mark, bool, bool]] = []

    def begin(self, action: Action) -> None:
        """`action` begins now."""
        self._open = (action, self._mark(), self._sending())

    def end(self) -> None:
        """The action that began last is done (on CUDA: launched)."""
        if self._open is not None:
            action, began, sending = self._open
            self._spans.append((action, began, self._mark(), sending, self._sending()))
            self._open = None

    def take(self, epoch: int, step: int, local_rank: int, traffic: BackupTraffic = NO_TRAFFIC) -> MicrobatchTiming | None:
        """What was measured since the last call, or None for nothing."""
        spans, self._spans = self._spans, []
        found: Times = defaultdict(list)
        beside: Times = defaultdict(list)
        alone: Times = defaultdict(list)
        for action, began, ended, before, after in spans:
            seconds = _seconds(began, ended)
            if seconds is not None:
                at = action.kind, action.stage
                found[at].append(seconds)
                if before == after:
                    (beside if before else alone)[at].append(seconds)
        if not any(kind is Kind.F for kind, _ in found):
            return None
        forward = sum(median(times) for (kind, _), times in found.items() if kind is Kind.F)
        backward = sum(median(times) for (kind, _), times in found.items() if kind is not Kind.F)
        return MicrobatchTiming(epoch, step, local_rank, forward, backward, _slowed(beside, alone), traffic)

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _slowed(beside: Times, alone: Times) -> float:
    """Seconds of the actions beside transfers, over those of the same without; 0: none was seen both ways."""
    both = beside.keys() & alone.keys()
    quiet = sum(median(alone[at]) for at in both)
    return sum(median(beside[at]) for at in both) / quiet if quiet > 0 else 0.0


def _seconds(began: Mark, ended: Mark) -> float | None:
    """None while the device is not there yet."""
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    passed: bool = ended.query()  # type: ignore[no-untyped-call]
    return began.elapsed_time(ended) / 1000.0 if passed else None
