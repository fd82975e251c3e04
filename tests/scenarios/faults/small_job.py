"""A job of three small layers whose data or parameters go wrong at a given step.

    small_job.py [--flip NODE STEP [--bit BIT] [--late]] [--frozen] [--half]
                 [--nan STEP MICROBATCH] [--inf STEP MICROBATCH]

`--flip` changes one bit of a weight on NODE, once, while it runs the first micro-batch of STEP, or
`--late` before its update, when the commit has compared all replicas. BIT is 20, in the mantissa,
unless another one is given; 30 is the highest bit of the exponent. `--frozen` freezes the layer of
that weight. `--half` trains in float16 with a loss scale that is too large at first. `--nan` puts a
NaN into the data of one micro-batch; `--inf` makes its gradient infinite.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from elastic import ListStack, Microbatch, Trainer
from elastic.worker.model.loss_scale import LossScale
from elastic.worker.model.optimizer import adamw

flags = argparse.ArgumentParser()
flags.add_argument("--flip", nargs=2, default=("", "-1"))
flags.add_argument("--bit", type=int, default=20)
flags.add_argument("--late", action="store_true")
flags.add_argument("--frozen", action="store_true")
flags.add_argument("--half", action="store_true")
flags.add_argument("--inf", nargs=2, type=int, default=(-1, -1))
flags.add_argument("--nan", nargs=2, type=int, default=(-1, -1))
flags.add_argument("--steps", type=int, default=6)
arguments = flags.parse_args()


MIDDLE: list[Tensor] = []
"""Weight of the middle layer on this node, as it was last used."""


class Layer(nn.Linear):
    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:  # type: ignore[override]
        if self.in_features == self.out_features:
            MIDDLE.append(self.weight)
            if not arguments.late:
                flip(self.weight, microbatch.step)
        given = microbatch.fields["x"] if hidden is None else hidden
        x = super().forward(given.to(self.weight.dtype))
        last = self.out_features == 1
        if not last:
            return x.relu()
        x = x.float()
        loss = nn.functional.mse_loss(x, microbatch.fields["y"])
        infinite = (microbatch.step, microbatch.index) == tuple(arguments.inf)
        return 4 * loss if infinite else loss


def flip(weight: Tensor, step: int) -> None:
    """Flip a bit of `weight` if this is the node and the step, and it was not done before."""
    node, when = arguments.flip
    done = Path(os.environ["ELASTIC_RUN_DIR"], "flipped")
    if os.environ["ELASTIC_NODE"] == node and step == int(when) and not done.exists():
        done.touch()
        weight.data.view(torch.int32)[3, 5] ^= 1 << arguments.bit  # torch does not notice it


def lr(step: int) -> float:
    """The learning rate, which is asked for when the update begins."""
    if arguments.late and MIDDLE:
        flip(MIDDLE[-1], step)
    return 1e-2 / (1 + step)


def data(step: int, index: int) -> Microbatch:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + index))
    y = x.sum(1, keepdim=True)
    if (step, index) == tuple(arguments.nan):
        x[0, 0] = math.nan
    if (step, index) == tuple(arguments.inf):
        y = y - 3e38  # the gradient of each output is finite, and their sum is not
    return Microbatch(step, index, {"x": x, "y": y})


def layer(width: int, out: int) -> Layer:
    made = Layer(width, out).to(torch.float16 if arguments.half else torch.float32)
    return made.requires_grad_(not (arguments.frozen and width == out))


stack = ListStack([lambda: layer(8, 32), lambda: layer(32, 32), lambda: layer(32, 1)], seed=0)
scale = LossScale(initial=2.0**24, growth_interval=2) if arguments.half else None
adam = adamw(lr, master_weights=arguments.half, loss_scale=scale)
Trainer(
    stack=stack,
    optimizer=adam,
    data=data,
    steps=arguments.steps,
    microbatches=4,
    checkpoint_every=3,
).run()
