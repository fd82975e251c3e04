"""Simulates a job on a trace, step by step, on virtual time in whole milliseconds.

The engine knows nothing of plans. A policy answers every event with a `Reconfiguration`: pauses,
one after the other, then a setup that makes a number of samples in a number of milliseconds. Events
of one moment are processed in a fixed order: those of the trace as one event, then notices and
speed changes, then timers in the order in which they were set. The same trace, policy and seed
therefore give the same result."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.domain.types import NodeInfo, Plan
from elastic_sim.steps.time_accounting import TimeAccount, Use
from elastic_sim.traces.trace import ADD, Event, Trace

StepNoise = Callable[[int], float]
"""Factor on the duration of the n-th step that begins; repeated steps count again."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Configuration that runs between two reconfigurations."""

    nodes: int
    """Nodes in use; all others are idle."""
    step_ms: int
    samples: int
    """Samples per step."""
    redundant: float = 0.0
    """Share of the useful nodes' time that only protects against losses."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and the nodes that were present when it was made."""

    plan: Plan
    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """Answer of a policy to an event."""

    pauses: tuple[tuple[Use, int], ...] = ()
    """(use, milliseconds) of all nodes present, in order, before the setup runs."""
    setup: Setup | None = None
    """None: nothing runs until the next reconfiguration."""
    lost_ms: int = 0
    """Useful time of the running step that must be repeated."""
    back_to: int = -1
    """Number of steps that remain after a rollback; -1: all finished ones."""
    reason: str = ""
    keep_pauses: bool = False
    """Finish the pauses of the previous reconfiguration first."""
    in_force: PlanInForce | None = None
    """Plan of the setup, for reports; None for rivals."""


@dataclass(slots=True)
class JobView:
    """State of the job that a policy sees."""

    now: int = 0
    """Milliseconds."""
    alive: dict[str, Event] = field(default_factory=dict)
    """Nodes present, by name, in the order in which they joined."""
    steps: int = 0
    """Finished steps, without those that a rollback discarded."""
    progress_ms: int = 0
    """Useful time in the running step."""
    length_ms: int = 1
    """True duration of the running step."""
    slow: dict[str, float] = field(default_factory=dict)
    """Slowdown factor of each straggler."""
    setup: Setup | None = None
    paused: bool = False
    """Whether pauses of the last reconfiguration remain."""
    timers: list[tuple[int, str]] = field(default_factory=list)
    """(milliseconds from now, name) of each timer that the policy requested."""

    def set_timer(self, after_s: float, name: str) -> None:
        self.timers.append((round(after_s * 1000), name))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A node computes slower by `factor` from `at` to `until` (milliseconds)."""

    at: int
    until: int
    node: str
    factor: float


class ElasticPolicy:
    """Behaviour of a training system. An answer of None leaves everything as it is."""

    def on_start(self, job: JobView) -> Reconfiguration:
        raise NotImplementedError

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        """Nodes joined or were lost; `job.alive` is the state after that."""
        raise NotImplementedError

    def on_notice(self, job: JobView, leaving: Sequence[Event]) -> Reconfiguration | None:
        """Nodes got notice that they will leave at `Event.seconds`."""
        return None

    def on_speed_change(self, job: JobView) -> Reconfiguration | None:
        """A node became slow or recovered (`job.slow`)."""
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
    """Result of one simulation."""

    ended: int
    """Milliseconds."""
    steps: int
    samples: int
    account: TimeAccount
    decisions: tuple[DecisionRecord, ...]

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.ended * 1000 if self.ended else 0.0

    def decision_spans(self) -> Iterator[tuple[DecisionRecord, int]]:
        """(decision, milliseconds of the next one or of the end), in order."""
        ends = [*(decision.at for decision in self.decisions[1:]), self.ended]
        return zip(self.decisions, ends, strict=True)


class Simulation:
    """One policy on one trace."""

    def __init__(
        self,
        trace: Trace,
        policy: ElasticPolicy,
        noise: StepNoise | None = None,
        slowdowns: Sequence[Slowdown] = (),
    ) -> None:
        self._trace, self._policy, self._noise, self._slowdowns = trace, policy, noise, slowdowns
        self._job, self._account = JobView(), TimeAccount()
        self._pauses: list[tuple[Use, int]] = []
        self._steps_begun = 0
        self._samples = 0
        self._spent = 0
        """Useful milliseconds in the running step. `JobView.progress_ms` is rescaled with the
        setup."""
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
        """Update the job view and let the policy answer."""
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
        """Compute up to `at` or to the end of the running step."""
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
        """(nodes that joined and are still present, nodes that were present before and are
        lost)."""
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
