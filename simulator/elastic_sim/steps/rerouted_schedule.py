"""Step time of a grid of pipelines whose lost workers are replaced by their peers (ReCycle).

Source: Gandhi et al., SOSP 2024, "ReCycle: Resilient Training of Large DNNs using Pipeline
Adaptation" (arXiv 2405.14009). From its abstract:

- **Re-routing.** The micro-batches of a lost worker run on data-parallel peers of the same stage.
- **Decoupled backward pass.** The gradients of the input and of the parameters are computed apart.
  Other stages wait only for the first, so the second fills bubbles.
- **Staggered optimizer.** Stages do not wait for each other before the optimizer step.

Details that the abstract does not give are assumed. Re-routed micro-batches go to the peers in
turn. A worker that is free runs the gradient of an input, else a forward pass if it has memory for
the activations, else the gradients of parameters. (The paper searches schedules by mixed-integer
programming, and may find faster ones.) A stage begins its next step when its own reduction and
update are done. Messages between pipelines take as long as those within one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from elastic.planning.schedule.timeline import StageTimes

MAX_SIMULATED = 1_500
"""Most micro-batches times stages that are simulated. The time of more is extrapolated."""
STEPS = 2
"""Number of simulated steps. All stages begin the first one together, and later ones staggered."""
NS = 1_000_000_000
"""Times are whole nanoseconds, so that equal sums of durations are equal."""
FREE, INPUT, FORWARD = range(3)
"""Kinds of events: a worker has finished; a micro-batch is ready for a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStage:
    """A stage of all pipelines of a grid."""

    times: StageTimes
    tail_s: float = 0.0
    """Seconds of reduction and update."""
    ahead: int
    """Number of micro-batches whose activations fit in a worker's memory."""


@dataclass(slots=True)
class _Worker:
    """A worker with the micro-batches, (index, pipeline), that are ready for each pass."""

    busy: bool = False
    held: int = 0
    """Number of micro-batches whose activations the worker holds."""
    forwards: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    weights: deque[tuple[int, int]] = field(default_factory=deque)


def spread_losses(depth: int, lost: int) -> tuple[int, ...]:
    """Return the number of lost workers of each stage if they are spread over the stages.

    The first stages, where losses delay a step least, have one more if they do not divide.
    """
    each, more = divmod(lost, depth)
    return tuple(each + (stage < more) for stage in range(depth))


def rerouted_step_s(
    stages: Sequence[GridStage],
    shares: Sequence[int],
    lost: Sequence[int],
    *,
    decoupled: bool = True,
    staggered: bool = True,
) -> float:
    """Return the seconds of a step in which peers do the work of lost workers.

    Args:
        shares: micro-batches of each pipeline.
        lost: number of lost workers of each stage; fewer than there are pipelines.
        decoupled: whether the parts of the backward pass run apart. Ignored if they are unknown.
        staggered: whether a stage begins its next step without waiting for the others.
    """
    known = all(s.times.backward_input_s + s.times.backward_weight_s > 0 for s in stages)
    step = _StepSimulation(stages, lost, len(shares), decoupled and known)
    most = max(2, MAX_SIMULATED // (len(shares) * len(stages)))
    if max(shares) <= most:
        return step.period_ns(shares, staggered) / NS
    whole, half = (step.period_ns([count] * len(shares), staggered) for count in (most, most // 2))
    per_microbatch = (whole - half) / (most - most // 2)
    return (whole + (sum(shares) / len(shares) - most) * per_microbatch) / NS


class _StepSimulation:
    """Simulates steps of a grid without some of its workers, pass by pass."""

    def __init__(
        self, stages: Sequence[GridStage], lost: Sequence[int], pipelines: int, decoupled: bool
    ) -> None:
        self._stages, self._pipelines, self._decoupled = stages, pipelines, decoupled
        self._missing: list[set[int]] = []
        """Per stage, the pipelines that have no worker there: other ones in each stage."""
        first = 0
        for count in lost:
            self._missing.append({(first + i) % pipelines for i in range(count)})
            first += count
        self._events: list[tuple[int, int, int, int, int, int]] = []
        """(time, kind, stage, pipeline of the worker, index, pipeline of the micro-batch)."""

    def period_ns(self, shares: Sequence[int], staggered: bool) -> int:
        """Return the nanoseconds from step to step."""
        self._routes = [self._route(missing, shares) for missing in self._missing]
        begins = [0] * len(self._stages)
        period = 0
        for _ in range(STEPS if staggered else 1):
            ends = [
                end + _ns(stage.tail_s)
                for stage, end in zip(self._stages, self._run(shares, begins), strict=True)
            ]
            period = max(end - begin for end, begin in zip(ends, begins, strict=True))
            begins = ends
        return period

    def _route(self, missing: set[int], shares: Sequence[int]) -> list[list[int]]:
        """Return for each pipeline and micro-batch the pipeline whose worker runs it."""
        peers = [p for p in range(self._pipelines) if p not in missing]
        turn = 0
        rows = []
        for pipeline, share in enumerate(shares):
            if pipeline in missing:
                rows.append([peers[(turn + i) % len(peers)] for i in range(share)])
                turn += share
            else:
                rows.append([pipeline] * share)
        return rows

    def _run(self, shares: Sequence[int], begins: Sequence[int]) -> list[int]:
        """Simulate one step in which each stage begins at its time. Return the end of each."""
        self._begins, self._ends = begins, list(begins)
        self._workers = {
            (s, p): _Worker() for s in range(len(self._stages)) for p in range(self._pipelines)
        }
        self._events = [
            (begins[0], FORWARD, 0, self._routes[0][p][i], i, p)
            for p, share in enumerate(shares)
            for i in range(share)
        ]
        heapify(self._events)
        while self._events:
            now = self._events[0][0]
            for stage, pipeline in dict.fromkeys(self._arrivals(now)):
                if not self._workers[stage, pipeline].busy:
                    self._start(now, stage, pipeline)
        return self._ends

    def _arrivals(self, now: int) -> Iterator[tuple[int, int]]:
        """Process all events of this time. Yield the stage and pipeline of each one's worker."""
        while self._events and self._events[0][0] == now:
            _, kind, stage, at, index, pipeline = heappop(self._events)
            worker = self._workers[stage, at]
            if kind == FREE:
                worker.busy = False
            else:
                heappush(worker.inputs if kind == INPUT else worker.forwards, (index, pipeline))
            yield stage, at

    def _start(self, now: int, stage: int, pipeline: int) -> None:
        """Let a free worker begin the most urgent pass that it can run, if any."""
        worker, times = self._workers[stage, pipeline], self._stages[stage].times
        if worker.inputs:
            microbatch = heappop(worker.inputs)
            seconds = times.backward_input_s if self._decoupled else times.backward_s
            end = now + _ns(seconds)
            if stage > 0:
                self._send(end, INPUT, stage, stage - 1, microbatch)
            if self._decoupled:
                worker.weights.append(microbatch)
            else:
                worker.held -= 1
        elif worker.forwards and worker.held < self._stages[stage].ahead:
            microbatch = heappop(worker.forwards)
            worker.held += 1
            end = now + _ns(times.forward_s)
            last = stage + 1 == len(self._stages)
            self._send(end, INPUT if last else FORWARD, stage, stage + (not last), microbatch)
        elif worker.weights:
            worker.weights.popleft()
            worker.held -= 1
            end = now + _ns(times.backward_weight_s)
        else:
            return
        worker.busy = True
        self._ends[stage] = max(self._ends[stage], end)
        heappush(self._events, (end, FREE, stage, pipeline, 0, 0))

    def _send(self, at: int, kind: int, source: int, to: int, microbatch: tuple[int, int]) -> None:
        """Make a micro-batch ready at stage `to`, after the message from stage `source`."""
        index, pipeline = microbatch
        hop = _ns(self._stages[min(source, to)].times.hop_s) if source != to else 0
        ready = max(at + hop, self._begins[to])
        worker = self._routes[to][pipeline][index]
        heappush(self._events, (ready, kind, to, worker, index, pipeline))


def _ns(seconds: float) -> int:
    return round(seconds * NS)
