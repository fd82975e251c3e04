"""Metrics of a process, as Prometheus reads them: a registry of its own, served over HTTP.

    registry = new_registry()            # with process_* metrics: CPU, memory, open files
    with serving(registry, where): ...   # GET /metrics at where.host:where.port

What is measured is in `elastic.coordinator.metrics` and `elastic.agent.metrics`; docs/metrics.md lists all of it.
Whoever serves also writes RUN_DIR/metrics/NAME.json, which Prometheus' file-based discovery reads:
`files: [RUN_DIR/metrics/*.json]`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server

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
class Secrets:
    """TLS of the metrics endpoint. Files in PEM form; without `ca` any client may read."""

    certificate: str
    key: str
    ca: str = ""
    """What the clients' certificates must be signed by."""


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


def new_registry() -> CollectorRegistry:
    """An empty registry, but for what the kernel knows of this process."""
    disable_created_metrics()  # a series more for each counter, which nobody reads
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


class Exposition:
    """Serves a registry from a thread of its own, until `close`."""

    def __init__(self, registry: CollectorRegistry, where: Where, secrets: Secrets | None = None) -> None:
        """Raises OSError when the address cannot be had."""
        found = start_http_server(
            where.port,
            where.host,
            registry,
            certfile=secrets.certificate if secrets else None,
            keyfile=secrets.key if secrets else None,
            client_cafile=secrets.ca or None if secrets else None,
            client_auth_required=bool(secrets and secrets.ca),
        )
        self._server: WSGIServer = found[0]
        self._thread: threading.Thread = found[1]
        self.address = f"{where.host}:{self._server.server_port}"
        self._file = _announce(self.address, where, secure=secrets is not None)

    def close(self) -> None:
        """Free the port and take the discovery file away."""
        self._file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def serve(registry: CollectorRegistry, where: Where, secrets: Secrets | None = None) -> Exposition | None:
    """Serve from now on; None, with a warning in the log, where that cannot be: nothing stops for its metrics."""
    if where.port < 0:
        return None
    try:
        found = Exposition(registry, where, secrets)
    except OSError as error:
        log.warning("no metrics: %s:%d cannot be served: %s", where.host, where.port, error)
        return None
    log.info("metrics at http%s://%s/metrics", "s" if secrets else "", found.address)
    return found


def _announce(address: str, where: Where, secure: bool) -> Path:
    """Write the discovery file, whole or not at all."""
    labels = {"job": where.job, "instance": where.name, "role": where.role}
    labels |= {"__scheme__": "https"} if secure else {}
    folder = Path(where.run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{where.name}.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps([{"targets": [address], "labels": labels}]) + "\n")
    os.replace(draft, path)
    return path
