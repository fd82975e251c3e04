"""The coordinator's clock."""

from __future__ import annotations

import time


class Clock:
    """Wall time that never jumps back while the process lives."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()
