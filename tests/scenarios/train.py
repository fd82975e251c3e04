"""Train a small language model of plain layers: the usual job of the scenarios.

It has as many parameters as the small GPT of `catalogue.BASE`. Its workers start in less time,
because they do not load megatron-core.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from elastic import Evaluation, ListStack, Microbatch, Trainer
from elastic.worker.model.learning_rate import cosine
from elastic.worker.model.optimizer import adamw

VOCABULARY, WIDER = 256, 6


class Embedding(nn.Linear):
    """The first layer: tokens -> hidden states. The uniform initial values of a linear layer need
    no part of torch's compiler on the meta device; the normal ones of nn.Embedding do."""

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:  # type: ignore[override]
        return nn.functional.embedding(microbatch.fields["tokens"], self.weight)


class Block(nn.Module):
    """A residual layer of 12 * width**2 weights, as many as a transformer layer has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, WIDER * width), nn.Linear(WIDER * width, width)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        change: Tensor = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + change


class Head(nn.Linear):
    """The last layer: hidden states -> mean loss of the next tokens."""

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:  # type: ignore[override]
        logits = super().forward(hidden)
        if microbatch.in_evaluation:
            microbatch.report("confidence", logits.softmax(dim=-1).amax(dim=-1).mean())
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), microbatch.fields["labels"].view(-1)
        )


def main() -> None:
    flags = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--hidden", type=int, default=64)
    flags.add_argument("--seq-len", type=int, default=16)
    flags.add_argument("--micro-batch-size", type=int, default=2)
    flags.add_argument("--num-microbatches", type=int, default=6)
    flags.add_argument("--steps", type=int, required=True)
    flags.add_argument("--checkpoint-every", type=int, default=0)
    flags.add_argument("--evaluate-every", type=int, default=0)
    flags.add_argument("--evaluation-microbatches", type=int, default=5)
    given = flags.parse_args()
    shape = (given.micro_batch_size, given.seq_len + 1)

    def data(step: int, index: int) -> Microbatch:
        generator = torch.Generator().manual_seed(1000 * step + index)
        text = torch.randint(VOCABULARY, shape, generator=generator).sort(dim=1).values
        fields = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
        return Microbatch(step, index, fields)

    def unseen(step: int, index: int) -> Microbatch:
        return Microbatch(step, index, data(-1, index).fields)

    evaluation = Evaluation(
        data=unseen, every=given.evaluate_every or 1, microbatches=given.evaluation_microbatches
    )
    layers = [
        lambda: Embedding(given.hidden, VOCABULARY, bias=False),
        *[lambda: Block(given.hidden)] * given.layers,
        lambda: Head(given.hidden, VOCABULARY),
    ]
    tokens, width = given.micro_batch_size * given.seq_len, given.hidden
    Trainer(
        stack=ListStack(layers, seed=0),
        optimizer=adamw(cosine(2e-3, warmup=5, steps=given.steps)),
        data=data,
        steps=given.steps,
        microbatches=given.num_microbatches,
        tokens_per_microbatch=tokens,
        flops_per_microbatch=6 * tokens * width * (2 * WIDER * width * given.layers + VOCABULARY),
        checkpoint_every=given.checkpoint_every,
        evaluation=evaluation if given.evaluate_every else None,
    ).run()


if __name__ == "__main__":
    main()
