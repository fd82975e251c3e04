"""What an agent counts, and what it tells of its vault and workers. Listed in docs/operate/metrics.md.

Counters are moved by the agent's threads as things happen; gauges are read from the agent's parts when somebody asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.vault import Vault
from elastic.agent.workers.processes import WorkerGroup
from elastic.config import JobConfig
from elastic.domain.types import Copy
from elastic.metrics import FAST_S
from elastic.rpc.control.client import CoordinatorSession
from elastic.rpc.security.rejections import REJECTIONS

KINDS = ("state", "gradient", "reduced", "update", "activation", "cotangent")


@dataclass(frozen=True, slots=True)
class Condition:
    """An agent at one moment, as its gauges show it."""

    vault_bytes: int
    allocated_bytes: int
    limit_bytes: int
    """0: what shared memory there is."""
    memory_dir: str
    checkpoint_dir: str
    workers: int
    workers_up: int
    connected: bool
    """To the coordinator."""
    pending: int
    """Bundles that are not acknowledged."""
    oldest_s: float
    """Age of the oldest of them that a peer must have; 0: there is none."""
    link_bytes_per_s: float
    epoch: int


def condition(
    config: JobConfig,
    directory: Path,
    vault: Vault,
    replicator: Replicator,
    group: WorkerGroup | None,
    session: CoordinatorSession,
    epoch: int,
) -> Condition:
    """What the parts of an agent say."""
    return Condition(
        vault_bytes=vault.nbytes,
        allocated_bytes=vault.allocated_bytes,
        limit_bytes=config.vault_memory_bytes,
        memory_dir=str(directory),
        checkpoint_dir=config.checkpoint_dir,
        workers=config.nproc_per_node,
        workers_up=len(group.alive()) if group is not None else 0,
        connected=session.up,
        pending=replicator.pending,
        oldest_s=replicator.exposed_s,
        link_bytes_per_s=replicator.link_bytes_per_s,
        epoch=epoch,
    )


class AgentMetrics(Collector):
    """Counters of one agent process, and its `Condition` when asked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.condition: Callable[[], Condition] | None = None
        """Asked at every scrape, from any thread."""
        self._heartbeats = self._counter("heartbeats", "Signs of life sent to the coordinator")
        self._exits = self._counter("worker_exits", "Workers that ended, for whatever reason")
        self._rejoins = self._counter(
            "rejoins", "Times that this node was no member any more and joined anew"
        )
        self._sent = self._counter("copies_sent", "Copies that a peer has whole", "kind")
        self._sent_bytes = self._counter("copies_sent_bytes", "Their bytes, before any compression", "kind")
        self._received = self._counter("copies_received", "Copies taken in for others", "kind")
        self._received_bytes = self._counter("copies_received_bytes", "Their bytes", "kind")
        self._given_up = self._counter("copies_given_up", "Copies for which the peer had no room", "kind")
        self._lag = Histogram(
            "elastic_copy_lag_seconds",
            "From the announcement of copies to their acknowledgement by the peer",
            buckets=FAST_S,
            registry=registry,
        )
        registry.register(self)

    def _counter(self, name: str, text: str, label: str = "") -> Counter:
        made = Counter(f"elastic_{name}", text, (label,) if label else (), registry=self.registry)
        for kind in KINDS[:2] if label else ():
            made.labels(kind)
        return made

    # ---- what happens ----

    def beat(self) -> None:
        self._heartbeats.inc()

    def worker_ended(self) -> None:
        self._exits.inc()

    def rejoined(self) -> None:
        self._rejoins.inc()

    def sent(self, copies: Sequence[Copy], seconds: float, kept: bool) -> None:
        """The peer acknowledged these, or has no room for them, so long after they were announced."""
        for copy in copies:
            if kept:
                self._sent.labels(copy.kind).inc()
                self._sent_bytes.labels(copy.kind).inc(copy.nbytes)
            else:
                self._given_up.labels(copy.kind).inc()
        if kept:
            self._lag.observe(seconds)

    def received(self, copies: Sequence[Copy]) -> None:
        """These are whole in the vault now."""
        for copy in copies:
            self._received.labels(copy.kind).inc()
            self._received_bytes.labels(copy.kind).inc(copy.nbytes)

    # ---- what is ----

    def collect(self) -> Iterator[Metric]:
        found = self.condition() if self.condition is not None else None
        if found is None:
            return
        yield _gauge("vault_bytes", "Bytes of the copies in the vault", found.vault_bytes)
        yield _gauge(
            "vault_allocated_bytes", "Memory that the vault has for others' copies", found.allocated_bytes
        )
        size, free = _space(found.memory_dir)
        yield _gauge("vault_limit_bytes", "Most of it", found.limit_bytes or size)
        spaces = {"memory": (size, free), "checkpoints": _space(found.checkpoint_dir)}
        for name, text, number in (("size", "Size", 0), ("free", "Free space", 1)):
            family = GaugeMetricFamily(
                f"elastic_storage_{name}_bytes", f"{text} of a file system", labels=("for",)
            )
            for purpose, sizes in spaces.items():
                family.add_metric((purpose,), sizes[number])
            yield family
        yield _gauge("workers", "Workers of this node", found.workers)
        yield _gauge("workers_up", "Workers that run", found.workers_up)
        yield _gauge("coordinator_connected", "1: the coordinator is reached", float(found.connected))
        yield _gauge("backup_pending_bundles", "Announced copies that are not acknowledged", found.pending)
        yield _gauge(
            "backup_exposure_seconds", "Age of the oldest copies that the peer lacks", found.oldest_s
        )
        yield _gauge(
            "link_bytes_per_second", "What the link was seen to carry; 0: not known", found.link_bytes_per_s
        )
        yield _gauge("node_epoch", "Highest epoch that this node was told of", found.epoch)
        refused = CounterMetricFamily(
            "elastic_messages_refused", "Messages that were refused", labels=("reason",)
        )
        for reason, number in {"stale": 0, **REJECTIONS.by_reason()}.items():
            refused.add_metric((reason,), number)
        yield refused


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastic_{name}", text, value=value)


def _space(directory: str) -> tuple[int, int]:
    """(size, free bytes) of the file system that holds it, or would; zeros where that is not known."""
    path = directory
    while path not in ("", os.sep) and not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path or os.sep)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
