"""A configuration, and a clock and an event loop that tests advance by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.config import JobConfig, WorkerCommand

START = 1000.0


class ManualLoop:
    """Replaces the network thread's event loop, from which ticks come."""

    def __init__(self) -> None:
        self.now, self._timers = START, list[tuple[float, Any, float]]()

    def call_soon_threadsafe(self, call: Any, due: float) -> None:
        call(due)

    def call_later(self, after_s: float, call: Any, due: float) -> None:
        self._timers.append((self.now + after_s, call, due))

    def advance(self, seconds: float, delayed: bool = False) -> None:
        """Fire the timers that become due. A delayed network thread fires them later."""
        end = self.now + seconds
        while not delayed and self._timers and self._timers[0][0] <= end:
            at, call, due = self._timers.pop(0)
            self.now = max(self.now, at)
            call(due)
        self.now = end


def three_nodes(folder: Path, **changes: Any) -> JobConfig:
    """Configuration of a job of three nodes, whose directories are in `folder`."""
    config = JobConfig(
        job_id="j",
        run_dir=str(folder),
        memory_dir=str(folder / "memory"),
        command=WorkerCommand(script="x"),
        checkpoint_dir=str(folder / "checkpoints"),
        min_nodes=3,
        max_nodes=3,
    )
    return replace(config, **changes)
