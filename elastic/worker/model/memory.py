"""Bytes that a forward pass keeps for the backward pass: measured, not reckoned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def activation_bytes(forward: Callable[[], Tensor], module: nn.Module, device: torch.device) -> int:
    """Bytes kept between `forward` and its backward pass, besides parameters.

    On the CPU: the storages that autograd saves, each once, the input among them. On CUDA: what the allocator holds
    more after the pass than before: not the input, but the output, which is the next layer's input.
    """
    if device.type == "cuda":
        forward()  # libraries and workspaces
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
