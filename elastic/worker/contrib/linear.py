"""A matrix product whose backward pass computes only what is asked for.

megatron-core's own finds the gradients of input and weight together, whichever is wanted; a backward pass in two
parts (`elastic.worker.model.split_backward`) would pay for both twice. This one does the same products on the same tensors, so its
results are megatron-core's, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.group = group
        output = hidden.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0]
        for_hidden, for_weight, for_bias = _wanted(ctx)
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


def _wanted(ctx: Any) -> list[bool]:
    """Whether the running backward pass goes on behind input, weight and bias (False where there is none)."""
    nodes = [node for node, _ in ctx.next_functions]
    wanted = [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
    return wanted + [False] * (3 - len(wanted))


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    allreduce_dgrad: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> Tensor:
    """input @ weight.T + bias, with the parameters of megatron-core's function; `others` are at their defaults.

    `allreduce_dgrad`: the input's gradient is summed over `tp_group`.
    """
    out: Tensor = _Linear.apply(input, weight, bias, tp_group if allreduce_dgrad else None)  # type: ignore[no-untyped-call]
    return out
