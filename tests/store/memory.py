"""A store in memory, for tests. Its content ends with the process."""

from __future__ import annotations

import threading

from elastic.store.interface import (
    Entry,
    Lease,
    check_key,
    check_lease,
    lease_conflict,
    revision_conflict,
    stale_token,
)


class MemoryStore:
    """Implements `elastic.store.interface.Store`; several users share one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._lease: Lease | None = None
        self._expires_at = 0.0
        self._revision = self._token = 0

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._lock:
            return self._entries.get(key)

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        check_key(key)
        with self._lock:
            self._fence(token)
            present = self._entries.get(key)
            found = present.revision if present is not None else None
            if found != expected:
                raise revision_conflict(key, expected, found)
            self._revision += 1
            self._entries[key] = Entry(key, bytes(value), self._revision)
            return self._entries[key]

    def acquire(self, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(holder, ttl_s)
        with self._lock:
            other = self._lease
            if other is not None and other.holder != holder and self._expires_at > now:
                raise lease_conflict(other.holder, self._expires_at - now)
            self._token += 1
            self._lease, self._expires_at = Lease(holder, self._token, ttl_s), now + ttl_s
            return self._lease

    def renew(self, lease: Lease, now: float) -> None:
        with self._lock:
            self._fence(lease.token)
            self._expires_at = now + lease.ttl_s

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self._lease == lease:
                self._lease = None

    def close(self) -> None:
        """Nothing to release."""

    def _fence(self, token: int) -> None:
        if self._lease is None or self._lease.token != token:
            raise stale_token(token)
