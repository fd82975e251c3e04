"""Console of `elastic run --log-format json`: every line on standard output is a JSON object.

The launcher prints the lines of its services, because a pipe that several processes share would mix
parts of long lines. Each service writes to a pipe of its own. A line that is no JSON object, such
as the last words of a library that ends the process, becomes the message of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator

from elastic.config import STDOUT
from elastic.console import Console
from elastic.launcher.run.console import LAST_OUTPUT_S, QUIET_S, Entry, ProgressLines
from elastic.logs import LogSource

LOGGER = "elastic.launcher"
RAW_LOGGER = "output"
"""Logger of lines that a service prints without a JSON object."""
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is cut."""


class JsonLines(ProgressLines):
    """Progress of the job and the lines of its services, as JSON lines."""

    def __init__(self, console: Console, source: LogSource) -> None:
        """`source`: that of the launcher's own lines, whose epoch is set here."""
        super().__init__(console)
        self._source = source
        self._epoch: int | None = None
        source.epoch = lambda: self._epoch
        self._relays: list[threading.Thread] = []
        self._passed, self._closing = 0, False
        """Number of lines that were passed on."""
        self._rests: dict[str, bytes] = {}
        """Begun lines by agent."""

    @contextlib.contextmanager
    def output_of(self, name: str) -> Iterator[int]:
        """Yield the descriptor for standard output and error of the service `name`, for as long as
        the service is being started."""
        read, write = os.pipe()
        source = self._source_of(name)
        thread = threading.Thread(
            target=self._relay, args=(read, source), name=f"output of {name}", daemon=True
        )
        self._relays.append(thread)
        try:
            yield write
        finally:
            thread.start()
            os.close(write)

    def _source_of(self, name: str) -> LogSource:
        source = LogSource(self._source.job, name)
        source.epoch = self._source.epoch
        return source

    def update(self, entry: Entry) -> None:
        epoch = entry.get("epoch")
        self._epoch = epoch if isinstance(epoch, int) else self._epoch
        super().update(entry)

    def put(self, name: str, data: bytes) -> None:
        """Print output of the agent `name`, which has no descriptor, as many whole lines as there
        are."""
        *lines, self._rests[name] = (self._rests.get(name, b"") + data).split(b"\n")
        for line in lines:
            self._print(line, self._source_of(name))

    def close(self) -> None:
        """Print the rest of the output, for a limited time. A process that outlives the job may
        hold a pipe open, so this also ends when nothing comes for `QUIET_S`."""
        until, passed = time.monotonic() + LAST_OUTPUT_S, -1
        self._closing = True
        while passed != self._passed and time.monotonic() < until:
            passed, soon = self._passed, time.monotonic() + QUIET_S
            for relay in self._relays:
                relay.join(max(0.0, soon - time.monotonic()))
            if not any(relay.is_alive() for relay in self._relays):
                break
        for name, rest in self._rests.items():
            self._print(rest, self._source_of(name))
        super().close()

    def _relay(self, descriptor: int, source: LogSource) -> None:
        """Print the lines of a pipe. While nobody reads the console they stay in the pipe, and the
        service keeps what it can."""
        with open(descriptor, "rb") as pipe:
            while line := pipe.readline(LONGEST_LINE_BYTES):
                self._print(line, source)
                self._passed += 1
                while not self._closing and not self._console.flush(QUIET_S):
                    pass

    def _print(self, line: bytes, source: LogSource) -> None:
        """Print a line; `source` is that of a line which is no JSON object."""
        text = line.rstrip(b"\r\n")
        if text and not _is_object(text):
            message = text.decode(errors="replace")
            text = source.line(message, logger=RAW_LOGGER, level="warning").rstrip(b"\n")
        if text:
            self._console.put_at_once(STDOUT, text + b"\n")


def json_view(source: LogSource) -> JsonLines:
    """Return the view of a launcher whose lines come from `source`."""
    return JsonLines(Console(program="elastic", source=source), source)


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
