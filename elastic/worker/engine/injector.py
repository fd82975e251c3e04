"""Carries out the faults that `--fault` injects into this worker, at their step and phase."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic.config import claim_fault
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import FLAG, FaultKind, FaultSpec, Phase, due
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec
from elastic.rpc.link_shaping import shaper_of
from elastic.worker.control.agent_client import WorkerSettings

_LAUNCHER_FAULTS = (FaultKind.KILL_COORDINATOR, FaultKind.DRAIN, FaultKind.JOIN)
"""Kinds of faults that the launcher carries out; a worker carries out all others."""


def check_faults(faults: Sequence[FaultSpec], spec: JobSpec) -> None:
    """Raise FieldError for a fault at a step, micro-batch or evaluation that the job does not
    have."""
    for fault in faults:
        steps, microbatches = spec.n_steps, spec.n_microbatches
        if fault.phase is Phase.EVALUATION:
            if not spec.evaluate_every:
                remedy = "this job has no evaluation: give the Trainer evaluation=Evaluation(...)"
                raise FieldError(f"{FLAG} phase", fault.phase.value, remedy)
            steps, microbatches = spec.n_steps + 1, spec.evaluation_microbatches
        for name, given, number in (
            ("step", fault.step, steps),
            ("microbatch", fault.microbatch or 0, microbatches),
        ):
            if given >= number:
                remedy = f"this job has {number}, numbered from 0 to {number - 1}"
                raise FieldError(f"{FLAG} {name}", given, f"{remedy} (in {fault.text!r})")


class FaultInjector:
    """Carries out each injected fault of this worker once, at the fault's point of a step."""

    def __init__(self, settings: WorkerSettings, send: Callable[[object], None]) -> None:
        self._settings, self._send = settings, send
        self._pending = [
            (i, spec)
            for i, spec in enumerate(settings.faults)
            if spec.node == settings.node and spec.kind not in _LAUNCHER_FAULTS
        ]
        self.recoveries = 0
        """Number of recoveries that this worker has installed."""
        self.slow = 1.0
        """Factor by which this worker's compute takes longer; 1.0: not slowed."""

    def reach(self, step: int, phase: Phase, microbatch: int | None = None) -> None:
        """Carry out the faults that are due at this point of the step."""
        for number, spec in list(self._pending):
            is_due = due(
                spec,
                node=self._settings.node,
                worker=self._settings.local_rank,
                step=step,
                phase=phase,
                microbatch=microbatch,
                recoveries=self.recoveries,
            )
            if is_due:
                self._pending.remove((number, spec))
                if claim_fault(self._settings.run_dir, number):
                    self._carry_out(spec)

    def stretch(self, seconds: float) -> None:
        """Sleep after `seconds` of compute, so that a slowed worker takes `slow` times as long."""
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
                directory = Path(self._settings.memory_dir) / self._settings.node
                shaper = shaper_of(directory, self._settings.link)
                if shaper is not None:
                    shaper.slow_down(spec.factor)
            case FaultKind.CORRUPT | FaultKind.CUT:
                self._send(m.FaultReached(spec.text, time.time()))
            case FaultKind.PARTITION:
                self._send(m.FaultReached(spec.text, time.time()))
                # A partitioned node receives no packets, and its sockets stay open.
                time.sleep(spec.duration_s)
            case _:
                raise AssertionError(f"{spec.kind} is not a worker's fault")
