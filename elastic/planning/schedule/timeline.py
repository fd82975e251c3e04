"""Simulation of a pipeline's action lists: start and end of each action.

A unit runs its list in order. A receive waits for the neighbour's message, which arrives `hop_s`
after the send. Sending takes no time on the sender. The engine follows the same rules, so this is
the most precise prediction that the planner has.
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
    """Input part, for schedules that split the backward pass."""
    backward_weight_s: float = 0.0
    hop_s: float = 0.0
    """One message between this stage and the next one, in either direction."""

    def of(self, kind: Kind) -> float:
        """Return the seconds of a compute action; 0 for messages."""
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
    """One compute action with its start and end."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All compute actions of a pipeline, in order of their start."""

    spans: tuple[Span, ...]
    makespan_s: float
    """End of the last action of all units."""
    busy_s: tuple[float, ...]
    """Per unit: seconds spent computing."""
    finish_s: tuple[float, ...]
    """Per unit: end of its last action."""

    def unit_of(self, span: Span) -> int:
        """Return the index of the unit that runs `span`."""
        return span.stage % len(self.busy_s)


def simulate(lists: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> Timeline:
    """Simulate `lists` (one per unit, see `schedule.actions_of`) with `times` (one per stage).

    The result is exact for the rules above, in time linear in the number of actions. Raises
    FieldError if the units deadlock (`deadlock_check` explains the cycle).
    """
    run = _Run(lists, times)
    ready = deque(range(len(lists)))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    if any(at < len(actions) for at, actions in zip(run.position, lists, strict=True)):
        raise FieldError(
            "schedule", f"stuck at {run.position}", "the units deadlock: each waits for another"
        )
    spans = sorted((span for row in run.spans for span in row), key=lambda s: (s.start_s, s.stage))
    return Timeline(tuple(spans), max(run.clock, default=0.0), tuple(run.busy), tuple(run.clock))


def makespan(schedule: str, n_units: int, microbatches: int, times: Sequence[StageTimes]) -> float:
    """Return `simulate(...).makespan_s` of a schedule, bit-exact and faster.

    `times` has one entry per stage. Plan comparison uses this function.
    """
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
    """Compute actions of a pipeline in topological order of their dependencies."""

    unit: array[int]
    slot: array[int]
    """Index of its duration, from stage and kind."""
    before: array[int]
    """Index of the action whose message it waits for; one past the end for none."""
    hop: array[int]
    """Stage whose `hop_s` the message takes; one past the end for none."""


@lru_cache(maxsize=512)
def _program(schedule: str, n_units: int, n_stages: int, microbatches: int) -> _Program:
    """Order the actions. An early receive costs no time, so messages need no own action."""
    lists = [list(row) for row in computing(schedule, n_units, n_stages, range(microbatches))]
    total = sum(map(len, lists))
    program = _Program(array("i"), array("i"), array("i"), array("i"))
    done: dict[tuple[int, bool, int], int] = {}
    position = [0] * n_units
    ready = deque(range(n_units))
    while ready:
        unit = ready.popleft()
        notified = set[int]()
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
                done[stage, forward, action.microbatch] = len(program.unit)
                notified.add((stage + 1 if forward else stage - 1) % n_units)
            program.unit.append(unit)
            program.slot.append(stage * len(_COMPUTE) + _COMPUTE.index(action.kind))
            program.before.append(before)
            program.hop.append(min(stage, source) if waits else n_stages)
            position[unit] += 1
        ready.extend(
            other for other in notified if other != unit and position[other] < len(lists[other])
        )
    return program


class _Run:
    """State of a simulation: position and clock per unit, and the messages between units."""

    def __init__(self, lists: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> None:
        self._lists, self._hops = lists, [stage.hop_s for stage in times]
        self._seconds = [
            {kind: stage.of(kind) for kind in Kind if kind.computes} for stage in times
        ]
        self.position = [0] * len(lists)
        self.clock, self.busy = [0.0] * len(lists), [0.0] * len(lists)
        self.spans: list[list[Span]] = [[] for _ in lists]
        self._wires: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        """(receiver, sender): arrival times of the messages, in order."""

    def advance(self, unit: int) -> list[int]:
        """Run `unit` until it must wait. Return the unfinished units that it sent messages to."""
        actions, n_units = self._lists[unit], len(self._lists)
        clock, at, notified = self.clock[unit], self.position[unit], set[int]()
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
                notified.add(other)
            else:
                wire = self._wires[unit, (unit + (1 if kind is Kind.RECV_B else -1)) % n_units]
                if not wire:
                    break
                clock = max(clock, wire.popleft())
            at += 1
        self.clock[unit], self.position[unit] = clock, at
        return [other for other in notified if self.position[other] < len(self._lists[other])]
