"""A watch on etcd that outlives lost connections and compacted revisions."""

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
from elastic.store.base import Change
from elastic.store.etcd.link import Link, etcdrpc

log = logging.getLogger(__name__)


class EtcdWatch:
    """Follows keys under `root` + `prefix` after `revision`; `root` is no part of the keys that it tells.

    A thread reads the stream and goes on from the last revision after a loss. If etcd has compacted what comes next,
    the present state is read instead: changed keys are told with their present value, and those told of before that
    are gone, as deleted.
    """

    def __init__(
        self, link: Link, root: bytes, prefix: str, revision: int, value_of: Callable[[Any], bytes]
    ) -> None:
        self._link, self._root, self._revision, self._value_of = link, root, revision, value_of
        self._start = root + prefix.encode("utf-8", "surrogatepass")
        self._end = self._start[:-1] + bytes([self._start[-1] + 1])
        self._known: set[str] = set()
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock, self._stream = threading.Lock(), None
        threading.Thread(target=self._work, name="etcd-watch", daemon=True).start()

    def next(self, timeout_s: float | None = None) -> Change | None:
        if self._closed.is_set():
            return None
        try:
            change = self._changes.get(timeout=timeout_s) if timeout_s != 0 else self._changes.get_nowait()
        except queue.Empty:
            return None
        if change is None:
            self._changes.put(None)  # for whoever else waits
        return change

    def __iter__(self) -> Iterator[Change]:
        while (change := self.next()) is not None:
            yield change

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()
        self._changes.put(None)

    def _work(self) -> None:
        failures = 0
        while not self._closed.is_set():
            client: Any = None
            begun = time.monotonic()
            try:
                client = self._link.client()
                if self._follow(client):
                    self._look()
            except (grpc.RpcError, ElasticError, ValueError) as error:
                if self._closed.is_set():
                    return
                self._link.drop(client)
                failures = 1 if time.monotonic() - begun > 1 else failures + 1
                log.info("the watch is renewed: %s", error)
                self._closed.wait(retry_s(failures))

    def _follow(self, client: Any) -> bool:
        """Tell changes until the stream breaks (an exception). True: what comes next was compacted."""
        create = etcdrpc.WatchCreateRequest(
            key=self._start, range_end=self._end, start_revision=self._revision + 1
        )
        more: queue.SimpleQueue[Any] = queue.SimpleQueue()
        more.put(etcdrpc.WatchRequest(create_request=create))
        stub = etcdrpc.WatchStub(client.channel)
        with self._lock:
            if self._closed.is_set():
                return False
            stream = stub.Watch(iter(more.get, None), metadata=client.metadata)
            self._stream = stream
        try:
            for answer in stream:
                if answer.compact_revision:
                    return True
                if answer.canceled:
                    raise ValueError("etcd ended the watch")
                for event in answer.events:
                    self._tell(event.kv, deleted=event.type == event.DELETE)
        finally:
            more.put(None)
            stream.cancel()
        raise ValueError("the stream ended")

    def _look(self) -> None:
        """Read the present state in place of changes that etcd no longer has."""
        request = etcdrpc.RangeRequest(key=self._start, range_end=self._end)
        answer = self._link.call(lambda client, how: client.kvstub.Range(request, **how))
        present = {self._key(kv) for kv in answer.kvs}
        for kv in sorted(answer.kvs, key=lambda kv: kv.mod_revision):
            if kv.mod_revision > self._revision:
                self._tell(kv, deleted=False)
        for key in sorted(self._known - present):
            self._put(Change(key, None, answer.header.revision))
        self._revision = max(self._revision, answer.header.revision)

    def _key(self, kv: Any) -> str:
        return bytes(kv.key).removeprefix(self._root).decode()

    def _tell(self, kv: Any, *, deleted: bool) -> None:
        self._put(Change(self._key(kv), None if deleted else self._value_of(kv), kv.mod_revision))

    def _put(self, change: Change) -> None:
        if change.value is None:
            self._known.discard(change.key)
        else:
            self._known.add(change.key)
        self._revision = max(self._revision, change.revision)
        self._changes.put(change)
