"""Simulates a job on a trace, step by step, on virtual time in whole milliseconds.

The engine does not look into plans. A policy answers an event with a `Reconfiguration`: pauses,
then a `Setup` with the duration and the samples of a step. Events of the same time are processed in
a fixed order: all joins and losses as one event, then notices and speed changes, then timers.
Therefore the same trace, policy and seed give the same result."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.domain.types import NodeInfo, Plan
from elastic_sim.steps.time_accounting import TimeAccount, Use
from elastic_sim.traces.trace import ADD, Event, Trace

StepNoise = Callable[[int], float]
"""Function of the number of steps finished so far, lost ones included: factor on the next step."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Nodes in use and size of a step, between two reconfigurations."""

    nodes: int
    """Number of nodes in use; all others are idle."""
    step_ms: int
    samples: int
    """Samples per step."""
    redundant: float = 0.0
    """Fraction of useful time that counts as `Use.REDUNDANT`."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and the nodes that were present when it was made."""

    plan: Plan
    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """A policy's answer to an event: pauses, then a setup, and the work that is lost."""

    pauses: tuple[tuple[Use, int], ...] = ()
    """(use of all nodes present, milliseconds) of each pause before the setup runs, in order."""
    setup: Setup | None = None
    """Setup after the pauses; None: nothing runs until the next reconfiguration."""
    lost_ms: int = 0
    """Useful milliseconds of the running step that must be repeated; a larger number: all of
    them."""
    back_to: int = -1
    """Number of finished steps that remain; the running step is lost as well; -1: no rollback."""
    reason: str = ""
    keep_pauses: bool = False
    """Whether the pauses of the previous reconfiguration are finished first."""
    in_force: PlanInForce | None = None
    """Plan of the setup, for reports; None for rivals."""


@dataclass(slots=True)
class JobView:
    """State of the job as its policy sees it."""

    now: int = 0
    """Milliseconds since the beginning of the trace."""
    alive: dict[str, Event] = field(default_factory=dict)
    """Event with which each present node joined, by name, in the order of joining."""
    steps: int = 0
    """Number of finished steps, without those that a rollback discarded."""
    progress_ms: int = 0
    """Milliseconds of `length_ms` that are done."""
    length_ms: int = 1
    """Duration of the running step in milliseconds, including noise."""
    slow: dict[str, float] = field(default_factory=dict)
    """Factor on the compute time of each slow node."""
    setup: Setup | None = None
    paused: bool = False
    """Whether pauses of the last reconfiguration remain."""
    timers: list[tuple[int, str]] = field(default_factory=list)
    """(milliseconds from now, name) of each timer that the policy just set."""

    def set_timer(self, after_s: float, name: str) -> None:
        """Request a call of the policy's `on_timer` with `name` after `after_s` seconds."""
        self.timers.append((round(after_s * 1000), name))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """An interval from `at` to `until` (milliseconds) with `factor` on a node's compute time."""

    at: int
    until: int
    node: str
    factor: float


class ElasticPolicy:
    """Interface of a training system: its answer to each event. None changes nothing."""

    def on_start(self, job: JobView) -> Reconfiguration:
        raise NotImplementedError

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        """Called when nodes joined or were lost, which `job.alive` already shows."""
        raise NotImplementedError

    def on_notice(self, job: JobView, leaving: Sequence[Event]) -> Reconfiguration | None:
        """Called when nodes get notice; each will leave at its `Event.seconds`."""
        return None

    def on_speed_change(self, job: JobView) -> Reconfiguration | None:
        """Called when a node becomes slow or recovers, which `job.slow` already shows."""
        return None

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        return None

    def on_timer(self, job: JobView, name: str) -> Reconfiguration | None:
        return None


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A reconfiguration, with its time in milliseconds and the number of nodes present."""

    at: int
    nodes: int
    change: Reconfiguration


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Progress, node time and decisions of one simulation."""

    ended: int
    """Milliseconds since the beginning of the trace."""
    steps: int
    samples: int
    account: TimeAccount
    decisions: tuple[DecisionRecord, ...]

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.ended * 1000 if self.ended else 0.0

    def decision_spans(self) -> Iterator[tuple[DecisionRecord, int]]:
        """Return (decision, millisecond of the next decision or of the end), in order."""
        ends = [*(decision.at for decision in self.decisions[1:]), self.ended]
        return zip(self.decisions, ends, strict=True)


class Simulation:
    """Simulates one policy on one trace."""

    def __init__(
        self,
        trace: Trace,
        policy: ElasticPolicy,
        noise: StepNoise | None = None,
        slowdowns: Sequence[Slowdown] = (),
        progress: Callable[[float], object] = lambda share: None,
    ) -> None:
        """`progress(share)` is called often with the share of the trace that is simulated."""
        self._trace, self._policy, self._noise, self._slowdowns = trace, policy, noise, slowdowns
        self._progress = progress
        self._job, self._account = JobView(), TimeAccount()
        self._pauses: list[tuple[Use, int]] = []
        self._steps_begun = 0
        self._samples = 0
        self._spent = 0
        """Useful milliseconds of the running step. A new setup rescales `JobView.progress_ms`, but
        not this."""
        self._finished: list[tuple[int, int]] = []
        """(samples, useful milliseconds) of each finished step, for rollbacks."""
        self._queue: list[tuple[int, int, int, str, Any]] = []
        """(time, priority, counter, kind of event, argument)."""
        self._counter = 0
        self._decisions: list[DecisionRecord] = []

    def run(self) -> SimulationResult:
        end = round(self._trace.end_s * 1000)
        self._fill_queue()
        self._apply_first_events()
        self._reconfigure(self._policy.on_start(self._job))
        while self._queue and self._queue[0][0] <= end:
            at, _, _, kind, argument = heapq.heappop(self._queue)
            self._advance(at)
            self._reconfigure(self._dispatch(kind, argument))
            self._progress(at / end)
        self._advance(end)
        return SimulationResult(
            end, self._job.steps, self._samples, self._account, tuple(self._decisions)
        )

    def _fill_queue(self) -> None:
        for at, events in self._trace.steps():
            self._push(round(at * 1000), 0, "events", events)
            for event in events:
                if event.kind != ADD and event.notice_s > 0:
                    notice_at = max(0, round((event.seconds - event.notice_s) * 1000))
                    self._push(notice_at, 1, "notice", (event,))
        for slow in self._slowdowns:
            self._push(slow.at, 1, "speed", (slow.node, slow.factor))
            self._push(slow.until, 1, "speed", (slow.node, 1.0))

    def _apply_first_events(self) -> None:
        while self._queue and self._queue[0][0] == 0:
            _, _, _, kind, argument = heapq.heappop(self._queue)
            if kind == "events":
                self._apply(argument)

    def _dispatch(self, kind: str, argument: Any) -> Reconfiguration | None:
        """Update the job view for an event and return the policy's answer."""
        job, policy = self._job, self._policy
        if kind == "events":
            joined, lost = self._apply(argument)
            return policy.on_membership(job, joined, lost) if joined or lost else None
        if kind == "notice":
            leaving = [event for event in argument if event.node in job.alive]
            return policy.on_notice(job, leaving) if leaving else None
        if kind == "speed":
            node, factor = argument
            if node not in job.alive or job.slow.get(node, 1.0) == factor:
                return None
            if factor > 1.0:
                job.slow[node] = factor
            else:
                del job.slow[node]
            return policy.on_speed_change(job)
        return policy.on_timer(job, argument)

    # ---- time ----

    def _advance(self, at: int) -> None:
        """Let time pass up to `at`: pauses first, then steps."""
        job = self._job
        while job.now < at:
            if self._pauses:
                use, left = self._pauses[0]
                passed = min(left, at - job.now)
                self._spend(passed, len(job.alive), use)
                if passed == left:
                    self._pauses.pop(0)
                else:
                    self._pauses[0] = use, left - passed
                job.paused = bool(self._pauses)
            elif job.setup is None:
                self._spend(at - job.now, 0, Use.IDLE)
            else:
                self._work(job.setup, at)

    def _work(self, setup: Setup, at: int) -> None:
        """Compute up to `at` or to the end of the running step, whichever is earlier."""
        job = self._job
        passed = min(job.length_ms - job.progress_ms, at - job.now)
        self._spend(passed, setup.nodes, Use.USEFUL, setup.redundant)
        job.progress_ms += passed
        self._spent += passed
        if job.progress_ms >= job.length_ms:
            self._finished.append((setup.samples, self._spent))
            self._samples += setup.samples
            job.progress_ms = self._spent = 0
            job.steps += 1
            self._steps_begun += 1
            job.length_ms = self._step_length_ms(setup)
            self._reconfigure(self._policy.on_step_end(job))

    def _step_length_ms(self, setup: Setup) -> int:
        if self._noise is None:
            return setup.step_ms
        return max(1, round(setup.step_ms * self._noise(self._steps_begun)))

    def _spend(self, passed: int, used: int, use: Use, redundant: float = 0.0) -> None:
        self._job.now += passed
        self._account.add(self._job.now, len(self._job.alive), used, use, redundant)

    # ---- changes ----

    def _apply(self, events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
        """Apply events of one moment. Return (events of nodes that joined and are still present,
        events of lost nodes that were present before)."""
        before = dict(self._job.alive)
        for event in events:
            if event.kind == ADD:
                self._job.alive[event.node] = event
            else:
                self._job.alive.pop(event.node, None)
                self._job.slow.pop(event.node, None)
        joined = [e for n, e in self._job.alive.items() if before.get(n) is not e]
        lost = [e for e in events if e.kind != ADD and e.node in before]
        return joined, lost

    def _reconfigure(self, change: Reconfiguration | None) -> None:
        """Carry out the answer of the policy, if any, and set its timers."""
        job = self._job
        if change is not None:
            if change.back_to >= 0:
                self._roll_back(change.back_to)
            elif change.lost_ms:
                lost = min(change.lost_ms, self._spent)
                self._account.lose(lost)
                self._spent -= lost
                job.progress_ms = max(0, job.progress_ms - lost) if self._spent else 0
            if change.setup is not None:  # the finished share of the step stays the same
                length = self._step_length_ms(change.setup)
                job.progress_ms = job.progress_ms * length // job.length_ms
                job.length_ms = length
            before = self._pauses if change.keep_pauses else []
            self._pauses = [*before, *(pause for pause in change.pauses if pause[1] > 0)]
            job.setup, job.paused = change.setup, bool(self._pauses)
            self._decisions.append(DecisionRecord(job.now, len(job.alive), change))
        for after, name in job.timers:
            self._push(job.now + after, 2, "timer", name)
        job.timers.clear()

    def _roll_back(self, steps: int) -> None:
        job = self._job
        lost = self._spent
        while job.steps > steps:
            samples, spent = self._finished.pop()
            lost += spent
            self._samples -= samples
            job.steps -= 1
        job.progress_ms = self._spent = 0
        self._account.lose(lost)

    def _push(self, at: int, priority: int, kind: str, argument: Any) -> None:
        self._counter += 1
        heapq.heappush(self._queue, (at, priority, self._counter, kind, argument))
