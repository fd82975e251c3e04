"""Metrics of the coordinator; docs/operate/metrics.md lists them.

`CoordinatorMetrics` counts transitions, actions and records on the coordinator's thread. At each
scrape it computes gauges from the job's immutable state, on the thread of the scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, TypeVar

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.coordinator.certificate_watch import reading_of_store
from elastic.coordinator.records.run_summary import plan_shape
from elastic.coordinator.records.utilisation import mfu, peak_of
from elastic.coordinator.waiting import Stall
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.goodput import NodeTimeAccount
from elastic.core.job.measured_conditions import measured_profile
from elastic.core.job.state import CauseKind, JobPhase, JobState, LossKind, Member, Tick
from elastic.core.job.stragglers import slowdowns, speed_of
from elastic.core.protocol import messages as m
from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import ElasticError
from elastic.domain.version import VERSION
from elastic.metrics import FAST_S, RECOVERY_S, STEP_S, certificate_metric, new_registry
from elastic.planning.cost.predict import predict
from elastic.rpc.security import tls
from elastic.rpc.security.expiry import certificate_ends
from elastic.rpc.security.rejections import REJECTIONS
from elastic.store.interface import StoreUnavailable

PHASES = ("detect", "halt", "decide", "transfer", "rebuild", "total")
"""Parts of an epoch change whose times are exported; `recovery_entry` has them as PHASE_s."""
PREDICTION_S = 15.0
"""A predicted step time is reused for this long."""
UPDATE_S = 0.25
"""Longest interval between two updates of the node-seconds."""
NODE_STATES = ("training", "spare", "draining", "quarantined", "starting", "disconnected")
EVENT_LABELS = {
    job.Heartbeats: "beat",
    m.NodeReport: "report",
    m.StepDone: "step",
    type(None): "rules",
}
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Kept = TypeVar("Kept", Counter, Histogram)


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """Condition of the coordinator at one time; the defaults are those of a standby."""

    state: JobState | None = None
    leads: bool = False
    """Whether this coordinator decides and certainly has the lease."""
    term: int = 0
    queued: int = 0
    """Number of events that wait in the queue."""
    state_bytes: int = 0
    """Size of the state that was saved last."""
    stall: Stall | None = None
    """The present time without progress; None: the job makes progress."""
    store_away_s: float = 0.0
    """Seconds for which the store has refused writes or renewals of the lease; 0: it takes
    them."""
    records_unwritten: int = 0
    records_late_s: float = 0.0
    """Seconds for which the oldest event has waited for the disk of the run directory."""
    records_dropped: int = 0


class CoordinatorMetrics(Collector):
    """Metrics of one coordinator process, over all its terms."""

    def __init__(
        self, job_id: str, clock: Callable[[], float], store: StoreSpec | None = None
    ) -> None:
        self.registry, self.usage = new_registry(), NodeTimeAccount()
        self.recoveries: list[dict[str, Any]] = []
        """`recovery_entry` of the newest epoch changes, for `elastic status`."""
        self.step_s: list[float] = []
        """Seconds of the newest steps with the present plan."""
        self.tokens_per_s = 0.0
        self._job_id, self._clock = job_id, clock
        self._certificates_of_store = reading_of_store(store or StoreSpec())
        self._read: Callable[[], CoordinatorStatus] = CoordinatorStatus
        self._added, self._fenced = clock(), 0
        self._predicted: tuple[int, float, float | None] = (-1, 0.0, None)
        """Epoch, time and result (seconds) of the newest prediction of a step."""
        self._silent_s = 0.0
        """Longest time from a node's loss to its detection, for the next epoch change."""
        self._store_away_since = 0.0
        """Time since which a standby does not reach the store; 0: it does, or this leads."""
        self._make_job()
        self._make_recovery()
        self._make_service()
        self.registry.register(self)

    def _make_job(self) -> None:
        self._steps = self._add(Counter, "steps", "Optimizer updates")
        self._lost_steps = self._add(
            Counter, "steps_lost", "Steps undone by a return to a checkpoint"
        )
        self._tokens = self._add(Counter, "tokens", "Tokens of the finished steps")
        self._step = self._add(Histogram, "step_seconds", "Time of a step", buckets=STEP_S)
        reasons = {"reason": tuple(LossKind)}
        self._lost = self._add(Counter, "nodes_lost", "Members that were lost", reasons)
        kinds = {"kind": ("joined", "lost", "drained", "quarantine")}
        self._events = self._add(Counter, "events", "Entries of the event log", kinds)
        self._kinds = {
            "copy-corrupt": self._add(Counter, "copies_corrupt", "Copies with a wrong checksum"),
            "backup-short": self._add(Counter, "backups_short", "Times that a vault was full"),
            "checkpoint": self._add(Counter, "checkpoints", "Durable checkpoints completed"),
        }
        """Further counters for some kinds of entries of the event log."""

    def _make_recovery(self) -> None:
        labels = {"phase": PHASES, "cause": tuple(CauseKind)}
        self._recovery = self._add(
            Histogram, "recovery_seconds", "Time of an epoch change", labels, buckets=RECOVERY_S
        )
        causes = {"cause": tuple(CauseKind)}
        self._changes = self._add(Counter, "epoch_changes", "Epoch changes begun", causes)
        self._replayed = self._add(
            Counter, "microbatches_lost", "Micro-batches that had reached a lost stage"
        )
        self._rerun = self._add(Counter, "microbatches_rerun", "Micro-batches computed again")
        self._moved = self._add(Counter, "recovery_bytes", "Bytes that recoveries moved")

    def _make_service(self) -> None:
        text = "Time to record an event, or to apply the rules"
        events = {"event": (*EVENT_LABELS.values(), "other")}
        self._decision = self._add(Histogram, "decision_seconds", text, events, buckets=FAST_S)
        text = "Time to save the job's state"
        self._save = self._add(Histogram, "state_save_seconds", text, buckets=FAST_S)
        text = "Bytes of the job's state written to the store"
        self._saved_bytes = self._add(Counter, "state_saved_bytes", text)
        text = "Delay of the coordinator's ticks"
        self._late = self._add(Histogram, "tick_delay_seconds", text, buckets=FAST_S)

    def _add(
        self,
        kind: type[Kept],
        name: str,
        text: str,
        labels: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> Kept:
        """Register a metric with all label values at 0, so that a first increase is visible."""
        labels = labels or {}
        made = kind(f"elastic_{name}", text, tuple(labels), registry=self.registry, **options)
        for values in product(*labels.values()) if labels else ():
            made.labels(*values)
        return made

    def lead(self, read: Callable[[], CoordinatorStatus]) -> None:
        """Begin a term; node-seconds since the last term are not counted here.

        Scrapes call `read` on their own threads until `stand_by`.
        """
        self.usage.forget()
        self._added, self._silent_s, self.tokens_per_s = self._clock(), 0.0, 0.0
        self.step_s.clear()
        self._read, self._store_away_since = read, 0.0

    def stand_by(self) -> None:
        """End a term."""
        self._read = CoordinatorStatus

    def standing_by(self, error: ElasticError) -> None:
        """Note why this coordinator does not lead."""
        away = isinstance(error, StoreUnavailable)
        self._store_away_since = self._clock() if away else 0.0

    @property
    def epoch(self) -> int | None:
        """The epoch of the job; None while this coordinator does not lead."""
        state = self._read().state
        return state.epoch if state is not None else None

    # ---- counters ----

    def decided(
        self, before: JobState, after: JobState, actions: tuple[job.JobAction, ...], now: float
    ) -> None:
        """Count a saved transition from `before` to `after` that was made at `now`."""
        changed = before.phase is not after.phase or before.plan is not after.plan
        if changed or len(before.members) != len(after.members) or now - self._added >= UPDATE_S:
            self.usage.advance(before, now)
            self._added = now
        for action in actions:
            if isinstance(action, job.LogEntry):
                self._log_entry(action.kind, action.data, before, now)
            elif isinstance(action, job.Send) and isinstance(action.message, m.Fenced):
                self._fenced += action.node not in before.members
        if after.epoch != before.epoch and after.change is not None:
            trained = before.change is None or any(
                isinstance(action, job.ChangeCompleted) for action in actions
            )
            self._change_begun(after.change, trained)
        if after.plan is not before.plan:
            self.step_s.clear()

    def handled(self, event: Any, seconds: float) -> None:
        """Count the time to record `event`; None: the time to apply the rules."""
        if isinstance(event, Tick):
            self._late.observe(event.late_s)
        self._decision.labels(EVENT_LABELS.get(type(event), "other")).observe(seconds)

    def logged(self, kind: str) -> None:
        """Count an entry of the event log that is not an action; `decided` counts the actions."""
        self._events.labels(kind).inc()

    def _change_begun(self, change: job.EpochChange, trained: bool) -> None:
        """Count an epoch change. `trained`: whether the previous change was complete."""
        self._changes.labels(change.causes[-1].kind).inc()
        if not change.boundary and trained:
            self.usage.fault(change, max(change.detect_s, self._silent_s))
        self._silent_s = 0.0

    def _log_entry(self, kind: str, data: Mapping[str, Any], before: JobState, now: float) -> None:
        self._events.labels(kind).inc()
        if kind in self._kinds:
            self._kinds[kind].inc()
        match kind:
            case "lost":
                self._node_lost(before.members.get(str(data["node"])), LossKind(data["loss"]), now)
            case "step":
                self._count_step(int(data["step"]), float(data["seconds"]), int(data["tokens"]))
            case "lost-steps":
                self._lost_steps.inc(max(0, before.logged_step + 1 - int(data["from_step"])))
            case "health" if "quarantine_s" in data["evidence"]:
                self._events.labels("quarantine").inc()

    def _node_lost(self, member: job.Member | None, loss: LossKind, now: float) -> None:
        self._lost.labels(loss).inc()
        if member is not None and loss is not LossKind.REPLACED:
            since = member.seen if loss is LossKind.SILENT else member.closed_at
            self._silent_s = max(self._silent_s, now - since)

    def stepped(self, done: m.StepDone, state: JobState) -> None:
        """Count a finished step, unless it was counted before."""
        if done.record.step > state.logged_step:
            self._count_step(done.record.step, done.seconds, done.tokens)

    def _count_step(self, step: int, seconds: float, tokens: int) -> None:
        self._steps.inc()
        self._tokens.inc(tokens)
        self._step.observe(seconds)
        self.usage.step(step)
        self.step_s[:] = [*self.step_s, seconds][-16:]
        self.tokens_per_s = tokens / seconds if seconds > 0 else 0.0

    def utilisation(self, state: JobState) -> float:
        """Return the share of its devices' peak that the newest step used; 0: unknown."""
        if state.plan is None or not self.step_s:
            return 0.0
        return mfu(state.spec, self.step_s[-1], peak_of(state.plan, state.members))

    def recovered(self, event: job.ChangeCompleted, entry: dict[str, Any]) -> None:
        """Count a completed epoch change. `entry`: its `recovery_entry`."""
        cause = event.change.causes[0].kind
        for phase in PHASES:
            self._recovery.labels(phase, cause).observe(entry[f"{phase}_s"])
        self._replayed.inc(entry["microbatches_lost"])
        self._rerun.inc(entry["microbatches_rerun"])
        self._moved.inc(entry["network_bytes"])
        self.usage.resumed(event.change)
        self.recoveries[:] = [*self.recoveries, entry][-5:]

    def saved(self, seconds: float, nbytes: int) -> None:
        """Record one save of the job's state: its duration and its size in bytes."""
        self._save.observe(seconds)
        self._saved_bytes.inc(nbytes)

    # ---- gauges, and counters that other objects keep ----

    def collect(self) -> Iterator[Metric]:
        """Yield all gauges. Called by the registry at each scrape, on any thread."""
        status, now = self._read(), self._clock()
        state, totals = status.state, self.usage.totals
        yield _info("job_info", "The job", {"id": self._job_id, "version": VERSION})
        text = "1 if this coordinator leads; 0 if it stands by or cannot reach the store"
        yield _gauge("coordinator_leader", text, status.leads)
        yield _by_label(CounterMetricFamily, "node_seconds", "Time of nodes by use", "use", totals)
        refused = {"fenced": self._fenced, **REJECTIONS.by_reason()}
        text = "Messages that were rejected"
        yield _by_label(CounterMetricFamily, "messages_refused", text, "reason", refused)
        ends = certificate_ends(tls.current().certificates)
        yield from certificate_metric(ends + self._certificates_of_store.read())
        text = "Seconds for which the store of the job's state has not answered; 0: it answers"
        since = self._store_away_since
        yield _gauge("store_away_seconds", text, now - since if since else status.store_away_s)
        if state is None:
            return
        yield from _records(status)
        yield _stalled(state, status.stall, now)
        yield _gauge("coordinator_term", "Fencing term of the leading coordinator", status.term)
        yield _gauge("coordinator_queue_length", "Events that wait in the queue", status.queued)
        yield _gauge("state_bytes", "Bytes of the saved state of the job", status.state_bytes)
        yield from _job(state)
        yield from _membership(state, now)
        yield from _plan(state, self._prediction(state, now), self.step_s[1:])
        text = "Model FLOPs utilisation of the newest step; 0: unknown"
        yield _gauge("model_flops_utilisation_ratio", text, self.utilisation(state))
        text = "Seconds since the plan changed, until all copies are at their peers"
        yield _gauge("protection_pending_seconds", text, _unprotected_s(state, now))

    def _prediction(self, state: JobState, now: float) -> float | None:
        """Predicted seconds of a step; None while it is unknown. For thousands of nodes this takes
        a tenth of a second and more, so a value is kept for PREDICTION_S."""
        plan = state.plan
        if plan is None or state.spec is None or not set(plan.nodes()) <= set(state.members):
            return None
        # Without a profile the layers' times are only proportions until some steps were measured.
        if not state.policy.profile and not any(speed_of(state, n).unit for n in state.members):
            return None
        epoch, at, value = self._predicted
        if value is None or epoch != plan.epoch or not 0 <= now - at <= PREDICTION_S:
            value = predict(plan, measured_profile(state), state.infos, slowdowns(state)).step_s
            self._predicted = plan.epoch, now, value
        return value


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastic_{name}", text, value=value)


def _by_label(
    kind: type[Family], name: str, text: str, label: str, values: Mapping[str, float]
) -> Family:
    found = kind(f"elastic_{name}", text, labels=(label,))
    for key, value in values.items():
        found.add_metric((key,), value)
    return found


def _info(name: str, text: str, labels: dict[str, str]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"elastic_{name}", text, labels=tuple(labels))
    found.add_metric(tuple(labels.values()), 1)
    return found


def _records(status: CoordinatorStatus) -> Iterator[Metric]:
    text = "Events that wait for the disk of the run directory"
    yield _gauge("records_unwritten", text, status.records_unwritten)
    text = "Seconds for which the oldest event has waited for the disk; 0: all are written"
    yield _gauge("records_late_seconds", text, status.records_late_s)
    text = "Events that events.jsonl lacks, because the disk refused them for too long"
    yield CounterMetricFamily("elastic_records_dropped", text, value=status.records_dropped)


def _stalled(state: JobState, stall: Stall | None, now: float) -> GaugeMetricFamily:
    text = "Seconds since the job made progress; 0: it makes progress"
    found = GaugeMetricFamily("elastic_stalled_seconds", text, labels=("phase", "reason"))
    if stall is None:
        found.add_metric((state.phase.value, ""), 0.0)
    else:
        found.add_metric((stall.phase, stall.reason), max(0.0, now - stall.since))
    return found


def _job(state: JobState) -> Iterator[Metric]:
    phases = {phase.value: float(phase is state.phase) for phase in JobPhase}
    text = "1 for the present phase of the job"
    yield _by_label(GaugeMetricFamily, "job_phase", text, "phase", phases)
    yield _gauge("epoch", "Generation of the plan", state.epoch)
    step = max((mb.report.step for mb in state.members.values()), default=0)
    yield _gauge("step", "Present step", step)
    steps = state.spec.n_steps if state.spec else 0
    yield _gauge("steps_wanted", "Steps of the whole job; 0: unknown", steps)
    saved = state.checkpoint[1] if state.checkpoint else -1
    yield _gauge("checkpoint_step", "Step of the newest durable checkpoint; -1: none", saved)
    if state.record is not None:
        yield _gauge("loss", "Loss of the newest step", state.record.loss)
    if state.evaluation is not None:
        newest = state.evaluation
        yield _gauge("evaluation_loss", "Mean loss of the newest evaluation", newest.loss)
        yield _gauge("evaluation_step", "Steps before the newest evaluation", newest.step)


def _membership(state: JobState, now: float) -> Iterator[Metric]:
    held = frozenset(state.plan.nodes()) if state.plan is not None else frozenset()
    counts = dict.fromkeys(NODE_STATES, 0)
    for member in state.members.values():
        counts[_state_of(state, member, held)] += 1
    yield _by_label(GaugeMetricFamily, "nodes", "Members per state", "state", counts)
    yield _gauge("nodes_min", "Minimum number of nodes", state.policy.min_nodes)
    yield _gauge("nodes_max", "Maximum number of nodes", state.policy.max_nodes)
    silent = {node: max(0.0, now - mb.seen) for node, mb in sorted(state.members.items())}
    text = "Seconds since a node's last heartbeat"
    yield _by_label(GaugeMetricFamily, "node_silence_seconds", text, "node", silent)
    slow = {node: speed_of(state, node).factor for node in silent}
    text = "Computation time of a node relative to the expected time"
    yield _by_label(GaugeMetricFamily, "node_slowdown_ratio", text, "node", slow)


def _state_of(state: JobState, member: Member, held: Collection[str]) -> str:
    if not member.connected:
        return "disconnected"
    if member.draining:
        return "draining"
    if member.node in held:
        return "training"
    if quarantine.is_quarantined(state, member.node):
        return "quarantined"
    return "spare" if member.report.able else "starting"


def _plan(state: JobState, predicted_s: float | None, step_s: Sequence[float]) -> Iterator[Metric]:
    """Yield metrics of the plan. `step_s`: seconds of its newest steps, without the first step."""
    plan = state.plan
    if plan is None:
        return
    info = {"shape": plan_shape(plan), "gradients": plan.gradients, "state": plan.state}
    yield _info("plan_info", "The plan in force", info)
    yield _gauge("plan_pipelines", "Pipelines of the plan", len(plan.pipelines))
    yield _gauge("plan_stages", "Stages of the plan", len(plan.units()))
    if predicted_s is not None:
        yield _gauge("plan_predicted_step_seconds", "Predicted time of a step", predicted_s)
    if step_s:
        text = "Mean time of the newest steps with this plan, without the first"
        yield _gauge("plan_measured_step_seconds", text, fmean(step_s))


def _unprotected_s(state: JobState, now: float) -> float:
    """Return the seconds since the plan changed if copies are missing at their peers, else 0."""
    plan = state.plan
    if plan is None or not plan.peers or state.trimmed >= state.epoch or state.ending is not None:
        return 0.0
    decided = state.change.decided if state.change is not None else 0.0
    since = decided or state.step_finished_at or state.launched_at
    return max(0.0, now - since) if since else 0.0
