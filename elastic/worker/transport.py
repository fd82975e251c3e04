"""What moves tensors between the ranks of one epoch: gloo; for CUDA data NCCL (`elastic.worker.nccl`).

Closing is what makes waits abandonable. A wait on a gloo operation blocks in native code where no event
reaches it, but when one operation runs into its own timeout gloo fails every operation of that group and
closes its sockets. So `GlooTransport.close` posts a receive that nobody answers, with a timeout of a
millisecond: every blocked wait of this process raises at once, and the neighbours see their connections end.
That holds for hung peers too, and costs nothing while all is well: waits need no helper thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

_POISON_TAG = 2**20
_POISON_S = 0.001


class Group(Protocol):
    """What both backends offer; torch's type stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...


class Transport(Protocol):
    """Starts operations on tensors of one kind of device. Each Work must be kept until waited for."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work: ...

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work: ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work: ...

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Work: ...

    def open_set(self, ranks: tuple[int, ...]) -> None:
        """Prepare `all_reduce` and `all_gather` over `ranks`; blocks until all of them do so."""

    def wait(self, work: Work) -> None:
        """Return when the operation is really done, seen from the host. Raises RuntimeError if it failed."""

    def close(self) -> None:
        """Make every operation of this process, blocked or to come, raise RuntimeError. From any thread."""


class GlooTransport:
    """CPU tensors. Opening blocks until all ranks are there."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, host: str) -> None:
        self._store, self._rank, self._host = store, rank, host
        self._timeout = timedelta(seconds=timeout_s)
        self._mesh = self._open("mesh", rank, size)
        self._peers = [r for r in range(size) if r != rank]
        self._sets: dict[tuple[int, ...], Group] = {tuple(range(size)): self._mesh}
        self._closed = False

    def _open(self, name: str, rank: int, size: int) -> Group:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        device = (
            ProcessGroupGloo.create_device(hostname=self._host)
            if self._host
            else ProcessGroupGloo.create_default_device()
        )
        options._devices = [device]
        store = PrefixStore(name, self._store)
        return cast(Group, ProcessGroupGloo(store, rank, size, options))

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self._mesh.send([tensor], dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return self._mesh.recv([tensor], src, tag)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        return self._sets[ranks].allreduce([tensor])

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        return self._sets[ranks].allgather([outputs], [tensor])

    def open_set(self, ranks: tuple[int, ...]) -> None:
        if ranks not in self._sets:
            group = self._open("set-" + "-".join(map(str, ranks)), ranks.index(self._rank), len(ranks))
            self._sets[ranks] = group
            if self._closed:
                _poison(group, ranks.index(self._rank), len(ranks))

    def wait(self, work: Work) -> None:
        work.wait()

    def disconnected(self) -> tuple[int, ...]:
        """Ranks whose connection has ended. Harmless: the probe is a receive that is never waited for."""
        ended = []
        for peer in self._peers:
            try:
                self._mesh.recv([torch.empty(1)], peer, _POISON_TAG)
            except RuntimeError:
                ended.append(peer)
        return tuple(ended)

    def close(self) -> None:
        self._closed = True
        for ranks, group in list(self._sets.items()):
            _poison(group, ranks.index(self._rank), len(ranks))


def _poison(group: Group, rank: int, size: int) -> None:
    """Fail everything in `group`: a receive from any peer that is still connected does it for all of them."""
    for peer in range(size):
        if peer != rank:
            try:
                group.recv([torch.empty(1)], peer, _POISON_TAG).wait(timedelta(seconds=_POISON_S))
            except RuntimeError:
                continue


def sets_of(rank: int, sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The sets that `rank` is in, in the one order in which all ranks open them: none waits in vain."""
    return sorted(s for s in set(sets) if rank in s)
