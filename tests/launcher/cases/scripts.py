"""Scripts that the cases run. All train the same small model, with one thing changed."""

from __future__ import annotations

TRAIN = """\
import time
import torch
from torch import nn
from elastic import ListStack, Microbatch, OptimizerSpec, Trainer


class Layer(nn.Linear):
    def forward(self, hidden, microbatch):
        x = microbatch.fields["x"] if hidden is None else hidden
        return super().forward(x).relu()


class Slow(Layer):
    def forward(self, hidden, microbatch):
        time.sleep(0.2)
        return super().forward(hidden, microbatch)


class Loss(Layer):
    def forward(self, hidden, microbatch):
        return super().forward(hidden, microbatch).mean()


class Vector(Layer):
    def forward(self, hidden, microbatch):
        return super().forward(hidden, microbatch).mean(1)


class Pair(Layer):
    def forward(self, hidden, microbatch):
        return super().forward(hidden, microbatch), 3


class Normed(Layer):
    def __init__(self):
        super().__init__(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, hidden, microbatch):
        return self.norm(super().forward(hidden, microbatch))


def data(step, index):
    return Microbatch(step, index, {"x": torch.full((2, 4), 1.0 + index)})


def fails_at_step_2(step, index):
    if step == 2:
        raise FileNotFoundError("no shard for step 2")
    return data(step, index)


def draws(step, index):
    return Microbatch(step, index, {"x": torch.rand(2, 4)})


def trainer(middle=lambda: Layer(4, 4), last=lambda: Loss(4, 4), **changed):
    stack = ListStack([lambda: Layer(4, 4), middle, last], seed=0)
    adam = OptimizerSpec(factory=torch.optim.Adam, lr=lambda step: 1e-2)
    given = dict(stack=stack, optimizer=adam, data=data, steps=6, microbatches=2)
    return Trainer(**{**given, **changed})


"""


def train(statement: str = "trainer().run()") -> str:
    """Return the script whose last line is `statement`."""
    return f"{TRAIN}{statement}\n"


PLAIN = "print('done')\n"
"""A script that does not use elastic."""
FAILS = """\
import os


def load(path):
    raise ValueError(f"{path} has no rows")


if os.environ["RANK"] == "1":
    load("train.csv")
"""
"""It does not use elastic, and fails on node 1."""
FAILS_ONCE = FAILS.replace(
    'os.environ["RANK"] == "1"', 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
)
CLUSTER = """\
[model]
name = "gpt3-medium"
microbatches = 8
microbatch_size = 2

[[nodes]]
count = 3
device = "A40"

[links]
link = { bandwidth = "25Gbit" }
"""
