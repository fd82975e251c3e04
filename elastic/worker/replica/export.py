"""Hashes whole parameters, and exports them to a plain safetensors file.

Parameters come from state runs (`elastic.domain.state_layout`) of vaults or of a checkpoint, one
run per TP rank. Those that TP ranks split are joined first, so hash and file do not depend on the
TP size. Values are copied bit for bit. This module imports no torch, so that it starts fast.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.config import is_url
from elastic.domain.errors import FieldError, VaultError
from elastic.domain.state_layout import ITEM_BYTES, TensorEntry, read_header
from elastic.store import safetensors_stream
from elastic.store.checkpoints import SavedCheckpoint, latest

_RAW = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
"""Unsigned little-endian dtypes by item size."""


def parameters(runs: Sequence[memoryview]) -> Iterator[tuple[str, str, NDArray[np.generic]]]:
    """Yield (name, dtype, whole values as unsigned integers) of a layer, in name order.

    `runs` are the states of all TP ranks, in rank order. Raises VaultError if they do not match.
    """
    shards = [
        {entry.name: entry for entry in read_header(run).tensors if entry.name.startswith("param/")}
        for run in runs
    ]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise VaultError("TP ranks hold different parameters")
    for name in sorted(shards[0]):
        entry = shards[0][name]
        parts = [_values(run, shard[name]) for run, shard in zip(runs, shards, strict=True)]
        split = entry.shard_dim >= 0 and len(parts) > 1
        whole = np.concatenate(parts, entry.shard_dim) if split else parts[0]
        # Not ascontiguousarray, which gives a number the shape (1,).
        yield name.removeprefix("param/"), entry.dtype, np.asarray(whole, order="C")


def params_sha256(layers: Iterable[Sequence[memoryview]]) -> str:
    """Return the SHA-256 over layers in order, parameters in name order, little-endian bytes.

    `layers` has each layer's state runs, one per TP rank; a lazy iterable saves memory.
    """
    digest = hashlib.sha256()
    for runs in layers:
        for _, _, values in parameters(runs):
            digest.update(values.data)
    return digest.hexdigest()


def checkpoint_path(given: str | Path) -> str:
    """Return the path or URL of a checkpoint: `given`, or the newest one in it. Raises
    FieldError."""
    try:
        found = latest(given)
    except OSError as error:
        if not is_url(str(given)):
            raise
        remedy = f"it cannot be read: {error}; check bucket, credentials and endpoint"
        raise FieldError("CHECKPOINT", str(given), remedy) from error
    if found is None:
        remedy = "a checkpoint directory, or one that contains some, is needed"
        raise FieldError("checkpoint", str(given), remedy)
    return found


def checkpoint_runs(path: str | Path) -> Iterator[list[memoryview]]:
    """Yield the verified state runs of a checkpoint, layer by layer."""
    saved = SavedCheckpoint(path)
    for layer in range(saved.manifest.n_layers):
        yield [saved.state(layer, shard) for shard in range(saved.manifest.tp)]


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, force: bool = False
) -> dict[str, int | str]:
    """Write all parameters of a checkpoint to the safetensors file `out`, as layers.N.NAME.

    `checkpoint` is the directory of one step, or of all steps; then the newest is exported.
    Returns step, number of tensors, bytes and params_sha256. The file appears whole or not at all.
    Raises FieldError if `out` exists and `force` is not set, or if it cannot be written.
    """
    path, target = checkpoint_path(checkpoint), Path(out)
    if target.is_dir() or (target.exists() and not force):
        raise FieldError(
            "output", str(target), "the file exists; name another file or force overwriting"
        )
    if not target.absolute().parent.is_dir():
        raise FieldError("output", str(target), "its directory must exist")
    digest = hashlib.sha256()
    tensors: list[safetensors_stream.RawTensor] = []
    for layer, runs in enumerate(checkpoint_runs(path)):
        for name, dtype, values in parameters(runs):
            data = memoryview(values.reshape(-1).view(np.uint8).data)
            digest.update(data)
            full_name = f"layers.{layer}.{name}"
            tensors.append(safetensors_stream.RawTensor(full_name, dtype, values.shape, data))
    step, sha = SavedCheckpoint(path).manifest.step, digest.hexdigest()
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        metadata = {"step": str(step), "params_sha256": sha}
        nbytes, _ = safetensors_stream.write(fresh, tensors, metadata)
        os.replace(fresh, target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise FieldError("output", str(target), f"cannot be written: {error}") from error
    return {"step": step, "tensors": len(tensors), "bytes": nbytes, "params_sha256": sha}


def _values(run: memoryview, entry: TensorEntry) -> NDArray[np.generic]:
    raw = run[entry.offset : entry.offset + entry.nbytes]
    values: NDArray[np.generic] = np.frombuffer(raw, dtype=_RAW[ITEM_BYTES[entry.dtype]])
    if len(raw) != entry.nbytes:
        raise VaultError(f"{entry.name} is cut short")
    return values.reshape(entry.shape)
