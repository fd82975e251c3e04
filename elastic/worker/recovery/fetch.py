"""Reads copies out of vaults: this node's through shared memory, others' over TCP. All is verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import VaultError
from elastic.domain.types import Copy
from elastic.rpc.bulk import VaultClient
from elastic.rpc.frames import CHUNK_BYTES
from elastic.store.shared_memory import SlotReader
from elastic.worker.transport.cancellation import Abandon

SHARED_MEMORY = "shared-memory"


class Fetched(NamedTuple):
    data: Tensor
    """uint8 [nbytes] in host memory, 64-byte aligned."""
    source: str
    """shared-memory | peer:NODE"""


class Fetcher:
    """Keeps connections to the vaults of one assignment. Thread-safe; calls to one vault queue."""

    def __init__(
        self,
        node: str,
        vaults: Mapping[str, str],
        abandon: Abandon | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUTS.bulk_s,
    ) -> None:
        """`node` is this one; `vaults` maps nodes to host:port; setting `abandon` ends all transfers."""
        self._node, self._abandon = node, abandon
        self._clients = {
            name: VaultClient(address, node=node, timeout_s=timeout_s)
            for name, address in vaults.items()
            if address
        }
        if abandon is not None:
            abandon.subscribe(self._hang_up)

    def fetch(self, copy: Copy) -> Fetched:
        """The bytes of `copy`, from the vault of `copy.node`.

        Raises VaultError if the vault is away or the copy gone or corrupt, EpochAbandoned when told to stop.
        """
        client = self._clients.get(copy.node)
        if client is None:
            raise VaultError(f"{copy.key}: no vault of {copy.node or 'nobody'} is known")
        out = torch.empty(copy.nbytes, dtype=torch.uint8)
        try:
            if copy.node == self._node:
                self._map(client, copy, out)
                return Fetched(out, SHARED_MEMORY)
            client.get(copy, _bytes(out))
        except VaultError:
            if self._abandon is not None:
                self._abandon.check()
            raise
        return Fetched(out, f"peer:{copy.node}")


    def close(self) -> None:
        """End transfers in progress and all connections."""
        if self._abandon is not None:
            self._abandon.unsubscribe(self._hang_up)
        self._hang_up()

    def _hang_up(self) -> None:
        for client in self._clients.values():
            client.close()

    def _map(self, client: VaultClient, copy: Copy, out: Tensor) -> None:
        path, _ = client.locate(copy)
        reader = SlotReader(path)
        if reader.sequence == copy.sequence:
            source, target = np.frombuffer(reader.view(copy.nbytes), dtype=np.uint8), out.numpy()
            hasher = xxhash.xxh3_64()
            for start in range(0, copy.nbytes, CHUNK_BYTES):
                part = target[start : start + CHUNK_BYTES]
                np.copyto(part, source[start : start + CHUNK_BYTES])
                hasher.update(part.data)
            if hasher.hexdigest() == copy.checksum:
                return
        client.verify(copy)
        raise VaultError(f"{copy.key} is torn or was overwritten")


def fetch(
    copy: Copy,
    vaults: Mapping[str, str],
    node: str,
    nbytes: int | None = None,
    abandon: Abandon | None = None,
) -> Fetched:
    """Fetch one copy over connections of its own; `nbytes` is what the caller expects."""
    if nbytes is not None and nbytes != copy.nbytes:
        raise VaultError(f"{copy.key} has {copy.nbytes} bytes; {nbytes} are wanted")
    fetcher = Fetcher(node, {copy.node: vaults.get(copy.node, "")}, abandon)
    try:
        return fetcher.fetch(copy)
    finally:
        fetcher.close()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy().data)
