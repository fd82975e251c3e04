"""Runs the action lists of a pipeline against the clock of the cost model: when does each action begin and end?

A stage runs its list in order; a receive waits until the neighbour's message is there; a message is there `hop_s`
after it was sent; sending takes no time of the sender. This is what the engine does, and so the finest
prediction that the planner has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planning.schedule import Action


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
