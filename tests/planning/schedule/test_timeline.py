"""The simulated clock against the closed forms of the literature."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.types import Pipeline, Stage, Unit
from elastic.planning.schedule import timeline
from elastic.planning.schedule.schedule import actions_of, lists
from elastic.planning.schedule.timeline import StageTimes, simulate
from tests.planning.schedule.message_simulation import finish_times

seconds = st.integers(1, 40).map(lambda n: n / 8)
"""Exact in binary, so that sums are too."""
counts = st.integers(1, 20)


def times(f: float, bi: float, bw: float, hop: float = 0.0) -> StageTimes:
    return StageTimes(
        forward_s=f, backward_s=bi + bw, backward_input_s=bi, backward_weight_s=bw, hop_s=hop
    )


def makespan(schedule: str, units: int, stages: list[StageTimes], n: int) -> float:
    found = timeline.makespan(schedule, units, n, stages)
    sent = lists(schedule, units, len(stages), tuple(range(n)))
    assert found == max(finish_times(sent, stages)), "the same message by message, to the last bit"
    return found


def pipeline_of(schedule: str, n_stages: int, n: int) -> Pipeline:
    """One stage per unit."""
    stages = tuple(Stage(Unit(f"n{s}"), s, s + 1) for s in range(n_stages))
    return Pipeline(stages, tuple(range(n)), schedule)


@given(depth=st.integers(1, 8), n=counts, f=seconds, b=seconds)
def test_1f1b_of_equal_stages(depth: int, n: int, f: float, b: float) -> None:
    """Bubble (D-1)(f+b)."""
    assert makespan("1f1b", depth, [times(f, b, 0)] * depth, n) == (n + depth - 1) * (f + b)


@given(depth=st.integers(1, 8), n=counts, f=seconds, bi=seconds, share=st.integers(1, 8))
def test_zero_bubble_of_equal_stages(depth: int, n: int, f: float, bi: float, share: int) -> None:
    """ZB-H1: bubble (D-1)(f+bi-bw), while weight parts are no longer than the others and fill all
    gaps."""
    bw = min(f, bi) * share / 8
    bubble = (depth - 1) * (f + bi) - (min(depth, n) - 1) * bw
    assert (
        makespan("zero-bubble", depth, [times(f, bi, bw)] * depth, n) == n * (f + bi + bw) + bubble
    )


@given(units=st.integers(2, 6), chunks=st.sampled_from([2, 4]), extra=counts, f=seconds, b=seconds)
def test_interleaved_of_equal_stages(
    units: int, chunks: int, extra: int, f: float, b: float
) -> None:
    """Bubble (D-1)(f+b)/v, also where the micro-batches are no multiple of the units."""
    n = units + extra - 1
    expected = n * (f + b) + (units - 1) * (f + b) / chunks
    assert (
        makespan("interleaved", units, [times(f / chunks, b / chunks, 0)] * (units * chunks), n)
        == expected
    )


uneven = st.lists(
    st.builds(times, seconds, seconds, seconds, st.integers(0, 4).map(float)),
    min_size=1,
    max_size=6,
)


@given(
    data=st.data(),
    n=counts,
    ratio=st.sampled_from([0.5, 1.0, 2.0]),
    part=st.sampled_from([0.25, 0.5, 0.75]),
)
def test_uneven_stages_are_bounded(data: st.DataObject, n: int, ratio: float, part: float) -> None:
    """sum + (m-1) max is an upper bound where the backward pass is as many forward passes on every
    stage."""
    sizes = data.draw(st.lists(st.tuples(seconds, st.integers(0, 4)), min_size=1, max_size=6))
    stages = [times(f, f * ratio * part, f * ratio * (1 - part), hop) for f, hop in sizes]
    tau = [s.forward_s + s.backward_s + 2 * s.hop_s for s in stages]
    tau[-1] -= 2 * stages[-1].hop_s
    for schedule in ("1f1b", "zero-bubble"):
        assert makespan(schedule, len(stages), stages, n) <= sum(tau) + (n - 1) * max(tau) + 1e-9


@given(stages=uneven, n=counts)
def test_no_stage_can_be_outrun(stages: list[StageTimes], n: int) -> None:
    """Never faster than the way to a stage and all of its work."""
    for schedule in ("1f1b", "zero-bubble"):
        found = makespan(schedule, len(stages), stages, n)
        for s, stage in enumerate(stages):
            way_in = sum(st.forward_s + st.hop_s for st in stages[:s])
            assert found >= way_in + n * (stage.forward_s + stage.backward_s)


@given(stages=uneven, n=counts)
def test_spans_follow_each_other(stages: list[StageTimes], n: int) -> None:
    pipeline = pipeline_of("zero-bubble", len(stages), n)
    timeline = simulate(pipeline, stages)
    finish = finish_times(actions_of(pipeline), stages)
    for unit, stage in enumerate(stages):
        spans = [span for span in timeline.spans if timeline.unit_of(span) == unit]
        assert len(spans) == n * (2 if unit == 0 else 3)
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        assert timeline.busy_s[unit] == n * (stage.forward_s + stage.backward_s)
        assert finish[unit] == spans[-1].end_s
    assert timeline.makespan_s == max(finish)


@given(
    schedule=st.sampled_from(["1f1b", "zero-bubble", "interleaved"]),
    units=st.integers(2, 5),
    n=counts,
    data=st.data(),
)
def test_uneven_stages_agree_with_the_messages(
    schedule: str, units: int, n: int, data: st.DataObject
) -> None:
    stage = st.builds(times, *[st.floats(0, 3)] * 4)
    chunks = data.draw(st.sampled_from([2, 3])) if schedule == "interleaved" else 1
    stages = data.draw(st.lists(stage, min_size=units * chunks, max_size=units * chunks))
    makespan(schedule, units, stages, n)


def test_messages_take_their_time() -> None:
    """One micro-batch through two stages: there, and back."""
    assert (
        makespan("1f1b", 2, [times(1, 1, 1, hop=0.5), times(2, 2, 2, hop=9)], 1)
        == 1 + 0.5 + 6 + 0.5 + 2
    )


def test_nothing_takes_no_time() -> None:
    assert simulate(pipeline_of("1f1b", 2, 0), [times(1, 1, 1)] * 2).makespan_s == 0.0


def test_an_early_receive_delays_what_stands_before_its_use() -> None:
    """Two units exchange messages in one order, so unit 1 receives the gradient of micro-batch 0
    before the activations of micro-batch 3."""
    stages = [times(0, 0, 0), times(0, 0, 0, hop=1.0), times(1, 0, 0), times(0, 0, 0)]
    assert makespan("interleaved", 2, stages, 5) == 9.0
    stages = [times(1, 1, 0), times(1, 1, 0), times(1, 1, 0), times(5, 5, 0)]
    timeline_of = simulate(interleaved(4, 5), stages)
    assert len(timeline_of.spans) == 5 * 4 * 2 and sum(timeline_of.busy_s) == 5 * (3 * 2 + 10)


def interleaved(n_stages: int, n: int) -> Pipeline:
    """Two units, with every second stage each."""
    stages = tuple(Stage(Unit(f"n{s % 2}"), s, s + 1) for s in range(n_stages))
    return Pipeline(stages, tuple(range(n)), "interleaved")
