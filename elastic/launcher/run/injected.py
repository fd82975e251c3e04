"""Injected faults that the launcher carries out, timed by the progress of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.config import JobConfig, claim_fault, fault_mark
from elastic.core.protocol.fault_spec import LAUNCHER_KINDS, FaultKind, FaultSpec, launcher_due

RECOVERING = ("halting", "installing")
"""Phases of a job during an epoch change."""
OVER = ("finished", "failed")


def missed_faults(config: JobConfig, nodes: Sequence[str], hosting: bool) -> list[FaultSpec]:
    """Return the faults that were due on this machine, and that nobody carried out.

    `nodes`: agents of this machine; `hosting`: whether its launcher carries out LAUNCHER_KINDS.
    """
    return [
        spec
        for number, spec in enumerate(config.faults)
        if (hosting if spec.kind in LAUNCHER_KINDS else spec.node in nodes)
        and not fault_mark(config.run_dir, number).exists()
    ]


class LauncherFaults:
    """The kill-coordinator, drain and join faults of a job that are still to come."""

    def __init__(self, config: JobConfig) -> None:
        self._run_dir = config.run_dir
        self._pending = [(i, s) for i, s in enumerate(config.faults) if s.kind in LAUNCHER_KINDS]
        self._ran = self._recovering = False
        self._step = self._microbatch = self._recoveries = 0

    @property
    def joins(self) -> bool:
        """Whether a node is still to join."""
        return any(spec.kind is FaultKind.JOIN for _, spec in self._pending)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def observe(self, entry: dict[str, Any]) -> list[FaultSpec]:
        """Return the faults that are due after this progress entry, each once per run."""
        phase = entry.get("phase")
        if phase in OVER:
            self._pending = []
        self._step, self._microbatch = int(entry.get("step", 0)), int(entry.get("microbatch", 0))
        running = phase == "running"
        self._recoveries += self._recovering and running
        self._recovering = not running and (self._recovering or (self._ran and phase in RECOVERING))
        self._ran = self._ran or running
        due = [(i, spec) for i, spec in self._pending if self._due(spec)]
        self._pending = [item for item in self._pending if item not in due]
        return [spec for i, spec in due if claim_fault(self._run_dir, i)]

    def _due(self, spec: FaultSpec) -> bool:
        if not self._ran and spec.kind is not FaultKind.JOIN:
            return False
        return launcher_due(
            spec,
            step=self._step,
            microbatch=self._microbatch,
            recoveries=self._recoveries,
            recovering=self._recovering,
        )
