"""Child processes of the launcher. Each one leads its own process group."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

from elastic.config import JobConfig
from elastic.domain.errors import EXIT_INCOMPATIBLE, describe
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.metrics_endpoint import metrics_flag
from elastic.logs import FILE_MODE
from elastic.telemetry import read_last_words

log = logging.getLogger(__name__)
SETTLED_S = 10.0
"""A coordinator that ends sooner than this after its start had a short life."""
FIRST_FAILURES, MAX_FAILURES = 3, 8
"""The job ends after this many short lives in a row that ended with an error: the first number if
no coordinator has led here or lived for `SETTLED_S`, the second, about a minute later, if one
has."""
PAUSE_S = 0.2
"""Pause after the first of several short lives; each pause is twice the one before, at most
`MAX_RETRY_S`."""
RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Pause after a coordinator could not be started because the machine refused it, and the longest
pause; each is twice the one before."""
KILL_S = 10.0
"""Longest wait for the end of a killed process. It cannot end while a thread of it waits for a
disk."""


class Child:
    """A service process and its process group."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        lifeline: int,
        stdout: int | IO[bytes] | None,
        variables: Mapping[str, str] | None = None,
        errors: IO[bytes] | None = None,
    ) -> None:
        """Run `python -m module args...`; `stdout` gets both output streams (None: inherited), or
        only the first if `errors` gets the second.

        `variables` are added to the environment.
        `lifeline` is the read end of a pipe; only this process holds its write end. The child ends
        when this process ends (`elastic.lifeline`).
        """
        self.name = name
        self.returncode: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args, "--parent-pipe", str(lifeline)],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=errors or (subprocess.STDOUT if stdout is not None else None),
            start_new_session=True,
            pass_fds=(lifeline,),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def how(self) -> str:
        """Exit code or signal of a process that has ended, as text."""
        if self.returncode is not None and self.returncode < 0:
            return signal.Signals(-self.returncode).name
        return f"exit code {self.returncode}"

    def ended(self) -> bool:
        """Return whether the process has ended. If it has, the rest of its group is killed."""
        if self.returncode is not None:
            return True
        try:
            gone = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            gone = True
        if gone:
            self._signal(signal.SIGKILL)  # before wait() frees the group's id
            self.returncode = self._process.wait()
        return gone

    def drain(self) -> None:
        """Send SIGUSR1 to the agent alone, which then drains its node and ends."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def terminate(self) -> None:
        """Send SIGTERM to the group, which includes the workers, as torchrun does."""
        if not self.ended():
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the group, and wait at most `KILL_S` for the process."""
        if not self.ended():
            self._signal(signal.SIGKILL)
            try:
                self.returncode = self._process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                self.returncode = -signal.SIGKILL
                log.warning("%s was killed, but does not end: it may wait for a disk", self.name)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Coordinators:
    """The coordinators of this machine, a child for each address; those that die are restarted.

    Training continues meanwhile. So a restart that the machine refuses, for a lack of descriptors
    or memory, is tried again.
    """

    def __init__(
        self,
        config: JobConfig,
        module: str,
        addresses: tuple[str, ...],
        lifeline: int,
        note: Callable[[str], object],
        output_of: Callable[[str], AbstractContextManager[int | None]] = lambda name: nullcontext(),
    ) -> None:
        """`note(line)` prints a line for the user. `output_of(name)` gives the descriptor for the
        standard output of a coordinator, while it is being started; None: it goes to a file."""
        self._config, self._path = config, Path(config.run_dir)
        self._module, self.addresses = module, addresses
        self._lifeline, self._note, self._output_of = lifeline, note, output_of
        self._children: dict[int, Child] = {}
        self._restart_at: dict[int, float] = {}
        self._pauses_s: dict[int, float] = {}
        """Newest pause per coordinator that the machine refused to start."""
        self._started_at: dict[int, float] = {}
        self._short_lives = dict.fromkeys(range(len(addresses)), 0)
        """Short lives in a row, per coordinator."""
        self._failures = dict.fromkeys(range(len(addresses)), 0)
        """Those of them that ended with an error, and not by a signal."""
        self._worked = False
        """Whether a coordinator has led here, or lived for `SETTLED_S`."""

    @property
    def children(self) -> list[Child]:
        return list(self._children.values())

    def start(self) -> None:
        """Start all coordinators. Raises OSError."""
        for slot in range(len(self.addresses)):
            self._start(slot)

    def check(self, lost_address: Callable[[], bool]) -> str:
        """Restart coordinators that died; return why the job cannot continue, or "".

        `lost_address()` is called for each that died; True: another launcher took over, no restart.
        """
        for slot, at in tuple(self._restart_at.items()):
            if time.monotonic() >= at:
                del self._restart_at[slot]
                self._start_again(slot)
        for slot, child in tuple(self._children.items()):
            if slot not in self._restart_at and child.ended():
                if lost_address():
                    del self._children[slot]
                elif problem := self._died(slot, child):
                    return problem
        return ""

    def kill_leader(self, down_s: float) -> bool:
        """Kill the leader or any coordinator; restart it after `down_s`. False: none is here."""
        leader = self.leader()
        slot = next((s for s, child in self._children.items() if leader in (None, child)), None)
        if slot is None:
            return False
        self._children[slot].kill()
        self._restart_at[slot] = time.monotonic() + down_s
        return True

    def leader(self) -> Child | None:
        """Return the child that leads; None if the leader does not run here."""
        leader_pid = (read_object(self._path / "coordinator.json") or {}).get("pid")
        return next((child for child in self.children if child.pid == leader_pid), None)

    def _start(self, slot: int) -> None:
        args = ["--run-dir", str(self._path), "--address", self.addresses[slot]]
        args += ["--slot", str(slot)] if slot else []
        args += metrics_flag(self._config, slot)
        name = _name(slot)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        path = self._path / "logs" / f"{name}.out"
        with (
            os.fdopen(os.open(path, flags, FILE_MODE), "ab") as out,
            self._output_of(name) as output,
        ):
            stdout = out if output is None else output
            child = Child(name, self._module, args, self._lifeline, stdout, None, out)
        self._children[slot] = child
        self._started_at[slot] = time.monotonic()

    def _start_again(self, slot: int) -> None:
        try:
            self._start(slot)
        except OSError as error:
            pause_s = min(2 * self._pauses_s.get(slot, RETRY_S / 2), MAX_RETRY_S)
            self._pauses_s[slot], self._restart_at[slot] = pause_s, time.monotonic() + pause_s
            why = f"{_name(slot)} cannot be started ({describe(error)})"
            self._note(f"warning: the {why}; next try in {pause_s:g} s")
        else:
            self._pauses_s.pop(slot, None)

    def _died(self, slot: int, child: Child) -> str:
        """Plan the restart of a coordinator; return why the job cannot continue, or ""."""
        now = time.monotonic()
        settled = now - self._started_at[slot] >= SETTLED_S
        self._worked = self._worked or settled or self.leader() is child
        if settled:
            self._short_lives[slot] = self._failures[slot] = 0
        else:
            self._short_lives[slot] += 1
            self._failures[slot] += (child.returncode or 0) > 0
        error = read_last_words(self._path, child.name) if (child.returncode or 0) > 0 else ""
        failed = self._failures[slot] >= (MAX_FAILURES if self._worked else FIRST_FAILURES)
        if child.returncode == EXIT_INCOMPATIBLE or (failed and error):
            return f"the {child.name} cannot run: {error}"
        if failed:
            log = self._path / "logs" / f"{child.name}.out"
            tail = "\n".join(_text(log).splitlines()[-12:])
            return f"the {child.name} cannot run; the end of {log}:\n{tail}"
        lives = self._short_lives[slot]
        pause_s = min(PAUSE_S * 2.0 ** (lives - 1), MAX_RETRY_S) if lives else 0.0
        how = f"{child.how}: {error}" if error else child.how
        when = f"is restarted in {pause_s:.1f} s" if pause_s >= 1.0 else "is restarted"
        self._note(f"the {child.name} ended ({how}) and {when}")
        self._restart_at[slot] = now + pause_s
        return ""


def _name(slot: int) -> str:
    return f"coordinator-{slot}" if slot else "coordinator"


def _text(path: Path) -> str:
    """Return the text of a file; "": it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
