"""A tiny training run of linear layers, slowed down to leave time for faults.

Later steps take longer, so that a slow machine needs few of them. The file of --hurry ends the
slowdown.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from elastic import ListStack, Microbatch, Trainer
from elastic.worker.model.optimizer import adamw

LAYERS, WIDTH = 8, 16


class Layer(nn.Linear):
    """A layer. The first reads the micro-batch, the last returns its mean loss."""

    pace_s, doubling, hurry = 0.0, 1, Path()

    def forward(self, hidden: torch.Tensor | None, microbatch: Microbatch) -> torch.Tensor:  # type: ignore[override]
        if self.pace_s and not self.hurry.is_file():
            time.sleep(self.pace_s * 2 ** (microbatch.step // self.doubling))
        x = super().forward(microbatch.fields["x"] if hidden is None else hidden)
        return (
            nn.functional.mse_loss(x, microbatch.fields["y"])
            if self.out_features == 1
            else x.tanh()
        )


def data(step: int, index: int) -> Microbatch:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + index))
    return Microbatch(step, index, {"x": x, "y": x.sum(1, keepdim=True)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a layer takes")
    parser.add_argument(
        "--doubling", type=int, default=1000, help="steps after which layers take twice as long"
    )
    parser.add_argument(
        "--hurry", default="", help="file; from when it exists on layers take no time"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=20, help="steps between two checkpoints"
    )
    args = parser.parse_args()
    Layer.pace_s, Layer.doubling, Layer.hurry = args.pace, args.doubling, Path(args.hurry)
    layers = [lambda: Layer(WIDTH, WIDTH)] * (LAYERS - 1)
    Trainer(
        stack=ListStack([*layers, lambda: Layer(WIDTH, 1)], seed=0),
        optimizer=adamw(1e-2),
        data=data,
        steps=args.steps,
        microbatches=6,
        checkpoint_every=args.checkpoint_every,
    ).run()


if __name__ == "__main__":
    main()
