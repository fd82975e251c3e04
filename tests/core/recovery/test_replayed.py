"""The micro-batches that a lost unit can have begun, in every schedule."""

from __future__ import annotations

import pytest

from elastic.core.protocol.messages import Halted
from elastic.core.recovery.recovery import replayed_microbatches
from elastic.planning.plan.plan import parse_plan, validate_plan

M = 12
ORDER = tuple(range(M))
ALL = frozenset(ORDER)

PIPELINES = {
    "1f1b": "schedule=1f1b: a[0:2] b[2:4] c[4:6] d[6:8]",
    "zero-bubble": "schedule=zero-bubble: a[0:2] b[2:4] c[4:6] d[6:8]",
    "interleaved": "schedule=interleaved: a[0:1] b[1:2] c[2:3] d[3:4] a[4:5] b[5:6] c[6:7] d[7:8]",
}


def begun(schedule: str, lost: str, saved: int, gradients: str) -> frozenset[int]:
    """`lost` received every micro-batch, and the first `saved` of its layers are in vaults."""
    head = f"plan epoch=1 layers=8 microbatches={2 * M} tp=1 backup={gradients}+snapshot"
    other = f"pipeline 1 microbatches={M}-{2 * M - 1} schedule=1f1b: e[0:4] f[4:8]"
    plan = parse_plan(f"{head}\npipeline 0 microbatches=0-{M - 1} {PIPELINES[schedule]}\n{other}")
    validate_plan(plan)
    everything = {node: Halted(2, 0, ALL, ALL) for node in plan.nodes() if node != lost}
    covered = dict.fromkeys(range(8), frozenset((*range(saved), *range(M, 2 * M))))
    orders = [ORDER, range(M, 2 * M)]
    return replayed_microbatches(plan, frozenset({lost}), ALL, everything, 0, orders, covered)


@pytest.mark.parametrize(
    ("schedule", "lost", "saved", "expected", "gradients"),
    [
        ("1f1b", "a", 0, 6, "stream"),
        ("1f1b", "b", 3, 8, "stream"),
        ("1f1b", "d", 3, 6, "stream"),
        ("1f1b", "d", 11, 12, "stream"),
        ("1f1b", "d", 4, 10, "stream:2"),
        ("1f1b", "a", 2, 11, "stream:2"),
        ("1f1b", "d", 0, 12, "stream:6"),
        ("1f1b", "d", 0, 12, "recompute"),
        ("1f1b", "d", 3, 6, "reduce"),
        ("1f1b", "b", 3, 8, "reduce"),
        ("1f1b", "d", 4, 10, "reduce:2"),
        ("1f1b", "d", 5, 10, "reduce:2"),
        ("1f1b", "d", 0, 12, "reduce:6"),
        ("zero-bubble", "a", 0, 6, "stream"),
        ("zero-bubble", "b", 0, 6, "stream"),
        ("zero-bubble", "d", 3, 9, "stream"),
        ("zero-bubble", "d", 9, 12, "stream"),
        ("zero-bubble", "d", 3, 9, "reduce"),
        ("interleaved", "a", 0, 9, "stream"),
        ("interleaved", "d", 0, 7, "stream"),
        ("interleaved", "d", 8, 12, "stream"),
        ("interleaved", "d", 0, 8, "reduce"),
    ],
)
def test_a_lost_unit_is_bounded_by_its_actions_and_saved_copies(
    schedule: str, lost: str, saved: int, expected: int, gradients: str
) -> None:
    """Begun are the saved ones, up to three copies or rounds, and those before their backward pass.

    Interleaved stages have one round more. Without copies and rounds there is no bound.
    """
    assert begun(schedule, lost, saved, gradients) == frozenset(range(expected))
