"""The vault: a node's index of whole copies, its own workers' and its peers', outside every worker process.

Copies come in two ways. A worker writes one to a slot in shared memory and announces it (`publish`); a peer
sends one (`store`), which is received into a slot of the vault's own, verified, and only then becomes part
of the index. So the last whole copy is never overwritten by one that is not.

Slots (`elastic.store.shared_memory`) carry the sequence of what lies in them. An entry whose slot says anything else
was overwritten, or its writer was killed while it did so; such an entry is dropped wherever it is met.

What is kept and what makes room is in `elastic.agent.vault.retention`. Whole epochs go by `trim`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastic.agent.vault.retention import Group, abandoned, group_of, spare, superseded
from elastic.core.protocol.messages import LocalCopy
from elastic.domain.errors import ElasticError, StaleError, VaultError, VaultFull
from elastic.domain.types import LOGS, STATE, UPDATE, Copy
from elastic.store.shared_memory import DATA_OFFSET, SharedSlot, SlotPool, SlotReader, checksum, slot_prefix


@dataclass(slots=True)
class _Entry:
    copy: Copy
    path: str
    slot: SharedSlot | SlotReader
    pins: int = 0
    dropped: bool = False

    @property
    def whole(self) -> bool:
        return self.slot.sequence == self.copy.sequence

    @property
    def data(self) -> memoryview:
        return self.slot.view(self.copy.nbytes)


class Incoming:
    """A copy on its way into a vault: fill `buffer`, then `commit` or `abort`.

    The bytes lie in a slot of the vault's own and belong to the vault only after `commit`.
    """

    def __init__(
        self,
        copy: Copy,
        slot: SharedSlot,
        add: Callable[[SharedSlot], None],
        give_back: Callable[[SharedSlot], None],
    ) -> None:
        """`add` makes a whole copy part of the vault; `give_back` frees the slot."""
        self._copy, self._add, self._give_back = copy, add, give_back
        self._slot: SharedSlot | None = slot
        self.buffer = slot.view(copy.nbytes)

    def verify(self, digest: str | None = None) -> None:
        """Raise VaultError unless the bytes match. `digest`: their checksum, if it is known."""
        found = checksum(self.buffer) if digest is None else digest
        if found != self._copy.checksum:
            text = f"arrived corrupt: checksum {found}, not {self._copy.checksum}"
            raise VaultError(f"{self._copy.key} {text}")

    def commit(self, digest: str | None = None) -> None:
        """Verify the bytes and add the copy to the vault; VaultError or StaleError keep nothing."""
        if self._slot is None:
            raise VaultError(f"{self._copy.key} was aborted")
        try:
            self.verify(digest)
            self._slot.finish(self._copy.sequence, self._copy.nbytes, self._copy.epoch)
            self._add(self._slot)
            self._slot = None
        finally:
            self.abort()

    def abort(self) -> None:
        """Give the slot back unless the copy was committed."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._give_back(slot)


class Vault:
    """Thread-safe. `directory` should lie on /dev/shm; `fallback` is used when that is full."""

    def __init__(
        self,
        node: str,
        directory: Path,
        *,
        fallback: Path | None = None,
        limit: int = 0,
        on_corrupt: Callable[[Copy], None] = lambda copy: None,
    ) -> None:
        """`limit`: most bytes of copies that came from elsewhere; 0: what memory there is. `on_corrupt` hears of every
        copy that is dropped because it does not match its checksum; from any thread."""
        self._on_corrupt = on_corrupt
        self.node, self.directory = node, Path(directory)
        self._lock, self._arriving = threading.RLock(), threading.Lock()
        self._pool = SlotPool(self.directory, "vault-", fallback, limit)
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[Group, set[str]] = {}
        self._places: dict[str, str] = {}
        self._readers: dict[str, SlotReader] = {}
        self._gone: set[tuple[Path, str]] = set()
        self._fence = self._trimmed = 0
        self._running = -1
        """Step whose logged messages outlive the trim of their epoch."""

    # ---- copies come in ----

    def publish(self, local: LocalCopy) -> None:
        """Index a copy that one of this node's workers wrote. Not fenced: only own children announce here.

        What the index had in the same slot is dropped. Raises VaultError if the slot does not hold the copy.
        """
        with self._lock:
            self._refuse_unusable(local.copy)
            reader = self._reader(local)
            if local.path in self._places:
                self._drop(self._entries[self._places[local.path]])
            if self._running >= 0 and local.copy.kind == STATE and local.copy.step != self._running:
                self._drop_messages()
            self._insert(_Entry(replace(local.copy, node=self.node), local.path, reader))

    def store(self, copy: Copy, *, trusted: bool = False) -> Incoming:
        """Make room for a copy that arrives. `trusted`: this node pulled it itself, so no fence applies.

        Raises StaleError if its epoch is fenced off, VaultFull if memory is short.
        """
        with self._lock:
            self._refuse_unusable(copy)
            self._refuse_stale(copy, trusted)
            try:
                slot = self._pool.take(copy.nbytes)
            except VaultFull:
                if not self._make_room(copy):
                    raise
                slot = self._pool.take(copy.nbytes)
            add = partial(self._add, copy, trusted=trusted)
            return Incoming(copy, slot, add, self._give)

    def store_all(self, copies: Sequence[Copy]) -> list[Incoming]:
        """`store` for all or none. Never waits for room, and one bundle after the other takes its: two that come at
        once cannot both fail for what the other has taken so far."""
        made: list[Incoming] = []
        with self._arriving:
            try:
                for copy in copies:
                    made.append(self.store(copy))
            except ElasticError:
                for incoming in made:
                    incoming.abort()
                raise
        return made

    def fence(self, epoch: int) -> None:
        """From now on refuse arriving copies of epochs below `epoch`, also those half arrived."""
        with self._lock:
            self._fence = max(self._fence, epoch)

    # ---- copies go out ----

    @contextlib.contextmanager
    def lease(self, key: str) -> Iterator[memoryview]:
        """The bytes of a copy, in place; a slot of the vault's own is not reused meanwhile.

        A worker's slot may be rewritten under the reader: whoever takes bytes away verifies their checksum.
        """
        with self._lock:
            entry = self._find(key)
            entry.pins += 1
        try:
            yield entry.data
        finally:
            with self._lock:
                entry.pins -= 1
                self._release(entry)

    def read(self, key: str) -> memoryview:
        """A verified private copy of the bytes. A corrupt one is dropped, with VaultError."""
        with self.lease(key) as view:
            data, expected = bytes(view), self.copy(key).checksum
        if checksum(data) != expected:
            self.verify(key)
            raise VaultError(f"{key} is torn or corrupt")
        return memoryview(data)

    def view(self, local: LocalCopy) -> memoryview:
        """The bytes that a worker announced, also if a newer copy has taken their place in the index."""
        with self._lock:
            return self._reader(local).view(local.copy.nbytes)

    def locate(self, key: str) -> LocalCopy:
        """Where a copy lies, for readers on this node (`elastic.store.shared_memory.SlotReader`)."""
        with self._lock:
            entry = self._find(key)
            return LocalCopy(entry.copy, entry.path, DATA_OFFSET)

    def copy(self, key: str) -> Copy:
        with self._lock:
            return self._find(key).copy

    def find(self, kind: str, layer: int, shard: int, step: int) -> Copy | None:
        """Some whole copy of that description, of the newest epoch and sequence; None if there is none."""
        wanted = (kind, layer, shard, step)
        found = [c for c in self.inventory() if (c.kind, c.layer, c.shard, c.step) == wanted]
        return max(found, key=lambda c: (c.epoch, c.sequence), default=None)

    def inventory(self) -> tuple[Copy, ...]:
        """All whole copies, `node` filled in, sorted by key. Torn ones are dropped here."""
        with self._lock:
            for entry in [e for e in self._entries.values() if not e.whole]:
                self._drop(entry)
            return tuple(self._entries[key].copy for key in sorted(self._entries))

    @property
    def nbytes(self) -> int:
        """Bytes of all copies in the index, workers' slots included."""
        with self._lock:
            return sum(entry.copy.nbytes for entry in self._entries.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the vault's own slots, free ones included."""
        return self._pool.allocated_bytes

    # ---- copies go away ----

    def trim(self, epoch: int, step: int = -1) -> None:
        """Drop copies of epochs below `epoch`; hand back slots set aside, remove those of dead workers.

        Logged messages of `step`, in which the epoch began, stay until a worker here publishes another version.
        """
        with self._lock:
            copies = [entry.copy for entry in self._entries.values()]
            over = any(c.kind == STATE and c.epoch >= epoch and c.step != step for c in copies)
            self._trimmed, self._running = epoch, -1 if over else step
            for entry in [e for e in self._entries.values() if e.copy.epoch < epoch]:
                if entry.copy.kind not in LOGS or entry.copy.step != self._running:
                    self._drop(entry)
            self._hand_back()
            self._sweep()

    def _drop_messages(self) -> None:
        """Drop what `trim` left."""
        self._running = -1
        old = [e for e in self._entries.values() if e.copy.kind in LOGS and e.copy.epoch < self._trimmed]
        for entry in old:
            self._drop(entry)
        if old:
            self._hand_back()
            self._sweep()

    def _hand_back(self) -> None:
        for path, reader in self._readers.items():
            # Not one that is being written (epoch 0) or was handed back: its writer may be inside.
            if path not in self._places and reader.sequence and 0 < reader.epoch < self._trimmed:
                reader.release()

    def worker_gone(self, pid: int, directory: Path | None = None) -> None:
        """The worker is dead, its copies stay; `trim` removes its slots as those go."""
        with self._lock:
            self._gone.add((directory or self.directory, slot_prefix(pid)))

    def _sweep(self) -> None:
        for directory, prefix in self._gone:
            announced = [path for path in self._readers if Path(path).name.startswith(prefix)]
            for path in {*announced, *map(str, directory.glob(f"{prefix}*"))}:
                if path not in self._places:
                    Path(path).unlink(missing_ok=True)
                    self._readers.pop(path, None)

    def enter(self, epoch: int, step: int) -> None:
        """`epoch` begins in `step`: refuse copies of older ones, and drop theirs of later steps."""
        with self._lock:
            self.fence(epoch)
            self._drop_all(abandoned([entry.copy for entry in self._entries.values()], epoch, step))

    def verify(self, key: str) -> bool:
        """Compare a copy with its checksum; drop it and return False if it does not match."""
        corrupt = self._drop_corrupt(key)
        with self._lock:
            return not corrupt and key in self._entries

    def _drop_corrupt(self, key: str) -> bool:
        """Drop the copy and return True if it is corrupt; one that went meanwhile is not."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.pins += 1
        found = checksum(entry.data)
        with self._lock:
            entry.pins -= 1
            self._release(entry)
            torn = not entry.whole
            corrupt = not entry.dropped and (found != entry.copy.checksum or torn)
            if corrupt:
                self._drop(entry)
        if corrupt and not torn:
            self._on_corrupt(entry.copy)
        return corrupt

    def flip_bytes(self) -> int:
        """Flip a byte in every copy that came from elsewhere, as failing memory would; return how many."""
        with self._lock:
            found = [entry for entry in self._entries.values() if isinstance(entry.slot, SharedSlot)]
            for entry in found:
                entry.data[entry.copy.nbytes // 2] ^= 1
            return len(found)

    def check_integrity(self) -> tuple[Copy, ...]:
        """Verify every copy and the index itself; return the copies that had to be dropped."""
        bad = tuple(copy for copy in self.inventory() if self._drop_corrupt(copy.key))
        with self._lock:
            indexed = {key for keys in self._groups.values() for key in keys}
            assert indexed == set(self._entries), "groups and entries disagree"
            kept = all(keys and not self._given_up(group) for group, keys in self._groups.items())
            assert kept, "retention is broken"
            places = {entry.path: key for key, entry in self._entries.items()}
            assert places == self._places, "places and entries disagree"
        return bad

    def close(self) -> None:
        """Drop everything and remove the vault's files."""
        with self._lock:
            for entry in list(self._entries.values()):
                self._drop(entry)
            self._pool.close()

    # ---- inside, all under the lock ----

    def _refuse_unusable(self, copy: Copy) -> None:
        if copy.sequence < 1 or copy.nbytes < 1:
            raise VaultError(f"{copy.key} of {copy.nbytes} bytes: sequence and size must be positive")

    def _refuse_stale(self, copy: Copy, trusted: bool) -> None:
        if copy.epoch < self._fence and not trusted:
            raise StaleError(
                f"{copy.key} is of epoch {copy.epoch}; {self.node} refuses those below {self._fence}"
            )

    def _add(self, copy: Copy, slot: SharedSlot, *, trusted: bool) -> None:
        with self._lock:
            self._refuse_stale(copy, trusted)
            self._insert(_Entry(replace(copy, node=self.node), str(slot.path), slot))

    def _give(self, slot: SharedSlot) -> None:
        with self._lock:
            self._pool.give(slot)

    def _make_room(self, copy: Copy) -> bool:
        """Drop what is most dispensable of what came from elsewhere; whether there was any."""
        found = spare([e.copy for e in self._entries.values() if isinstance(e.slot, SharedSlot)], copy)
        self._drop_all(found)
        return bool(found)

    def _insert(self, entry: _Entry) -> None:
        """Apply retention, in which the new entry itself may lose against newer ones."""
        copy = entry.copy
        if copy.key in self._entries:
            self._drop(self._entries[copy.key])
        self._entries[copy.key], self._places[entry.path] = entry, copy.key
        self._groups.setdefault(group_of(copy), set()).add(copy.key)
        for torn in [e for e in (self._entries[k] for k in self._groups[group_of(copy)]) if not e.whole]:
            self._drop(torn)
        self._drop_all(self._given_up(group_of(copy)))
        if copy.kind == STATE:
            self._drop_all(self._given_up((UPDATE, *group_of(copy)[1:])))

    def _given_up(self, group: Group) -> list[Copy]:
        """What retention gives up of a group, as things are."""
        copies = [self._entries[key].copy for key in self._groups.get(group, ())]
        states = self._groups.get((STATE, *group[1:]), ()) if group[0] == UPDATE else ()
        return superseded(copies, [self._entries[key].copy.step for key in states])

    def _drop_all(self, copies: Iterable[Copy]) -> None:
        """Drop those that are still there."""
        for entry in [self._entries[copy.key] for copy in copies if copy.key in self._entries]:
            self._drop(entry)

    def _find(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or not entry.whole:
            if entry is not None:
                self._drop(entry)
            raise VaultError(f"{key} is not in the vault of {self.node}")
        return entry

    def _drop(self, entry: _Entry) -> None:
        """Once; with a state go the updates that are of no more use."""
        copy, group = entry.copy, group_of(entry.copy)
        if entry.dropped:
            return
        del self._entries[copy.key], self._places[entry.path]
        self._groups[group].discard(copy.key)
        if not self._groups[group]:
            del self._groups[group]
        entry.dropped = True
        self._release(entry)
        if copy.kind == STATE:
            self._drop_all(self._given_up((UPDATE, *group[1:])))

    def _release(self, entry: _Entry) -> None:
        """Give the room of a dropped entry back once nobody reads it."""
        if not entry.dropped or entry.pins:
            return
        if isinstance(entry.slot, SharedSlot):
            self._pool.give(entry.slot)

    def _reader(self, local: LocalCopy) -> SlotReader:
        reader = self._readers.get(local.path)
        if reader is None:
            reader = SlotReader(local.path)
        if local.offset != DATA_OFFSET or reader.sequence != local.copy.sequence:
            raise VaultError(f"{local.path}+{local.offset} does not hold {local.copy.key}")
        self._readers[local.path] = reader
        return reader
