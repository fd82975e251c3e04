"""Pulls layers' state into the local vault while training goes on, for a node that is about to join."""

from __future__ import annotations

from elastic.agent.vault import Vault
from elastic.core.messages import Prefetch
from elastic.core.types import STATE
from elastic.rpc.bulk import VaultClient


def prefetch(vault: Vault, order: Prefetch) -> int:
    """Fetch the newest state of every (layer, TP rank) of the order. Return the bytes fetched.

    Raises VaultError when a source is gone. What was superseded meanwhile is fetched at entry instead.
    """
    addresses, total = dict(order.vaults), 0
    for node in dict.fromkeys(source for _, _, source in order.sources):
        client = VaultClient(addresses[node], node=vault.node)
        try:
            here = [c for c in client.inventory() if c.kind == STATE and c.owner == node]
            for layer, shard, source in order.sources:
                copies = [c for c in here if source == node and (c.layer, c.shard) == (layer, shard)]
                if not copies:
                    continue
                newest = max(copies, key=lambda c: (c.step, c.epoch, c.sequence))
                incoming = vault.store(newest, trusted=True)
                try:
                    client.get(newest, incoming.buffer)
                    incoming.commit()
                    total += newest.nbytes
                finally:
                    incoming.abort()
        finally:
            client.close()
    return total
