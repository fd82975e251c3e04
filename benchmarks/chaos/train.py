"""A tiny training run of linear layers whose workers start fast."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from elastic import ListStack, Microbatch, OptimizerSpec, Trainer

LAYERS, WIDTH, MICROBATCHES = 8, 16, 6


class Layer(nn.Linear):
    """A layer. The first reads the micro-batch, the last returns its mean loss."""

    pace_s = 0.0

    def forward(self, hidden: torch.Tensor | None, microbatch: Microbatch) -> torch.Tensor:  # type: ignore[override]
        if self.pace_s:
            time.sleep(self.pace_s)
        x = super().forward(microbatch.fields["x"] if hidden is None else hidden)
        return (
            nn.functional.mse_loss(x, microbatch.fields["y"])
            if self.out_features == 1
            else x.tanh()
        )


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum. It does not call the constructor of its base class, which
    imports torch's compiler: that takes as long as everything else in a worker's start."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.state = defaultdict(dict)
        self.param_groups = [dict(group) for group in groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(state["momentum"], alpha=group["lr"])


def data(step: int, index: int) -> Microbatch:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + index))
    return Microbatch(step, index, {"x": x, "y": x.sum(1, keepdim=True)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a layer takes")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    args = parser.parse_args()
    Layer.pace_s = args.pace
    layers = [lambda: Layer(WIDTH, WIDTH)] * (LAYERS - 1)
    Trainer(
        stack=ListStack([*layers, lambda: Layer(WIDTH, 1)], seed=0),
        optimizer=OptimizerSpec(factory=Momentum, lr=lambda step: 1e-2, elementwise=True),
        data=data,
        steps=args.steps,
        microbatches=MICROBATCHES,
        checkpoint_every=args.checkpoint_every,
    ).run()


if __name__ == "__main__":
    main()
