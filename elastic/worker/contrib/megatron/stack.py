"""Models of megatron-core's layers: `from_megatron`, and a small GPT for demos and tests.

Initial values are drawn whole on the CPU from (seed, layer, name), and sliced for the TP rank, so
that they do not depend on device or TP size.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.worker.contrib.folders import INDEX, SINGLE, is_file
from elastic.worker.contrib.megatron.checks import NO_INFLUENCE, check_config, check_model
from elastic.worker.contrib.megatron.experts import SelfGroup, has_shared_gate
from elastic.worker.contrib.megatron.gpt import GPTConfig
from elastic.worker.contrib.megatron.layers import (
    LEARNED,
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
from elastic.worker.model.checks import whole_number
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
OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "down.weight", "mlp.down")
"""Ends of the names of the last matrices of attention and MLP."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    weights: str | Path | None = None,
    micro_batch_size: int = 1,
    seed: int = 0,
) -> MegatronStack:
    """Return the layers of a language model of megatron-core: embedding, each block, and head.

    The arguments are those of megatron's `GPTModel`. A micro-batch has the fields of megatron's
    datasets: `tokens` and `labels` (the next tokens), int64 [rows, length]; optionally `loss_mask`
    [rows, length], which weights the mean of the losses, and `position_ids`, for learned positions.

    Args:
        config: its fields decide the architecture; tensor_model_parallel_size is --nproc-per-node.
            variable_seq_lengths allows rows of different lengths in different micro-batches.
        position_embedding_type: rope | learned_absolute | none.
        rope_scaling_factor: factor of Llama 3.1's scaling of the frequencies; None: no scaling.
        attention_mask: whether micro-batches have the field `attention_mask`, bool [rows, 1,
            length, length], true where a token may not look: for packed documents. Every stage
            then reads the data.
        weights: folder with the initial values: what megatron's --save has written with
            --ckpt-format torch_dist, or the safetensors files of a transformers model, see
            `megatron_config`. Optimizer and step begin anew.
        micro_batch_size: rows of a micro-batch, for the planner's first estimate of memory.
        seed: seed of initial values.

    Raises FieldError for a field whose value the layers would not follow.
    """
    model = LanguageModel(
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        position_embedding_type=position_embedding_type,
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        rope_scaling_factor=rope_scaling_factor,
        share_embeddings_and_output_weights=share_embeddings_and_output_weights,
        attention_mask=attention_mask,
    )
    check_model(model)
    return MegatronStack(
        check_config(config, model),
        model,
        micro_batch_size=whole_number("micro_batch_size", micro_batch_size, 1),
        seed=whole_number("seed", seed),
        weights=None if weights is None else _stored(weights, config, model),
    )


class StoredParameters(Protocol):
    """Initial values of whole parameters."""

    def check(self, names: Iterable[tuple[int, str]], /) -> None:
        """Raise FieldError for a stored parameter that is not among these (layer, name)."""

    def value(self, layer: int, name: str, shape: Sequence[int], *, gated: bool) -> Tensor:
        """Return parameter `name` of a layer, of this shape. `gated`: MLPs are gated. Raises
        FieldError."""


def _stored(
    weights: str | Path, config: TransformerConfig, model: LanguageModel
) -> StoredParameters:
    if isinstance(weights, str | Path) and any(is_file(Path(weights) / n) for n in (INDEX, SINGLE)):
        from elastic.worker.contrib.huggingface.weights import weights_in  # needs the extra hf
        from elastic.worker.contrib.megatron.huggingface.weights import HuggingFaceWeights

        found = weights_in(Path(weights))
        assert found is not None
        tied = model.share_embeddings_and_output_weights
        return HuggingFaceWeights(Path(weights), found, config, tied=tied)
    from elastic.worker.contrib.megatron.checkpoint import MegatronCheckpoint  # slow

    return MegatronCheckpoint(weights, config.num_layers)


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
        micro_batch_size: int,
        seed: int,
        weights: StoredParameters | None = None,
    ) -> None:
        self.config, self.model, self.seed, self._weights = config, model, seed, weights
        self.varying = bool(config.variable_seq_lengths)
        self._micro_batch_size = micro_batch_size
        if model.share_embeddings_and_output_weights:
            last = config.num_layers + 1
            self.tied = (((0, EMBEDDING_WEIGHT), (last, HEAD_WEIGHT)),)
        if weights is not None:
            kinds = [self._kind(layer) for layer in range(self.n_layers)]
            names = {kind: [name for name, _ in self._parameters(kind)] for kind in set(kinds)}
            weights.check((i, name) for i, kind in enumerate(kinds) for name in names[kind])

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
            remedy = (
                f"give Trainer(tp={configured}) and --nproc-per-node {configured}, as the config"
            )
            raise FieldError("tp", tp.size, f"{remedy} of this model asks")
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
        return self._module(index, device, groups)

    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        config, width = self.config, self.config.params_dtype.itemsize
        h, vocab = config.hidden_size, self.model.vocab_size
        tokens = self.model.max_sequence_length * self._micro_batch_size
        output = tokens * h * width

        def spec(kind: Kind) -> LayerSpec:
            kept = tokens * width * (5 * h + self._columns(kind))
            others = 250.0 * h  # operations of a token that are no products of matrices
            if kind is Kind.EMBEDDING:
                kept = output
            elif kind is Kind.HEAD:
                kept = output + 2 * tokens * vocab * 4
                others = 60.0 * h + 400.0 * vocab
            flops = tokens * (self._products(kind) + others)
            return layer_spec(
                self._parameters(kind),
                accumulate,
                optimizer,
                forward_s=flops / 5e10,
                activation_bytes=kept,
                output_bytes=0 if kind is Kind.HEAD else output,
            )

        return self._each(spec)

    def training_flops(self, tokens: int) -> float:
        """Return three times the products of the forward pass. Rows have the largest length, and
        attention counts the pairs of tokens that a causal mask allows."""
        return 3.0 * tokens * sum(self._each(self._products))

    def _columns(self, kind: Kind) -> int:
        """Return the columns of all matrices of a block. Of the routed experts, the chosen ones
        count."""
        config = self.config
        inner = config.ffn_hidden_size
        if kind is Kind.EXPERTS:
            inner = config.moe_ffn_hidden_size * config.moe_router_topk
            inner += config.moe_shared_expert_intermediate_size or 0
        heads = config.num_attention_heads + config.num_query_groups
        matrices = 3 if config.gated_linear_unit else 2
        return int(2 * heads * config.kv_channels + inner * matrices)

    def _products(self, kind: Kind) -> float:
        """Return the operations of a token in the products of matrices of a forward pass."""
        config = self.config
        match kind:
            case Kind.EMBEDDING:
                return 0.0
            case Kind.HEAD:
                return 2.0 * int(config.hidden_size) * self.model.vocab_size
        heads = int(config.num_attention_heads * config.kv_channels)
        pairs = 2.0 * self.model.max_sequence_length * heads
        columns = self._columns(kind)
        if kind is Kind.EXPERTS:
            columns += config.num_moe_experts  # of the router
            columns += int(has_shared_gate(config))
        return 2.0 * int(config.hidden_size) * columns + pairs

    def contents(self) -> tuple[str, ...]:
        return self._each(lambda kind: describe_parameters(self._parameters(kind)))

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each whole parameter of a layer, by name."""
        return {name: tuple(p.shape) for name, p in self._parameters(self._kind(index))}

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
        """Return this rank's part of the parameter's initial value, on the CPU.

        Tied parameters take the value of their first owner.
        """
        owner = next((group[0] for group in self.tied if (index, name) in group), (index, name))
        dim = getattr(parameter, "partition_dim", -1)
        shape = [n * tp.size if i == dim else n for i, n in enumerate(parameter.shape)]
        if self._weights is not None:
            whole = self._weights.value(*owner, shape, gated=self.config.gated_linear_unit)
            return whole if dim < 0 else whole.chunk(tp.size, dim)[tp.rank]
        if name.endswith("bias"):
            return torch.zeros(parameter.shape)
        if "norm" in name:
            return torch.ones(parameter.shape)
        drawn = torch.empty(shape)
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
            share_embeddings_and_output_weights=gpt.tie_embeddings,
        )
        super().__init__(config, model, micro_batch_size=gpt.micro_batch_size, seed=gpt.seed)

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
