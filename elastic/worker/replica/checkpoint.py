"""Reads a layer's state from a durable checkpoint, whatever TP size it was saved with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.domain.state_layout import StateHeader, read_header
from elastic.store.checkpoint_directory import read_manifest, read_run
from elastic.worker.model.state_codec import reshard
from elastic.worker.replica.replica import LayerReplica


def read_layer(path: str | Path, layer: int) -> list[Tensor]:
    """The layer's state runs, uint8 [n], of all TP ranks in rank order. FieldError if it is corrupt."""
    directory = Path(path)
    manifest = read_manifest(directory)
    runs: list[Tensor] = []

    def allocate(nbytes: int) -> memoryview:
        runs.append(torch.empty(nbytes, dtype=torch.uint8))
        return memoryview(runs[-1].numpy().data)

    for shard in range(manifest.tp):
        read_run(directory, manifest, layer, shard, allocate)
    return runs


def load_layer(path: str | Path, replica: LayerReplica, tp: int | None = None) -> None:
    """Read the state of `replica`'s layer into it, version included. `tp`: inferred from shapes if None."""
    runs = read_layer(path, replica.index)
    size = tp if tp is not None else _tp_of(replica, runs)
    replica.read_state(reshard(runs, replica.shard, size))


def _tp_of(replica: LayerReplica, runs: list[Tensor]) -> int:
    """How many ranks share the layer: the whole extent of a split parameter over this replica's."""
    header: StateHeader = read_header(memoryview(runs[0].numpy().data))
    mine = {f"param/{name}": parameter.shape for name, parameter in replica.module.named_parameters()}
    for entry in header.tensors:
        if entry.shard_dim >= 0 and entry.name in mine:
            whole = entry.shape[entry.shard_dim] * len(runs)
            part = mine[entry.name][entry.shard_dim]
            if part < 1 or whole % part:
                remedy = f"must be split into parts of {part}, but is {whole} long"
                raise FieldError("checkpoint", entry.name, remedy)
            return int(whole // part)
    return len(runs)
