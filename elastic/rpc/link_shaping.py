"""Slows a node's link to the others down, for tests and what-ifs on one machine (`--link`).

All processes of a node share one link. A file in the node's shared memory holds the time until
which the link is taken. A sender reserves time behind the reservations so far, and sends when its
time has come. There are two lanes: training messages pass copies that wait, as in a network with
priorities. A copy is sent in pieces, and each piece is reserved when the one before is gone.
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
"""End of the reservations of each lane; factor by which the link is slower than its limit (0:
none)."""


class LinkShaper:
    """One process's access to the link of its node. Thread-safe."""

    def __init__(self, path: Path, limit: LinkProfile) -> None:
        """`path`: the node's file, created by the first process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.limit, self._path = limit, path

    def reserve(self, nbytes: int, *, training: bool = False) -> float:
        """Reserve the link for `nbytes`. Returns the end of the reservation (time.monotonic)."""
        if self.limit.bytes_per_s <= 0:
            return time.monotonic()
        with self._locked() as descriptor:
            ahead, behind, factor = _read(descriptor)
            spent = nbytes / self.limit.bytes_per_s * max(factor, 1.0)
            start: float = max(time.monotonic(), ahead if training else max(ahead, behind))
            end = start + spent
            taken = (end, max(behind, start) + spent) if training else (ahead, end)
            os.pwrite(descriptor, _TAKEN.pack(*taken, factor), 0)
        return end

    def slow_down(self, factor: float) -> None:
        """Divide the link's speed by `factor` from now on, for all processes of the node."""
        with self._locked() as descriptor:
            ahead, behind, _ = _read(descriptor)
            os.pwrite(descriptor, _TAKEN.pack(ahead, behind, factor), 0)

    def pass_on(self, nbytes: int) -> None:
        """Wait until a piece of a copy has left; 0 bytes: wait for the latency."""
        if nbytes:
            wait_until(self.reserve(nbytes))
        else:
            time.sleep(self.limit.latency_s)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, locked. It is opened each time, so that threads exclude each other too."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> tuple[float, float, float]:
    raw = os.pread(descriptor, _TAKEN.size, 0)
    if len(raw) != _TAKEN.size:
        return 0.0, 0.0, 0.0
    ahead, behind, factor = _TAKEN.unpack(raw)
    return float(ahead), float(behind), float(factor)


def shaper_of(directory: Path | str, limit: LinkProfile) -> LinkShaper | None:
    """The shaper of the node whose shared memory is `directory`; None without a limit."""
    return LinkShaper(Path(directory) / "link", limit) if limit != LinkProfile() else None


def pace_of(directory: Path | str, limit: LinkProfile) -> Callable[[int], None] | None:
    """The `pace` of bulk connections of that node (`elastic.rpc.frames.FrameStream`)."""
    shaper = shaper_of(directory, limit)
    return shaper.pass_on if shaper else None


def wait_until(moment: float) -> None:
    """Sleep until `time.monotonic()` reaches `moment`."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
