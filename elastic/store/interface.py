"""Interface of the coordinator store.

The store keeps the state that a coordinator must not lose. It offers keys with revisions,
compare-and-set, and one lease: the right to write. Its fencing token is the coordinator's term.

- **Revisions** come from one counter for the whole store. Every write gets a higher revision.
- **Tokens** only grow: a newer lease always has a higher token. Every write carries the token of
  its lease. The store refuses the write with `StaleError` after the lease was acquired again or
  released. The holder of an expired lease can still write until another holder acquires the
  lease. An implementation may be stricter.
- **Time is an argument**: the caller passes `now`, in seconds since 1970. A store with a clock of
  its own ignores `now`.
- **Keys** are texts such as `job/plan`. Values are bytes.

All methods are thread-safe. `SqliteStore` is the default for one machine, `EtcdStore` serves
several machines.

Every method raises `StoreUnavailable` after a bounded time if the store is unreachable or its disk
is full. The write may or may not have been made. A repeated compare-and-set shows which. If etcd
reports NOSPACE, a write raises the subclass `StoreFull` and was not made.
`StoreError` means that a retry does not help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic.domain.errors import ElasticError, FieldError, StaleError, UsageError


class Conflict(ElasticError):
    """A compare-and-set found another revision, or another holder has the lease."""


class StoreError(UsageError):
    """The store is damaged, foreign or refuses the request. A retry does not help."""


class StoreUnavailable(ElasticError):
    """The store is unreachable or cannot answer now. A retry may help."""


class StoreFull(StoreUnavailable):
    """The store answers, but has no room for a write. A retry helps once somebody made room."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value."""

    key: str
    value: bytes
    revision: int
    """Store revision of the write that made this value; at least 1."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one holder to write."""

    holder: str
    token: int
    """Fencing token, higher than that of every earlier lease of this store."""
    ttl_s: float


class Store(Protocol):
    """A key-value store with fenced writes. The module docstring states its rules."""

    def get(self, key: str) -> Entry | None:
        """Return the entry of `key`; None: the key does not exist."""

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        """Write `key` if its revision is `expected` (None: the key is absent); return its entry.

        Raises Conflict for another revision, StaleError if `token` is not that of the newest lease.
        """

    def acquire(self, holder: str, ttl_s: float, now: float) -> Lease:
        """Acquire and return the lease. Every call gives a new, higher token.

        The present holder may acquire its own lease again, for example after a restart. Raises
        Conflict for others until the lease is released or has expired.
        """

    def renew(self, lease: Lease, now: float) -> None:
        """Extend the lease to `now` + ttl. Raises StaleError if `lease` is no longer the newest."""

    def release(self, lease: Lease) -> None:
        """Release the lease; do nothing if `lease` is not the newest."""

    def close(self) -> None:
        """Close the store. The lease stays as it is. Idempotent."""


def check_key(key: str) -> None:
    """Raise FieldError unless `key` is a valid key."""
    if not key or not key.isprintable():
        raise FieldError("key", key, "a text of printable characters is needed")


def check_lease(holder: str, ttl_s: float) -> None:
    """Raise FieldError unless these are valid fields of a lease."""
    if not holder:
        raise FieldError("holder", holder, "a name is needed")
    if not 0 < ttl_s < float("inf"):
        raise FieldError("ttl_s", ttl_s, "a positive number of seconds is needed")


def lease_conflict(holder: str, left_s: float) -> Conflict:
    """Return the error for a lease that another holder has for `left_s` seconds."""
    return Conflict(f"the lease is held by {holder} for another {left_s:.1f} s")


def revision_conflict(key: str, expected: int | None, found: int | None) -> Conflict:
    """Return the error for a compare-and-set that found another revision (None: no such key)."""
    wanted, present = ("absent" if rev is None else rev for rev in (expected, found))
    return Conflict(f"{key}: expected revision {wanted}, found {present}")


def stale_token(token: int) -> StaleError:
    """Return the error for a token that is not that of the newest lease."""
    return StaleError(f"token {token} is not that of the newest lease")
