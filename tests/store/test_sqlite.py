"""What only a file on disk can get wrong: other processes, kills, damage."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.domain.errors import StaleError
from elastic.store.interface import StoreError, StoreUnavailable
from elastic.store.sqlite import SqliteStore
from tests.disks import fill, small_disk
from tests.patience import LONG_S

ROOT = Path(__file__).parents[2]


def start(role: str, path: Path, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store.stores", role, str(path), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def race(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Let all go together once all are ready; return what each printed last."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=LONG_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_survives_reopening(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    lease = store.acquire("a", 10.0, 0.0)
    entry = store.put_if("k", b"v", None, lease.token)
    store.close()
    store.close()
    again = SqliteStore(tmp_path / "store.db")
    assert again.get("k") == entry
    assert again.put_if("k", b"w", entry.revision, lease.token).revision > entry.revision
    assert again.acquire("a", 10.0, 0.0).token > lease.token
    again.close()


def test_processes_race_for_a_counter(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    token = store.acquire("a", 60.0, 0.0).token
    race([start("count", path, 25, token) for _ in range(2)])
    entry = store.get("counter")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"50", 50)
    store.close()


def test_processes_open_a_new_store_together(tmp_path: Path) -> None:
    """SQLite refuses, without waiting, whoever turns on the log while another does."""
    processes = [start("open", tmp_path / "store.db", 40) for _ in range(4)]
    for round_ in range(41):
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == ("opened\n" if round_ else "ready\n")
        for process in processes:
            assert process.stdin is not None
            if round_ < 40:
                process.stdin.write("go\n")
                process.stdin.flush()
    for process in processes:
        process.communicate(timeout=LONG_S)
        assert process.returncode == 0


def test_processes_race_for_a_lease(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    outputs = race([start("lead", path, 25, name) for name in ("a", "b")])
    tokens = [int(token) for line in outputs for token in line.split()]
    assert tokens
    assert len(set(tokens)) == len(tokens), "no token is given out twice"
    store = SqliteStore(path)
    entry = store.get("leader")
    assert entry is not None and entry.revision == len(tokens)
    store.close()


def test_a_writer_killed_at_any_point_leaves_the_last_committed_value(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    for round_ in range(4):
        process = start("write", path, 0)
        assert process.stdout is not None
        for _ in range(3 + round_):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        reported = 3 + round_ + len(process.stdout.readlines())
        process.communicate(timeout=LONG_S)
        store = SqliteStore(path)
        entry = store.get("big")
        assert entry is not None
        assert len(entry.value) == 1 << 16
        assert int(entry.value.lstrip(b".")) in (reported, reported + 1)
        assert store.acquire("writer", 1.0, 0.0).token == 2 * round_ + 2
        store.close()


def test_closed_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")


def test_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StoreError, match=r"store\.db: .*move it away, or restore it"):
        SqliteStore(path)
    assert path.read_bytes().startswith(b"this is no")


def test_damaged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    token = store.acquire("a", 10.0, 0.0).token
    for i in range(50):
        store.put_if(f"k{i}", bytes(2000), None, token)
    store.close()
    data = bytearray(path.read_bytes())
    data[4096 : len(data) // 2] = b"\xa5" * (len(data) // 2 - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(path)


def test_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    store.close()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StoreError, match=r"store\.db"):
        SqliteStore(path)


def test_file_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE songs (title TEXT)")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="another program"):
        SqliteStore(path)


def test_newer_format(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StoreError, match="format 99"):
        SqliteStore(path)


def test_missing_folder_and_folder_as_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        SqliteStore(tmp_path / "none" / "store.db")
    with pytest.raises(StoreError, match="permissions"):
        SqliteStore(tmp_path)


def test_a_full_disk_is_a_store_that_is_away(tmp_path: Path) -> None:
    """A failed write leaves nothing and succeeds once there is room; fencing works meanwhile."""
    with small_disk(tmp_path / "disk", "1m"):
        store = SqliteStore(tmp_path / "disk" / "store.db")
        lease = store.acquire("a", 60.0, 0.0)
        filler = fill(tmp_path / "disk")
        large = bytes(256 << 10)
        with pytest.raises(StoreUnavailable, match=r"full|disk I/O"):
            store.put_if("k", large, None, lease.token)
        assert store.get("k") is None
        with pytest.raises(StaleError):
            store.put_if("k", b"", None, lease.token + 1)
        filler.unlink()
        assert store.put_if("k", large, None, lease.token).value == large
        store.close()


def test_a_store_is_not_made_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        filler = fill(tmp_path / "disk")
        with pytest.raises(StoreUnavailable):
            SqliteStore(tmp_path / "disk" / "store.db")
        filler.unlink()
        SqliteStore(tmp_path / "disk" / "store.db").close()
