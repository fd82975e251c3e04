"""What the coordinator counts while it decides. Listed in docs/operate/metrics.md; what the state itself tells, in `gauges`.

Fed with transitions, their actions and the messages that records are made of, never with logs. All counting is done by
the coordinator's own thread and takes microseconds; gauges are worked out when somebody asks, by whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from elastic.core.job import state as job
from elastic.core.job.goodput import NodeTimeAccount
from elastic.core.job.state import CauseKind, JobState, LossKind, Tick
from elastic.core.protocol import messages as m
from elastic.metrics import FAST_S, RECOVERY_S, STEP_S

PHASES = ("detect", "halt", "decide", "transfer", "rebuild", "total")
EVENTS = ("beat", "report", "step", "other", "rules")
LOOK_S = 0.25
"""How often node-seconds are added up while nothing changes."""
_EVENT_OF = {
    job.Heartbeats: "beat",
    job.NodeReported: "report",
    job.StepFinished: "step",
    type(None): "rules",
}


class CoordinatorMetrics:
    """Counters of one coordinator process; they begin at 0.

    `registry` also gets what others hand in (`elastic.coordinator.metrics.gauges`).
    """

    def __init__(self, registry: CollectorRegistry, now: float) -> None:
        self.registry, self.usage = registry, NodeTimeAccount()
        self.recoveries: list[dict[str, Any]] = []
        """Figures of the newest, for whoever looks at the job."""
        self.step_s: list[float] = []
        """Seconds of the newest steps under the present plan."""
        self.tokens_per_s = 0.0
        self._refused: list[Callable[[], Mapping[str, int]]] = []
        self._added, self._fenced = now, 0
        self._silent_s = 0.0
        """How long a node that was lost had been silent."""
        self._make_job()
        self._make_recovery()
        self._make_service()

    def _make_job(self) -> None:
        self._steps = self._counter("steps", "Optimizer updates that were done")
        self._lost_steps = self._counter("steps_lost", "Steps undone by a fall-back to a checkpoint")
        self._tokens = self._counter("tokens", "Tokens of the steps done")
        self._step = self._histogram("step_seconds", "Seconds of a step, as its teller saw it", STEP_S)
        self._lost = self._counter("nodes_lost", "Members that were lost", "reason", tuple(LossKind))
        self._events = self._counter(
            "events", "Entries of the event log", "kind", ("joined", "lost", "drained", "quarantine")
        )
        self._bad_copies = self._counter("copies_corrupt", "Copies that did not match their checksum")
        self._short = self._counter("backups_short", "Times that a vault had no room for copies")
        self._checkpoints = self._counter("checkpoints", "Durable checkpoints that were completed")

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
            "epoch_changes", "Epoch changes that were begun", "cause", tuple(CauseKind)
        )
        self._replayed = self._counter("microbatches_lost", "Micro-batches that had reached a lost stage")
        self._rerun = self._counter("microbatches_rerun", "Micro-batches that were run again")
        self._moved = self._counter("recovery_bytes", "Bytes that recoveries moved between nodes")

    def _make_service(self) -> None:
        self._decision = self._histogram(
            "decision_seconds", "Seconds to learn of an event, or to apply the rules", FAST_S, "event", EVENTS
        )
        self._took = {event: self._decision.labels(event) for event in EVENTS}
        self._save = self._histogram("state_save_seconds", "Seconds to save the job's state", FAST_S)
        self._saved_bytes = self._counter("state_saved_bytes", "Bytes of the job's state that were saved")
        self._late = self._histogram(
            "tick_delay_seconds", "How late the coordinator looks at the time", FAST_S
        )

    def _counter(self, name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Counter:
        """With every value of its label at 0, so that a first increase is seen."""
        made = Counter(f"elastic_{name}", text, (label,) if label else (), registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], label: str = "", values: tuple[str, ...] = ()
    ) -> Histogram:
        labels = (label,) if label else ()
        made = Histogram(f"elastic_{name}", text, labels, buckets=buckets, registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    # ---- what happens ----

    def begin(self, now: float) -> None:
        """A term begins. What happened between two of them is another coordinator's to count."""
        self.usage.forget()
        self._added, self._silent_s, self.tokens_per_s = now, 0.0, 0.0
        self.step_s.clear()

    def decided(
        self, before: JobState, after: JobState, actions: tuple[job.JobAction, ...], now: float
    ) -> None:
        """A transition was made at `now`, and is saved."""
        changed = before.phase is not after.phase or before.plan is not after.plan
        if changed or len(before.members) != len(after.members) or now - self._added >= LOOK_S:
            self.usage.advance(before, now)
            self._added = now
        for action in actions:
            if isinstance(action, job.LogEntry):
                self._noted(action.kind, action.data, before, after, now)
            elif isinstance(action, job.Send) and isinstance(action.message, m.Fenced):
                self._fenced += action.node not in before.members
        if after.epoch != before.epoch and after.change is not None:
            trained = before.change is None or any(
                isinstance(action, job.ChangeCompleted) for action in actions
            )
            self._begun(after.change, trained)
        if after.plan is not before.plan:
            self.step_s.clear()

    def took(self, event: Any, seconds: float) -> float:
        """To learn of `event`; None: to apply the rules to what is known. Returns the seconds."""
        if isinstance(event, Tick):
            self._late.observe(event.late_s)
        self._took[_EVENT_OF.get(type(event), "other")].observe(seconds)
        return seconds

    def told(self, kind: str) -> None:
        """An entry of the event log that is no action: `decided` counts those."""
        self._events.labels(kind).inc()

    def _begun(self, change: job.EpochChange, trained: bool) -> None:
        """`trained`: the change before it was complete."""
        self._changes.labels(change.causes[-1].kind).inc()
        if not change.boundary and trained:
            self.usage.fault(change, max(change.detect_s, self._silent_s))
        self._silent_s = 0.0

    def _noted(
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
        """A step was told of; what is told again is passed over."""
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
        """An epoch change is complete; `entry`: `elastic.core.job.goodput.recovery_entry`."""
        cause = event.change.causes[0].kind
        for phase in PHASES:
            self._recovery.labels(phase, cause).observe(entry[f"{phase}_s"])
        self._replayed.inc(entry["microbatches_lost"])
        self._rerun.inc(entry["microbatches_rerun"])
        self._moved.inc(entry["network_bytes"])
        self.usage.resumed(event.change)
        self.recoveries[:] = [*self.recoveries, entry][-5:]

    def saved(self, seconds: float, nbytes: int) -> None:
        """The job's state was."""
        self._save.observe(seconds)
        self._saved_bytes.inc(nbytes)

    # ---- what others count ----

    def count_refused(self, read: Callable[[], Mapping[str, int]]) -> None:
        """`read` tells how many messages were refused so far, by reason; asked at every scrape, from any thread."""
        self._refused.append(read)

    def refused(self) -> dict[str, int]:
        """Messages that were refused, by reason."""
        found = {"fenced": self._fenced}
        for read in self._refused:
            for reason, number in read().items():
                found[reason] = found.get(reason, 0) + number
        return found
