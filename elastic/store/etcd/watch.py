"""A watch on etcd that survives lost connections and compacted revisions."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from elastic.core.protocol.election import retry_s
from elastic.domain.errors import ElasticError
from elastic.store.etcd.connection import EtcdConnection, etcdrpc, prefix_range
from elastic.store.interface import KeyChange

log = logging.getLogger(__name__)


class EtcdWatch:
    """Follows keys under `root` + `prefix` after `revision`. The keys of its changes omit `root`.

    A thread reads the stream and resumes after the last revision when the connection breaks. If
    etcd has compacted the next revisions, the thread reads the present state instead. It then
    reports changed keys with their present value, and reported keys that no longer exist as
    deleted. `value_of` decodes the value of one etcd entry.
    """

    def __init__(
        self,
        connection: EtcdConnection,
        root: bytes,
        prefix: str,
        revision: int,
        value_of: Callable[[Any], bytes],
    ) -> None:
        self._connection, self._root, self._value_of = connection, root, value_of
        self._revision = revision
        self._range = prefix_range(root + prefix.encode("utf-8", "surrogatepass"))
        self._known: set[str] = set()
        self._changes: queue.SimpleQueue[KeyChange | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock, self._stream = threading.Lock(), None
        threading.Thread(target=self._run, name="etcd-watch", daemon=True).start()

    def next(self, timeout_s: float | None = None) -> KeyChange | None:
        if self._closed.is_set():
            return None
        try:
            change = self._changes.get(block=timeout_s != 0, timeout=timeout_s)
        except queue.Empty:
            return None
        if change is None:
            self._changes.put(None)  # wakes the next waiting thread
        return change

    def __iter__(self) -> Iterator[KeyChange]:
        while (change := self.next()) is not None:
            yield change

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()
        self._changes.put(None)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            client: Any = None
            begun = time.monotonic()
            try:
                client = self._connection.client()
                if self._follow(client):
                    self._read_present_state()
            except (grpc.RpcError, ElasticError, ValueError) as error:
                if self._closed.is_set():
                    return
                self._connection.drop(client)
                failures = 1 if time.monotonic() - begun > 1 else failures + 1
                log.info("the watch is renewed: %s", error)
                self._closed.wait(retry_s(failures))

    def _follow(self, client: Any) -> bool:
        """Report changes until the stream breaks (exception). True: the next ones are compacted."""
        create = etcdrpc.WatchCreateRequest(start_revision=self._revision + 1, **self._range)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(etcdrpc.WatchRequest(create_request=create))
        stub = etcdrpc.WatchStub(client.channel)
        with self._lock:
            if self._closed.is_set():
                return False
            stream = stub.Watch(iter(requests.get, None), metadata=client.metadata)
            self._stream = stream
        try:
            for answer in stream:
                if answer.compact_revision:
                    return True
                if answer.canceled:
                    raise ValueError("etcd ended the watch")
                for event in answer.events:
                    self._report_entry(event.kv, deleted=event.type == event.DELETE)
        finally:
            requests.put(None)
            stream.cancel()
        raise ValueError("the stream ended")

    def _read_present_state(self) -> None:
        answer = self._connection.call("Range", etcdrpc.RangeRequest(**self._range))
        present = {self._key(kv) for kv in answer.kvs}
        for kv in sorted(answer.kvs, key=lambda kv: kv.mod_revision):
            if kv.mod_revision > self._revision:
                self._report_entry(kv, deleted=False)
        for key in sorted(self._known - present):
            self._report(KeyChange(key, None, answer.header.revision))
        self._revision = max(self._revision, answer.header.revision)

    def _key(self, kv: Any) -> str:
        return bytes(kv.key).removeprefix(self._root).decode()

    def _report_entry(self, kv: Any, *, deleted: bool) -> None:
        value = None if deleted else self._value_of(kv)
        self._report(KeyChange(self._key(kv), value, kv.mod_revision))

    def _report(self, change: KeyChange) -> None:
        if change.value is None:
            self._known.discard(change.key)
        else:
            self._known.add(change.key)
        self._revision = max(self._revision, change.revision)
        self._changes.put(change)
