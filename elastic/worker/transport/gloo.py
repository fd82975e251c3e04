"""gloo transport for CPU tensors, with waits that end when the epoch is abandoned.

A wait on gloo blocks in native code, where no Python event can wake it. gloo offers one way out:
when an operation reaches its own timeout, gloo closes all connections of its group. The neighbours
notice that, and operations that have not started to move data fail. `GlooTransport.close` therefore
posts a receive that no rank answers, with a timeout of one millisecond.

Operations in the middle of a message are an exception. gloo does not fail them when a connection
is closed or breaks; they block until their own timeout. Therefore a helper thread does the native
wait, and the waiting thread can leave the helper behind. Meanwhile the waiting thread checks at
growing intervals that its peers are connected (docs/decisions/027-waits-that-can-be-left.md).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from elastic.worker.transport import threads
from elastic.worker.transport.interface import BackendGroup, Operation

POISON_TAG = 2**20
_POISON_S = 0.001
PEER_CHECK_S = 0.25
"""Time until a wait first checks its peers' connections. Later intervals double each time."""
MAX_PEER_CHECK_S = 8.0
"""Longest interval between two checks of the peers' connections."""
DISCONNECT_GRACE_S = 2.0
"""Time in which an operation may still finish after a peer did its part and disconnected."""
_CLOSED = "the links were closed"
_WOKEN = "the wait was ended"


@dataclass(slots=True, eq=False)
class _GlooOperation:
    """An operation of gloo."""

    work: Work
    group: BackendGroup
    peers: tuple[int, ...]
    """Ranks within `group` that take part in the operation."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set when the operation has finished, or the transport was woken or closed."""
    finished: bool = False
    error: str = ""
    """Text of the failure. The exception's traceback would keep the whole epoch in memory."""

    def is_completed(self) -> bool:
        return self.finished or bool(self.work.is_completed())

    def wait_native(self) -> None:
        """Block in native code until the operation has finished or failed."""
        try:
            self.work.wait()
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it again
            self.error = str(error) or type(error).__name__
        self.finished = True
        self.released.set()

    def check_peers(self) -> None:
        """Raise RuntimeError if a peer is no longer connected."""
        for peer in self.peers:
            _probe(self.group, peer)


def _wait_in_order(operations: SimpleQueue[_GlooOperation | None]) -> None:
    """Body of the helper thread: wait for each operation until None arrives."""
    while (operation := operations.get()) is not None:
        operation.wait_native()
        del operation


class GlooTransport:
    """Moves CPU tensors. The constructor blocks until the ranks of the mesh have connected.

    One thread uses the transport; another one may open groups, and any thread may close it.
    """

    def __init__(
        self, store: Store, rank: int, mesh: tuple[int, ...], timeout_s: float, host: str
    ) -> None:
        """`mesh`: the ranks that exchange messages, ascending, with this rank."""
        self.store, self._rank, self._host = store, rank, host
        self._timeout = timedelta(seconds=timeout_s)
        self._place = {peer: place for place, peer in enumerate(mesh)}
        """Rank -> rank within the mesh."""
        self._mesh = self._open(mesh)
        self._groups: dict[tuple[int, ...], BackendGroup] = {mesh: self._mesh}
        self._lock, self._closed, self._woken = threading.Lock(), False, False
        self._collectives: list[_GlooOperation] = []
        self._waited: SimpleQueue[_GlooOperation | None] = SimpleQueue()
        self._waiter: threading.Thread | None = None
        self._waiting: _GlooOperation | None = None
        weakref.finalize(self, self._waited.put, None)

    def _open(self, ranks: tuple[int, ...]) -> BackendGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        store = PrefixStore("set-" + "-".join(map(str, ranks)), self.store)
        place, size = ranks.index(self._rank), len(ranks)
        return cast(BackendGroup, ProcessGroupGloo(store, place, size, options))

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> _GlooOperation:
        place = self._place[dst]
        return _GlooOperation(self._mesh.send([tensor], place, tag), self._mesh, (place,))

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> _GlooOperation:
        place = self._place[src]
        return _GlooOperation(self._mesh.recv([tensor], place, tag), self._mesh, (place,))

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> _GlooOperation:
        return self.collective(lambda group: group.allreduce([tensor]), ranks)

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> _GlooOperation:
        return self.collective(lambda group: group.allgather([outputs], [tensor]), ranks)

    def collective(
        self, begin: Callable[[BackendGroup], Work], ranks: tuple[int, ...]
    ) -> _GlooOperation:
        """Start a collective over a group that is open. Raises RuntimeError after `close`."""
        group = self._groups[ranks]
        peers = tuple(r for r, rank in enumerate(ranks) if rank != self._rank)
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            operation = _GlooOperation(begin(group), group, peers)
            running = (one for one in self._collectives if not one.is_completed())
            self._collectives = [*running, operation]
        return operation

    def open_group(self, ranks: tuple[int, ...]) -> None:
        if ranks not in self._groups:
            group = self._open(ranks)
            self._groups[ranks] = group
            if self._closed:
                _poison(group, ranks.index(self._rank), len(ranks))

    def wait(self, operation: Operation) -> None:
        waited = cast(_GlooOperation, operation)
        if waited.work.is_completed() and not waited.finished:
            waited.wait_native()
        if not waited.finished:
            self._wait(waited)
        if waited.error:
            raise RuntimeError(waited.error)
        if not waited.finished:
            raise RuntimeError(_CLOSED if self._closed else _WOKEN)

    def _wait(self, operation: _GlooOperation) -> None:
        """Return when the operation has finished, or the transport was woken or closed.

        Raises RuntimeError if a peer has disconnected.
        """
        with self._lock:
            if self._closed or self._woken:
                return
            self._waiting = operation
        if self._waiter is None:
            self._waiter = threads.start("waits", partial(_wait_in_order, self._waited))
        self._waited.put(operation)
        interval = PEER_CHECK_S
        while not operation.released.wait(interval):
            try:
                operation.check_peers()
            except RuntimeError:
                if not operation.released.wait(DISCONNECT_GRACE_S):
                    raise
            interval = min(2 * interval, MAX_PEER_CHECK_S)

    def disconnected(self) -> tuple[int, ...]:
        """Return the ranks whose connection to this rank has ended."""
        ended = set[int]()
        for ranks, group in list(self._groups.items()):
            for place, peer in enumerate(ranks):
                if peer != self._rank and peer not in ended:
                    try:
                        _probe(group, place)
                    except RuntimeError:
                        ended.add(peer)
        return tuple(sorted(ended))

    def wake(self) -> None:
        """Make all waits raise RuntimeError; see `Transport.wake`. The helper thread stays in its
        native wait until `close`."""
        with self._lock:
            self._woken = True
            if self._waiting is not None:
                self._waiting.released.set()

    def close(self) -> None:
        """Make all operations raise RuntimeError; see `Transport.close`.

        Returns when no collective runs any more. A collective that hangs in the middle of a
        message ends with its own timeout. Destroying its group earlier would block the thread that
        drops the last reference to the group.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._waiting is not None:
                self._waiting.released.set()
        for ranks, group in list(self._groups.items()):
            _poison(group, ranks.index(self._rank), len(ranks))
        self._collectives = [one for one in self._collectives if not one.is_completed()]
        for operation in self._collectives:
            operation.wait_native()
        self._waited.put(None)


def _probe(group: BackendGroup, peer: int) -> None:
    """Raise RuntimeError if the connection to `peer` has ended.

    The probe is a receive that no rank answers and no thread waits for, so it has no effect.
    """
    group.recv([torch.empty(1)], peer, POISON_TAG)


def _poison(group: BackendGroup, rank: int, size: int) -> None:
    """Fail all operations of `group`: let receives from its connected peers time out."""
    for peer in range(size):
        if peer != rank:
            try:
                poison = group.recv([torch.empty(1)], peer, POISON_TAG)
                poison.wait(timedelta(seconds=_POISON_S))
            except RuntimeError:
                continue
