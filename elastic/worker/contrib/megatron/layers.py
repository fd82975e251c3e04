"""Layers of a language model, made of megatron-core's modules.

The embedding, each transformer layer, and the head (final norm, output matrix, cross entropy) are
one layer each. Hidden states are [sequence, batch, hidden], megatron's order. With a mixture of
experts, the values between layers also carry the sum of the routers' losses, which the head adds to
its loss. Parameters have arbitrary values until `elastic.worker.contrib.megatron.stack` sets them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError, needs_extra
from elastic.worker.contrib.megatron.context import ContextParallel
from elastic.worker.contrib.megatron.linear import linear
from elastic.worker.model import rng as randomness
from elastic.worker.model.checks import Described, description
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Value


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


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Let imports of these modules fail inside the block, unless they are imported already.

    megatron-core imports W&B and TensorBoard if they are installed, which takes 1.4 s of CPU time
    per worker start. Nothing here uses what it does with them.
    """
    absent = {name: None for name in names if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


with (
    needs_extra("megatron", "A model of megatron-core layers"),
    uncompiled(),
    hidden("wandb", "tensorboard", "torch.utils.tensorboard"),
    warnings.catch_warnings(),
):
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as parallel_state
    from megatron.core.extensions.transformer_engine import TEFusedMLP  # noqa: F401 - imported by layers
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection as ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: F401 - imported by layers
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig

    from elastic.worker.contrib.megatron.experts import Experts
    from elastic.worker.contrib.megatron.mlp import parallel_mlp

LEARNED, ROPE, NO_POSITIONS = "learned_absolute", "rope", "none"
POSITIONS = (LEARNED, ROPE, NO_POSITIONS)
"""Kinds of position embeddings, in megatron-core's words."""
F32 = torch.float32
IGNORED = -100
"""Label of a position that does not count, as in transformers and in `PackedDocuments`."""
HIDDEN, ROUTER_LOSS = "hidden", "router_loss"
"""Parts of the values between layers of a mixture of experts."""
SHARD_DIMS = {
    ColumnParallelLinear: {"weight": 0, "bias": 0},
    RowParallelLinear: {"weight": 1},
    VocabParallelEmbedding: {"weight": 0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """What megatron's `GPTModel` takes besides its TransformerConfig."""

    vocab_size: int
    max_sequence_length: int
    position_embedding_type: str = ROPE
    rotary_percent: float = 1.0
    rotary_base: float = 10_000.0
    rope_scaling_factor: float | None = None
    """Factor of the scaling of Llama 3.1; None: no scaling."""
    share_embeddings_and_output_weights: bool = False
    attention_mask: bool = False
    """Whether micro-batches have the field `attention_mask`."""


class SDPAttention(nn.Module):
    """Causal core attention for megatron on `scaled_dot_product_attention`, CPU or GPU."""

    def __init__(self, config: TransformerConfig, **others: Any) -> None:
        super().__init__()
        self.dropout = float(config.attention_dropout)
        groups = others["pg_collection"]
        self.rank: int = groups.tp.rank()
        self._context = context_of(groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """[s, b, heads, d], and [s, b, groups, d] twice -> [s, b, heads * d].

        Args:
            attention_mask: bool, broadcast to [b, heads, s, all tokens]: where a token may look.
                None: at itself and all before.
        """
        context = self._context
        if context is not None:
            key, value = context.gather(key), context.gather(value)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if k.shape[1] != q.shape[1]:  # query groups: several heads have the same key and value
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        if context is not None and attention_mask is None:
            out = torch.cat(
                [self._piece(q[:, :, mine], k, v, end) for mine, end in context.pieces(k.shape[2])],
                dim=2,
            )
        else:
            dropout = self.dropout if self.training else 0.0
            with randomness.rank_stream(self.rank, query.device) if dropout else nullcontext():
                out = nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=attention_mask,
                    dropout_p=dropout,
                    is_causal=attention_mask is None,
                )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    @staticmethod
    def _piece(q: Tensor, k: Tensor, v: Tensor, end: int) -> Tensor:
        """Return the attention of the tokens before position `end`, of which `q` has the last."""
        # Imported here, since it loads the compiler: 2 s of CPU time at each start of a worker.
        from torch.nn.attention.bias import causal_lower_right

        bias: Any = causal_lower_right(q.shape[2], end)
        return nn.functional.scaled_dot_product_attention(
            q, k[:, :, :end], v[:, :, :end], attn_mask=bias
        )


class HeadNorm(nn.Module):
    """Norm of queries or keys. The heads of all tensor-parallel ranks share its parameters, so
    their gradients are summed over the ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, group: Any, **others: Any
    ) -> None:
        super().__init__()
        self.norm = WrappedTorchNorm(config=config, hidden_size=hidden_size, eps=eps)
        self._group = group

    def forward(self, heads: Tensor) -> Tensor:
        if self._group.size() == 1:
            return cast(Tensor, self.norm(heads))
        shared = {
            name: copy_to_tensor_model_parallel_region(parameter, self._group)
            for name, parameter in self.norm.named_parameters()
        }
        return cast(Tensor, torch.func.functional_call(self.norm, shared, (heads,)))


def context_of(groups: Any) -> ContextParallel | None:
    """Return the ranks that split sequences; None if no others do."""
    return ContextParallel(groups.cp) if groups.cp.size() > 1 else None


class MegatronLayer(nn.Module):
    """A layer of the model. With context parallelism it computes a part of the sequences."""

    def __init__(self, groups: Any) -> None:
        super().__init__()
        self.context = context_of(groups)

    def forward(self, value: Value | None, microbatch: Microbatch) -> Value:
        if self.context is None:
            return self.compute(value, microbatch)
        return cast(Value, self.context.call(self, value, microbatch))

    def compute(self, value: Value | None, microbatch: Microbatch) -> Value:
        raise NotImplementedError

    def part(self, field: Tensor) -> Tensor:
        """Return this rank's columns of a field [rows, length]."""
        return field if self.context is None else self.context.part(field)


class EmbeddingLayer(MegatronLayer):
    """Embeds tokens, and positions if they are learned, as hidden states."""

    def __init__(self, model: LanguageModel, config: TransformerConfig, groups: Any) -> None:
        super().__init__(groups)
        self._model, kind = model, model.position_embedding_type
        sizes = model.vocab_size, model.max_sequence_length
        self.embedding = LanguageModelEmbedding(
            config, *sizes, position_embedding_type=kind, tp_group=groups.tp
        )
        self._routed = config.num_moe_experts is not None

    def compute(self, value: Value | None, microbatch: Microbatch) -> Value:
        device = self.embedding.word_embeddings.weight.device
        model = self._model
        tokens = token_field(microbatch, "tokens", model)
        check_range("tokens", tokens, model.vocab_size, "of the vocabulary")
        length = tokens.shape[1]
        positions = torch.arange(length).unsqueeze(0)
        if model.position_embedding_type == LEARNED and "position_ids" in microbatch.fields:
            positions = token_field(microbatch, "position_ids", model, tokens.shape)
            check_range("position_ids", positions, model.max_sequence_length, "of positions")
        tokens, positions = (one.to(device, non_blocking=True) for one in (tokens, positions))
        out: Tensor = self.embedding(self.part(tokens), self.part(positions))
        return {HIDDEN: out, ROUTER_LOSS: out.new_zeros((), dtype=F32)} if self._routed else out


class BlockLayer(MegatronLayer):
    """One transformer layer: attention, and an MLP or a mixture of experts."""

    def __init__(
        self, index: int, model: LanguageModel, config: TransformerConfig, groups: Any
    ) -> None:
        super().__init__(groups)
        self.masked = model.attention_mask
        self.rotary = _rotary(model, config, groups)
        spec = layer_spec(config, groups)
        self.layer = build_module(spec, config=config, layer_number=index, pg_collection=groups)
        if is_routed(config, index):
            self.layer.mlp = Experts(config, groups.tp)
        else:
            self.layer.mlp = parallel_mlp(config, config.ffn_hidden_size, groups.tp)

    def compute(self, value: Value | None, microbatch: Microbatch) -> Value:
        if not isinstance(value, dict):
            return self._transformed(cast(Tensor, value), microbatch)
        out, loss = self._transformed(value[HIDDEN], microbatch), value[ROUTER_LOSS]
        if isinstance(self.layer.mlp, Experts):
            loss = loss + self.layer.mlp.take_router_loss().to(loss.device, F32)
        return {HIDDEN: out, ROUTER_LOSS: loss}

    def _transformed(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        length, device = hidden.shape[0], hidden.device
        if self.context is not None:
            length *= self.context.size
        mask = angles = None
        if self.rotary is not None:
            angles = microbatch.once(("angles", length), lambda: self._angles(length).to(device))
        if self.masked:
            mask = microbatch.once(
                ("attention_mask", length), lambda: self._may_look(length, device, microbatch)
            )
        out: Tensor = self.layer(hidden, attention_mask=mask, rotary_pos_emb=angles)[0]
        return out

    def _angles(self, length: int) -> Tensor:
        angles = angles_of(self.rotary, length)
        return angles if self.context is None else angles[self.context.positions(length)]

    def _may_look(self, length: int, device: torch.device, microbatch: Microbatch) -> Tensor:
        """Return where this rank's tokens may look, bool [b, 1, its tokens, all tokens]."""
        rows = shaped_field(microbatch, "attention_mask", None)
        if rows.shape[-1] != length:
            remedy = f"its last dimension must be the tokens per row ({length})"
            raise FieldError("microbatch.attention_mask", description(rows), remedy)
        allowed = may_look(rows, device)
        if self.context is None:
            return allowed
        return allowed[:, :, self.context.positions(length).to(device)]


class HeadLayer(MegatronLayer):
    """Final norm, output matrix and mean cross entropy, weighted by the field `loss_mask` if the
    micro-batch has one. A label of -100 does not count."""

    def __init__(self, model: LanguageModel, config: TransformerConfig, groups: Any) -> None:
        super().__init__(groups)
        self._model = model
        self.norm = WrappedTorchNorm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.output = ColumnParallelLinear(
            config.hidden_size,
            model.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=groups.tp,
        )

    def compute(self, value: Value | None, microbatch: Microbatch) -> Value:
        if not isinstance(value, dict):
            return self._loss(cast(Tensor, value), microbatch)
        return self._loss(value[HIDDEN], microbatch) + value[ROUTER_LOSS]

    def _loss(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        logits, _ = self.output(self.norm(hidden))
        labels, weights = self._labels_and_weights(microbatch)

        def columns(field: Tensor) -> Tensor:
            found = self.part(field).to(hidden.device, non_blocking=True)
            return found.transpose(0, 1).contiguous()

        losses: Tensor = vocab_parallel_cross_entropy(logits.float(), columns(labels))
        if weights is not None:
            whole = weights.sum().to(hidden.device)
            total = (losses * columns(weights)).sum() / torch.where(whole == 0, 1.0, whole)
        elif self.context is None:
            total = losses.mean()
        else:
            total = losses.sum() / (losses.numel() * self.context.size)
        return total if self.context is None else self.context.total(total)

    def _labels_and_weights(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """Return the labels, and the weights of their losses; None: all count equally. A label of
        -100 has the weight 0."""
        labels = token_field(microbatch, "labels", self._model)
        weights: Tensor | None = None
        if "loss_mask" in microbatch.fields:
            weights = shaped_field(microbatch, "loss_mask", labels.shape).float()
        ignored = labels == IGNORED
        if bool(ignored.any()):
            weights = torch.ones(labels.shape, device=labels.device) if weights is None else weights
            weights, labels = weights.masked_fill(ignored, 0.0), labels.masked_fill(ignored, 0)
        remedy = f"of the vocabulary, or {IGNORED} for a position that does not count"
        check_range("labels", labels, self._model.vocab_size, remedy)
        return labels, weights


def token_field(
    microbatch: Microbatch, name: str, model: LanguageModel, shape: torch.Size | None = None
) -> Tensor:
    """Return a field of whole numbers, [rows, length]. Raises FieldError for anything else."""
    found = shaped_field(microbatch, name, shape)
    if found.is_floating_point() or found.is_complex() or found.dim() != 2:
        raise FieldError(f"microbatch.{name}", description(found), "int64 [rows, length]")
    if found.shape[1] > model.max_sequence_length:
        remedy = f"at most max_sequence_length ({model.max_sequence_length}) tokens per row"
        raise FieldError(f"microbatch.{name}", description(found), remedy)
    return found.long()


def shaped_field(microbatch: Microbatch, name: str, shape: torch.Size | None) -> Tensor:
    """Return a field. Raises FieldError if it is absent or has another shape."""
    if name not in microbatch.fields:
        known = ", ".join(microbatch.fields)
        remedy = f"a field that data gives: it gives {known}; labels are the next tokens"
        raise FieldError(f"microbatch.{name}", Described("no such field"), remedy)
    found = microbatch.fields[name]
    if shape is not None and found.shape != shape:
        remedy = f"it needs the shape {tuple(shape)}"
        raise FieldError(f"microbatch.{name}", description(found), remedy)
    return found


def check_range(name: str, numbers: Tensor, end: int, remedy: str) -> None:
    """Raise FieldError unless all numbers are from 0 to end - 1. On a GPU nothing is checked,
    because the worker would wait for it."""
    if numbers.is_cuda or not numbers.numel():
        return
    least, most = (int(one) for one in numbers.aminmax())
    if least < 0 or most >= end:
        wrong = Described(f"the number {least if least < 0 else most}")
        raise FieldError(f"microbatch.{name}", wrong, f"numbers from 0 to {end - 1} {remedy}")


def may_look(attention_mask: Tensor, device: torch.device) -> Tensor:
    """Return where tokens may look, bool [b, 1, s, s], from megatron's mask of the places where
    they may not: bool [b, s, s] or [b, 1, s, s]. Nobody looks ahead.

    Raises FieldError for another shape or type, and for a mask that hides a token from itself.
    """
    field, mask = "microbatch.attention_mask", attention_mask
    mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
    square = mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == mask.shape[3]
    if not square or mask.dtype != torch.bool:
        remedy = "bool [rows, 1, length, length], true where a token may not look"
        raise FieldError(field, description(attention_mask), remedy)
    if not mask.is_cuda and bool(mask.diagonal(dim1=-2, dim2=-1).any()):
        what = Described("a mask that hides a token from itself")
        raise FieldError(field, what, "true is where a token may not look: perhaps invert it")
    allowed = ~mask.to(device, non_blocking=True)
    length = allowed.shape[-1]
    return allowed & torch.ones(length, length, dtype=torch.bool, device=device).tril()


def angles_of(rotary: RotaryEmbedding, length: int) -> Tensor:
    """Return the angles of rotary embeddings, [length, 1, 1, dim], float32 on the CPU. (The
    module's own forward computes them on a GPU.)"""
    angles: Tensor = rotary.get_freqs_non_repeated(length)
    if rotary.rotary_interleaved:
        return angles.repeat_interleave(2, dim=-1)[:, None, None, :]
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def layer_spec(config: TransformerConfig, groups: Any) -> Any:
    """Return megatron's layer specification, with parts that run on CPU and GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = SDPAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = WrappedTorchNorm
    if config.qk_layernorm:
        norm = ModuleSpec(module=HeadNorm, params={"group": groups.tp})
        attention.q_layernorm = attention.k_layernorm = norm
    layer.mlp = IdentityOp  # BlockLayer makes its own
    return spec


def is_routed(config: TransformerConfig, index: int) -> bool:
    """Return whether layer `index` (from 1) is a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    every = config.moe_layer_freq
    if isinstance(every, int):
        return (index - 1) % every == 0
    return bool(every[index - 1])


def mark_split(module: nn.Module, *, split: bool) -> None:
    """Mark the parameters that tensor-parallel ranks split, and use our linear function.

    Parameters are marked also with one rank, so that their checkpoints can be split later. With
    `split` unset they are not: all ranks hold them whole.
    """
    for part in module.modules():
        for name, dim in SHARD_DIMS.get(type(part), {}).items() if split else ():
            parameter = getattr(part, name)
            if parameter is not None and getattr(parameter, "partition_dim", -1) < 0:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            part._forward_impl = linear


def _rotary(model: LanguageModel, config: TransformerConfig, groups: Any) -> Any:
    if model.position_embedding_type != ROPE:
        return None
    return RotaryEmbedding(
        config.kv_channels,
        model.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling_factor is not None,
        rope_scaling_factor=1.0 if model.rope_scaling_factor is None else model.rope_scaling_factor,
        use_cpu_initialization=True,
        cp_group=groups.cp,
    )
