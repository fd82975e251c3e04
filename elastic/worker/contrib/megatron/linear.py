"""A linear layer whose backward pass computes only the requested gradients.

megatron-core's own function always computes the gradients of input and weight together. A backward
pass in two parts (`elastic.worker.model.split_backward`) would compute both twice. This function
does the same products on the same tensors, so its results equal megatron-core's bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.group = group
        output = hidden.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0]
        for_hidden, for_weight, for_bias = _requested(ctx)
        to_hidden = to_weight = to_bias = work = None
        if for_hidden:
            to_hidden = gradient.matmul(weight)
            if ctx.group is not None:
                work = dist.all_reduce(to_hidden, group=ctx.group, async_op=True)
        flat = gradient.contiguous().view(-1, gradient.shape[-1])
        if for_weight:
            to_weight = flat.t().matmul(hidden.contiguous().view(-1, hidden.shape[-1]))
        if for_bias:
            to_bias = flat.sum(dim=0)
        if work is not None:
            work.wait()
        return to_hidden, to_weight, to_bias, None


def _requested(ctx: Any) -> list[bool]:
    """Return whether the running backward pass needs the gradients of input, weight and bias."""
    nodes = [node for node, _ in ctx.next_functions]
    found = [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
    return found + [False] * (3 - len(found))


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    allreduce_dgrad: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> Tensor:
    """Return input @ weight.T + bias, with the signature of megatron-core's function.

    `allreduce_dgrad`: sum the input's gradient over `tp_group`. `others`: ignored.
    """
    group = tp_group if allreduce_dgrad else None
    out: Tensor = _Linear.apply(input, weight, bias, group)  # type: ignore[no-untyped-call]
    return out
