"""Pipes that nobody reads."""

from __future__ import annotations

import contextlib
import os


def full_pipe() -> tuple[int, int]:
    """Return (read end, write end) of a pipe without room, whose writers wait."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    os.set_blocking(write, True)
    return read, write
