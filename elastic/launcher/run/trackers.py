"""The trackers of `elastic run --track`: a process each, which reads the run's record.

A tracker that was killed is started again after a growing pause. One that fails is not: it repeats
by itself what may succeed later. The job does not depend on trackers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from elastic.domain.errors import EXIT_OK, FieldError, UsageError, describe
from elastic.launcher.flags.validators import TOKEN_VARIABLE
from elastic.launcher.run.processes import Child
from elastic.launcher.tracking.targets import Target
from elastic.lifeline import tied_command

MODULE = "elastic"
TERMINATED = 128 + signal.SIGTERM
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""First and longest pause before a tracker is started again; each is twice the one before."""
CHECK_S = 120.0
"""Longest time for loading a target's library."""
Output = Callable[[str], AbstractContextManager[int | IO[bytes] | None]]


def check_targets(targets: Sequence[Target]) -> None:
    """Raise UsageError for a target whose library or callback cannot be loaded.

    Another process tries it, so that neither stays in this one.
    """
    for target in targets:
        command = (sys.executable, "-m", MODULE, "track", "--check", "--to", str(target))
        try:
            done = subprocess.run(
                tied_command(command),
                env={name: text for name, text in os.environ.items() if name != TOKEN_VARIABLE},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            remedy = f"it could not be loaded within {CHECK_S:g} s; give another, or leave it out"
            raise FieldError("--track", str(target), remedy) from None
        if done.returncode != EXIT_OK:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
            text = lines[-1].removeprefix("elastic track: ").removeprefix("--to: ")
            raise UsageError(f"--track: {text}")


class Trackers:
    """The trackers of one run on this machine."""

    def __init__(
        self,
        run_dir: Path,
        targets: Sequence[Target],
        lifeline: int,
        note: Callable[[str], None],
        output_of: Output,
    ) -> None:
        self._run_dir, self._targets = run_dir, tuple(targets)
        self._lifeline, self._note, self._output_of = lifeline, note, output_of
        self._children: dict[Target, Child] = {}
        self._failed: list[Target] = []
        self._pauses_s: dict[Target, float] = {}
        self._start_at = dict.fromkeys(self._targets, 0.0)
        """Time of the next start, of those that do not run."""

    @property
    def children(self) -> list[Child]:
        return list(self._children.values())

    def start_waiting(self) -> None:
        """Start the trackers that wait for their pause: the job ends, and they have the rest to
        tell."""
        self.check()
        self._start_at = dict.fromkeys(self._start_at, 0.0)
        self.check()

    def check(self, *, ending: bool = False) -> None:
        """Note which trackers have ended, and start those that are due, unless `ending`."""
        for target, child in tuple(self._children.items()):
            if not child.ended():
                continue
            del self._children[target]
            if ending and child.returncode != EXIT_OK:
                self._failed.append(target)
            elif (child.returncode or 0) < 0 or child.returncode == TERMINATED:
                # Killed, as for want of memory, or by a signal to all processes of a service.
                self._later(target, f"ended ({child.how})")
            elif child.returncode != EXIT_OK:  # it has printed why
                self._failed.append(target)
                self._note(f"warning: the tracker {target} ended ({child.how})")
        for target, at in tuple(self._start_at.items()):
            if time.monotonic() >= at and not ending:
                del self._start_at[target]
                self._start(target)

    def _start(self, target: Target) -> None:
        args = ["track", "--run-dir", str(self._run_dir), "--to", str(target)]
        try:
            with self._output_of(f"tracker-{target.kind}") as output:
                self._children[target] = Child(str(target), MODULE, args, self._lifeline, output)
        except (OSError, RuntimeError) as error:  # no process, no thread
            self._later(target, f"cannot be started ({describe(error)})")

    def _later(self, target: Target, why: str) -> None:
        pause_s = min(2 * self._pauses_s.get(target, PAUSE_S / 2), MAX_PAUSE_S)
        self._pauses_s[target], self._start_at[target] = pause_s, time.monotonic() + pause_s
        self._note(f"warning: the tracker {target} {why}; it is started again in {pause_s:g} s")

    def unfinished(self) -> list[str]:
        """Return the targets that were not told everything."""
        left = (*self._children, *self._start_at, *self._failed)
        return [str(target) for target in self._targets if target in left]
