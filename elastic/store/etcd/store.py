"""The coordinator store on etcd, for coordinators on several machines.

    PREFIX/k/KEY    an entry: write id (16 bytes), form (1 byte), value (compressed if shorter)
    PREFIX/l/NAME   holder of a lease; the revision of this key is the token
    PREFIX/r/NAME   changed by every renewal of the lease

- **One write is one transaction.** It compares the revision of the key, and the revision of the
  lease's key with the token. A coordinator that lost its lease cannot write.
- **Tokens and revisions** are etcd's own store revision. It only grows, also over restarts.
- **A lease has expired** when a candidate has seen no renewal for the whole time of the lease, by
  its own clock (`elastic.core.protocol.election`). A candidate must therefore call `acquire`
  several times in that time. The store ignores the argument `now` of other machines. It does not
  use etcd's own leases; docs/decisions/016-etcd-and-several-coordinators.md says why.
- **A lost answer** leaves open whether a write was made. The same call repeats the write and
  recognizes the first attempt by its write id. So no write is made twice, and no compare-and-set
  fails because of its own first attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.protocol.election import LeaseObservation, observe_lease, seconds_to_expiry
from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.etcd.connection import (
    CALL_S,
    PATIENCE_S,
    EtcdConnection,
    etcdrpc,
    prefix_range,
)
from elastic.store.etcd.watch import EtcdWatch
from elastic.store.interface import (
    Entry,
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

WRITE_ID_BYTES = 16
PLAIN, PACKED = b"p", b"z"
PACK_FROM = 512
"""Values of fewer bytes are not compressed."""
HISTORY = 1000
"""Writes between two compactions, and the least number of revisions that stay readable."""


@dataclass(frozen=True, slots=True)
class _LeaseRecord:
    """A lease as etcd holds it."""

    holder: str
    ttl_s: float
    write_id: str
    token: int
    renewal: int
    """Revision of the last renewal."""


class EtcdStore:
    """Implements `elastic.store.interface.Store` under `prefix` in the etcd cluster of `spec`.

    The first call connects. Methods raise StoreError if etcd refuses (password, certificate, value
    too large), and StoreUnavailable if etcd is unreachable: `call_s` limits one request to one
    member, `patience_s` limits one request with all its retries.
    """

    def __init__(
        self, spec: StoreSpec, prefix: str, call_s: float = CALL_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._root = prefix.strip("/").encode() + b"/"
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._sightings: dict[str, LeaseObservation] = {}
        self._own: dict[str, tuple[int, Lease]] = {}
        self._writes = 0
        self._connection = EtcdConnection(spec, self._forget_sightings, call_s, patience_s)

    def get(self, key: str) -> Entry | None:
        check_key(key)
        answer = self._range(key=self._entry_key(key))
        return self._entry(answer.kvs[0]) if answer.kvs else None

    def list(self, prefix: str) -> tuple[Entry, ...]:
        start = self._root + b"k/" + prefix.encode("utf-8", "surrogatepass")
        return tuple(self._entry(kv) for kv in self._range(**prefix_range(start)).kvs)

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        check_key(key)
        write_id = os.urandom(WRITE_ID_BYTES)
        put = _put(self._entry_key(key), write_id + _packed(bytes(value)))
        revision = self._write(key, expected, token, write_id, put)
        self._compact(revision)
        return Entry(key, bytes(value), revision)

    def delete_if(self, key: str, expected: int, token: int) -> None:
        check_key(key)
        self._write(key, expected, token, b"", _delete(self._entry_key(key)))

    def watch(self, prefix: str, from_revision: int = 0) -> Watch:
        return EtcdWatch(
            self._connection,
            self._root + b"k/",
            prefix,
            from_revision,
            lambda kv: self._entry(kv).value,
        )

    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(name, holder, ttl_s)
        write_id = os.urandom(WRITE_ID_BYTES).hex()
        text = json.dumps({"holder": holder, "ttl_s": ttl_s, "write": write_id}).encode()
        lease_key, renewal_key = self._lease_key(name), self._renewal_key(name)
        while True:
            asked = time.monotonic()
            record = self._lease_record(name)
            if record is not None and record.write_id == write_id:  # the answer was lost
                lease = Lease(name, holder, record.token, ttl_s, now + ttl_s)
                return self._remember(lease, record.renewal)
            if record is not None and record.holder != holder:
                left_s = self._left_s(name, record, asked)
                if left_s > 0:
                    expires_at = now + left_s
                    other = Lease(name, record.holder, record.token, record.ttl_s, expires_at)
                    raise lease_conflict(other, now)
            token, renewal = (record.token, record.renewal) if record else (0, 0)
            compares = [_unchanged(lease_key, token), _unchanged(renewal_key, renewal)]
            answer = self._transact(compares, [_put(lease_key, text), _put(renewal_key, text)], [])
            if answer.succeeded:
                revision = answer.header.revision
                lease = Lease(name, holder, revision, ttl_s, now + ttl_s)
                return self._remember(lease, revision)

    def renew(self, lease: Lease, now: float) -> Lease:
        compare = _unchanged(self._lease_key(lease.name), lease.token)
        put = _put(self._renewal_key(lease.name), os.urandom(WRITE_ID_BYTES))
        answer = self._transact([compare], [put], [])
        if lease.token <= 0 or not answer.succeeded:
            raise stale_token(lease.token)
        renewed = replace(lease, expires_at=now + lease.ttl_s)
        return self._remember(renewed, answer.header.revision)

    def release(self, lease: Lease) -> None:
        keys = (self._lease_key(lease.name), self._renewal_key(lease.name))
        self._transact([_unchanged(keys[0], lease.token)], [_delete(key) for key in keys], [])

    def current(self, name: str) -> Lease | None:
        """Return the newest lease. For a lease of another holder, `expires_at` is an estimate."""
        asked = time.monotonic()
        record = self._lease_record(name)
        if record is None:
            return None
        renewal, own = self._own.get(name, (0, None))
        if own is not None and renewal == record.renewal:
            return own
        expires_at = time.time() + self._left_s(name, record, asked)
        return Lease(name, record.holder, record.token, record.ttl_s, expires_at)

    def close(self) -> None:
        self._connection.close()

    def _entry_key(self, key: str) -> bytes:
        return self._root + b"k/" + key.encode()

    def _lease_key(self, name: str) -> bytes:
        return self._root + b"l/" + name.encode()

    def _renewal_key(self, name: str) -> bytes:
        return self._root + b"r/" + name.encode()

    def _entry(self, kv: Any) -> Entry:
        key = bytes(kv.key).removeprefix(self._root + b"k/").decode()
        body = bytes(kv.value)[WRITE_ID_BYTES:]
        form, value = body[:1], body[1:]
        try:
            if form not in (PLAIN, PACKED):
                raise ValueError("give this job another --rdzv-id")
            value = zlib.decompress(value) if form == PACKED else value
        except (ValueError, zlib.error) as error:
            text = f"the value of {key} in etcd is from another program: {error}"
            raise StoreError(text) from error
        return Entry(key, value, kv.mod_revision)

    def _range(self, **fields: bytes) -> Any:
        return self._connection.call("Range", etcdrpc.RangeRequest(**fields))

    def _transact(
        self, compares: Sequence[Any], success: Sequence[Any], failure: Sequence[Any]
    ) -> Any:
        request = etcdrpc.TxnRequest(compare=compares, success=success, failure=failure)
        return self._connection.call("Txn", request)

    def _write(
        self, key: str, expected: int | None, token: int, write_id: bytes, change: Any
    ) -> int:
        """Return the revision of the change. `write_id` is empty for a deletion."""
        lease_key, entry_key = self._lease_key(self._lease_name(token)), self._entry_key(key)
        compares = [_unchanged(lease_key, token), _unchanged(entry_key, expected or 0)]
        answer = self._transact(compares, [change], [_get(lease_key), _get(entry_key)])
        if answer.succeeded:
            return int(answer.header.revision)
        leases, entries = (response.response_range.kvs for response in answer.responses)
        if not leases or leases[0].mod_revision != token:
            raise stale_token(token)
        if write_id and entries and bytes(entries[0].value).startswith(write_id):
            return int(entries[0].mod_revision)  # the answer to the first attempt was lost
        raise revision_conflict(key, expected, entries[0].mod_revision if entries else None)

    def _lease_name(self, token: int) -> str:
        """Return the name of the lease with `token`. Raises StaleError if there is none."""
        with self._lock:
            name = self._names.get(token)
        if name is not None:
            return name
        start = self._root + b"l/"
        for kv in self._range(**prefix_range(start)).kvs:
            if kv.mod_revision == token:
                return bytes(kv.key).removeprefix(start).decode()
        raise stale_token(token)

    def _lease_record(self, name: str) -> _LeaseRecord | None:
        """Read both keys of a lease at one point in time."""
        gets = [_get(self._lease_key(name)), _get(self._renewal_key(name))]
        answer = self._transact([], gets, [])
        leases, renewals = (response.response_range.kvs for response in answer.responses)
        if not leases:
            return None
        try:
            data = json.loads(leases[0].value)
            holder, ttl_s, write_id = data["holder"], float(data["ttl_s"]), data["write"]
        except (ValueError, KeyError, TypeError) as error:
            text = f"the lease {name} in etcd is from another program: {error}"
            raise StoreError(text) from error
        renewal = renewals[0].mod_revision if renewals else 0
        return _LeaseRecord(holder, ttl_s, write_id, leases[0].mod_revision, renewal)

    def _left_s(self, name: str, record: _LeaseRecord, asked: float) -> float:
        """Seconds until the lease expires, as far as this store has observed its renewals."""
        mark, ttl_s = max(record.renewal, record.token), record.ttl_s
        with self._lock:
            before = self._sightings.get(name)
            seen = observe_lease(before, mark, asked, time.monotonic(), ttl_s)
            self._sightings[name] = seen
        return seconds_to_expiry(seen, ttl_s)

    def _remember(self, lease: Lease, renewal: int) -> Lease:
        """Note that this store holds `lease`, and return it."""
        with self._lock:
            self._names[lease.token] = lease.name
            self._own[lease.name] = (renewal, lease)
            self._sightings.pop(lease.name, None)
        return lease

    def _forget_sightings(self) -> None:
        """Start the observation of all leases again. An outage of etcd must not expire a lease."""
        with self._lock:
            self._sightings.clear()

    def _compact(self, revision: int) -> None:
        """Delete old revisions now and then. Without compaction etcd keeps all and becomes full."""
        self._writes += 1
        if self._writes % HISTORY or revision <= HISTORY:
            return
        with contextlib.suppress(StoreError, StoreUnavailable):  # only housekeeping
            request = etcdrpc.CompactionRequest(revision=revision - HISTORY)
            self._connection.call("Compact", request)


def _get(key: bytes) -> Any:
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))


def _put(key: bytes, value: bytes) -> Any:
    return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value))


def _delete(key: bytes) -> Any:
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))


def _unchanged(key: bytes, revision: int) -> Any:
    """Compare the revision of the key's last change with `revision`; 0: the key does not exist."""
    compare = etcdrpc.Compare
    return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=revision)


def _packed(value: bytes) -> bytes:
    packed = zlib.compress(value, 1) if len(value) >= PACK_FROM else value
    return PACKED + packed if len(packed) < len(value) else PLAIN + value
