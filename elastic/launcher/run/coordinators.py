"""The coordinators that this machine runs: usually one, none, or several of which one leads. One that dies is started
again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from elastic.config import JobConfig
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.metrics_endpoint import metrics_flag
from elastic.launcher.run.processes import Child, Lifeline, tail_of

MAX_FAILED_STARTS = 3
"""A coordinator that dies this many times in a row before it serves or stands by is given up."""


class Coordinators:
    """One child for each of `addresses`. `note` takes a line for the console."""

    def __init__(
        self,
        config: JobConfig,
        module: str,
        addresses: tuple[str, ...],
        lifeline: Lifeline,
        note: Callable[[str], object],
    ) -> None:
        self._config, self._path = config, Path(config.run_dir)
        self._module, self.addresses = module, addresses
        self._lifeline, self._note = lifeline, note
        self._children: dict[int, Child] = {}
        self._restart_at: dict[int, float] = {}
        self._failed = dict.fromkeys(range(len(addresses)), 0)

    @property
    def children(self) -> list[Child]:
        return list(self._children.values())

    def start(self) -> None:
        for slot in range(len(self.addresses)):
            self._start(slot)

    def look(self, lost_place: Callable[[], bool]) -> str:
        """Start again who died. Return why the job cannot go on, or "".

        `lost_place` says whether another launcher has taken the address meanwhile; then nothing is started again.
        """
        for slot, at in tuple(self._restart_at.items()):
            if time.monotonic() >= at:
                del self._restart_at[slot]
                self._start(slot)
        for slot, child in tuple(self._children.items()):
            if slot not in self._restart_at and child.ended():
                if lost_place():
                    del self._children[slot]
                elif why := self._died(slot, child):
                    return why
        return ""

    def kill_leader(self, down_s: float) -> bool:
        """SIGKILL to the one that leads, and start it again after `down_s`. False: none runs here."""
        announced = (read_object(self._path / "coordinator.json") or {}).get("pid")
        found = [slot for slot, child in self._children.items() if child.pid == announced]
        slot = next(iter(found or self._children), None)
        if slot is None:
            return False
        self._children[slot].kill()
        self._restart_at[slot] = time.monotonic() + down_s
        return True

    def leader(self) -> list[Child]:
        """The child that leads, in a list; [] if none here does."""
        announced = (read_object(self._path / "coordinator.json") or {}).get("pid")
        return [child for child in self.children if child.pid == announced]

    def _start(self, slot: int) -> None:
        args = ["--run-dir", str(self._path), "--address", self.addresses[slot]]
        args += ["--slot", str(slot)] if slot else []
        args += metrics_flag(self._config, slot)
        name = f"coordinator-{slot}" if slot else "coordinator"
        with (self._path / "logs" / f"{name}.out").open("ab") as out:
            self._children[slot] = Child.start(name, self._module, args, self._lifeline, out)

    def _died(self, slot: int, child: Child) -> str:
        served = read_object(self._path / "coordinator.json") or {}
        stood = self._path / f"coordinator-{slot}.pid"
        came_up = served.get("pid") == child.pid or (stood.exists() and stood.read_text() == f"{child.pid}\n")
        self._failed[slot] = 0 if came_up else self._failed[slot] + 1
        self._note(f"the {child.name} ended ({child.how}); starting it again")
        if self._failed[slot] >= MAX_FAILED_STARTS:
            log = self._path / "logs" / f"{child.name}.out"
            return f"the {child.name} cannot run; the end of {log}:\n{tail_of(log)}"
        self._restart_at[slot] = time.monotonic() + 0.2 * self._failed[slot]
        return ""
