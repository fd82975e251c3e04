"""Writes a node's part of a durable checkpoint out of its vault, so that no worker waits for a disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from elastic.agent.vault import Vault
from elastic.core.messages import CheckpointPart
from elastic.core.types import STATE
from elastic.errors import VaultError
from elastic.store.durable import commit, discard_incomplete, latest, validate
from elastic.store.durable import write_part as _write
from elastic.store.slots import checksum

__all__ = ["commit", "discard_incomplete", "latest", "validate", "write_part"]


def write_part(
    vault: Vault, directory: Path, step: int, layers: Iterable[tuple[int, int]], n_layers: int, tp: int
) -> CheckpointPart:
    """Write the states of version `step` of `layers`, (layer, TP rank) pairs, to the checkpoint in
    `directory`.

    Blocks on the disk: call it from a thread of its own. Raises VaultError if a state is not in the vault
    or goes while it is written, FieldError if the directory cannot be written.
    """
    wanted = tuple(layers)
    for layer, shard in wanted:
        copy = vault.find(STATE, layer, shard, step)
        if copy is None:
            raise VaultError(
                f"state {step} of ({layer}, TP rank {shard}) is not in the vault of {vault.node}"
            )
        with vault.lease(copy.key) as run:
            _write(Path(directory), step, layer, shard, n_layers, tp, run)
            if checksum(run) != copy.checksum:
                raise VaultError(f"{copy.key} was overwritten while it was saved")
    return CheckpointPart(step, wanted)
