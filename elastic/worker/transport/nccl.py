"""NCCL transport for CUDA tensors.

Each group of holders has its own communicator, as has each direction between two ranks.
Operations of a communicator run one after the other. With one communicator for both directions, a
send and a receive between the same two ranks could therefore wait for each other.

`close` aborts all communicators inside one NCCL group. Aborting them one by one can hang while
operations of another communicator run on the device.

After an abort a receive completes with arbitrary data in its buffer. Hence `wait` returns only
when the host has seen the operation finish, and raises if the transport was closed meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupNCCL, Store, Work

from elastic.worker.transport.interface import BackendGroup, Operation

_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables that disable torch's watchdog, which would end the process when a peer dies."""
_CLOSED = "the epoch's communication is closed"


class NcclTransport:
    """Moves CUDA tensors of one device.

    The constructor blocks until the other ranks of all `pairs` of this rank have connected.

    Args:
        pairs: all (sender, receiver) ranks that will ever communicate in the epoch.
    """

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

    def _open(self, kind: str, ranks: tuple[int, ...]) -> BackendGroup:
        group = self._groups.get((kind, ranks))
        if group is not None:
            return cast(BackendGroup, group)
        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = PrefixStore(f"{kind}-" + "-".join(map(str, ranks)), self._store)
        group = ProcessGroupNCCL(store, ranks.index(self._rank), len(ranks), options)
        with self._lock:
            self._groups[(kind, ranks)] = group
            closed = self._closed
        if closed:
            raise RuntimeError(_CLOSED)
        group.eager_connect_single_device(self._device)
        return cast(BackendGroup, group)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._open("pair", (self._rank, dst)).send([tensor], 1, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return self._open("pair", (src, self._rank)).recv([tensor], 0, tag)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        return self._open("set", ranks).allreduce([tensor])

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Work:
        return self._open("set", ranks).allgather([outputs], [tensor])

    def open_group(self, ranks: tuple[int, ...]) -> None:
        self._open("set", ranks)

    def wait(self, operation: Operation) -> None:
        cast(Work, operation).wait()
        torch.cuda.current_stream(self._device).record_event().synchronize()
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)

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
