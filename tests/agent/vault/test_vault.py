"""The vault: copies that it keeps, rejects, drops and returns."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.agent.vault.vault import Vault
from elastic.domain.errors import StaleError, VaultError, VaultFull
from elastic.domain.types import GRADIENT, REDUCED, STATE, Copy
from elastic.store.shared_memory import SlotReader
from tests.agent.agents import Slow
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.patience import LONG_S


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault("a", tmp_path / "vault")


@pytest.fixture
def writer(tmp_path: Path) -> LocalWriter:
    return LocalWriter(tmp_path / "worker")


def keys(vault: Vault) -> list[tuple[str, int, int]]:
    return sorted((c.kind, c.step, len(c.microbatches)) for c in vault.inventory())


def test_an_arrived_copy_is_whole_only_after_commit(vault: Vault) -> None:
    data = content(1)
    copy = make(data)
    incoming = vault.store(copy)
    incoming.buffer[:] = data
    assert vault.inventory() == () and vault.nbytes == 0
    incoming.commit()
    assert vault.inventory() == (dataclasses.replace(copy, node="a"),)
    assert bytes(vault.read(copy.key)) == data and vault.nbytes == len(data)
    incoming.abort()  # no effect after the commit
    assert bytes(vault.read(copy.key)) == data
    assert vault.check_integrity() == ()


def test_a_corrupt_arrival_leaves_the_last_whole_copy(vault: Vault) -> None:
    old, new = content(1), content(2)
    kept = put(vault, make(old, step=4), old)
    incoming = vault.store(make(new, step=4))
    incoming.buffer[:] = b"x" + new[1:]
    with pytest.raises(VaultError, match="corrupt"):
        incoming.commit()
    with pytest.raises(VaultError, match="aborted"):
        incoming.commit()
    assert vault.inventory() == (kept,) and bytes(vault.read(kept.key)) == old


def test_two_newest_steps_and_the_two_newest_gradients_of_each(vault: Vault) -> None:
    for step, ledger in ((1, {0}), (1, {0, 1}), (2, {0}), (2, {0, 2}), (3, {1})):
        data = content(step + len(ledger))
        put(vault, gradient(data, step, ledger), data)
    assert sorted(keys(vault)) == [(GRADIENT, 2, 1), (GRADIENT, 2, 2), (GRADIENT, 3, 1)]
    for version in (1, 2, 3):
        put(vault, make(content(version), step=version), content(version))
    assert keys(vault)[3:] == [(STATE, 2, 0), (STATE, 3, 0)]
    assert vault.check_integrity() == ()


def test_a_late_older_gradient_is_the_second_newest_or_loses(vault: Vault) -> None:
    oldest, older = gradient(content(0), 1, {0}), gradient(content(1), 1, {0, 1})
    newest = put(vault, gradient(content(2), 1, {0, 1, 2}), content(2))
    kept = put(vault, older, content(1))
    assert set(vault.inventory()) == {newest, kept}
    put(vault, oldest, content(0))
    assert set(vault.inventory()) == {newest, kept}
    assert bytes(vault.read(kept.key)) == content(1)
    put(vault, gradient(content(3), 1, {0, 1, 2, 3}), content(3))
    assert keys(vault) == [(GRADIENT, 1, 3), (GRADIENT, 1, 4)]


def test_a_late_older_state_or_reduced_gradient_loses(vault: Vault) -> None:
    for kind in (STATE, REDUCED):
        late = make(content(1), kind=kind, step=7)
        for version in (7, 8, 3):
            put(vault, make(content(version), kind=kind, step=version), content(version))
        put(vault, late, content(1))
        assert [c.step for c in vault.inventory() if c.kind == kind] == [7, 8]
        assert late.key not in [c.key for c in vault.inventory()]
    assert vault.check_integrity() == ()


def test_tp_ranks_one_copy_apart_have_a_ledger_in_common(vault: Vault) -> None:
    """Copies of rank 1 arrive after those of rank 0. Both ranks always have a common ledger."""
    for size in range(1, 6):
        for shard in (0, 1):
            put(vault, gradient(content(size), 1, set(range(size)), shard=shard), content(size))
            ledgers = [{c.microbatches for c in vault.inventory() if c.shard == s} for s in (0, 1)]
            assert size == 1 or max(map(len, ledgers[0] & ledgers[1])) >= size - 1


def test_retention_keeps_owners_layers_shards_and_epochs_apart(vault: Vault) -> None:
    for change in ({}, {"owner": "c"}, {"layer": 1}, {"shard": 1}, {"epoch": 2}):
        for step in (1, 2, 3):
            put(vault, make(content(step), step=step, **change), content(step))
    assert len(vault.inventory()) == 10
    vault.trim(2)
    assert {c.epoch for c in vault.inventory()} == {2}
    assert vault.check_integrity() == ()


def test_trim_drops_older_epochs_only(vault: Vault) -> None:
    for epoch in (1, 2, 3):
        put(vault, make(content(epoch), epoch=epoch), content(epoch))
    vault.trim(2)
    assert [c.epoch for c in vault.inventory()] == [2, 3]


def test_fenced_epochs_are_refused_even_half_arrived(vault: Vault) -> None:
    half = vault.store(make(content(1), epoch=1))
    half.buffer[:] = content(1)
    vault.fence(2)
    vault.fence(1)  # no effect: the fence only rises
    with pytest.raises(StaleError, match="below 2"):
        half.commit()
    with pytest.raises(StaleError):
        vault.store(make(content(1), epoch=1))
    assert vault.inventory() == ()
    put(vault, make(content(2), epoch=2), content(2))
    pulled = vault.store(make(content(3), epoch=1), trusted=True)
    pulled.buffer[:] = content(3)
    pulled.commit()
    assert [c.epoch for c in vault.inventory()] == [1, 2]


def test_owners_outside_publish_through_the_fence(vault: Vault) -> None:
    """Owner b still trains in epoch 4. Its copies of this epoch and of later ones are accepted."""
    half = vault.store(make(content(0), epoch=4, owner="b"))
    half.buffer[:] = content(0)
    vault.fence(5, ("b",), 4)
    half.commit()
    put(vault, make(content(1), epoch=4, owner="b", layer=1), content(1))
    put(vault, make(content(2), epoch=5, owner="b"), content(2))
    assert sorted((c.epoch, c.layer) for c in vault.inventory()) == [(4, 0), (4, 1), (5, 0)]
    with pytest.raises(StaleError, match="of epoch 3; a rejects any below 4"):
        vault.store(make(content(3), epoch=3, owner="b"))
    with pytest.raises(StaleError, match="of epoch 4; a rejects any below 5"):
        vault.store(make(content(3), epoch=4, owner="c"))


def accepted(vault: Vault, epoch: int, *owners: str) -> list[str]:
    """Those of `owners` of whom the vault accepts a copy of `epoch`."""
    found = []
    for owner in owners:
        with contextlib.suppress(StaleError):
            vault.store(make(content(1), epoch=epoch, owner=owner)).abort()
            found.append(owner)
    return found


def test_exceptions_of_the_fence_last_until_its_epoch_is_trimmed(vault: Vault) -> None:
    vault.fence(5, ("b",), 4)
    vault.enter(5, 7)  # other nodes enter later
    vault.fence(5)
    vault.fence(4, ("d",), 3)
    vault.trim(4)
    assert accepted(vault, 4, "b", "c", "d") == ["b"]
    vault.fence(5, ("c",), 4)
    assert accepted(vault, 4, "b", "c", "d") == ["b", "c"]
    vault.trim(5)
    vault.fence(5, ("c",), 4)  # an order that is repeated too late
    assert accepted(vault, 4, "b", "c", "d") == []
    assert accepted(vault, 5, "b", "c", "d") == ["b", "c", "d"]


def test_a_higher_fence_replaces_the_exceptions(vault: Vault) -> None:
    vault.fence(5, ("b", "c"), 4)
    half = vault.store(make(content(1), epoch=4, owner="b"))
    half.buffer[:] = content(1)
    vault.fence(6, ("c",), 5)
    assert accepted(vault, 4, "b", "c") == [] and accepted(vault, 5, "b", "c") == ["c"]
    with pytest.raises(StaleError):
        half.commit()
    vault.enter(7, 7)
    assert accepted(vault, 6, "b", "c") == [] and vault.inventory() == ()


def test_own_workers_publish_through_the_fence(vault: Vault, writer: LocalWriter) -> None:
    vault.fence(5)
    copy = make(content(1), epoch=4)
    vault.publish(writer.write(0, copy, content(1)))
    assert [c.key for c in vault.inventory()] == [copy.key]


def test_a_slot_announced_again_drops_what_was_in_it(vault: Vault, writer: LocalWriter) -> None:
    first, second = make(content(1), step=1), make(content(2), layer=9, step=2)
    vault.publish(writer.write(0, first, content(1)))
    vault.publish(writer.write(0, second, content(2)))
    assert [c.key for c in vault.inventory()] == [second.key]
    with pytest.raises(VaultError, match="not in the vault"):
        vault.read(first.key)
    assert vault.check_integrity() == ()


def test_a_slot_being_rewritten_is_no_copy_any_more(vault: Vault, writer: LocalWriter) -> None:
    """The worker dies between the first changed byte and its announcement."""
    old, new = make(content(1), step=1), make(content(2), step=2)
    vault.publish(writer.write(0, old, content(1)))
    vault.publish(writer.write(1, new, content(2)))
    writer.slots[0].begin()
    writer.slots[0].view(10)[:] = b"torn torn "
    assert [c.step for c in vault.inventory()] == [2]
    with pytest.raises(VaultError):
        vault.locate(old.key)


def test_a_flipped_byte_is_found(vault: Vault, writer: LocalWriter) -> None:
    copies = [make(content(n), layer=n) for n in range(4)]
    for n, copy in enumerate(copies):
        vault.publish(writer.write(n, copy, content(n)))
    for n in (1, 2, 3):
        writer.slots[n].view(100)[50] ^= 1
    with pytest.raises(VaultError, match="torn or corrupt"):
        vault.read(copies[1].key)
    assert not vault.verify(copies[2].key)
    assert [c.layer for c in vault.inventory()] == [0, 3]
    assert [c.layer for c in vault.check_integrity()] == [3]
    assert [c.layer for c in vault.inventory()] == [0]


def test_announcements_must_be_true(vault: Vault, writer: LocalWriter, tmp_path: Path) -> None:
    copy = make(content(1))
    local = writer.write(0, copy, content(1))
    for wrong in (
        dataclasses.replace(local, path=str(tmp_path / "absent")),
        dataclasses.replace(local, offset=0),
        dataclasses.replace(local, copy=dataclasses.replace(copy, sequence=copy.sequence + 1)),
        dataclasses.replace(local, copy=dataclasses.replace(copy, nbytes=0)),
    ):
        with pytest.raises(VaultError):
            vault.publish(wrong)
    with pytest.raises(VaultError, match="positive"):
        vault.store(dataclasses.replace(copy, sequence=0))


def test_a_leased_copy_is_not_reused_under_its_reader(vault: Vault) -> None:
    data = content(1)
    copy = put(vault, make(data, step=1), data)
    with vault.lease(copy.key) as view:
        vault.trim(9)
        assert vault.inventory() == ()
        other = make(content(2), epoch=9)
        put(vault, other, content(2))
        assert bytes(view) == data
    before = vault.allocated_bytes
    put(vault, make(content(3), epoch=9, layer=1), content(3))
    assert vault.allocated_bytes == before, "the leased slot is free again"


def test_superseded_announcements_can_still_be_sent(vault: Vault, writer: LocalWriter) -> None:
    copies = [gradient(content(n), 1, set(range(n + 1))) for n in range(3)]
    first, *newer = (writer.write(n, copy, content(n)) for n, copy in enumerate(copies))
    for local in (first, *newer):
        vault.publish(local)
    assert {c.key for c in vault.inventory()} == {local.copy.key for local in newer}
    assert bytes(vault.view(first)) == content(0)
    writer.slots[0].begin()
    with pytest.raises(VaultError, match="does not hold"):
        vault.view(first)


def test_trim_hands_back_slots_of_past_epochs(vault: Vault, writer: LocalWriter) -> None:
    vault.publish(writer.write(0, make(content(1), epoch=1), content(1)))
    vault.publish(writer.write(1, make(content(2), epoch=2), content(2)))
    vault.trim(2)
    assert writer.slots[0].sequence == 0 and writer.slots[1].sequence > 0


def test_trim_hands_back_a_leased_slot_after_its_last_reader(
    vault: Vault, writer: LocalWriter
) -> None:
    """A living worker writes to a slot again as soon as it is handed back."""
    copy = make(content(1), epoch=1)
    vault.publish(writer.write(0, copy, content(1)))
    with vault.lease(copy.key) as view:
        with vault.lease(copy.key):
            vault.trim(2)
        assert vault.inventory() == ()
        assert writer.slots[0].sequence > 0 and bytes(view) == content(1)
    assert writer.slots[0].sequence == 0


def test_slots_of_a_dead_worker_go_with_their_copies(vault: Vault, tmp_path: Path) -> None:
    writer = LocalWriter(tmp_path / "worker", "worker-77-1-")
    copy = make(content(1), epoch=1)
    local = writer.write(0, copy, content(1))
    vault.publish(local)
    unannounced = writer.write(1, make(content(2), epoch=1), content(2))
    vault.worker_gone(77, tmp_path / "worker")
    assert bytes(vault.read(copy.key)) == content(1)
    vault.trim(1)
    assert Path(local.path).exists() and not Path(unannounced.path).exists()
    vault.trim(2)
    assert not Path(local.path).exists()


def test_a_located_copy_can_be_read_from_its_slot(vault: Vault) -> None:
    put(vault, make(content(1), step=3, epoch=1), content(1))
    newest = put(vault, make(content(1), step=3, epoch=2), content(1))
    assert vault.copy(newest.key) == newest
    local = vault.locate(newest.key)
    assert bytes(SlotReader(local.path).view(newest.nbytes)) == content(1)


def test_close_leaves_no_file(vault: Vault) -> None:
    for n in range(3):
        put(vault, make(content(n), layer=n), content(n))
    vault.close()
    assert list(vault.directory.iterdir()) == [] and vault.inventory() == ()


def test_many_threads(vault: Vault) -> None:
    bad: list[Copy] = []

    def work(owner: str) -> None:
        for step in range(40):
            put(vault, make(content(step), owner=owner, step=step), content(step))
            vault.inventory()
            bad.extend(vault.check_integrity())

    threads = [threading.Thread(target=work, args=(name,)) for name in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert bad == []
    assert sorted((c.owner, c.step) for c in vault.inventory()) == [
        (o, s) for o in "wxyz" for s in (38, 39)
    ]
    assert vault.check_integrity() == ()


def test_a_corrupt_copy_is_told_of_once(tmp_path: Path) -> None:
    told: list[str] = []
    vault = Vault("n", tmp_path / "v", on_corrupt=lambda copy: told.append(copy.key))
    data = content(3)
    copies = [gradient(data, 0, {0}, layer=layer, owner="o") for layer in (1, 2)]
    for copy in copies:
        arriving = vault.store(copy)
        arriving.buffer[:] = data
        arriving.commit()
    assert vault.verify(copies[0].key) and told == []
    assert vault.flip_bytes() == 2
    assert not vault.verify(copies[0].key) and not vault.verify(copies[0].key)
    with pytest.raises(VaultError):
        vault.read(copies[1].key)
    assert told == [copy.key for copy in copies] and vault.inventory() == ()
    vault.close()


def test_older_copies_make_room_for_newer_ones(tmp_path: Path) -> None:
    """With room for two states a third one is stored. The newest whole one is always kept."""
    vault = Vault("n", tmp_path / "v", limit=3 * 4096)
    data = content(3)

    other = put(vault, gradient(data, 0, {0}, layer=9, owner="p"), data)
    for step in range(5):
        put(vault, gradient(data, step, {0}, layer=1, owner="o"), data)
        assert max(c.step for c in vault.inventory() if c.layer == 1) == step
    assert other.key in {copy.key for copy in vault.inventory()}, "other owners lose no copy"
    with pytest.raises(VaultFull):
        put(vault, gradient(data, 0, {0}, layer=3, owner="q"), data)
    assert {c.layer for c in vault.inventory()} == {1, 9} and vault.check_integrity() == ()
    vault.close()


@pytest.mark.parametrize("operation", ["posix_fallocate", "unlink"])
def test_the_index_answers_while_memory_is_allocated_or_freed(
    tmp_path: Path, writer: LocalWriter, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """A larger copy arrives: a new slot takes the place of one that is too small."""
    vault = Vault("n", tmp_path / "v")
    kept = put(vault, make(content(1)), content(1))
    put(vault, make(content(2), layer=1), content(2))
    vault.store(make(content(3), layer=2)).abort()
    local = writer.write(0, make(content(5), layer=4), content(5))
    slow = Slow(getattr(os, operation))
    monkeypatch.setattr(os, operation, slow)
    large = content(4, 9000)
    with ThreadPoolExecutor(2) as pool:
        arriving = pool.submit(put, vault, make(large, layer=3), large)
        assert slow.begun.wait(LONG_S)

        def use() -> tuple[Copy, ...]:
            vault.publish(local)
            vault.trim(1)
            vault.fence(1)
            assert bytes(vault.read(kept.key)) == content(1) and vault.nbytes == 3000
            return vault.inventory()

        found = pool.submit(use)
        assert [copy.layer for copy in found.result(LONG_S)] == [0, 1, 4]
        assert not arriving.done()
        slow.go()
        assert arriving.result(LONG_S).layer == 3
    monkeypatch.undo()
    assert len(vault.inventory()) == 4 and vault.check_integrity() == ()
    vault.close()


def test_room_that_is_being_allocated_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = Vault("n", tmp_path / "v", limit=2 * 4096)
    slow = Slow(os.posix_fallocate)
    monkeypatch.setattr(os, "posix_fallocate", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(vault.store, make(content(1, 6000)))
        assert slow.begun.wait(LONG_S)
        with pytest.raises(VaultFull, match="8128 of 8192 bytes are taken"):
            vault.store(make(content(2), layer=1))
        slow.go()
        first.result(LONG_S).abort()
    vault.store(make(content(2), layer=1)).abort()
    vault.close()
    assert vault.allocated_bytes == 0 and list(vault.directory.iterdir()) == []


def test_a_slot_that_its_worker_removed_is_not_kept_in_memory(tmp_path: Path) -> None:
    """The slots of the first state are too small for the next ones, which have optimizer state."""
    vault, writer = Vault("a", tmp_path / "a"), LocalWriter(tmp_path / "w")
    small, large = content(1), content(2, 3000)
    for slot in (0, 1):
        vault.publish(writer.write(slot, make(small, layer=slot, step=0), small))
    for slot in (0, 1):
        vault.publish(writer.write(slot + 2, make(large, layer=slot, step=1), large))
    removed = writer.slots.pop(0).path
    removed.unlink()
    assert str(removed) in _mapped()
    vault.publish(writer.write(4, make(large, layer=0, step=2), large))
    vault.publish(writer.write(5, make(large, layer=0, step=3), large))
    assert str(removed) not in _mapped()
    assert str(writer.slots[3].path) in _mapped()


def _mapped() -> str:
    return Path("/proc/self/maps").read_text()
