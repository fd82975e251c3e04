"""Checks of a TransformerConfig and of the other arguments of `from_megatron`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elastic.domain.errors import FieldError, describe
from elastic.worker.contrib.megatron.layers import (
    POSITIONS,
    ROPE,
    LanguageModel,
    TransformerConfig,
)
from elastic.worker.model.checks import Described, description, whole_number

DTYPES = (torch.float32, torch.bfloat16)
HONOURED = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "kv_channels",
        "hidden_dropout",
        "attention_dropout",
        "normalization",
        "layernorm_epsilon",
        "qk_layernorm",
        "add_bias_linear",
        "add_qkv_bias",
        "gated_linear_unit",
        "activation_func",
        "rotary_interleaved",
        "no_rope_freq",
        "init_method",
        "output_layer_init_method",
        "embedding_init_method",
        "init_method_std",
        "embedding_init_method_std",
        "params_dtype",
        "bf16",
        "variable_seq_lengths",
        "tensor_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_layer_freq",
        "moe_router_topk",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
    }
)
"""Fields of a TransformerConfig that may have any value: the layers do what they say."""
NO_INFLUENCE = frozenset(
    {
        "use_cpu_initialization",
        "perform_initialization",
        "init_model_with_meta_device",
        "deterministic_mode",
        "attention_backend",
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
        "async_tensor_model_parallel_allreduce",
        "pipeline_dtype",
        "autocast_dtype",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "barrier_with_L1_time",
        "cross_entropy_loss_fusion",
        "timers",
        "moe_grouped_gemm",
        "moe_shared_expert_overlap",
        "moe_token_dispatcher_type",
        "moe_permute_fusion",
        "moe_router_fusion",
    }
)
"""Fields that choose between ways to the same values. The layers use the fields' defaults."""
REMEDIES = {
    "pipeline_model_parallel_size": "leave it at 1: the runtime plans the stages itself",
    "virtual_pipeline_model_parallel_size": "leave it out: the runtime plans the stages itself",
    "bias_activation_fusion": "leave it out: for GELU it computes another function",
    "fp16": "use bf16=True and params_dtype=torch.bfloat16",
    "recompute_granularity": "leave it out: the runtime plans which stages recompute",
}
"""What to do instead, for fields that users of megatron often set."""


SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
)
"""Fields that are whole numbers from 1 up."""
NORMS = ("LayerNorm", "RMSNorm")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_dtype": (None, "fp32", "fp64"),
}
"""Fields of a mixture of experts, and what they may be."""


def check_model(model: LanguageModel) -> None:
    """Raise FieldError for a wrong argument of `from_megatron`."""
    whole_number("vocab_size", model.vocab_size, 1)
    whole_number("max_sequence_length", model.max_sequence_length, 1)
    if model.position_embedding_type not in POSITIONS:
        _refuse("position_embedding_type", model.position_embedding_type, _one_of(POSITIONS))
    for name in ("attention_mask", "share_embeddings_and_output_weights"):
        if not isinstance(getattr(model, name), bool):
            _refuse(name, getattr(model, name), "True or False")
    _number("rotary_percent", model.rotary_percent, above=0, most=1)
    _number("rotary_base", model.rotary_base, above=0)
    if model.rope_scaling_factor is not None:
        _number("rope_scaling_factor", model.rope_scaling_factor, above=0)
        if model.position_embedding_type != ROPE:
            remedy = "leave it out, or use position_embedding_type='rope'"
            _refuse("rope_scaling_factor", model.rope_scaling_factor, remedy)


def check_config(config: object, model: LanguageModel) -> TransformerConfig:
    """Return `config`. Raise FieldError if it asks for what the layers do not do."""
    if not isinstance(config, TransformerConfig):
        remedy = "a TransformerConfig of megatron.core.transformer.transformer_config"
        raise FieldError("config", description(config), remedy)
    _check_values(config, model)
    names = [field.name for field in dataclasses.fields(TransformerConfig)]
    # The type of the dispatcher has no influence, but megatron compares it with other fields.
    honoured = HONOURED | {"moe_token_dispatcher_type"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = TransformerConfig(**{n: getattr(config, n) for n in names if n in honoured})
    except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
        what = Described(f"a config that was changed after it was made ({describe(error)})")
        raise FieldError("config", what, "make it anew with the values that you want") from error
    for name in names:
        value, default = getattr(config, name), getattr(plain, name)
        whole_experts = name == "expert_tensor_parallel_size" and value == 1
        if name not in HONOURED | NO_INFLUENCE and value != default and not whole_experts:
            remedy = f"these layers do not follow it: leave it at {default!r}"
            raise FieldError(f"config.{name}", description(value), REMEDIES.get(name, remedy))
    if config.context_parallel_size > 1:
        _check_context(config, model)
    if config.num_moe_experts is not None:
        _check_experts(config)
    _check_shared_experts(config)
    _check_splits(config, model)
    return config


def _check_values(config: TransformerConfig, model: LanguageModel) -> None:
    """Raise FieldError for a value that no layer can have."""
    for name in SIZES:
        whole_number(f"config.{name}", getattr(config, name), 1)
    if config.num_attention_heads % config.num_query_groups:
        remedy = f"it must divide num_attention_heads ({config.num_attention_heads})"
        _refuse("config.num_query_groups", config.num_query_groups, remedy)
    turned = int(config.kv_channels * model.rotary_percent)
    if model.position_embedding_type == ROPE and (turned % 2 or not turned):
        remedy = "kv_channels x rotary_percent must be even, because rope turns pairs of channels"
        _refuse("config.kv_channels", config.kv_channels, remedy)
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(config, name)
        _number(f"config.{name}", value, least=0, most=1)
    _number("config.layernorm_epsilon", config.layernorm_epsilon, above=0)
    if config.normalization not in NORMS:
        _refuse("config.normalization", config.normalization, _one_of(NORMS))
    if config.params_dtype not in DTYPES:
        what = Described(str(config.params_dtype))
        raise FieldError("config.params_dtype", what, "torch.float32 or torch.bfloat16")
    if config.bf16 and config.params_dtype != torch.bfloat16:
        raise FieldError("config.bf16", True, "give params_dtype=torch.bfloat16 too")
    example = torch.linspace(-1, 1, 4)
    remedy = "a function: tensor -> tensor of the same shape, as torch.nn.functional.silu"
    _check_function("config.activation_func", config.activation_func, example, remedy)
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        empty = torch.full((8, 8), torch.nan)
        remedy = "a function that fills its argument, as torch.nn.init.xavier_uniform_"
        _check_function(f"config.{name}", getattr(config, name), empty, remedy)
        if empty.isnan().any():
            raise FieldError(f"config.{name}", description(getattr(config, name)), remedy)


def _check_function(field: str, function: object, example: Tensor, remedy: str) -> None:
    """Call `function(example)`. Raise FieldError if that fails, or gives another shape."""
    if not isinstance(function, Callable):  # type: ignore[arg-type]
        raise FieldError(field, description(function), remedy)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            result = function(example)  # type: ignore[operator]
    except Exception as error:
        what = Described(f"{description(function)} ({describe(error)})")
        raise FieldError(field, what, remedy) from error
    if isinstance(result, Tensor) and result.shape == example.shape:
        return
    if "init_method" not in field:
        raise FieldError(field, description(function), remedy)


def _check_context(config: TransformerConfig, model: LanguageModel) -> None:
    """Raise FieldError for what ranks that split sequences cannot compute."""
    size = config.context_parallel_size
    if config.tensor_model_parallel_size > 1:
        remedy = "the ranks of a node split layers or sequences: one of the two must be 1"
        _refuse("config.context_parallel_size", size, remedy)
    if config.num_moe_experts is not None:
        remedy = "use tensor and expert parallelism for a mixture of experts"
        _refuse("config.context_parallel_size", size, remedy)
    if config.hidden_dropout or config.attention_dropout:
        dropout = max(config.hidden_dropout, config.attention_dropout)
        remedy = "set both dropouts to 0.0 with context parallelism"
        _refuse("config.hidden_dropout, config.attention_dropout", dropout, remedy)
    if model.max_sequence_length % (2 * size):
        remedy = f"it must be a multiple of 2 x context_parallel_size ({2 * size})"
        _refuse("max_sequence_length", model.max_sequence_length, remedy)


def _check_experts(config: TransformerConfig) -> None:
    """Raise FieldError for a mixture of experts that `Experts` does not compute."""
    tp, ep, experts = (
        config.tensor_model_parallel_size,
        config.expert_model_parallel_size,
        config.num_moe_experts,
    )
    if ep != tp:
        remedy = f"it must be tensor_model_parallel_size ({tp}): the ranks of a node share both"
        _refuse("config.expert_model_parallel_size", ep, remedy)
    if experts % ep:
        remedy = f"it must be a multiple of expert_model_parallel_size ({ep})"
        _refuse("config.num_moe_experts", experts, remedy)
    if config.add_bias_linear:
        _refuse("config.add_bias_linear", True, "experts have no biases: use False")
    whole_number("config.moe_ffn_hidden_size", config.moe_ffn_hidden_size, 1)
    whole_number("config.moe_router_topk", config.moe_router_topk, 1, experts)
    every, layers = config.moe_layer_freq, config.num_layers
    if isinstance(every, Sequence) and not isinstance(every, str):
        if len(every) != layers or not set(every) <= {0, 1}:
            _refuse("config.moe_layer_freq", str(every), f"a list of {layers} numbers, 0 or 1")
    else:
        whole_number("config.moe_layer_freq", every, 1)
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if isinstance(value, list) or value not in known:
            remedy = f"{_one_of(known)}; one of them, and no list"
            _refuse(f"config.{name}", value, remedy)
    _number("config.moe_aux_loss_coeff", config.moe_aux_loss_coeff, least=0)
    if config.moe_z_loss_coeff is not None:
        _number("config.moe_z_loss_coeff", config.moe_z_loss_coeff, least=0)


def _check_shared_experts(config: TransformerConfig) -> None:
    """Raise FieldError for shared experts that `Experts` does not compute."""
    size = config.moe_shared_expert_intermediate_size
    gate = getattr(config, "moe_shared_expert_gate", False)  # megatron-core 0.15 has no such field
    if not isinstance(gate, bool):
        _refuse("config.moe_shared_expert_gate", gate, "True or False")
    if size is None:
        if gate:
            remedy = "set moe_shared_expert_intermediate_size too"
            _refuse("config.moe_shared_expert_gate", gate, remedy)
        return
    name = "config.moe_shared_expert_intermediate_size"
    whole_number(name, size, 1)
    if config.num_moe_experts is None:
        _refuse(name, size, "set num_moe_experts too: shared experts are beside others")


def _check_splits(config: TransformerConfig, model: LanguageModel) -> None:
    """Raise FieldError for what tensor-parallel ranks cannot split evenly."""
    tp = config.tensor_model_parallel_size
    split = {
        "config.num_attention_heads": config.num_attention_heads,
        "config.num_query_groups": config.num_query_groups,
        "config.ffn_hidden_size": config.ffn_hidden_size,
        "vocab_size": model.vocab_size,
    }
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None:
        split["config.moe_shared_expert_intermediate_size"] = shared
    for name, number in split.items():
        if number % tp:
            remedy = f"it must be a multiple of config.tensor_model_parallel_size ({tp})"
            _refuse(name, number, remedy)


def _number(
    field: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Raise FieldError unless `value` is a finite number in this range."""
    wanted = f"a number above {above:g}" if above > -math.inf else f"a number from {least:g} up"
    wanted += f", and at most {most:g}" if most < math.inf else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(field, description(value), wanted)
    if not (math.isfinite(value) and value > above and least <= value <= most):
        raise FieldError(field, value, wanted)


def _one_of(known: Sequence[object]) -> str:
    return f"one of {', '.join(map(str, known))}"


def _refuse(field: str, value: object, remedy: str) -> None:
    raise FieldError(field, description(value), remedy)
