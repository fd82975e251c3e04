"""The device of a worker, and the memory that a forward pass keeps there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from elastic.worker.model.values import Value


def choose_device(local_rank: int, *, emulated: bool = False) -> torch.device:
    """Return this worker's GPU if the machine has GPUs, else the CPU; the CPU if `emulated`."""
    if emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_id(device: torch.device) -> str:
    """Return a name of a CUDA device that no other device has, on any machine.

    NCCL takes ranks with different `NCCL_HOSTID` for ranks of different machines, even if they
    share a device, and so does this name: the variable is part of it.
    """
    own = str(torch.cuda.get_device_properties(device).uuid)
    host = os.environ.get("NCCL_HOSTID", "")
    return own if not host else hashlib.sha256(f"{own} {host}".encode()).hexdigest()


def activation_bytes(forward: Callable[[], Value], module: nn.Module, device: torch.device) -> int:
    """Return the bytes that `forward` keeps for its backward pass, parameters excluded.

    On the CPU the storages that autograd saves are counted, each once, with the input. On CUDA the
    growth of the allocated memory is measured: without the input, but with the output, which is the
    next layer's input.
    """
    if device.type == "cuda":
        forward()  # The first call also allocates libraries and workspaces.
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        out = forward()
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        del out
        return max(0, kept)
    own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(saved.values())
