"""Train a Hugging Face language model on any text, byte by byte.

    elastic run --standalone --nnodes 3 -m examples.train_huggingface --model llama --steps 20

`--model` is a family of the package, of which a small model is made, or a folder with a
config.json. Sequences have different lengths and are padded, so the micro-batches have masks.
`--lora` trains adapters beside the model, which stays as it is.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.domain.errors import ElasticError
from elastic.worker.contrib.corpus import ByteCorpus

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        "python -m examples.train_huggingface",
        description="Train a Hugging Face language model.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    out.add_argument("--model", default="llama", help="family, as llama, or a folder")
    out.add_argument("--lora", default=None, help="folder with the config of LoRA adapters")
    out.add_argument("--seq-len", type=int, default=64, help="bytes per sequence")
    out.add_argument("--micro-batch-size", type=int, default=2, help="sequences per micro-batch")
    out.add_argument("--num-microbatches", type=int, default=6, help="micro-batches per step")
    out.add_argument("--steps", type=int, default=20, help="optimizer updates")
    out.add_argument("--data", default=None, help="file or folder of text")
    out.add_argument("--seed", type=int, default=0, help="seed of initial values and samples")
    out.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    out.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints")
    return out


def train(flags: argparse.Namespace) -> None:
    """Train under `elastic run`. Raises ElasticError for a wrong flag."""
    corpus = ByteCorpus(flags.data)
    corpus.need(flags.seq_len)
    import torch

    from elastic import Microbatch, Trainer, from_huggingface
    from elastic.worker.model.learning_rate import cosine
    from elastic.worker.model.optimizer import adamw

    def data(step: int, index: int) -> Microbatch:
        draw = random.Random(f"{flags.seed} {step} {index}")
        ids = torch.zeros(flags.micro_batch_size, flags.seq_len, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row in range(flags.micro_batch_size):
            length = draw.randint(flags.seq_len // 2, flags.seq_len)
            text = corpus.read(draw.randrange(len(corpus) - length + 1), length)
            ids[row, :length] = torch.tensor(list(text))
            mask[row, :length] = 1
        labels = ids.masked_fill(mask == 0, -100)
        return Microbatch(step, index, {"input_ids": ids, "attention_mask": mask, "labels": labels})

    Trainer(
        stack=from_huggingface(model(flags.model), seed=flags.seed, lora=flags.lora),
        optimizer=adamw(cosine(flags.lr, warmup=2, steps=flags.steps)),
        data=data,
        steps=flags.steps,
        microbatches=flags.num_microbatches,
        seed=flags.seed,
        tokens_per_microbatch=flags.micro_batch_size * flags.seq_len,
        checkpoint_every=flags.checkpoint_every,
    ).run()


def model(name: str) -> PreTrainedConfig | Path:
    """Return the folder `name`, or a small config of the family `name`."""
    if Path(name).exists():
        return Path(name)
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(name, **SIZES)
    return config


if __name__ == "__main__":
    try:
        train(parser().parse_args())
    except ElasticError as error:
        print(f"train_huggingface: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
