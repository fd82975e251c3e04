"""Slows down a node's link to the others, for tests and what-ifs on one machine (`--link`).

All processes of a node share one link. A file in the node's shared memory holds the time until
which the link is taken. A sender reserves time behind the reservations so far, and sends when its
time has come. There are two lanes: training messages overtake waiting copies, as in a network with
priorities. A copy is sent in pieces, and each piece is reserved when the previous one has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic.planning.cost.profile import LinkProfile

_TAKEN = struct.Struct("<ddd")
"""Ends of the reservations of training and of copies; factor that slows the link (0: none)."""


class LinkShaper:
    """One process's access to the link of its node. Thread-safe."""

    def __init__(self, path: Path, limit: LinkProfile) -> None:
        """`path`: the node's file, created by the first process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.limit, self._path = limit, path

    def reserve(self, nbytes: int, *, training: bool = False) -> float:
        """Reserve the link for `nbytes`; return the end of the reservation (time.monotonic)."""
        if self.limit.bytes_per_s <= 0:
            return time.monotonic()
        with self._locked() as taken:
            ahead, behind, factor = taken
            spent = nbytes / self.limit.bytes_per_s * max(factor, 1.0)
            start: float = max(time.monotonic(), ahead if training else max(ahead, behind))
            end = start + spent
            taken[:2] = (end, max(behind, start) + spent) if training else (ahead, end)
        return end

    def slow_down(self, factor: float) -> None:
        """Divide the link's speed by `factor` from now on, for all processes of the node."""
        with self._locked() as taken:
            taken[2] = factor

    def pass_on(self, nbytes: int) -> None:
        """Wait until a piece of a copy has left. 0 bytes: wait for the link's latency."""
        wait_s = self.reserve(nbytes) - time.monotonic() if nbytes else self.limit.latency_s
        time.sleep(max(0.0, wait_s))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[list[float]]:
        """Lock the file and yield its numbers, which are written back at the end.

        Each call opens the file, so that the lock also excludes other threads of this process.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            raw = os.pread(descriptor, _TAKEN.size, 0)  # a new file is empty
            taken = list(_TAKEN.unpack(raw.ljust(_TAKEN.size, b"\0")))
            yield taken
            os.pwrite(descriptor, _TAKEN.pack(*taken), 0)
        finally:
            os.close(descriptor)


def shaper_of(directory: Path | str, limit: LinkProfile) -> LinkShaper | None:
    """Return the shaper of the node whose shared memory is `directory`; None without a limit."""
    return LinkShaper(Path(directory) / "link", limit) if limit != LinkProfile() else None


def pace_of(directory: Path | str, limit: LinkProfile) -> Callable[[int], None] | None:
    """Return the node's `elastic.rpc.frames.FrameStream.pace`; None without a limit."""
    shaper = shaper_of(directory, limit)
    return shaper.pass_on if shaper else None
