"""Training script for `elastic run`: the same job, with the runtime's own loop."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.compare.job import (
    EVALUATION,
    LR,
    MICROBATCHES,
    STEPS,
    Records,
    batch,
    model,
    wait,
)
from elastic import Evaluation, Microbatch, Trainer, from_sequential
from elastic.worker.model.optimizer import adamw


def main() -> None:
    records = Records()

    def data(step: int, index: int) -> Microbatch:
        x, y = batch(step, index)
        return Microbatch(step, index, {"x": x, "y": y})

    def evaluation(step: int, index: int) -> Microbatch:
        return data(EVALUATION, index)

    def loss(output: Tensor, microbatch: Microbatch) -> Tensor:
        if torch.is_grad_enabled():
            wait(time.perf_counter())
            records.microbatch(microbatch.step, microbatch.index)
        return mse_loss(output, microbatch.fields["y"])

    Trainer(
        stack=from_sequential(model(), loss=loss),
        optimizer=adamw(LR),
        data=data,
        steps=STEPS,
        microbatches=MICROBATCHES,
        evaluation=Evaluation(data=evaluation, every=STEPS, microbatches=1),
    ).run()


if __name__ == "__main__":
    main()
