"""Sizes and options of a GPT, checked without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.domain.errors import FieldError

DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A GPT with learned positions, pre-layer norm and a GELU MLP of four times the width.

    Raises FieldError for a value out of range.
    """

    layers: int
    """Transformer layers, without embedding and head."""
    hidden: int
    heads: int
    seq_len: int
    micro_batch_size: int = 1
    """Sequences per micro-batch; used for the planner's figures only."""
    vocab: int = 256
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and both residual branches."""
    dtype: str = "fp32"
    """Type of parameters and activations: fp32 | bf16."""
    tie_embeddings: bool = False
    """Whether the embedding matrix is also the head's matrix."""
    tp: int = 1
    """Tensor-parallel size."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq_len", "micro_batch_size", "vocab", "tp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise FieldError(name, value, "a whole number of 1 or more is needed")
        if self.hidden % self.heads:
            raise FieldError("hidden", self.hidden, f"must be a multiple of heads ({self.heads})")
        if self.heads % self.tp:
            raise FieldError("tp", self.tp, f"must divide the number of heads ({self.heads})")
        if self.vocab % self.tp:
            raise FieldError("tp", self.tp, f"must divide the vocabulary ({self.vocab})")
        if not 0.0 <= self.dropout < 1.0:
            raise FieldError("dropout", self.dropout, "at least 0 and below 1")
        if self.dtype not in DTYPES:
            raise FieldError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise FieldError("seed", self.seed, "must fit into 64 bits")

    @property
    def n_layers(self) -> int:
        """Layers that can be placed: embedding, transformer layers, head."""
        return self.layers + 2
