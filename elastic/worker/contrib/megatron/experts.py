"""A mixture of experts in a transformer layer, with megatron-core's router.

The ranks of a node share the experts: each holds an equal part of them. All ranks have all tokens,
as in the rest of a tensor-parallel layer, so each computes what its experts give to the tokens that
chose them, and the sum over the ranks is the result. Shared experts are one MLP that sees every
token. The ranks split its matrices.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic.domain.errors import needs_extra
from elastic.worker.contrib.megatron.mlp import parallel_mlp

with (
    needs_extra("megatron", "A model of megatron-core layers"),
    warnings.catch_warnings(),
):
    warnings.simplefilter("ignore")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.moe.moe_utils import z_loss_func
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def has_shared_gate(config: TransformerConfig) -> bool:
    """Return whether shared experts have a gate. (Configs of megatron-core 0.15 have no such
    field.)"""
    return bool(getattr(config, "moe_shared_expert_gate", False))


class SelfGroup:
    """Stands for a process group of one rank. It needs no torch.distributed."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class Router(TopKRouter):
    """megatron's router, whose losses are returned instead of hidden in the backward pass.

    megatron's own adds the gradients of these losses during the backward pass, with a scale that a
    global variable holds. Here the losses are a part of the loss that the last layer returns.
    """

    def __init__(self, config: TransformerConfig) -> None:
        alone = SelfGroup()  # all ranks route the same tokens: nothing is summed over them
        groups = ProcessGroupCollection(tp=alone, cp=alone, tp_cp=alone, tp_dp_cp=alone)
        super().__init__(config, pg_collection=groups)
        self.losses: list[Tensor] = []
        """Losses of the last forward pass, weighted by their coefficients."""

    def gating(self, input: Tensor) -> Tensor:
        """[s, b, hidden] -> logits [s, b, experts]. (megatron's moves the weights to a GPU.)"""
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype))

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **others: Any
    ) -> Tensor:
        self.losses.append(aux_loss)
        return activation

    def apply_z_loss(self, logits: Tensor, *args: Any, **others: Any) -> Tensor:
        if self.config.moe_z_loss_coeff is not None and self.training:
            self.losses.append(z_loss_func(logits, self.config.moe_z_loss_coeff))
        return logits


class Experts(nn.Module):
    """The MLP of a layer as a mixture of experts.

    Args:
        group: the ranks that share the experts; its rank r has the r-th part of them.
    """

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        mine = config.num_moe_experts // group.size()
        self._group, self._first = group, group.rank() * mine
        self.router, self.activation = Router(config), config.activation_func

        def weights(rows: int, columns: int) -> nn.Parameter:
            parameter = nn.Parameter(torch.empty(mine, rows, columns, dtype=config.params_dtype))
            parameter.partition_dim = 0  # type: ignore[attr-defined]
            return parameter

        self.gate = weights(inner, hidden) if config.gated_linear_unit else None
        self.up, self.down = weights(inner, hidden), weights(hidden, inner)
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = None if shared is None else parallel_mlp(config, shared, group)
        self.shared_expert_gate = (
            nn.Parameter(torch.empty(1, hidden, dtype=config.params_dtype))
            if has_shared_gate(config)
            else None
        )

    def forward(self, hidden: Tensor, **others: Any) -> tuple[Tensor, None]:
        """[s, b, hidden] -> the same shape, and no bias."""
        self.router.losses = []
        probabilities, chosen = cast("tuple[Tensor, Tensor]", self.router(hidden))
        tokens = hidden.reshape(-1, hidden.shape[-1])
        if self._group.size() > 1:
            tokens = copy_to_tensor_model_parallel_region(tokens, self._group)
            probabilities = copy_to_tensor_model_parallel_region(probabilities, self._group)
        dtype = torch.promote_types(probabilities.dtype, tokens.dtype)
        out = torch.zeros_like(tokens, dtype=dtype)
        for index in range(len(self.up)):
            rows = chosen[:, self._first + index].nonzero().squeeze(1)
            weight = probabilities[rows, self._first + index].unsqueeze(1)
            out.index_add_(0, rows, self._expert(index, tokens[rows]) * weight)
        if self._group.size() > 1:
            out = reduce_from_tensor_model_parallel_region(out, self._group)
        routed = out.to(hidden.dtype).view_as(hidden)
        if self.shared_experts is None:
            return routed, None
        return routed + self._shared(self.shared_experts, hidden), None

    def take_router_loss(self) -> Tensor:
        """Return the sum of the router's losses in the last forward pass, once: a layer keeps
        nothing of a pass."""
        losses, self.router.losses = self.router.losses, []
        return sum(losses, start=torch.zeros(()))

    def _shared(self, mlp: nn.Module, hidden: Tensor) -> Tensor:
        """[s, b, hidden] -> the same shape. All ranks compute the same weight of a token."""
        out = cast(Tensor, mlp(hidden)[0])
        if self.shared_expert_gate is None:
            return out
        return out * nn.functional.linear(hidden, self.shared_expert_gate).sigmoid()

    def _expert(self, index: int, tokens: Tensor) -> Tensor:
        linear = nn.functional.linear
        inner = linear(tokens, self.up[index])
        if self.gate is None:
            return linear(self.activation(inner), self.down[index])
        return linear(self.activation(linear(tokens, self.gate[index])) * inner, self.down[index])
