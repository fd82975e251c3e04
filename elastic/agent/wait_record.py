"""Writes what a node without a coordinator waits for, for `elastic status --run-dir`.

The disk of the run directory may hang, so a thread of its own writes, one text at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path


class WaitRecord:
    """The file RUN_DIR/waiting-NODE.json of one node: {"what", "since", "ends"}, or {}: nothing is
    awaited. One thread uses this object."""

    def __init__(self, run_dir: str, node: str) -> None:
        self._path = Path(run_dir) / f"waiting-{node}.json"
        self._writer: threading.Thread | None = None
        self._waits = False

    def begin(self, what: str, since: float, ends: str) -> None:
        """Write the wait, unless an earlier text is still being written. `since`: seconds since
        1970."""
        self._waits = True
        self._write({"what": what, "since": since, "ends": ends})

    def end(self) -> None:
        """Nothing is awaited any more."""
        if self._waits:
            self._waits = not self._write({})

    def _write(self, entry: dict[str, object]) -> bool:
        if self._writer is not None and self._writer.is_alive():
            return False
        self._writer = threading.Thread(
            target=self._replace, args=(json.dumps(entry),), name="wait-record", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread can be started
            self._writer.start()
        return True

    def _replace(self, text: str) -> None:
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            draft.write_text(text + "\n")
            os.replace(draft, self._path)
