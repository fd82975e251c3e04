"""The default coordinator store: one SQLite file for the processes of one machine.

The file uses a write-ahead log with `synchronous=FULL`, so every commit reaches the disk. `NORMAL`
may lose the newest commits in a power failure, and then the store would give out a term twice. The
cost of the sync is small, because a coordinator writes once per decision and not once per step. A
process that is killed leaves the last committed state. Deleted keys stay as tombstones, so that
watches report the deletion. The file must be on a local disk: SQLite's log does not work on network
file systems.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.store.interface import (
    Entry,
    KeyChange,
    Lease,
    StoreError,
    StoreUnavailable,
    Watch,
    check_key,
    check_lease,
    lease_conflict,
    revision_conflict,
    stale_token,
)

APPLICATION_ID = 0x656C7374
"""Marks the file as ours ("elst")."""
FORMAT = 1
POLL_S = 0.02
"""Interval at which a watch looks for new commits. It reads a counter in shared memory, no disk."""

_DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""Errors of a full or failing disk. A retry may succeed."""

_SCHEMA = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY,
    value BLOB,                        -- NULL: deleted
    revision INTEGER NOT NULL UNIQUE
) WITHOUT ROWID;
CREATE TABLE leases (
    token INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    holder TEXT NOT NULL,
    ttl_s REAL NOT NULL,
    expires_at REAL,                   -- NULL: released
    UNIQUE (name, token)
);
"""


class SqliteStore:
    """Implements `elastic.store.interface.Store` on `path`.

    Creates the file, but not its folder. `busy_s` limits the wait for the write of another
    process. Raises StoreError if the file is damaged, foreign or cannot be opened. The constructor
    and every method raise StoreUnavailable while the disk is full or fails.
    """

    def __init__(self, path: str | Path, busy_s: float = 10.0) -> None:
        self.path, self._busy_s = Path(path), busy_s
        self._lock = threading.RLock()
        if not self.path.parent.is_dir():
            text = f"the folder {self.path.parent} does not exist; create it first"
            raise StoreError(f"store {self.path}: {text}")
        with self._errors():
            self._db = self.connect()
        try:
            with self._errors():
                self._prepare()
        except (StoreError, StoreUnavailable):
            self._db.close()
            raise

    def get(self, key: str) -> Entry | None:
        check_key(key)
        query = "SELECT key, value, revision FROM entries WHERE key = ? AND value IS NOT NULL"
        with self._errors():
            row = self._db.execute(query, (key,)).fetchone()
        return Entry(*row) if row else None

    def list(self, prefix: str) -> tuple[Entry, ...]:
        query = (
            "SELECT key, value, revision FROM entries"
            " WHERE substr(key, 1, ?) = ? AND value IS NOT NULL ORDER BY key"
        )
        with self._errors():
            return tuple(Entry(*row) for row in self._db.execute(query, (len(prefix), prefix)))

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        return Entry(key, value, self._write(key, bytes(value), expected, token))

    def delete_if(self, key: str, expected: int, token: int) -> None:
        self._write(key, None, expected, token)

    def watch(self, prefix: str, from_revision: int = 0) -> Watch:
        return _SqliteWatch(self, prefix, from_revision)

    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(name, holder, ttl_s)
        insert = "INSERT INTO leases (name, holder, ttl_s, expires_at) VALUES (?, ?, ?, ?)"
        with self._transaction():
            current = self.current(name)
            if current is not None and current.holder != holder and current.expires_at > now:
                raise lease_conflict(current, now)
            token = self._db.execute(insert, (name, holder, ttl_s, now + ttl_s)).lastrowid
        assert token is not None
        return Lease(name, holder, token, ttl_s, now + ttl_s)

    def renew(self, lease: Lease, now: float) -> Lease:
        renewed = dataclasses.replace(lease, expires_at=now + lease.ttl_s)
        with self._transaction():
            self._fence(lease.token)
            update = "UPDATE leases SET expires_at = ? WHERE token = ?"
            self._db.execute(update, (renewed.expires_at, lease.token))
        return renewed

    def release(self, lease: Lease) -> None:
        with self._transaction():
            self._db.execute("UPDATE leases SET expires_at = NULL WHERE token = ?", (lease.token,))

    def current(self, name: str) -> Lease | None:
        query = (
            "SELECT name, holder, token, ttl_s, expires_at FROM leases "
            "WHERE name = ? ORDER BY token DESC"
        )
        with self._errors():
            row = self._db.execute(query + " LIMIT 1", (name,)).fetchone()
        return Lease(*row) if row and row[-1] is not None else None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def connect(self) -> sqlite3.Connection:
        """Return a new connection in autocommit mode. One thread at a time may use it."""
        db = sqlite3.connect(
            self.path,
            timeout=self._busy_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=32,
        )
        db.execute("PRAGMA synchronous=FULL")
        return db

    def _prepare(self) -> None:
        """Create the tables of a new file, or check those of an existing one."""
        self._use_write_ahead_log()
        with self._transaction():
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version={FORMAT}")
            marks = [
                self._db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("application_id", "user_version")
            ]
        if marks[0] != APPLICATION_ID:
            raise StoreError(
                f"store {self.path}: it is an SQLite file of another program; choose another path"
            )
        if marks[1] != FORMAT:
            raise StoreError(
                f"store {self.path}: has format {marks[1]}, this version reads {FORMAT}"
            )
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)

    def _use_write_ahead_log(self) -> None:
        """Switch to the log. SQLite does not wait if another process switches a new file too."""
        end = time.monotonic() + self._busy_s
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > end:
                    raise
            time.sleep(0.005)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all statements of the block, or none. Other writers wait for its end."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Let one thread at a time use the connection, and translate SQLite's errors."""
        with self._lock, _translated_errors(self.path):
            yield

    def _fence(self, token: int) -> None:
        query = (
            "SELECT 1 FROM leases AS mine WHERE token = ? AND expires_at IS NOT NULL"
            " AND token = (SELECT max(token) FROM leases WHERE name = mine.name)"
        )
        if self._db.execute(query, (token,)).fetchone() is None:
            raise stale_token(token)

    def _write(self, key: str, value: bytes | None, expected: int | None, token: int) -> int:
        check_key(key)
        with self._transaction():
            self._fence(token)
            present = self.get(key)
            found = present.revision if present else None
            if found != expected:
                raise revision_conflict(key, expected, found)
            (revision,) = self._db.execute(
                "SELECT coalesce(max(revision), 0) + 1 FROM entries"
            ).fetchone()
            self._db.execute("REPLACE INTO entries VALUES (?, ?, ?)", (key, value, revision))
        return int(revision)


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Translate SQLite's errors into StoreError and StoreUnavailable, with a remedy."""
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreError(f"store {path}: {error}") from error
    except sqlite3.OperationalError as error:
        disk = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK
        remedy = "check the permissions and the space of its folder"
        raise (StoreUnavailable if disk else StoreError)(
            f"store {path}: {error}; {remedy}"
        ) from error
    except sqlite3.DatabaseError as error:
        remedy = "the file is damaged or not a store; move it away, or restore it from a backup"
        raise StoreError(f"store {path}: {error}; {remedy}") from error


class _SqliteWatch:
    """Reads on its own connection. `data_version` changes when another connection commits."""

    def __init__(self, store: SqliteStore, prefix: str, revision: int) -> None:
        self._path, self._prefix, self._revision = store.path, prefix, revision
        self._closed, self._lock, self._version = threading.Event(), threading.Lock(), -1
        with _translated_errors(self._path):
            self._db = store.connect()

    def next(self, timeout_s: float | None = None) -> KeyChange | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            change = self._poll()
            if change is not None:
                return change
            left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if left <= 0:
                return None
            self._closed.wait(left)
        return None

    def __iter__(self) -> Iterator[KeyChange]:
        while (change := self.next()) is not None:
            yield change

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._db.close()

    def _poll(self) -> KeyChange | None:
        query = (
            "SELECT key, value, revision FROM entries WHERE revision > ? AND substr(key, 1, ?) = ?"
        )
        with self._lock, _translated_errors(self._path):
            if self._closed.is_set():
                return None
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return None
            arguments = (self._revision, len(self._prefix), self._prefix)
            row = self._db.execute(query + " ORDER BY revision LIMIT 1", arguments).fetchone()
            if row is None:
                self._version = version
                return None
            self._revision = row[2]
            return KeyChange(*row)
