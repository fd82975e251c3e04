"""NCCL transport for CUDA tensors.

Each group of holders has its own communicator, as has each direction between two ranks.
Operations of a communicator run one after the other. With one communicator for both directions, a
send and a receive between the same two ranks could therefore wait for each other.

All communicators are opened at the same time, and aborted at the same time, by one thread each.
To abort a communicator frees device memory, which waits for all kernels on the device. A kernel of
another communicator ends only when that one is aborted, so aborting them one after the other can
hang. NCCL's group calls do not help: torch aborts in a thread of its own, outside the group.
Both ways hung on a GPU when a rank was killed (docs/design/gpu.md).

After an abort a receive completes with arbitrary data in its buffer. Hence `wait` returns only
when the host has seen the operation finish, and raises if the transport was closed meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, Store, Work

from elastic.worker.transport import threads
from elastic.worker.transport.interface import BackendGroup, Operation

ABORT_S = 10.0
"""Time in which all communicators of an epoch must be aborted. Otherwise the worker ends, and its
successor takes the state from the vault."""
_CLOSED = "the epoch's communication is closed"


class NcclGroup(BackendGroup, Protocol):
    """One communicator."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Block until all ranks of the group have called this."""

    def abort(self) -> None:
        """Make all operations fail. Blocks until kernels of all communicators have left."""


class NcclTransport:
    """Moves CUDA tensors of one device. `open` connects; any thread may call `close`, also then."""

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        timeout_s: float,
        new_group: Callable[[Store, int, int, float], NcclGroup] | None = None,
    ) -> None:
        """`new_group(store, rank, size, timeout_s)` makes a communicator; None: one of NCCL."""
        self._store, self._rank, self._device = store, rank, device
        self._timeout_s = timeout_s
        self._new_group = new_group or _new_nccl_group
        self._lock = threading.Lock()
        self._closed = False
        self._groups: dict[tuple[str, tuple[int, ...]], NcclGroup] = {}
        self._opened: SimpleQueue[Exception | None] = SimpleQueue()

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect to the other ranks of all `pairs` of this rank; blocks until they connect too.

        Communicators of former transports are aborted first, since their kernels hold the device.

        Args:
            pairs: all (sender, receiver) ranks that will ever communicate in the epoch.

        Raises:
            RuntimeError: a rank could not be reached, or `close` was called. A device fault, if
                communicators of a former transport could not be aborted.
        """
        await_aborts()
        own = [pair for pair in set(pairs) if self._rank in pair]
        for pair in own:
            threads.start(f"nccl-pair-{pair[0]}-{pair[1]}", partial(self._open_pair, pair))
        for _ in own:
            error = self._opened.get()
            if error is not None:
                raise error

    def _open_pair(self, pair: tuple[int, int]) -> None:
        try:
            self._open("pair", pair)
            self._opened.put(None)
        except Exception as error:  # noqa: BLE001 - the thread that called `open` raises it
            self._opened.put(error)

    def _open(self, kind: str, ranks: tuple[int, ...]) -> NcclGroup:
        """Return the communicator of `ranks`, opened if it is new. Raises RuntimeError."""
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            group = self._groups.get((kind, ranks))
        if group is not None:
            return group
        # A client of the store serves one thread at a time, and this one waits for its peer.
        store = PrefixStore(f"{kind}-" + "-".join(map(str, ranks)), self._store.clone())
        group = self._new_group(store, ranks.index(self._rank), len(ranks), self._timeout_s)
        group.eager_connect_single_device(self._device)
        with self._lock:
            if not self._closed:
                self._groups[(kind, ranks)] = group
                return group
        _start_abort(group)  # `close` came while it connected, and did not see it
        raise RuntimeError(_CLOSED)

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
        """Abort all communicators. Returns at once; `await_aborts` waits for their end.

        A communicator that is still being opened is aborted when that ends, which may be never if
        its peer has died: its thread is left behind.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups = list(self._groups.values())
        self._opened.put(RuntimeError(_CLOSED))
        for group in groups:
            _start_abort(group)


def _new_nccl_group(store: Store, rank: int, size: int, timeout_s: float) -> NcclGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return cast(NcclGroup, ProcessGroupNCCL(store, rank, size, options))


_aborts: set[threading.Thread] = set()
"""The threads that abort communicators."""
_aborts_lock = threading.Lock()


def _start_abort(group: NcclGroup) -> None:
    thread = threads.start("nccl-abort", group.abort)
    with _aborts_lock:
        _aborts.add(thread)


def await_aborts(within_s: float = ABORT_S) -> None:
    """Wait until all communicators of closed transports are aborted.

    Raises:
        RuntimeError: a device fault (`device_fault.is_device_fault`), after `within_s` seconds.
    """
    end = time.monotonic() + within_s
    with _aborts_lock:
        aborts = set(_aborts)
    for thread in aborts:
        thread.join(max(0.0, end - time.monotonic()))
    hanging = sum(thread.is_alive() for thread in aborts)
    if hanging:
        raise RuntimeError(
            f"CUDA error: {hanging} of {len(aborts)} communicators of the former epoch could not "
            f"be aborted within {within_s:g} s, so their kernels hold the device"
        )
    with _aborts_lock:
        _aborts.difference_update(aborts)
