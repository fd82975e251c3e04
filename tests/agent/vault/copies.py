"""Copies for tests: descriptions, contents, and a writer of local slots."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import LocalCopy
from elastic.domain.checksum import copy_checksum
from elastic.domain.state_layout import plan_layout
from elastic.domain.types import GRADIENT, STATE, Copy
from elastic.store.shared_memory import DATA_OFFSET, SharedSlot, checksum

_SEQUENCE = itertools.count(1)


def content(seed: int, nbytes: int = 1000) -> bytes:
    return bytes((seed * 7 + i) % 251 for i in range(nbytes))


def make(data: bytes, **changes: Any) -> Copy:
    """A copy of `data`: by default a state of layer 0, step 0, epoch 1, made on node b."""
    copy = Copy(
        kind=STATE,
        layer=0,
        shard=0,
        step=0,
        epoch=1,
        owner="b",
        sequence=next(_SEQUENCE),
        nbytes=len(data),
        checksum="",
    )
    copy = dataclasses.replace(copy, **changes)
    sealed = copy.checksum or copy_checksum(copy, checksum(data))
    return dataclasses.replace(copy, checksum=sealed)


def gradient(data: bytes, step: int, ledger: set[int], **changes: Any) -> Copy:
    return make(data, kind=GRADIENT, step=step, microbatches=frozenset(ledger), **changes)


def put(vault: Vault, copy: Copy, data: bytes) -> Copy:
    """Store a copy as if a peer sent it; return its entry of the inventory."""
    incoming = vault.store(copy)
    incoming.buffer[:] = data
    incoming.commit()
    return dataclasses.replace(copy, node=vault.node)


class LocalWriter:
    """Writes slots as a worker does."""

    def __init__(self, directory: Path, prefix: str = "worker-1-") -> None:
        self._directory, self._prefix = directory, prefix
        self.slots: dict[int, SharedSlot] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, number: int, copy: Copy, data: bytes) -> LocalCopy:
        """Write `data` into slot `number`, whose first use determines its size."""
        if number not in self.slots:
            self.slots[number] = SharedSlot(
                self._directory / f"{self._prefix}{number}.slot", len(data)
            )
        slot = self.slots[number]
        slot.begin()
        slot.view(len(data))[:] = data
        slot.finish(copy.sequence, len(data), copy.epoch)
        return LocalCopy(copy, str(slot.path), DATA_OFFSET)


def state_run(
    version: int,
    tensors: list[tuple[str, str, tuple[int, ...], int, bytes]],
    extra: dict[str, str] | None = None,
) -> bytes:
    """A layer's state, from (name, dtype, shape, shard_dim, bytes)."""
    text, header, nbytes = plan_layout(version, [row[:4] for row in tensors], extra or {})
    run = bytearray(nbytes)
    run[: len(text)] = text
    for entry, row in zip(header.tensors, tensors, strict=True):
        assert len(row[4]) == entry.nbytes
        run[entry.offset : entry.offset + entry.nbytes] = row[4]
    return bytes(run)
