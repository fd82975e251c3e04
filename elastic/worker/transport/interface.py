"""The interface of a transport backend.

`elastic.worker.transport.gloo` and `elastic.worker.transport.nccl` implement it, and
`elastic.worker.transport.shaped` wraps another transport.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch._C._distributed_c10d import Work


class Operation(Protocol):
    """A communication that was started and may still run."""

    def is_completed(self) -> bool:
        """Return whether `Transport.wait` would return or raise at once.

        gloo reports this for collectives only, not for messages between two ranks.
        """


class BackendGroup(Protocol):
    """Methods that torch's process groups share. torch's type stubs do not declare them."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work: ...


class Transport(Protocol):
    """Starts operations on the tensors of one type of device.

    The caller must keep each operation, and its tensors, until it has waited for the operation.
    """

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation: ...

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Operation: ...

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Operation: ...

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Operation: ...

    def open_group(self, ranks: tuple[int, ...]) -> None:
        """Prepare collectives over `ranks`. Blocks until all of these ranks have called it."""

    def wait(self, operation: Operation) -> None:
        """Wait until the host has seen the operation finish. Raises RuntimeError if it failed."""

    def wake(self) -> None:
        """Make all waits of this process raise RuntimeError, also future ones, without closing the
        connections: the other ends may still receive sent messages. Nothing is sent any more.

        Any thread may call it. Returns at once.
        """

    def close(self) -> None:
        """Make all operations of this process raise RuntimeError, blocked and future ones.

        Any thread may call it.
        """
