"""Stages of the interleaved schedule: cut as well as can be, valid, and refused where they do not
fit."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import FieldError
from elastic.domain.types import Pipeline, Plan, Stage, Unit
from elastic.planning.plan.plan import validate_plan
from elastic.planning.schedule.interleave import can_interleave, interleave, scheduled


def pipeline_of(n_units: int, n_layers: int, recompute: bool = False) -> Pipeline:
    """A pipeline whose last unit has what the others leave."""
    units = [Unit(f"n{i}") for i in range(n_units)]
    ends = [*range(n_units), n_layers]
    spans = zip(units, pairwise(ends), strict=True)
    return Pipeline(tuple(Stage(unit, a, b, recompute) for unit, (a, b) in spans), (0, 1, 2))


seconds = st.integers(1, 20).map(float)


@given(n_units=st.integers(2, 3), data=st.data())
def test_no_cut_has_a_faster_slowest_stage(n_units: int, data: st.DataObject) -> None:
    n_layers = data.draw(st.integers(2 * n_units, 9))
    times = [
        data.draw(st.lists(seconds, min_size=n_layers, max_size=n_layers)) for _ in range(n_units)
    ]

    def slowest(ends: tuple[int, ...]) -> float:
        return max(sum(times[s % n_units][a:b]) for s, (a, b) in enumerate(pairwise(ends)))

    pipeline = interleave(pipeline_of(n_units, n_layers), times)
    plan = Plan(epoch=0, n_layers=n_layers, n_microbatches=3, tp=1, pipelines=(pipeline,))
    validate_plan(plan)
    inner = combinations(range(1, n_layers), 2 * n_units - 1)
    best = min(slowest((0, *ends, n_layers)) for ends in inner)
    assert slowest((0, *(stage.last for stage in pipeline.stages))) == pytest.approx(best)


def test_units_keep_their_order_and_their_recomputation() -> None:
    pipeline = interleave(pipeline_of(2, 12, recompute=True), [[1.0] * 12] * 2, chunks=3)
    assert [stage.unit.node for stage in pipeline.stages] == ["n0", "n1"] * 3
    assert [stage.last for stage in pipeline.stages] == [2, 4, 6, 8, 10, 12]
    assert all(stage.recompute for stage in pipeline.stages)


def test_too_few_layers_or_units() -> None:
    assert can_interleave(4, 2) and not can_interleave(3, 2) and not can_interleave(9, 1)
    with pytest.raises(FieldError, match="4 layers"):
        interleave(pipeline_of(2, 3), [[1.0] * 3] * 2)


def test_a_schedule_is_taken_where_it_fits() -> None:
    times = [[1.0] * 4] * 2
    assert scheduled(pipeline_of(2, 4), "interleaved", times).schedule == "interleaved"
    assert scheduled(pipeline_of(2, 4), "zero-bubble", times).schedule == "zero-bubble"
    for schedule in ("auto", "1f1b"):
        assert scheduled(pipeline_of(2, 4), schedule, times).schedule == "1f1b"
    assert scheduled(pipeline_of(1, 4), "zero-bubble", times[:1]).schedule == "1f1b"
    assert scheduled(pipeline_of(2, 3), "interleaved", [[1.0] * 3] * 2).schedule == "1f1b"
