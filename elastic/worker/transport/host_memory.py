"""Transport for CUDA tensors that pass through host memory, on a transport for CPU tensors.

NCCL needs a GPU of its own for each rank. Where ranks share a GPU, as several local nodes of a
`--standalone` run on one GPU do, each tensor is copied to the host, moved there, and copied to the
other rank's device. It is slower than NCCL, and moves the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from elastic.worker.model.device import device_id
from elastic.worker.transport.gloo import GlooTransport
from elastic.worker.transport.interface import Operation, Transport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _HostOperation:
    """An operation on copies in host memory."""

    inner: Operation
    copies: tuple[torch.Tensor, ...]
    """The host tensors that the operation reads or writes."""
    results: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """(tensor of the caller, host tensor): copied to the caller when the operation has finished."""

    def is_completed(self) -> bool:
        return self.inner.is_completed()


class HostMemoryTransport:
    """Moves tensors of any device; `inner` moves their copies in host memory.

    To start a send or a collective blocks until the device has computed the tensor.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation:
        host = _to_host(tensor)
        return _HostOperation(self._inner.send(host, dst, tag), (host,))

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Operation:
        return self._filling([tensor], lambda hosts: self._inner.recv(hosts[0], src, tag))

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Operation:
        host = _to_host(tensor)
        work = self._inner.all_reduce(host, ranks)
        return _HostOperation(work, (host,), ((tensor, host),))

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Operation:
        host = _to_host(tensor)
        operation = self._filling(outputs, lambda hosts: self._inner.all_gather(hosts, host, ranks))
        operation.copies += (host,)
        return operation

    def _filling(
        self, outputs: list[torch.Tensor], begin: Callable[[list[torch.Tensor]], Operation]
    ) -> _HostOperation:
        """Start an operation that fills host tensors for `outputs`."""
        hosts = [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        work = begin(hosts)
        return _HostOperation(work, tuple(hosts), tuple(zip(outputs, hosts, strict=True)))

    def open_group(self, ranks: tuple[int, ...]) -> None:
        self._inner.open_group(ranks)

    def wait(self, operation: Operation) -> None:
        waited = cast(_HostOperation, operation)
        self._inner.wait(waited.inner)
        results, waited.results, waited.copies = waited.results, (), ()
        for tensor, host in results:
            tensor.copy_(host)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in host memory, also if it is there already."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def device_is_shared(
    control: GlooTransport, rank: int, world_size: int, device: torch.device
) -> bool:
    """Return whether any two ranks use one GPU; warn once if `device` is one of these.

    All ranks call this, and all get the same.
    """
    sharing = ranks_sharing_a_device(control, world_size, device_id(device))
    if rank in sharing:
        _tell_sharing(device)
    return bool(sharing)


@cache
def _tell_sharing(device: torch.device) -> None:
    log.warning(
        "%s is shared with another worker of this job, so messages pass through host memory: "
        "for full speed, give each worker a GPU of its own",
        device,
    )


def ranks_sharing_a_device(control: GlooTransport, world_size: int, device: str) -> tuple[int, ...]:
    """Return the ranks, in order, whose device another rank uses too; the same on each rank.

    `device` identifies this rank's device among all machines; it has at most 64 bytes. All ranks
    call this.
    """
    own = torch.frombuffer(bytearray(device.encode().ljust(64)[:64]), dtype=torch.uint8)
    outputs = [torch.empty_like(own) for _ in range(world_size)]
    control.wait(control.all_gather(outputs, own, tuple(range(world_size))))
    names = [bytes(output.tolist()) for output in outputs]
    return tuple(rank for rank, name in enumerate(names) if names.count(name) > 1)
