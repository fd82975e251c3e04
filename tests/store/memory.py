"""A store in memory, for tests. Its content ends with the process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

from elastic.store.interface import (
    Entry,
    KeyChange,
    Lease,
    Watch,
    check_key,
    check_lease,
    lease_conflict,
    revision_conflict,
    stale_token,
)


class MemoryStore:
    """Implements `elastic.store.interface.Store`; several users share one object."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes: dict[str, KeyChange] = {}
        self._leases: dict[str, Lease] = {}
        self._names: dict[int, str] = {}
        self._revision = 0

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._changed:
            change = self._changes.get(key)
        return (
            None
            if change is None or change.value is None
            else Entry(key, change.value, change.revision)
        )

    def list(self, prefix: str) -> tuple[Entry, ...]:
        with self._changed:
            found = [c for k, c in sorted(self._changes.items()) if k.startswith(prefix)]
        return tuple(Entry(c.key, c.value, c.revision) for c in found if c.value is not None)

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        with self._changed:
            return Entry(key, value, self._write(key, bytes(value), expected, token).revision)

    def delete_if(self, key: str, expected: int, token: int) -> None:
        with self._changed:
            self._write(key, None, expected, token)

    def watch(self, prefix: str, from_revision: int = 0) -> Watch:
        return _MemoryWatch(self, prefix, from_revision)

    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(name, holder, ttl_s)
        with self._changed:
            current = self._leases.get(name)
            if current is not None and current.holder != holder and current.expires_at > now:
                raise lease_conflict(current, now)
            token = len(self._names) + 1
            self._names[token] = name
            self._leases[name] = Lease(name, holder, token, ttl_s, now + ttl_s)
            return self._leases[name]

    def renew(self, lease: Lease, now: float) -> Lease:
        with self._changed:
            self._fence(lease.token)
            renewed = dataclasses.replace(lease, expires_at=now + lease.ttl_s)
            self._leases[lease.name] = renewed
            return renewed

    def release(self, lease: Lease) -> None:
        with self._changed:
            current = self._leases.get(lease.name)
            if current is not None and current.token == lease.token:
                del self._leases[lease.name]

    def current(self, name: str) -> Lease | None:
        with self._changed:
            return self._leases.get(name)

    def close(self) -> None:
        """Nothing to release."""

    def change_after(self, revision: int, prefix: str) -> KeyChange | None:
        """Return the first change under `prefix` after `revision`. The caller holds the lock."""
        found = (
            c for c in self._changes.values() if c.revision > revision and c.key.startswith(prefix)
        )
        return min(found, key=lambda change: change.revision, default=None)

    @property
    def changed(self) -> threading.Condition:
        """Notified at every change."""
        return self._changed

    def _fence(self, token: int) -> None:
        current = self._leases.get(self._names.get(token, ""))
        if current is None or current.token != token:
            raise stale_token(token)

    def _write(self, key: str, value: bytes | None, expected: int | None, token: int) -> KeyChange:
        check_key(key)
        self._fence(token)
        present = self._changes.get(key)
        found = present.revision if present is not None and present.value is not None else None
        if found != expected:
            raise revision_conflict(key, expected, found)
        self._revision += 1
        change = self._changes[key] = KeyChange(key, value, self._revision)
        self._changed.notify_all()
        return change


class _MemoryWatch:
    def __init__(self, store: MemoryStore, prefix: str, revision: int) -> None:
        self._store, self._prefix, self._revision, self._closed = store, prefix, revision, False

    def next(self, timeout_s: float | None = None) -> KeyChange | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._store.changed:
            while not self._closed:
                change = self._store.change_after(self._revision, self._prefix)
                if change is not None:
                    self._revision = change.revision
                    return change
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._store.changed.wait(left)
        return None

    def __iter__(self) -> Iterator[KeyChange]:
        while (change := self.next()) is not None:
            yield change

    def close(self) -> None:
        with self._store.changed:
            self._closed = True
            self._store.changed.notify_all()
