"""Writes a checkpoint's parameters as torch.distributed.checkpoint (DCP) does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from elastic.store.checkpoints import SavedCheckpoint
from elastic.store.safetensors_stream import RawTensor
from elastic.worker.contrib.distributed_checkpoint import Part, as_tensor, write
from elastic.worker.contrib.folders import new_folder
from elastic.worker.replica.export import checkpoint_path, checkpoint_runs, parameters


def to_distributed_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    model: str | Path | None = None,
    *,
    shard_bytes: int = 5 << 30,
) -> dict[str, int | str]:
    """Write the parameters of a checkpoint to the new folder `out`, and return what it holds.

    It appears whole or not at all. A file is in memory at a time, twice while it is written.

    Args:
        checkpoint: the directory of one step, or of all steps; then the newest is taken.
        model: folder with the config.json of a Hugging Face model, whose names are used; None: a
            parameter is layers.N.NAME, and each layer has a file.
        shard_bytes: largest size of a file of a Hugging Face model, unless a tensor is larger.

    Raises FieldError if `out` exists or cannot be written, or for a checkpoint of another model.
    """
    path, digest = checkpoint_path(checkpoint), hashlib.sha256()
    with new_folder(Path(out), path) as fresh:
        if model is None:
            files: Iterator[Sequence[RawTensor]] = _layers(path, digest)
        else:
            from elastic.worker.contrib.huggingface.export import named_tensors  # extra hf

            files = named_tensors(path, Path(model), digest, shard_bytes)
        write(fresh, (list(map(_part, file)) for file in files))
    step = SavedCheckpoint(path).manifest.step
    return {"step": step, "params_sha256": digest.hexdigest()}


def _layers(path: str, digest: hashlib._Hash) -> Iterator[list[RawTensor]]:
    for layer, runs in enumerate(checkpoint_runs(path)):
        tensors = []
        for name, dtype, values in parameters(runs):
            data = memoryview(values.reshape(-1).view(np.uint8).data)
            digest.update(data)
            tensors.append(RawTensor(f"layers.{layer}.{name}", dtype, values.shape, data))
        yield tensors


def _part(tensor: RawTensor) -> Part:
    return Part(tensor.name, as_tensor(tensor.dtype, tensor.data, tensor.shape))
