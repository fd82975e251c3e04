"""The store on etcd: for coordinators on several machines.

    PREFIX/k/KEY    entries: 16 bytes that name the write, one that tells the form, the value (compressed if that pays)
    PREFIX/l/NAME   who took the lease; its revision is the token
    PREFIX/r/NAME   changed by every renewal

- **One write is one transaction** that compares the key's revision, and that of the lease's key with the token. Who
  lost the lease can write nothing, whatever it believes.
- **Tokens and revisions** are etcd's own store revision, which only grows, also over restarts.
- **A lease has run out** when the one who wants it has seen no renewal for its whole time on its own clock
  (`elastic.core.protocol.election`); ask (`acquire`) several times in that time. Nobody's `now` is believed. etcd's own leases
  are not used: see docs/decisions/016-etcd-and-several-coordinators.md.
- **A lost answer** leaves it open whether a write was made. It is repeated within the call, and known again by its 16
  bytes; so a compare-and-set neither doubles nor fails because of itself.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.protocol.election import Sighting, left, sighted
from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import StaleError
from elastic.store.base import (
    Entry,
    Lease,
    StoreError,
    StoreUnavailable,
    Watch,
    check_key,
    check_lease,
    held,
    mismatch,
)
from elastic.store.etcd.link import CALL_S, PATIENCE_S, Link, etcdrpc
from elastic.store.etcd.watch import EtcdWatch

MARK = 16
"""Bytes that name a write."""
PLAIN, PACKED = b"p", b"z"
PACK_FROM = 512
"""Shorter values are not compressed."""
HISTORY = 1000
"""Writes of the lease's holder between two compactions; so many revisions, at least, stay readable for watches."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A lease as etcd holds it."""

    holder: str
    ttl_s: float
    write: str
    token: int
    renewal: int
    """Revision of its last renewal."""


class EtcdStore:
    """Implements `elastic.store.base.Store` under `prefix` in the etcd cluster of `spec`.

    Nothing is connected before the first call. Raises StoreError when etcd refuses (password, certificate, a value
    that is too large), StoreUnavailable when it is out of reach: after `patience_s` at most, `call_s` for one member.
    """

    def __init__(
        self, spec: StoreSpec, prefix: str, call_s: float = CALL_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._root = prefix.strip("/").encode() + b"/"
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._sightings: dict[str, Sighting] = {}
        self._own: dict[str, tuple[int, Lease]] = {}
        self._writes = 0
        self._link = Link(spec, self._forget_sightings, call_s, patience_s)

    # ---- entries ----

    def get(self, key: str) -> Entry | None:
        check_key(key)
        answer = self._range(self._entry(key))
        return self._read(answer.kvs[0]) if answer.kvs else None

    def list(self, prefix: str) -> tuple[Entry, ...]:
        start = self._root + b"k/" + prefix.encode("utf-8", "surrogatepass")
        return tuple(self._read(kv) for kv in self._range(start, range_end=after(start)).kvs)

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        check_key(key)
        write, place = os.urandom(MARK), self._entry(key)
        put = etcdrpc.PutRequest(key=place, value=write + _packed(bytes(value)))
        revision = self._write(key, expected, token, write, etcdrpc.RequestOp(request_put=put))
        self._compact(revision)
        return Entry(key, bytes(value), revision)

    def delete_if(self, key: str, expected: int, token: int) -> None:
        check_key(key)
        gone = etcdrpc.DeleteRangeRequest(key=self._entry(key))
        self._write(key, expected, token, b"", etcdrpc.RequestOp(request_delete_range=gone))

    def watch(self, prefix: str, from_revision: int = 0) -> Watch:
        return EtcdWatch(
            self._link, self._root + b"k/", prefix, from_revision, lambda kv: self._read(kv).value
        )

    # ---- leases ----

    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(name, holder, ttl_s)
        write = os.urandom(MARK).hex()
        text = json.dumps({"holder": holder, "ttl_s": ttl_s, "write": write}).encode()
        while True:
            asked = time.monotonic()
            taken = self._taken(name)
            if taken is not None and taken.write == write:
                return self._mine(Lease(name, holder, taken.token, ttl_s, now + ttl_s), taken.renewal)
            if taken is not None and taken.holder != holder:
                remaining = self._remaining(name, taken, asked)
                if remaining > 0:
                    raise held(Lease(name, taken.holder, taken.token, taken.ttl_s, now + remaining), now)
            token, renewal = (taken.token, taken.renewal) if taken else (0, 0)
            puts = [_put(place, text) for place in (self._lease(name), self._renewal(name))]
            compares = [_unchanged(self._lease(name), token), _unchanged(self._renewal(name), renewal)]
            answer = self._transact(compares, puts, [])
            if answer.succeeded:
                revision = answer.header.revision
                return self._mine(Lease(name, holder, revision, ttl_s, now + ttl_s), revision)

    def renew(self, lease: Lease, now: float) -> Lease:
        place = self._lease(lease.name)
        write = [_put(self._renewal(lease.name), os.urandom(MARK))]
        answer = self._transact([_unchanged(place, lease.token)], write, [])
        if lease.token <= 0 or not answer.succeeded:
            raise _stale(lease.token)
        return self._mine(replace(lease, expires_at=now + lease.ttl_s), answer.header.revision)

    def release(self, lease: Lease) -> None:
        places = (self._lease(lease.name), self._renewal(lease.name))
        gone = [
            etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=place)) for place in places
        ]
        self._transact([_unchanged(places[0], lease.token)], gone, [])

    def current(self, name: str) -> Lease | None:
        """`expires_at` is this machine's guess, unless this very store took or renewed the lease."""
        asked = time.monotonic()
        taken = self._taken(name)
        if taken is None:
            return None
        renewal, own = self._own.get(name, (0, None))
        if own is not None and renewal == taken.renewal:
            return own
        expires_at = time.time() + self._remaining(name, taken, asked)
        return Lease(name, taken.holder, taken.token, taken.ttl_s, expires_at)

    def close(self) -> None:
        self._link.close()

    @property
    def endpoint(self) -> str:
        """The member of etcd that is used now."""
        return self._link.endpoint

    # ---- inside ----

    def _entry(self, key: str) -> bytes:
        return self._root + b"k/" + key.encode()

    def _lease(self, name: str) -> bytes:
        return self._root + b"l/" + name.encode()

    def _renewal(self, name: str) -> bytes:
        return self._root + b"r/" + name.encode()

    def _read(self, kv: Any) -> Entry:
        key = bytes(kv.key).removeprefix(self._root + b"k/").decode()
        body = bytes(kv.value)[MARK:]
        try:
            value = zlib.decompress(body[1:]) if body[:1] == PACKED else body[1:]
        except zlib.error as error:
            raise StoreError(f"etcd holds a value of {key} that is not ours: {error}") from error
        if body[:1] not in (PLAIN, PACKED):
            raise StoreError(f"etcd holds a value of {key} that is not ours; give the job another --rdzv-id")
        return Entry(key, value, kv.mod_revision)

    def _range(self, key: bytes, **more: Any) -> Any:
        request = etcdrpc.RangeRequest(key=key, **more)
        return self._link.call(lambda client, how: client.kvstub.Range(request, **how))

    def _transact(self, compares: Sequence[Any], success: Sequence[Any], failure: Sequence[Any]) -> Any:
        request = etcdrpc.TxnRequest(compare=compares, success=success, failure=failure)
        return self._link.call(lambda client, how: client.kvstub.Txn(request, **how))

    def _write(self, key: str, expected: int | None, token: int, write: bytes, change: Any) -> int:
        """The revision of the change. `write`: what its value begins with; b"": a deletion."""
        lease, place = self._lease(self._name_of(token)), self._entry(key)
        compares = [_unchanged(lease, token), _unchanged(place, expected or 0)]
        answer = self._transact(compares, [change], [_get(lease), _get(place)])
        if answer.succeeded:
            return int(answer.header.revision)
        leases, entries = (response.response_range.kvs for response in answer.responses)
        if not leases or leases[0].mod_revision != token:
            raise _stale(token)
        if write and entries and bytes(entries[0].value).startswith(write):
            return int(entries[0].mod_revision)  # the answer to our first attempt was lost
        raise mismatch(key, expected, entries[0].mod_revision if entries else None)

    def _name_of(self, token: int) -> str:
        """The lease that a token is of. Raises StaleError if it is nobody's."""
        with self._lock:
            name = self._names.get(token)
        if name is None:
            start = self._root + b"l/"
            found = [kv for kv in self._range(start, range_end=after(start)).kvs if kv.mod_revision == token]
            if not found:
                raise _stale(token)
            name = bytes(found[0].key).removeprefix(start).decode()
        return name

    def _taken(self, name: str) -> _Taken | None:
        """The lease as it is now; both keys from one instant."""
        answer = self._transact([], [_get(self._lease(name)), _get(self._renewal(name))], [])
        leases, renewals = (response.response_range.kvs for response in answer.responses)
        if not leases:
            return None
        try:
            told = json.loads(leases[0].value)
            renewal = renewals[0].mod_revision if renewals else 0
            return _Taken(
                told["holder"], float(told["ttl_s"]), told["write"], leases[0].mod_revision, renewal
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"etcd holds a lease {name} that is not ours: {error}") from error

    def _remaining(self, name: str, taken: _Taken, asked: float) -> float:
        """Seconds until the lease may be taken from its holder, as far as this store has seen."""
        with self._lock:
            before = self._sightings.get(name)
            seen = sighted(before, max(taken.renewal, taken.token), asked, time.monotonic(), taken.ttl_s)
            self._sightings[name] = seen
        return left(seen, taken.ttl_s)

    def _mine(self, lease: Lease, renewal: int) -> Lease:
        with self._lock:
            self._names[lease.token] = lease.name
            self._own[lease.name] = (renewal, lease)
            self._sightings.pop(lease.name, None)
        return lease

    def _forget_sightings(self) -> None:
        """Time in which etcd was away does not count against anybody."""
        with self._lock:
            self._sightings.clear()

    def _compact(self, revision: int) -> None:
        """Let etcd forget old values now and then: it keeps every one until it is told to, and then is full."""
        self._writes += 1
        if self._writes % HISTORY == 0 and revision > HISTORY:
            request = etcdrpc.CompactionRequest(revision=revision - HISTORY)
            try:
                self._link.call(lambda client, how: client.kvstub.Compact(request, **how))
            except (
                StoreError,
                StoreUnavailable,
            ):  # not allowed, or somebody was faster: it is only housekeeping
                return


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys that start with `prefix` (which is not all 0xff)."""
    short = prefix.rstrip(b"\xff")
    return short[:-1] + bytes([short[-1] + 1])


def _get(key: bytes) -> Any:
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))


def _put(key: bytes, value: bytes) -> Any:
    return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value))


def _unchanged(key: bytes, revision: int) -> Any:
    """The comparison: the key's last change is `revision`; 0: it does not exist."""
    compare = etcdrpc.Compare
    return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=revision)


def _packed(value: bytes) -> bytes:
    packed = zlib.compress(value, 1) if len(value) >= PACK_FROM else value
    return PACKED + packed if len(packed) < len(value) else PLAIN + value


def _stale(token: int) -> StaleError:
    return StaleError(f"token {token} is no longer the newest of its lease")
