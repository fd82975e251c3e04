"""A GPT from megatron-core's layers. No other file imports megatron.core.

The embedding, each transformer layer, and the head (final norm, output matrix, cross entropy) are
one layer each. Hidden states are [sequence, batch, hidden], megatron's order. Initial values are
drawn whole on the CPU from (seed, layer, name), and sliced for the TP rank, so that they do not
depend on device or TP size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.domain.errors import FieldError, needs_extra
from elastic.domain.types import Accumulate, LayerSpec
from elastic.worker.contrib.gpt import GPTConfig
from elastic.worker.contrib.linear import linear
from elastic.worker.model import rng as randomness
from elastic.worker.model.layers import (
    LayerStack,
    TensorParallel,
    describe_parameters,
    layer_spec,
)
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable `torch.compile` inside the block, if there is no GPU.

    megatron-core compiles fused helpers while it is imported, which loads the whole compiler. That
    takes 1.7 s of CPU time per worker start, and only a GPU gains from these helpers.
    """

    def identity(function: Any = None, **options: Any) -> Any:
        return function if function is not None else identity

    compiler = torch.compile
    if not torch.cuda.is_available():
        torch.compile = identity  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


with (
    needs_extra("megatron", "A GPT from megatron-core layers"),
    uncompiled(),
    warnings.catch_warnings(),
):
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEFusedMLP  # noqa: F401 - imported by layers
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: F401 - imported by layers
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"
HEAD_WEIGHT = "output.weight"
INIT_STD = 0.02
SHARD_DIMS = {
    ColumnParallelLinear: {"weight": 0, "bias": 0},
    RowParallelLinear: {"weight": 1},
    VocabParallelEmbedding: {"weight": 0},
}
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def init_tensor_parallel(
    rank: int, size: int, store_path: str, device: torch.device | None = None
) -> TensorParallel:
    """Form this worker's tensor-parallel group, which is torch.distributed's WORLD.

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
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    return TensorParallel(rank, size, dist.group.WORLD)


class SDPAttention(nn.Module):
    """Causal core attention for megatron on `scaled_dot_product_attention`, CPU or GPU."""

    def __init__(self, config: TransformerConfig, **others: Any) -> None:
        super().__init__()
        self.dropout = float(config.attention_dropout)
        self.rank: int = others["pg_collection"].tp.rank()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **others: Any
    ) -> Tensor:
        """[s, b, heads, d] each -> [s, b, heads * d]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        with randomness.rank_stream(self.rank, query.device) if dropout else nullcontext():
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True
            )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class EmbeddingLayer(nn.Module):
    """Embeds bytes and positions as hidden states."""

    def __init__(
        self, gpt: GPTConfig, config: TransformerConfig, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.embedding = LanguageModelEmbedding(config, gpt.vocab, gpt.seq_len, tp_group=groups.tp)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        device = self.embedding.position_embeddings.weight.device
        tokens = microbatch.fields["tokens"].to(device, non_blocking=True)
        positions = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
        out: Tensor = self.embedding(tokens, positions)
        return out


class BlockLayer(nn.Module):
    """One transformer layer."""

    def __init__(
        self, index: int, config: TransformerConfig, groups: ProcessGroupCollection, spec: Any
    ) -> None:
        super().__init__()
        self.layer = build_module(spec, config=config, layer_number=index, pg_collection=groups)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        out: Tensor = self.layer(hidden)[0]
        return out


class HeadLayer(nn.Module):
    """Final norm, output matrix and mean cross entropy."""

    def __init__(
        self, gpt: GPTConfig, config: TransformerConfig, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.norm = WrappedTorchNorm(
            config=config, hidden_size=gpt.hidden, eps=config.layernorm_epsilon
        )
        self.output = ColumnParallelLinear(
            gpt.hidden,
            gpt.vocab,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=groups.tp,
        )

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        logits, _ = self.output(self.norm(hidden))
        labels = (
            microbatch.fields["labels"]
            .to(hidden.device, non_blocking=True)
            .transpose(0, 1)
            .contiguous()
        )
        loss: Tensor = vocab_parallel_cross_entropy(logits.float(), labels).mean()
        return loss


class GPTStack(LayerStack):
    """A GPT: embedding, transformer layers and head. Call `tensor_parallel` before `build`."""

    def __init__(self, gpt: GPTConfig) -> None:
        self.gpt, self.seed = gpt, gpt.seed
        last = gpt.n_layers - 1
        self.tied = (((0, EMBEDDING_WEIGHT), (last, HEAD_WEIGHT)),) if gpt.tie_embeddings else ()

    @property
    def n_layers(self) -> int:
        return self.gpt.n_layers

    def tensor_parallel(
        self, rank: int, size: int, store_path: str, device: torch.device
    ) -> TensorParallel:
        return init_tensor_parallel(rank, size, store_path, device)

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
        if tp.size != self.gpt.tp:
            raise FieldError("tp", tp.size, f"this model was configured for {self.gpt.tp}")
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
        with torch.device(device):
            module = self._module(index, self._config(device), groups).to(
                TORCH_DTYPES[self.gpt.dtype]
            )
        for part in module.modules():
            for name, dim in SHARD_DIMS.get(type(part), {}).items():
                _mark_sharded(getattr(part, name), dim)
            if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                part._forward_impl = linear
        return module

    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        gpt, width = self.gpt, TORCH_DTYPES[self.gpt.dtype].itemsize
        tokens, h = gpt.seq_len * gpt.micro_batch_size, gpt.hidden
        output = tokens * h * width
        flops = [
            tokens * h * 250.0,
            tokens * (24.0 * h * h + 2.0 * gpt.seq_len * h + 250.0 * h),
            tokens * (2.0 * h * gpt.vocab + 60.0 * h + 400.0 * gpt.vocab),
        ]
        kept = [output, 17 * output, output + 2 * tokens * gpt.vocab * 4]
        described = [
            layer_spec(
                self._parameters(kind),
                accumulate,
                optimizer,
                forward_s=flops[kind] / 5e10,
                activation_bytes=kept[kind],
                output_bytes=output if kind < 2 else 0,
            )
            for kind in range(3)
        ]
        return (described[0], *(described[1] for _ in range(gpt.layers)), described[2])

    def contents(self) -> tuple[str, ...]:
        described = [describe_parameters(self._parameters(kind)) for kind in range(3)]
        return (described[0], *(described[1] for _ in range(self.gpt.layers)), described[2])

    def _module(
        self, index: int, config: TransformerConfig, groups: ProcessGroupCollection
    ) -> nn.Module:
        if index == 0:
            return EmbeddingLayer(self.gpt, config, groups)
        if index == self.n_layers - 1:
            return HeadLayer(self.gpt, config, groups)
        return BlockLayer(index, config, groups, self._spec)

    @cached_property
    def _spec(self) -> Any:
        """megatron's layer specification, with attention and norm that run on CPU and GPU."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = SDPAttention
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
        return spec

    def _config(self, device: torch.device) -> TransformerConfig:
        gpt = self.gpt
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TransformerConfig(
                num_layers=gpt.layers,
                hidden_size=gpt.hidden,
                num_attention_heads=gpt.heads,
                tensor_model_parallel_size=gpt.tp,
                hidden_dropout=gpt.dropout,
                attention_dropout=gpt.dropout,
                params_dtype=TORCH_DTYPES[gpt.dtype],
                bf16=gpt.dtype == "bf16",
                use_cpu_initialization=True,
                perform_initialization=False,
                deterministic_mode=device.type == "cuda",
            )

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
        whole = [n * tp.size if i == dim else n for i, n in enumerate(parameter.shape)]
        std = INIT_STD
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2 * self.gpt.layers)
        seed = randomness.derive_parameter_seed(self.seed, *owner)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(whole).normal_(0.0, std, generator=generator)
        return drawn if dim < 0 else drawn.chunk(tp.size, dim)[tp.rank]

    def _parameters(self, kind: int) -> list[tuple[str, Tensor]]:
        """Return the whole parameters of embedding (0), layer (1) or head (2), without memory."""
        h, dtype = self.gpt.hidden, TORCH_DTYPES[self.gpt.dtype]
        shapes: list[tuple[int, ...]]
        if kind == 0:
            shapes = [(self.gpt.vocab, h), (self.gpt.seq_len, h)]
        elif kind == 1:
            matrices = [(h, h), (3 * h, h), (4 * h, h), (h, 4 * h)]
            shapes = [(h,)] * 4 + [shape for rows, w in matrices for shape in ((rows, w), (rows,))]
        else:
            shapes = [(h,), (h,), (self.gpt.vocab, h)]
        return [
            (str(i), torch.empty(shape, dtype=dtype, device="meta"))
            for i, shape in enumerate(shapes)
        ]


def _mark_sharded(parameter: Tensor | None, dim: int) -> None:
    """Mark `parameter` as split along `dim`; also with one rank, so that it can be split later."""
    if parameter is not None and getattr(parameter, "partition_dim", -1) < 0:
        set_tensor_model_parallel_attributes(parameter, True, dim, 1)
