"""Metrics of a process, as Prometheus reads them: a registry of its own, served over HTTP.

    registry = new_registry()            # with process_* metrics: CPU, memory, open files
    with serving(registry, where): ...   # GET /metrics at where.host:where.port

What is measured is in `elastic.coordinator.metrics` and `elastic.agent.metrics`; docs/operate/metrics.md lists all of it.
Whoever serves also writes RUN_DIR/metrics/NAME.json, which Prometheus' file-based discovery reads:
`files: [RUN_DIR/metrics/*.json]`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from elastic.domain.errors import FieldError
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.tls import Certificates, rejection_reason

log = logging.getLogger(__name__)
FOLDER = "metrics"
"""Of a run directory: one discovery file a process."""
SILENT_S = 10.0
"""A connection on which nothing comes for so long is closed."""
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


class _Server(ThreadingWSGIServer):
    """One thread a scrape; with certificates each connection by the ones that are valid then."""

    contexts: Certificates | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, where = super().get_request()
        sock.settimeout(SILENT_S)
        if self.contexts is not None:  # the handshake is the scrape's thread's: others do not wait for it
            context = self.contexts.server()
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, where

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # of TLS, too
            reason = rejection_reason(error) if isinstance(error, ssl.SSLError) else Reason.HANDSHAKE
            REJECTIONS.count("metrics", reason, client_address, error)
        else:
            log.error("a scrape by %s failed", client_address, exc_info=error)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class Exposition:
    """Serves a registry from threads of its own, until `close`."""

    def __init__(self, registry: CollectorRegistry, where: Where) -> None:
        """Raises OSError when the address cannot be had, FieldError when the certificates cannot be used."""
        family, *_ = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        kind: type[_Server] = type("_Server", (_Server,), {"address_family": family})
        contexts = Certificates(Path(where.certs)) if where.certs else None
        app = make_wsgi_app(registry)
        self._server: _Server = make_server(
            where.host, where.port, app, server_class=kind, handler_class=_Handler
        )
        self._server.contexts = contexts
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{where.host}:{self._server.server_port}"
        self._file = _announce(self.address, where)

    def close(self) -> None:
        """Free the port and take the discovery file away."""
        self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def serve(registry: CollectorRegistry, where: Where) -> Exposition | None:
    """Serve from now on; None, with a warning in the log, where that cannot be: nothing stops for its metrics."""
    if where.port < 0:
        return None
    try:
        found = Exposition(registry, where)
    except (OSError, FieldError) as error:
        log.warning("no metrics: %s:%d cannot be served: %s", where.host, where.port, error)
        return None
    log.info("metrics at http%s://%s/metrics", "s" if where.certs else "", found.address)
    return found


def _announce(address: str, where: Where) -> Path:
    """Write the discovery file."""
    labels = {"job": where.job, "instance": where.name, "role": where.role}
    labels |= {"__scheme__": "https"} if where.certs else {}
    path = discovery(Path(where.run_dir), where.name)
    write_discovery(path, (json.dumps([{"targets": [address], "labels": labels}]) + "\n").encode())
    return path


def discovery(run_dir: Path, name: str) -> Path:
    """The discovery file of the process of that name."""
    return run_dir / FOLDER / f"{name}.json"


def write_discovery(path: Path, data: bytes) -> None:
    """Whole or not at all: Prometheus reads it as soon as it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(data)
    os.replace(draft, path)
