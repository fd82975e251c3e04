"""Writes a node's part of a durable checkpoint out of its vault, so that no worker waits for a disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from elastic.agent.vault import Vault
from elastic.core.messages import CheckpointPart
from elastic.core.types import STATE
from elastic.errors import VaultError
from elastic.store.durable import commit, discard_incomplete, latest, validate
from elastic.store.durable import write_part as _write

__all__ = ["commit", "discard_incomplete", "latest", "validate", "write_part"]


def write_part(
    vault: Vault, directory: Path, step: int, layers: Iterable[tuple[int, int]], n_layers: int, tp: int
) -> CheckpointPart:
    """Write the states of version `step` of `layers`, (layer, TP rank) pairs, to the checkpoint in `directory`.

    All states are taken hold of first, so that training may overwrite them while the disk is slow; those that
    peers sent are not copied for that. Blocks: call it from a thread of its own. Raises VaultError if a state
    is not in the vault, FieldError if the directory cannot be written.
    """
    wanted = tuple(layers)
    with contextlib.ExitStack() as held:
        runs = [held.enter_context(vault.hold(_key(vault, layer, shard, step))) for layer, shard in wanted]
        for (layer, shard), run in zip(wanted, runs, strict=True):
            _write(Path(directory), step, layer, shard, n_layers, tp, run)
    return CheckpointPart(step, wanted)


def _key(vault: Vault, layer: int, shard: int, step: int) -> str:
    copy = vault.find(STATE, layer, shard, step)
    if copy is None:
        raise VaultError(f"state {step} of layer {layer}, TP rank {shard}: not in the vault of {vault.node}")
    return copy.key
