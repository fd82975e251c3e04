"""Names of parameters on megatron-core's layers, and in files of transformers models.

Two kinds of parameters have another form there:

- megatron joins the matrices of queries, keys and values. Its rows are, for each group of heads
  with the same key, those of its queries, of its key and of its value.
- transformers stores a tensor for each expert.

Source: `linear_qkv` in megatron-core's attention, and the files of the models on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from numpy.typing import NDArray

from elastic.worker.contrib.megatron.experts import has_shared_gate
from elastic.worker.contrib.megatron.layers import TransformerConfig

OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Parameters before and behind the blocks."""
TABLE, HEAD = "embedding.word_embeddings.weight", "output.weight"
BLOCK = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.norm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.norm.weight": "self_attn.k_norm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.gate.weight": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_experts.up.weight": "mlp.shared_expert.up_proj.weight",
    "mlp.shared_experts.down.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate": "mlp.shared_expert_gate.weight",
}
"""Parameters of a block that are the same tensor there."""
JOINED, PARTS = "self_attention.linear_qkv.", ("q_proj", "k_proj", "v_proj")
ROUTER = "mlp.router.weight"
MIXTRAL, OTHERS = (
    ("block_sparse_moe", {"mlp.gate": "w1", "mlp.up": "w3", "mlp.down": "w2"}),
    ("mlp", {"mlp.gate": "gate_proj", "mlp.up": "up_proj", "mlp.down": "down_proj"}),
)
"""Name of the mixture in a block, and of the matrices of its experts."""
_OTHER_NAMES = (
    r"self_attn\.[qkv]_proj\.weight|mlp\.gate\.weight|block_sparse_moe\.gate\.weight"
    r"|mlp\.experts\.(\d+\.(gate|up|down)_proj\.weight|gate_up_proj|down_proj)"
    r"|block_sparse_moe\.experts\.\d+\.w[123]\.weight"
)


def is_known(name: str, config: TransformerConfig) -> bool:
    """Return whether a model of this config has parameter `name` in a block, named as there."""
    if re.fullmatch(r"self_attn\.[qk]_norm\.weight", name):
        return bool(config.qk_layernorm)
    if re.fullmatch(r"self_attn\.[qkv]_proj\.bias", name):
        return bool(config.add_qkv_bias)
    if name.startswith("mlp.shared_expert."):
        return config.moe_shared_expert_intermediate_size is not None and name in BLOCK.values()
    if name == BLOCK["mlp.shared_expert_gate"]:
        return has_shared_gate(config)
    return name in BLOCK.values() or re.fullmatch(_OTHER_NAMES, name) is not None


def block_prefix(block: int) -> str:
    return f"model.layers.{block}."


def expert_names(block: int, matrix: str, experts: int, *, mixtral: bool) -> list[str]:
    """Return the name of a matrix of each expert of a block. `matrix`: as mlp.gate."""
    mixture, matrices = MIXTRAL if mixtral else OTHERS
    start = f"{block_prefix(block)}{mixture}.experts."
    return [f"{start}{expert}.{matrices[matrix]}.weight" for expert in range(experts)]


def router_name(block: int, *, mixtral: bool) -> str:
    return f"{block_prefix(block)}{(MIXTRAL if mixtral else OTHERS)[0]}.gate.weight"


def joined_names(block: int, kind: str) -> list[str]:
    """Return the names of queries, keys and values. `kind`: weight | bias."""
    return [f"{block_prefix(block)}self_attn.{part}.{kind}" for part in PARTS]


@dataclass(frozen=True, slots=True)
class Heads:
    """Form of the joined matrix of queries, keys and values."""

    queries: int
    """Number of heads."""
    groups: int
    """Number of groups of heads; each has one key and one value."""
    channels: int
    """Numbers of a head."""

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values in one group."""
        return self.queries // self.groups * self.channels, self.channels, self.channels


def separate(joined: NDArray, heads: Heads) -> Iterator[NDArray]:  # type: ignore[type-arg]
    """Yield queries, keys and values of a joined matrix or bias."""
    by_group = joined.reshape(heads.groups, sum(heads.rows), *joined.shape[1:])
    begin = 0
    for rows in heads.rows:
        yield by_group[:, begin : begin + rows].reshape(heads.groups * rows, *joined.shape[1:])
        begin += rows
