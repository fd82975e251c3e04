"""Validation of a pipeline's action lists by a dry run that detects deadlocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.domain.errors import FieldError
from elastic.planning.schedule.schedule import Action, Kind, message_of


def validate(
    lists: Sequence[Sequence[Action]], *, unreceived: int | None = None
) -> tuple[int, ...]:
    """Check the lists of a whole pipeline and run them without computing.

    Args:
        lists: one action list per unit, first unit first. Stage s is on unit s % len(lists).
        unreceived: maximum unreceived messages of one unit; its next send waits. None: no limit.

    Returns:
        Per unit, the most micro-batches in flight at once (`most_in_flight`).

    Raises:
        FieldError: an action is missing, doubled or out of order, or the units deadlock.
    """
    n_stages = max([len(lists), *(a.stage + 1 for actions in lists for a in actions)])
    for unit, actions in enumerate(lists):
        _check_unit(unit, len(lists), n_stages, actions)
    _check_same_microbatches(lists, n_stages)
    _dry_run(lists, unreceived)
    return tuple(int(most_in_flight(actions)) for actions in lists)


def most_in_flight(actions: Sequence[Action], weights: Mapping[int, float] | None = None) -> float:
    """Return the most activations that a unit holds at once: those of a micro-batch in a stage,
    from F until B or W. `weights`: their bytes per stage; None: each counts as 1.

    It is independent of `elastic.planning.schedule.schedule.peak`, which the planner uses.
    """
    held: set[tuple[int, int]] = set()
    most = 0.0
    for action in actions:
        place = action.stage, action.microbatch
        if action.kind is Kind.F:
            held.add(place)
        elif action.kind in (Kind.B, Kind.WEIGHT):
            held.remove(place)
        most = max(most, sum(weights[stage] if weights else 1.0 for stage, _ in held))
    return most


def _check_unit(unit: int, n_units: int, n_stages: int, actions: Sequence[Action]) -> None:
    """Check that each action occurs exactly once, after its dependencies."""
    done: set[Action] = set()
    for i, action in enumerate(actions):
        where = f"unit {unit} action {i}"
        stage = unit if action.stage < 0 else action.stage
        if stage % n_units != unit or (action.stage < 0 and n_stages > n_units):
            raise FieldError(where, str(action), f"its stage is not on this unit ({n_units} units)")
        needs = _needs(stage, n_stages)
        if action.kind not in needs:
            raise FieldError(
                where, str(action), f"stage {stage} of {n_stages} has no neighbour on that side"
            )
        if action in done:
            raise FieldError(where, str(action), "it is a duplicate; remove it")
        before = [Action(kind, action.microbatch, action.stage) for kind in needs[action.kind]]
        if before and not done.intersection(before):
            raise FieldError(
                where, str(action), f"it must come after {' or '.join(map(str, before))}"
            )
        done.add(action)
    missing = sorted(str(action) for action in _missing(n_stages, unit, done))
    if missing:
        raise FieldError(f"unit {unit}", missing, "these actions are missing or redundant")


def _needs(stage: int, n_stages: int) -> dict[Kind, tuple[Kind, ...]]:
    """Return the kinds that a stage uses, each with its alternative predecessors."""
    gradient = (Kind.F,) if stage == n_stages - 1 else (Kind.RECV_B,)
    needs: dict[Kind, tuple[Kind, ...]] = {
        Kind.F: () if stage == 0 else (Kind.RECV_F,),
        Kind.B: gradient,
        Kind.INPUT: gradient,
        Kind.WEIGHT: (Kind.INPUT,),
    }
    if stage > 0:
        needs |= {Kind.RECV_F: (), Kind.SEND_B: (Kind.B, Kind.INPUT)}
    if stage < n_stages - 1:
        needs |= {Kind.SEND_F: (Kind.F,), Kind.RECV_B: (Kind.SEND_F,)}
    return needs


def _missing(n_stages: int, unit: int, done: set[Action]) -> set[Action]:
    """Return missing actions, and parts I and W that duplicate a whole B."""
    wanted: set[Action] = set()
    for m, number in {(action.microbatch, action.stage) for action in done}:
        stage = unit if number < 0 else number
        whole = Action(Kind.B, m, number) in done
        parts = {Kind.INPUT, Kind.WEIGHT}
        kinds = set(_needs(stage, n_stages)) - (parts if whole else {Kind.B})
        wanted |= {Action(kind, m, number) for kind in kinds}
        if whole:
            wanted |= {action for kind in parts if (action := Action(kind, m, number)) in done}
            done = done - {Action(kind, m, number) for kind in parts}
    return wanted - done


def _check_same_microbatches(lists: Sequence[Sequence[Action]], n_stages: int) -> None:
    sets: list[set[int]] = [set() for _ in range(n_stages)]
    for unit, actions in enumerate(lists):
        for action in actions:
            sets[unit if action.stage < 0 else action.stage].add(action.microbatch)
    for stage, found in enumerate(sets):
        if found != sets[0]:
            remedy = "all stages run the same micro-batches; these differ from stage 0's"
            raise FieldError(f"stage {stage}", sorted(found ^ sets[0]), remedy)


@dataclass(slots=True)
class _Message:
    """A message in flight, as the action that receives it."""

    action: Action
    received: bool = False


def _dry_run(lists: Sequence[Sequence[Action]], unreceived: int | None) -> None:
    """Run all lists together; each pair of units has one queue per direction."""
    n_units, position = len(lists), [0] * len(lists)
    wires: dict[tuple[int, int], deque[_Message]] = {}
    sent: list[deque[_Message]] = [deque() for _ in lists]

    def advance(unit: int) -> bool:
        action = lists[unit][position[unit]]
        if action.kind.receives:
            other = (unit + (1 if action.kind is Kind.RECV_B else -1)) % n_units
            wire = wires.setdefault((other, unit), deque())
            if not wire:
                return False
            if wire[0].action != action:
                text = (
                    f"unit {other} sends the message of {wire[0].action} first; "
                    "receive in the order of sending"
                )
                raise FieldError(f"unit {unit} action {position[unit]}", str(action), text)
            wire.popleft().received = True
        elif not action.kind.computes:
            under_way = sent[unit]
            while under_way and under_way[0].received:
                under_way.popleft()
            if unreceived is not None and len(under_way) >= unreceived:
                return False
            other, message = message_of(unit, action, n_units)
            under_way.append(_Message(message))
            wires.setdefault((unit, other), deque()).append(under_way[-1])
        position[unit] += 1
        return True

    moved = True
    while moved:
        moved = False
        for unit in range(n_units):
            while position[unit] < len(lists[unit]) and advance(unit):
                moved = True
    stuck = [f"unit {u} at {lists[u][p]}" for u, p in enumerate(position) if p < len(lists[u])]
    if stuck:
        raise FieldError("schedule", "; ".join(stuck), "the units deadlock: reorder the actions")
