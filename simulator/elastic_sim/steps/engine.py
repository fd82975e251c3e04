"""A job on a trace, step by step, on virtual time (whole milliseconds). What a loss costs is for the policy to say.

The engine knows nothing of plans: a policy answers every event with what the cluster does next (`Change`): pauses, one
after the other, then a setup that makes so many samples in so many milliseconds. The order of events of one moment is
fixed: the trace's own, as one event; then timers, in the order in which they were set. The same trace, policy and seed
give the same outcome.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic_sim.steps.time_accounting import Account, Use
from elastic_sim.traces.trace import ADD, Event, Trace

Noise = Callable[[int], float]
"""How much longer than it should the n-th step begun takes."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What runs between two changes."""

    nodes: int
    """Used; others are idle."""
    step_ms: int
    samples: int
    """Of a step."""
    redundant: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What follows an event."""

    pauses: tuple[tuple[Use, int], ...] = ()
    """(use, milliseconds) of all nodes that are there, in order, before the setup runs."""
    setup: Setup | None = None
    """None: nothing runs until the next change."""
    lost_ms: int = 0
    """Of the running step's work, what has to be done again."""
    back_to: int = -1
    """Steps that are left, after going back; -1: all that are done."""
    reason: str = ""
    go_on: bool = False
    """Pauses of the change before that are not over go on, ahead of these."""


@dataclass(slots=True)
class Job:
    """What a policy sees."""

    now: int = 0
    alive: dict[str, Event] = field(default_factory=dict)
    """Nodes that are there, by name, in the order of their coming."""
    steps: int = 0
    """Done and not taken back."""
    progress_ms: int = 0
    """Useful time in the running step."""
    length_ms: int = 1
    """Of the running step, as it really takes."""
    slow: dict[str, float] = field(default_factory=dict)
    """Nodes that compute slower than they should, and how much."""
    setup: Setup | None = None
    paused: bool = False
    """Pauses of the last change are not over."""

    @property
    def fraction(self) -> float:
        """Of the running step, what is done."""
        return self.progress_ms / self.length_ms


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A node computes slower for a while, whoever uses it."""

    at: int
    until: int
    node: str
    factor: float


class Policy(Protocol):
    """How a system answers to what happens. None: it goes on as it is."""

    @property
    def name(self) -> str: ...

    def begin(self, job: Job) -> Change: ...

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        """Nodes came or went (`job.alive` is after it)."""

    def told(self, job: Job, going: Sequence[Event]) -> Change | None:
        """Nodes were told that they go; `Event.seconds` says when."""

    def slowed(self, job: Job) -> Change | None:
        """A node turned slow, or is as quick as it should again (`job.slow`)."""

    def stepped(self, job: Job) -> Change | None:
        """A step is done."""

    def rang(self, job: Job, name: str) -> Change | None:
        """A timer that `timers` asked for is over."""

    def timers(self) -> list[tuple[int, str]]:
        """(milliseconds from now, name) to be set since the last call."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change as it was made."""

    at: int
    nodes: int
    change: Change


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    ended: int
    steps: int
    samples: int
    account: Account
    decisions: tuple[Decision, ...]
    progress: tuple[tuple[int, int], ...]
    """(milliseconds, samples until then), at every change; going back shows."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.ended * 1000 if self.ended else 0.0


class Simulation:
    """One policy on one trace."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        noise: Noise | None = None,
        slowdowns: Sequence[Slowdown] = (),
    ) -> None:
        self._trace, self._policy = trace, policy
        self._noise, self._slowdowns = noise, slowdowns
        self._job, self._account = Job(), Account()
        self._pauses: list[tuple[Use, int]] = []
        self._begun = 0
        """Steps, those done again counted again."""
        self._samples = 0
        self._spent = 0
        """Useful milliseconds in the running step as they were; `Job.progress_ms` follows the setup."""
        self._done: list[tuple[int, int]] = []
        """(samples, useful milliseconds) of each step, oldest first: to go back over."""
        self._queue: list[tuple[int, int, int, str, Any]] = []
        """(at, rank, number, what, events or what else it is about)."""
        self._number = 0
        self._decisions: list[Decision] = []
        self._progress: list[tuple[int, int]] = []

    def run(self) -> Outcome:
        end = round(self._trace.end_s * 1000)
        for at, events in self._trace.steps():
            self._push(round(at * 1000), 0, "events", events)
            told = [e for e in events if e.kind != ADD and e.notice_s > 0]
            for event in told:
                moment = max(0, round((event.seconds - event.notice_s) * 1000))
                self._push(moment, 1, "told", (event,))
        for slow in self._slowdowns:
            self._push(slow.at, 1, "slow", (slow.node, slow.factor))
            self._push(slow.until, 1, "slow", (slow.node, 1.0))
        self._events_of_the_start()
        self._take(self._policy.begin(self._job))
        while self._queue and self._queue[0][0] <= end:
            at, _, _, what, events = heapq.heappop(self._queue)
            self._until(at)
            if what == "events":
                self._take(self._changed(events))
            elif what == "told":
                going = [event for event in events if event.node in self._job.alive]
                self._take(self._policy.told(self._job, going) if going else None)
            elif what == "slow":
                self._slow(*events)
            else:
                self._take(self._policy.rang(self._job, what))
        self._until(end)
        self._note()
        return Outcome(
            self._policy.name,
            end,
            self._job.steps,
            self._samples,
            self._account,
            tuple(self._decisions),
            tuple(self._progress),
        )

    # ---- time passes ----

    def _until(self, at: int) -> None:
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
                self._work(at)

    def _work(self, at: int) -> None:
        """Useful time up to `at`, or the end of a step after which the policy changes something."""
        job, setup = self._job, self._job.setup
        assert setup is not None
        passed = min(job.length_ms - job.progress_ms, at - job.now)
        self._spend(passed, setup.nodes, Use.USEFUL, setup.redundant)
        job.progress_ms += passed
        self._spent += passed
        if job.progress_ms >= job.length_ms:
            self._done.append((setup.samples, self._spent))
            self._samples += setup.samples
            job.progress_ms = self._spent = 0
            job.steps += 1
            self._begun += 1
            job.length_ms = self._length(setup)
            self._take(self._policy.stepped(job))

    def _length(self, setup: Setup) -> int:
        """Of the running step."""
        return max(1, round(setup.step_ms * self._noise(self._begun))) if self._noise else setup.step_ms

    def _slow(self, node: str, factor: float) -> None:
        slow = self._job.slow
        if node not in self._job.alive or slow.get(node, 1.0) == factor:
            return
        if factor > 1.0:
            slow[node] = factor
        else:
            del slow[node]
        self._take(self._policy.slowed(self._job))

    def _spend(self, passed: int, used: int, use: Use, redundant: float = 0.0) -> None:
        self._job.now += passed
        self._account.add(self._job.now, len(self._job.alive), used, use, redundant)

    # ---- something happens ----

    def _events_of_the_start(self) -> None:
        while self._queue and self._queue[0][0] == 0:
            _, _, _, what, events = heapq.heappop(self._queue)
            if what == "events":
                self._apply(events)

    def _changed(self, events: Sequence[Event]) -> Change | None:
        came, gone = self._apply(events)
        return self._policy.changed(self._job, came, gone) if came or gone else None

    def _apply(self, events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
        """What came and stays, and what went and was there before."""
        before = dict(self._job.alive)
        for event in events:
            if event.kind == ADD:
                self._job.alive[event.node] = event
            else:
                self._job.alive.pop(event.node, None)
                self._job.slow.pop(event.node, None)
        came = [e for n, e in self._job.alive.items() if before.get(n) is not e]
        gone = [e for e in events if e.kind != ADD and e.node in before]
        return came, gone

    def _take(self, change: Change | None) -> None:
        """Do what the policy says."""
        job = self._job
        if change is not None:
            if change.back_to >= 0:
                self._go_back(change.back_to)
            elif change.lost_ms:
                lost = min(change.lost_ms, self._spent)
                self._account.lose(lost)
                self._spent -= lost
                job.progress_ms = max(0, job.progress_ms - lost) if self._spent else 0
            if change.setup is not None:  # the same part of the step is done, whatever a step takes now
                length = self._length(change.setup)
                job.progress_ms = job.progress_ms * length // job.length_ms
                job.length_ms = length
            before = self._pauses if change.go_on else []
            self._pauses = [*before, *(pause for pause in change.pauses if pause[1] > 0)]
            job.setup, job.paused = change.setup, bool(self._pauses)
            self._decisions.append(Decision(job.now, len(job.alive), change))
            self._note()
        for after, name in self._policy.timers():
            self._push(job.now + after, 2, name, ())

    def _go_back(self, steps: int) -> None:
        job = self._job
        lost = self._spent
        while job.steps > steps:
            samples, spent = self._done.pop()
            lost += spent
            self._samples -= samples
            job.steps -= 1
        job.progress_ms = self._spent = 0
        self._account.lose(lost)

    def _push(self, at: int, rank: int, what: str, events: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (at, rank, self._number, what, events))

    def _note(self) -> None:
        self._progress.append((self._job.now, self._samples))
