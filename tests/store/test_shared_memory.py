"""Slots and their pool."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from elastic.domain.errors import VaultError, VaultFull
from elastic.store.shared_memory import (
    DATA_OFFSET,
    SharedSlot,
    SlotPool,
    SlotReader,
    fallback_of,
    private_copy,
    remove_fallbacks,
)
from tests.patience import LONG_S


def test_a_slot_shows_its_copy_only_when_finished(tmp_path: Path) -> None:
    slot = SharedSlot(tmp_path / "s", 100)
    reader = SlotReader(str(slot.path))
    assert reader.sequence == 0
    slot.view(5)[:] = b"hello"
    slot.finish(7, 5, 3)
    assert (reader.sequence, reader.epoch, bytes(reader.view(5))) == (7, 3, b"hello")
    slot.begin()
    assert reader.sequence == 0
    slot.finish(8, 5, 3)
    reader.release()
    assert slot.sequence == 0


def test_readers_refuse_what_is_no_slot(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("short", b"x"), ("foreign", bytes(4096))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(VaultError):
            SlotReader(str(tmp_path / name))
    with pytest.raises(VaultError):
        SlotReader(str(tmp_path / "absent"))
    with pytest.raises(VaultError, match="does not fit a slot of"):
        SlotReader(str(SharedSlot(tmp_path / "s", 10).path)).view(1 << 20)


def test_readers_cannot_change_a_copy(tmp_path: Path) -> None:
    slot = SharedSlot(tmp_path / "s", 10)
    with pytest.raises(TypeError):
        SlotReader(str(slot.path)).view(4)[0] = 1


def _overwrite_and_hang(path: str, began: object) -> None:
    """Rewrite a slot, half of it, and then wait to be killed."""
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, bytes(8), 8)
    os.pwrite(descriptor, b"B" * 500, DATA_OFFSET)
    began.set()  # type: ignore[attr-defined]
    signal.pause()


def test_a_writer_killed_in_the_middle_leaves_no_copy(tmp_path: Path) -> None:
    slot = SharedSlot(tmp_path / "s", 1000)
    slot.view(1000)[:] = b"A" * 1000
    slot.finish(1, 1000, 1)
    context = multiprocessing.get_context("spawn")
    began = context.Event()
    writer = context.Process(target=_overwrite_and_hang, args=(str(slot.path), began))
    writer.start()
    assert began.wait(LONG_S)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(LONG_S)
    assert SlotReader(str(slot.path)).sequence == 0


def test_pool_reuses_what_fits_and_replaces_what_does_not(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "p-")
    small, big = pool.take(10_000), pool.take(10_000_000)
    pool.give(small)
    pool.give(big)
    assert pool.take(9_000) is small
    pool.give(small)
    grown = pool.take(20_000)
    assert grown is not small and grown is not big and not small.path.exists()
    assert pool.take(9_999_999) is big
    assert pool.allocated_bytes == grown.capacity + big.capacity


def test_pool_gives_empty_slots(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "p-")
    slot = pool.take(10)
    slot.finish(4, 10, 1)
    reader = SlotReader(str(slot.path))
    pool.give(slot)
    assert reader.sequence == 0 and pool.take(10) is slot
    pool.give(slot)
    pool.close()
    assert list(tmp_path.iterdir()) == [] and pool.allocated_bytes == 0


def test_pool_falls_back_and_then_says_what_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    full = tmp_path / "full"
    pool = SlotPool(full, "p-")
    full.rmdir()
    full.write_text("not a directory, as a full one refuses files")
    slot = pool.take(100)
    assert slot.path.parent == fallback_of(full)
    with pytest.raises(VaultError, match=r"for a copy of 4611686018427387904 bytes .*spare"):
        pool.take(1 << 62)


@pytest.mark.parametrize(
    ("number", "full"),
    [
        (errno.ENOSPC, True),
        (errno.ENOMEM, True),
        (errno.EDQUOT, True),
        (errno.EMFILE, False),
        (errno.EIO, False),
        (errno.EACCES, False),
    ],
    ids=lambda value: errno.errorcode.get(value, str(value)),
)
def test_only_what_says_so_is_full(
    number: int, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    pool = SlotPool(tmp_path / "slots", "x-")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(VaultError, match=os.strerror(number)) as found:
        pool.take(100)
    assert isinstance(found.value, VaultFull) is full
    assert list(tmp_path.rglob("*.slot")) == [] and pool.allocated_bytes == 0
    monkeypatch.undo()
    assert pool.take(100).path.exists(), "a passing fault leaves the pool usable"


def test_a_full_memory_and_a_broken_disk_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter((errno.ENOSPC, errno.EIO))

    def refuse(*_: object) -> None:
        raise OSError(next(numbers), "no")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    pool = SlotPool(tmp_path / "slots", "x-")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(VaultFull):
        pool.take(100)


def test_jobs_do_not_share_their_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    jobs = [tmp_path / "shm" / f"elastic-{job}" for job in ("1", "1-1", "2")]
    vaults = [job / "node0" / "vault" for job in jobs]
    places = [fallback_of(vault) for vault in vaults]
    assert len(set(places)) == 3 and {place.parent for place in places} == {tmp_path / "tmp"}
    for vault in vaults:
        pool = SlotPool(vault, "x-")
        vault.rmdir()
        vault.write_text("full")
        assert pool.take(100).path.parent == fallback_of(vault)
    remove_fallbacks(jobs[0])
    assert [place.exists() for place in places] == [False, True, True]


def test_folders_on_a_disk_that_is_full_at_the_end_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process asks for the temporary directory for the first time then, and gets another."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    folder = fallback_of(tmp_path / "elastic-0" / "node0")
    folder.mkdir(parents=True)
    (folder / "worker-1-0.slot").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_fallbacks(tmp_path / "elastic-0")
    assert not folder.exists()


def test_a_limit_holds_and_free_slots_make_room(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path / "slots", "x-", limit=100_000)
    first, second = pool.take(40_000), pool.take(40_000)
    with pytest.raises(VaultFull, match=r"no room for a copy of 40000 bytes: .*--vault-memory"):
        pool.take(40_000)
    pool.give(first)
    pool.give(second)
    large = pool.take(90_000)
    assert pool.allocated_bytes <= 100_000 and large.capacity >= 90_000
    with pytest.raises(VaultFull):
        pool.take(100_001)


class Ticker:
    """A thread that ticks, as one that sends heartbeats. `longest_gap_s` has its longest pause."""

    def __init__(self) -> None:
        self._end, self.longest_gap_s = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._end.wait(0.002):
            now = time.perf_counter()
            self.longest_gap_s, last = max(self.longest_gap_s, now - last), now

    def stop(self) -> float:
        self._end.set()
        self._thread.join()
        return self.longest_gap_s


@pytest.mark.parametrize("operation", ["create", "copy"])
def test_large_memory_does_not_keep_the_interpreter_lock(operation: str) -> None:
    """Otherwise no other thread runs meanwhile. A busy machine delays the ticks, too, so the best
    of several attempts counts."""
    nbytes, shared = 256 << 20, Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        slot = SharedSlot(Path(folder, "slot"), nbytes if operation == "copy" else 1)
        shares = []
        for attempt in range(10):
            ticker, began = Ticker(), time.perf_counter()
            if operation == "create":
                SharedSlot(Path(folder, f"slot-{attempt}"), nbytes).unlink()
            else:
                private_copy(slot.view(nbytes))
            took_s = time.perf_counter() - began
            shares.append(ticker.stop() / took_s)
            if shares[-1] < 0.25:
                return
    pytest.fail(f"the other thread waited for these shares of the time: {shares}")


def test_a_private_copy_has_the_same_bytes() -> None:
    data = bytes(range(251)) * 70_000
    copy = private_copy(memoryview(data))
    assert copy == data and not copy.readonly
