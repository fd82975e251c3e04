"""Runs the action lists of a pipeline against the clock of the cost model: when does each action begin and end?

A unit runs its list in order; a receive waits until the neighbour's message is there; a message is there `hop_s`
after it was sent; sending takes no time of the sender. This is what the engine does, and so the finest
prediction that the planner has.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from elastic.domain.errors import FieldError
from elastic.planning.schedule.schedule import Action, Kind, computing


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage's compute actions for one micro-batch, and of its messages."""

    forward_s: float
    backward_s: float
    backward_input_s: float = 0.0
    """For schedules that run the two parts of the backward pass apart."""
    backward_weight_s: float = 0.0
    hop_s: float = 0.0
    """From this stage to the following one, and back: each message."""

    def of(self, kind: Kind) -> float:
        """Seconds of a compute action."""
        match kind:
            case Kind.F:
                return self.forward_s
            case Kind.B:
                return self.backward_s
            case Kind.INPUT:
                return self.backward_input_s
            case Kind.WEIGHT:
                return self.backward_weight_s
            case _:
                return 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action on the clock."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All compute actions of a pipeline, in order of their start."""

    spans: tuple[Span, ...]
    makespan_s: float
    """When the last action of the last unit ends."""
    busy_s: tuple[float, ...]
    """Per unit: seconds spent computing."""
    finish_s: tuple[float, ...]
    """Per unit: when its last action ends."""

    def unit_of(self, span: Span) -> int:
        """Index of the unit that ran it."""
        return span.stage % len(self.busy_s)


def simulate(lists: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> Timeline:
    """Run `lists` (one a unit, from `elastic.planning.schedule.schedule.actions_of`) with `times` (one a stage).

    Exact for the rules above, in time proportional to the number of actions. Raises FieldError if the units wait for
    each other for ever (`elastic.planning.schedule.deadlock_check` says more).
    """
    run = _Run(lists, times)
    ready = deque(range(len(lists)))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    if any(at < len(actions) for at, actions in zip(run.position, lists, strict=True)):
        raise FieldError(
            "schedule", f"stuck at {run.position}", "its units wait for each other for ever"
        )
    spans = sorted((span for row in run.spans for span in row), key=lambda s: (s.start_s, s.stage))
    return Timeline(tuple(spans), max(run.clock, default=0.0), tuple(run.busy), tuple(run.clock))


def makespan(schedule: str, n_units: int, microbatches: int, times: Sequence[StageTimes]) -> float:
    """`simulate(...).makespan_s` of a schedule's own lists, to the last bit, without the rest: for comparing plans."""
    hops = [stage.hop_s for stage in times] + [0.0]
    seconds = [stage.of(kind) for stage in times for kind in _COMPUTE]
    program = _program(schedule, n_units, len(times), microbatches)
    clock, ends = [0.0] * n_units, [0.0] * (len(program.unit) + 1)
    for i, (unit, slot, before, hop) in enumerate(
        zip(program.unit, program.slot, program.before, program.hop, strict=True)
    ):
        start, there = clock[unit], ends[before] + hops[hop]
        ends[i] = clock[unit] = (start if start >= there else there) + seconds[slot]
    return max(clock, default=0.0)


_COMPUTE = (Kind.F, Kind.B, Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class _Program:
    """Compute actions of a pipeline in an order in which all that one waits for comes before it."""

    unit: array[int]
    slot: array[int]
    """Stage and kind: which seconds it takes."""
    before: array[int]
    """The action whose message it waits for; the last entry, which never runs: none."""
    hop: array[int]
    """Whose `hop_s` the message takes; the last entry, which is 0: none."""


@lru_cache(maxsize=512)
def _program(schedule: str, n_units: int, n_stages: int, microbatches: int) -> _Program:
    """Follow the lists; what is received earlier than it is needed costs no time."""
    lists = [list(row) for row in computing(schedule, n_units, n_stages, range(microbatches))]
    total = sum(map(len, lists))
    made = _Program(array("i"), array("i"), array("i"), array("i"))
    done: dict[tuple[int, bool, int], int] = {}
    position = [0] * n_units
    ready = deque(range(n_units))
    while ready:
        unit = ready.popleft()
        told = set[int]()
        while position[unit] < len(lists[unit]):
            action = lists[unit][position[unit]]
            stage = unit if action.stage < 0 else action.stage
            forward = action.kind is Kind.F
            source = stage - 1 if forward else stage + 1
            waits = action.kind is not Kind.WEIGHT and 0 <= source < n_stages
            before = done.get((source, forward, action.microbatch), -1) if waits else total
            if before < 0:
                break
            if action.kind is not Kind.WEIGHT:
                done[stage, forward, action.microbatch] = len(made.unit)
                told.add((stage + 1 if forward else stage - 1) % n_units)
            made.unit.append(unit)
            made.slot.append(stage * len(_COMPUTE) + _COMPUTE.index(action.kind))
            made.before.append(before)
            made.hop.append(min(stage, source) if waits else n_stages)
            position[unit] += 1
        ready.extend(
            other for other in told if other != unit and position[other] < len(lists[other])
        )
    return made


class _Run:
    """State of a simulation: per unit a position, a clock, and a queue for what each other unit sends it."""

    def __init__(self, lists: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> None:
        self._lists, self._hops = lists, [stage.hop_s for stage in times]
        self._seconds = [
            {kind: stage.of(kind) for kind in Kind if kind.computes} for stage in times
        ]
        self.position = [0] * len(lists)
        self.clock, self.busy = [0.0] * len(lists), [0.0] * len(lists)
        self.spans: list[list[Span]] = [[] for _ in lists]
        self._wires: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        """(receiver, sender): when each message will be there, in order."""

    def advance(self, unit: int) -> list[int]:
        """Run a unit until it must wait. Return the units that got a message meanwhile."""
        actions, n_units = self._lists[unit], len(self._lists)
        clock, at, told = self.clock[unit], self.position[unit], set[int]()
        while at < len(actions):
            action = actions[at]
            kind, stage = action.kind, unit if action.stage < 0 else action.stage
            seconds = self._seconds[stage].get(kind)
            if seconds is not None:
                self.spans[unit].append(Span(stage, action, clock, clock + seconds))
                self.busy[unit] += seconds
                clock += seconds
            elif kind is Kind.SEND_F or kind is Kind.SEND_B:
                step, hop = (
                    (1, self._hops[stage]) if kind is Kind.SEND_F else (-1, self._hops[stage - 1])
                )
                other = (unit + step) % n_units
                self._wires[other, unit].append(clock + hop)
                told.add(other)
            else:
                wire = self._wires[unit, (unit + (1 if kind is Kind.RECV_B else -1)) % n_units]
                if not wire:
                    break
                clock = max(clock, wire.popleft())
            at += 1
        self.clock[unit], self.position[unit] = clock, at
        return [other for other in told if self.position[other] < len(self._lists[other])]
