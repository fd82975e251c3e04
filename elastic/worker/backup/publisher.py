"""Publishes a worker's layers: copies them to shared memory, and tells the agent, who sends them on.

Every (kind, layer) has a ring of two slots, logged messages one for each micro-batch. A slot is written again
only when the bundle that it was last announced in is acknowledged, that is, whole at the peer; so the agent may
send it meanwhile, and the previous copy stays whole while the next one is written. At most two bundles of
gradients, and two of states, are ever unacknowledged.

Two slots suffice for recovery by rolling forward, which needs, of a worker whose agent lives, at any moment
either state v+1, or state v and the final gradients of step v:

- Before the update of step v the rings hold state v and v-1, and the last two gradient copies of step v,
  the later of which is final. State v+1 goes into the slot of v-1: v and the final gradients stay whole
  while it is written.
- Gradients of step v+1 are published only after state v+1 was; they alone overwrite gradients of step v.
- A copy becomes part of the agent's index by `Published`, which travels in order and survives the death of
  its sender: when the agent has read a worker's last words it knows all that was announced.

Slots belong to one epoch. Those of an older one are set aside when the first copy of a new epoch is
published, and come back once the agent's vault has trimmed that epoch: what an unfinished recovery may
still need is not overwritten by the recovery itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from elastic.core.protocol.messages import LocalCopy, Published
from elastic.domain.errors import StaleError, VaultFull
from elastic.domain.types import GRADIENT, LOGS, Copy
from elastic.store.shared_memory import DATA_OFFSET, SharedSlot, SlotPool, checksum, slot_prefix
from elastic.worker.backup import items
from elastic.worker.backup.copier import Copier
from elastic.worker.backup.items import Item, RingKey
from elastic.worker.backup.metrics import TrafficMeter
from elastic.worker.replica.publishing import Message, Sender, Summed
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import Abandon

SLOTS_A_RING = 2


@dataclass(slots=True)
class _Held:
    slot: SharedSlot
    bundle: int = 0
    """What it was announced in; 0: not announced, so free to be written."""
    step: int = -1


@dataclass(slots=True)
class _Ring:
    held: list[_Held] = field(default_factory=list)
    content: tuple[int, frozenset[int]] | None = None
    """(step, ledger) of the newest announced copy, which is not announced again."""
    peer: str = ""
    bundle: int = 0
    """Where and in which bundle it was announced."""


class Publisher:
    """One a worker. The main thread publishes; `on_acked` comes from the thread that reads orders."""

    def __init__(
        self,
        channel: Sender,
        directory: Path | str,
        node: str,
        shard: int = 0,
        *,
        fallback: Path | None = None,
        beside: torch.device | None = None,
    ) -> None:
        """`directory` is the job's in shared memory; `shard` the TP rank of this worker's layers; `beside`: copies are
        made from this device while the main thread goes on."""
        self._channel, self._node, self._shard = channel, node, shard
        self._pool = SlotPool(Path(directory), slot_prefix(os.getpid()), fallback)
        self._rings: dict[RingKey, _Ring] = {}
        self._aside: list[SharedSlot] = []
        self._epoch = 0
        self._sequence = time.monotonic_ns() // 1000
        """Starts above that of any earlier worker of this node."""
        self._bundle, self._acked = 0, 0
        self._changed = threading.Condition()
        self._copier = Copier(beside, self._on_failed) if beside is not None else None
        self._failed: BaseException | None = None
        self._logs_given_up = False
        self.keeps_final = False
        """The last gradients of a step stay until those of the next step are the last: another holder's portion of the
        state is made of them."""
        self.traffic = TrafficMeter()

    def publish_gradients(
        self,
        sums: Iterable[Summed],
        step: int,
        epoch: int,
        peer: str,
        abandon: Abandon | None = None,
    ) -> int:
        """Publish the accumulated gradients that have changed since they were last published.

        Returns the bundle that protects them (0: there was nothing ever). Waits for a free slot until
        `abandon` is set (EpochAbandoned); without `abandon` it never waits but takes more memory.
        """
        return self._publish(items.gradients(sums, step), epoch, peer, abandon)

    def publish_reduced(
        self,
        replicas: Iterable[LayerReplica],
        reduced: Mapping[int, Tensor],
        step: int,
        epoch: int,
        peer: str,
        abandon: Abandon | None = None,
    ) -> int:
        """Publish `reduced`, layer -> the flat gradient that its update takes; waits as the others do."""
        found = items.reduced_gradients(replicas, reduced, step)
        return self._publish(found, epoch, peer, abandon)

    def publish_updates(
        self,
        replicas: Iterable[LayerReplica],
        reduced: Mapping[int, Tensor],
        clip: float,
        epoch: int,
        peer: str,
        abandon: Abandon | None = None,
    ) -> int:
        """Publish what the update of `clip` times `reduced` (layer -> flat gradient) takes; waits as the others do."""
        found = items.updates(replicas, reduced, clip, at_once=self._copier is not None)
        return self._publish(found, epoch, peer, abandon)

    def publish_logs(self, messages: Iterable[Message], epoch: int, abandon: Abandon | None) -> int:
        """Publish messages to other stages, locally; waits as `publish_gradients` does. Raises VaultFull."""
        if self._logs_given_up:
            raise VaultFull("logged messages made room for other copies")
        return self._publish(items.messages(messages), epoch, "", abandon)

    def publish_states(
        self,
        replicas: Iterable[LayerReplica],
        epoch: int,
        peer: str,
        peer_layers: Collection[int] | None = None,
        abandon: Abandon | None = None,
    ) -> int:
        """Publish the layers' states: those of `peer_layers` (None: all) to the peer, others locally.

        Returns the bundle that protects them; waits as `publish_gradients` does.
        """
        away, here = items.among(items.states(replicas), peer_layers)
        local = self._publish(here, epoch, "", abandon)
        return max(local, self._publish(away, epoch, peer, abandon))

    def on_acked(self, bundle: int, kept: bool = True) -> None:
        """The agent says that `bundle` and all before it are whole where they should be, or (not `kept`) given up."""
        self.traffic.acked(bundle, kept)
        with self._changed:
            self._acked = max(self._acked, bundle)
            self._changed.notify_all()

    def wait_acked(self, bundle: int, abandon: Abandon) -> None:
        """Block until `bundle` is acknowledged. Raises EpochAbandoned when `abandon` is set first."""
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

    @property
    def allocated_bytes(self) -> int:
        """Shared memory in use for slots."""
        return self._pool.allocated_bytes

    def close(self) -> None:
        """Remove the files of slots that hold nothing; the others are the vault's."""
        if self._copier is not None:
            self._copier.close()
        self._pool.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all that was published is written and announced. Raises what went wrong."""
        if self._copier is not None:
            self._copier.settle()

    def _on_failed(self, error: BaseException) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def _publish(self, found: list[Item], epoch: int, peer: str, abandon: Abandon | None) -> int:
        """Write and announce those that are new, as one bundle; beside, if there is a copier."""
        self._enter(epoch)
        self._reclaim()
        fresh: list[tuple[Item, _Ring, _Held, int]] = []
        protecting = 0
        for item in found:
            ring = self._rings.setdefault(item.ring, _Ring())
            if ring.content == item.content and peer in ("", ring.peer):
                protecting = max(protecting, ring.bundle)
                continue
            held = self._free(ring, item, abandon)
            held.step = item.step
            self._sequence += 1
            fresh.append((item, ring, held, self._sequence))
        if not fresh:
            return protecting
        writes = [partial(self._write, item, held.slot, epoch, number) for item, _, held, number in fresh]
        written = [] if self._copier else [write() for write in writes]
        self._bundle += 1
        for item, ring, held, _ in fresh:
            held.bundle = ring.bundle = self._bundle
            ring.content, ring.peer = item.content, peer
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
        self._channel.send(Published(bundle, tuple(written), peer))

    def _write(self, item: Item, slot: SharedSlot, epoch: int, sequence: int) -> LocalCopy:
        began, view = time.perf_counter(), slot.view(item.nbytes)
        slot.begin()
        item.write(torch.frombuffer(view, dtype=torch.uint8))
        copy = Copy(
            kind=item.kind,
            layer=item.layer,
            shard=self._shard,
            step=item.step,
            epoch=epoch,
            owner=self._node,
            sequence=sequence,
            nbytes=item.nbytes,
            checksum=checksum(view),
            microbatches=item.microbatches,
            losses=item.losses,
            node=self._node,
            portion=item.portion,
        )
        slot.finish(sequence, item.nbytes, epoch)
        self.traffic.copied(item.nbytes, 0.0 if self._copier else time.perf_counter() - began)
        return LocalCopy(copy, str(slot.path), DATA_OFFSET)

    def _free(self, ring: _Ring, item: Item, abandon: Abandon | None) -> _Held:
        """A slot of the ring that may be written now, never the one announced last."""
        nbytes, pinned = item.nbytes, self._final(ring, item)
        turns = [held for held in ring.held if held is not pinned]
        oldest = min(turns, key=lambda held: held.bundle, default=None)
        if oldest is None or (oldest.bundle and len(turns) < SLOTS_A_RING):
            return self._new(ring, nbytes)
        if oldest.bundle > self._acked:
            if abandon is None:
                return self._new(ring, nbytes)
            self.wait_acked(oldest.bundle, abandon)
        oldest.bundle = 0
        if oldest.slot.capacity < nbytes:
            ring.held.remove(oldest)  # the pool may have no other: then it is the pool's
            self._pool.give(oldest.slot)
            return self._new(ring, nbytes)
        return oldest

    def _final(self, ring: _Ring, item: Item) -> _Held | None:
        """The last gradients of the step before that of `item`, where these are kept."""
        if not self.keeps_final or item.kind != GRADIENT:
            return None
        before = [held for held in ring.held if held.bundle and held.step < item.step]
        return max(before, key=lambda held: held.bundle, default=None)

    def _new(self, ring: _Ring, nbytes: int) -> _Held:
        try:
            slot = self._pool.take(nbytes)
        except VaultFull:
            if not self._give_up_logs():
                raise
            slot = self._pool.take(nbytes)
        held = _Held(slot)
        ring.held.append(held)
        return held

    def _give_up_logs(self) -> bool:
        """Logged messages make room for what is not optional, and are not written any more; whether there were any.

        The vault drops them: their slots say that something else is being written.
        """
        self._logs_given_up = True
        found = [key for key in self._rings if key[0] in LOGS]
        for key in found:
            for held in self._rings.pop(key).held:
                self._pool.give(held.slot)
        return bool(found)

    def _reclaim(self) -> None:
        """Take back slots of older epochs that the vault has handed back."""
        aside, self._aside = self._aside, []
        for slot in aside:
            if slot.sequence:
                self._aside.append(slot)
            else:
                self._pool.give(slot)

    def _enter(self, epoch: int) -> None:
        """Set the slots of an older epoch aside, for the vault to hand back."""
        if epoch < self._epoch:
            raise StaleError(f"copies of epoch {epoch} after those of epoch {self._epoch}")
        if epoch == self._epoch:
            return
        for held in [held for ring in self._rings.values() for held in ring.held]:
            if held.bundle:
                self._aside.append(held.slot)
            else:
                self._pool.give(held.slot)
        self._rings.clear()
        self._logs_given_up = False
        self.traffic.forget()
        self._epoch = epoch
