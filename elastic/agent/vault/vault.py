"""The vault: a node's index of whole copies, outside the worker processes.

A copy arrives in one of two ways. A local worker writes it to a slot in shared memory and announces
it (`publish`). A peer sends it (`store`): the bytes go to a slot of the vault and are verified
before the copy enters the index. So a partial copy never overwrites the last whole one.

Each slot (`elastic.store.shared_memory`) carries the sequence number of its content. If the number
differs from that of the index entry, the slot was overwritten or its writer died while writing; the
entry is dropped at its next use.

The lock protects the index alone, because heartbeats and orders wait for it. Memory is allocated,
read and freed without it.

`elastic.agent.vault.retention` has the rules for keeping copies. `trim` drops whole epochs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.agent.vault.retention import (
    RetentionGroup,
    abandoned,
    dispensable,
    group_of,
    superseded,
)
from elastic.core.protocol.messages import LocalCopy
from elastic.domain.checksum import checksum_problem
from elastic.domain.errors import ElasticError, StaleError, VaultError, VaultFull
from elastic.domain.types import LOGS, STATE, UPDATE, Copy
from elastic.store.shared_memory import (
    DATA_OFFSET,
    SharedSlot,
    SlotPool,
    SlotReader,
    checksum,
    private_copy,
    slot_prefix,
)


@dataclass(slots=True)
class _VaultEntry:
    copy: Copy
    path: str
    slot: SharedSlot | SlotReader
    dropped: bool = False

    @property
    def whole(self) -> bool:
        return self.slot.sequence == self.copy.sequence

    @property
    def data(self) -> memoryview:
        return self.slot.view(self.copy.nbytes)


class Incoming:
    """A copy that is being received: fill `buffer`, then `commit` or `abort`.

    The copy belongs to the vault only after `commit`.
    """

    def __init__(self, vault: Vault, copy: Copy, slot: SharedSlot, trusted: bool) -> None:
        self._vault, self._copy, self._trusted = vault, copy, trusted
        self._slot: SharedSlot | None = slot
        self.buffer = slot.view(copy.nbytes)

    def verify(self, digest: str | None = None) -> None:
        """Raise VaultError unless the checksum matches. `digest`: xxh3-64 of `buffer`, if known."""
        found = checksum(self.buffer) if digest is None else digest
        problem = checksum_problem(self._copy, found)
        if problem:
            raise VaultError(f"{self._copy.key} arrived corrupt: {problem}")

    def commit(self, digest: str | None = None) -> None:
        """Verify the bytes (`digest`: see `verify`) and add the copy to the vault. After a
        VaultError or StaleError nothing is kept."""
        if self._slot is None:
            raise VaultError(f"{self._copy.key} was aborted")
        try:
            self.verify(digest)
            self._slot.finish(self._copy.sequence, self._copy.nbytes, self._copy.epoch)
            self._vault._add(self._copy, self._slot, self._trusted)
            self._slot = None
        finally:
            self.abort()

    def abort(self) -> None:
        """Return the slot to the vault unless the copy was committed."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._vault._give(slot)


class Vault:
    """Index of copies on one node. Thread-safe."""

    def __init__(
        self,
        node: str,
        directory: Path,
        *,
        limit: int = 0,
        on_corrupt: Callable[[Copy], None] = lambda copy: None,
        background: Callable[[Callable[[], object]], object] = lambda work: work(),
    ) -> None:
        """`directory` should be on /dev/shm. `limit`: maximum bytes of copies from peers; 0: no
        limit. `on_corrupt(copy)` is called, on any thread, for each copy that is dropped because
        its checksum does not match. `background(work)` runs work that takes long."""
        self._on_corrupt, self._background = on_corrupt, background
        self.node, self.directory = node, Path(directory)
        self._lock, self._crowded = threading.RLock(), threading.Lock()
        """Locks of the index, and of the second attempt to reserve room, which may take long. Only
        bundles that found no room wait for the second one."""
        self._pool = SlotPool(self.directory, "vault-", limit)
        self._entries: dict[str, _VaultEntry] = {}
        self._groups: dict[RetentionGroup, set[str]] = {}
        self._keys_by_path: dict[str, str] = {}
        self._readers: dict[str, SlotReader] = {}
        self._leases: Counter[str] = Counter()
        """Number of readers per path of a slot, also of copies that were dropped meanwhile."""
        self._gone: set[tuple[Path, str]] = set()
        self._fence = self._trimmed = 0
        self._outside: dict[str, int] = {}
        """Owner -> oldest epoch of its copies that are accepted in spite of the fence."""
        self._published = -1
        """Newest step of a state that a local worker has published."""
        self._running = -1
        """Step whose logged messages survive the trim of their epoch; -1: none survive."""

    # ---- copies come in ----

    def publish(self, local: LocalCopy) -> None:
        """Index a copy that a local worker wrote, and drop the entry that used the same slot.

        The epoch is not checked, because only child processes announce copies here. Raises
        VaultError if the slot does not hold the copy.
        """
        with self._lock:
            self._check_size(local.copy)
            reader = self._reader(local)
            if local.path in self._keys_by_path:
                self._drop(self._entries[self._keys_by_path[local.path]])
            state = local.copy.kind == STATE
            over = state and self._running >= 0 and local.copy.step != self._running
            if over:
                self._running = -1
                self._drop_old(LOGS)
            self._insert(_VaultEntry(replace(local.copy, node=self.node), local.path, reader))
            newer = state and local.copy.step > self._published
            self._published = local.copy.step if newer else self._published
        if over or newer:
            self._background(self._free_slots)

    def store(self, copy: Copy, *, trusted: bool = False) -> Incoming:
        """Reserve room for an arriving copy. `trusted`: this node fetches the copy itself, and its
        epoch is not checked.

        Raises StaleError if the epoch is fenced, VaultFull if there is no room.
        """
        with self._lock:
            self._check_size(copy)
            self._check_epoch(copy, trusted)
        try:
            slot = self._pool.take(copy.nbytes)
        except VaultFull:
            if not self._make_room(copy):
                raise
            slot = self._pool.take(copy.nbytes)
        return Incoming(self, copy, slot, trusted)

    def store_all(self, copies: Sequence[Copy]) -> list[Incoming]:
        """Reserve room for all copies or for none. Raises as `store` does.

        Concurrent bundles allocate at the same time, so that a small one does not wait for a large
        one. A bundle that finds no room tries again, one bundle at a time. So two bundles cannot
        both fail because of each other's partial reservations.
        """
        try:
            return self._reserve(copies)
        except VaultFull:
            with self._crowded:
                return self._reserve(copies)

    def _reserve(self, copies: Sequence[Copy]) -> list[Incoming]:
        made: list[Incoming] = []
        try:
            for copy in copies:
                made.append(self.store(copy))
        except ElasticError:
            for incoming in made:
                incoming.abort()
            raise
        return made

    def fence(self, epoch: int, outside: Collection[str] = (), publishing: int = 0) -> None:
        """Reject arriving copies of epochs below `epoch`, including those in transfer.

        The owners in `outside` still train in the epoch `publishing`, so their copies of this epoch
        and later ones are accepted until the trim of `epoch`, or a higher fence. Another call for
        the same epoch adds its owners; a call for a lower one has no effect.
        """
        with self._lock:
            if epoch > self._fence:
                self._fence, self._outside = epoch, {}
            if epoch == self._fence and epoch > self._trimmed:
                self._outside |= dict.fromkeys(outside, publishing)

    # ---- copies go out ----

    @contextlib.contextmanager
    def lease(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a copy in its slot. Meanwhile the vault neither reuses the slot nor
        returns it to its worker.

        A worker may overwrite a slot of its present epoch, so the reader must verify the checksum.
        """
        with self._pinned(key) as entry:
            yield entry.data

    @contextlib.contextmanager
    def _pinned(self, key: str) -> Iterator[_VaultEntry]:
        with self._lock:
            entry = self._find(key)
            self._leases[entry.path] += 1
        try:
            yield entry
        finally:
            with self._lock:
                self._leases[entry.path] -= 1
                self._release(entry)
                self._return_unused([entry.path])

    def read(self, key: str) -> memoryview:
        """Return the verified bytes, in private memory. Raises VaultError if the copy is absent or
        corrupt, and drops a corrupt copy."""
        with self._pinned(key) as entry:
            data = private_copy(entry.data)
        if checksum_problem(entry.copy, checksum(data)):
            self.verify(key)
            raise VaultError(f"{key} is torn or corrupt")
        return data

    def view(self, local: LocalCopy) -> memoryview:
        """Return the bytes that a worker announced, even if the index has a newer copy."""
        with self._lock:
            return self._reader(local).view(local.copy.nbytes)

    def locate(self, key: str) -> LocalCopy:
        """Return the path and offset of a copy, for a `SlotReader` on this node."""
        with self._lock:
            entry = self._find(key)
            return LocalCopy(entry.copy, entry.path, DATA_OFFSET)

    def copy(self, key: str) -> Copy:
        with self._lock:
            return self._find(key).copy

    def inventory(self) -> tuple[Copy, ...]:
        """Drop overwritten copies; return all others, sorted by key."""
        with self._lock:
            for entry in [e for e in self._entries.values() if not e.whole]:
                self._drop(entry)
            return tuple(self._entries[key].copy for key in sorted(self._entries))

    @property
    def nbytes(self) -> int:
        """Bytes of all copies in the index, including those in workers' slots."""
        with self._lock:
            return sum(entry.copy.nbytes for entry in self._entries.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the vault's own slots, including free ones."""
        return self._pool.allocated_bytes

    # ---- copies go away ----

    def trim(self, epoch: int, step: int = -1) -> None:
        """Drop copies of epochs below `epoch`, return unused slots to workers, and remove the slots
        of dead workers in the background. All nodes are in `epoch`, so the fence has no exceptions
        any more.

        Logged messages of `step`, in which the epoch began, stay until a local worker publishes
        the state of another step.
        """
        with self._lock:
            copies = [entry.copy for entry in self._entries.values()]
            over = any(c.kind == STATE and c.epoch >= epoch and c.step != step for c in copies)
            self._trimmed, self._running = epoch, -1 if over else step
            if epoch >= self._fence:
                self._outside = {}
            self._drop_old()
        self._background(self._free_slots)

    def _drop_old(self, kinds: Collection[str] = ()) -> None:
        """Drop copies of trimmed epochs (`kinds`: only of these kinds) except logged messages that
        are still needed. Return unused slots to workers."""
        for entry in [e for e in self._entries.values() if e.copy.epoch < self._trimmed]:
            needed = entry.copy.kind in LOGS and entry.copy.step == self._running
            if not needed and (not kinds or entry.copy.kind in kinds):
                self._drop(entry)
        self._return_unused(self._readers)

    def _return_unused(self, paths: Iterable[str]) -> None:
        """Return those slots of trimmed epochs to their workers that hold no copy and that nobody
        reads."""
        for path in paths:
            reader = self._readers.get(path)
            # Skip a slot that is being written (epoch 0) or was returned: its writer may use it.
            past = reader and reader.sequence and 0 < reader.epoch < self._trimmed
            if reader and past and path not in self._keys_by_path and not self._leases[path]:
                reader.release()

    def _free_slots(self) -> None:
        """Remove those slots of dead workers that hold no copy, and let go of slots that their
        workers have removed: a mapping keeps the memory of a removed file."""
        with self._lock:
            gone, known = tuple(self._gone), tuple(self._readers)
        for path in known:
            if not Path(path).exists():
                self._forget(path)
        for directory, prefix in gone:
            announced = [path for path in known if Path(path).name.startswith(prefix)]
            for path in sorted({*announced, *map(str, directory.glob(f"{prefix}*"))}):
                with self._lock:
                    if path in self._keys_by_path:
                        continue
                    reader = self._readers.pop(path, None)
                Path(path).unlink(missing_ok=True)
                del reader  # the memory is freed with the last mapping

    def _forget(self, path: str) -> None:
        """Unmap a slot, outside the lock, unless it holds a copy or somebody reads it."""
        with self._lock:
            used = path in self._keys_by_path or self._leases[path]
            reader = None if used else self._readers.pop(path, None)
        del reader

    def worker_gone(self, pid: int, directory: Path) -> None:
        """Record that process `pid`, a worker with slots in `directory`, has ended. Its copies
        stay; `trim` removes its slots when they are unused."""
        with self._lock:
            self._gone.add((directory, slot_prefix(pid)))

    def enter(self, epoch: int, step: int) -> None:
        """Begin `epoch` at `step`: fence older epochs and drop their copies of later steps. If the
        epoch is fenced already, the exceptions stay, because other nodes may enter it later."""
        with self._lock:
            self.fence(epoch)
            self._drop_all(abandoned([entry.copy for entry in self._entries.values()], epoch, step))

    def verify(self, key: str) -> bool:
        """Return whether the vault has the copy and its checksum matches. Drop a corrupt copy."""
        return not self._drop_corrupt(key) and key in self._entries

    def _drop_corrupt(self, key: str) -> bool:
        """Drop a copy that is overwritten or corrupt. Return True if this call dropped it."""
        try:
            with self._pinned(key) as entry:
                problem = checksum_problem(entry.copy, checksum(entry.data))
        except VaultError:
            return False
        with self._lock:
            torn = not entry.whole
            if entry.dropped or not (problem or torn):
                return False
            self._drop(entry)
        if not torn:
            self._on_corrupt(entry.copy)
        return True

    def flip_bytes(self) -> int:
        """Flip a byte in each copy from a peer, as faulty memory would; return how many."""
        with self._lock:
            found = self._from_peers()
            for entry in found:
                entry.data[entry.copy.nbytes // 2] ^= 1
            return len(found)

    def check_integrity(self) -> tuple[Copy, ...]:
        """Verify all copies and the index. Drop corrupt copies and return them."""
        bad = tuple(copy for copy in self.inventory() if self._drop_corrupt(copy.key))
        with self._lock:
            indexed = {key for keys in self._groups.values() for key in keys}
            assert indexed == set(self._entries), "groups and entries disagree"
            kept = all(keys and not self._superseded(group) for group, keys in self._groups.items())
            assert kept, "retention is broken"
            keys_by_path = {entry.path: key for key, entry in self._entries.items()}
            assert keys_by_path == self._keys_by_path, "paths and entries disagree"
        return bad

    def close(self) -> None:
        """Drop all copies and remove the vault's files."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._drop(entry)
        self._pool.close()

    # ---- helpers; the caller holds the lock ----

    def _check_size(self, copy: Copy) -> None:
        if copy.sequence < 1 or copy.nbytes < 1:
            text = f"{copy.key} of {copy.nbytes} bytes: sequence and size must be positive"
            raise VaultError(text)

    def _check_epoch(self, copy: Copy, trusted: bool) -> None:
        oldest = self._outside.get(copy.owner, self._fence)
        if copy.epoch < oldest and not trusted:
            raise StaleError(
                f"{copy.key} is of epoch {copy.epoch}; {self.node} rejects any below {oldest}"
            )

    def _add(self, copy: Copy, slot: SharedSlot, trusted: bool) -> None:
        with self._lock:
            self._check_epoch(copy, trusted)
            self._insert(_VaultEntry(replace(copy, node=self.node), str(slot.path), slot))

    def _give(self, slot: SharedSlot) -> None:
        self._pool.give(slot)

    def _make_room(self, copy: Copy) -> bool:
        """Drop copies from peers to make room for `copy`; return whether any was dropped."""
        with self._lock:
            found = dispensable([entry.copy for entry in self._from_peers()], copy)
            self._drop_all(found)
        return bool(found)

    def _from_peers(self) -> list[_VaultEntry]:
        return [e for e in self._entries.values() if isinstance(e.slot, SharedSlot)]

    def _insert(self, entry: _VaultEntry) -> None:
        """Add an entry and apply retention, which may drop the new entry itself."""
        copy = entry.copy
        if copy.key in self._entries:
            self._drop(self._entries[copy.key])
        self._entries[copy.key], self._keys_by_path[entry.path] = entry, copy.key
        group = group_of(copy)
        keys = self._groups.setdefault(group, set())
        keys.add(copy.key)
        self._drop_all([self._entries[k].copy for k in keys if not self._entries[k].whole])
        self._drop_all(self._superseded(group))
        if copy.kind == STATE:
            self._drop_all(self._superseded((UPDATE, *group[1:])))

    def _superseded(self, group: RetentionGroup) -> list[Copy]:
        """Return the copies of a group that retention does not keep now."""
        copies = [self._entries[key].copy for key in self._groups.get(group, ())]
        states = self._groups.get((STATE, *group[1:]), ()) if group[0] == UPDATE else ()
        return superseded(copies, [self._entries[key].copy.step for key in states])

    def _drop_all(self, copies: Iterable[Copy]) -> None:
        """Drop those copies that are still in the index."""
        for entry in [self._entries[copy.key] for copy in copies if copy.key in self._entries]:
            self._drop(entry)

    def _find(self, key: str) -> _VaultEntry:
        entry = self._entries.get(key)
        if entry is None or not entry.whole:
            if entry is not None:
                self._drop(entry)
            raise VaultError(f"{key} is not in the vault of {self.node}")
        return entry

    def _drop(self, entry: _VaultEntry) -> None:
        """Remove an entry, if still present. With a state, also drop updates that need it."""
        copy, group = entry.copy, group_of(entry.copy)
        if entry.dropped:
            return
        del self._entries[copy.key], self._keys_by_path[entry.path]
        self._groups[group].discard(copy.key)
        if not self._groups[group]:
            del self._groups[group]
        entry.dropped = True
        self._release(entry)
        if copy.kind == STATE:
            self._drop_all(self._superseded((UPDATE, *group[1:])))

    def _release(self, entry: _VaultEntry) -> None:
        """Return the slot of a dropped entry to the pool, unless a reader still uses it."""
        leased = self._leases[entry.path]
        if entry.dropped and not leased and isinstance(entry.slot, SharedSlot):
            self._pool.give(entry.slot)

    def _reader(self, local: LocalCopy) -> SlotReader:
        reader = self._readers.get(local.path) or SlotReader(local.path)
        if local.offset != DATA_OFFSET or reader.sequence != local.copy.sequence:
            raise VaultError(f"{local.path}+{local.offset} does not hold {local.copy.key}")
        self._readers[local.path] = reader
        return reader
