"""What the job's state tells, worked out whenever somebody reads the metrics.

A state is never changed in place, so it may be read from any thread. Listed in docs/operate/metrics.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic.coordinator.metrics.counters import CoordinatorMetrics
from elastic.core.job import quarantine
from elastic.core.job.measured_conditions import measured_profile
from elastic.core.job.state import JobPhase, JobState, Member
from elastic.core.job.stragglers import compute_slowdown, slowdowns, speed_of
from elastic.domain.version import VERSION
from elastic.planning.cost.predict import predict

STATES = ("training", "spare", "draining", "quarantined", "starting", "disconnected")
PREDICT_S = 15.0
"""How long a prediction is used while the plan stays."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The coordinator itself, at one moment."""

    leads: bool
    """It decides, and knows its lease to be its own; others that run beside it only wait."""
    term: int
    queued: int
    """Events that wait to be decided on."""
    state_bytes: int
    """Of the state as it was saved last."""


class JobCollector(Collector):
    """Gauges of the job, and counters that are kept elsewhere."""

    def __init__(
        self,
        job_id: str,
        reading: Callable[[], tuple[JobState | None, Standing]],
        metrics: CoordinatorMetrics,
        clock: Callable[[], float],
    ) -> None:
        """They are called from the threads of whoever asks. One that stands by knows no state."""
        self._job_id, self._reading = job_id, reading
        self._metrics, self._clock = metrics, clock
        self._predicted: tuple[int, bool, float, float | None] = (-1, False, 0.0, None)

    def collect(self) -> Iterator[Metric]:
        (state, standing), now = self._reading(), self._clock()
        yield _labelled("job_info", "The job", {"id": self._job_id, "version": VERSION})
        yield gauge(
            "coordinator_leader",
            "1: this coordinator decides; 0: it stands by, or cannot reach the store",
            float(standing.leads),
        )
        yield from self._counters()
        if state is None:
            return
        yield gauge("coordinator_term", "Fencing term of this coordinator, while it leads", standing.term)
        yield gauge("coordinator_queue_length", "Events that wait to be decided on", standing.queued)
        yield gauge("state_bytes", "Size of the job's state as it was saved last", standing.state_bytes)
        yield from _job(state)
        yield from _membership(state, now)
        yield from self._plan(state)
        yield from _protection(state, now)

    def _counters(self) -> Iterator[Metric]:
        used = CounterMetricFamily(
            "elastic_node_seconds", "Time of all nodes, by what it was used for", labels=("use",)
        )
        for use, seconds in self._metrics.usage.totals.items():
            used.add_metric((use,), seconds)
        yield used
        refused = CounterMetricFamily(
            "elastic_messages_refused", "Messages that were refused", labels=("reason",)
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
        yield gauge("plan_pipelines", "Pipelines of the plan", len(plan.pipelines))
        yield gauge("plan_stages", "Stages of the plan", len(plan.units()))
        predicted = self._predict(state)
        if predicted is not None:
            yield gauge("plan_predicted_step_seconds", "Seconds that the plan's step should take", predicted)
        seconds = tuple(self._metrics.step_s)[1:]
        if seconds:
            yield gauge(
                "plan_measured_step_seconds",
                "Mean of the plan's newest steps, the first left out",
                fmean(seconds),
            )

    def _predict(self, state: JobState) -> float | None:
        """Seconds of a step; None while layers' figures are only proportions."""
        known = state.policy.profile is not None or any(speed_of(state, n).unit for n in state.members)
        assert state.plan is not None
        epoch, was_known, at, value = self._predicted
        if (epoch, was_known) != (state.plan.epoch, known) or time.monotonic() - at > PREDICT_S:
            value = _prediction(state) if known else None
            self._predicted = (state.plan.epoch, known, time.monotonic(), value)
        return value


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastic_{name}", text, value=value)


def by_label(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"elastic_{name}", text, labels=(label,))
    for key, value in values:
        found.add_metric((key,), value)
    return found


def _labelled(name: str, text: str, labels: dict[str, str]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"elastic_{name}", text, labels=tuple(labels))
    found.add_metric(tuple(labels.values()), 1)
    return found


def _prediction(state: JobState) -> float | None:
    """None where a node of the plan has just gone."""
    plan = state.plan
    if plan is None or state.spec is None or not set(plan.nodes()) <= set(state.members):
        return None
    nodes = tuple(mb.report.info for mb in state.members.values())
    return predict(plan, measured_profile(state), nodes, slowdowns(state)).step_s


def _job(state: JobState) -> Iterator[Metric]:
    phases = ((phase.value, float(phase is state.phase)) for phase in JobPhase)
    yield by_label("job_phase", "1 for the phase that the job is in", "phase", phases)
    yield gauge("epoch", "Generation of the plan", state.epoch)
    step = max((mb.report.step for mb in state.members.values()), default=0)
    yield gauge("step", "Step that the job is in", step)
    yield gauge(
        "steps_wanted", "Steps of the whole job; 0: not known yet", state.spec.n_steps if state.spec else 0
    )
    saved = state.checkpoint[1] if state.checkpoint else -1
    yield gauge("checkpoint_step", "Step of the newest durable checkpoint; -1: there is none", saved)
    if state.record is not None:
        yield gauge("loss", "Loss of the newest step", state.record.loss)


def _membership(state: JobState, now: float) -> Iterator[Metric]:
    held = frozenset(state.plan.nodes()) if state.plan is not None else frozenset()
    counts = dict.fromkeys(STATES, 0)
    for member in state.members.values():
        counts[_state_of(state, member, held)] += 1
    yield by_label("nodes", "Members, each in one state", "state", counts.items())
    yield gauge("nodes_min", "Nodes without which the job does not start", state.policy.min_nodes)
    yield gauge("nodes_max", "Nodes that are used at most", state.policy.max_nodes)
    members = sorted(state.members.items())
    silent = ((node, max(0.0, now - mb.seen)) for node, mb in members)
    yield by_label("node_silence_seconds", "Since a node's last sign of life", "node", silent)
    slowness = ((node, compute_slowdown(state, node)) for node, _ in members)
    yield by_label(
        "node_slowdown_ratio", "How much slower than it should be a node computes", "node", slowness
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
    if state.plan is not None and state.plan.peers and state.trimmed < state.epoch and state.ending is None:
        decided = state.change.decided if state.change is not None else 0.0
        open_since = decided or state.step_finished_at or state.launched_at
    exposed = max(0.0, now - open_since) if open_since else 0.0
    yield gauge(
        "protection_pending_seconds", "Since the plan changed and not all copies are at their peers", exposed
    )
