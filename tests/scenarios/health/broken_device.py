"""Small script with a simulated device error.

python -m tests.scenarios.health.broken_device --node node1 --times 1
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import adamw
from elastic.worker.trainer import Trainer

STEP, MICROBATCH = 2, 1
ECC = "CUDA error: uncorrectable ECC error encountered"
LOOP = "loop"
"""As `--text`: an endless loop in place of an error."""
HANG = "hang"
"""As `--text`: the worker hangs before it attaches."""
IO_ERROR = "[Errno 5] Input/output error"
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 21474836480 bytes."
"""An error of a node whose memory other processes use."""


def is_due(flags: argparse.Namespace) -> bool:
    """Return whether this worker breaks now: on the given node, and not more often than given."""
    if flags.node not in ("any", os.environ["ELASTIC_NODE"]):
        return False
    for time in range(flags.times):
        try:
            Path(os.environ["ELASTIC_RUN_DIR"], f"broke-{time}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


class Layer(nn.Module):
    """Linear layer that raises a simulated device error once, at a given point of the training."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 8)
        self._flags = flags

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        if (microbatch.step, microbatch.index) == (STEP, MICROBATCH) and self._flags.text != HANG:
            self._break()
        return torch.tanh(self.weight(microbatch.fields["x"] if hidden is None else hidden))

    def _break(self) -> None:
        text = self._flags.text
        if not is_due(self._flags):
            return
        while text == LOOP:
            pass
        if text == IO_ERROR:
            raise OSError(5, "Input/output error")
        raise (torch.OutOfMemoryError if text.startswith("CUDA out of") else RuntimeError)(text)


class Loss(Layer):
    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        return super().forward(hidden, microbatch).square().mean()


def data(step: int, index: int) -> Microbatch:
    generator = torch.Generator().manual_seed(100 * step + index)
    return Microbatch(step, index, {"x": torch.randn(4, 8, generator=generator)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", default="none", help="where it breaks; any: everywhere")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--text", default=ECC)
    flags = parser.parse_args()
    while flags.text == HANG and is_due(flags):
        signal.pause()
    Trainer(
        stack=ListStack([lambda: Layer(flags)] * 3 + [lambda: Loss(flags)], seed=3),
        optimizer=adamw(0.01),
        data=data,
        steps=6,
        microbatches=4,
        tokens_per_microbatch=4,
    ).run()


if __name__ == "__main__":
    main()
