"""Keeps the memory of a long-running process small.

glibc gives each new thread a heap of its own, up to eight per core, and returns little of it to the
system. An agent starts threads at each rejoin, so its memory would grow by about a megabyte each
time, until all heaps are used.
"""

from __future__ import annotations

import contextlib
import ctypes

M_ARENA_MAX, HEAPS = -8, 2
"""Number of the parameter in glibc's malloc.h, and its value here."""


def limit_heaps() -> None:
    """Let all threads of this process share two heaps. Do nothing without glibc. Call this before
    threads are started."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)
