"""The hash of a finished job's parameters, read from the vaults of those who hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from elastic.domain.errors import VaultError
from elastic.domain.types import STATE, Copy, JobSpec, Plan, Slot, slot_of
from elastic.planning.plan.schemes import portion_of, state_of
from elastic.rpc.bulk.transfer import VaultClient
from elastic.worker.model.state_codec import as_memory, join_portions
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.replica.export import params_sha256
from elastic.worker.transport.cancellation import AbandonSignal


def job_sha256(plan: Plan, spec: JobSpec, vaults: Mapping[str, str], node: str, abandon: AbandonSignal) -> str:
    """SHA-256 of all parameters after the last step (`elastic.worker.replica.export.params_sha256`).

    Everybody's last state is in its vault. Raises VaultError if one is gone, EpochAbandoned when told to give up.
    """
    first = None if state_of(plan.state).sharded else 1
    holders = {
        layer: {unit.node: portion_of(plan, unit.node, layer) for unit in plan.holders(layer)[:first]}
        for layer in range(plan.n_layers)
    }
    copies: dict[Slot, Copy] = {}
    for holder in dict.fromkeys(node for portions in holders.values() for node in portions):
        client = VaultClient(vaults[holder], node=node)
        try:
            inventory = client.inventory()
        finally:
            client.close()
        for copy in inventory:
            if (
                copy.kind == STATE
                and copy.step == spec.n_steps
                and copy.owner == holder
                and holders[copy.layer].get(holder) == copy.portion
            ):
                copies.setdefault(copy.slot, copy)
    fetcher = Fetcher(node, vaults, abandon)

    def layers() -> Iterator[list[Tensor]]:
        for layer in range(plan.n_layers):
            number = max(number for _, number in holders[layer].values())
            portions = [(index, number) for index in range(number)]
            yield [
                join_portions([_fetched(fetcher, copies, slot_of(layer, shard, p)) for p in portions])
                for shard in range(plan.tp)
            ]

    try:
        return params_sha256([as_memory(run) for run in runs] for runs in layers())
    finally:
        fetcher.close()


def _fetched(fetcher: Fetcher, copies: Mapping[Slot, Copy], slot: Slot) -> Tensor:
    copy = copies.get(slot)
    if copy is None:
        layer, shard, *portion = slot
        which = f", portion {portion[0]} of {portion[1]}," if portion else ""
        raise VaultError(f"the last state of layer {layer}, TP rank {shard}{which} is in no vault")
    return fetcher.fetch(copy).data
