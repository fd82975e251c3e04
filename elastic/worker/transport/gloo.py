"""What moves tensors between the ranks of one epoch: gloo; for CUDA data NCCL (`elastic.worker.transport.nccl`).

Closing is what makes waits abandonable, and a wait on gloo blocks in native code where no event reaches it. When one
operation runs into its own timeout gloo closes all connections of that group, which the neighbours see, and fails the
operations that have not begun to move. `GlooTransport.close` uses that: it posts a receive that nobody answers, with a
timeout of a millisecond.

Operations that were in the middle of a message then are not told, whether the connection was closed here or broke (gloo
drops what it is just reading or writing): they go on waiting until their own timeout. So whoever waits does it beside a
thread that does the native wait and that may be left behind, and looks now and then whether the peer is still connected
(docs/decisions/027-waits-that-can-be-left.md).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from elastic.worker.transport import threads

_POISON_TAG = 2**20
_POISON_S = 0.001
PEER_CHECK_S = 0.25
"""After this long a wait looks whether its peers are still connected; then after twice as long, and so on."""
MAX_PEER_CHECK_S = 8.0
DISCONNECT_GRACE_S = 2.0
"""A peer that is gone may have done its part: of a collective the rest may still come from others."""
_CLOSED = "the links were closed"


class Operation(Protocol):
    """Something under way."""

    def is_completed(self) -> bool:
        """Whether waiting would end at once, well or not. Of what goes from one rank to another gloo cannot tell."""


class BackendGroup(Protocol):
    """What both backends offer; torch's type stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work: ...


class Transport(Protocol):
    """Starts operations on tensors of one kind of device. Each must be kept until waited for."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation: ...

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Operation: ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Operation: ...

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Operation: ...

    def open_set(self, ranks: tuple[int, ...]) -> None:
        """Prepare `all_reduce` and `all_gather` over `ranks`; blocks until all of them do so."""

    def wait(self, operation: Operation) -> None:
        """Return when it is really done, seen from the host. Raises RuntimeError if it failed."""

    def close(self) -> None:
        """Make every operation of this process, blocked or to come, raise RuntimeError. From any thread."""


@dataclass(slots=True, eq=False)
class _GlooOperation:
    """An operation of gloo."""

    work: Work
    group: BackendGroup
    peers: tuple[int, ...]
    """Those ranks of `group` that have a part in it."""
    over: threading.Event = field(default_factory=threading.Event)
    """Nobody needs to wait any more: it has ended, or the transport was closed."""
    ended: bool = False
    error: str = ""
    """Why it failed; not the exception, whose traceback would keep the whole epoch."""

    def is_completed(self) -> bool:
        return self.ended or bool(self.work.is_completed())

    def end(self) -> None:
        """Wait in native code."""
        try:
            self.work.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits must hear of it
            self.error = str(error) or type(error).__name__
        self.ended = True
        self.over.set()

    def look(self) -> None:
        """Raise RuntimeError if a peer is not connected any more."""
        for peer in self.peers:
            _probe(self.group, peer)


def _end_in_turn(waited: SimpleQueue[_GlooOperation | None]) -> None:
    while (operation := waited.get()) is not None:
        operation.end()
        del operation


class GlooTransport:
    """CPU tensors. Opening blocks until all ranks are there. One thread uses it, any may close it."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, host: str) -> None:
        self._store, self._rank, self._host = store, rank, host
        self._timeout = timedelta(seconds=timeout_s)
        self._mesh = self._open("mesh", rank, size)
        self._peers = [r for r in range(size) if r != rank]
        self._sets: dict[tuple[int, ...], BackendGroup] = {tuple(range(size)): self._mesh}
        self._lock, self._closed = threading.Lock(), False
        self._collectives: list[_GlooOperation] = []
        self._waited: SimpleQueue[_GlooOperation | None] = SimpleQueue()
        self._waits: threading.Thread | None = None
        self._waiting: _GlooOperation | None = None
        weakref.finalize(self, self._waited.put, None)

    def _open(self, name: str, rank: int, size: int) -> BackendGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        device = (
            ProcessGroupGloo.create_device(hostname=self._host)
            if self._host
            else ProcessGroupGloo.create_default_device()
        )
        options._devices = [device]
        store = PrefixStore(name, self._store)
        return cast(BackendGroup, ProcessGroupGloo(store, rank, size, options))

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> _GlooOperation:
        return _GlooOperation(self._mesh.send([tensor], dst, tag), self._mesh, (dst,))

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> _GlooOperation:
        return _GlooOperation(self._mesh.recv([tensor], src, tag), self._mesh, (src,))

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> _GlooOperation:
        return self.collective(lambda group: group.allreduce([tensor]), ranks)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]) -> _GlooOperation:
        return self.collective(lambda group: group.allgather([outputs], [tensor]), ranks)

    def collective(self, begin: Callable[[BackendGroup], Work], ranks: tuple[int, ...]) -> _GlooOperation:
        """Begin something over a set that is open."""
        group, peers = self._sets[ranks], tuple(r for r, rank in enumerate(ranks) if rank != self._rank)
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            under = _GlooOperation(begin(group), group, peers)
            self._collectives = [*(one for one in self._collectives if not one.is_completed()), under]
        return under

    def open_set(self, ranks: tuple[int, ...]) -> None:
        if ranks not in self._sets:
            group = self._open("set-" + "-".join(map(str, ranks)), ranks.index(self._rank), len(ranks))
            self._sets[ranks] = group
            if self._closed:
                _poison(group, ranks.index(self._rank), len(ranks))

    def wait(self, operation: Operation) -> None:
        under = cast(_GlooOperation, operation)
        if under.work.is_completed() and not under.ended:
            under.end()
        if not under.ended:
            self._wait(under)
        if under.error:
            raise RuntimeError(under.error)
        if not under.ended:
            raise RuntimeError(_CLOSED)

    def _wait(self, under: _GlooOperation) -> None:
        """Until it has ended, the transport is closed, or a peer is gone (RuntimeError)."""
        with self._lock:
            if self._closed:
                return
            self._waiting = under
        if self._waits is None:
            self._waits = threads.start("waits", partial(_end_in_turn, self._waited))
        self._waited.put(under)
        patience = PEER_CHECK_S
        while not under.over.wait(patience):
            try:
                under.look()
            except RuntimeError:
                if not under.over.wait(DISCONNECT_GRACE_S):
                    raise
            patience = min(2 * patience, MAX_PEER_CHECK_S)

    def disconnected(self) -> tuple[int, ...]:
        """Ranks whose connection has ended."""
        ended = []
        for peer in self._peers:
            try:
                _probe(self._mesh, peer)
            except RuntimeError:
                ended.append(peer)
        return tuple(ended)

    def close(self) -> None:
        """As the protocol says. Returns when no collective is under way any more: one that hangs in the middle of a
        message has its timeout to end in. A group that were destroyed before would wait for it in whatever thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._waiting is not None:
                self._waiting.over.set()
        for ranks, group in list(self._sets.items()):
            _poison(group, ranks.index(self._rank), len(ranks))
        self._collectives = [one for one in self._collectives if not one.is_completed()]
        for under in self._collectives:
            under.end()
        self._waited.put(None)


def _probe(group: BackendGroup, peer: int) -> None:
    """Raise RuntimeError if the connection has ended. Harmless: a receive that is never waited for."""
    group.recv([torch.empty(1)], peer, _POISON_TAG)


def _poison(group: BackendGroup, rank: int, size: int) -> None:
    """Fail everything in `group`: a receive from any peer that is still connected does it for all of them."""
    for peer in range(size):
        if peer != rank:
            try:
                group.recv([torch.empty(1)], peer, _POISON_TAG).wait(timedelta(seconds=_POISON_S))
            except RuntimeError:
                continue


def groups_of_rank(rank: int, sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The sets that `rank` is in, in the one order in which all ranks open them: none waits in vain."""
    return sorted(s for s in set(sets) if rank in s)
