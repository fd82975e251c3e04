"""Metrics of the coordinator; docs/operate/metrics.md lists them.

`CoordinatorMetrics` counts transitions, their actions and the messages of the records, on the
coordinator's thread. `JobCollector` computes gauges from the job's state at each scrape, on the
scraper's thread: a state is immutable. `MetricsEndpoint` serves both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.config import JobConfig
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.goodput import NodeTimeAccount
from elastic.core.job.measured_conditions import measured_profile
from elastic.core.job.state import CauseKind, JobPhase, JobState, LossKind, Member, Tick
from elastic.core.job.stragglers import compute_slowdown, slowdowns, speed_of
from elastic.core.protocol import messages as m
from elastic.domain.version import VERSION
from elastic.metrics import FAST_S, RECOVERY_S, STEP_S, MetricsAddress, new_registry, serve
from elastic.planning.cost.predict import predict
from elastic.rpc.security.rejections import REJECTIONS

PHASES = ("detect", "halt", "decide", "transfer", "rebuild", "total")
EVENTS = ("beat", "report", "step", "other", "rules")
UPDATE_S = 0.25
"""Interval between two updates of the node-seconds while nothing changes."""
NODE_STATES = ("training", "spare", "draining", "quarantined", "starting", "disconnected")
PREDICTION_S = 15.0
"""Time for which a prediction is used while the plan stays."""
_EVENT_LABELS = {
    job.Heartbeats: "beat",
    m.NodeReport: "report",
    m.StepDone: "step",
    type(None): "rules",
}


class CoordinatorMetrics:
    """Counters of one coordinator process, over all its terms. They begin at 0."""

    def __init__(self, registry: CollectorRegistry, now: float) -> None:
        self.registry, self.usage = registry, NodeTimeAccount()
        self.recoveries: list[dict[str, Any]] = []
        """Entries of the newest recoveries, for `elastic status`."""
        self.step_s: list[float] = []
        """Seconds of the newest steps with the present plan."""
        self.tokens_per_s = 0.0
        self._refused: list[Callable[[], Mapping[str, int]]] = []
        self._added, self._fenced = now, 0
        self._silent_s = 0.0
        """Longest silence of a lost node before its loss was noticed."""
        self._make_job()
        self._make_recovery()
        self._make_service()

    def _make_job(self) -> None:
        self._steps = self._counter("steps", "Optimizer updates")
        self._lost_steps = self._counter("steps_lost", "Steps undone by a return to a checkpoint")
        self._tokens = self._counter("tokens", "Tokens of the finished steps")
        self._step = self._histogram(
            "step_seconds", "Seconds of a step, as measured by the reporting node", STEP_S
        )
        self._lost = self._counter(
            "nodes_lost", "Members that were lost", "reason", tuple(LossKind)
        )
        self._events = self._counter(
            "events",
            "Entries of the event log",
            "kind",
            ("joined", "lost", "drained", "quarantine"),
        )
        self._bad_copies = self._counter(
            "copies_corrupt", "Copies that did not match their checksum"
        )
        self._short = self._counter(
            "backups_short", "Cases in which a vault had no room for copies"
        )
        self._checkpoints = self._counter("checkpoints", "Durable checkpoints completed")

    def _make_recovery(self) -> None:
        self._recovery = Histogram(
            "elastic_recovery_seconds",
            "Seconds of an epoch change, by phase and cause",
            ("phase", "cause"),
            buckets=RECOVERY_S,
            registry=self.registry,
        )
        for cause in ("lost", "worker", "hang", "contact", "drain", "join"):
            for phase in PHASES:
                self._recovery.labels(phase, cause)
        self._changes = self._counter(
            "epoch_changes", "Epoch changes begun", "cause", tuple(CauseKind)
        )
        self._replayed = self._counter(
            "microbatches_lost", "Micro-batches that had reached a lost stage"
        )
        self._rerun = self._counter("microbatches_rerun", "Micro-batches that were computed again")
        self._moved = self._counter("recovery_bytes", "Bytes that recoveries moved between nodes")

    def _make_service(self) -> None:
        self._decision = self._histogram(
            "decision_seconds",
            "Seconds to record an event, or to apply the rules",
            FAST_S,
            "event",
            EVENTS,
        )
        self._event_seconds = {event: self._decision.labels(event) for event in EVENTS}
        self._save = self._histogram(
            "state_save_seconds", "Seconds to save the job's state", FAST_S
        )
        self._saved_bytes = self._counter(
            "state_saved_bytes", "Bytes of the job's state written to the store"
        )
        self._late = self._histogram(
            "tick_delay_seconds", "Delay of the coordinator's ticks in seconds", FAST_S
        )

    def _counter(
        self, name: str, text: str, label: str = "", values: tuple[str, ...] = ()
    ) -> Counter:
        """A counter with all label values at 0, so that a first increase is visible."""
        made = Counter(f"elastic_{name}", text, (label,) if label else (), registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...],
        label: str = "",
        values: tuple[str, ...] = (),
    ) -> Histogram:
        labels = (label,) if label else ()
        made = Histogram(f"elastic_{name}", text, labels, buckets=buckets, registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    def begin(self, now: float) -> None:
        """A term begins. Another coordinator counts what happens between two terms."""
        self.usage.forget()
        self._added, self._silent_s, self.tokens_per_s = now, 0.0, 0.0
        self.step_s.clear()

    def decided(
        self, before: JobState, after: JobState, actions: tuple[job.JobAction, ...], now: float
    ) -> None:
        """Count a transition that was made at `now` and is saved."""
        changed = before.phase is not after.phase or before.plan is not after.plan
        if changed or len(before.members) != len(after.members) or now - self._added >= UPDATE_S:
            self.usage.advance(before, now)
            self._added = now
        for action in actions:
            if isinstance(action, job.LogEntry):
                self._log_entry(action.kind, action.data, before, after, now)
            elif isinstance(action, job.Send) and isinstance(action.message, m.Fenced):
                self._fenced += action.node not in before.members
        if after.epoch != before.epoch and after.change is not None:
            trained = before.change is None or any(
                isinstance(action, job.ChangeCompleted) for action in actions
            )
            self._change_begun(after.change, trained)
        if after.plan is not before.plan:
            self.step_s.clear()

    def handled(self, event: Any, seconds: float) -> float:
        """Count the time to record `event`, or (None) to apply the rules. Returns `seconds`."""
        if isinstance(event, Tick):
            self._late.observe(event.late_s)
        self._event_seconds[_EVENT_LABELS.get(type(event), "other")].observe(seconds)
        return seconds

    def logged(self, kind: str) -> None:
        """Count an entry of the event log that is no action; `decided` counts actions."""
        self._events.labels(kind).inc()

    def _change_begun(self, change: job.EpochChange, trained: bool) -> None:
        """`trained`: the previous change was complete."""
        self._changes.labels(change.causes[-1].kind).inc()
        if not change.boundary and trained:
            self.usage.fault(change, max(change.detect_s, self._silent_s))
        self._silent_s = 0.0

    def _log_entry(
        self, kind: str, data: Mapping[str, Any], before: JobState, after: JobState, now: float
    ) -> None:
        self._events.labels(kind).inc()
        match kind:
            case "lost":
                self._node_lost(before.members.get(str(data["node"])), LossKind(data["loss"]), now)
            case "step":
                self._count_step(int(data["step"]), float(data["seconds"]), int(data["tokens"]))
            case "lost-steps":
                self._lost_steps.inc(max(0, before.logged_step + 1 - int(data["from_step"])))
            case "copy-corrupt":
                self._bad_copies.inc()
            case "backup-short":
                self._short.inc()
            case "checkpoint":
                self._checkpoints.inc()
            case "health" if "quarantine_s" in data["evidence"]:
                self._events.labels("quarantine").inc()

    def _node_lost(self, member: job.Member | None, loss: LossKind, now: float) -> None:
        self._lost.labels(loss).inc()
        if member is not None and loss is not LossKind.REPLACED:
            since = member.seen if loss is LossKind.SILENT else member.closed_at
            self._silent_s = max(self._silent_s, now - since)

    def stepped(self, done: m.StepDone, state: JobState) -> None:
        """Count a finished step, unless it is reported again."""
        if done.record.step > state.logged_step:
            self._count_step(done.record.step, done.seconds, done.tokens)

    def _count_step(self, step: int, seconds: float, tokens: int) -> None:
        self._steps.inc()
        self._tokens.inc(tokens)
        self._step.observe(seconds)
        self.usage.step(step)
        self.step_s[:] = [*self.step_s, seconds][-16:]
        self.tokens_per_s = tokens / seconds if seconds > 0 else 0.0

    def recovered(self, event: job.ChangeCompleted, entry: dict[str, Any]) -> None:
        """Count a complete epoch change. `entry`: its `recovery_entry`."""
        cause = event.change.causes[0].kind
        for phase in PHASES:
            self._recovery.labels(phase, cause).observe(entry[f"{phase}_s"])
        self._replayed.inc(entry["microbatches_lost"])
        self._rerun.inc(entry["microbatches_rerun"])
        self._moved.inc(entry["network_bytes"])
        self.usage.resumed(event.change)
        self.recoveries[:] = [*self.recoveries, entry][-5:]

    def saved(self, seconds: float, nbytes: int) -> None:
        """Count a save of the job's state."""
        self._save.observe(seconds)
        self._saved_bytes.inc(nbytes)

    def count_refused(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Add `read`, which returns numbers of rejected messages per reason. Called at each scrape,
        from any thread."""
        self._refused.append(read)

    def refused(self) -> dict[str, int]:
        """Numbers of rejected messages per reason."""
        found = {"fenced": self._fenced}
        for read in self._refused:
            for reason, number in read().items():
                found[reason] = found.get(reason, 0) + number
        return found


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """The coordinator at one moment."""

    leads: bool
    """It decides and certainly has the lease."""
    term: int
    queued: int
    """Number of waiting events."""
    state_bytes: int
    """Size of the state that was saved last."""


class JobCollector(Collector):
    """Gauges of the job, and counters that other objects keep."""

    def __init__(
        self, job_id: str, reading: Reading, metrics: CoordinatorMetrics, clock: Callable[[], float]
    ) -> None:
        """`reading` and `clock` are called on the scraper's thread."""
        self._job_id, self._reading = job_id, reading
        self._metrics, self._clock = metrics, clock
        self._predicted: tuple[int, bool, float, float | None] = (-1, False, 0.0, None)

    def collect(self) -> Iterator[Metric]:
        (state, status), now = self._reading(), self._clock()
        yield _labelled("job_info", "The job", {"id": self._job_id, "version": VERSION})
        yield _gauge(
            "coordinator_leader",
            "1 if this coordinator leads; 0 if it stands by or cannot reach the store",
            float(status.leads),
        )
        yield from self._counters()
        if state is None:
            return
        yield _gauge("coordinator_term", "Fencing term of the leading coordinator", status.term)
        yield _gauge("coordinator_queue_length", "Events that wait in the queue", status.queued)
        yield _gauge(
            "state_bytes", "Bytes of the job's state that was saved last", status.state_bytes
        )
        yield from _job(state)
        yield from _membership(state, now)
        yield from self._plan(state)
        yield from _protection(state, now)

    def _counters(self) -> Iterator[Metric]:
        used = CounterMetricFamily(
            "elastic_node_seconds", "Seconds of all nodes, by use", labels=("use",)
        )
        for use, seconds in self._metrics.usage.totals.items():
            used.add_metric((use,), seconds)
        yield used
        refused = CounterMetricFamily(
            "elastic_messages_refused", "Messages that were rejected", labels=("reason",)
        )
        for reason, number in sorted(self._metrics.refused().items()):
            refused.add_metric((reason,), number)
        yield refused

    def _plan(self, state: JobState) -> Iterator[Metric]:
        plan = state.plan
        if plan is None:
            return
        shape = "+".join(str(len(pipeline.stages)) for pipeline in plan.pipelines)
        info = {"shape": shape, "gradients": plan.gradients, "state": plan.state}
        yield _labelled("plan_info", "The plan in force", info)
        yield _gauge("plan_pipelines", "Pipelines of the plan", len(plan.pipelines))
        yield _gauge("plan_stages", "Stages of the plan", len(plan.units()))
        predicted = self._predict(state)
        if predicted is not None:
            yield _gauge(
                "plan_predicted_step_seconds",
                "Predicted seconds of a step with this plan",
                predicted,
            )
        seconds = tuple(self._metrics.step_s)[1:]
        if seconds:
            yield _gauge(
                "plan_measured_step_seconds",
                "Mean seconds of the newest steps with this plan, without the first",
                fmean(seconds),
            )

    def _predict(self, state: JobState) -> float | None:
        """Predicted seconds of a step; None while the layers' times are only proportions."""
        known = state.policy.profile is not None or any(
            speed_of(state, n).unit for n in state.members
        )
        assert state.plan is not None
        epoch, was_known, at, value = self._predicted
        if (epoch, was_known) != (state.plan.epoch, known) or time.monotonic() - at > PREDICTION_S:
            value = _prediction(state) if known else None
            self._predicted = (state.plan.epoch, known, time.monotonic(), value)
        return value


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastic_{name}", text, value=value)


def _gauge_by_label(
    name: str, text: str, label: str, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"elastic_{name}", text, labels=(label,))
    for key, value in values:
        found.add_metric((key,), value)
    return found


def _labelled(name: str, text: str, labels: dict[str, str]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"elastic_{name}", text, labels=tuple(labels))
    found.add_metric(tuple(labels.values()), 1)
    return found


def _prediction(state: JobState) -> float | None:
    """None if a node of the plan is no longer a member."""
    plan = state.plan
    if plan is None or state.spec is None or not set(plan.nodes()) <= set(state.members):
        return None
    nodes = tuple(mb.report.info for mb in state.members.values())
    return predict(plan, measured_profile(state), nodes, slowdowns(state)).step_s


def _job(state: JobState) -> Iterator[Metric]:
    phases = ((phase.value, float(phase is state.phase)) for phase in JobPhase)
    yield _gauge_by_label("job_phase", "1 for the present phase of the job", "phase", phases)
    yield _gauge("epoch", "Generation of the plan", state.epoch)
    step = max((mb.report.step for mb in state.members.values()), default=0)
    yield _gauge("step", "Present step", step)
    yield _gauge(
        "steps_wanted",
        "Steps of the whole job; 0: unknown",
        state.spec.n_steps if state.spec else 0,
    )
    saved = state.checkpoint[1] if state.checkpoint else -1
    yield _gauge("checkpoint_step", "Step of the newest durable checkpoint; -1: none", saved)
    if state.record is not None:
        yield _gauge("loss", "Loss of the newest step", state.record.loss)


def _membership(state: JobState, now: float) -> Iterator[Metric]:
    held = frozenset(state.plan.nodes()) if state.plan is not None else frozenset()
    counts = dict.fromkeys(NODE_STATES, 0)
    for member in state.members.values():
        counts[_state_of(state, member, held)] += 1
    yield _gauge_by_label("nodes", "Members per state", "state", counts.items())
    yield _gauge("nodes_min", "Minimum number of nodes", state.policy.min_nodes)
    yield _gauge("nodes_max", "Maximum number of nodes", state.policy.max_nodes)
    members = sorted(state.members.items())
    silent = ((node, max(0.0, now - mb.seen)) for node, mb in members)
    yield _gauge_by_label(
        "node_silence_seconds", "Seconds since a node's last heartbeat", "node", silent
    )
    slowness = ((node, compute_slowdown(state, node)) for node, _ in members)
    yield _gauge_by_label(
        "node_slowdown_ratio",
        "Computation time of a node relative to the expected time",
        "node",
        slowness,
    )


def _state_of(state: JobState, member: Member, held: frozenset[str]) -> str:
    if not member.connected:
        return "disconnected"
    if member.draining:
        return "draining"
    if member.node in held:
        return "training"
    if quarantine.is_quarantined(state, member.node):
        return "quarantined"
    return "spare" if member.report.able else "starting"


def _protection(state: JobState, now: float) -> Iterator[Metric]:
    open_since = 0.0
    if (
        state.plan is not None
        and state.plan.peers
        and state.trimmed < state.epoch
        and state.ending is None
    ):
        decided = state.change.decided if state.change is not None else 0.0
        open_since = decided or state.step_finished_at or state.launched_at
    exposed = max(0.0, now - open_since) if open_since else 0.0
    yield _gauge(
        "protection_pending_seconds",
        "Seconds since the plan changed, until all copies are at their peers",
        exposed,
    )


Reading = Callable[[], tuple[JobState | None, CoordinatorStatus]]
"""Returns the job's state (None in a standby) and the status of the coordinator, on any thread."""


class MetricsEndpoint:
    """Serves the metrics of a coordinator process until closed, also between its terms."""

    def __init__(self, config: JobConfig, name: str, port: int, clock: Callable[[], float]) -> None:
        """`port` 0: any free port; -1: count without serving."""
        self.metrics = CoordinatorMetrics(new_registry(), clock())
        self.metrics.count_refused(REJECTIONS.by_reason)
        self._clock = clock
        self._reading: Reading = _read_standby
        collector = JobCollector(config.job_id, lambda: self._reading(), self.metrics, clock)
        self.metrics.registry.register(collector)
        where = (
            config.metrics_host,
            port,
            config.run_dir,
            config.job_id,
            name,
            "coordinator",
            config.certs,
        )
        self._exposition = serve(self.metrics.registry, MetricsAddress(*where))

    def lead(self, reading: Reading) -> CoordinatorMetrics:
        """A term begins: its gauges are served until `stand_by`."""
        self.metrics.begin(self._clock())
        self._reading = reading
        return self.metrics

    def stand_by(self) -> None:
        self._reading = _read_standby

    def close(self) -> None:
        if self._exposition is not None:
            self._exposition.close()


def _read_standby() -> tuple[JobState | None, CoordinatorStatus]:
    return None, CoordinatorStatus(False, 0, 0, 0)
