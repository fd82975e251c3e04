"""Schedules: the action list of each unit in a step, with its text form.

A unit runs its actions in order. A receive waits for the message. A send does not wait unless too
many messages are in flight. Messages between two units arrive in the order of sending.

    F3  forward pass of micro-batch 3  SF3  send activations to the next stage
                                       RF3  receive activations from the previous stage
    B3  backward pass                  SB3  send the gradient to the previous stage
                                       RB3  receive the gradient from the next stage
    I3  part of B3 that computes the gradient of the stage's input
    W3  part of B3 that computes the gradients of the parameters

If a unit has several stages, the stage number comes first: 2F3 is F3 of stage 2.
`docs/design/schedules.md` has drawings.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from elastic.domain.errors import FieldError
from elastic.domain.types import Pipeline, Unit

ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = SCHEDULES = ("1f1b", "interleaved", "zero-bubble")


class Kind(StrEnum):
    """Kind of an action. The value is its text form."""

    F = "F"
    B = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"

    @property
    def computes(self) -> bool:
        return self in (Kind.F, Kind.B, Kind.INPUT, Kind.WEIGHT)

    @property
    def receives(self) -> bool:
        """Whether the unit may wait for a neighbour here."""
        return self in (Kind.RECV_F, Kind.RECV_B)

    @property
    def finishes(self) -> bool:
        """Whether the action completes a micro-batch's gradients and frees its activations."""
        return self in (Kind.B, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    microbatch: int
    stage: int = -1
    """Stage of the pipeline; -1: the only stage of the unit."""

    def __str__(self) -> str:
        return f"{'' if self.stage < 0 else self.stage}{self.kind.value}{self.microbatch}"


Lists = tuple[tuple[Action, ...], ...]
"""Actions of each unit of a pipeline, in the order of `units_of`."""


def units_of(pipeline: Pipeline) -> tuple[Unit, ...]:
    """Return the distinct units of a pipeline, in the order of their first stages."""
    return tuple(dict.fromkeys(stage.unit for stage in pipeline.stages))


def actions_of(pipeline: Pipeline, microbatches: tuple[int, ...] | None = None) -> Lists:
    """Return the actions of the units of `pipeline`, in the order of `units_of`.

    `microbatches` defaults to those of the pipeline. Raises FieldError as `lists` does.
    """
    indices = pipeline.microbatches if microbatches is None else microbatches
    return lists(pipeline.schedule, len(units_of(pipeline)), len(pipeline.stages), indices)


@lru_cache(maxsize=64)
def lists(schedule: str, n_units: int, n_stages: int, microbatches: tuple[int, ...]) -> Lists:
    """Return the action lists of a schedule. Stage s is on unit s % n_units.

    Raises FieldError if the schedule is unknown or does not fit the numbers.
    """
    return _connect(computing(schedule, n_units, n_stages, microbatches), n_stages)


def computing(
    schedule: str, n_units: int, n_stages: int, microbatches: Sequence[int]
) -> list[Iterator[Action]]:
    """Return each unit's compute actions, without messages. Raises FieldError as `lists` does."""
    check_stages(schedule, n_units, n_stages)
    if schedule == INTERLEAVED:
        chunks = n_stages // n_units
        return [_interleaved(u, n_units, chunks, microbatches) for u in range(n_units)]
    order = _one_f_one_b if schedule == ONE_F_ONE_B else _zero_bubble
    return [order(s, n_stages, microbatches) for s in range(n_stages)]


def check_stages(schedule: str, n_units: int, n_stages: int) -> None:
    """Raise FieldError if `schedule` is unknown or does not fit the stages and units."""
    if schedule not in SCHEDULES:
        raise FieldError("schedule", schedule, f"one of {', '.join(SCHEDULES)}")
    if schedule != INTERLEAVED and n_stages != n_units:
        remedy = f"a unit takes one stage under {schedule}: give each its own, or use {INTERLEAVED}"
        raise FieldError("schedule", f"{n_stages} stages on {n_units} units", remedy)
    if schedule == INTERLEAVED and (n_units < 2 or n_stages % n_units or n_stages < 2 * n_units):
        remedy = (
            f"{INTERLEAVED} takes at least 2 units, each with the same number of stages, at least 2"
        )
        raise FieldError("schedule", f"{n_stages} stages on {n_units} units", remedy)


def _one_f_one_b(stage: int, n_stages: int, microbatches: Sequence[int]) -> Iterator[Action]:
    """Yield 1F1B (PipeDream-Flush): warm-up forwards, alternation, then the remaining backwards.

    At most `n_stages - stage` micro-batches are in flight. Source: Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training".
    """
    ahead = min(n_stages - stage - 1, len(microbatches))
    for m in microbatches[:ahead]:
        yield Action(Kind.F, m)
    for m, done in zip(microbatches[ahead:], microbatches, strict=False):
        yield Action(Kind.F, m)
        yield Action(Kind.B, done)
    for m in microbatches[len(microbatches) - ahead :]:
        yield Action(Kind.B, m)


def _zero_bubble(stage: int, n_stages: int, microbatches: Sequence[int]) -> Iterator[Action]:
    """Yield ZB-H1: 1F1B with backward passes split into an input part and a weight part.

    Stage s delays its weight parts by s micro-batches. So gradients reach the first stage earlier,
    and the delayed parts fill the bubble at the end. At most min(n_stages, micro-batches) are in
    flight, as on the first stage of 1F1B. The first stage would run both parts in a row, so it runs
    whole backward passes. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
    """
    late: deque[int] = deque()
    for action in _one_f_one_b(stage, n_stages, microbatches):
        if stage == 0 or action.kind is Kind.F:
            yield action
            continue
        yield Action(Kind.INPUT, action.microbatch)
        late.append(action.microbatch)
        if len(late) > stage:
            yield Action(Kind.WEIGHT, late.popleft())
    for m in late:
        yield Action(Kind.WEIGHT, m)


def _interleaved(
    unit: int, n_units: int, chunks: int, microbatches: Sequence[int]
) -> Iterator[Action]:
    """Yield interleaved 1F1B.

    A unit runs a group of micro-batches through one of its stages, then through its next one.
    Groups of exactly `n_units` keep all units busy with the least memory (Megatron-LM requires
    them). Here any number of micro-batches runs: group sizes differ by at most one, and are at
    least `n_units` unless there are fewer micro-batches. Source: Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters".
    """
    groups = _groups(microbatches, n_units)
    forwards = [(c, m) for group in groups for c in range(chunks) for m in group]
    backwards = [(c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    largest = max(map(len, groups), default=0)
    ahead = min((chunks - 1) * largest + 2 * (n_units - unit - 1), len(forwards))
    for c, m in forwards[:ahead]:
        yield Action(Kind.F, m, c * n_units + unit)
    for (c, m), (done, n) in zip(forwards[ahead:], backwards, strict=False):
        yield Action(Kind.F, m, c * n_units + unit)
        yield Action(Kind.B, n, done * n_units + unit)
    for c, m in backwards[len(forwards) - ahead :]:
        yield Action(Kind.B, m, c * n_units + unit)


def _groups(microbatches: Sequence[int], least: int) -> list[Sequence[int]]:
    """Return as many groups of at least `least` as possible (or one group), larger groups first."""
    n_groups = max(1, len(microbatches) // least)
    size, larger = divmod(len(microbatches), n_groups)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(n_groups)]
    return [microbatches[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


def _connect(compute: Sequence[Iterable[Action]], n_stages: int) -> Lists:
    """Return the actions with sends after the producers, and receives before the consumers.

    A unit receives messages in the order in which the other unit sends them. If it needs a later
    one first, it also receives the earlier ones then. They have arrived already, unless their
    transfer takes longer.
    """
    sent = [tuple(_with_sends(u, actions, n_stages)) for u, actions in enumerate(compute)]
    n_units, queues = len(sent), defaultdict[tuple[int, int], deque[Action]](deque)
    for u, actions in enumerate(sent):
        for action in actions:
            if not action.kind.computes:
                other, receive = message_of(u, action, n_units)
                queues[u, other].append(receive)

    def with_receives(u: int, actions: Sequence[Action]) -> tuple[Action, ...]:
        def incoming(step: int) -> deque[Action]:
            return queues[(u + step) % n_units, u]

        return tuple(_with_receives(u, actions, n_stages, incoming))

    return tuple(with_receives(u, actions) for u, actions in enumerate(sent))


def _with_sends(unit: int, actions: Iterable[Action], n_stages: int) -> Iterator[Action]:
    for action in actions:
        yield action
        stage = unit if action.stage < 0 else action.stage
        if action.kind is Kind.F and stage < n_stages - 1:
            yield Action(Kind.SEND_F, action.microbatch, action.stage)
        elif action.kind in (Kind.B, Kind.INPUT) and stage > 0:
            yield Action(Kind.SEND_B, action.microbatch, action.stage)


def message_of(unit: int, send: Action, n_units: int) -> tuple[int, Action]:
    """Return the destination unit of `send` and the action that receives it."""
    step = 1 if send.kind is Kind.SEND_F else -1
    kind = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
    stage = -1 if send.stage < 0 else send.stage + step
    return (unit + step) % n_units, Action(kind, send.microbatch, stage)


def _with_receives(
    unit: int, actions: Iterable[Action], n_stages: int, sender: Callable[[int], deque[Action]]
) -> Iterator[Action]:
    """Yield `actions` with receives. `sender`: queue from the next (1) or previous (-1) unit."""
    here: set[Action] = set()
    for action in actions:
        stage = unit if action.stage < 0 else action.stage
        kind, step = (Kind.RECV_F, -1) if action.kind is Kind.F else (Kind.RECV_B, 1)
        if action.kind in (Kind.F, Kind.B, Kind.INPUT) and 0 <= stage + step < n_stages:
            needed = Action(kind, action.microbatch, action.stage)
            while needed not in here:
                here.add(received := sender(step).popleft())
                yield received
        yield action


def peak(actions: Sequence[Action], weights: Mapping[int, float] | None = None) -> float:
    """Return the maximum number of micro-batches in flight, which is from F until B or W.

    Each stage of the unit counts separately. With `weights` (stage -> bytes of one micro-batch's
    activations; key -1 if actions name no stage) the result is in bytes.
    """
    held = most = 0.0
    for action in actions:
        weight = 1.0 if weights is None else weights[action.stage]
        held += weight * ((action.kind is Kind.F) - action.kind.finishes)
        most = max(most, held)
    return most
