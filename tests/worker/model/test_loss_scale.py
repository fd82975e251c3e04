"""Loss scaling: the rule of torch's GradScaler, and small gradients that float16 cannot hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, OnNonfinite
from elastic.worker.engine.commit import Commit
from elastic.worker.engine.stage import _with_gradients
from elastic.worker.engine.step import StepChecks, judge
from elastic.worker.model.gradients import to_flat
from elastic.worker.model.layers import ListStack
from elastic.worker.model.loss_scale import LossScale, RunningScale
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec, adamw
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import SKIPPED, LayerReplica
from tests.worker.model.toy_model import ALONE, CPU

WIDTH = 16
TINY = 2.0**-30
"""Derivative of the loss, less than float16 can hold."""


class Layer(nn.Module):
    """A product in float16, whose loss has a tiny derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float16)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        x = torch.arange(WIDTH, dtype=torch.float16)[None] / WIDTH
        out: Tensor = self.linear(x)
        return (out.float() * TINY * 2.0**microbatch.index).sum()


def spec(scale: LossScale | None) -> OptimizerSpec:
    return adamw(0.1, master_weights=True, loss_scale=scale)


def replica(scale: LossScale | None, accumulate: Accumulate = Accumulate.EXACT) -> LayerReplica:
    stack = ListStack([Layer], seed=1)
    return build_replica(stack, 0, ALONE, spec(scale), accumulate, 7, CPU, n_microbatches=4)


def backward(layer: LayerReplica, index: int = 0) -> None:
    loss = layer.forward(None, Microbatch(layer.version, index, {}))
    assert isinstance(loss, Tensor)
    loss.backward(torch.tensor(layer.loss_scale.value))  # type: ignore[no-untyped-call]
    layer.collect(index, skip=False)


@pytest.mark.parametrize("accumulate", list(Accumulate))
def test_gradients_that_float16_cannot_hold(accumulate: Accumulate) -> None:
    found = []
    for scale in (None, LossScale()):
        layer = replica(scale, accumulate)
        backward(layer)
        backward(layer, 1)
        found.append(to_flat(layer.gradient)[:WIDTH])
    assert not found[0].any(), "they vanish"
    wanted = torch.arange(WIDTH) / WIDTH * TINY * 3
    torch.testing.assert_close(found[1], wanted, rtol=1e-3, atol=1e-13)


@pytest.mark.parametrize("accumulate", list(Accumulate))
def test_an_overflow_is_not_finite(accumulate: Accumulate) -> None:
    layer = replica(LossScale(initial=2.0**24), accumulate)
    backward(layer, 24)
    assert not math.isfinite(layer.norm_sq(layer.gradient))


def test_a_loss_in_float16_that_the_factor_overflows_is_infinite() -> None:
    """As in torch: the update is left out, and the factor falls."""
    for value, wanted in ((65504.0, 65504.0), (65536.0, math.inf), (-1e9, -math.inf)):
        loss = torch.zeros((), dtype=torch.float16, requires_grad=True)
        (_, gradients) = _with_gradients(loss * 1, value)
        assert gradients[0].dtype == torch.float16 and float(gradients[0]) == wanted


def test_float16_parameters_need_masters() -> None:
    wrong = adamw(0.1, loss_scale=LossScale())
    with pytest.raises(FieldError, match=r"master_weights: False .*with loss_scale, .*set it to"):
        build_replica(ListStack([Layer], seed=1), 0, ALONE, wrong, Accumulate.FAST, 7, CPU)


@pytest.mark.parametrize("initial", [2.0**16, 2.0])
def test_the_rule_is_that_of_torch(initial: float) -> None:
    """torch's factor may fall below 1, so the steps do not let it."""
    ours = RunningScale(LossScale(initial=initial, growth_interval=3))
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=3)
    for version, finite in enumerate("yyynyyyyyynynyyy", 1):
        weight.grad = torch.full((1,), 1.0 if finite == "y" else math.inf)
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        (ours.updated if finite == "y" else ours.skipped)(version)
        assert ours.value == theirs.get_scale()


def test_the_factor_has_bounds() -> None:
    scale = RunningScale(LossScale(initial=2.0, growth_interval=1))
    for version in range(1, 40):
        scale.updated(version)
    assert scale.value == 2.0**24 and scale.can_fall
    for version in range(40, 90):
        scale.skipped(version)
    assert scale.value == 1.0 and not scale.can_fall


def test_the_factor_moves_with_the_state() -> None:
    layer, fresh = (replica(LossScale(growth_interval=2)) for _ in range(2))
    values = []
    for skipped in (True, False, False, False, True):
        backward(layer)
        if skipped:
            layer.skip_update()
        else:
            layer.update(layer.gradient.clone(), 1.0, 0.1)
        layer.clear()
        values.append(layer.loss_scale.value)
        fresh.read_state(layer.state_run())
        assert torch.equal(fresh.state_run(), layer.state_run())
        assert fresh.loss_scale.value == layer.loss_scale.value
    assert values == [2.0**15, 2.0**15, 2.0**16, 2.0**16, 2.0**15]
    fresh.skip_update()
    layer.skip_update()
    assert torch.equal(fresh.state_run(), layer.state_run())


def test_a_repeated_update_changes_the_factor_too() -> None:
    layer, other = (replica(LossScale(growth_interval=1)) for _ in range(2))
    backward(layer)
    taken = layer.update_input(layer.gradient, 1.0)
    layer.update(layer.gradient.clone(), 1.0, 0.1)
    layer.skip_update()
    other.apply_update(taken.view(torch.uint8), 0.1)
    assert other.loss_scale.value == 2.0**17
    other.apply_update(torch.frombuffer(bytearray(SKIPPED), dtype=torch.uint8), 0.1)
    assert torch.equal(other.state_run(), layer.state_run())


def test_a_state_without_a_factor_begins_anew() -> None:
    """The checkpoint of a run without loss scaling."""
    old, fresh = replica(None), replica(LossScale(growth_interval=2))
    for layer in (old, fresh):
        for _ in range(3):
            layer.skip_update()
    fresh.read_state(old.state_run())
    assert fresh.loss_scale.value == 2.0**16
    fresh.loss_scale.updated(4)
    assert fresh.loss_scale.value == 2.0**16
    fresh.loss_scale.updated(5)
    assert fresh.loss_scale.value == 2.0**17
    old.read_state(fresh.state_run())
    assert old.loss_scale.value == 1.0


@pytest.mark.parametrize("policy", list(OnNonfinite))
def test_an_overflow_leaves_the_update_out(
    policy: OnNonfinite, caplog: pytest.LogCaptureFixture
) -> None:
    agreed = Commit(norm=math.nan, weight=4.0, loss=1.5, halt_epoch=-1, nonfinite=(2,))
    checks = StepChecks(on_nonfinite=policy)
    scale = RunningScale(LossScale())
    record = judge(3, agreed, 4.0, 1.0, checks, 1.0, loss_scale=scale)
    assert record.skipped and record.nonfinite == (2,)
    assert "the loss scale of 65536 is halved, without an update" in caplog.text


def test_a_loss_that_is_nan_ends_the_job_when_the_factor_cannot_fall() -> None:
    from elastic.domain.errors import NonfiniteError

    agreed = Commit(norm=math.nan, weight=4.0, loss=math.nan, halt_epoch=-1, nonfinite=(2,))
    scale = RunningScale(LossScale(initial=1.0))
    with pytest.raises(NonfiniteError, match="the gradient norm is nan"):
        judge(3, agreed, 4.0, 1.0, StepChecks(), 1.0, loss_scale=scale)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossScale(initial=1000.0), "LossScale.initial: 1000.0 is not usable"),
        (lambda: LossScale(initial=0.5), "LossScale.initial: 0.5 is not usable"),
        (lambda: LossScale(initial=math.inf), "LossScale.initial: inf is not usable"),
        (lambda: LossScale(initial=True), "LossScale.initial: True is not usable"),
        (lambda: LossScale(growth_interval=0), "LossScale.growth_interval"),
        (lambda: spec(65536.0), "OptimizerSpec.loss_scale: 65536.0 .*LossScale"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        make()
