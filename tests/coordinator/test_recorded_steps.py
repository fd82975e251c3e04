"""The set of recorded steps, which is kept as ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.coordinator.records import recorded_steps
from elastic.coordinator.records.recorded_steps import (
    RecordedLines,
    RecordedSteps,
    lines_in,
    recorded_in,
)
from elastic.telemetry import EventLog, event_line

KINDS = ("step", "evaluation")
STEPS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), max_size=40)


@given(STEPS)
def test_it_is_a_set(steps: list[tuple[int, int]]) -> None:
    made, wanted = RecordedSteps(), set[tuple[int, int]]()
    for epoch, step in steps:
        assert made.add(epoch, step) == ((epoch, step) not in wanted)
        wanted.add((epoch, step))
        every = [(e, s) for e in range(5) for s in range(-1, 14)]
        assert {one for one in every if one in made} == wanted


def test_steps_that_follow_each_other_take_no_memory() -> None:
    made = RecordedSteps((1, step) for step in (*range(0, 9000, 2), *range(1, 9000, 2)))
    assert made._ranges == {1: [[0, 8999]]}


@pytest.mark.parametrize("piece", [200, 1 << 20])
def test_all_steps_of_a_log_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Also those that two pieces share."""
    monkeypatch.setattr(recorded_steps, "PIECE_BYTES", piece)
    file = EventLog(tmp_path / "events.jsonl")
    for step in range(100):
        file.write(event_line("lost", {"node": "node0", "step": step}))
        fields = {"epoch": 7 + step // 50, "step": step, "loss": 1.0}
        file.write(event_line("step", fields, at=1234567890.123456))
        if step % 10 == 0:
            file.write(event_line("evaluation", {**fields, "figures": {}}, at=1234567890.5))
    found = RecordedLines(lines_in(file))
    file.close()
    steps, evaluations = found._kinds[b"step"], found._kinds[b"evaluation"]
    assert steps._ranges == {7: [[0, 49]], 8: [[50, 99]]}
    assert [first for part in evaluations._ranges.values() for first, _ in part] == [
        *range(0, 100, 10)
    ]


def test_a_step_is_no_evaluation() -> None:
    found = RecordedLines([(b"step", 1, 2)])
    same, other = (recorded_in(event_line(k, {"epoch": 1, "step": 2, "loss": 1.0})) for k in KINDS)
    assert same is not None and same in found
    assert other is not None and other not in found
    assert recorded_in(event_line("lost", {"epoch": 1, "step": 2})) is None
