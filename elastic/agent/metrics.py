"""Metrics of an agent: counters of events, and gauges of its vault and workers.

Any thread of the agent may increase a counter. Gauges are read from the agent's parts at each
scrape. docs/operate/metrics.md lists all metrics.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.agent.health.disks import nearest_parent
from elastic.config import is_url
from elastic.core.protocol.health_report import CertificateEnd
from elastic.domain.types import Copy
from elastic.metrics import FAST_S, certificate_metric
from elastic.rpc.security.rejections import REJECTIONS

INITIAL_KINDS = ("state", "gradient")
"""Kinds of copies that are exported as 0 before the first copy."""
COPY_COUNTERS = {
    "copies_sent": "Copies that are whole at a peer",
    "copies_sent_bytes": "Bytes of copies sent, before compression",
    "copies_received": "Copies received from peers",
    "copies_received_bytes": "Bytes of copies received",
    "copies_given_up": "Copies for which the peer had no room",
}
"""Descriptions of the counters that are kept per kind of copy."""
GAUGES = {
    "vault_bytes": "Bytes of the copies in the vault",
    "vault_allocated_bytes": "Bytes of memory that the vault holds for copies of peers",
    "vault_limit_bytes": "Upper limit of the memory for copies of peers",
    "workers": "Workers of this node",
    "workers_up": "Workers that are running",
    "coordinator_connected": "1 if the coordinator can be reached",
    "backup_pending_bundles": "Announced bundles of copies that are not acknowledged",
    "backup_exposure_seconds": "Age of the oldest copies that the peer does not have",
    "link_bytes_per_second": "Measured bandwidth of the link to the peer; 0: unknown",
    "node_epoch": "Highest epoch that this node has seen",
}


class AgentMetrics(Collector):
    """Counters and gauges of one agent process."""

    def __init__(
        self,
        registry: CollectorRegistry,
        memory_dir: str = "",
        checkpoint_dir: str = "",
        certificates: Callable[[], Sequence[CertificateEnd]] = lambda: (),
    ) -> None:
        """`certificates()` returns the ends of the node's certificates."""
        self.registry, self._certificates = registry, certificates
        self._directories = {"memory": memory_dir}
        if not is_url(checkpoint_dir):
            self._directories["checkpoints"] = checkpoint_dir
        self.read: Callable[[], Mapping[str, float]] | None = None
        """Returns the value of each gauge; called at a scrape, on any thread. None: no gauges."""
        self.heartbeats = Counter(
            "elastic_heartbeats", "Heartbeats sent to the coordinator", registry=registry
        )
        self.exits = Counter(
            "elastic_worker_exits", "Workers that ended, for any reason", registry=registry
        )
        self.rejoins = Counter(
            "elastic_rejoins",
            "Times that this node joined again after it was removed",
            registry=registry,
        )
        self._copies = {
            name: Counter(f"elastic_{name}", text, ("kind",), registry=registry)
            for name, text in COPY_COUNTERS.items()
        }
        for counter, kind in itertools.product(self._copies.values(), INITIAL_KINDS):
            counter.labels(kind)
        self._lag = Histogram(
            "elastic_copy_lag_seconds",
            "Seconds from the announcement of copies to their acknowledgement by the peer",
            buckets=FAST_S,
            registry=registry,
        )
        registry.register(self)

    def sent(self, copies: Sequence[Copy], seconds: float, kept: bool) -> None:
        """Count copies that the peer has whole, or (`kept` is False) has no room for. `seconds`:
        time since their announcement."""
        self._count("copies_sent" if kept else "copies_given_up", copies)
        if kept:
            self._lag.observe(seconds)

    def received(self, copies: Sequence[Copy]) -> None:
        """Count copies from peers that are now whole in the vault."""
        self._count("copies_received", copies)

    def _count(self, name: str, copies: Sequence[Copy]) -> None:
        nbytes = self._copies.get(f"{name}_bytes")
        for copy in copies:
            self._copies[name].labels(copy.kind).inc()
            if nbytes is not None:
                nbytes.labels(copy.kind).inc(copy.nbytes)

    def collect(self) -> Iterator[Metric]:
        if self.read is None:
            return
        values = dict(self.read())
        spaces = {purpose: _space(path) for purpose, path in self._directories.items()}
        values["vault_limit_bytes"] = values["vault_limit_bytes"] or spaces["memory"][0]
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"elastic_{name}", text, value=values[name])
        for name, text, number in (("size", "Size", 0), ("free", "Free space", 1)):
            family = GaugeMetricFamily(
                f"elastic_storage_{name}_bytes",
                f"{text} of a file system in bytes",
                labels=("for",),
            )
            for purpose, sizes in spaces.items():
                family.add_metric((purpose,), sizes[number])
            yield family
        refused = CounterMetricFamily(
            "elastic_messages_refused", "Messages that were rejected", labels=("reason",)
        )
        for reason, count in {"stale": 0, **REJECTIONS.by_reason()}.items():
            refused.add_metric((reason,), count)
        yield refused
        yield from certificate_metric(self._certificates())


def _space(directory: str) -> tuple[int, int]:
    """Return (size, free) in bytes of the file system of `directory`, which need not exist yet; (0,
    0): unknown."""
    try:
        found = shutil.disk_usage(nearest_parent(Path(directory)))
    except OSError:
        return 0, 0
    return found.total, found.free
