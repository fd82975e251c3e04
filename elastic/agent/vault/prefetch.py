"""Fetches state into the vault of a node that is about to join, while training goes on."""

from __future__ import annotations

import logging
from contextlib import closing

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Prefetch
from elastic.domain.errors import StaleError, VaultError
from elastic.domain.types import STATE, Copy
from elastic.rpc.bulk.transfer import VaultClient

log = logging.getLogger(__name__)


def prefetch(vault: Vault, order: Prefetch) -> int:
    """Fetch the newest state of each (layer, TP rank) in `order`; return the number of bytes.

    Failures are only logged: the node fetches missing state when its first epoch begins.
    """
    addresses, total = dict(order.vaults), 0
    for node in dict.fromkeys(source for _, _, source in order.sources):
        if node not in addresses:
            log.warning("prefetch from %s failed: it is no longer a member", node)
            continue
        wanted = {(layer, shard) for layer, shard, source in order.sources if source == node}
        try:
            with closing(VaultClient(addresses[node], node=vault.node, peer=node)) as client:
                newest: dict[tuple[int, int], Copy] = {}
                for copy in sorted(client.inventory(), key=lambda c: (c.step, c.epoch, c.sequence)):
                    place = copy.layer, copy.shard
                    if copy.kind == STATE and copy.owner == node and place in wanted:
                        newest[place] = copy
                total += sum(_fetch(vault, client, copy) for copy in newest.values())
        except VaultError as error:
            log.warning("prefetch from %s failed: %s", node, error)
    return total


def _fetch(vault: Vault, client: VaultClient, copy: Copy) -> int:
    """Fetch one copy; return its size in bytes, or 0 if it no longer exists."""
    try:
        incoming = vault.store(copy, trusted=True)
        try:
            client.get(copy, incoming.buffer)
            incoming.commit()
        finally:
            incoming.abort()
    except (VaultError, StaleError) as error:
        log.info("prefetch of %s failed: %s", copy.key, error)
        return 0
    return copy.nbytes
