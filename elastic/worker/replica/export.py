"""Whole parameters out of state runs: their hash, and a plain safetensors file. NumPy only, so that it
starts fast.

Runs (`elastic.domain.state_layout`) come from vaults or from a checkpoint, one a TP rank; parameters that TP ranks
split are joined first, so that neither hash nor file depends on the TP size. Low-precision values stay the
bits that they are.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.domain.errors import FieldError, VaultError
from elastic.domain.state_layout import ITEM_BYTES, TensorEntry, read_header
from elastic.store import checkpoint_directory, safetensors_stream

_RAW = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
"""Unsigned little-endian stand-ins, by item size: values are moved, never converted."""


def parameters(runs: Sequence[memoryview]) -> Iterator[tuple[str, str, NDArray[np.generic]]]:
    """(name, dtype, whole values as unsigned integers) of a layer's parameters in name order.

    `runs` are the states of all TP ranks, in rank order. Raises VaultError if they do not fit together.
    """
    shards = [{e.name: e for e in read_header(run).tensors if e.name.startswith("param/")} for run in runs]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise VaultError("TP ranks hold different parameters")
    for name in sorted(shards[0]):
        entry = shards[0][name]
        parts = [_values(run, shard[name]) for run, shard in zip(runs, shards, strict=True)]
        whole = parts[0] if entry.shard_dim < 0 or len(parts) == 1 else np.concatenate(parts, entry.shard_dim)
        yield name.removeprefix("param/"), entry.dtype, np.ascontiguousarray(whole)


def params_sha256(layers: Iterable[Sequence[memoryview]]) -> str:
    """SHA-256 over layers in order, parameters in name order, little-endian bytes.

    `layers` gives each layer's state runs, one a TP rank; it may be lazy, so that one layer is in memory at
    a time.
    """
    digest = hashlib.sha256()
    for runs in layers:
        for _, _, values in parameters(runs):
            digest.update(values.data)
    return digest.hexdigest()


def checkpoint_runs(path: Path) -> Iterator[list[memoryview]]:
    """The state runs of all layers of a checkpoint, one layer at a time, verified."""
    manifest = checkpoint_directory.read_manifest(path)
    for layer in range(manifest.n_layers):
        yield [checkpoint_directory.read_run(path, manifest, layer, shard) for shard in range(manifest.tp)]


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, force: bool = False
) -> dict[str, int | str]:
    """Write all parameters of a checkpoint to the safetensors file `out`, named layers.N.NAME.

    `checkpoint` is a step's directory, or the directory of all, of which the newest is taken. Returns step,
    number of tensors, bytes and params_sha256. An existing file is refused unless `force`; `out` appears
    whole or not.
    """
    path, target = _resolve(Path(checkpoint)), Path(out)
    if target.is_dir() or (target.exists() and not force):
        raise FieldError("output", str(target), "it exists; name another file or force overwriting")
    if not target.absolute().parent.is_dir():
        raise FieldError("output", str(target), "its directory must exist")
    digest = hashlib.sha256()
    tensors: list[safetensors_stream.RawTensor] = []
    for layer, runs in enumerate(checkpoint_runs(path)):
        for name, dtype, values in parameters(runs):
            data = memoryview(values.reshape(-1).view(np.uint8).data)
            digest.update(data)
            tensors.append(safetensors_stream.RawTensor(f"layers.{layer}.{name}", dtype, values.shape, data))
    step, sha = checkpoint_directory.read_manifest(path).step, digest.hexdigest()
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        nbytes, _ = safetensors_stream.write(fresh, tensors, {"step": str(step), "params_sha256": sha})
        os.replace(fresh, target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise FieldError("output", str(target), f"cannot be written: {error}") from error
    return {"step": step, "tensors": len(tensors), "bytes": nbytes, "params_sha256": sha}


def _resolve(path: Path) -> Path:
    if (path / checkpoint_directory.MANIFEST).exists():
        return path
    found = checkpoint_directory.latest(path)
    if found is None:
        remedy = "a checkpoint directory, or one that contains some, is needed"
        raise FieldError("checkpoint", str(path), remedy)
    return found


def _values(run: memoryview, entry: TensorEntry) -> NDArray[np.generic]:
    raw = run[entry.offset : entry.offset + entry.nbytes]
    values: NDArray[np.generic] = np.frombuffer(raw, dtype=_RAW[ITEM_BYTES[entry.dtype]])
    if len(raw) != entry.nbytes:
        raise VaultError(f"{entry.name} is cut short")
    return values.reshape(entry.shape)
