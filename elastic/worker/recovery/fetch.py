"""Reads and verifies copies: from this node's vault in shared memory, from others over TCP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.checksum import checksum_problem
from elastic.domain.errors import VaultError
from elastic.domain.types import Copy
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.frames import CHUNK_BYTES
from elastic.store.shared_memory import SlotReader
from elastic.worker.model.state_codec import as_memory
from elastic.worker.transport.cancellation import AbandonSignal


class FetchedCopy(NamedTuple):
    data: Tensor
    """uint8 [nbytes] in host memory, 64-byte aligned."""
    source: str
    """shared-memory | peer:NODE"""


class Fetcher:
    """Reads from the vaults of one assignment. Thread-safe; a vault serves one call at a time."""

    def __init__(
        self,
        node: str,
        vaults: Mapping[str, str],
        abandon: AbandonSignal | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUTS.bulk_s,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        """`node`: this node; `vaults`: node -> host:port; `abandon`: signal that ends transfers.

        `on_progress` is called, in any thread, for each chunk that was read.
        """
        self._on_progress, self._closed = on_progress, False
        self._node, self._abandon = node, abandon or AbandonSignal()
        self._clients = {
            name: VaultClient(address, node=node, timeout_s=timeout_s, peer=name)
            for name, address in vaults.items()
            if address
        }
        self._abandon.subscribe(self._close_clients)

    def fetch(self, copy: Copy) -> FetchedCopy:
        """Read the bytes of `copy` from the vault of `copy.node`.

        Raises VaultError if the vault cannot be reached or the copy is gone or corrupt, and
        EpochAbandoned if the epoch was abandoned.
        """
        client = self._clients.get(copy.node)
        if client is None:
            raise VaultError(f"{copy.key}: no vault of {copy.node or 'nobody'} is known")
        out = torch.empty(copy.nbytes, dtype=torch.uint8)
        try:
            if copy.node == self._node:
                self._read_shared_memory(client, copy, out)
                return FetchedCopy(out, "shared-memory")
            client.get(copy, as_memory(out), lambda chunk: self._on_progress())
        except VaultError:
            self._abandon.check()
            raise
        return FetchedCopy(out, f"peer:{copy.node}")

    def close(self) -> None:
        """End transfers in progress and close all connections."""
        self._closed = True
        self._abandon.unsubscribe(self._close_clients)
        self._close_clients()

    def _close_clients(self) -> None:
        for client in self._clients.values():
            client.close()

    def _read_shared_memory(self, client: VaultClient, copy: Copy, out: Tensor) -> None:
        path, _ = client.locate(copy)
        reader, problem = SlotReader(path), "another copy is in its slot"
        if reader.sequence == copy.sequence:
            source, target = np.frombuffer(reader.view(copy.nbytes), dtype=np.uint8), out.numpy()
            hasher = xxhash.xxh3_64()
            for start in range(0, copy.nbytes, CHUNK_BYTES):
                part = target[start : start + CHUNK_BYTES]
                np.copyto(part, source[start : start + CHUNK_BYTES])
                hasher.update(part.data)
                self._on_progress()
                self._abandon.check()
                if self._closed:
                    raise VaultError(f"{copy.key}: the transfer was ended")
            problem = checksum_problem(copy, hasher.hexdigest())
            if not problem:
                return
        client.verify(copy)
        raise VaultError(f"{copy.key} is torn or was overwritten: {problem}")
