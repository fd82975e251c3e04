"""NCCL for CUDA tensors: one communicator a set, and one a direction between two stages.

Operations of one communicator run one after the other, so a send and a receive between the same two ranks
could wait for each other; with a communicator for each direction they cannot. Aborting communicators one by
one can hang while operations of another one are on the device; all are aborted inside one NCCL group.

After an abort a receive ends with whatever its buffer held. Hence `wait` returns only when the host has seen
the operation finish, and callers look at their abandon flag before they use what arrived.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupNCCL, Store, Work

from elastic.worker.transport.gloo import BackendGroup, Operation

_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own watchdog would end the whole process when a peer dies."""


class NcclTransport:
    """CUDA tensors of one device. Opening blocks until all ranks of this rank's sets and pairs are there."""

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        timeout_s: float,
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        os.environ.update(_WATCHDOG)
        self._store, self._rank, self._device = store, rank, device
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._closed = False
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroupNCCL] = {}
        for pair in sorted(p for p in set(pairs) if rank in p):
            self._open("pair", pair)

    def _open(self, kind: str, ranks: tuple[int, ...]) -> ProcessGroupNCCL:
        group = self._groups.get((kind, ranks))
        if group is not None:
            return group
        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        name = f"{kind}-" + "-".join(map(str, ranks))
        group = ProcessGroupNCCL(PrefixStore(name, self._store), ranks.index(self._rank), len(ranks), options)
        with self._lock:
            self._groups[(kind, ranks)] = group
            closed = self._closed
        if closed:
            raise RuntimeError("the epoch's communication is closed")
        group.eager_connect_single_device(self._device)
        return group

    def _group(self, kind: str, ranks: tuple[int, ...]) -> BackendGroup:
        return cast(BackendGroup, self._open(kind, ranks))

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._group("pair", (self._rank, dst)).send([tensor], 1, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return self._group("pair", (src, self._rank)).recv([tensor], 0, tag)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        return self._group("set", ranks).allreduce([tensor])

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        return self._group("set", ranks).allgather([outputs], [tensor])

    def open_set(self, ranks: tuple[int, ...]) -> None:
        self._open("set", ranks)

    def wait(self, operation: Operation) -> None:
        cast(Work, operation).wait()
        torch.cuda.current_stream(self._device).record_event().synchronize()
        with self._lock:
            if self._closed:
                raise RuntimeError("the epoch's communication is closed")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups = list(self._groups.values())
        if not groups:
            return
        groups[0]._group_start()
        for group in groups:
            group.abort()
        groups[0]._group_end()
