"""A sender asks for room before it sends a large bundle; no bundle waits for the room of others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain.errors import StaleError, VaultError, VaultFull
from elastic.domain.types import Copy
from elastic.rpc.bulk import transfer
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.bulk.transfer import ASK_BYTES, VaultClient
from tests.agent.agents import Slow
from tests.agent.vault.copies import LocalWriter, content, make
from tests.agent.vault.nodes import nodes
from tests.agent.vault.test_replicator import bundle
from tests.patience import LONG_S

HALF = ASK_BYTES // 2


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    """A vault with room for a bit more than two halves."""
    return Vault("a", tmp_path / "vault", limit=2 * HALF + (64 << 10))


@pytest.fixture
def server(vault: Vault) -> Iterator[VaultServer]:
    server = VaultServer(vault, timeout_s=LONG_S).start()
    yield server
    server.close()


def halves(count: int, layer: int = 0, epoch: int = 1) -> list[tuple[Copy, memoryview]]:
    data = bytes([layer]) * HALF
    return [(make(data, layer=layer + n, epoch=epoch), memoryview(data)) for n in range(count)]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_what_finds_no_room_is_not_sent(vault: Vault, server: VaultServer, mode: str) -> None:
    pieces: list[int] = []
    client = VaultClient(
        server.address, timeout_s=LONG_S, pace=pieces.append, compressing=CompressionPolicy(mode)
    )
    with pytest.raises(VaultFull, match="--vault-memory"):
        client.put(halves(3))
    vault.fence(2)
    with pytest.raises(StaleError):
        client.put(halves(2))
    assert sum(pieces) == 0 and vault.inventory() == ()
    client.put(halves(2, epoch=2))
    assert sum(pieces) > 0 and len(vault.inventory()) == 2, "the rejected bundle reserves no room"
    data = content(1)
    with pytest.raises(VaultFull):
        client.put([(make(data, layer=9, epoch=2), memoryview(data)), *halves(1, 20, epoch=2)])
    assert len(client.inventory()) == 2, "after a small bundle the connection is usable"
    assert vault.check_integrity() == ()
    client.close()


def test_of_two_bundles_at_once_one_gets_all_its_room(vault: Vault, server: VaultServer) -> None:
    """Each bundle fits alone. Neither waits for the other, and one of them always succeeds."""
    for turn in range(10):
        together, found = threading.Barrier(2), list[str]()

        def send(
            layer: int,
            turn: int = turn,
            together: threading.Barrier = together,
            found: list[str] = found,
        ) -> None:
            client = VaultClient(server.address, timeout_s=LONG_S)
            copies = halves(2, layer, epoch=turn + 1)
            together.wait(LONG_S)
            try:
                client.put(copies)
                found.append("kept")
            except VaultFull:
                found.append("full")
            client.close()

        threads = [threading.Thread(target=send, args=(layer,), daemon=True) for layer in (0, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert sorted(found) == ["full", "kept"]
        assert len(vault.inventory()) == 2 and vault.check_integrity() == ()
        vault.trim(turn + 2)


def test_a_sender_that_dies_with_its_room_reserved_gives_it_back(
    vault: Vault, server: VaultServer
) -> None:
    began = threading.Event()

    def die(nbytes: int) -> None:
        if nbytes:
            began.set()
            raise RuntimeError("killed")

    client = VaultClient(server.address, timeout_s=LONG_S, pace=die)
    with pytest.raises(RuntimeError):
        client.put(halves(2))
    assert began.is_set()
    other = VaultClient(server.address, timeout_s=LONG_S)
    for _ in range(round(100 * LONG_S)):
        try:
            other.put(halves(2, 10))
            break
        except VaultFull:  # the vault has not seen the end of the connection yet
            threading.Event().wait(0.01)
    assert sorted(copy.layer for copy in other.inventory()) == [10, 11]
    other.close()


def test_a_vault_that_fails_is_not_a_full_one(tmp_path: Path) -> None:
    """If no slot can be made (too many open files), the bundle is held, not given up."""
    writer = LocalWriter(tmp_path / "worker")
    with nodes(tmp_path, "a", "b") as (a, b):
        store = b.vault.store

        def fail(*_: object, **__: object) -> None:
            raise VaultError("no slot can be made for a copy: too many open files")

        b.vault.store = fail  # type: ignore
        a.take(bundle(writer, 1))
        assert "too many open files" in str(a.failed.get(timeout=LONG_S)[2])
        assert a.acked.empty()
        b.vault.store = store  # type: ignore
        assert a.acked.get(timeout=LONG_S) == (0, 1)


def test_a_sender_waits_longer_for_the_allocation_of_a_large_bundle(
    vault: Vault, server: VaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault allocates for longer than the sender waits for progress."""
    slow = Slow(os.posix_fallocate)
    monkeypatch.setattr(os, "posix_fallocate", slow)
    monkeypatch.setattr(transfer, "LEAST_BYTES_PER_SECOND", ASK_BYTES / LONG_S)
    patience_s = 0.05
    client = VaultClient(server.address, timeout_s=patience_s)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.put, halves(2))
        assert slow.begun.wait(LONG_S)
        with pytest.raises(TimeoutError):
            sending.result(10 * patience_s)
        slow.go()
        client._timeout_s = LONG_S  # the rest may be slow on a busy machine
        sending.result(LONG_S)
    assert len(vault.inventory()) == 2
    client.close()


def test_a_small_bundle_does_not_wait_for_the_memory_of_a_large_one(
    vault: Vault, server: VaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender of the small one waits only for as long as its own bytes need."""
    slow, data = Slow(os.posix_fallocate), content(1)
    large, small = (VaultClient(server.address, timeout_s=LONG_S) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", slow)
            sending = pool.submit(large.put, halves(2))
            assert slow.begun.wait(LONG_S)
        try:
            small.put([(make(data, layer=9), memoryview(data))])
            assert [copy.layer for copy in vault.inventory()] == [9]
        finally:
            slow.go()
        sending.result(LONG_S)
    assert [copy.layer for copy in vault.inventory()] == [0, 1, 9]
    large.close()
    small.close()
