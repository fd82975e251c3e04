"""Simulation of a pipeline: start and end of each compute action.

A unit runs its actions in order. An action that needs a message waits for it. The message arrives
`hop_s` after the action that sends it, and sending takes no time on the sender. The engine follows
the same rules, so this is the most precise prediction that the planner has.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from elastic.domain.types import Pipeline
from elastic.planning.schedule.schedule import Action, Kind, computing, lists, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage per micro-batch: compute actions and messages."""

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

    def unit_of(self, span: Span) -> int:
        """Return the index of the unit that runs `span`."""
        return span.stage % len(self.busy_s)


def simulate(pipeline: Pipeline, times: Sequence[StageTimes]) -> Timeline:
    """Return the timeline of `pipeline`. `times` has one entry per stage.

    The result is exact for the rules above. It takes time linear in the number of actions.
    """
    schedule, n_units, indices = pipeline.schedule, len(units_of(pipeline)), pipeline.microbatches
    program = _program(schedule, n_units, len(times), len(indices), _overtakes(n_units, times))
    starts, ends = _run(program, n_units, times)
    actions = computing(schedule, n_units, len(times), indices)
    spans, busy = [], [0.0] * n_units
    wait = len(times) * len(_COMPUTE)
    for unit, slot, start, end in zip(program.unit, program.slot, starts, ends, strict=False):
        if slot == wait:
            continue
        action = next(actions[unit])
        stage = unit if action.stage < 0 else action.stage
        spans.append(Span(stage, action, start, end))
        busy[unit] += times[stage].of(action.kind)
    return Timeline(
        tuple(sorted(spans, key=lambda s: (s.start_s, s.stage))), max(ends), tuple(busy)
    )


def makespan(schedule: str, n_units: int, microbatches: int, times: Sequence[StageTimes]) -> float:
    """Return the makespan of a schedule in seconds. `times` has one entry per stage."""
    program = _program(schedule, n_units, len(times), microbatches, _overtakes(n_units, times))
    return max(_run(program, n_units, times)[1])


_COMPUTE = (Kind.F, Kind.B, Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class _Program:
    """Compute actions and early receives, in topological order of their dependencies.

    A receive is early if another action of the unit stands between it and the action that needs the
    message, because two units exchange messages in a fixed order. It delays the action between, if
    its message takes longer than the later one that this action needs.
    """

    unit: array[int]
    slot: array[int]
    """Index of the action's duration: stage * number of compute kinds + index of the kind. An
    early receive has the index after the last one, and takes no time."""
    before: array[int]
    """Index of the action whose message must arrive first; one past the last action: none."""
    hop: array[int]
    """Stage whose `hop_s` the message takes; one past the last stage: no message."""


def _overtakes(n_units: int, times: Sequence[StageTimes]) -> bool:
    """Return whether two units exchange messages of different duration, so that a message could
    arrive before one that was sent earlier."""
    if len(times) <= n_units:
        return False
    links = n_units if n_units > 2 else 1
    hops = [stage.hop_s for stage in times[:-1]]
    return any(hop_s != hops[s % links] for s, hop_s in enumerate(hops))


@lru_cache(maxsize=512)
def _program(
    schedule: str, n_units: int, n_stages: int, microbatches: int, early: bool
) -> _Program:
    """Return the compute actions, each after those that it waits for. `early`: with early receives,
    which only matter if `_overtakes`."""
    indices = tuple(range(microbatches))
    if early:
        rows = [_without_messages(row) for row in lists(schedule, n_units, n_stages, indices)]
    else:
        rows = [list(row) for row in computing(schedule, n_units, n_stages, indices)]
    total = sum(map(len, rows))
    program = _Program(array("i"), array("i"), array("i"), array("i"))
    done: dict[tuple[int, bool, int], int] = {}
    position = [0] * n_units
    ready = deque(range(n_units))
    while ready:
        unit = ready.popleft()
        notified = set[int]()
        while position[unit] < len(rows[unit]):
            action = rows[unit][position[unit]]
            stage = unit if action.stage < 0 else action.stage
            forward = action.kind in (Kind.F, Kind.RECV_F)
            source = stage - 1 if forward else stage + 1
            waits = action.kind is not Kind.WEIGHT and 0 <= source < n_stages
            before = done.get((source, forward, action.microbatch), -1) if waits else total
            if before < 0:
                break
            if action.kind.computes and action.kind is not Kind.WEIGHT:
                done[stage, forward, action.microbatch] = len(program.unit)
                notified.add((stage + 1 if forward else stage - 1) % n_units)
            program.unit.append(unit)
            program.slot.append(_slot(action.kind, stage, n_stages))
            program.before.append(before)
            program.hop.append(min(stage, source) if waits else n_stages)
            position[unit] += 1
        ready.extend(
            other for other in notified if other != unit and position[other] < len(rows[other])
        )
    return program


def _slot(kind: Kind, stage: int, n_stages: int) -> int:
    """Return the index of an action's duration."""
    if kind.receives:
        return n_stages * len(_COMPUTE)
    return stage * len(_COMPUTE) + _COMPUTE.index(kind)


def _without_messages(row: Sequence[Action]) -> list[Action]:
    """Return the compute actions and early receives of a unit."""
    row = [action for action in row if action.kind.computes or action.kind.receives]
    return [
        action
        for action, after in zip(row, row[1:] + row[:1], strict=True)
        if action.kind.computes or not _needs(after, action)
    ]


def _needs(action: Action, receive: Action) -> bool:
    """Return whether a compute action needs the message of a receive."""
    forward = (action.kind is Kind.F) == (receive.kind is Kind.RECV_F)
    same = (action.stage, action.microbatch) == (receive.stage, receive.microbatch)
    return action.kind.computes and action.kind is not Kind.WEIGHT and forward and same


def _run(
    program: _Program, n_units: int, times: Sequence[StageTimes]
) -> tuple[list[float], list[float]]:
    """Return (starts, ends) of all actions; `ends` has a 0 after them, which means no message."""
    hops = [stage.hop_s for stage in times] + [0.0]
    seconds = [stage.of(kind) for stage in times for kind in _COMPUTE] + [0.0]
    clock, starts, ends = [0.0] * n_units, [], [0.0] * (len(program.unit) + 1)
    for i, (unit, slot, before, hop) in enumerate(
        zip(program.unit, program.slot, program.before, program.hop, strict=True)
    ):
        start, there = clock[unit], ends[before] + hops[hop]
        if there > start:
            start = there
        starts.append(start)
        ends[i] = clock[unit] = start + seconds[slot]
    return starts, ends
