"""Reads the ends of the coordinator's certificates at intervals, for warnings."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.core.job.state import CertificatesRead
from elastic.rpc.security.expiry import certificate_ends
from elastic.rpc.security.tls import Certificates

READ_EVERY_S = 30.0


class CertificateWatch:
    """Calls `emit(event)` on a thread of its own, now and at intervals, until `close`. Does nothing
    without certificates."""

    def __init__(
        self, certificates: Certificates | None, emit: Callable[[CertificatesRead], object]
    ) -> None:
        self._certificates, self._emit = certificates, emit
        self._closed = threading.Event()
        if certificates is not None:
            threading.Thread(target=self._run, name="certificates", daemon=True).start()

    def close(self) -> None:
        """Stop the reading. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._emit(CertificatesRead(certificate_ends(self._certificates)))
            self._closed.wait(READ_EVERY_S)
