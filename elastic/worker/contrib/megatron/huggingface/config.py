"""From the config of a transformers model to the arguments of `from_megatron`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic.domain.errors import FieldError, describe
from elastic.worker.contrib.huggingface.stack import config_in, refuse_quantized
from elastic.worker.contrib.megatron.layers import TransformerConfig
from elastic.worker.model.checks import Described, description, whole_number

DENSE = ("llama", "mistral", "qwen2", "qwen3")
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*DENSE, *ROUTED)
"""Values of `model_type` in a config.json."""
FOLDER = "a folder with the config.json of a transformers model is needed"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LLAMA3: dict[str, float] = {
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

    The loss of a mixture's routers is megatron's, for each block by itself. Its coefficient is such
    that it equals that of transformers if the experts are used evenly; without
    `output_router_logits` it is left out. Raises FieldError for another family, for a model that
    the layers do not compute, or for a wrong field.
    """
    if not isinstance(folder, str | Path):
        raise FieldError("folder", description(folder), FOLDER)
    return config_and_arguments(config_in(Path(folder)), max_sequence_length, **fields)


def config_and_arguments(
    config: Any, max_sequence_length: int, **fields: Any
) -> tuple[TransformerConfig, dict[str, Any]]:
    """The same, for a config of transformers in memory."""
    length = whole_number("max_sequence_length", max_sequence_length, 1)
    family = config.model_type
    if family not in FAMILIES:
        remedy = f"one of {', '.join(FAMILIES)}; or from_huggingface, which takes most families"
        raise FieldError("model_type", family, remedy)
    _refuse_others(config, family, length)
    rope, heads = config.rope_parameters, config.num_attention_heads
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
        "add_qkv_bias": config.qkv_bias if family == "qwen2_moe" else family == "qwen2",
        "qk_layernorm": family.startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
        "init_method_std": config.initializer_range,
        # megatron's own default draws smaller values in deep models.
        "output_layer_init_method": partial(torch.nn.init.normal_, std=config.initializer_range),
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
    return made, {
        "vocab_size": config.vocab_size,
        "max_sequence_length": length,
        "rotary_base": float(rope["rope_theta"]),
        "rope_scaling_factor": float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
    }


def _types(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the type of the parameters, unless it is among `fields`."""
    dtype = fields.get("params_dtype") or getattr(config, "dtype", None) or torch.float32
    if dtype is torch.float16:  # of files for inference
        dtype = torch.bfloat16
    return {"params_dtype": dtype, "bf16": dtype is torch.bfloat16}


def _experts(config: Any, family: str) -> dict[str, Any]:
    inner, chosen = config.intermediate_size, config.num_experts_per_tok
    renormalised, layers = True, [1] * config.num_hidden_layers
    if family != "mixtral":
        inner, renormalised = config.moe_intermediate_size, bool(config.norm_topk_prob)
        every, dense = config.decoder_sparse_step, config.mlp_only_layers or []
        layers = [int(i not in dense and (i + 1) % every == 0) for i in range(len(layers))]
    # For evenly used experts, the loss is 1 for each block here, and the number of chosen experts
    # for all blocks together there.
    scale = chosen / max(1, sum(layers)) if config.output_router_logits else 0.0
    shared: dict[str, Any] = {}
    if family == "qwen2_moe":  # configs of Qwen3 MoE may have this field, too, without influence
        shared["moe_shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        shared["moe_shared_expert_gate"] = True
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not renormalised,
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_load_balancing_type": "aux_loss" if scale else "none",
        "moe_aux_loss_coeff": config.router_aux_loss_coef * scale,
        **shared,
    }


def _refuse_others(config: Any, family: str, length: int) -> None:
    """Raise FieldError for a field with which the layers would compute another model."""

    def refuse(name: str, remedy: str, value: object = None) -> None:
        shown = description(getattr(config, name, value) if value is None else value)
        raise FieldError(f"{type(config).__name__}.{name}", shown, remedy)

    if config.hidden_act != "silu":
        refuse("hidden_act", "'silu' is needed; or use from_huggingface")
    if not getattr(config, "is_causal", True):
        refuse("is_causal", "these layers do not look ahead: use from_huggingface")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            refuse(name, "these layers have no such biases: use from_huggingface")
    refuse_quantized(config)
    if getattr(config, "dtype", None) not in (None, *DTYPES):
        what = Described(str(config.dtype))
        refuse("dtype", f"one of {', '.join(map(str, DTYPES))}", what)
    window = getattr(config, "sliding_window", None)
    used = family in ("mistral", "mixtral") or getattr(config, "use_sliding_window", False)
    if used and window is not None and window < length:
        remedy = f"at least max_sequence_length ({length}), or None: attention has no windows here"
        refuse("sliding_window", remedy)
    if family in ROUTED:
        _refuse_routing(config, family, refuse)
    _refuse_rotary(config.rope_parameters, refuse)


def _refuse_routing(config: Any, family: str, refuse: Callable[..., None]) -> None:
    if getattr(config, "router_jitter_noise", 0.0):
        refuse("router_jitter_noise", "set it to 0.0; or use from_huggingface")
    renormalised = family == "mixtral" or config.norm_topk_prob
    if renormalised and config.num_experts_per_tok < 2:
        refuse("num_experts_per_tok", "at least 2, because their weights are made to sum up to 1")
    names = ["num_experts", "decoder_sparse_step"]
    if family == "qwen2_moe":
        names.append("shared_expert_intermediate_size")
    for name in names:
        if getattr(config, name, 1) < 1:
            refuse(name, "a whole number from 1 up")
    if family == "qwen2_moe" and not hasattr(TransformerConfig, "moe_shared_expert_gate"):
        refuse("shared_expert_intermediate_size", "megatron-core 0.16 or newer is needed")


def _refuse_rotary(rope: Any, refuse: Callable[..., None]) -> None:
    """Refuse other rotary positions than the usual ones and those of Llama 3.1."""
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if kind not in ("default", "llama3") or "rope_theta" not in rope:
        remedy = "default or llama3, with a rope_theta; or use from_huggingface"
        refuse("rope_parameters.rope_type", remedy, kind or Described("no such value"))
    wanted = LLAMA3 if kind == "llama3" else {}
    for name in sorted({*rope, *wanted} - {"rope_type", "rope_theta", "factor"}):
        value, usual = rope.get(name), wanted.get(name)
        if name == "partial_rotary_factor" and value in (None, 1.0):
            continue
        if value != usual:
            remedy = f"{usual} is a constant of megatron-core" if usual else "leave it out"
            refuse(f"rope_parameters.{name}", f"{remedy}; or use from_huggingface", value)
