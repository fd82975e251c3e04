"""Train a vision transformer to tell the direction of stripes.

    elastic run --standalone --nnodes 3 -m examples.train_vision --steps 30

The images are drawn, so nothing is downloaded. The loss also reports the accuracy, which
evaluations show.
"""

from __future__ import annotations

import argparse
import math
import sys

from elastic.domain.errors import ElasticError

CLASSES = 4
"""Directions of stripes, 45 degrees apart."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        "python -m examples.train_vision",
        description="Train a vision transformer.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    out.add_argument("--layers", type=int, default=3, help="transformer layers")
    out.add_argument("--size", type=int, default=32, help="pixels of an edge; a multiple of 8")
    out.add_argument("--micro-batch-size", type=int, default=8, help="images per micro-batch")
    out.add_argument("--num-microbatches", type=int, default=6, help="micro-batches per step")
    out.add_argument("--steps", type=int, default=30, help="optimizer updates")
    out.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations")
    out.add_argument("--seed", type=int, default=0, help="seed of initial values and images")
    out.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    out.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints")
    return out


def train(flags: argparse.Namespace) -> None:
    """Train under `elastic run`. Raises ElasticError for a wrong flag."""
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy
    from torch.optim.lr_scheduler import CosineAnnealingLR

    from elastic import Evaluation, Microbatch, Trainer, from_huggingface, from_scheduler
    from elastic.worker.model.optimizer import adamw

    try:
        from transformers import ViTConfig
    except ImportError as error:
        raise ElasticError(f"{error}: pip install 'elastic-runtime[hf]'") from error

    def images(seed: int, step: int, index: int) -> Microbatch:
        """Draw stripes of a random direction, width and position, with noise."""
        draw = torch.Generator().manual_seed(hash((seed, step, index)) % (1 << 31))
        rows = flags.micro_batch_size
        labels = torch.randint(CLASSES, (rows,), generator=draw)
        angle = (labels * math.pi / CLASSES).view(rows, 1, 1)
        place = torch.arange(flags.size, dtype=torch.float32)
        width = 1 + torch.rand(rows, 1, 1, generator=draw)
        start = 6 * torch.rand(rows, 1, 1, generator=draw)
        across = place.view(1, 1, -1) * angle.cos() + place.view(1, -1, 1) * angle.sin()
        stripes = (across / width + start).sin().unsqueeze(1).expand(-1, 3, -1, -1)
        noise = torch.randn(stripes.shape, generator=draw)
        return Microbatch(step, index, {"pixel_values": stripes + noise, "labels": labels})

    def loss(output: object, microbatch: Microbatch) -> Tensor:
        logits, labels = output.logits, microbatch.fields["labels"]  # type: ignore[attr-defined]
        microbatch.report("accuracy", (logits.argmax(1) == labels).float().mean())
        return cross_entropy(logits, labels)

    config = ViTConfig(
        image_size=flags.size,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=flags.layers,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=CLASSES,  # type: ignore[call-arg]
        architectures=["ViTForImageClassification"],
    )
    rate = from_scheduler(lambda optimizer: CosineAnnealingLR(optimizer, flags.steps), flags.lr)
    Trainer(
        stack=from_huggingface(config, loss=loss, seed=flags.seed),
        optimizer=adamw(rate),
        data=lambda step, index: images(flags.seed, step, index),
        steps=flags.steps,
        microbatches=flags.num_microbatches,
        seed=flags.seed,
        checkpoint_every=flags.checkpoint_every,
        evaluation=Evaluation(
            data=lambda step, index: images(flags.seed + 1, step, index),
            every=flags.evaluate_every,
            microbatches=4,
        ),
    ).run()


if __name__ == "__main__":
    try:
        train(parser().parse_args())
    except ElasticError as error:
        print(f"train_vision: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
