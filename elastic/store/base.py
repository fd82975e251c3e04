"""The store: small and fenced.

What a coordinator must not lose lives here: keys with revisions, compare-and-set, watches, and leases whose
fencing token is the coordinator's term.

- **Revisions** are one counter for the whole store; every change takes a higher one.
- **Tokens** are one counter too, so a newer lease always has a higher token. Every write carries the token of
  the lease that it is made under and is refused with `StaleError` once that lease was acquired anew or
  released. A lease that merely ran out still writes, until somebody else takes it (an implementation may be
  stricter).
- **Time is an argument** (`now`, seconds since 1970): whoever calls owns the clock. Stores that keep time by
  themselves ignore it.
- **Keys** are texts such as `job/plan`; they sort as texts. Values are bytes.

All methods are thread-safe. Implementations: `MemoryStore` (tests), `SqliteStore` (embedded default),
`EtcdStore` (several machines). A store that lies elsewhere may be out of reach for a while, and a file's disk full:
its methods, all but those of watches, then raise `StoreUnavailable`, after a bounded time. Whether a write was made is
then unknown; a compare-and-set that is repeated tells. What stays refused until somebody mends it is a `StoreError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elastic.domain.errors import ElasticError, FieldError, UsageError


class Conflict(ElasticError):
    """A compare-and-set found another revision, or a lease is held by somebody else."""


class StoreError(UsageError):
    """The store cannot be used, or refuses: unreadable, foreign, damaged, not allowed, a value too large."""


class StoreUnavailable(ElasticError):
    """The store cannot be reached, or cannot answer now; try again later."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    revision: int
    """Store revision of the write that made this value; at least 1."""


@dataclass(frozen=True, slots=True)
class Change:
    """The newest change of a key."""

    key: str
    value: bytes | None
    """None: deleted."""
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    name: str
    holder: str
    token: int
    """Fencing token; higher than that of every earlier lease of this store."""
    ttl_s: float
    expires_at: float
    """In the clock of the caller's `now`."""


class Watch(Protocol):
    """Changes in revision order. Of quick changes of one key only the last may be delivered."""

    def next(self, timeout_s: float | None = None) -> Change | None:
        """Wait for the next change. None: `timeout_s` passed, or the watch was closed."""

    def __iter__(self) -> Iterator[Change]:
        """Changes until the watch is closed."""

    def close(self) -> None:
        """End the watch; wakes whoever waits in `next`. Idempotent."""


@runtime_checkable
class Store(Protocol):
    def get(self, key: str) -> Entry | None:
        """Read one key."""

    def list(self, prefix: str) -> tuple[Entry, ...]:
        """All entries whose key starts with `prefix`, by key, from one instant."""

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        """Write if the key's revision is `expected` (None: it does not exist).

        Raises Conflict if it is not, StaleError if `token` is no longer the newest of its lease.
        """

    def delete_if(self, key: str, expected: int, token: int) -> None:
        """Delete if the key's revision is `expected`. Raises as `put_if`."""

    def watch(self, prefix: str, from_revision: int = 0) -> Watch:
        """Follow keys that start with `prefix`, beginning with the first change after `from_revision`."""

    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease:
        """Take a lease; a new, higher token every time.

        The holder itself may take it again at once (a restarted coordinator); others get Conflict until it is
        released or has run out.
        """

    def renew(self, lease: Lease, now: float) -> Lease:
        """Move the end to `now` + ttl. Raises StaleError if the lease was taken by another or released."""

    def release(self, lease: Lease) -> None:
        """Give the lease up; nothing happens if it is no longer the newest."""

    def current(self, name: str) -> Lease | None:
        """The newest lease of that name, run out or not; None: never taken, or released."""

    def close(self) -> None:
        """Release all resources. Leases stay as they are. Idempotent."""


def check_key(key: str) -> None:
    """Raise FieldError unless `key` can be stored."""
    if not key or not key.isprintable():
        raise FieldError("key", key, "a text of printable characters is needed")


def check_lease(name: str, holder: str, ttl_s: float) -> None:
    """Raise FieldError unless a lease can be made of these."""
    if not name or not holder:
        raise FieldError("lease", (name, holder), "a name and a holder are needed")
    if not 0 < ttl_s < float("inf"):
        raise FieldError("ttl_s", ttl_s, "a positive number of seconds is needed")


def held(lease: Lease, now: float) -> Conflict:
    return Conflict(f"lease {lease.name}: held by {lease.holder} for another {lease.expires_at - now:.1f} s")


def mismatch(key: str, expected: int | None, found: int | None) -> Conflict:
    wanted, present = ("absent" if revision is None else revision for revision in (expected, found))
    return Conflict(f"{key}: expected revision {wanted}, found {present}")
