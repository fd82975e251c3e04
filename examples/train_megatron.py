"""Train a current architecture of megatron-core's layers on any text, byte by byte.

    elastic run --standalone --nnodes 3 -m examples.train_megatron --model llama --steps 20
    elastic run --standalone --nnodes 2 --nproc-per-node 2 -m examples.train_megatron \\
        --model experts --tp 2 --steps 20

    elastic run --standalone --nnodes 2 --nproc-per-node 2 -m examples.train_megatron \\
        --model llama --cp 2 --steps 20

`llama` has rotary positions, query groups, RMSNorm, SwiGLU and norms of queries and keys; `experts`
also has a mixture of experts, which the workers of a node share.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

from elastic.domain.errors import ElasticError, FieldError
from elastic.worker.contrib.corpus import ByteCorpus

HEADS, GROUPS = 4, 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_aux_loss_coeff": 0.01},
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        "python -m examples.train_megatron",
        description="Train a model of megatron-core's layers.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    out.add_argument("--model", choices=sorted(MODELS), default="llama", help="architecture")
    out.add_argument("--layers", type=int, default=3, help="transformer layers")
    out.add_argument("--seq-len", type=int, default=64, help="bytes per sequence")
    out.add_argument("--micro-batch-size", type=int, default=2, help="sequences per micro-batch")
    out.add_argument("--num-microbatches", type=int, default=6, help="micro-batches per step")
    shared = out.add_mutually_exclusive_group()
    shared.add_argument("--tp", type=int, default=1, help="workers of a node that share each layer")
    shared.add_argument(
        "--cp", type=int, default=1, help="workers of a node that split each sequence"
    )
    out.add_argument("--steps", type=int, default=20, help="optimizer updates")
    out.add_argument("--data", default=None, help="file or folder of text")
    out.add_argument("--seed", type=int, default=0, help="seed of initial values and samples")
    out.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    return out


def train(flags: argparse.Namespace) -> None:
    """Train under `elastic run`. Raises ElasticError for a wrong flag."""
    for name in ("layers", "seq_len", "micro_batch_size", "num_microbatches", "tp", "cp", "steps"):
        if getattr(flags, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise FieldError(flag, getattr(flags, name), "a whole number of 1 or more is needed")
    if HEADS % flags.tp or GROUPS % flags.tp:
        raise FieldError("--tp", flags.tp, f"it must divide the {GROUPS} groups of heads")
    corpus = ByteCorpus(flags.data)
    corpus.need(flags.seq_len + 1)
    import torch

    from elastic import Trainer, from_megatron
    from elastic.worker.contrib.data import ByteDataset
    from elastic.worker.contrib.megatron.layers import TransformerConfig
    from elastic.worker.model.learning_rate import cosine
    from elastic.worker.model.optimizer import adamw

    options = MODELS[flags.model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=flags.layers,
            hidden_size=64,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            ffn_hidden_size=128,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            qk_layernorm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=flags.tp,
            context_parallel_size=flags.cp,
            expert_model_parallel_size=flags.tp if "num_moe_experts" in options else 1,
            **options,
        )
    stack = from_megatron(
        config,
        vocab_size=256,
        max_sequence_length=flags.seq_len,
        micro_batch_size=flags.micro_batch_size,
        seed=flags.seed,
    )
    data = ByteDataset(corpus, flags.seq_len, flags.micro_batch_size, flags.seed)
    Trainer(
        stack=stack,
        optimizer=adamw(cosine(flags.lr, warmup=2, steps=flags.steps)),
        data=data.microbatch,
        steps=flags.steps,
        microbatches=flags.num_microbatches,
        seed=flags.seed,
        tp=flags.tp * flags.cp,
        tokens_per_microbatch=flags.micro_batch_size * flags.seq_len,
    ).run()


if __name__ == "__main__":
    try:
        train(parser().parse_args())
    except ElasticError as error:
        print(f"train_megatron: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
