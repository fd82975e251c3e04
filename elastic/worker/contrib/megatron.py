"""Models of megatron-core's layers: `from_megatron`, and a small GPT for demos and tests.

Initial values are drawn whole on the CPU from (seed, layer, name), and sliced for the TP rank, so
that they do not depend on device or TP size.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.worker.contrib.gpt import GPTConfig
from elastic.worker.contrib.megatron_experts import SelfGroup
from elastic.worker.contrib.megatron_layers import (
    LEARNED,
    POSITIONS,
    ROPE,
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    LanguageModel,
    ProcessGroupCollection,
    TransformerConfig,
    is_routed,
    mark_split,
    parallel_state,
)
from elastic.worker.model import rng as randomness
from elastic.worker.model.checks import Described, description, whole_number
from elastic.worker.model.layers import (
    LayerStack,
    TensorParallel,
    describe_parameters,
    layer_spec,
)
from elastic.worker.model.optimizer import OptimizerSpec

T = TypeVar("T")
EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"
HEAD_WEIGHT = "output.weight"
OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "mlp.down.weight", "mlp.down")
"""Ends of the names of the last matrices of attention and MLP."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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
        "tensor_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "num_moe_experts",
        "moe_ffn_hidden_size",
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
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
        "async_tensor_model_parallel_allreduce",
        "pipeline_dtype",
        "autocast_dtype",
        "variable_seq_lengths",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "barrier_with_L1_time",
        "cross_entropy_loss_fusion",
        "timers",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "moe_permute_fusion",
        "moe_router_fusion",
    }
)
"""Fields that choose between ways to the same values. The layers use their defaults."""
BALANCING = ("aux_loss", "seq_aux_loss", "none")
"""Kinds of load balancing whose losses are those of one micro-batch."""
REMEDIES = {
    "pipeline_model_parallel_size": "leave it at 1: the runtime plans the stages itself",
    "virtual_pipeline_model_parallel_size": "leave it out: the runtime plans the stages itself",
    "fp16": "use bf16=True and params_dtype=torch.bfloat16",
    "recompute_granularity": "leave it out: the runtime plans which stages recompute",
}
"""What to do instead, for fields that users of megatron often set."""


def init_tensor_parallel(
    rank: int,
    size: int,
    store_path: str,
    device: torch.device | None = None,
    *,
    split_sequences: bool = False,
) -> TensorParallel:
    """Form this worker's tensor-parallel group, which is torch.distributed's WORLD.

    With `split_sequences` it is megatron's context-parallel group instead.

    `store_path` is a file that only the ranks of this group use; size 1 needs it too. A process
    has one group: a second call with the same rank and size returns it. NCCL needs a GPU for each
    rank; with fewer, gloo moves the tensors of the GPU.
    """
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, size):
        return TensorParallel(rank, size, dist.group.WORLD)
    on_gpus = device is not None and device.type == "cuda" and torch.cuda.device_count() >= size
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    kind = "context_parallel_size" if split_sequences else "tensor_model_parallel_size"
    parallel_state.initialize_model_parallel(**{kind: size})
    return TensorParallel(rank, size, dist.group.WORLD)


def from_megatron(
    config: TransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    position_embedding_type: str = ROPE,
    rotary_percent: float = 1.0,
    rotary_base: float = 10_000.0,
    rope_scaling_factor: float | None = None,
    share_embeddings_and_output_weights: bool = False,
    attention_mask: bool = False,
    micro_batch_size: int = 1,
    seed: int = 0,
) -> MegatronStack:
    """Return the layers of a language model of megatron-core: embedding, each block, and head.

    The arguments are those of megatron's `GPTModel`. A micro-batch has the fields of megatron's
    datasets: `tokens` and `labels`, int64 [rows, length], and as far as the source gives them
    `loss_mask` [rows, length], which weights the mean of the losses, and `position_ids`, for
    learned positions.

    Args:
        config: its fields decide the architecture; tensor_model_parallel_size is --nproc-per-node.
        position_embedding_type: rope | learned_absolute | none.
        rope_scaling_factor: factor of Llama 3.1's scaling of the frequencies; None: no scaling.
        attention_mask: whether micro-batches have the field `attention_mask`, bool [rows, 1,
            length, length], true where a token may not look: for packed documents. Every stage
            then reads the data.
        micro_batch_size: rows of a micro-batch, for the planner's first estimate of memory.
        seed: seed of initial values.

    Raises FieldError for a field whose value the layers would not follow.
    """
    if not isinstance(config, TransformerConfig):
        remedy = "a TransformerConfig of megatron.core.transformer.transformer_config"
        raise FieldError("config", description(config), remedy)
    model = LanguageModel(
        vocab_size=whole_number("vocab_size", vocab_size, 1),
        max_sequence_length=whole_number("max_sequence_length", max_sequence_length, 1),
        position_embedding_type=position_embedding_type,
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        rope_scaling_factor=rope_scaling_factor,
        attention_mask=bool(attention_mask),
    )
    if position_embedding_type not in POSITIONS:
        remedy = f"one of {', '.join(POSITIONS)}"
        raise FieldError("position_embedding_type", position_embedding_type, remedy)
    _check_config(config, model)
    return MegatronStack(
        config,
        model,
        tied=bool(share_embeddings_and_output_weights),
        micro_batch_size=whole_number("micro_batch_size", micro_batch_size, 1),
        seed=whole_number("seed", seed),
    )


class Kind(Enum):
    """Kinds of layers."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    EXPERTS = "experts"
    """A block whose MLP is a mixture of experts."""
    HEAD = "head"


class MegatronStack(LayerStack):
    """A language model: embedding, transformer layers and head. Call `tensor_parallel` before
    `build`."""

    def __init__(
        self,
        config: TransformerConfig,
        model: LanguageModel,
        *,
        tied: bool,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        self.config, self.model, self.seed = config, model, seed
        self._micro_batch_size = micro_batch_size
        last = config.num_layers + 1
        self.tied = (((0, EMBEDDING_WEIGHT), (last, HEAD_WEIGHT)),) if tied else ()

    @property
    def n_layers(self) -> int:
        return int(self.config.num_layers) + 2

    def tensor_parallel(
        self, rank: int, size: int, store_path: str, device: torch.device
    ) -> TensorParallel:
        split = self.config.context_parallel_size > 1
        return init_tensor_parallel(rank, size, store_path, device, split_sequences=split)

    def release(self) -> None:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        module = self.build_empty(index, device, tp)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self._initial(index, name, parameter, tp))
        return module

    def build_empty(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        configured = self.config.tensor_model_parallel_size * self.config.context_parallel_size
        if tp.size != configured:
            raise FieldError("tp", tp.size, f"this model was configured for {configured}")
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
        return self._module(index, device, groups)

    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        config, width = self.config, self.config.params_dtype.itemsize
        length, h, vocab = self.model.max_sequence_length, config.hidden_size, self.model.vocab_size
        tokens = length * self._micro_batch_size
        heads = config.num_attention_heads * config.kv_channels
        keys = config.num_query_groups * config.kv_channels
        matrices = 3 if config.gated_linear_unit else 2
        output = tokens * h * width

        def spec(kind: Kind) -> LayerSpec:
            inner = config.ffn_hidden_size * matrices
            if kind is Kind.EXPERTS:
                inner = config.moe_ffn_hidden_size * config.moe_router_topk * matrices
            weights = h * (2 * heads + 2 * keys + inner)
            kept = tokens * width * (5 * h + 2 * heads + 2 * keys + inner)
            flops = tokens * (2.0 * weights + 2.0 * length * heads + 250.0 * h)
            if kind is Kind.EMBEDDING:
                kept, flops = output, tokens * h * 250.0
            elif kind is Kind.HEAD:
                kept = output + 2 * tokens * vocab * 4
                flops = tokens * (2.0 * h * vocab + 60.0 * h + 400.0 * vocab)
            return layer_spec(
                self._parameters(kind),
                accumulate,
                optimizer,
                forward_s=flops / 5e10,
                activation_bytes=kept,
                output_bytes=0 if kind is Kind.HEAD else output,
            )

        return self._each(spec)

    def contents(self) -> tuple[str, ...]:
        return self._each(lambda kind: describe_parameters(self._parameters(kind)))

    def _each(self, describe: Callable[[Kind], T]) -> tuple[T, ...]:
        """Return one description per layer; layers of a kind have the same one."""
        kinds = [self._kind(index) for index in range(self.n_layers)]
        found = {kind: describe(kind) for kind in dict.fromkeys(kinds)}
        return tuple(found[kind] for kind in kinds)

    def _kind(self, index: int) -> Kind:
        if index == 0:
            return Kind.EMBEDDING
        if index == self.n_layers - 1:
            return Kind.HEAD
        return Kind.EXPERTS if is_routed(self.config, index) else Kind.BLOCK

    def _module(self, index: int, device: torch.device, groups: Any) -> nn.Module:
        """Return layer `index` with arbitrary values."""
        config = self._config_on(device)
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: nn.Module
            match self._kind(index):
                case Kind.EMBEDDING:
                    made = EmbeddingLayer(self.model, config, groups)
                case Kind.HEAD:
                    made = HeadLayer(self.model, config, groups)
                case _:
                    made = BlockLayer(index, self.model, config, groups)
        made = made.to(config.params_dtype)
        mark_split(made, split=config.context_parallel_size == 1)
        return made

    def _config_on(self, device: torch.device) -> TransformerConfig:
        config = copy.copy(self.config)
        for field in dataclasses.fields(config):
            if field.name in NO_INFLUENCE and field.default is not dataclasses.MISSING:
                setattr(config, field.name, field.default)
        config.use_cpu_initialization, config.perform_initialization = True, False
        config.deterministic_mode = device.type == "cuda"
        return config

    def _initial(self, index: int, name: str, parameter: Tensor, tp: TensorParallel) -> Tensor:
        """Return this rank's part of the parameter's initial value, float32 on the CPU.

        Tied parameters take the value of their first owner.
        """
        if name.endswith("bias"):
            return torch.zeros(parameter.shape)
        if "norm" in name:
            return torch.ones(parameter.shape)
        owner = next((group[0] for group in self.tied if (index, name) in group), (index, name))
        dim = getattr(parameter, "partition_dim", -1)
        drawn = torch.empty([n * tp.size if i == dim else n for i, n in enumerate(parameter.shape)])
        method = self.config.init_method
        if owner[0] == 0:
            method = self.config.embedding_init_method
        elif name.endswith(OUTPUTS):
            method = self.config.output_layer_init_method
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(randomness.derive_parameter_seed(self.seed, *owner))
            for matrix in drawn if drawn.dim() == 3 else [drawn]:  # one after the other: experts
                method(matrix)
        return drawn if dim < 0 else drawn.chunk(tp.size, dim)[tp.rank]

    def _parameters(self, kind: Kind) -> list[tuple[str, Tensor]]:
        """Return the whole parameters of the layers of a kind, without memory."""
        alone = SelfGroup()
        groups = ProcessGroupCollection(tp=alone, cp=alone, pp=alone)
        index = [self._kind(index) for index in range(self.n_layers)].index(kind)
        return list(self._module(index, torch.device("meta"), groups).named_parameters())


class GPTStack(MegatronStack):
    """A GPT with learned positions, LayerNorm and GELU, as `GPTConfig` describes it."""

    def __init__(self, gpt: GPTConfig) -> None:
        self.gpt = gpt
        dtype = TORCH_DTYPES[gpt.dtype]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = TransformerConfig(
                num_layers=gpt.layers,
                hidden_size=gpt.hidden,
                num_attention_heads=gpt.heads,
                tensor_model_parallel_size=gpt.tp,
                hidden_dropout=gpt.dropout,
                attention_dropout=gpt.dropout,
                params_dtype=dtype,
                bf16=gpt.dtype == "bf16",
            )
        model = LanguageModel(
            vocab_size=gpt.vocab,
            max_sequence_length=gpt.seq_len,
            position_embedding_type=LEARNED,
        )
        tied, rows = gpt.tie_embeddings, gpt.micro_batch_size
        super().__init__(config, model, tied=tied, micro_batch_size=rows, seed=gpt.seed)

    def _parameters(self, kind: Kind) -> list[tuple[str, Tensor]]:
        """The same, by numbers instead of names, as checkpoints of this model describe them."""
        h, dtype = self.gpt.hidden, TORCH_DTYPES[self.gpt.dtype]
        shapes: list[tuple[int, ...]]
        if kind is Kind.EMBEDDING:
            shapes = [(self.gpt.vocab, h), (self.gpt.seq_len, h)]
        elif kind is Kind.BLOCK:
            matrices = [(h, h), (3 * h, h), (4 * h, h), (h, 4 * h)]
            shapes = [(h,)] * 4 + [shape for rows, w in matrices for shape in ((rows, w), (rows,))]
        else:
            shapes = [(h,), (h,), (self.gpt.vocab, h)]
        return [
            (str(i), torch.empty(shape, dtype=dtype, device="meta"))
            for i, shape in enumerate(shapes)
        ]


def _check_config(config: TransformerConfig, model: LanguageModel) -> None:
    """Raise FieldError if a field of `config` asks for what the layers do not do."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    honoured = {name: value for name, value in given.items() if name in HONOURED}
    if config.params_dtype not in TORCH_DTYPES.values():
        remedy = "torch.float32 or torch.bfloat16"
        raise FieldError("config.params_dtype", Described(str(config.params_dtype)), remedy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = TransformerConfig(**honoured)
    for name, value in given.items():
        default = getattr(plain, name, None)
        if name not in HONOURED | NO_INFLUENCE and value != default:
            remedy = f"these layers do not follow it: leave it at {default!r}"
            remedy = REMEDIES.get(name, remedy)
            raise FieldError(f"config.{name}", Described(repr(value)), remedy)
    tp = config.tensor_model_parallel_size
    if config.context_parallel_size > 1:
        _check_context(config, model)
    if config.num_moe_experts is not None:
        _check_experts(config)
    split = {
        "config.num_attention_heads": config.num_attention_heads,
        "config.num_query_groups": config.num_query_groups,
        "config.ffn_hidden_size": config.ffn_hidden_size,
        "vocab_size": model.vocab_size,
    }
    for name, number in split.items():
        if number % tp:
            remedy = f"it must be a multiple of config.tensor_model_parallel_size ({tp})"
            raise FieldError(name, number, remedy)
    if not 0 < model.rotary_percent <= 1 or not math.isfinite(model.rotary_percent):
        raise FieldError("rotary_percent", model.rotary_percent, "above 0 and at most 1")
    if not model.rotary_base > 0 or not math.isfinite(model.rotary_base):
        raise FieldError("rotary_base", model.rotary_base, "above 0")


def _check_experts(config: TransformerConfig) -> None:
    """Raise FieldError for a mixture of experts that `Experts` does not compute."""
    tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
    if ep != tp:
        remedy = f"it must be tensor_model_parallel_size ({tp}): the ranks of a node share both"
        raise FieldError("config.expert_model_parallel_size", ep, remedy)
    if config.num_moe_experts % ep:
        remedy = f"it must be a multiple of expert_model_parallel_size ({ep})"
        raise FieldError("config.num_moe_experts", config.num_moe_experts, remedy)
    if config.add_bias_linear:
        raise FieldError("config.add_bias_linear", True, "experts have no biases: use False")
    kind = config.moe_router_load_balancing_type
    if kind not in BALANCING:
        remedy = f"one of {', '.join(BALANCING)}"
        raise FieldError("config.moe_router_load_balancing_type", kind, remedy)


def _check_context(config: TransformerConfig, model: LanguageModel) -> None:
    """Raise FieldError for what ranks that split sequences cannot compute."""
    size = config.context_parallel_size
    if config.tensor_model_parallel_size > 1:
        remedy = "the ranks of a node split layers or sequences: one of the two must be 1"
        raise FieldError("config.context_parallel_size", size, remedy)
    if config.num_moe_experts is not None:
        remedy = "use tensor and expert parallelism for a mixture of experts"
        raise FieldError("config.context_parallel_size", size, remedy)
    if config.hidden_dropout or config.attention_dropout:
        dropout = max(config.hidden_dropout, config.attention_dropout)
        remedy = "set both dropouts to 0.0 with context parallelism"
        raise FieldError("config.hidden_dropout, config.attention_dropout", dropout, remedy)
    if model.max_sequence_length % (2 * size):
        remedy = f"it must be a multiple of 2 x context_parallel_size ({2 * size})"
        raise FieldError("max_sequence_length", model.max_sequence_length, remedy)
