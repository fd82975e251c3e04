"""Emulated layers: what they wait for, what they move, and that their contents depend on nothing but the job."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, Profile
from elastic.worker.model.layers import Microbatch, TensorParallel
from elastic.worker.model.split_backward import backward_input
from elastic.worker.profiling.emulated import EmulatedStack, Waiter
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import CPU, sgd

TIMES = LayerTimes(forward_s=0.3, backward_s=0.7, backward_input_s=0.4, backward_weight_s=0.5)
LAYER = LayerSpec(
    param_bytes=60, state_bytes=0, gradient_bytes=60, forward_s=0.3, backward_s=0.7, output_bytes=1000
)


def profile(times: LayerTimes = TIMES, n: int = 3) -> Profile:
    other = replace(times, forward_s=2 * times.forward_s)
    devices = (Device("fast", (times,) * n), Device("slow", (other,) * n))
    return Profile(model="toy", layers=(LAYER,) * n, devices=devices)


class Waits(list[tuple[Any, float]]):
    """Stands in for a Waiter: remembers instead of waiting."""

    def until(self, action: tuple[object, ...], began: float, seconds: float) -> None:
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


def through(layers: list[LayerReplica], index: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
    for layer in layers:
        hidden = layer.forward(hidden, Microbatch(0, index, {}))
    assert hidden is not None
    return hidden


@pytest.fixture
def waits() -> Waits:
    return Waits()


def stack(waits: Waits, device: str = "", times: LayerTimes = TIMES) -> EmulatedStack:
    made = EmulatedStack(profile(times), device, seed=1)
    made._waiter = waits  # type: ignore[assignment]
    return made


def test_whole_pass(waits: Waits) -> None:
    layers = replicas(stack(waits))
    out = through(layers, 0)
    assert waits.take() == [0.3, 0.3, 0.3]
    torch.autograd.backward(out)
    assert sum(waits.take()) == pytest.approx(3 * 0.7)


def test_other_device_type(waits: Waits) -> None:
    through(replicas(stack(waits, "slow")), 0)
    assert waits.take() == [0.6, 0.6, 0.6]
    with pytest.raises(FieldError, match="fast, slow"):
        EmulatedStack(profile(), "none", 1)


def test_parts_of_the_backward_pass_apart(waits: Waits) -> None:
    """Each part waits its own time; together they may take longer than the whole."""
    layers = replicas(stack(waits))[1:]
    given = torch.ones(250, requires_grad=True)
    out = through(layers, 0, given)
    waits.take()
    weights = [p for layer in layers for p in layer.module.parameters()]
    rest = backward_input(out, torch.ones(()), given, weights)
    assert waits.take() == [0.4, 0.4]
    assert given.grad is not None and given.grad.shape == given.shape
    rest.run()
    assert waits.take() == [0.5, 0.5]
    apart = [p.grad for p in weights]
    for p in weights:
        p.grad = None
    torch.autograd.backward(through(layers, 0, given))
    assert all(a is not None and torch.equal(a, p.grad) for a, p in zip(apart, weights, strict=True))


@pytest.mark.parametrize("parts", [(0.0, 0.0), (0.4, 0.0), (0.0, 0.5), (0.9, 0.8)])
def test_unknown_parts(waits: Waits, parts: tuple[float, float]) -> None:
    """The whole pass takes its time whatever is known of the parts."""
    times = LayerTimes(0.3, 0.7, *parts)
    layers = replicas(stack(waits, times=times))
    out = through(layers, 0)
    waits.take()
    torch.autograd.backward(out)
    assert sum(waits.take()) == pytest.approx(3 * 0.7)


def test_sizes() -> None:
    layers = replicas(EmulatedStack(profile(LayerTimes(0.0, 0.0)), "", 1))
    assert [layer.module.get_parameter("weight").nbytes for layer in layers] == [60] * 3
    assert through(layers[:2], 0).nbytes == 1000
    assert through(layers, 0).shape == ()
    specs = EmulatedStack(profile(), "", 1).specs(Accumulate.FAST)
    assert specs == (LAYER,) * 3


def test_contents_depend_on_the_job_alone() -> None:
    """Loss and gradients: the same from layers that were built anew, other ones for another micro-batch."""

    def run(index: int) -> tuple[float, list[torch.Tensor]]:
        layers = replicas(EmulatedStack(profile(LayerTimes(0.0, 0.0)), "", 1))
        out = through(layers, index)
        torch.autograd.backward(out)
        for layer in layers:
            layer.collect(index, skip=False)
        return float(out.detach()), [layer.gradient for layer in layers]

    (loss, gradients), (again, same), (other, others) = run(3), run(3), run(4)
    assert loss == again != other
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert all(bool(g[:15].ne(0).all()) for g in gradients)


def test_a_lost_element_shows() -> None:
    last = replicas(EmulatedStack(profile(LayerTimes(0.0, 0.0)), "", 1))[-1:]
    whole = torch.full((250,), 0.5)
    torn = whole.clone()
    torn[77] = 0.0
    assert not torch.equal(through(last, 0, whole), through(last, 0, torn))


def test_tensor_parallel_is_refused() -> None:
    with pytest.raises(FieldError, match="tensor parallelism"):
        EmulatedStack(profile(), "", 1).build(0, CPU, TensorParallel(0, 2))


def test_waits_do_not_add_up_their_errors() -> None:
    """A hundred waits end where one long one would: never before, and late by one wait's error at most."""
    waiter, began = Waiter(), time.perf_counter()
    for _ in range(100):
        waiter.until((0, "a"), time.perf_counter(), 0.001)
    assert time.perf_counter() - began >= 0.1


def test_a_new_action_begins_when_it_is_begun() -> None:
    """What a wait was late is taken off the next one; time between actions is not."""
    waiter = Waiter()
    waiter.until((0, "a"), time.perf_counter() - 0.01, 0.005)
    assert waiter._owed >= 0.005
    began = time.perf_counter()
    waiter.until((1, "b"), began, 0.04)
    assert time.perf_counter() - began >= 0.02
    assert waiter._deadline < began + 0.04


def test_what_the_engine_computes_between_two_actions_is_taken_off() -> None:
    """Within a step; the work at the end of a step is the step's own."""
    for step, hidden in ((0, True), (1, False)):
        waiter = Waiter()
        waiter.until((0, "a"), time.perf_counter(), 0.0)
        used = time.thread_time()
        while time.thread_time() - used < 0.01:
            pass
        waiter._owed = 0.0
        began = time.perf_counter()
        waiter.until((step, "b"), began, 0.04)
        assert (waiter._deadline <= began + 0.031) is hidden
