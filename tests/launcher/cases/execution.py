"""Runs a case in a new folder, and records when each line is printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from elastic.domain.errors import EXIT_INTERRUPTED
from elastic.launcher.run.rundir import free_port
from tests.launcher.cases.case import Case, Command
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = {
    "elastic": [sys.executable, "-m", "elastic"],
    "elastic-sim": [sys.executable, "-m", "elastic_sim"],
    "python": [sys.executable],
}
OURS = (ROOT / "elastic", ROOT / "simulator" / "elastic_sim")
"""Folders whose files must not be in a traceback."""
POLL_S = 0.05
TIME_WORDS = r"[\d,]+(?:\.\d+)? (?=(?:s|ms|us|tokens/s)\b)"
VARYING = (
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\b[0-9a-f]{64}\b", "HASH"),
    (r"runs/\d[\w-]+", "runs/RUN"),
    (r"\bpid \d+", "pid PID"),
    (TIME_WORDS, "N "),
    (r"\b(detect|decide|transfer|rebuild|total|tokens_per_s:|mfu:) [\d.]+", r"\1 N"),
    (r'\b((?:loss|wall_s)"?:?|norm) [\d.]+', r"\1 N"),
    (r"\d+(\.\d+)?( ?[KMG]i?B\b)", r"N\2"),
    (r"\b\d+\.\d+x", "Nx"),
)
"""Patterns of what varies from run to run, and their replacements, in this order."""


@dataclass(frozen=True)
class Result:
    """Output of a finished command."""

    code: int
    output: str
    silence_s: float
    """Longest time without output: between two lines, from the start to the first line, or from the
    last line to the end."""


def page_words(text: str, folder: Path) -> str:
    """Return `text` with fixed words in place of what varies: paths, ports, times, sizes."""
    text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "ELASTIC")
    text = text.replace(sys.prefix, "ENVIRONMENT").replace(sys.base_prefix, "PYTHON")
    text = re.sub(rf"\b{re.escape(socket.gethostname())}-[0-9a-f]{{4}}\b", "HOST", text)
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text


def own_frames(output: str) -> list[str]:
    """Return the lines of tracebacks that show a file of the packages of this repository."""
    places = [f'File "{folder}/' for folder in OURS]
    return [line for line in output.splitlines() if any(place in line for place in places)]


def problems(command: Command, result: Result, folder: Path) -> list[str]:
    """Return what a command printed or did otherwise than it must; []: nothing."""
    text = page_words(result.output, folder)
    found = [f"lacks {part!r}" for part in command.shows if part not in text]
    found += [f"has {part!r}" for part in command.hides if part in text]
    found += [f"traceback through {line.strip()}" for line in own_frames(result.output)]
    code = EXIT_INTERRUPTED if command.wait else command.code
    return found + ([f"ended with {result.code}"] if result.code != code else [])


def execute(case: Case, folder: Path, watch_s: float = 0.0) -> list[tuple[Command, Result]]:
    """Run the commands of a case in `folder`; return `command` and `then` with their results.

    `watch_s`: a command that waits is watched at least this long. Raises AssertionError if
    `before` fails, or if a line about a wait is missing.
    """
    for name, content in case.files.items():
        (folder / name).write_text(content)
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"{held}": str(other.getsockname()[1])}
        ports |= {"{free}": str(free_port()), "{idle}": str(free_port())}
        if case.before is not None:
            with _Process(case.before, folder, ports) as earlier:
                done = earlier.ended()
                assert done.code == case.before.code, done.output
        with _Process(case.command, folder, ports) as process:
            if not case.command.wait:
                first = process.ended()
            else:
                process.await_twice(case.command.wait, watch_s)
            results = []
            if case.then is not None:
                with _Process(case.then, folder, ports) as second:
                    results = [(case.then, second.ended())]
            if case.command.wait:
                first = process.interrupted()
    return [(case.command, first), *results]


class _Process:
    """A running command, whose output is read by a thread. It is killed on exit."""

    def __init__(self, command: Command, folder: Path, ports: dict[str, str]) -> None:
        line = command.line
        for name, port in ports.items():
            line = line.replace(name, port)
        program, *words = shlex.split(line)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTIC_"))}
        paths = os.pathsep.join((str(ROOT), str(ROOT / "simulator")))
        variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._folder = folder
        self._times = [time.monotonic()]
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            [*PROGRAMS[program], *words],
            cwd=folder,
            env={**kept, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        arguments: Sequence[IO[str]] = (self._process.stdout,)
        self._reader = threading.Thread(target=self._read, args=arguments, daemon=True)
        self._reader.start()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ended(self) -> Result:
        """Wait for the end of the command; return its output."""
        code = self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        times = [*self._times, time.monotonic()]
        silence_s = max(after - before for before, after in pairwise(times))
        return Result(code, "".join(self._lines), silence_s)

    def await_twice(self, text: str, watch_s: float) -> None:
        """Wait until two lines have `text`, at least `watch_s`."""
        began = time.monotonic()
        while time.monotonic() < began + LONG_S and self._process.poll() is None:
            found = [line for line in list(self._lines) if text in page_words(line, self._folder)]
            if len(found) >= 2 and time.monotonic() >= began + watch_s:
                return
            time.sleep(POLL_S)
        raise AssertionError(f"not printed twice: {text}\n{''.join(self._lines)}")

    def interrupted(self) -> Result:
        """End the command as Ctrl-C does; return its output."""
        self._process.send_signal(signal.SIGINT)
        return self.ended()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._times.append(time.monotonic())
            self._lines.append(line)
