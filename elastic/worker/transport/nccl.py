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

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, Store, Work

from elastic.worker.transport import threads
from elastic.worker.transport.interface import BackendGroup, Operation

log = logging.getLogger(__name__)
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
        """`new_group(store, rank, size, timeout_s)` makes a communicator. None: NCCL makes it."""
        self._store, self._rank, self._device = store, rank, device
        self._timeout_s = timeout_s
        self._new_group = new_group or _new_nccl_group
        self._lock = threading.Lock()
        self._closed = False
        self._groups: dict[tuple[str, tuple[int, ...]], NcclGroup] = {}
        self._opened: SimpleQueue[Exception | None] = SimpleQueue()

    def open(self, pairs: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Connect to the other ranks of all `pairs` and `groups` of this rank.

        Blocks until they connect too. Communicators of former transports are aborted first, since
        their kernels hold the device. Nothing may run on the device meanwhile: to open a
        communicator can wait for the kernels of another one.

        Args:
            pairs: all (sender, receiver) ranks that will ever communicate in the epoch.
            groups: all groups of ranks that reduce together; equal on all ranks.

        Raises:
            RuntimeError: a rank could not be reached, or `close` was called.
        """
        await_aborts()
        own = [pair for pair in set(pairs) if self._rank in pair]
        for pair in own:
            threads.start(f"nccl-pair-{pair[0]}-{pair[1]}", partial(self._open_pair, pair))
        for _ in own:
            error = self._opened.get()
            if error is not None:
                raise error
        # All ranks open their groups in this order, so no two ranks wait for each other.
        for ranks in sorted(ranks for ranks in set(groups) if self._rank in ranks):
            self.open_group(ranks)

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
        client = self._store.clone()  # type: ignore[attr-defined]
        store = PrefixStore(f"{kind}-" + "-".join(map(str, ranks)), client)
        group = self._new_group(store, ranks.index(self._rank), len(ranks), self._timeout_s)
        group.eager_connect_single_device(self._device)
        with self._lock:
            if not self._closed:
                self._groups[(kind, ranks)] = group
                return group
        # `close` came while it connected. An abort now could wait for kernels of the next epoch.
        _aborts.keep(group)
        raise RuntimeError(_CLOSED)

    def _pair(self, pair: tuple[int, int]) -> NcclGroup:
        """Return the communicator of `pair`. Raises RuntimeError: to open it now could hang."""
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            group = self._groups.get(("pair", pair))
        if group is None:
            raise RuntimeError(f"ranks {pair} were not announced as a pair that communicates")
        return group

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._pair((self._rank, dst)).send([tensor], 1, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return self._pair((src, self._rank)).recv([tensor], 0, tag)

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

    def wake(self) -> None:
        """Abort all communicators: nothing else ends a wait. So GPUs have no gentle end."""
        self.close()

    def close(self) -> None:
        """Abort all communicators. Returns at once; `await_aborts` waits for their end.

        A communicator that is still being opened stays. If its opening ends after all, it is
        aborted before the next epoch begins. Its thread is left behind if its peer has died.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups = list(self._groups.values())
            self._groups.clear()
        self._opened.put(RuntimeError(_CLOSED))
        _aborts.start(groups)


def _new_nccl_group(store: Store, rank: int, size: int, timeout_s: float) -> NcclGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return cast(NcclGroup, ProcessGroupNCCL(store, rank, size, options))


def end_worker(reason: str) -> None:
    """End this process as a crash does: another one takes its state from the vault."""
    log.critical("%s: this worker ends, and a new one continues", reason)
    os.kill(os.getpid(), signal.SIGKILL)


class _Aborts:
    """The communicators of closed transports, of all epochs of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        """Number of communicators whose abort has not ended well."""
        self._kept: list[NcclGroup] = []
        """Communicators that nobody uses, whose abort begins later."""

    def keep(self, group: NcclGroup) -> None:
        """Abort `group` before the next epoch begins."""
        with self._changed:
            self._kept.append(group)

    def start(self, groups: list[NcclGroup]) -> None:
        """Abort `groups` at the same time. Ends this process if that takes `ABORT_S` or longer."""
        if not groups:
            return
        with self._changed:
            self._running += len(groups)
        threads.start("nccl-abort-limit", self._limit)
        while groups:
            threads.start("nccl-abort", partial(self._abort, groups.pop()))

    def _abort(self, group: NcclGroup) -> None:
        try:
            group.abort()
        except Exception as error:  # noqa: BLE001 - then it still holds the device
            log.error("a communicator could not be aborted: %s", error)
            return
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
        # The last reference to `group` ends here: its destructor may wait for torch's threads.

    def _limit(self) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._running == 0, ABORT_S):
                return
            running = self._running
        end_worker(f"{running} communicators could not be aborted within {ABORT_S:g} s")

    def wait(self) -> None:
        """Wait until all communicators are aborted, also those that connected too late."""
        with self._changed:
            late, self._kept = self._kept, []
        self.start(late)
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)


_aborts = _Aborts()


def await_aborts() -> None:
    """Wait until all communicators of closed transports are aborted: at most `ABORT_S`, then this
    process ends."""
    _aborts.wait()
