"""Computes the hash of a finished job's parameters, from the last states in the vaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from elastic.domain.errors import VaultError
from elastic.domain.types import STATE, Copy, JobSpec, Plan, Slot, slot_of
from elastic.planning.plan.schemes import portion_of, state_of
from elastic.rpc.bulk.transfer import VaultClient
from elastic.worker.model.state_codec import as_memory, join_portions
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.replica.export import params_sha256
from elastic.worker.transport.cancellation import AbandonSignal


def job_sha256(
    plan: Plan,
    spec: JobSpec,
    vaults: Mapping[str, str],
    node: str,
    abandon: AbandonSignal,
    on_progress: Callable[[], object],
) -> str:
    """Return the SHA-256 of all parameters after the last step (`elastic.worker.replica.export`).

    `on_progress` is called for each chunk that was read, and for each layer that was hashed.
    Each holder's vault has its last state. Raises VaultError if a state is gone, and EpochAbandoned
    if the epoch is abandoned.
    """
    first = None if state_of(plan.state).sharded else 1
    holders = {
        layer: {
            unit.node: portion_of(plan, unit.node, layer) for unit in plan.holders(layer)[:first]
        }
        for layer in range(plan.n_layers)
    }
    copies: dict[Slot, Copy] = {}
    for holder in dict.fromkeys(node for portions in holders.values() for node in portions):
        client = VaultClient(vaults[holder], node=node, peer=holder)
        abandon.subscribe(client.close)  # it ends the call, as the vault may be unreachable
        try:
            inventory = client.inventory()
        except VaultError:
            abandon.check()
            raise
        finally:
            abandon.unsubscribe(client.close)
            client.close()
        # Copies of older epochs may have diverged.
        for copy in sorted(inventory, key=lambda copy: -copy.epoch):
            last = (copy.kind, copy.step, copy.owner) == (STATE, spec.n_steps, holder)
            if last and holders[copy.layer].get(holder) == copy.portion:
                copies.setdefault(copy.slot, copy)
    fetcher = Fetcher(node, vaults, abandon, on_progress=on_progress)

    def layers() -> Iterator[list[memoryview]]:
        for layer in range(plan.n_layers):
            number = max(number for _, number in holders[layer].values())
            runs = []
            for shard in range(plan.tp):
                slots = [slot_of(layer, shard, (index, number)) for index in range(number)]
                found = [fetcher.fetch(_require(copies, slot)).data for slot in slots]
                runs.append(as_memory(join_portions(found)))
            yield runs
            on_progress()

    try:
        return params_sha256(layers())
    finally:
        fetcher.close()


def _require(copies: Mapping[Slot, Copy], slot: Slot) -> Copy:
    copy = copies.get(slot)
    if copy is None:
        layer, shard, *portion = slot
        which = f", portion {portion[0]} of {portion[1]}," if portion else ""
        raise VaultError(f"no vault has the last state of layer {layer}, TP rank {shard}{which}")
    return copy
