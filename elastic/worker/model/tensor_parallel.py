"""What the ranks of a tensor-parallel group decide together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.worker.model.layers import TensorParallel


def tp_sync(tp: TensorParallel) -> Callable[[bool], bool] | None:
    """Maximum of a flag over the group; None for a group of one."""
    if tp.size == 1:
        return None

    def sync(flag: bool) -> bool:
        on = (
            torch.device("cuda", torch.cuda.current_device())
            if dist.get_backend(tp.group) == "nccl"
            else "cpu"
        )
        value = torch.tensor([int(flag)], device=on)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=tp.group)
        return bool(value.item())

    return sync
