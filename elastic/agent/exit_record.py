"""Reads the record of the job's end, `exit.json`, on a thread of its own.

The machine of the coordinator may also serve the run directory. If it fails, a read there can hang
while agents look for the end of the job.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from elastic.core.protocol.messages import Stop


class ExitRecord:
    """The record in one run directory. One thread uses it."""

    def __init__(self, run_dir: str) -> None:
        self._path = Path(run_dir) / "exit.json"
        self._reader: threading.Thread | None = None

    def look(self, found: Callable[[Stop], object]) -> None:
        """Begin to read the record, unless a read is under way. The reading thread calls
        `found(order)` if the job is over."""
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(
                target=self._read, args=(found,), name="exit-record", daemon=True
            )
            self._reader.start()

    def _read(self, found: Callable[[Stop], object]) -> None:
        try:
            over = json.loads(self._path.read_text())
            order = Stop(int(over["code"]), str(over["reason"]))
        except (OSError, ValueError, KeyError, TypeError):
            return
        found(order)
