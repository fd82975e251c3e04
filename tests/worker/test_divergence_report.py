"""What a worker reports about its replicas and copies when the holders of a layer disagree."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from elastic.core.protocol.messages import Diverged, Published
from elastic.domain.errors import DivergenceError
from elastic.domain.types import (
    PARAMETERS,
    WHOLE,
    Accumulate,
    Divergence,
    EvaluationResult,
    Portion,
    Unit,
)
from elastic.planning.plan.plan import parse_plan
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.epoch_session import EpochSession
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.transport.cancellation import AbandonSignal
from tests.worker.model.toy_model import ALONE, CPU

PLAN = parse_plan(
    "plan epoch=1 layers=1 microbatches=2 tp=1 backup=recompute+snapshot/sharded\n"
    "pipeline 0 microbatches=0: a[0:1]\n"
    "pipeline 1 microbatches=1: b[0:1]\n"
)


class Layer(nn.Linear):
    """A layer whose forward pass no test runs."""

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


STACK = ListStack([lambda: Layer(16, 16, bias=False)], 1)
SECOND = 1, 2
"""Portion of node b: elements 128 to 255."""


class Worker:
    """The worker of node b with its only layer."""

    def __init__(
        self, directory: Path, portion: Portion = SECOND, copy_device: torch.device | None = None
    ) -> None:
        self._said: list[Diverged] = []
        self.publisher = Publisher(self._acknowledge, directory, "b", copy_device=copy_device)
        self.layer = build_replica(
            STACK, 0, ALONE, adamw(0.1), Accumulate.EXACT, 7, CPU, portion=portion
        )
        self.protection = Protection(
            self.publisher, PLAN, "b", [self.layer], AbandonSignal(), lambda message: None, ()
        )
        self.protection.enter()
        self.publisher.settle()

    def _acknowledge(self, published: Published) -> None:
        self.publisher.on_acked(published.bundle)

    def update(self) -> None:
        self.layer.update(self.layer.gradient.clone(), 1.0, 0.1)
        self.protection.after_update()
        self.publisher.settle()

    def flip(self, element: int) -> None:
        weight = next(iter(self.layer.parameters)).detach().view(-1)
        weight.view(torch.int32)[element] ^= 1 << 20

    def report(self) -> Diverged:
        session = EpochSession.__new__(EpochSession)
        session._order = cast(Any, SimpleNamespace(epoch=1))
        session._context = cast(
            Any,
            SimpleNamespace(
                unit=Unit("b"),
                replicas={0: self.layer},
                protection=self.protection,
                agent=SimpleNamespace(send=self._said.append),
                evaluated=EvaluationResult(self.layer.version, 1, 0.5, 4, 0.1),
            ),
        )
        found = Divergence(0, 0, PARAMETERS, (("a", "x"), ("b", "y")))
        session._report_divergence(DivergenceError(self.layer.version, (found,)))
        assert session._context.evaluated is None, "the wrong layer may have taken part in it"
        return self._said[-1]


@pytest.mark.parametrize(("element", "sound"), [(3, True), (200, False)])
def test_a_copy_of_the_last_update_is_right_whatever_changed_since(
    tmp_path: Path, element: int, sound: bool
) -> None:
    """It was made before the holders exchanged the parameters that now differ."""
    worker = Worker(tmp_path)
    worker.update()
    worker.flip(element)
    report = worker.report()
    assert report.sound == (("b", 0, 0, sound),)
    assert report.portions == (("b", 0, 0, *SECOND),)


@pytest.mark.parametrize("copy_device", [None, CPU], ids=["first-copy", "background-copy"])
def test_a_later_copy_is_right_only_if_the_state_differs_from_it(
    tmp_path: Path, copy_device: torch.device | None
) -> None:
    """A bit may have flipped before the epoch's first copy, or before a background copy read it."""
    worker = Worker(tmp_path, copy_device=copy_device)
    if copy_device is not None:
        worker.update()
    assert worker.report().sound == (("b", 0, 0, True),) and not worker.report().portions
    worker.flip(200)
    assert worker.report().portions == (("b", 0, 0, *SECOND),)


def test_a_whole_state_is_no_portion(tmp_path: Path) -> None:
    worker = Worker(tmp_path, WHOLE)
    worker.update()
    assert worker.report().sound == (("b", 0, 0, True),) and not worker.report().portions
