"""The hash of a finished job's parameters, read from the vaults of those who hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic.core.types import STATE, Copy, JobSpec, Plan
from elastic.errors import VaultError
from elastic.rpc.bulk import VaultClient
from elastic.worker.abandon import Abandon
from elastic.worker.export import params_sha256
from elastic.worker.fetch import Fetcher


def job_sha256(plan: Plan, spec: JobSpec, vaults: Mapping[str, str], node: str, abandon: Abandon) -> str:
    """SHA-256 of all parameters after the last step (`elastic.worker.export.params_sha256`).

    Everybody's last state is in its vault. Raises VaultError if one is gone, EpochAbandoned when told to give up.
    """
    holders = {layer: plan.holders(layer)[0].node for layer in range(plan.n_layers)}
    copies: dict[tuple[int, int], Copy] = {}
    for holder in dict.fromkeys(holders.values()):
        client = VaultClient(vaults[holder], node=node)
        try:
            inventory = client.inventory()
        finally:
            client.close()
        for copy in inventory:
            if (
                copy.kind == STATE
                and copy.step == spec.n_steps
                and holders[copy.layer] == copy.owner == holder
            ):
                copies[copy.layer, copy.shard] = copy
    fetcher = Fetcher(node, vaults, abandon)

    def layers() -> Iterator[list[memoryview]]:
        for layer in range(plan.n_layers):
            yield [_bytes(fetcher, copies, layer, shard) for shard in range(plan.tp)]

    try:
        return params_sha256(layers())
    finally:
        fetcher.close()


def _bytes(fetcher: Fetcher, copies: Mapping[tuple[int, int], Copy], layer: int, shard: int) -> memoryview:
    copy = copies.get((layer, shard))
    if copy is None:
        raise VaultError(f"the last state of layer {layer}, TP rank {shard}, is in no vault")
    return memoryview(fetcher.fetch(copy).data.numpy().data)
