"""Child processes of the launcher: the coordinator and the agents, each leading a process group of its
own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO


class Lifeline:
    """A pipe whose write end only this process holds; children watch the other (`elastic.lifeline`)."""

    def __init__(self) -> None:
        self.read, self._write = os.pipe()

    def close(self) -> None:
        for end in (self.read, self._write):
            os.close(end)


class Child:
    """One service process and the process group that it leads."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name, self._process = name, process
        self.started = time.monotonic()
        self.returncode: int | None = None

    @staticmethod
    def start(
        name: str, module: str, args: Sequence[str], lifeline: Lifeline, stdout: int | IO[bytes] | None = None
    ) -> Child:
        """Run `python -m module args...`, tied to `lifeline`. `stdout` takes both streams; None:
        inherited."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args, "--parent-pipe", str(lifeline.read)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout is not None else None,
            start_new_session=True,
            pass_fds=(lifeline.read,),
        )
        return Child(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.returncode is not None and self.returncode < 0:
            return signal.Signals(-self.returncode).name
        return f"exit code {self.returncode}"

    def ended(self) -> bool:
        """Whether it has ended; the first time, whatever is left of its group is killed before its id is
        free."""
        if self.returncode is not None:
            return True
        try:
            gone = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            gone = True
        if gone:
            self._signal(signal.SIGKILL)
            self.returncode = self._process.wait()
        return gone

    def notify(self) -> None:
        """SIGUSR1 to the service alone: its node shall leave."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def terminate(self) -> None:
        """SIGTERM to the whole group: to the service, and to workers as torchrun passes it on."""
        if not self.ended():
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group, as when a machine is lost."""
        if not self.ended():
            self._signal(signal.SIGKILL)
            self.returncode = self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def tail_of(path: Path, lines: int = 12) -> str:
    """The last lines of a log file, or "" if there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
