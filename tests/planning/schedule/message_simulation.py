"""Simulation of action lists message by message: a second way to compute a timeline."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from elastic.planning.schedule.schedule import Action, Kind, message_of
from elastic.planning.schedule.timeline import StageTimes


def finish_times(
    lists: Sequence[Sequence[Action]], times: Sequence[StageTimes]
) -> tuple[float, ...]:
    """Return the end of each unit's last action. `times` has one entry per stage."""
    clock, position = [0.0] * len(lists), [0] * len(lists)
    wires: dict[tuple[int, Action], deque[float]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for unit, actions in enumerate(lists):
            while position[unit] < len(actions):
                action = actions[position[unit]]
                stage = unit if action.stage < 0 else action.stage
                if action.kind.receives:
                    wire = wires[unit, action]
                    if not wire:
                        break
                    clock[unit] = max(clock[unit], wire.popleft())
                elif action.kind.computes:
                    clock[unit] += times[stage].of(action.kind)
                else:
                    hop_s = times[stage if action.kind is Kind.SEND_F else stage - 1].hop_s
                    wires[message_of(unit, action, len(lists))].append(clock[unit] + hop_s)
                position[unit] += 1
                moved = True
    assert position == [len(actions) for actions in lists], "the units deadlock"
    return tuple(clock)
