"""Training script with empty layers, for `elastic run --emulate PROFILE -m benchmarks.waiting`.

The profile's layers replace the empty ones. The script thus starts fast, and the profile alone
sets its times.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from elastic.worker.evaluation import Evaluation
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec, adamw, without_compiler
from elastic.worker.profiling.emulated import PassTimer
from elastic.worker.trainer import Trainer


class Scale(nn.Module):
    """Layer that multiplies its input by its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        return (microbatch.fields["x"] if hidden is None else hidden) * self.weight


class Loss(Scale):
    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        return super().forward(hidden, microbatch).square().mean()


def data(step: int, index: int) -> Microbatch:
    return Microbatch(step, index, {"x": torch.full((8,), 1.0 + 0.1 * index)})


def record_passes(folder: Path) -> None:
    """Write into a file of this process when each layer has ended a backward pass: lines of (time,
    step, micro-batch). Under --emulate only."""
    wait = PassTimer.wait

    def recorded(
        timer: PassTimer, action: tuple[object, ...], began: float, seconds: float
    ) -> None:
        wait(timer, action, began, seconds)
        step, index, part = action
        if part == "B":
            with (folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps([time.time(), step, index]) + "\n")

    PassTimer.wait = recorded  # type: ignore[assignment, method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--layers", type=int, default=4, help="of the script itself; a profile has its own"
    )
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--evaluate-every", type=int, default=0, help="steps between evaluations; 0: none"
    )
    parser.add_argument(
        "--moments",
        action="store_true",
        help="AdamW: two moments a parameter are kept and backed up",
    )
    parser.add_argument(
        "--record-passes", type=Path, help="write times of backward passes in this folder"
    )
    args = parser.parse_args()
    if args.record_passes:
        record_passes(args.record_passes)
    sgd = without_compiler(torch.optim.SGD)
    plain = OptimizerSpec(factory=lambda groups: sgd(groups, lr=0.0), lr=lambda step: 0.01)
    Trainer(
        stack=ListStack([Scale] * (args.layers - 1) + [Loss], seed=0),
        optimizer=adamw(0.01) if args.moments else plain,
        data=data,
        steps=args.steps,
        microbatches=args.num_microbatches,
        tokens_per_microbatch=8,
        evaluation=Evaluation(data=data, every=args.evaluate_every, microbatches=1)
        if args.evaluate_every
        else None,
    ).run()


if __name__ == "__main__":
    main()
