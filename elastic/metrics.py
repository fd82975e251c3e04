"""HTTP server for a process's Prometheus metrics.

    registry = new_registry()       # with process_* metrics: CPU, memory, open files
    served = serve(registry, config, ...)   # GET /metrics at host:port
    served.close()

The metrics are in `elastic.coordinator.metrics` and `elastic.agent.metrics`;
docs/operate/metrics.md lists them. `serve` also writes RUN_DIR/metrics/NAME.json for Prometheus'
file-based discovery (`files: [RUN_DIR/metrics/*.json]`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric

from elastic.background import ends_within
from elastic.config import JobConfig
from elastic.core.protocol.health_report import CertificateEnd
from elastic.domain.errors import FieldError
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.tls import Certificates, rejection_reason

log = logging.getLogger(__name__)
FOLDER = "metrics"
"""Folder in the run directory; it has a discovery file for each process."""
REMOVE_S = 3.0
"""Longest wait for the disk of the discovery file."""
SILENT_S = 10.0
"""Time without data after which a connection is closed."""
FAST_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Histogram buckets of operations that take milliseconds, in seconds."""
RECOVERY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Histogram buckets of the phases of a recovery, in seconds."""
STEP_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Histogram buckets of the time of a step, in seconds."""


def new_registry() -> CollectorRegistry:
    """Return a registry with the kernel's figures of this process."""
    disable_created_metrics()  # They would double the series of counters.
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def certificate_metric(certificates: Sequence[CertificateEnd]) -> Iterator[Metric]:
    """Yield the gauge of the seconds until the process's certificates end; nothing without them."""
    if not certificates:
        return
    text = "Seconds until a certificate of this process ends; negative: it has expired"
    found = GaugeMetricFamily("elastic_certificate_left_seconds", text, labels=("file",))
    for end in certificates:
        found.add_metric((end.file,), end.ends_at - time.time())
    yield found


class _MetricsServer(ThreadingWSGIServer):
    """HTTP server with one thread per scrape; new connections use renewed certificates."""

    contexts: Certificates | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, where = super().get_request()
        sock.settimeout(SILENT_S)
        if self.contexts is not None:
            # The scrape's own thread makes the handshake, so other scrapes do not wait for it.
            context = self.contexts.server()
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, where

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # includes errors of TLS
            reason = (
                rejection_reason(error) if isinstance(error, ssl.SSLError) else Reason.HANDSHAKE
            )
            REJECTIONS.count("metrics", reason, client_address, error)
        else:
            log.error("a scrape by %s failed", client_address, exc_info=error)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""


class Exposition:
    """Metrics server of a process, in threads of its own, from construction until `close`."""

    def __init__(
        self, registry: CollectorRegistry, config: JobConfig, name: str, role: str, port: int
    ) -> None:
        """Start serving. Raises OSError for a taken address, FieldError for wrong certificates."""
        host = config.metrics_host
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        kind: type[_MetricsServer] = type("_Server", (_MetricsServer,), {"address_family": family})
        contexts = Certificates(Path(config.certs)) if config.certs else None
        self._server: _MetricsServer = make_server(
            host, port, make_wsgi_app(registry), server_class=kind, handler_class=_QuietHandler
        )
        self._server.contexts = contexts
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"
        labels = {"job": config.job_id, "instance": name, "role": role}
        labels |= {"__scheme__": "https"} if config.certs else {}
        self._file = discovery(Path(config.run_dir), name)
        found = [{"targets": [self.address], "labels": labels}]
        write_discovery(self._file, (json.dumps(found) + "\n").encode())

    def close(self) -> None:
        """Free the port and remove the discovery file, unless its disk hangs."""
        ends_within(REMOVE_S, "metrics-file", partial(self._file.unlink, missing_ok=True))
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def serve(
    registry: CollectorRegistry, config: JobConfig, name: str, role: str, port: int
) -> Exposition | None:
    """Serve `registry` until `Exposition.close`, with the labels job, instance and role.

    Args:
        registry: the metrics of this process.
        config: the job's configuration, with the address and the certificates.
        name: coordinator, or the node's name.
        role: coordinator or agent.
        port: 0: any free port; negative: no metrics.

    Returns None if `port` is negative or the server cannot start. A failed start is only logged.
    """
    if port < 0:
        return None
    try:
        found = Exposition(registry, config, name, role, port)
    except (OSError, FieldError) as error:
        log.warning("cannot serve metrics at %s:%d: %s", config.metrics_host, port, error)
        return None
    log.info("metrics at http%s://%s/metrics", "s" if config.certs else "", found.address)
    return found


def discovery(run_dir: Path, name: str) -> Path:
    """Return the path of the discovery file of process `name`."""
    return run_dir / FOLDER / f"{name}.json"


def write_discovery(path: Path, data: bytes) -> None:
    """Write the file atomically, because Prometheus reads it as soon as it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(data)
    os.replace(draft, path)
