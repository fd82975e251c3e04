"""Emulated layers: their waits, their sizes, and values that depend on the job alone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, Profile
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.split_backward import backward_input
from elastic.worker.profiling.emulated import EmulatedStack, PassTimer
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import CPU, sgd
from tests.worker.passes import forward

TIMES = LayerTimes(forward_s=0.3, backward_s=0.7, backward_input_s=0.4, backward_weight_s=0.5)
LAYER = LayerSpec(
    param_bytes=60,
    state_bytes=0,
    gradient_bytes=60,
    forward_s=0.3,
    backward_s=0.7,
    output_bytes=1000,
)


def profile(times: LayerTimes = TIMES, n: int = 3) -> Profile:
    other = replace(times, forward_s=2 * times.forward_s)
    devices = (Device("fast", (times,) * n), Device("slow", (other,) * n))
    return Profile(model="toy", layers=(LAYER,) * n, devices=devices)


class RecordedWaits(list[tuple[Any, float]]):
    """Replaces a PassTimer: records the waits and returns at once."""

    def wait(self, action: tuple[object, ...], began: float, seconds: float) -> None:
        self.append((action, seconds))

    def take(self) -> list[float]:
        found = [round(seconds, 6) for _, seconds in self]
        self.clear()
        return found


def replicas(stack: EmulatedStack) -> list[LayerReplica]:
    built = (
        build_replica(stack, i, TensorParallel(), sgd(), Accumulate.EXACT, 7, CPU)
        for i in range(stack.n_layers)
    )
    return list(built)


def run_layers(
    layers: list[LayerReplica], index: int, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    for layer in layers:
        hidden = forward(layer, hidden, Microbatch(0, index, {}))
    assert hidden is not None
    return hidden


def gradients(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    found = [p.grad for p in parameters if p.grad is not None]
    assert len(found) == len(parameters)
    return found


@pytest.fixture
def waits() -> RecordedWaits:
    return RecordedWaits()


def stack(waits: RecordedWaits, device: str = "", times: LayerTimes = TIMES) -> EmulatedStack:
    made = EmulatedStack(profile(times), device, seed=1)
    made._timer = waits  # type: ignore[assignment]
    return made


def test_whole_pass(waits: RecordedWaits) -> None:
    layers = replicas(stack(waits))
    out = run_layers(layers, 0)
    assert waits.take() == [0.3, 0.3, 0.3]
    torch.autograd.backward(out)
    assert sum(waits.take()) == pytest.approx(3 * 0.7)


def test_other_device_type(waits: RecordedWaits) -> None:
    run_layers(replicas(stack(waits, "slow")), 0)
    assert waits.take() == [0.6, 0.6, 0.6]
    with pytest.raises(FieldError, match="fast, slow"):
        EmulatedStack(profile(), "none", 1)


def test_separate_parts_of_the_backward_pass(waits: RecordedWaits) -> None:
    """Each part waits for its own time. Both together may take longer than the whole pass."""
    layers = replicas(stack(waits))[1:]
    given = torch.ones(250, requires_grad=True)
    out = run_layers(layers, 0, given)
    waits.take()
    weights = [p for layer in layers for p in layer.module.parameters()]
    rest = backward_input([out], [torch.ones(())], [given], weights)
    assert waits.take() == [0.4, 0.4]
    assert given.grad is not None and given.grad.shape == given.shape
    rest.run()
    assert waits.take() == [0.5, 0.5]
    in_parts = gradients(weights)
    for p in weights:
        p.grad = None
    torch.autograd.backward(run_layers(layers, 0, given))
    assert all(map(torch.equal, in_parts, gradients(weights)))


@pytest.mark.parametrize("parts", [(0.0, 0.0), (0.4, 0.0), (0.0, 0.5), (0.9, 0.8)])
def test_unknown_parts(waits: RecordedWaits, parts: tuple[float, float]) -> None:
    """The whole pass takes its time even if the times of the parts are unknown."""
    times = LayerTimes(0.3, 0.7, *parts)
    layers = replicas(stack(waits, times=times))
    out = run_layers(layers, 0)
    waits.take()
    torch.autograd.backward(out)
    assert sum(waits.take()) == pytest.approx(3 * 0.7)


def test_sizes() -> None:
    layers = replicas(EmulatedStack(profile(LayerTimes(0.0, 0.0)), "", 1))
    assert [layer.module.get_parameter("weight").nbytes for layer in layers] == [60] * 3
    assert run_layers(layers[:2], 0).nbytes == 1000
    assert run_layers(layers, 0).shape == ()
    specs = EmulatedStack(profile(), "", 1).specs(Accumulate.FAST)
    assert specs == (LAYER,) * 3


def test_values_depend_on_the_job_alone() -> None:
    """Rebuilt layers give the same loss and gradients; another micro-batch gives others."""

    def run(index: int) -> tuple[float, list[torch.Tensor]]:
        layers = replicas(EmulatedStack(profile(LayerTimes(0.0, 0.0)), "", 1))
        out = run_layers(layers, index)
        torch.autograd.backward(out)
        for layer in layers:
            layer.collect(index, skip=False)
        return float(out.detach()), [layer.gradient for layer in layers]

    (loss, gradients), (again, same), (other, others) = run(3), run(3), run(4)
    assert loss == again != other
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert all(bool(g[:15].ne(0).all()) for g in gradients)


def test_a_lost_element_changes_the_result() -> None:
    last = replicas(EmulatedStack(profile(LayerTimes(0.0, 0.0)), "", 1))[-1:]
    whole = torch.full((250,), 0.5)
    changed = whole.clone()
    changed[77] = 0.0
    assert not torch.equal(run_layers(last, 0, whole), run_layers(last, 0, changed))


def test_tensor_parallel_is_refused() -> None:
    with pytest.raises(FieldError, match="tensor parallelism"):
        EmulatedStack(profile(), "", 1).tensor_parallel(0, 2, "", CPU)


def test_delays_of_single_waits_do_not_add_up() -> None:
    """A hundred waits never end before one long wait would."""
    timer, began = PassTimer(), time.perf_counter()
    for _ in range(100):
        timer.wait((0, "a"), time.perf_counter(), 0.001)
    assert time.perf_counter() - began >= 0.1


def test_a_late_wait_shortens_the_next_action() -> None:
    """The delay of a wait shortens the next one; time between actions does not."""
    timer = PassTimer()
    timer.wait((0, "a"), time.perf_counter() - 0.01, 0.005)
    assert timer._carryover_s >= 0.005
    began = time.perf_counter()
    timer.wait((1, "b"), began, 0.04)
    assert time.perf_counter() - began >= 0.02
    assert timer._deadline < began + 0.04


def test_cpu_time_between_two_actions_shortens_the_second() -> None:
    """This holds within a step. Work at the end of a step counts as part of the step."""
    for step, hidden in ((0, True), (1, False)):
        timer = PassTimer()
        timer.wait((0, "a"), time.perf_counter(), 0.0)
        used = time.thread_time()
        while time.thread_time() - used < 0.01:
            pass
        timer._carryover_s = 0.0
        began = time.perf_counter()
        timer.wait((step, "b"), began, 0.04)
        assert (timer._deadline <= began + 0.031) is hidden
