"""Files in shared memory that hold one copy each ("slots") and survive the death of their writer.

    0    8 bytes  magic
    8    u64      sequence of the copy in this slot; 0: none, or a write is in progress
    16   u64      size of the copy in bytes
    24   u64      epoch of the copy
    64   ...      the copy

A writer sets the sequence to 0, writes the copy, then sets the sequence of the copy. So a reader
that finds the expected sequence finds a whole copy, even after the writer was killed. A reader can
still race with a writer. It therefore verifies the checksum over the bytes that it read.

A writer can set a slot aside for the vault. The slot then belongs to the vault until the vault
returns it by setting the sequence to 0.

To allocate, copy or free memory takes long: about half a second per GiB, and ten times as long if
the host of a virtual machine must supply the memory first. Nothing here holds a lock meanwhile. The
interpreter's own lock is held only for copies of `COPY_BYTES` (docs/design/threads.md).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from pathlib import Path

import xxhash

from elastic.domain.errors import SlotError, VaultError, VaultFull
from elastic.domain.state_layout import copy_bytes

DATA_OFFSET = 64
MAGIC = b"elslot1\0"
NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})
"""Errors of a full memory or disk. All other errors are faults."""
ZEROS = "/dev/zero"
"""File of zeros without an end."""
_HEADER = struct.Struct("<8sQQQ")


def checksum(data: memoryview | bytes | bytearray) -> str:
    """Return the xxh3-64 of `data`, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def private_copy(data: memoryview) -> memoryview:
    """Return a copy of `data`, at least 1 byte, in memory of this process alone."""
    out = memoryview(mmap.mmap(-1, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    copy_bytes(out, data)
    return out


def slot_prefix(pid: int) -> str:
    """Return the prefix of the file names of a worker's slots."""
    return f"worker-{pid}-"


def fallback_of(directory: Path) -> Path:
    """Return the folder on disk for slots that do not fit into `directory`.

    Every `directory`, and so every node of every job, has a folder of its own.
    """
    return Path(tempfile.gettempdir()) / "+".join(directory.absolute().parts[1:])


def remove_fallbacks(directory: Path) -> None:
    """Remove the folders on disk of all folders in `directory` (`fallback_of`), also those of other
    processes: `tempfile` passes over a directory whose disk is full."""
    name = glob.escape(fallback_of(directory).name)
    given = (os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    for place in {tempfile.gettempdir(), *filter(None, given), "/tmp", "/var/tmp"}:
        for path in Path(place).glob(f"{name}+*"):
            shutil.rmtree(path, ignore_errors=True)


def slot_capacity(nbytes: int) -> int:
    """Return the capacity in bytes of a slot for `nbytes`, which fills whole pages."""
    return -(-(nbytes + DATA_OFFSET) // mmap.PAGESIZE) * mmap.PAGESIZE - DATA_OFFSET


class SharedSlot:
    """The writer's side of a slot. Not thread-safe."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Create the file with room for `nbytes`. Raises OSError (ENOSPC) if memory is full."""
        self.path = path
        self.capacity = slot_capacity(nbytes)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.capacity + DATA_OFFSET)
            self._map = mmap.mmap(descriptor, 0)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        _map_pages(self._map)
        self.begin()

    @property
    def sequence(self) -> int:
        return _field(self._map, 8)

    def view(self, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes, writable."""
        return memoryview(self._map)[DATA_OFFSET : DATA_OFFSET + nbytes]

    def begin(self) -> None:
        """Mark the slot as empty. Call this before the first byte changes."""
        _HEADER.pack_into(self._map, 0, MAGIC, 0, 0, 0)

    def finish(self, sequence: int, nbytes: int, epoch: int) -> None:
        """Mark the slot as holding copy `sequence`. Call this after the last byte is written."""
        _HEADER.pack_into(self._map, 0, MAGIC, 0, nbytes, epoch)
        _HEADER.pack_into(self._map, 0, MAGIC, sequence, nbytes, epoch)

    def unlink(self) -> None:
        """Remove the file. Processes that still map it see an empty slot."""
        self.begin()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _map_pages(memory: mmap.mmap) -> None:
    """Map the pages of new `memory` now, not at their first use, by filling it with zeros.

    A read from a file releases the interpreter's lock, which `madvise` keeps. Without `ZEROS`,
    the first copy into `memory` is slower.
    """
    with contextlib.suppress(OSError), open(ZEROS, "rb", buffering=0) as zeros:
        position, view = 0, memoryview(memory)
        while position < len(view):
            position += zeros.readinto(view[position:])


class SlotReader:
    """The reader's side of a slot, in the same or another process."""

    def __init__(self, path: str) -> None:
        """Map the slot. Raises VaultError if there is no slot at `path`."""
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise VaultError(f"slot {path} cannot be read: {error}") from error
        if len(self._map) < DATA_OFFSET or self._map[:8] != MAGIC:
            raise VaultError(f"{path} is not a slot")

    @property
    def sequence(self) -> int:
        return _field(self._map, 8)

    @property
    def epoch(self) -> int:
        return _field(self._map, 24)

    def view(self, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes, read-only. Raises VaultError if the slot is smaller."""
        if nbytes > len(self._map) - DATA_OFFSET:
            capacity = len(self._map) - DATA_OFFSET
            raise VaultError(f"a copy of {nbytes} bytes does not fit a slot of {capacity}")
        return memoryview(self._map)[DATA_OFFSET : DATA_OFFSET + nbytes].toreadonly()

    def release(self) -> None:
        """Give the slot back to its writer, which had set it aside for the vault."""
        _HEADER.pack_into(self._map, 0, MAGIC, 0, 0, self.epoch)


class SlotPool:
    """Slots of one writer, reused because new pages are expensive.

    Thread-safe. The lock is not held while a slot is created or removed.
    """

    def __init__(self, directory: Path, prefix: str, limit: int = 0) -> None:
        """Create `directory`, usually on /dev/shm. Slots that do not fit go to `fallback_of`.

        `limit` is the maximum size of all slots in bytes; 0: no limit.
        """
        self.limit, self.directory = limit, directory
        self._prefix, self._made = f"{prefix}{time.monotonic_ns():x}-", 0
        self._lock = threading.Lock()
        self._free: list[SharedSlot] = []
        self.allocated_bytes = 0
        """Capacity of all slots, including those that are being created."""
        directory.mkdir(parents=True, exist_ok=True)

    def take(self, nbytes: int) -> SharedSlot:
        """Return a slot with room for `nbytes`, marked as being written.

        Raises VaultFull if memory and disk are full, SlotError for any other failure.
        """
        with self._lock:
            slot = self._fitting(nbytes)
            if slot is not None:
                slot.begin()
                return slot
            unfit = self._unfit(nbytes)
            used, fits = self.allocated_bytes, not self._exceeds_limit(nbytes)
            if fits:
                self.allocated_bytes += slot_capacity(nbytes)
                self._made += 1
            name = f"{self._prefix}{self._made}.slot"
        try:
            while unfit:
                unfit.pop().unlink()
            if not fits:
                text = f"{used} of {self.limit} bytes are taken"
                raise VaultFull(f"no room for a copy of {nbytes} bytes: {text} (--vault-memory)")
            return self._create(name, nbytes)
        except BaseException:
            if fits:
                with self._lock:
                    self.allocated_bytes -= slot_capacity(nbytes)
            raise

    def give(self, slot: SharedSlot) -> None:
        """Accept `slot` for reuse. Its content is lost."""
        slot.begin()
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Remove the files of all free slots."""
        with self._lock:
            free, self._free = self._free, []
            self.allocated_bytes -= sum(slot.capacity for slot in free)
        while free:
            free.pop().unlink()

    def _fitting(self, nbytes: int) -> SharedSlot | None:
        """Take the smallest free slot that fits and is not much too large; None: there is none."""
        fitting = [slot for slot in self._free if nbytes <= slot.capacity <= 2 * nbytes + (1 << 20)]
        slot = min(fitting, key=lambda s: s.capacity, default=None)
        if slot is not None:
            self._free.remove(slot)
        return slot

    def _unfit(self, nbytes: int) -> list[SharedSlot]:
        """Take the free slots that make room for a new one: the largest of the too small ones, and
        others up to the limit."""
        taken: list[SharedSlot] = []

        def discard(slot: SharedSlot) -> None:
            self._free.remove(slot)
            self.allocated_bytes -= slot.capacity
            taken.append(slot)

        small = [slot for slot in self._free if slot.capacity < nbytes]
        if small:
            discard(max(small, key=lambda s: s.capacity))
        while self._free and self._exceeds_limit(nbytes):
            discard(max(self._free, key=lambda s: s.capacity))
        return taken

    def _exceeds_limit(self, nbytes: int) -> bool:
        return 0 < self.limit < self.allocated_bytes + nbytes

    def _create(self, name: str, nbytes: int) -> SharedSlot:
        problems, full = [], False
        for directory in (self.directory, fallback_of(self.directory)):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                return SharedSlot(directory / name, nbytes)
            except OSError as error:
                problems.append(f"{directory}: {error.strerror or error}")
                full = full or error.errno in NO_ROOM
        why = f"for a copy of {nbytes} bytes ({'; '.join(problems)})"
        raise VaultFull(f"no room {why}") if full else SlotError(f"cannot create a slot {why}")


def _field(data: mmap.mmap, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 8], "little")
