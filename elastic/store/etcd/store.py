"""The coordinator store on etcd, for coordinators on several machines.

    PREFIX/k/KEY           entry: write id (16 bytes), form (1 byte), value (compressed if shorter)
    PREFIX/l/coordinator   holder of the lease; the revision of this key is the token
    PREFIX/r/coordinator   changed by every renewal of the lease
    PREFIX/w/coordinator   written by candidates to learn whether a full etcd has room again

- **One write is one transaction.** It compares the revision of the key, and the revision of the
  lease's key with the token. A coordinator that lost its lease cannot write.
- **Tokens and revisions** are etcd's own store revision. It only grows, also over restarts.
- **A lease has expired** when a candidate has seen no renewal for the whole time of the lease, by
  its own clock (`elastic.core.protocol.election`). A candidate must therefore call `acquire`
  several times in that time. The store ignores the argument `now` of other machines. It does not
  use etcd's own leases; docs/decisions/016-etcd-and-several-coordinators.md says why.
- **A full etcd** (alarm NOSPACE) answers reads and refuses writes, so renewals stop although a
  candidate sees the lease. A candidate that met it writes a key of its own first, and begins to
  observe the lease only when that succeeds: the holder can renew before.
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
from dataclasses import dataclass
from typing import Any

from elastic.core.protocol.election import LeaseObservation, observe_lease, seconds_to_expiry
from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.etcd.connection import CALL_S, PATIENCE_S, EtcdConnection, etcdrpc
from elastic.store.interface import (
    Entry,
    Lease,
    StoreError,
    StoreFull,
    StoreUnavailable,
    check_key,
    check_lease,
    lease_conflict,
    revision_conflict,
    stale_token,
)

WRITE_ID_BYTES = 16
PLAIN, PACKED = b"p", b"z"
PACK_FROM = 512
"""Least bytes of a value that is compressed."""
HISTORY = 1000
"""Writes between two compactions, and the least number of revisions that stay readable."""


@dataclass(frozen=True, slots=True)
class _LeaseRecord:
    """The lease as etcd holds it."""

    holder: str
    ttl_s: float
    write_id: str
    token: int
    renewal: int
    """Revision of the last renewal."""


class EtcdStore:
    """Implements `elastic.store.interface.Store` under `prefix` in the etcd cluster of `spec`.

    The first call connects. Methods raise StoreError if etcd refuses (password, certificate, value
    too large), StoreFull if etcd has no room, and StoreUnavailable if etcd is unreachable:
    `call_s` limits one request to one member, `patience_s` limits one request with all its retries.
    """

    def __init__(
        self, spec: StoreSpec, prefix: str, call_s: float = CALL_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._root = prefix.strip("/").encode() + b"/"
        self._lease_key = self._root + b"l/coordinator"
        self._renewal_key = self._root + b"r/coordinator"
        self._room_key = self._root + b"w/coordinator"
        self._was_full = False
        """Whether the last write of this store met a full etcd."""
        self._lock = threading.Lock()
        self._observation: LeaseObservation | None = None
        self._writes = 0
        self._connection = EtcdConnection(spec, self._forget_observation, call_s, patience_s)

    def get(self, key: str) -> Entry | None:
        check_key(key)
        request = etcdrpc.RangeRequest(key=self._entry_key(key))
        kvs = self._connection.call("Range", request).kvs
        return Entry(key, _unpacked(key, bytes(kvs[0].value)), kvs[0].mod_revision) if kvs else None

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        check_key(key)
        write_id, entry_key = os.urandom(WRITE_ID_BYTES), self._entry_key(key)
        compares = [self._is_newest(token), _unchanged(entry_key, expected or 0)]
        put = _put(entry_key, write_id + _packed(bytes(value)))
        answer = self._transact(compares, [put], [_get(self._lease_key), _get(entry_key)])
        revision = answer.header.revision
        if not answer.succeeded:
            leases, entries = (response.response_range.kvs for response in answer.responses)
            if not leases or leases[0].mod_revision != token:
                raise stale_token(token)
            if not entries or not bytes(entries[0].value).startswith(write_id):
                found = entries[0].mod_revision if entries else None
                raise revision_conflict(key, expected, found)
            revision = entries[0].mod_revision  # the answer to the first attempt was lost
        self._compact(revision)
        return Entry(key, bytes(value), revision)

    def acquire(self, holder: str, ttl_s: float, now: float) -> Lease:
        check_lease(holder, ttl_s)
        write_id = os.urandom(WRITE_ID_BYTES).hex()
        text = json.dumps({"holder": holder, "ttl_s": ttl_s, "write": write_id}).encode()
        puts = [_put(self._lease_key, text), _put(self._renewal_key, text)]
        while True:
            asked = time.monotonic()
            record = self._lease_record()
            if record is not None and record.write_id == write_id:  # the answer was lost
                return Lease(holder, record.token, ttl_s)
            if record is not None and record.holder != holder:
                self._await_room()
                left_s = self._left_s(record, asked)
                if left_s > 0:
                    raise lease_conflict(record.holder, left_s)
            token, renewal = (record.token, record.renewal) if record else (0, 0)
            compares = [
                _unchanged(self._lease_key, token),
                _unchanged(self._renewal_key, renewal),
            ]
            answer = self._transact(compares, puts, [])
            if answer.succeeded:
                return Lease(holder, answer.header.revision, ttl_s)

    def renew(self, lease: Lease, now: float) -> None:
        put = _put(self._renewal_key, os.urandom(WRITE_ID_BYTES))
        if not self._transact([self._is_newest(lease.token)], [put], []).succeeded:
            raise stale_token(lease.token)

    def release(self, lease: Lease) -> None:
        deletions = [_delete(self._lease_key), _delete(self._renewal_key)]
        self._transact([self._is_newest(lease.token)], deletions, [])

    def close(self) -> None:
        self._connection.close()

    def _entry_key(self, key: str) -> bytes:
        return self._root + b"k/" + key.encode()

    def _transact(
        self, compares: Sequence[Any], success: Sequence[Any], failure: Sequence[Any]
    ) -> Any:
        """Make a transaction that writes `success` if all `compares` hold."""
        request = etcdrpc.TxnRequest(compare=compares, success=success, failure=failure)
        try:
            answer = self._connection.call("Txn", request)
        except StoreFull:
            self._was_full = True
            raise
        self._was_full = self._was_full and not answer.succeeded
        return answer

    def _is_newest(self, token: int) -> Any:
        """Return the condition that `token` is that of the newest lease. Token 0, which means an
        absent key in etcd, never fulfils it."""
        return _unchanged(self._lease_key, token or -1)

    def _lease_record(self) -> _LeaseRecord | None:
        """Return the lease, read from both keys at one point in time; None: no lease."""
        gets = [_get(self._lease_key), _get(self._renewal_key)]
        answer = self._connection.call("Txn", etcdrpc.TxnRequest(success=gets))
        leases, renewals = (response.response_range.kvs for response in answer.responses)
        if not leases:
            return None
        try:
            data = json.loads(leases[0].value)
            holder, ttl_s, write_id = data["holder"], float(data["ttl_s"]), data["write"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"the lease in etcd is from another program: {error}") from error
        renewal = renewals[0].mod_revision if renewals else 0
        return _LeaseRecord(holder, ttl_s, write_id, leases[0].mod_revision, renewal)

    def _left_s(self, record: _LeaseRecord, asked: float) -> float:
        """Return the seconds until the lease expires, from the renewals seen by this store."""
        mark, ttl_s = max(record.renewal, record.token), record.ttl_s
        with self._lock:
            before, answered = self._observation, time.monotonic()
            self._observation = observe_lease(before, mark, asked, answered, ttl_s)
            return seconds_to_expiry(self._observation, ttl_s)

    def _await_room(self) -> None:
        """Raise StoreFull while etcd is full. The holder's time without room does not count."""
        if self._was_full:
            self._transact([], [_put(self._room_key, b"")], [])
            self._forget_observation()

    def _forget_observation(self) -> None:
        """Start to observe the lease again. An outage of etcd must not expire it."""
        with self._lock:
            self._observation = None

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
    """Return the condition that the key's last change has `revision` (0: the key is absent)."""
    compare = etcdrpc.Compare
    return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=revision)


def _packed(value: bytes) -> bytes:
    packed = zlib.compress(value, 1) if len(value) >= PACK_FROM else value
    return PACKED + packed if len(packed) < len(value) else PLAIN + value


def _unpacked(key: str, body: bytes) -> bytes:
    """Return the value of an entry. Raises StoreError if this program did not write it."""
    form, value = body[WRITE_ID_BYTES:][:1], body[WRITE_ID_BYTES + 1 :]
    try:
        if form not in (PLAIN, PACKED):
            raise ValueError("give this job another --rdzv-id")
        return zlib.decompress(value) if form == PACKED else value
    except (ValueError, zlib.error) as error:
        text = f"the value of {key} in etcd is from another program: {error}"
        raise StoreError(text) from error
