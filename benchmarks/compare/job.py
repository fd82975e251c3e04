"""The job that all systems run: a small network whose micro-batches take a fixed time.

A micro-batch is a function of (step, index), so each system can compute each of them anywhere. Its
computation is real but short, and the rest of `MICROBATCH_S` is a wait: four workers on a machine
with few cores then run as fast as on machines of their own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

NODES, MICROBATCHES = 4, 16
"""Nodes, and micro-batches of a step: the global batch."""
SHARE = MICROBATCHES // NODES
"""Micro-batches per node while all nodes are there."""
STEPS = int(os.environ.get("COMPARE_STEPS", "48"))
MICROBATCH_S = 0.1
WIDTH, ROWS, LR = 64, 32, 1e-3
RECORDS, NODE = "COMPARE_RECORDS", "COMPARE_NODE"
"""Environment variables: folder of the records, and number of this worker's node."""
EVALUATION = -1
"""Step whose only micro-batch is the evaluation."""


def model() -> nn.Sequential:
    """Return the network; its initial values are the same in each process."""
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 1))


def batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Return inputs (ROWS, WIDTH) and targets (ROWS, 1) of a micro-batch."""
    draw = torch.Generator().manual_seed(1_000_003 * (step + 2) + index)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    return x, (x[:, :8].sum(1, keepdim=True)).sin()


def wait(began: float) -> None:
    """Wait until a micro-batch that began at `began` (time.perf_counter) has taken its time."""
    time.sleep(max(0.0, MICROBATCH_S - (time.perf_counter() - began)))


def evaluate(network: nn.Module) -> float:
    """Return the loss on the evaluation micro-batch."""
    x, y = batch(EVALUATION, 0)
    with torch.no_grad():
        return float(mse_loss(network(x), y))


class Records:
    """Writes what a worker did: one JSON object per line, in a file of its own."""

    def __init__(self) -> None:
        folder = Path(os.environ[RECORDS])
        self._file = (folder / f"node{os.environ[NODE]}-{os.getpid()}.jsonl").open("a")

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), "kind": kind, **fields}) + "\n")
        self._file.flush()

    def microbatch(self, step: int, index: int) -> None:
        """Record that a micro-batch was computed."""
        self.write("microbatch", step=step, index=index)
