"""A connection to a cluster of etcd: one member at a time, the next one when it fails, and no call without an end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from elastic.core.protocol.store_spec import StoreSpec
from elastic.store.base import StoreError, StoreUnavailable
from elastic.store.etcd import messages  # noqa: F401  (etcd3 cannot be imported before)

import etcd3  # isort: skip
from etcd3 import etcdrpc  # isort: skip

T = TypeVar("T")
log = logging.getLogger(__name__)
CALL_S = 1.0
"""Longest time that one member is waited for."""
PATIENCE_S = 2.5
"""Longest time that a request may take, all members and repetitions together."""
ROUNDS = 2
"""How often every member is tried: while etcd elects its leader the first answers are refusals."""
MAX_BYTES = 64 << 20

OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses more than one in five seconds
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
"""Answers that stay the same however often one asks."""
_PASSING = ("auth revision", "invalid auth token", "revision in header")
"""... but for these: etcd restarted, or our login ran out; a new one helps."""


class Link:
    """Calls etcd on behalf of any thread. `on_failure` hears of every call that failed."""

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
        self._at, self._client, self._closed = 0, None, False

    @property
    def endpoint(self) -> str:
        """The member that is used now."""
        return self.spec.endpoints[self._at % len(self.spec.endpoints)]

    def call(self, ask: Callable[[Any, dict[str, Any]], T]) -> T:
        """Return `ask(client, keywords)`, where the keywords go to a method of one of the client's stubs.

        Raises StoreUnavailable when no member answers in time, StoreError when etcd refuses.
        """
        end = time.monotonic() + self._patience_s
        failure: Any = None
        for attempt in range(ROUNDS * len(self.spec.endpoints)):
            left = end - time.monotonic()
            if left <= 0:
                break
            if attempt and attempt % len(self.spec.endpoints) == 0:
                time.sleep(min(left, 0.05))
            client: Any = None
            try:
                client = self.client()
                return ask(client, {"timeout": min(self._call_s, left), "metadata": client.metadata})
            except grpc.RpcError as error:
                failure = error
                self._on_failure()
                self.drop(client)
                if _final(error):
                    raise StoreError(
                        f"etcd at {self.spec.url} refuses: {error.details()}{_remedy(error)}"
                    ) from error
            except ValueError as error:  # the client was closed by another thread meanwhile
                failure = error
        raise StoreUnavailable(f"no etcd answers at {self.spec.url}: {_words(failure)}") from failure

    def client(self) -> Any:
        """A client of the member at hand; made when there is none."""
        with self._lock:
            if self._closed:
                raise StoreError(f"the store at {self.spec.url} was closed")
            if self._client is None:
                try:
                    self._client = self._connect()
                except grpc.RpcError:
                    self._at += 1
                    raise
            return self._client

    def drop(self, client: Any) -> None:
        """Give a client up that failed, and go to the next member."""
        with self._lock:
            if client is not None and client is self._client:
                self._client, self._at = None, self._at + 1
                _close(client)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            if self._client is not None:
                _close(self._client)
                self._client = None

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
            raise StoreError(
                f"store {spec.url}: {error.filename} cannot be read: {error.strerror}"
            ) from error


def _close(client: Any) -> None:
    with contextlib.suppress(grpc.RpcError, ValueError):
        client.close()


def _too_large(error: Any) -> bool:
    return any(text in (error.details() or "") for text in ("too large", "larger than max"))


def _remedy(error: Any) -> str:
    return "; give etcd a larger --max-request-bytes" if _too_large(error) else ""


def _final(error: Any) -> bool:
    details = error.details() or ""
    if _too_large(error):
        return True
    return error.code() in _REFUSED and not any(text in details for text in _PASSING)


def _words(error: Any) -> str:
    if hasattr(error, "details"):
        text = str(error.details() or error.code())
        return text.splitlines()[0][:200]
    return str(error or "time is up")


__all__ = ["Link", "etcdrpc"]
