"""What a lost unit can have begun, by its list: under every schedule."""

from __future__ import annotations

import pytest

from elastic.core.messages import Halted
from elastic.core.recovery import replayed
from elastic.planning.plan import parse_plan, validate_plan

M = 12
ORDER = tuple(range(M))
ALL = frozenset(ORDER)

PIPELINES = {
    "1f1b": "schedule=1f1b: a[0:2] b[2:4] c[4:6] d[6:8]",
    "zero-bubble": "schedule=zero-bubble: a[0:2] b[2:4] c[4:6] d[6:8]",
    "interleaved": "schedule=interleaved: a[0:1] b[1:2] c[2:3] d[3:4] a[4:5] b[5:6] c[6:7] d[7:8]",
}


def begun(schedule: str, lost: str, saved: int, gradients: str = "stream") -> frozenset[int]:
    """Everything was handed to `lost`, whose layers had the first `saved` micro-batches in safety."""
    head = f"plan epoch=1 layers=8 microbatches={M} tp=1 backup={gradients}+snapshot"
    plan = parse_plan(f"{head}\npipeline 0 microbatches=0-{M - 1} {PIPELINES[schedule]}")
    validate_plan(plan)
    everything = {node: Halted(2, 0, ALL, ALL) for node in plan.nodes() if node != lost}
    covered = dict.fromkeys(range(8), frozenset(range(saved)))
    return replayed(plan, frozenset({lost}), ALL, everything, 0, orders=[ORDER], covered=covered)


@pytest.mark.parametrize(
    ("schedule", "lost", "saved", "expected"),
    [
        ("1f1b", "a", 0, 6),
        ("1f1b", "b", 3, 8),
        ("1f1b", "d", 3, 6),
        ("1f1b", "d", 11, 12),
        ("zero-bubble", "a", 0, 6),
        ("zero-bubble", "b", 0, 6),
        ("zero-bubble", "d", 3, 9),
        ("zero-bubble", "d", 9, 12),
        ("interleaved", "a", 0, 9),
        ("interleaved", "d", 0, 7),
        ("interleaved", "d", 8, 12),
    ],
)
def test_a_lost_unit_was_no_further_than_its_list(
    schedule: str, lost: str, saved: int, expected: int
) -> None:
    """The saved ones, three whose copies were not acknowledged or made, and those between forward and backward pass."""
    assert begun(schedule, lost, saved) == frozenset(range(expected))


@pytest.mark.parametrize(
    ("gradients", "lost", "saved", "expected"),
    [
        ("stream:2", "d", 4, 10),
        ("stream:2", "a", 2, 11),
        ("stream:6", "d", 0, 12),
        ("recompute", "d", 0, 12),
    ],
)
def test_rarer_copies_leave_more_in_doubt(gradients: str, lost: str, saved: int, expected: int) -> None:
    """Under 1F1B: three copies' worth beyond the saved ones, and what is in flight; without copies everything."""
    assert begun("1f1b", lost, saved, gradients) == frozenset(range(expected))
