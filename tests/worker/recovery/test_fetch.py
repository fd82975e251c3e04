"""Reading copies from the local vault and from peers."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import VaultError
from elastic.domain.types import Copy
from elastic.rpc.frames import CHUNK_BYTES
from elastic.worker.recovery.fetch import FetchedCopy, Fetcher
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.agent.vault.nodes import MiniNode, ProcessVault, nodes
from tests.patience import LONG_S


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[MiniNode]]:
    with nodes(tmp_path, "a", "b") as made:
        yield made


def addresses(made: list[MiniNode]) -> dict[str, str]:
    return {node.name: node.server.address for node in made}


def fetch(copy: Copy, vaults: dict[str, str], node: str) -> FetchedCopy:
    """Fetch one copy over connections of its own."""
    fetcher = Fetcher(node, {copy.node: vaults.get(copy.node, "")})
    try:
        return fetcher.fetch(copy)
    finally:
        fetcher.close()


def test_own_copies_come_through_shared_memory(pair: list[MiniNode], tmp_path: Path) -> None:
    a, _ = pair
    data = content(1, 100_000)
    arrived = put(a.vault, make(data), data)
    a.vault.publish(LocalWriter(tmp_path / "w").write(0, make(data, layer=1, owner="a"), data))
    for copy in a.vault.inventory():
        got = fetch(copy, addresses(pair), "a")
        assert got.source == "shared-memory" and bytes(got.data.numpy()) == data
        assert got.data.data_ptr() % 64 == 0
    assert arrived in a.vault.inventory()


def test_peers_copies_come_over_the_network(pair: list[MiniNode]) -> None:
    _, b = pair
    data = content(2, 3_000_000)
    got = fetch(put(b.vault, make(data), data), addresses(pair), "a")
    assert (
        got.source == "peer:b" and bytes(got.data.numpy()) == data and got.data.data_ptr() % 64 == 0
    )


def test_missing_torn_and_unknown_copies_are_vault_errors(
    pair: list[MiniNode], tmp_path: Path
) -> None:
    a, b = pair
    vaults = addresses(pair)
    copy = put(b.vault, make(content(1)), content(1))
    with pytest.raises(VaultError, match="no vault of z"):
        fetch(dataclasses.replace(copy, node="z"), vaults, "a")
    b.vault.trim(9)
    with pytest.raises(VaultError, match="not in the vault of b"):
        fetch(copy, vaults, "a")
    writer = LocalWriter(tmp_path / "w")
    a.vault.publish(writer.write(0, make(content(1), owner="a"), content(1)))
    (torn,) = a.vault.inventory()
    writer.slots[0].view(10)[5] ^= 4
    with pytest.raises(VaultError, match="torn"):
        fetch(torn, vaults, "a")
    assert a.vault.inventory() == (), "the vault verified the copy and dropped it"
    b.server.close()
    with pytest.raises(VaultError):
        fetch(copy, vaults, "a")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_abandoned_transfers_end_at_once(tmp_path: Path, when: str) -> None:
    peer = ProcessVault("p", tmp_path / "p")
    try:
        peer.signal(signal.SIGSTOP)
        abandon = AbandonSignal()
        if when == "before":
            abandon.set("epoch 2")
        fetcher = Fetcher("a", {"p": peer.address}, abandon, timeout_s=LONG_S)
        threading.Timer(0.1, abandon.set, ("epoch 2",)).start()
        copy: Copy = dataclasses.replace(make(content(1)), node="p")
        with pytest.raises(EpochAbandoned, match="epoch 2"):
            fetcher.fetch(copy)
        fetcher.close()
    finally:
        peer.close()


@pytest.mark.parametrize("end", ["abandoned", "closed"])
def test_a_read_of_shared_memory_ends_after_a_chunk(
    pair: list[MiniNode], tmp_path: Path, end: str
) -> None:
    a, _ = pair
    data, chunks, abandon = content(1, 2 * CHUNK_BYTES + 1), list[int](), AbandonSignal()
    a.vault.publish(LocalWriter(tmp_path / "w").write(0, make(data, owner="a"), data))
    (copy,) = a.vault.inventory()

    def progress() -> None:
        chunks.append(1)
        abandon.set("epoch 2") if end == "abandoned" else fetcher.close()

    fetcher = Fetcher("a", addresses(pair), abandon, on_progress=progress)
    with pytest.raises(EpochAbandoned if end == "abandoned" else VaultError):
        fetcher.fetch(copy)
    fetcher.close()
    assert len(chunks) == 1


@pytest.mark.parametrize(
    "changes", [{"microbatches": frozenset({0, 2})}, {"step": 2}, {"layer": 1}]
)
@pytest.mark.parametrize("reader", ["a", "b"])
def test_a_copy_with_an_altered_description_is_refused(
    pair: list[MiniNode], tmp_path: Path, changes: dict[str, Any], reader: str
) -> None:
    """By its own node, which reads shared memory, and by a peer. The vault then drops it."""
    a, _ = pair
    altered = dataclasses.replace(gradient(content(1), 1, {0, 1}, owner="a"), **changes)
    a.vault.publish(LocalWriter(tmp_path / "w").write(0, altered, content(1)))
    with pytest.raises(VaultError, match=r"checksum 2:\w+, not 2:"):
        fetch(dataclasses.replace(altered, node="a"), addresses(pair), reader)
    assert a.vault.inventory() == ()
