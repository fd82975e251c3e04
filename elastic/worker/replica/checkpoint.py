"""Reads a layer's state from a durable checkpoint of any tensor-parallel size."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from elastic.domain.errors import FieldError, VaultError
from elastic.store.checkpoints import SavedCheckpoint
from elastic.worker.model.state_codec import as_memory, reshard
from elastic.worker.replica.replica import LayerReplica


def read_layer(path: str | Path, layer: int) -> list[Tensor]:
    """Return the layer's state runs (uint8 [n]) in TP rank order. FieldError if one is corrupt."""
    saved = SavedCheckpoint(path)
    runs: list[Tensor] = []

    def allocate(nbytes: int) -> memoryview:
        runs.append(torch.empty(nbytes, dtype=torch.uint8))
        return as_memory(runs[-1])

    for shard in range(saved.manifest.tp):
        saved.state(layer, shard, allocate)
    return runs


def load_layer(path: str | Path, replica: LayerReplica) -> None:
    """Load the state and version of `replica`'s layer, converted to the replica's TP size.

    Raises CorruptCheckpoint if the checkpoint is damaged, and FieldError if it cannot be read now
    or is of another model.
    """
    runs = read_layer(path, replica.index)
    try:
        replica.read_state(reshard(runs, replica.shard, replica.tp_size))
    except VaultError as error:
        remedy = f"the checkpoint is of another model: {error}"
        raise FieldError("--resume", str(path), remedy) from error
