"""MLPs of a transformer layer, which tensor-parallel ranks split."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

from torch import Tensor, nn

from elastic.domain.errors import needs_extra

with (
    needs_extra("megatron", "A model of megatron-core layers"),
    warnings.catch_warnings(),
):
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def parallel_mlp(config: TransformerConfig, inner: int, tp_group: Any) -> nn.Module:
    """Return an MLP of this inner size, gated if the config says so.

    Its forward pass takes [s, b, hidden]. It returns the same shape, and the bias that is still to
    be added, or None.
    """
    config = copy.copy(config)
    config.ffn_hidden_size = inner
    if config.gated_linear_unit:
        return GatedMLP(config, tp_group)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return cast(nn.Module, MLP(config, linears, ffn_hidden_size=inner, tp_group=tp_group))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), as SwiGLU.

    megatron's MLP has gate and up in one matrix, of which a tensor-parallel rank holds two pieces.
    Two matrices are split like all others, so that checkpoints fit any tensor-parallel size.
    """

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        inner, self.activation = config.ffn_hidden_size, config.activation_func
        gate_and_up: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "gather_output": False,
            "bias": config.add_bias_linear,
            "tp_group": tp_group,
        }
        self.gate = ColumnParallelLinear(config.hidden_size, inner, **gate_and_up)
        self.up = ColumnParallelLinear(config.hidden_size, inner, **gate_and_up)
        self.down = RowParallelLinear(
            inner,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp_group,
        )

    def forward(self, hidden: Tensor, **others: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] -> the same shape, and the bias that is still to be added."""
        gate, up = self.gate(hidden)[0], self.up(hidden)[0]
        return cast("tuple[Tensor, Tensor | None]", self.down(self.activation(gate) * up))
