"""Train a small model on one of the sources of data.

python -m tests.scenarios.data.train_on SOURCE [--steps 8] [--checkpoint-every N] [--hurry FILE]

With `--hurry`, reading takes longer from step to step, until FILE exists.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from elastic import (
    Microbatch,
    PackedDocuments,
    Trainer,
    from_dataloader,
    from_dataset,
    from_sequential,
    from_stream,
    label_count,
    prefetch,
)
from elastic.worker.model.optimizer import adamw

ROWS, MICROBATCHES, WIDTH = 4, 6, 16
Source = Callable[[int, int], Microbatch]


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """50 samples, each with noise that is drawn whenever it is read."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), index / 50) + 0.1 * torch.rand(WIDTH), torch.tensor(index / 25)


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same without noise, in order; 37 samples a pass."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(37):
            yield {"x": torch.full((WIDTH,), index / 50), "y": torch.tensor(index / 25)}


def packed(samples: list[object]) -> dict[str, Tensor]:
    rows = [sample["input_ids"].float() / 50 for sample in samples]  # type: ignore[index]
    labels = [sample["labels"] for sample in samples]  # type: ignore[index]
    return {
        "x": torch.stack(rows),
        "y": torch.stack(rows).mean(1),
        "labels": torch.stack(labels),
    }


def dataset() -> Source:
    return from_dataset(Noisy(), rows=ROWS, microbatches=MICROBATCHES, seed=3, fields=("x", "y"))


def stream() -> Source:
    return from_stream(Stream(), rows=ROWS, microbatches=MICROBATCHES)


def loader() -> Source:
    batches = DataLoader(Noisy(), batch_size=ROWS, shuffle=True, num_workers=1)
    return from_dataloader(batches, microbatches=MICROBATCHES, seed=3, fields=("x", "y"))


def documents() -> Source:
    rows = PackedDocuments([list(range(n % 23 + 1)) for n in range(60)], WIDTH)
    return from_dataset(rows, rows=ROWS, microbatches=MICROBATCHES, seed=3, collate=packed)


def hidden() -> Source:
    """A source that must be refused: it draws from a generator of its own."""
    generator = torch.Generator().manual_seed(1)

    class Hidden(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.rand(WIDTH, generator=generator), torch.tensor(0.0)

    source = from_dataset(Hidden(), rows=ROWS, microbatches=MICROBATCHES, fields=("x", "y"))
    return prefetch(source, processes=1)


def local() -> Source:
    """A source that must be refused: each node has other samples."""
    node = float(os.environ["ELASTIC_NODE"].removeprefix("node"))
    samples = [(torch.full((WIDTH,), index / 50), torch.tensor(node)) for index in range(50)]
    return from_dataset(
        samples, rows=ROWS, microbatches=MICROBATCHES, collate=rounded, shuffle=False
    )


def rounded(samples: list[object]) -> dict[str, Tensor]:
    """Return the samples, with the second part as a whole number too."""
    x, y = (torch.stack(list(part)) for part in zip(*samples, strict=True))
    return {"x": x, "y": y, "label": y.long()}


def paced(source: Source, hurry: Path) -> Source:
    """Return `source` that takes 0.5 s a micro-batch in step 3, and twice as long in each step."""

    def read(step: int, index: int) -> Microbatch:
        end = time.monotonic() + 0.5 * 2 ** (step - 3)
        while time.monotonic() < end and not hurry.exists():
            time.sleep(0.02)
        return source(step, index)

    return read


WEIGHTS: dict[str, Callable[[Mapping[str, Tensor]], object]] = {
    "stream": lambda fields: fields["y"].sum(),
    "documents": label_count(shifted=True),
}
SOURCES = {f.__name__: f for f in (dataset, stream, loader, documents, hidden, local)}


def main() -> None:
    flags = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_argument("source", choices=SOURCES)
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--hurry", type=Path)
    flags.add_argument("--checkpoint-every", type=int, default=0)
    given = flags.parse_args()
    source = SOURCES[given.source]()
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    Trainer(
        stack=from_sequential(
            nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
            loss=lambda y, microbatch: (y[:, 0] - microbatch.fields["y"]).square().mean(),
        ),
        optimizer=adamw(0.01),
        data=source if given.hurry is None else paced(source, given.hurry),
        steps=given.steps,
        microbatches=MICROBATCHES,
        weight=WEIGHTS.get(given.source),
        tokens_per_microbatch=ROWS * WIDTH if given.source == "documents" else 2,
        checkpoint_every=given.checkpoint_every,
    ).run()


if __name__ == "__main__":
    main()
