"""From the config of a transformers model to the arguments of `from_megatron`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from elastic.domain.errors import FieldError, describe
from elastic.worker.contrib.huggingface.stack import config_in
from elastic.worker.contrib.megatron.layers import TransformerConfig
from elastic.worker.model.checks import description, whole_number

DENSE, ROUTED = ("llama", "mistral", "qwen2", "qwen3"), ("mixtral", "qwen3_moe")
FAMILIES = (*DENSE, *ROUTED)
"""Values of `model_type` in a config.json."""
FOLDER = "a folder with the config.json of a transformers model is needed"
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Numbers of Llama 3.1's scaling of frequencies that are constants in megatron-core."""


def megatron_config(
    folder: str | Path, *, max_sequence_length: int, **fields: Any
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config of a transformers model for megatron-core's layers, and the arguments that
    `from_megatron` takes beside it.

        config, arguments = megatron_config("FOLDER", max_sequence_length=4096)
        stack = from_megatron(config, **arguments, weights="FOLDER")

    Args:
        folder: has the config.json. Its family must be one of `FAMILIES`.
        max_sequence_length: most tokens of a row.
        fields: more fields of the TransformerConfig, as tensor_model_parallel_size=2.

    The loss of a mixture's routers is megatron's, for each block by itself. It has the coefficient
    of the config, or is left out without `output_router_logits`. Raises FieldError for another
    family, for a model that the layers do not compute, or for a wrong field.
    """
    if not isinstance(folder, str | Path):
        raise FieldError("folder", description(folder), FOLDER)
    return translated(config_in(Path(folder)), max_sequence_length, **fields)


def translated(
    config: Any, max_sequence_length: int, **fields: Any
) -> tuple[TransformerConfig, dict[str, Any]]:
    """The same, for a config of transformers in memory."""
    length = whole_number("max_sequence_length", max_sequence_length, 1)
    family = config.model_type
    if family not in FAMILIES:
        remedy = f"one of {', '.join(FAMILIES)}; or from_huggingface, which takes most families"
        raise FieldError("model_type", family, remedy)
    _refuse_others(config, family, length)
    rope = dict(config.rope_parameters)
    heads = config.num_attention_heads
    found: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family.startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
        "init_method_std": config.initializer_range,
        **_types(config, fields),
    }
    if family in ROUTED:
        found |= _experts(config, family)
        ranks = fields.get("tensor_model_parallel_size", 1)
        found["expert_model_parallel_size"] = ranks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = TransformerConfig(**{**found, **fields})
    except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
        names = ", ".join(fields) or "the config's values"
        remedy = f"fields of megatron's TransformerConfig that fit the model: {describe(error)}"
        raise FieldError("fields", names, remedy) from error
    scaled = rope.get("rope_type", "default") == "llama3"
    return made, {
        "vocab_size": config.vocab_size,
        "max_sequence_length": length,
        "rotary_base": float(rope.get("rope_theta", 10_000.0)),
        "rope_scaling_factor": float(rope["factor"]) if scaled else None,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
    }


def _types(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the type of the parameters, unless it is among `fields`."""
    dtype = fields.get("params_dtype", getattr(config, "dtype", None))
    if dtype not in (torch.float32, torch.bfloat16):  # float16 is for inference
        dtype = torch.float32 if dtype is None else torch.bfloat16
    return {"params_dtype": dtype, "bf16": dtype is torch.bfloat16}


def _experts(config: Any, family: str) -> dict[str, Any]:
    inner = config.intermediate_size
    renormalised, layers = True, [1] * config.num_hidden_layers
    if family == "qwen3_moe":
        inner, renormalised = config.moe_intermediate_size, bool(config.norm_topk_prob)
        every, dense = config.decoder_sparse_step, config.mlp_only_layers or []
        layers = [int(i not in dense and (i + 1) % every == 0) for i in range(len(layers))]
    trained = bool(config.output_router_logits)
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not renormalised,
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_load_balancing_type": "aux_loss" if trained else "none",
        "moe_aux_loss_coeff": config.router_aux_loss_coef if trained else 0.0,
    }


def _refuse_others(config: Any, family: str, length: int) -> None:
    """Raise FieldError for a field with which the layers would compute another model."""

    def refuse(name: str, remedy: str) -> None:
        value = getattr(config, name)
        raise FieldError(f"{type(config).__name__}.{name}", description(value), remedy)

    if config.hidden_act != "silu":
        refuse("hidden_act", "'silu' is needed; or use from_huggingface")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            refuse(name, "these layers have no such biases: use from_huggingface")
    if getattr(config, "router_jitter_noise", 0.0):
        refuse("router_jitter_noise", "set it to 0.0; or use from_huggingface")
    window = getattr(config, "sliding_window", None)
    used = family in ("mistral", "mixtral") or getattr(config, "use_sliding_window", False)
    if used and window is not None and window < length:
        remedy = f"at least max_sequence_length ({length}), or None: attention has no windows here"
        refuse("sliding_window", remedy)
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    fits = kind == "default" or (
        kind == "llama3" and all(rope.get(name) == value for name, value in LLAMA3.items())
    )
    if not fits:
        remedy = "rope_type default, or llama3 with its usual numbers; or use from_huggingface"
        refuse("rope_parameters", remedy)
