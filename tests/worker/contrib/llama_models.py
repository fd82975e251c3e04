"""Small models with rotary positions, query groups, RMSNorm, SwiGLU and norms of queries."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from megatron.core import model_parallel_config
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from elastic.worker.contrib.megatron.stack import MegatronStack, from_megatron
from elastic.worker.model.microbatch import Microbatch
from tests.worker.contrib import gpt_models

VOCABULARY, LENGTH = 64, 16
HAS_GATE = hasattr(TransformerConfig, "moe_shared_expert_gate")
"""Whether this version of megatron-core has gates of shared experts: from 0.16 on."""
SHARED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 40,
    **({"moe_shared_expert_gate": True} if HAS_GATE else {}),
}
needs_gate = pytest.mark.skipif(not HAS_GATE, reason="megatron-core 0.16 or newer is needed")

TRANSFORMERS_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
"""Fields of a config of transformers with the sizes of `config`."""


def config(**changes: Any) -> TransformerConfig:
    modern: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
    }
    vars(model_parallel_config).setdefault("warnings", warnings)  # 0.15 warns without the import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**modern, **changes})


def experts(**changes: Any) -> TransformerConfig:
    """Four experts, of which each token chooses two."""
    mixture = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}
    return config(**{**mixture, **changes})


def shared_experts(**changes: Any) -> TransformerConfig:
    """The same, beside shared experts, which have a gate if megatron-core has gates."""
    return experts(**{**SHARED, **changes})


def stack(given: TransformerConfig | None = None, **changes: Any) -> MegatronStack:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": LENGTH,
        "seed": 7,
    }
    return from_megatron(config() if given is None else given, **{**sizes, **changes})


def packed(lengths: tuple[int, ...]) -> Tensor:
    """megatron's mask of documents of these lengths, [1, 1, s, s]."""
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    same = document[:, None] == document[None, :]
    return ~(same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[None, None]


def packed_microbatch(step: int, index: int) -> Microbatch:
    """Two documents in each row, the first of which counts half."""
    plain = gpt_models.microbatch(step, index)
    weights = torch.ones(2, LENGTH)
    weights[:, :7] = 0.5
    mask = packed((7, LENGTH - 7)).expand(2, 1, LENGTH, LENGTH)
    return Microbatch(step, index, {**plain.fields, "attention_mask": mask, "loss_mask": weights})
