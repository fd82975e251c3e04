"""Initial values of megatron-core's layers from the safetensors files of a transformers model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.contrib.huggingface.weights import Weights
from elastic.worker.contrib.megatron.huggingface import names
from elastic.worker.contrib.megatron.huggingface.names import Heads
from elastic.worker.contrib.megatron.layers import TransformerConfig
from elastic.worker.contrib.whole_model import PLAIN
from elastic.worker.model.checks import Described, description

MODEL = "weights of a model with the same config are needed"


class HuggingFaceWeights:
    """Parameters of a language model, by megatron's names. Raises FieldError for what is absent or
    has another shape."""

    def __init__(
        self, folder: Path, stored: Weights, config: TransformerConfig, *, tied: bool
    ) -> None:
        """`tied`: whether head and embedding share a matrix. Raises FieldError for files of a model
        that has other parameters."""
        self._folder, self._stored, self._blocks = folder, stored, int(config.num_layers)
        self._tied = tied
        stored.prefix = "model."  # files of the model without its head leave it out
        self._heads = Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
        self._mixtral = any(names.MIXTRAL[0] in name for name in stored.names())
        self._config = config

    def check(self, _names: Iterable[tuple[int, str]], /) -> None:
        """Raise FieldError for a tensor that the layers would leave out: a bias, a norm, a scale, a
        shared expert, a block. The config tells which ones these are."""
        for name in self._stored.names():
            found = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+)", name)
            if found is None:
                continue
            if int(found[1]) >= self._blocks:
                remedy = f"it has more than {self._blocks} blocks: {MODEL}"
                raise FieldError("weights", str(self._folder), remedy)
            known = names.is_known(found[2], self._config)
            if not known and not found[2].endswith("rotary_emb.inv_freq"):
                remedy = f"it has {name}, which this model does not use: {MODEL}"
                raise FieldError("weights", str(self._folder), remedy)

    def value(self, layer: int, name: str, shape: Sequence[int], *, gated: bool) -> Tensor:
        """Return the whole parameter `name` of a layer, of this shape."""
        value = self._read(layer - 1, name, shape)
        if value.shape != tuple(shape):
            remedy = f"layer {layer} of the model has {name} of shape {tuple(shape)}: {MODEL}"
            raise FieldError("weights", description(value), remedy)
        return value

    def _read(self, block: int, name: str, shape: Sequence[int]) -> Tensor:
        if name in names.OUTSIDE:
            return self._outside(names.OUTSIDE[name])
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

    def _outside(self, name: str) -> Tensor:
        """Return a tensor before or behind the blocks. Files of a model with a tied head may have
        the matrix under either name; two matrices that differ are not tied."""
        head, table = names.OUTSIDE[names.HEAD], names.OUTSIDE[names.TABLE]
        if name != table or not self._tied or head not in self._stored:
            return self._tensor(name)
        value = self._tensor(head)
        if table in self._stored and not torch.equal(self._tensor(table), value):
            remedy = f"{table} and {head} are tied in the model, and differ there: {MODEL}"
            raise FieldError("weights", str(self._folder), remedy)
        return value

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
        value = self._stored(name)
        if value.dtype not in PLAIN:
            remedy = f"{name} needs float32, bfloat16, float16 or float64: numbers without scales"
            raise FieldError("weights", Described(f"a tensor of {value.dtype}"), remedy)
        return value
