"""Schedules: what one stage does in a step, as a list of actions that prints, parses and can be checked.

A stage runs its actions in order. Receives wait for the neighbour, sends never wait for it (up to a bound on
the number of messages under way), and messages between two stages arrive in the order in which they were
sent.

    F3  forward pass of micro-batch 3    SF3  activations to the next stage        RF3  from the previous one
    B3  backward pass                    SB3  gradient to the previous stage       RB3  from the next one

`validate` runs all stages' lists against each other without computing anything, and so finds what would hang.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic.errors import FieldError


class Kind(StrEnum):
    """What an action does; the value is how it prints."""

    F = "F"
    B = "B"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"

    @property
    def computes(self) -> bool:
        return self in (Kind.F, Kind.B)

    @property
    def receives(self) -> bool:
        """The stage may have to wait for a neighbour here."""
        return self in (Kind.RECV_F, Kind.RECV_B)


_TEXT = re.compile(r"([A-Z]+)(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`. Raises FieldError."""
        match = _TEXT.fullmatch(text)
        kinds = {kind.value: kind for kind in Kind}
        if match is None or match[1] not in kinds:
            raise FieldError("action", text, f"one of {', '.join(kinds)} and a micro-batch number, as in SF3")
        return cls(kinds[match[1]], int(match[2]))


def format_actions(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def parse_actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def one_f_one_b(stage: int, n_stages: int, microbatches: tuple[int, ...]) -> tuple[Action, ...]:
    """The 1F1B list of `stage`: one forward pass ahead per stage behind it, then one of each in turn.

    At most `n_stages - stage` micro-batches are between their forward and backward pass at any moment.
    """
    if not 0 <= stage < n_stages:
        raise FieldError("stage", stage, f"between 0 and {n_stages - 1}")
    first, last = stage == 0, stage == n_stages - 1
    ahead = min(n_stages - stage - 1, len(microbatches))
    actions: list[Action] = []

    def forward(m: int) -> None:
        actions.extend([] if first else [Action(Kind.RECV_F, m)])
        actions.append(Action(Kind.F, m))
        actions.extend([] if last else [Action(Kind.SEND_F, m)])

    def backward(m: int) -> None:
        actions.extend([] if last else [Action(Kind.RECV_B, m)])
        actions.append(Action(Kind.B, m))
        actions.extend([] if first else [Action(Kind.SEND_B, m)])

    for m in microbatches[:ahead]:
        forward(m)
    for m, done in zip(microbatches[ahead:], microbatches, strict=False):
        forward(m)
        backward(done)
    for m in microbatches[len(microbatches) - ahead :]:
        backward(m)
    return tuple(actions)


def validate(stages: Sequence[Sequence[Action]], *, unreceived: int | None = None) -> tuple[int, ...]:
    """Check the lists of a whole pipeline, first stage first, and run them dry.

    Args:
        stages: one action list a stage.
        unreceived: messages under way to one neighbour before a send waits; None: any number.

    Returns:
        Per stage, the most micro-batches that are between F and B at once: what activation memory must hold.

    Raises:
        FieldError: an action is missing, doubled or out of place, or the stages would wait for each other for
        ever.
    """
    _check_same_microbatches(stages)
    in_flight = tuple(_check_stage(s, len(stages), actions) for s, actions in enumerate(stages))
    _dry_run(stages, unreceived)
    return in_flight


def _check_same_microbatches(stages: Sequence[Sequence[Action]]) -> None:
    sets = [frozenset(a.microbatch for a in actions if a.kind is Kind.F) for actions in stages]
    for s, found in enumerate(sets):
        if found != sets[0]:
            odd = sorted(found ^ sets[0])
            raise FieldError(
                f"stage {s}", odd, "all stages run the same micro-batches; these differ from stage 0's"
            )


def _needs(stage: int, n_stages: int) -> dict[Kind, Kind | None]:
    """Kinds that a stage uses, each with the kind that must come before it for the same micro-batch."""
    needs: dict[Kind, Kind | None] = {Kind.F: None, Kind.B: Kind.F}
    if stage > 0:
        needs |= {Kind.RECV_F: None, Kind.F: Kind.RECV_F, Kind.SEND_B: Kind.B}
    if stage < n_stages - 1:
        needs |= {Kind.SEND_F: Kind.F, Kind.RECV_B: Kind.SEND_F, Kind.B: Kind.RECV_B}
    return needs


def _check_stage(stage: int, n_stages: int, actions: Sequence[Action]) -> int:
    """Each action exactly once and after what it needs. Return the most micro-batches in flight."""
    needs, done, in_flight, most = _needs(stage, n_stages), set[Action](), 0, 0
    for i, action in enumerate(actions):
        where = f"stage {stage} action {i}"
        if action.kind not in needs:
            raise FieldError(where, str(action), f"stage {stage} of {n_stages} has no neighbour on that side")
        if action in done:
            raise FieldError(where, str(action), "it is there already")
        before = needs[action.kind]
        if before is not None and Action(before, action.microbatch) not in done:
            raise FieldError(where, str(action), f"it must come after {before.value}{action.microbatch}")
        done.add(action)
        in_flight += (action.kind is Kind.F) - (action.kind is Kind.B)
        most = max(most, in_flight)
    microbatches = {action.microbatch for action in actions}
    missing = sorted(str(a) for m in microbatches for k in needs if (a := Action(k, m)) not in done)
    if missing:
        raise FieldError(f"stage {stage}", missing, "these actions are missing")
    return most


def _dry_run(stages: Sequence[Sequence[Action]], unreceived: int | None) -> None:
    """Run all lists against each other; messages are micro-batch numbers in queues."""
    position = [0] * len(stages)
    wires: dict[tuple[int, int], deque[int]] = {}

    def advance(s: int) -> bool:
        action = stages[s][position[s]]
        other = s + 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else s - 1
        if action.kind.receives:
            wire = wires.setdefault((other, s), deque())
            if wire and wire[0] != action.microbatch:
                text = f"stage {other} sends micro-batch {wire[0]} first; receive in the order of sending"
                raise FieldError(f"stage {s} action {position[s]}", str(action), text)
            if not wire:
                return False
            wire.popleft()
        elif not action.kind.computes:
            wire = wires.setdefault((s, other), deque())
            if unreceived is not None and len(wire) >= unreceived:
                return False
            wire.append(action.microbatch)
        position[s] += 1
        return True

    moved = True
    while moved:
        moved = False
        for s in range(len(stages)):
            while position[s] < len(stages[s]) and advance(s):
                moved = True
    stuck = [f"stage {s} at {stages[s][p]}" for s, p in enumerate(position) if p < len(stages[s])]
    if stuck:
        raise FieldError("schedule", "; ".join(stuck), "they wait for each other for ever: reorder")
