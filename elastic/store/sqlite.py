"""The default coordinator store: one SQLite file for the processes of one machine.

The file uses a write-ahead log with `synchronous=FULL`, so every commit reaches the disk. `NORMAL`
may lose the newest commits in a power failure, and then the store would give out a term twice. The
cost of the sync is small, because a coordinator writes once per decision and not once per step. A
process that is killed leaves the last committed state. The file must be on a local disk: SQLite's
log does not work on network file systems.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.store.interface import (
    Entry,
    Lease,
    StoreError,
    StoreUnavailable,
    check_key,
    check_lease,
    lease_conflict,
    revision_conflict,
    stale_token,
)

APPLICATION_ID = 0x656C7374
"""Marks the file as ours ("elst")."""
FORMAT = 1
BUSY_S = 10.0
"""Longest wait while another process writes."""
_DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""Errors of a full or failing disk. A retry may succeed."""

_SCHEMA = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    revision INTEGER NOT NULL UNIQUE
) WITHOUT ROWID;
CREATE TABLE leases (
    token INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,                -- always 'coordinator'
    holder TEXT NOT NULL,
    ttl_s REAL NOT NULL,
    expires_at REAL,                   -- NULL: released
    UNIQUE (name, token)
);
"""


class SqliteStore:
    """Implements `elastic.store.interface.Store` with the file `path`.

    The constructor creates the file, but not its folder. It raises StoreError if the file is
    damaged, foreign or cannot be opened. The constructor and every method raise StoreUnavailable
    while the disk is full or fails.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        if not self.path.parent.is_dir():
            text = f"the folder {self.path.parent} does not exist; create it first"
            raise StoreError(f"store {self.path}: {text}")
        with self._errors():
            # In autocommit mode. The lock lets one thread at a time use the connection.
            self._db = sqlite3.connect(
                self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA synchronous=FULL")
        try:
            with self._errors():
                self._prepare()
        except (StoreError, StoreUnavailable):
            self._db.close()
            raise

    def get(self, key: str) -> Entry | None:
        check_key(key)
        query = "SELECT key, value, revision FROM entries WHERE key = ?"
        with self._errors():
            row = self._db.execute(query, (key,)).fetchone()
        return Entry(*row) if row else None

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        check_key(key)
        count = "SELECT coalesce(max(revision), 0) + 1 FROM entries"
        with self._transaction():
            self._fence(token)
            present = self.get(key)
            found = present.revision if present else None
            if found != expected:
                raise revision_conflict(key, expected, found)
            (revision,) = self._db.execute(count).fetchone()
            entry = Entry(key, bytes(value), revision)
            row = (key, entry.value, revision)
            self._db.execute("REPLACE INTO entries VALUES (?, ?, ?)", row)
        return entry

    def acquire(self, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(holder, ttl_s)
        insert = (
            "INSERT INTO leases (name, holder, ttl_s, expires_at) VALUES ('coordinator', ?, ?, ?)"
        )
        with self._transaction():
            _, other, expires_at = self._newest_lease()
            if other != holder and expires_at > now:
                raise lease_conflict(other, expires_at - now)
            token = self._db.execute(insert, (holder, ttl_s, now + ttl_s)).lastrowid
        assert token is not None
        return Lease(holder, token, ttl_s)

    def renew(self, lease: Lease, now: float) -> None:
        update = "UPDATE leases SET expires_at = ? WHERE token = ?"
        with self._transaction():
            self._fence(lease.token)
            self._db.execute(update, (now + lease.ttl_s, lease.token))

    def release(self, lease: Lease) -> None:
        with self._transaction():
            self._db.execute("UPDATE leases SET expires_at = NULL WHERE token = ?", (lease.token,))

    def close(self) -> None:
        with self._lock:
            self._db.close()

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
        """Switch to the log. Retry, because SQLite does not wait for other processes here."""
        end = time.monotonic() + BUSY_S
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
        """Lock the connection; raise SQLite's errors as StoreUnavailable (disk) or StoreError."""
        try:
            with self._lock:
                yield
        except sqlite3.ProgrammingError as error:
            raise StoreError(f"store {self.path}: {error}") from error
        except sqlite3.OperationalError as error:
            disk = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK
            kind = StoreUnavailable if disk else StoreError
            remedy = "check the permissions and the space of its folder"
            raise kind(f"store {self.path}: {error}; {remedy}") from error
        except sqlite3.DatabaseError as error:
            remedy = "the file is damaged or not a store; move it away, or restore it from a backup"
            raise StoreError(f"store {self.path}: {error}; {remedy}") from error

    def _newest_lease(self) -> tuple[int, str, float]:
        """Return the newest lease (token, holder, expiry); (0, "", 0.0): released or absent."""
        query = "SELECT token, holder, expires_at FROM leases ORDER BY token DESC LIMIT 1"
        row = self._db.execute(query).fetchone()
        return row if row and row[2] is not None else (0, "", 0.0)

    def _fence(self, token: int) -> None:
        if token <= 0 or token != self._newest_lease()[0]:
            raise stale_token(token)
