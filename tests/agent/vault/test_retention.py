"""Retention compared with a model, slots rewritten during use, and memory use."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain.errors import VaultError
from elastic.domain.types import GRADIENT, REDUCED, STATE, UPDATE, Copy
from elastic.rpc.bulk.transfer import VaultClient
from elastic.store.shared_memory import SlotReader
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.patience import LONG_S

arrivals = st.tuples(
    st.sampled_from((STATE, GRADIENT, GRADIENT, REDUCED, UPDATE, UPDATE)),
    st.sampled_from((0, 0, 0, 1)),
    st.integers(0, 3),
    st.sampled_from((1, 1, 1, 2)),
    st.integers(1, 4),
    st.integers(0, 3),
)
writing = st.sampled_from(("publish", "publish", "publish", "half", "unannounced", "step"))
quick = settings(max_examples=40)


@quick
@given(st.lists(st.one_of(arrivals, arrivals, arrivals, st.integers(1, 3)), max_size=30))
def test_the_inventory_is_what_the_rules_say(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[str, int, int, int, int, int] | int],
) -> None:
    vault = Vault("a", tmp_path_factory.mktemp("vault"))
    came: list[tuple[Copy, bytes]] = []
    for event in events:
        if isinstance(event, int):
            vault.trim(event)
            came = [(c, data) for c, data in came if c.epoch >= event]
        else:
            kind, layer, step, epoch, size, late = event
            ledger = frozenset(range(size)) if kind not in (STATE, UPDATE) else frozenset()
            data = content(len(came), 64)
            copy = make(data, kind=kind, layer=layer, step=step, epoch=epoch, microbatches=ledger)
            copy = dataclasses.replace(copy, sequence=copy.sequence + (3 - late) * 1_000_000)
            came.append((put(vault, copy, data), data))
            # Updates that were dropped with an older state do not come back.
            gone = _superseded_updates([c for c, _ in came])
            came = [(c, data) for c, data in came if c not in gone]
        assert set(vault.inventory()) == _kept([c for c, _ in came])
    assert vault.check_integrity() == ()
    for copy, data in came:
        if copy in vault.inventory():
            assert bytes(vault.read(copy.key)) == data
    vault.close()


def _superseded_updates(came: list[Copy]) -> set[Copy]:
    kept = _kept(came)
    return {copy for copy in came if copy.kind == UPDATE and copy not in kept}


def _kept(came: list[Copy]) -> set[Copy]:
    """A model of retention: a copy stays until enough newer ones have arrived, in any order."""

    def stays(copy: Copy) -> bool:
        group = [
            c for c in came if (c.kind, c.layer, c.epoch) == (copy.kind, copy.layer, copy.epoch)
        ]
        newer_steps = {c.step for c in group if c.step > copy.step}
        newer = [
            c
            for c in group
            if c.step == copy.step
            and (len(c.microbatches), c.sequence) > (len(copy.microbatches), copy.sequence)
        ]
        if copy.kind == UPDATE:
            states = {
                c.step
                for c in came
                if (c.kind, c.layer, c.epoch) == (STATE, copy.layer, copy.epoch)
            }
            since = sorted(states)[-2:]
            return not newer and (copy.step >= since[0] if since else len(newer_steps) < 2)
        return len(newer_steps) < 2 and len(newer) < (2 if copy.kind == GRADIENT else 1)

    return {copy for copy in came if stays(copy)}


@quick
@given(st.lists(st.tuples(writing, st.integers(0, 1)), max_size=25))
def test_of_a_ring_of_two_slots_the_index_has_what_is_whole(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]]
) -> None:
    """A worker overwrites the older of two slots per layer and may stop anywhere."""
    directory = tmp_path_factory.mktemp("ring")
    vault, writer = Vault("a", directory / "vault"), LocalWriter(directory / "worker")
    lies: dict[int, tuple[Copy, bytes] | None] = {}
    gone: list[Copy] = []
    turn, step, size = [0, 0], 0, [0, 0]
    for what, layer in events:
        if what == "step":
            step, size = step + 1, [0, 0]
            continue
        slot, size[layer] = 2 * layer + turn[layer], size[layer] + 1
        data = content(len(gone) + 3 * step + size[layer])
        copy = gradient(data, step, set(range(size[layer])), layer=layer)
        before = lies.get(slot)
        gone += [before[0]] if before else []
        lies[slot] = None
        local = writer.write(slot, copy, data)
        if what == "half":
            writer.slots[slot].begin()
            writer.slots[slot].view(len(data))[100:] = bytes(len(data) - 100)
        elif what == "publish":
            vault.publish(local)
            lies[slot], turn[layer] = (dataclasses.replace(copy, node="a"), data), 1 - turn[layer]
        whole = [entry for entry in lies.values() if entry]
        for copy in gone:
            for ask in (vault.read, vault.locate, vault.copy):
                with pytest.raises(VaultError):
                    ask(copy.key)
            assert not vault.verify(copy.key)
        assert set(vault.inventory()) == {c for c, _ in whole}
        assert all(bytes(vault.read(c.key)) == kept for c, kept in whole)
    assert vault.check_integrity() == ()
    vault.close()


def test_bytes_read_while_slots_are_rewritten_are_never_torn(tmp_path: Path) -> None:
    """One thread rewrites a ring of two slots without pause; others read the listed copies."""
    vault, writer = Vault("a", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    server = VaultServer(vault, timeout_s=LONG_S).start()
    written: dict[str, bytes] = {}
    done, wrong = threading.Event(), []
    read = {"here": 0, "there": 0}

    def listen(name: str) -> None:
        client = VaultClient(server.address, node="b", timeout_s=LONG_S)
        while not done.is_set() or not read[name]:
            for copy in vault.inventory():
                try:
                    data = bytes(vault.read(copy.key) if name == "here" else client.get(copy))
                except VaultError:
                    continue  # rewritten meanwhile
                read[name] += 1
                if data != written[copy.key]:
                    wrong.append(copy.key)
        client.close()

    threads = [threading.Thread(target=listen, args=(name,)) for name in read]
    for thread in threads:
        thread.start()
    for number in range(200):
        data = bytes([number]) * 200_000
        copy = gradient(data, number // 8, set(range(number % 8 + 1)))
        written[copy.key] = data
        vault.publish(writer.write(number % 2, copy, data))
    done.set()
    for thread in threads:
        thread.join(LONG_S)
    assert not wrong and all(read.values())
    assert [len(c.microbatches) for c in vault.inventory()] == [
        7,
        8,
    ] and vault.check_integrity() == ()
    server.close()


def test_a_leased_view_of_the_older_gradient_shows_that_it_was_rewritten(tmp_path: Path) -> None:
    vault, writer = Vault("a", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    for n in range(2):
        vault.publish(writer.write(n, gradient(content(n), 1, set(range(n + 1))), content(n)))
    older, newer = sorted(vault.inventory(), key=lambda c: c.sequence)
    with vault.lease(older.key):
        writer.slots[0].begin()
        assert vault.inventory() == (newer,)
        vault.publish(writer.write(0, gradient(content(2), 1, {0, 1, 2}), content(2)))
    assert [len(c.microbatches) for c in vault.inventory()] == [2, 3]
    assert bytes(vault.read(newer.key)) == content(1) and vault.check_integrity() == ()


def test_a_torn_gradient_takes_no_place_of_a_whole_one(tmp_path: Path) -> None:
    """Two older copies arrive while the newest one is rewritten; both are kept."""
    vault, writer = Vault("a", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    vault.publish(writer.write(0, gradient(content(3), 1, {0, 1, 2, 3}), content(3)))
    writer.slots[0].begin()
    kept = {put(vault, gradient(content(n), 1, set(range(n))), content(n)) for n in (2, 1)}
    assert set(vault.inventory()) == kept and vault.check_integrity() == ()


def test_the_larger_ledger_is_newer_whatever_its_sequence(tmp_path: Path) -> None:
    vault = Vault("b", tmp_path / "vault")
    for size, sequence in ((3, 1), (2, 2), (1, 3), (1, 4), (2, 5)):
        put(vault, gradient(content(size), 1, set(range(size)), sequence=sequence), content(size))
    assert {(len(c.microbatches), c.sequence) for c in vault.inventory()} == {(3, 1), (2, 5)}


def test_room_for_gradients_stops_growing(tmp_path: Path) -> None:
    """Slots are reused: the vault needs two steps of two gradients, and one that arrives."""
    vault = Vault("b", tmp_path / "vault")
    data = content(1, 50_000)
    for step in range(4):
        for size in range(1, 6):
            put(vault, gradient(data, step, set(range(size))), data)
    slots = list(vault.directory.iterdir())
    assert len(slots) == 5 and vault.nbytes == 4 * len(data)
    assert vault.allocated_bytes == sum(p.stat().st_size - 64 for p in slots)
    for arrival in range(3):  # copies that are superseded at once or aborted free their slots
        put(vault, gradient(data, 3, {0}), data)
        vault.store(gradient(data, 4, {arrival})).abort()
    assert list(vault.directory.iterdir()) == slots
    vault.trim(2)
    put(vault, gradient(data, 4, {0}, epoch=2), data)
    assert vault.allocated_bytes == sum(
        p.stat().st_size - 64 for p in slots
    ) and vault.nbytes == len(data)


def test_an_older_gradient_is_not_reused_under_its_reader(tmp_path: Path) -> None:
    vault = Vault("b", tmp_path / "vault")
    older = put(vault, gradient(content(1), 1, {0}), content(1))
    put(vault, gradient(content(2), 1, {0, 1}), content(2))
    with vault.lease(older.key) as view:
        for n in range(3, 6):
            put(vault, gradient(content(n), 1, set(range(n))), content(n))
        assert bytes(view) == content(1) and older not in vault.inventory()
    before = vault.allocated_bytes
    put(vault, gradient(content(7), 1, set(range(7))), content(7))
    assert vault.allocated_bytes == before and vault.check_integrity() == ()


def test_trim_leaves_alone_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only slots with a copy of a past epoch are returned; a writer uses the others."""
    vault, writer = Vault("a", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    for slot, epoch in enumerate((1, 2, 2)):
        vault.publish(
            writer.write(slot, make(content(slot), layer=slot, epoch=epoch), content(slot))
        )
    writer.slots[1].begin()
    handed_back: list[int] = []
    release = SlotReader.release

    def record(reader: SlotReader) -> None:
        handed_back.append(reader.epoch)
        release(reader)

    monkeypatch.setattr(SlotReader, "release", record)
    vault.trim(2)
    vault.trim(2)
    assert handed_back == [1]
    assert [slot.sequence > 0 for slot in writer.slots.values()] == [False, False, True]
