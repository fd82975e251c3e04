"""Publishes a worker's layers: writes copies to shared memory and announces them to the agent.

Each (kind, layer) has a ring of two slots; logged messages have one ring per micro-batch. A slot is
written again only after the bundle of its last announcement is acknowledged, that is, whole at the
peer. Until then the agent may send it. The previous copy stays whole while the next one is written.
At most two bundles of gradients and two of states are unacknowledged at any time.

Two slots are enough for a recovery, if the worker's agent lives. At any moment a recovery needs
either state v+1, or state v and the final gradients of step v:

- Before the update of step v the rings hold states v and v-1, and the last two gradient copies of
  step v; the later one is final. State v+1 goes into the slot of v-1, so v and the final gradients
  stay whole while it is written.
- Gradients of step v+1 are published only after state v+1. Nothing else overwrites gradients of
  step v.
- `Published` puts a copy into the agent's index. Messages arrive in order, even after the death of
  their sender: an agent that has read a worker's last message knows all announced copies.

Slots belong to one epoch. When the first copy of a new epoch is published, older slots are retired.
They return when the agent's vault has trimmed their epoch, so that a recovery does not overwrite
copies that it may still need.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import xxhash

from elastic.core.protocol.messages import LocalCopy, Published
from elastic.core.protocol.timeouts import SILENCE_S
from elastic.domain.checksum import checksum_problem, copy_checksum
from elastic.domain.errors import StaleError, VaultFull
from elastic.domain.types import GRADIENT, LOGS, STATE, Copy
from elastic.rpc.frames import CHUNK_BYTES
from elastic.store.shared_memory import DATA_OFFSET, SharedSlot, SlotPool, checksum, slot_prefix
from elastic.worker.backup import items
from elastic.worker.backup.copier import Copier
from elastic.worker.backup.items import PendingCopy, RingKey
from elastic.worker.backup.metrics import TrafficMeter
from elastic.worker.model.state_codec import as_memory
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal

SLOTS_PER_RING = 2


@dataclass(slots=True, eq=False)
class _RingSlot:
    slot: SharedSlot
    bundle: int = 0
    """The bundle of its announcement; 0: not announced, so free to be written."""
    content: tuple[int, frozenset[int]] = (-1, frozenset())
    """(step, ledger) of the announced copy. An equal copy is not announced again."""
    peer: str = ""
    """Peer to which the copy goes; "": the copy stays on this node."""


class Publisher:
    """Publishes one worker's copies in the main thread; another thread calls `on_acked`."""

    def __init__(
        self,
        send: Callable[[Published], None],
        directory: Path | str,
        node: str,
        shard: int = 0,
        *,
        copy_device: torch.device | None = None,
        on_progress: Callable[[], object] = lambda: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`send` takes announcements for the agent; `shard`: TP rank of this worker's layers.

        `directory`: the job's shared memory. `copy_device`: device to copy from in the background;
        None: the main thread copies. `on_progress` is called, in any thread, for each slot, for
        each copy, and for each chunk of its checksum. `silence_s`: longest wait for the agent when
        an epoch has ended.
        """
        self._on_progress, self._silence_s = on_progress, silence_s
        self._send, self._node, self._shard = send, node, shard
        self._pool = SlotPool(Path(directory), slot_prefix(os.getpid()))
        self._rings: dict[RingKey, list[_RingSlot]] = defaultdict(list)
        self._retired: list[SharedSlot] = []
        self._epoch = 0
        self._sequence = time.monotonic_ns() // 1000
        """Number of the newest copy. It starts above the numbers of this node's past workers."""
        self._bundle, self._acked = 0, 0
        self._probes: set[int] = set()
        """Numbers of empty bundles, which the agent answers as soon as it has read them."""
        self._read = 0
        """The newest probe that was answered."""
        self._changed = threading.Condition()
        self._copier = Copier(copy_device, self._on_failed) if copy_device is not None else None
        self._failed: BaseException | None = None
        self._logs_given_up = False
        self._states: dict[int, Copy] = {}
        """Layer -> the newest announced copy of its state."""
        self.keep_final_gradients = False
        """Whether to keep the last gradients of a step until those of the next step replace them,
        because another holder's portion of the state may be rebuilt from them."""
        self.traffic = TrafficMeter()

    def publish_gradients(
        self,
        sums: Iterable[GradientSum],
        step: int,
        epoch: int,
        peer: str,
        abandon: AbandonSignal | None = None,
    ) -> int:
        """Publish copies of those `sums` that are not empty. Returns the same as `publish`."""
        return self.publish(items.gradients(sums, step), epoch, peer, abandon)

    def publish_states(
        self,
        replicas: Iterable[LayerReplica],
        epoch: int,
        peer: str,
        peer_layers: Collection[int] | None = None,
        abandon: AbandonSignal | None = None,
    ) -> int:
        """Publish the states: of `peer_layers` (None: all) to `peer`, the others locally.

        Returns the newest bundle that protects a state (see `publish`).
        """
        states = items.states(replicas)
        away = [c for c in states if peer_layers is None or c.layer in peer_layers]
        local = self.publish([c for c in states if c not in away], epoch, "", abandon)
        return max(local, self.publish(away, epoch, peer, abandon))

    def publish(
        self, copies: Iterable[PendingCopy], epoch: int, peer: str, abandon: AbandonSignal | None
    ) -> int:
        """Write and announce those of `copies` that are new, as one bundle.

        `peer` is "" for copies that stay on this node. Returns the bundle after whose
        acknowledgement all `copies` are safe; 0 without copies. Waits for a free slot until
        `abandon` is set; if `abandon` is None, takes more memory instead. Raises EpochAbandoned,
        VaultFull, and StaleError for copies of an older epoch.
        """
        copies = list(copies)
        self._enter_epoch(epoch)
        if self._logs_given_up and any(copy.kind in LOGS for copy in copies):
            raise VaultFull("logged messages made room for other copies")
        self._reclaim()
        fresh: list[tuple[PendingCopy, _RingSlot, int]] = []
        protecting = 0
        for item in copies:
            ring = self._rings[item.ring]
            same = [s.bundle for s in ring if s.content == item.content and peer in ("", s.peer)]
            if any(same):
                protecting = max(protecting, *same)
                continue
            slot = self._free_slot(ring, item, abandon)
            self._on_progress()
            self._sequence += 1
            fresh.append((item, slot, self._sequence))
        if not fresh:
            return protecting
        writes = [partial(self._write, item, slot.slot, epoch, n) for item, slot, n in fresh]
        written = [] if self._copier else [write() for write in writes]
        self._bundle += 1
        for item, slot, _ in fresh:
            slot.bundle, slot.content, slot.peer = self._bundle, item.content, peer
        if peer:
            self.traffic.announced(self._bundle, sum(item.nbytes for item, *_ in fresh))
        announce = partial(self._announce, self._bundle, peer)
        if self._copier is None:
            announce(written)
            return self._bundle
        copying = self._copier.start(writes, announce)
        for item, *_ in fresh:
            if item.source is not None:
                item.source.copying = copying
        return self._bundle

    def _announce(self, bundle: int, peer: str, written: list[LocalCopy]) -> None:
        for local in written:
            if local.copy.kind == STATE:
                self._states[local.copy.layer] = local.copy
        self._send(Published(bundle, tuple(written), peer))

    @property
    def copies_at_once(self) -> bool:
        """Whether a copy is made when `publish` returns, not in the background."""
        return self._copier is None

    def is_sound(self, replica: LayerReplica) -> bool | None:
        """Return whether `replica` is as it was after its last update.

        The live state must equal its newest copy, and frozen parameters, which no copy has, those
        that were built. None if there is no copy of this version and portion.
        """
        if not replica.frozen_intact():
            return False
        copy = self._states.get(replica.index)
        if copy is None or (copy.step, copy.portion) != (replica.version, replica.portion):
            return None
        return not checksum_problem(copy, checksum(as_memory(replica.state_run())))

    def _write(self, item: PendingCopy, slot: SharedSlot, epoch: int, sequence: int) -> LocalCopy:
        began, view = time.perf_counter(), slot.view(item.nbytes)
        slot.begin()
        item.write(torch.frombuffer(view, dtype=torch.uint8))
        self._on_progress()
        copy = Copy(
            kind=item.kind,
            layer=item.layer,
            shard=self._shard,
            step=item.step,
            epoch=epoch,
            owner=self._node,
            sequence=sequence,
            nbytes=item.nbytes,
            checksum="",
            microbatches=item.microbatches,
            losses=item.losses,
            node=self._node,
            portion=item.portion,
            record=item.record,
        )
        copy = replace(copy, checksum=copy_checksum(copy, self._checksum(view)))
        slot.finish(sequence, item.nbytes, epoch)
        self.traffic.copied(item.nbytes, 0.0 if self._copier else time.perf_counter() - began)
        return LocalCopy(copy, str(slot.path), DATA_OFFSET)

    def _checksum(self, data: memoryview) -> str:
        hasher = xxhash.xxh3_64()
        for start in range(0, len(data), CHUNK_BYTES):
            hasher.update(data[start : start + CHUNK_BYTES])
            self._on_progress()
        return hasher.hexdigest()

    # ---- acknowledgements ----

    def on_acked(self, bundle: int, kept: bool = True) -> bool:
        """Record that all bundles up to `bundle` are whole, or refused (`kept` is false).

        Return false for the answer to a probe, which says nothing about other bundles.
        """
        with self._changed:
            if bundle in self._probes:
                self._read = max(self._read, bundle)
                self._changed.notify_all()
                return False
        self.traffic.acked(bundle, kept)
        with self._changed:
            self._acked = max(self._acked, bundle)
            self._changed.notify_all()
        return True

    def wait_acked(self, bundle: int, abandon: AbandonSignal) -> None:
        """Wait until `bundle` is acknowledged.

        Raises EpochAbandoned if `abandon` is set first, or the error of a background copy.
        """
        if self._acked >= bundle:
            return
        began = time.perf_counter()
        abandon.subscribe(self._wake)
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._acked >= bundle or abandon.is_set() or self._failed is not None
                )
        finally:
            abandon.unsubscribe(self._wake)
            self.traffic.waited(time.perf_counter() - began)
        if self._acked < bundle:
            if self._failed is not None:
                raise self._failed
            abandon.check()

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until all published copies are written and announced. Raises a copy's error, or
        TimeoutError."""
        if self._copier is not None:
            self._copier.settle(timeout_s)

    def close(self) -> None:
        """End the copier. Remove the files of empty slots; the vault removes the others."""
        if self._copier is not None:
            self._copier.close()
        self._pool.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_failed(self, error: BaseException) -> None:
        self._failed = error
        self._wake()

    # ---- slots ----

    def _free_slot(
        self, ring: list[_RingSlot], item: PendingCopy, abandon: AbandonSignal | None
    ) -> _RingSlot:
        """Return a slot of the ring that may be written now, never the newest announced slot."""
        final = self._final_gradients(ring, item)
        usable = [slot for slot in ring if slot is not final]
        oldest = min(usable, key=lambda slot: slot.bundle, default=None)
        if oldest is None or (oldest.bundle and len(usable) < SLOTS_PER_RING):
            return self._new_slot(ring, item, abandon)
        if oldest.bundle > self._acked:
            if abandon is None:
                return self._new_slot(ring, item, abandon)
            self.wait_acked(oldest.bundle, abandon)
        oldest.bundle = 0
        if oldest.slot.capacity < item.nbytes:
            ring.remove(oldest)  # first, because `take` may fail
            self._pool.give(oldest.slot)
            return self._new_slot(ring, item, abandon)
        return oldest

    def _final_gradients(self, ring: list[_RingSlot], item: PendingCopy) -> _RingSlot | None:
        """Return the slot of an earlier step's last gradients; None if none must be kept."""
        if not self.keep_final_gradients or item.kind != GRADIENT:
            return None
        before = [slot for slot in ring if slot.bundle and slot.content[0] < item.step]
        return max(before, key=lambda slot: slot.bundle, default=None)

    def _new_slot(
        self, ring: list[_RingSlot], item: PendingCopy, abandon: AbandonSignal | None
    ) -> _RingSlot:
        """Add a slot to the ring. Logged messages, which are optional, make room for all others."""
        while True:
            try:
                slot = self._pool.take(item.nbytes)
            except VaultFull:
                if item.kind in LOGS or not self._give_up_logs(abandon):
                    raise
                continue
            ring.append(_RingSlot(slot))
            return ring[-1]

    def _give_up_logs(self, abandon: AbandonSignal | None) -> bool:
        """Free the slots of logged messages; return whether there were any.

        No more messages are logged in this epoch. A slot may be written again once the agent has
        read the announcement of its message, because the vault then drops the message. So wait for
        the oldest announcement, as `publish` does. If `abandon` is None, it may never be
        acknowledged: a bundle for a dead peer may be held before it, or the agent may have dropped
        both. Then wait up to `silence_s` for the answer to a probe.
        """
        self._logs_given_up = True
        rings = [ring for key, ring in self._rings.items() if key[0] in LOGS]
        oldest = min((slot.bundle for ring in rings for slot in ring), default=None)
        if oldest is None:
            return False
        if abandon is not None:
            self.wait_acked(oldest, abandon)
        elif self._acked < oldest and not self._has_read_all():
            return False
        read = max(self._acked, self._read)
        for ring in rings:
            for slot in [slot for slot in ring if slot.bundle <= read]:
                ring.remove(slot)
                self._pool.give(slot.slot)
        return True

    def _has_read_all(self) -> bool:
        """Return whether the agent answers a new probe within `silence_s`.

        It reads announcements in order, so by then it has read all others.
        """
        self._bundle += 1
        probe = self._bundle
        self._probes.add(probe)
        announce = partial(self._announce, self._bundle, "")
        if self._copier is None:
            announce([])
        else:
            self._copier.start([], announce)
        with self._changed:
            return self._changed.wait_for(lambda: self._read >= probe, self._silence_s)

    def _reclaim(self) -> None:
        """Take back retired slots that the vault has released."""
        retired, self._retired = self._retired, []
        for slot in retired:
            if slot.sequence:
                self._retired.append(slot)
            else:
                self._pool.give(slot)

    def _enter_epoch(self, epoch: int) -> None:
        """If `epoch` is new, retire the announced slots until the vault releases them.

        Raises StaleError if `epoch` is older than the current one.
        """
        if epoch < self._epoch:
            raise StaleError(f"copies of epoch {epoch} after those of epoch {self._epoch}")
        if epoch == self._epoch:
            return
        for slot in [slot for ring in self._rings.values() for slot in ring]:
            if slot.bundle:
                self._retired.append(slot.slot)
            else:
                self._pool.give(slot.slot)
        self._rings.clear()
        self._logs_given_up = False
        self.traffic.forget()
        self._epoch = epoch
