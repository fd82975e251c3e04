"""Metrics of a process, as Prometheus reads them: a registry of its own, served over HTTP.

    registry = new_registry()            # with process_* metrics: CPU, memory, open files
    with serving(registry, where): ...   # GET /metrics at where.host:where.port

What is measured is in `elastic.coordinator.metrics` and `elastic.agent.metrics`; docs/metrics.md lists all of it.
Whoever serves also writes RUN_DIR/metrics/NAME.json, which Prometheus' file-based discovery reads:
`files: [RUN_DIR/metrics/*.json]`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.rpc.security import CA, CERT, KEY

log = logging.getLogger(__name__)
FOLDER = "metrics"
"""Of a run directory: one discovery file a process."""
FAST_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Buckets of what takes milliseconds."""
RECOVERY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets of the phases of a recovery."""
STEP_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Buckets of steps."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a process serves its metrics."""

    host: str
    port: int
    """0: any free one."""
    run_dir: str
    job: str
    """Label `job` of all its series."""
    name: str
    """Label `instance`: coordinator, or the node's name."""
    role: str
    """Label `role`: coordinator | agent."""
    certs: str = ""
    """Directory of certificates, as for --certs: mutual TLS; "": plain text."""


def new_registry() -> CollectorRegistry:
    """An empty registry, but for what the kernel knows of this process."""
    disable_created_metrics()  # a series more for each counter, which nobody reads
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


class Exposition:
    """Serves a registry from a thread of its own, until `close`."""

    def __init__(self, registry: CollectorRegistry, where: Where) -> None:
        """Raises OSError when the address cannot be had, or the certificates cannot be used."""
        certs = Path(where.certs) if where.certs else None
        found = start_http_server(
            where.port,
            where.host,
            registry,
            certfile=str(certs / CERT) if certs else None,
            keyfile=str(certs / KEY) if certs else None,
            client_cafile=str(certs / CA) if certs else None,
            client_auth_required=certs is not None,
        )
        self._server: WSGIServer = found[0]
        self._thread: threading.Thread = found[1]
        self.address = f"{where.host}:{self._server.server_port}"
        if certs:
            registry.register(_Renewal(self._server.socket.context, certs))  # type: ignore[attr-defined]
        self._file = _announce(self.address, where)

    def close(self) -> None:
        """Free the port and take the discovery file away."""
        self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _Renewal(Collector):
    """Certificates that were replaced are taken up at a scrape, for those that follow."""

    def __init__(self, context: ssl.SSLContext, certs: Path) -> None:
        self._context, self._certs, self._stamp = context, certs, self._look(certs)

    def collect(self) -> Iterator[Metric]:
        with contextlib.suppress(OSError):  # being replaced: at the next scrape
            stamp = self._look(self._certs)
            if stamp != self._stamp:
                self._context.load_verify_locations(self._certs / CA)
                self._context.load_cert_chain(self._certs / CERT, self._certs / KEY)
                self._stamp = stamp
        return iter(())

    def _look(self, certs: Path) -> tuple[int, ...]:
        return tuple((certs / name).stat().st_mtime_ns for name in (CA, CERT, KEY))


def serve(registry: CollectorRegistry, where: Where) -> Exposition | None:
    """Serve from now on; None, with a warning in the log, where that cannot be: nothing stops for its metrics."""
    if where.port < 0:
        return None
    try:
        found = Exposition(registry, where)
    except OSError as error:
        log.warning("no metrics: %s:%d cannot be served: %s", where.host, where.port, error)
        return None
    log.info("metrics at http%s://%s/metrics", "s" if where.certs else "", found.address)
    return found


def _announce(address: str, where: Where) -> Path:
    """Write the discovery file, whole or not at all."""
    labels = {"job": where.job, "instance": where.name, "role": where.role}
    labels |= {"__scheme__": "https"} if where.certs else {}
    folder = Path(where.run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{where.name}.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps([{"targets": [address], "labels": labels}]) + "\n")
    os.replace(draft, path)
    return path
