"""Initial values of megatron-core's layers from the safetensors files of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.contrib.huggingface.weights import Weights
from elastic.worker.contrib.megatron.huggingface import names
from elastic.worker.contrib.megatron.huggingface.names import Heads
from elastic.worker.contrib.megatron.layers import TransformerConfig
from elastic.worker.model.checks import description

MODEL = "weights of a model with the same config are needed"


class HuggingFaceWeights:
    """Parameters of a language model, by megatron's names. Raises FieldError for what is absent or
    has another shape."""

    def __init__(self, folder: Path, stored: Weights, config: TransformerConfig) -> None:
        self._folder, self._stored, self._blocks = folder, stored, int(config.num_layers)
        stored.prefix = "model."  # files of the model without its head leave it out
        if f"{names.block_prefix(self._blocks)}input_layernorm.weight" in stored:
            remedy = f"it has more than {self._blocks} blocks: {MODEL}"
            raise FieldError("weights", str(folder), remedy)
        self._heads = Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
        self._mixtral = names.router_name(0, mixtral=True) in stored

    def value(self, layer: int, name: str, shape: Sequence[int], *, gated: bool) -> Tensor:
        """Return the whole parameter `name` of a layer, of this shape."""
        value = self._read(layer - 1, name, shape)
        if value.shape != tuple(shape):
            remedy = f"layer {layer} of the model has {name} of shape {tuple(shape)}: {MODEL}"
            raise FieldError("weights", description(value), remedy)
        return value

    def _read(self, block: int, name: str, shape: Sequence[int]) -> Tensor:
        if name in names.OUTSIDE:
            return self._tensor(names.OUTSIDE[name])
        inner = name.removeprefix("layer.")
        if inner.startswith(names.JOINED):
            return self._joined(block, inner.removeprefix(names.JOINED))
        if inner == names.ROUTER:
            return self._tensor(names.router_name(block, mixtral=self._mixtral))
        if len(shape) == 3:
            return self._experts(block, inner, shape[0])
        if inner not in names.BLOCK:
            remedy = f"no transformers model has {name}: use the config of megatron_config"
            raise FieldError("weights", str(self._folder), remedy)
        return self._tensor(f"{names.block_prefix(block)}{names.BLOCK[inner]}")

    def _joined(self, block: int, kind: str) -> Tensor:
        parts = []
        for name, rows in zip(names.joined_names(block, kind), self._heads.rows, strict=True):
            part = self._tensor(name)
            if part.shape[0] != self._heads.groups * rows:
                remedy = f"{name} must have {self._heads.groups * rows} rows: {MODEL}"
                raise FieldError("weights", description(part), remedy)
            parts.append(part.view(self._heads.groups, rows, *part.shape[1:]))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _experts(self, block: int, matrix: str, experts: int) -> Tensor:
        """Return a matrix of all experts, [experts, rows, columns]: stored one by one, or, as
        transformers holds them in memory, as one tensor, with the two first matrices joined."""
        each = names.expert_names(block, matrix, experts, mixtral=self._mixtral)
        fused = f"{names.block_prefix(block)}mlp.experts."
        if each[0] in self._stored or f"{fused}down_proj" not in self._stored:
            return torch.stack([self._tensor(name) for name in each])
        if matrix == "mlp.down":
            return self._tensor(f"{fused}down_proj")
        halves = self._tensor(f"{fused}gate_up_proj").chunk(2, dim=1)
        return halves[0 if matrix == "mlp.gate" else 1]

    def _tensor(self, name: str) -> Tensor:
        if name not in self._stored:
            remedy = f"it has no tensor {name}: {MODEL}"
            raise FieldError("weights", str(self._folder), remedy)
        return self._stored(name)
