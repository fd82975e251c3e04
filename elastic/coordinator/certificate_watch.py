"""Reads the ends of the coordinator's certificates at intervals, for warnings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from elastic.background import BackgroundReading
from elastic.core.job.state import CertificatesRead
from elastic.core.protocol.health_report import CertificateEnd
from elastic.core.protocol.store_spec import StoreSpec
from elastic.rpc.security.expiry import certificate_ends, store_certificate_ends
from elastic.rpc.security.tls import Certificates

READ_EVERY_S = 30.0


def reading_of_store(store: StoreSpec) -> BackgroundReading[tuple[CertificateEnd, ...]]:
    """Return a reading of the certificates for etcd. Their disk may hang."""
    read = partial(store_certificate_ends, store)
    return BackgroundReading("certificates for etcd", read, ())


class CertificateWatch:
    """Calls `emit(event)` on a thread of its own, now and at intervals, until `close`. Does nothing
    without certificates."""

    def __init__(
        self,
        certificates: Certificates | None,
        store: StoreSpec,
        emit: Callable[[CertificatesRead], object],
    ) -> None:
        self._certificates, self._emit = certificates, emit
        self._of_store = reading_of_store(store)
        self._closed = threading.Event()
        if certificates is not None or store.ca:
            threading.Thread(target=self._run, name="certificates", daemon=True).start()

    def close(self) -> None:
        """Stop the reading. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            ends = certificate_ends(self._certificates) + self._of_store.read()
            self._emit(CertificatesRead(ends))
            self._closed.wait(READ_EVERY_S)
