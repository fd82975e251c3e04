"""Which device a worker computes on."""

from __future__ import annotations

import torch


def choose_device(local_rank: int, *, emulated: bool = False) -> torch.device:
    """This worker's device: its GPU if the machine has any, else the CPU; always the CPU for emulated layers."""
    if emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
