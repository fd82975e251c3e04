"""Datasets of other libraries: datasets and torchdata (extra `data`), and megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.utils.data import TensorDataset

from elastic import (
    PackedDocuments,
    from_dataloader,
    from_dataset,
    from_stream,
    megatron_dataset,
)

datasets = pytest.importorskip("datasets", reason="needs the extra data")
stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra data")


def table(count: int = 12) -> Any:
    rows = [[n, n + 1, n + 2] for n in range(count)]
    return datasets.Dataset.from_dict({"ids": rows, "text": [f"number {n}" for n in range(count)]})


def test_a_dataset_of_the_datasets_package() -> None:
    source = from_dataset(table(), rows=4, microbatches=3, seed=1, fields=["ids"])
    read = [row[0] for index in range(3) for row in source(0, index).fields["ids"].tolist()]
    assert sorted(read) == list(range(12))
    assert source(7, 2).fields["ids"].tolist() == source(7, 2).fields["ids"].tolist()


def test_documents_of_a_dataset_are_packed() -> None:
    packed = PackedDocuments(table()["ids"], 9)
    assert len(packed) == 4
    assert packed[1]["position_ids"].tolist() == [0, 1, 2] * 3


def test_a_streamed_dataset_that_is_shuffled() -> None:
    stream = table().to_iterable_dataset(num_shards=3).shuffle(seed=4, buffer_size=5)

    def read(keys: list[tuple[int, int]]) -> dict[tuple[int, int], list[list[int]]]:
        source = from_stream(stream, rows=2, microbatches=3, fields=["ids"])
        return {key: source(*key).fields["ids"].tolist() for key in keys}

    keys = [(step, index) for step in range(4) for index in range(3)]
    there, back = read(keys), read(keys[::-1])
    assert there == back
    one, two = ([row[0] for key in half for row in there[key]] for half in (keys[:6], keys[6:]))
    assert sorted(one) == sorted(two) == list(range(12)) and one != two


def test_a_stateful_dataloader() -> None:
    loader = stateful.StatefulDataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)
    source = from_dataloader(loader, microbatches=3, seed=2, fields=["x"])
    read = [n for index in range(3) for n in source(0, index).fields["x"].tolist()]
    assert sorted(read) == list(range(6))


class Tokenizer:
    """The part of a tokenizer that megatron-core's GPTDataset uses."""

    eod = 0
    pad = 0
    vocab_size = 30000
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "Tokenizer"}


def write_indexed(prefix: Path, first: int) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in range(20):
        tokens = torch.arange(first + 10 * document, first + 10 * document + 9)
        builder.add_document(torch.cat([tokens, torch.zeros(1, dtype=torch.int64)]), [10])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_a_blend_of_indexed_datasets_of_megatron(tmp_path: Path) -> None:
    prefixes = [write_indexed(tmp_path / name, first) for name, first in (("a", 1), ("b", 10001))]
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=8,
        blend=(prefixes, [0.7, 0.3]),
        split="1,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
    )
    before = torch.distributed.is_initialized()  # by an earlier test of this process
    dataset = megatron_dataset(GPTDataset, config, samples=40)
    assert torch.distributed.is_initialized() == before
    fields = ["tokens", "labels", "loss_mask", "position_ids"]
    source = from_dataset(dataset, rows=4, microbatches=5, shuffle=False, fields=fields)
    read = source(1, 3).fields
    assert {name: tuple(value.shape) for name, value in read.items()} == dict.fromkeys(
        fields, (4, 8)
    )
    assert torch.equal(read["tokens"][:, 1:], read["labels"][:, :-1])
    tokens = torch.cat([source(step, i).fields["tokens"] for step in range(2) for i in range(5)])
    assert 0.2 < (tokens > 10000).any(1).float().mean().item() < 0.5
