"""Metrics of an agent: counters of events, and gauges of its vault and workers.

The agent's threads increase the counters as things happen; gauges are read from the agent's parts
at each scrape. docs/operate/metrics.md lists all metrics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.domain.types import Copy
from elastic.metrics import FAST_S
from elastic.rpc.security.rejections import REJECTIONS

INITIAL_KINDS = ("state", "gradient")
"""Kinds of copies that are exported as 0 before the first copy."""


@dataclass(frozen=True, slots=True)
class AgentCondition:
    """Values of an agent's gauges at one moment."""

    vault_bytes: int
    allocated_bytes: int
    limit_bytes: int
    """0: all of the shared memory."""
    memory_dir: str
    checkpoint_dir: str
    workers: int
    workers_up: int
    connected: bool
    """The coordinator is reached."""
    pending: int
    """Bundles that are not acknowledged."""
    oldest_s: float
    """Age of the oldest unacknowledged bundle for a peer; 0: there is none."""
    link_bytes_per_s: float
    epoch: int


class AgentMetrics(Collector):
    """Counters of one agent process, and gauges from its `AgentCondition`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.condition: Callable[[], AgentCondition] | None = None
        """Called at each scrape, from any thread."""
        self._heartbeats = self._counter("heartbeats", "Heartbeats sent to the coordinator")
        self._exits = self._counter("worker_exits", "Workers that ended, for any reason")
        self._rejoins = self._counter(
            "rejoins", "Times that this node joined again after it was removed"
        )
        self._sent = self._counter("copies_sent", "Copies that are whole at a peer", "kind")
        self._sent_bytes = self._counter(
            "copies_sent_bytes", "Bytes of copies sent, before compression", "kind"
        )
        self._received = self._counter("copies_received", "Copies received from peers", "kind")
        self._received_bytes = self._counter(
            "copies_received_bytes", "Bytes of copies received", "kind"
        )
        self._given_up = self._counter(
            "copies_given_up", "Copies for which the peer had no room", "kind"
        )
        self._lag = Histogram(
            "elastic_copy_lag_seconds",
            "Seconds from the announcement of copies to their acknowledgement by the peer",
            buckets=FAST_S,
            registry=registry,
        )
        registry.register(self)

    def _counter(self, name: str, text: str, label: str = "") -> Counter:
        made = Counter(f"elastic_{name}", text, (label,) if label else (), registry=self.registry)
        for kind in INITIAL_KINDS if label else ():
            made.labels(kind)
        return made

    def heartbeat(self) -> None:
        self._heartbeats.inc()

    def worker_ended(self) -> None:
        self._exits.inc()

    def rejoined(self) -> None:
        self._rejoins.inc()

    def sent(self, copies: Sequence[Copy], seconds: float, kept: bool) -> None:
        """The peer has these copies whole, or (`kept` is False) has no room for them. `seconds`:
        since their announcement."""
        for copy in copies:
            if kept:
                self._sent.labels(copy.kind).inc()
                self._sent_bytes.labels(copy.kind).inc(copy.nbytes)
            else:
                self._given_up.labels(copy.kind).inc()
        if kept:
            self._lag.observe(seconds)

    def received(self, copies: Sequence[Copy]) -> None:
        """These copies of peers are whole in the vault now."""
        for copy in copies:
            self._received.labels(copy.kind).inc()
            self._received_bytes.labels(copy.kind).inc(copy.nbytes)

    def collect(self) -> Iterator[Metric]:
        found = self.condition() if self.condition is not None else None
        if found is None:
            return
        yield _gauge("vault_bytes", "Bytes of the copies in the vault", found.vault_bytes)
        yield _gauge(
            "vault_allocated_bytes",
            "Bytes of memory that the vault holds for copies of peers",
            found.allocated_bytes,
        )
        size, free = _space(found.memory_dir)
        yield _gauge(
            "vault_limit_bytes",
            "Upper limit of the memory for copies of peers",
            found.limit_bytes or size,
        )
        spaces = {"memory": (size, free), "checkpoints": _space(found.checkpoint_dir)}
        for name, text, number in (("size", "Size", 0), ("free", "Free space", 1)):
            family = GaugeMetricFamily(
                f"elastic_storage_{name}_bytes",
                f"{text} of a file system in bytes",
                labels=("for",),
            )
            for purpose, sizes in spaces.items():
                family.add_metric((purpose,), sizes[number])
            yield family
        yield _gauge("workers", "Workers of this node", found.workers)
        yield _gauge("workers_up", "Workers that are running", found.workers_up)
        yield _gauge(
            "coordinator_connected", "1 if the coordinator can be reached", float(found.connected)
        )
        yield _gauge(
            "backup_pending_bundles",
            "Announced bundles of copies that are not acknowledged",
            found.pending,
        )
        yield _gauge(
            "backup_exposure_seconds",
            "Age of the oldest copies that the peer does not have",
            found.oldest_s,
        )
        yield _gauge(
            "link_bytes_per_second",
            "Measured bandwidth of the link to the peer; 0: unknown",
            found.link_bytes_per_s,
        )
        yield _gauge("node_epoch", "Highest epoch that this node has seen", found.epoch)
        refused = CounterMetricFamily(
            "elastic_messages_refused", "Messages that were rejected", labels=("reason",)
        )
        for reason, number in {"stale": 0, **REJECTIONS.by_reason()}.items():
            refused.add_metric((reason,), number)
        yield refused


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastic_{name}", text, value=value)


def _space(directory: str) -> tuple[int, int]:
    """(size, free) bytes of the file system of `directory`, which need not exist yet; zeros if
    unknown."""
    path = directory
    while path not in ("", os.sep) and not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path or os.sep)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
