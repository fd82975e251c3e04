"""Action lists of partial replays: they terminate and run every micro-batch exactly once."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.types import PartialRun, Pipeline, Stage, Unit
from elastic.planning.schedule.partial_schedule import excerpt, groups
from elastic.planning.schedule.schedule import Action, Kind, message_of


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Pipelines of one to four units and up to twelve stages, under any schedule."""
    n_units = draw(st.integers(1, 4))
    chunks = draw(st.integers(2, 3)) if n_units > 1 and draw(st.booleans()) else 1
    sizes = draw(st.lists(st.integers(1, 3), min_size=n_units * chunks, max_size=n_units * chunks))
    ends = list(itertools.accumulate(sizes))
    stages = tuple(
        Stage(Unit(f"n{s % n_units}"), end - size, end)
        for s, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    schedule = "interleaved" if chunks > 1 else draw(st.sampled_from(("1f1b", "zero-bubble")))
    return Pipeline(stages, (), schedule)


@given(pipelines(), st.data())
@settings(max_examples=300, deadline=None)
def test_excerpts_terminate_and_run_everything_once(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    n_layers = pipeline.stages[-1].last
    runs: list[PartialRun] = []
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, n_layers - 1))
        last = data.draw(st.integers(first + 1, n_layers))
        count = data.draw(st.integers(1, 5))
        runs += [PartialRun(0, len(runs) + i, first, last) for i in range(count)]
    n_units = len({stage.unit for stage in pipeline.stages})
    rows: list[list[Action]] = [[] for _ in range(n_units)]
    for (first, last), group in groups(runs, 0):
        lists = excerpt(pipeline, first, last, tuple(run.microbatch for run in group))
        inside = [
            s
            for s, stage in enumerate(pipeline.stages)
            if stage.first < last and stage.last > first
        ]
        expected = sorted((run.microbatch, s) for run in group for s in inside)
        for kind in (Kind.F, Kind.B):
            done = [
                (action.microbatch, action.stage if action.stage >= 0 else u)
                for u, row in enumerate(lists)
                for action in row
                if action.kind is kind
            ]
            assert sorted(done) == expected
        for row, more in zip(rows, lists, strict=True):
            row.extend(more)
    play(rows)


def play(rows: list[list[Action]]) -> None:
    """Simulate all units. A receive must match the next message of its sender."""
    n_units = len(rows)
    queues: dict[tuple[int, int], list[Action]] = {}
    at = [0] * n_units
    while any(at[u] < len(rows[u]) for u in range(n_units)):
        moved = False
        for u in range(n_units):
            while at[u] < len(rows[u]):
                action = rows[u][at[u]]
                if action.kind.receives:
                    step = -1 if action.kind is Kind.RECV_F else 1
                    queue = queues.get(((u + step) % n_units, u), [])
                    if not queue:
                        break
                    assert queue.pop(0) == action, "messages arrive in an unexpected order"
                elif not action.kind.computes:
                    other, receive = message_of(u, action, n_units)
                    queues.setdefault((u, other), []).append(receive)
                at[u] += 1
                moved = True
        assert moved, f"deadlock at {[row[i : i + 1] for row, i in zip(rows, at, strict=True)]}"
    assert not any(queues.values())


def test_runs_of_the_same_layers_are_grouped() -> None:
    runs = [
        PartialRun(0, 0, 0, 2),
        PartialRun(0, 1, 0, 2),
        PartialRun(1, 2, 0, 2),
        PartialRun(0, 3, 2, 4),
    ]
    assert [(span, [r.microbatch for r in group]) for span, group in groups(runs, 0)] == [
        ((0, 2), [0, 1]),
        ((2, 4), [3]),
    ]
