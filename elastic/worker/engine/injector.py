"""Carries out the injected faults of this worker: `--fault`, by step, micro-batch and phase."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from elastic.config import claim_fault
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, Phase, due, format_fault
from elastic.rpc.shaping import shaper_of
from elastic.worker.control.agent_client import WorkerSettings


class FaultInjector:
    """Asks at every point of a step whether a fault is due here, and carries it out once."""

    def __init__(self, settings: WorkerSettings, send: Callable[[object], None]) -> None:
        self._settings, self._send = settings, send
        self._pending = [
            (i, spec) for i, spec in enumerate(settings.faults) if spec.node == settings.node and _local(spec)
        ]
        self.recoveries = 0
        """Recoveries that this worker has installed."""
        self.slow = 1.0
        """Factor by which this worker's computing is stretched."""

    def reach(self, step: int, phase: Phase, microbatch: int | None = None) -> None:
        """The worker stands at this point; carry out what is due."""
        for number, spec in list(self._pending):
            here = due(
                spec,
                node=self._settings.node,
                worker=self._settings.local_rank,
                step=step,
                phase=phase,
                microbatch=microbatch,
                recoveries=self.recoveries,
            )
            if here:
                self._pending.remove((number, spec))
                if claim_fault(self._settings.run_dir, number):
                    self._carry_out(spec)

    def stretch(self, seconds: float) -> None:
        """Called after `seconds` of computing: a slowed worker takes its factor of them."""
        if self.slow > 1.0:
            time.sleep(seconds * (self.slow - 1.0))

    def _carry_out(self, spec: FaultSpec) -> None:
        match spec.kind:
            case FaultKind.KILL:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            case FaultKind.KILL_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultKind.SLOW:
                self.slow = spec.factor
            case FaultKind.SLOW_LINK:
                folder = Path(self._settings.memory_dir) / self._settings.node
                shaper = shaper_of(folder, self._settings.link)
                if shaper is not None:
                    shaper.slow_down(spec.factor)
            case FaultKind.CORRUPT:
                self._send(m.FaultReached(format_fault(spec), time.time()))
            case FaultKind.PARTITION:
                self._send(m.FaultReached(format_fault(spec), time.time()))
                time.sleep(
                    spec.duration_s
                )  # packets of a partitioned node do not arrive; its sockets stay open
            case _:
                raise AssertionError(f"{spec.kind} is not a worker's fault")


def _local(spec: FaultSpec) -> bool:
    return spec.kind in (
        FaultKind.KILL, FaultKind.KILL_WORKER, FaultKind.STOP, FaultKind.SLOW, FaultKind.SLOW_LINK,
        FaultKind.PARTITION, FaultKind.CORRUPT,
    )  # fmt: skip
