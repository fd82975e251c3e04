"""A node's link to the others, made as slow as asked: for tests and what-ifs on one machine (`--link`).

All processes of a node share one link: a file in the node's shared memory says until when it is taken. Who wants to
send reserves a place behind what was reserved before, and sends when that time has come. There are two lanes:
training's messages pass copies that wait, as a network with priorities would let them; a copy is sent in pieces, and
reserves for each when the one before is gone.
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
"""Until when each lane is taken; how many times slower than its limit the link is (0: it is not)."""


class Shaper:
    """One process's end of the link of its node. Thread-safe."""

    def __init__(self, path: Path, limit: LinkProfile) -> None:
        """`path`: the node's file, made by whoever comes first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.limit, self._path = limit, path

    def reserve(self, nbytes: int, *, training: bool = False) -> float:
        """When (time.monotonic) so many bytes will have left; asking takes the link until then."""
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
        """From now on the link carries that many times less, for all processes of the node."""
        with self._locked() as descriptor:
            ahead, behind, _ = _read(descriptor)
            os.pwrite(descriptor, _TAKEN.pack(ahead, behind, factor), 0)

    def pass_on(self, nbytes: int) -> None:
        """Wait until a piece of a copy has left; 0 bytes: for the latency."""
        if nbytes:
            wait_until(self.reserve(nbytes))
        else:
            time.sleep(self.limit.latency_s)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, opened each time: locks belong to open files, and threads must exclude each other too."""
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


def shaper_of(directory: Path | str, limit: LinkProfile) -> Shaper | None:
    """The shaper of the node whose shared memory is `directory`; None without a limit."""
    return Shaper(Path(directory) / "link", limit) if limit != LinkProfile() else None


def pace_of(directory: Path | str, limit: LinkProfile) -> Callable[[int], None] | None:
    """What the bulk connections of that node wait for before each piece (`elastic.rpc.frames.Stream.pace`)."""
    shaper = shaper_of(directory, limit)
    return shaper.pass_on if shaper else None


def wait_until(moment: float) -> None:
    """Sleep until `time.monotonic()` says `moment`."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
