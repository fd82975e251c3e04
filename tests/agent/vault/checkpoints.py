"""Small checkpoints for tests of interrupted writes."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

from elastic.store import checkpoint_directory
from elastic.store.checkpoint_format import CheckpointFile, Manifest
from tests.agent.vault.copies import state_run

N_LAYERS = 3


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def layer_run(layer: int, version: int, shard: int = 0, tp: int = 1) -> bytes:
    """A weight [2, 4] split by column, a bf16 bias split by row, a shared norm, and moments."""
    columns = range(4)[shard * 4 // tp : (shard + 1) * 4 // tp]
    weight = floats(
        *(100 * layer + 10 * row + column + version for row in range(2) for column in columns)
    )
    bias = bytes(b for row in columns for b in (row, 0x40 + layer))
    return state_run(
        version,
        [
            ("param/weight", "float32", (2, len(columns)), 1, weight),
            ("param/bias", "bfloat16", (len(columns),), 0, bias),
            ("param/a_norm", "float32", (1,), -1, floats(layer)),
            ("optim/weight/step", "int64", (), -1, struct.pack("<q", version)),
            ("optim/bias/odd", "uint8", (3,), -1, b"abc"),
        ],
        {"group": '{"lr_scale": 0.5}'},
    )


def write_layer(
    directory: Path, step: int, layer: int, epoch: int = 0, run: str = "", other: bool = False
) -> CheckpointFile:
    """`other`: with other values, as another run, or a replica with other last bits, has them."""
    state = memoryview(layer_run(layer + 50 * other, step))
    return checkpoint_directory.write_part(
        directory, step, layer, 0, N_LAYERS, 1, state, epoch, run
    )


def write_all(directory: Path, step: int, tp: int = 1, skip: tuple[int, ...] = ()) -> None:
    for layer in range(N_LAYERS):
        for shard in range(tp):
            if layer not in skip:
                run = memoryview(layer_run(layer, step, shard, tp))
                checkpoint_directory.write_part(directory, step, layer, shard, N_LAYERS, tp, run)


def whole(directory: Path, step: int, tp: int = 1) -> Path:
    write_all(directory, step, tp)
    return checkpoint_directory.commit(directory, step)


def verified(path: Path) -> Manifest:
    """Read every state, which compares all checksums; return the manifest."""
    manifest = checkpoint_directory.read_manifest(path)
    for part in manifest.parts:
        checkpoint_directory.read_run(path, manifest, part.layer, part.shard)
    return manifest


def write_and_die(directory: str, where: str, reached: object) -> None:
    """Write a checkpoint; stop forever at `where`."""

    def stop(*_: object) -> None:
        reached.set()  # type: ignore[attr-defined]
        signal.pause()

    if where == "before a part is renamed":
        os.replace = stop  # type: ignore[assignment]
    elif where == "before the commit":
        os.rename = stop  # type: ignore[assignment]
    whole(Path(directory), 7)
