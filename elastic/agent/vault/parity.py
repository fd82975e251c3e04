"""Parities in the making: a keeper XORs the states of a group's members as they arrive, and keeps no other trace.

A lane has one layer of every member. Its parity of version v lists what went in, and becomes a copy of the vault when
everybody's is in. Nothing goes in before its checksum was verified, nothing goes in twice (a bundle that is sent again
after a broken connection), and what lies in memory between two arrivals is verified before the next one goes in: so
only a whole parity of what its parts say is ever listed.

Two versions of a lane are enough. A worker sends state v+1 after the commit of step v, which waits until everybody's
state v is acknowledged (`elastic.worker.backup.policy`). So when the first part of v+1 arrives, every lane of v is whole,
at every keeper, and nobody needs v-1; until then v-1 stays, since others may not have come to v yet. Where v did not
become whole because memory was short, the older one stays. A new epoch has lanes of its own: those of the old one stay
until the vault trims that epoch, which waits for everybody's copies of the new one.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from elastic.domain.errors import StaleError
from elastic.domain.types import PARITY, Copy, Part
from elastic.store.slots import Slot, checksum

CHUNK_BYTES = 1 << 20

log = logging.getLogger(__name__)

_Key = tuple[int, str, int, int]
"""(epoch, owner, lane, TP rank)."""


def filed(copy: Copy) -> Copy:
    """What `copy` is kept as: with a lane as a part of that lane's parity, else as it is."""
    if copy.lane is None:
        return copy
    return replace(copy, kind=PARITY, layer=copy.lane.index, owner=copy.lane.owner, lane=None)


@dataclass(slots=True)
class _Parity:
    """One version of a lane."""

    slot: Slot | None = None
    """Where it is being made; None: nothing has arrived, or it is in the index, or it was given up."""
    nbytes: int = 0
    digest: str = ""
    parts: dict[str, Part] = field(default_factory=dict)
    """By owner: what is in."""
    key: str = ""
    """Of the copy, once it is whole."""
    spoilt: bool = False


class Parities:
    """Thread-safe. Calls the vault while it holds its own lock, so the vault must not call it holding its own."""

    def __init__(
        self,
        node: str,
        give: Callable[[Slot], None],
        whole: Callable[[Copy, Slot], None],
        drop: Callable[[str, str], None],
        corrupt: Callable[[Copy], None],
    ) -> None:
        """`give` takes a slot back; `whole` a finished parity; `drop` drops a copy by its key if the other is there;
        `corrupt` hears of one that was not what it had been."""
        self._node, self._give, self._whole, self._drop, self._corrupt = node, give, whole, drop, corrupt
        self._lanes: dict[_Key, dict[int, _Parity]] = {}
        self._sequence = itertools.count(1)
        self._oldest = 0
        self._lock = threading.Lock()

    def add(self, copy: Copy, slot: Slot) -> None:
        """Put a verified state, which lies in `slot`, into its lane's parity; the slot is this object's from now on.

        Raises StaleError if its epoch was trimmed; the slot is then still the caller's.
        """
        as_kept = filed(copy)
        with self._lock:
            if copy.epoch < self._oldest:
                raise StaleError(f"{copy.key} is of epoch {copy.epoch}, which {self._node} has dropped")
            versions = self._lanes.setdefault((copy.epoch, as_kept.owner, as_kept.layer, copy.shard), {})
            if copy.step < max(versions, default=0):
                self._give(slot)  # again, or for one that was given up
                return
            if copy.step not in versions:
                self._begin(versions, copy.step)
            self._put(versions[copy.step], copy, as_kept, slot)

    def trim(self, epoch: int | None) -> None:
        """Drop what is under way of epochs below `epoch` (None: of all), and refuse such from now on."""
        with self._lock:
            if epoch is not None:
                self._oldest = max(self._oldest, epoch)
            for key in [key for key in self._lanes if epoch is None or key[0] < epoch]:
                for parity in self._lanes.pop(key).values():
                    self._release(parity)

    def _begin(self, versions: dict[int, _Parity], step: int) -> None:
        """The first part of a version is here: the one before is whole or never will be."""
        before = versions[max(versions)] if versions else _Parity()
        for version, parity in list(versions.items()):
            self._release(parity)
            if parity is not before and (before.key or not parity.key):
                self._drop(parity.key, before.key)
                del versions[version]
        versions[step] = _Parity()

    def _put(self, parity: _Parity, copy: Copy, kept: Copy, slot: Slot) -> None:
        assert copy.lane is not None
        part = Part(copy.owner, copy.layer, copy.shard, copy.nbytes, copy.checksum, copy.portion)
        before = parity.parts.get(copy.owner)
        if before is not None or parity.spoilt or copy.owner not in copy.lane.members:
            self._give(slot)
            if before not in (None, part):
                log.error("%s was put into a parity before, as %s: the parity is given up", copy.key, before)
                self._spoil(parity)
            return
        slot.begin()
        if not self._merge(parity, slot, copy.nbytes):
            self._spoil(parity)
            self._corrupt(
                replace(kept, sequence=0, nbytes=parity.nbytes, checksum=parity.digest, node=self._node)
            )
            return
        parity.parts[copy.owner] = part
        if len(parity.parts) == len(copy.lane.members):
            self._finish(parity, kept, tuple(parity.parts[member] for member in copy.lane.members))

    def _merge(self, parity: _Parity, slot: Slot, nbytes: int) -> bool:
        """XOR the shorter into the longer of what is there and what came; False if the former has changed in memory."""
        former, parity.slot = parity.slot, slot
        if former is not None:
            data = former.view(parity.nbytes)
            if checksum(data) != parity.digest:
                parity.slot = former
                self._give(slot)
                return False
            if parity.nbytes < nbytes:
                xor_into(slot.view(nbytes), data)
            else:
                xor_into(data, slot.view(nbytes))
                parity.slot, former = former, slot
            self._give(former)
        parity.nbytes = max(parity.nbytes, nbytes)
        parity.digest = checksum(parity.slot.view(parity.nbytes))
        return True

    def _finish(self, parity: _Parity, kept: Copy, parts: tuple[Part, ...]) -> None:
        slot, parity.slot = parity.slot, None
        assert slot is not None
        copy = replace(
            kept,
            sequence=next(self._sequence),
            nbytes=parity.nbytes,
            checksum=parity.digest,
            node=self._node,
            parts=parts,
        )
        parity.key = copy.key
        slot.finish(copy.sequence, copy.nbytes, copy.epoch)
        self._whole(copy, slot)

    def _spoil(self, parity: _Parity) -> None:
        parity.spoilt = True
        self._release(parity)

    def _release(self, parity: _Parity) -> None:
        slot, parity.slot = parity.slot, None
        if slot is not None:
            self._give(slot)


def xor_into(target: memoryview, source: memoryview) -> None:
    """XOR `source` into the beginning of `target`, which is at least as long."""
    out, other = np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8)
    for start in range(0, len(other), CHUNK_BYTES):
        part = out[start : min(start + CHUNK_BYTES, len(other))]
        np.bitwise_xor(part, other[start : start + CHUNK_BYTES], out=part)
