"""A connection to an etcd cluster: one member at a time, with a time limit on every call.

A member that is cut off from the other members still accepts connections, but it cannot answer
without a quorum. Every request asks for a member with a leader: an isolated member refuses it at
once, as soon as it has noticed its isolation, and lets it time out before. In both cases the
request goes to the next endpoint, and all later requests too. The leading coordinator renews its
lease every 0.3 s and a standby asks for it every 0.15 s, so isolation is noticed at once. gRPC
itself leaves a member only when the connection breaks. Therefore the endpoints must name single
members, not a service that stands for all.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.etcd.compatibility import load_etcd3
from elastic.store.interface import StoreError, StoreFull, StoreUnavailable

log = logging.getLogger(__name__)
etcd3 = load_etcd3()
etcdrpc: Any = etcd3.etcdrpc
"""etcd's messages and service stubs."""
CALL_S = 1.0
"""Time limit of one request to one etcd member."""
PATIENCE_S = 2.5
"""Time limit of one request over all members and retries."""
ROUNDS = 2
"""Attempts per member and request. During etcd's own election the first answers are refusals."""
MAX_BYTES = 64 << 20
"""Largest gRPC message in either direction."""
DEADLINE = "Deadline Exceeded"
REQUIRE_LEADER = ("hasleader", "true")
"""Metadata with which etcd refuses requests at a member that knows no leader. Without it the
request waits."""

OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 2000),  # a replaced member has another address
    ("grpc.keepalive_time_ms", 10_000),  # etcd accepts at most one in five seconds
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
)
_REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes of errors that a retry does not change."""
_PASSING = ("auth revision", "invalid auth token", "revision in header")
"""Errors with such a code that a new login resolves: etcd restarted or the login expired."""
_TOO_LARGE = ("too large", "larger than max")
_FULL = "database space exceeded"
"""Part of the error of all writes while etcd has the alarm NOSPACE."""


class EtcdConnection:
    """Sends requests of any thread to etcd. `on_failure()` is called after each failed request.

    `call_s` limits one request to one member, `patience_s` one request with all its retries.
    """

    def __init__(
        self,
        spec: StoreSpec,
        on_failure: Callable[[], object],
        call_s: float = CALL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.spec, self._on_failure = spec, on_failure
        self._call_s, self._patience_s = call_s, patience_s
        self._lock = threading.Lock()
        self._at, self._closed = 0, False
        self._client: Any = None
        self._left = ("", "")
        """Member that failed since the last answer, and its error; the first one if several did."""

    @property
    def endpoint(self) -> str:
        """The etcd member in use, as host:port."""
        return self.spec.endpoints[self._at % len(self.spec.endpoints)]

    def call(self, method: str, request: Any) -> Any:
        """Return the answer of `method` of etcd's key-value service.

        Raises StoreUnavailable if no member answers in time, StoreFull if etcd has no room, and
        StoreError if etcd refuses.
        """
        end = time.monotonic() + self._patience_s
        failure: Any = None
        for attempt in itertools.count():
            left = end - time.monotonic()
            tried = attempt >= ROUNDS * len(self.spec.endpoints) and not _lacks_leader(failure)
            if left <= 0 or tried:
                break
            if attempt and attempt % len(self.spec.endpoints) == 0:
                time.sleep(min(left, 0.05))
            client: Any = None
            try:
                client = self.client()
                ask = getattr(client.kvstub, method)
                metadata = (*(client.metadata or ()), REQUIRE_LEADER)
                answer = ask(request, timeout=min(self._call_s, left), metadata=metadata)
                self._note_change()
                return answer
            except grpc.RpcError as error:
                failure = error
                self._on_failure()
                self._raise_if_full(error)
                self._drop(client, error)
                self._raise_if_refused(error)
            except ValueError as error:  # another thread has closed the client
                failure = error
        raise StoreUnavailable(f"no etcd answers at {self.spec.url}: {_text(failure)}") from failure

    def client(self) -> Any:
        """Return the etcd3 client of the member in use. Connects if there is none."""
        with self._lock:
            if self._closed:
                raise StoreError(f"the store at {self.spec.url} was closed")
            if self._client is None:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_client()

    def _drop(self, client: Any, error: Any) -> None:
        """Close a client that failed (None: it did not connect). The next call of any thread uses
        the next member, and calls in progress on this client fail and do the same."""
        with self._lock:
            if client is self._client:
                self._left = self._left if self._left[0] else (self.endpoint, _text(error))
                self._at += 1
                self._close_client()

    def _note_change(self) -> None:
        """Log that another member answers than before."""
        with self._lock:
            (left, why), self._left = self._left, ("", "")
            if left and left != self.endpoint:
                log.warning("etcd: %s is used instead of %s: %s", self.endpoint, left, why)

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(grpc.RpcError, ValueError):
                client.close()

    def _connect(self) -> Any:
        host, _, port = self.endpoint.rpartition(":")
        spec = self.spec
        try:
            password = Path(spec.password_file).read_text().rstrip("\r\n") if spec.user else None
            return etcd3.Etcd3Client(
                host=host,
                port=int(port),
                ca_cert=spec.ca or None,
                cert_key=spec.key or None,
                cert_cert=spec.cert or None,
                user=spec.user or None,
                password=password,
                timeout=self._call_s,
                grpc_options=OPTIONS,
            )
        except OSError as error:
            text = f"store {spec.url}: {error.filename} cannot be read: {error.strerror}"
            raise StoreError(text) from error

    def _raise_if_full(self, error: Any) -> None:
        """Raise StoreFull for the alarm NOSPACE. All members have it, so the same one stays."""
        if _FULL in (error.details() or ""):
            raise StoreFull(
                f"etcd at {self.spec.url} is full (NOSPACE) and refuses writes; compact and "
                "defragment it, then run `etcdctl alarm disarm`"
            ) from error

    def _raise_if_refused(self, error: Any) -> None:
        """Raise StoreError if a retry of the request cannot succeed."""
        details = error.details() or ""
        too_large = any(text in details for text in _TOO_LARGE)
        passing = any(text in details for text in _PASSING)
        if too_large or (error.code() in _REFUSED and not passing):
            remedy = "; give etcd a larger --max-request-bytes" if too_large else ""
            raise StoreError(f"etcd at {self.spec.url} refuses: {details}{remedy}") from error


def _text(error: Any) -> str:
    """Return the cause of a failed request. gRPC has several texts for a time limit that was
    reached, as "Stream removed (Deadline Exceeded)"."""
    if not hasattr(error, "details"):
        return str(error or "time is up")
    details = str(error.details() or error.code()).splitlines()[0][:200]
    late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return "no answer in time" if late or DEADLINE in details else details


def _lacks_leader(error: Any) -> bool:
    """Return whether a member refused a request because it knows no leader. An election takes 1 to
    2 s, and then each member refuses at once."""
    return isinstance(error, grpc.RpcError) and "no leader" in str(error.details())
