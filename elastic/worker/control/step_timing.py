"""Measures how long a worker's stages compute, while training and without stopping the device.

On the CPU the timer reads a clock. On CUDA it records events in the stream and reads them at the
end of the step; an event that the device has not reached by then is left out. Waiting for
neighbours is not counted. Where micro-batches have different sizes, the time is that of one of
typical size, so that a stage is not slow because its micro-batches are long.
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
"""A point in time: seconds of time.perf_counter, or an event in the CUDA stream."""
Times = dict[tuple[Kind, int], list[float]]
"""(kind of action, stage) -> seconds of each action."""


class StepTimer:
    """Times the compute actions of one step.

    Args:
        sending: returns whether backup copies are on their way to a peer.
    """

    def __init__(self, device: torch.device, sending: Callable[[], bool]) -> None:
        self._device, self._sending = device, sending
        self._open: tuple[Action, Mark, bool] | None = None
        self._spans: list[tuple[Action, Mark, Mark, bool, bool, float]] = []
        """(action, begin, end, sending at the begin, sending at the end, cost)."""

    def begin(self, action: Action) -> None:
        """Start to time `action`."""
        self._open = (action, mark(self._device), self._sending())

    def end(self, cost: Callable[[], float] = lambda: 1.0) -> None:
        """End the timing of the action that began last. On CUDA its kernels may still run.

        `cost()`: cost of its micro-batch, relative to one of typical size. It is called after the
        end of the time, since it may compute. 0: the action computed nothing, and is not counted.
        """
        if self._open is not None:
            action, began, sending = self._open
            self._open, ended, after = None, mark(self._device), self._sending()
            if relative := cost():
                self._spans.append((action, began, ended, sending, after, relative))

    def take(
        self, epoch: int, step: int, local_rank: int, traffic: BackupTraffic
    ) -> MicrobatchTiming | None:
        """Return the measurements since the last call; None if no forward pass was measured."""
        spans, self._spans = self._spans, []
        times: Times = defaultdict(list)
        with_transfer: Times = defaultdict(list)
        without_transfer: Times = defaultdict(list)
        for action, began, ended, before, after, cost in spans:
            seconds = seconds_between(began, ended)
            if seconds is not None:
                seconds /= cost
                key = action.kind, action.stage
                times[key].append(seconds)
                if before == after:
                    (with_transfer if before else without_transfer)[key].append(seconds)
        if not any(kind is Kind.F for kind, _ in times):
            return None
        medians = {key: median(seconds) for key, seconds in times.items()}
        forward = sum(s for (kind, _), s in medians.items() if kind is Kind.F)
        backward = sum(s for (kind, _), s in medians.items() if kind is not Kind.F)
        slowdown = _slowdown(with_transfer, without_transfer)
        return MicrobatchTiming(epoch, step, local_rank, forward, backward, slowdown, traffic)


def mark(device: torch.device) -> Mark:
    """Return the point in time at which `device` has done all work launched so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all work that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowdown(with_transfer: Times, without_transfer: Times) -> float:
    """Return compute time during a transfer, divided by compute time without a transfer.

    0 if no kind of action was measured both ways.
    """
    both = with_transfer.keys() & without_transfer.keys()
    alone = sum(median(without_transfer[key]) for key in both)
    return sum(median(with_transfer[key]) for key in both) / alone if alone > 0 else 0.0


def seconds_between(began: Mark, ended: Mark) -> float | None:
    """Return the seconds between two marks; None if the device has not reached the second."""
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    passed: bool = ended.query()  # type: ignore[no-untyped-call]
    return began.elapsed_time(ended) / 1000.0 if passed else None
