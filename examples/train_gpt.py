"""Train a byte-level GPT on any text.

    elastic run --standalone --nnodes 4 -m examples.train_gpt --steps 50

The flags are checked before torch is imported, so that mistakes are reported at once.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from elastic.domain.errors import ElasticError, FieldError
from elastic.worker.contrib.corpus import ByteCorpus
from elastic.worker.contrib.megatron.gpt import DTYPES, GPTConfig


def parser() -> argparse.ArgumentParser:
    """Return the parser. With the default flags the loss falls in 20 steps on two CPU cores."""
    out = argparse.ArgumentParser(
        "python -m examples.train_gpt",
        description="Train a byte-level GPT.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = out.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4, help="transformer layers")
    model.add_argument("--hidden", type=int, default=128, help="width; a multiple of --heads")
    model.add_argument("--heads", type=int, default=4, help="attention heads; a multiple of --tp")
    model.add_argument("--seq-len", type=int, default=128, help="bytes per sequence")
    model.add_argument("--dropout", type=float, default=0.0, help="dropout probability")
    model.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="bf16 keeps fp32 master weights"
    )
    model.add_argument(
        "--tie-embeddings", action="store_true", help="head and embedding share a matrix"
    )
    model.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel size; workers of one node"
    )
    run = out.add_argument_group("training")
    run.add_argument("--micro-batch-size", type=int, default=4, help="sequences per micro-batch")
    run.add_argument("--num-microbatches", type=int, default=8, help="micro-batches per step")
    run.add_argument("--steps", type=int, default=20, help="optimizer updates")
    run.add_argument(
        "--data", default=None, help="file or folder of text (default: Python's standard library)"
    )
    run.add_argument(
        "--seed", type=int, default=0, help="seed of initial values, samples and dropout"
    )
    run.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    run.add_argument("--warmup", type=int, default=5, help="steps until the peak learning rate")
    run.add_argument("--clip", type=float, default=1.0, help="global gradient norm; 0: no clipping")
    run.add_argument("--weight-decay", type=float, default=0.1, help="weight decay of matrices")
    run.add_argument(
        "--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: none"
    )
    run.add_argument(
        "--evaluate-every",
        type=int,
        default=0,
        help="steps between evaluations on other samples of the text; 0: none",
    )
    return out


def check(flags: argparse.Namespace) -> tuple[GPTConfig, ByteCorpus]:
    """Return model options and text. Raises FieldError for a wrong flag. Imports no torch."""
    for name, least in (
        ("num_microbatches", 1),
        ("steps", 1),
        ("warmup", 0),
        ("checkpoint_every", 0),
        ("evaluate_every", 0),
    ):
        if getattr(flags, name) < least:
            remedy = f"a whole number of {least} or more is needed"
            raise FieldError(name, getattr(flags, name), remedy)
    for name in ("clip", "weight_decay", "lr"):
        value = getattr(flags, name)
        if not math.isfinite(value) or value < 0 or (name == "lr" and value == 0):
            remedy = "a positive number is needed" + (", or 0" if name != "lr" else "")
            raise FieldError(name, value, remedy)
    shared = set(GPTConfig.__dataclass_fields__) & set(vars(flags))
    gpt = GPTConfig(**{name: getattr(flags, name) for name in sorted(shared)})
    corpus = ByteCorpus(flags.data)
    corpus.need(gpt.seq_len + 1)
    return gpt, corpus


def train(flags: argparse.Namespace, gpt: GPTConfig, corpus: ByteCorpus) -> None:
    """Import torch and megatron-core, and train."""
    from elastic.worker.contrib.data import ByteDataset
    from elastic.worker.contrib.megatron.stack import GPTStack
    from elastic.worker.evaluation import Evaluation
    from elastic.worker.model.learning_rate import cosine
    from elastic.worker.model.optimizer import adamw
    from elastic.worker.trainer import Trainer

    optimizer = adamw(
        cosine(flags.lr, warmup=flags.warmup, steps=flags.steps),
        weight_decay=flags.weight_decay,
        clip_norm=flags.clip or None,
        master_weights=gpt.dtype != "fp32",
    )

    def samples(seed: int) -> ByteDataset:
        return ByteDataset(corpus, gpt.seq_len, gpt.micro_batch_size, seed)

    evaluation = Evaluation(
        data=samples(gpt.seed + 1).microbatch,
        every=flags.evaluate_every or flags.steps,
        microbatches=flags.num_microbatches,
    )
    Trainer(
        stack=GPTStack(gpt),
        optimizer=optimizer,
        data=samples(gpt.seed).microbatch,
        steps=flags.steps,
        microbatches=flags.num_microbatches,
        seed=gpt.seed,
        tp=gpt.tp,
        tokens_per_microbatch=gpt.seq_len * gpt.micro_batch_size,
        checkpoint_every=flags.checkpoint_every,
        evaluation=evaluation if flags.evaluate_every else None,
    ).run()


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser().parse_args(arguments)
    try:
        gpt, corpus = check(flags)
    except FieldError as error:
        flag = "--" + error.field.replace("_", "-")
        print(f"train_gpt: {flag}: {error.value!r} is not usable: {error.remedy}", file=sys.stderr)
        return error.exit_code
    try:
        train(flags, gpt, corpus)
    except ElasticError as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
