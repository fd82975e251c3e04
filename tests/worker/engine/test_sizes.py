"""Micro-batches of different sizes: the time of a stage is that of one of typical size."""

from __future__ import annotations

import pytest
import torch

from elastic.core.protocol.messages import BackupTraffic
from elastic.domain.types import Accumulate
from elastic.planning.schedule.schedule import Action, Kind
from elastic.worker.control import step_timing
from elastic.worker.control.step_timing import StepTimer
from elastic.worker.engine.stage import LocalStage
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Message, Value, rows_of
from tests.worker.engine.models import WIDTH, RecordingHooks, replicas, single_rank_links, stack
from tests.worker.model.toy_model import CPU

ROWS = (2, 8, 4)
"""Rows of each micro-batch."""


def data(step: int, index: int) -> Microbatch:
    fields = {name: torch.ones(ROWS[index], WIDTH) for name in ("x", "y")}
    return Microbatch(step, index, fields)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (torch.zeros(2, 5, 8), 10),
        ((torch.zeros(4, dtype=torch.long), torch.zeros(3), torch.zeros(3, 4)), 3),
        ({"hidden": torch.zeros(6, 2), "other": torch.zeros(9, 9)}, 6),
        (torch.zeros(()), 0),
        (torch.zeros(3, 0), 0),
    ],
)
def test_rows_are_the_tokens_of_a_value(value: Value, rows: int) -> None:
    assert rows_of(value) == rows


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("typical", [4, 0])
def test_the_cost_of_a_microbatch_is_that_of_its_rows(typical: int, recompute: bool) -> None:
    layers = replicas(stack(4), range(4), Accumulate.FAST)
    stage = LocalStage(layers, number=0, recompute=recompute)
    runner = StageRunner(
        [stage], single_rank_links(), n_microbatches=len(ROWS), typical_rows=typical, data=data
    )
    costs: dict[tuple[Kind, int], float] = {}

    class Hooks(RecordingHooks):
        last: Action | None = None

        def note(self) -> None:
            if self.last is not None:
                costs[self.last.kind, self.last.microbatch] = runner.cost(self.last)

        def before(self, action: Action) -> None:
            self.note()
            self.last = action

        def on_backward(self, index: int) -> None:
            self.note()

    actions = [Action(kind, m, 0) for m in range(len(ROWS)) for kind in (Kind.F, Kind.B)]
    runner.run(0, actions, {}, Hooks())
    wanted = {m: rows / typical if typical else 1.0 for m, rows in enumerate(ROWS)}
    assert costs == {(a.kind, a.microbatch): wanted[a.microbatch] for a in actions}


def test_a_later_stage_knows_the_rows_from_what_it_receives() -> None:
    layers = replicas(stack(4), range(2, 4), Accumulate.FAST)
    stage = LocalStage(layers, previous=0, number=1)
    hidden = torch.ones(8, WIDTH)
    stage.forward(data(0, 1), Message.of(hidden))
    assert stage.rows == {1: 8}


def test_times_are_divided_by_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that are twice as long take twice as long."""
    now = [0.0]
    monkeypatch.setattr(step_timing, "mark", lambda device: now[0])
    timer = StepTimer(CPU, lambda: False)
    for cost in (2.0, 0.5, 1.0):
        for kind, seconds in ((Kind.F, 0.1), (Kind.B, 0.2)):
            timer.begin(Action(kind, 0, 0))
            now[0] += seconds * cost
            timer.end(cost)
    taken = timer.take(1, 3, 0, BackupTraffic())
    assert taken is not None
    assert taken.forward_s == pytest.approx(0.1) and taken.backward_s == pytest.approx(0.2)
